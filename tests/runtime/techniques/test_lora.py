"""Adapters on frozen weights: what is trained, under every plan alike, and as peft has it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import FrozenWeights, Lora
from meshwright.planner.errors import LaunchError
from meshwright.planner.frameworks import native_limits as native
from meshwright.runtime.checkpoint.checkpoint import Progress, load
from meshwright.runtime.checkpoint.weight_export import to_huggingface, to_peft
from meshwright.runtime.checkpoint.writer import Saver
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch.training_loop import token_engine
from tests.parts import some_and_others
from tests.runtime import cases, chains
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import errors, train_all

CPU = torch.device("cpu")
ATTENTION = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "o_proj"))
EVERY = Lora(rank=4, alpha=8.0)


def plan(model: ModelGraph, lora: Lora = EVERY, **layout: Any) -> Plan:
    made = cases.plan(model, **layout)
    # B is zero at first, and so is A's gradient, but for rounding: see `epsilon` in cases.plan.
    training = made.training.model_copy(update={"lora": lora})
    return made.model_copy(update={"training": training})


def test_only_adapters_are_trained_and_kept() -> None:
    model = cases.transformer("llama")
    engine = token_engine(plan(model, ATTENTION), model, device=CPU)
    before = {name: p.detach().clone() for name, p in frozen(engine).items()}

    for step in range(3):
        engine.step(cases.global_tokens(step))

    names = {name for name in engine.state() if name.startswith("model.")}
    assert names == {
        f"model.model.layers.{block}.self_attn.{module}.lora_{which}"
        for block in range(3)
        for module in ("q_proj", "v_proj", "o_proj")
        for which in "ab"
    }
    for name, parameter in frozen(engine).items():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def frozen(engine: Engine) -> dict[str, torch.nn.Parameter]:
    named = engine._parts[0].module.named_parameters()
    return {name: p for name, p in named if not p.requires_grad}


def test_training_begins_where_the_frozen_model_stands() -> None:
    model = cases.transformer("llama")
    batch = cases.global_tokens(0)

    whole = token_engine(cases.plan(model), model, device=CPU).evaluate(batch).loss
    adapted = token_engine(plan(model), model, device=CPU)

    assert adapted.evaluate(batch).loss == pytest.approx(whole, rel=1e-6)
    for _ in range(5):
        adapted.step(batch)
    assert adapted.evaluate(batch).loss < whole - 1e-3


def test_sixteen_bit_training_keeps_frozen_weights_in_sixteen_bits() -> None:
    model = cases.transformer("llama")
    engine = token_engine(plan(model, precision="bf16"), model, device=CPU)
    engine.step(cases.global_tokens(0))
    types = {p.dtype for p in frozen(engine).values()}
    assert types == {torch.bfloat16}
    assert {slot.local.dtype for slot in engine._optimizers.slots} == {torch.float32}


@pytest.mark.parametrize("weights", ["full", "nf4"])
def test_what_is_resident_has_frozen_weights_once(weights: FrozenWeights) -> None:
    """A launch on a CPU counts live tensors from these on; a checkpoint has the adapters alone."""
    model = cases.transformer("llama", hidden_size=128, heads=4, head_dim=32, ffn_size=256)
    adapted = Lora(rank=4, alpha=8.0, weights=weights)
    engine = token_engine(plan(model, adapted, precision="bf16"), model, device=CPU)

    resident, state = engine.resident_tensors(), engine.state()

    beside = [resident[name] for name in resident.keys() - state.keys()]
    expected = [*frozen(engine).values(), *engine._parts[0].module.buffers()]
    memories = {tensor.untyped_storage()._cdata for tensor in beside}
    assert len(memories) == len(beside)
    assert memories == {tensor.untyped_storage()._cdata for tensor in expected}


TIED = {"tied_embeddings": True}
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data": ("llama", {}, {"data_replicate": 2}),
    "zero 1": ("llama", {}, {"data_shard": 2, "zero": 1}),
    "zero 2": ("reference", {}, {"data_shard": 2, "zero": 2}),
    "zero 3, recompute full": ("llama", {}, {"data_shard": 2, "zero": 3, "recompute": "full"}),
    "tensor": ("llama", {}, {"tensor": 2}),
    "tensor, recompute selective": ("reference", {}, {"tensor": 2, "recompute": "selective"}),
    "pipeline": ("qwen3", TIED, {"pipeline": 2}),
    "pipeline, embedding alone": ("llama", {}, {"pipeline": 2, "cuts": [1, 4]}),
    "pipeline, head alone": ("llama", {}, {"pipeline": 2, "cuts": [4, 1]}),
    "zbv": ("llama", {}, {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2}),
    "gpt2, pipeline": ("gpt2", {}, {"pipeline": 2}),
    "mixtral, zero 3": ("mixtral", {}, {"data_shard": 2, "zero": 3}),
    "context": ("llama", {}, {"context": 2}),
    "mixtral, experts apart": ("mixtral", {}, {"data_shard": 2, "expert": 2, "zero": 3}),
    "qwen3_moe, context, experts apart": (
        "qwen3_moe",
        {},
        {"context": 2, "expert": 2, "zero": 1},
    ),
    "gemma2, tensor": ("gemma2", TIED, {"tensor": 2}),
    "optimizer on the host": ("llama", {}, {"data_shard": 2, "zero": 2, "offload": "optimizer"}),
    "factory, zero 2": ("factory", {}, {"data_shard": 2, "zero": 2}),
}


@functools.cache
def graph(name: str) -> ModelGraph:
    family, changes, _ = ROWS[name]
    if family == "factory":
        return graph_of_factory(f"{chains.__file__}:factory", seq_len=cases.SEQ_LEN)
    return cases.transformer(family, **changes)


SOME = [
    "zero 3, recompute full",
    "tensor, recompute selective",
    "zbv",
    "gpt2, pipeline",
    "qwen3_moe, context, experts apart",
    "optimizer on the host",
    "factory, zero 2",
]


@pytest.mark.ranks
@pytest.mark.parametrize("names", some_and_others(ROWS, SOME))
@pytest.mark.matrix
def test_every_plan_trains_adapters_like_one_process(names: list[str]) -> None:
    rows = [(name, plan(graph(name), **ROWS[name][2]), graph(name)) for name in names]
    alone_of = {name: train_all([(name, plan(graph(name)), graph(name))])[0][0] for name in names}

    for rank in on_ranks(2, train_all, rows):
        for name, (found, _) in zip(names, rank, strict=True):
            alone = alone_of[name]
            assert found.losses == pytest.approx(alone.losses, rel=1e-5), name
            assert found.norms == pytest.approx(alone.norms, rel=1e-4), name
            for key, weights in found.weights.items():
                assert weights == pytest.approx(alone.weights[key], rel=1e-3, abs=2e-5), (name, key)


ROUNDED: dict[str, dict[str, Any]] = {
    "fp16, zero 3": {"precision": "fp16", "data_shard": 2, "zero": 3},
    "fp16, tensor": {"precision": "fp16", "tensor": 2},
    "sums in bf16": {"data_replicate": 2, "gradient_compression": "bf16"},
}


@functools.cache
def rounded() -> tuple[list[Any], list[Any]]:
    """Return the runs of two ranks, and those of one process in the same precisions."""
    model = cases.transformer("llama")
    rows = [(name, plan(model, **layout), model) for name, layout in ROUNDED.items()]
    single = [
        (name, plan(model, precision=layout.get("precision", "fp32")), model)
        for name, layout in ROUNDED.items()
    ]
    return on_ranks(2, train_all, rows), on_ranks(1, train_all, single)[0]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.matrix
def test_adapters_train_within_the_bounds_of_what_rounds(name: str) -> None:
    ranks, single = rounded()
    index = list(ROUNDED).index(name)

    found = errors([rank[index][0] for rank in ranks], single[index][0])

    assert found["loss"] < 1e-4
    assert found["norm"] < 1e-2
    assert found["weights"] < 1e-1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"offload": "parameters"},
            "offload: adapters cannot be trained with parameters here; use optimizer",
        ),
        (
            {"gradient_compression": "powersgd"},
            "gradient_compression: adapters cannot be trained with powersgd here; use full",
        ),
    ],
)
def test_what_has_not_been_shown_equal_is_refused(changes: dict[str, str], message: str) -> None:
    model = cases.transformer("llama")
    made = plan(model, data_replicate=2)
    wanted = made.model_copy(update=changes)
    obstacle = native.obstacle(model, wanted.job, wanted.layout)

    assert message in str(obstacle)
    assert str(obstacle) == unsupported_reason(wanted, model)
    assert unsupported_reason(made, model) is None


def test_targets_that_nothing_has_are_refused() -> None:
    model = cases.transformer("llama")

    with pytest.raises(
        LaunchError, match=r"training\.lora\.targets: no linear layer .* is named W"
    ):
        token_engine(plan(model, Lora(rank=2, targets=("Wqkv",))), model, device=CPU)


def trained_and_saved(model: ModelGraph, made: Plan, folder: str) -> float:
    engine = token_engine(made, model, device=CPU)
    for step in range(3):
        engine.step(cases.global_tokens(step).chunk(engine.slices)[engine.slice_rank])
    saver = Saver(Path(folder), plan=made, model=model, run="r", config=engine.configuration())
    done = Progress(
        step=3,
        sample=24,
        epoch=0,
        seq_len=made.seq_len,
        seed=0,
        model=model.name,
        model_digest=model.digest,
        plan_digest=made.digest,
        corpus="none",
        corpus_digest="none",
        loss=0.0,
        frozen="first values of seed 0",
    )
    saver.begin(engine.state(), done)
    saver.finish()
    return engine.evaluate(engine.slice(cases.global_tokens(7))).loss


@pytest.mark.ranks
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.long("llama")
def test_adapters_are_written_as_peft_has_them(family: str, tmp_path: Path) -> None:
    """Merged by peft's rule, W + (alpha / r) B A, the library's model gives the trained loss."""
    model = cases.transformer(family)
    made = plan(model, pipeline=2)
    trained = on_ranks(2, trained_and_saved, model, made, str(tmp_path / "saved"))

    to_peft(tmp_path / "saved", tmp_path / "adapters")

    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    base = token_engine(cases.plan(model), model, device=CPU)
    whole = AutoModelForCausalLM.from_config(base._model.adapter.config)
    state = {n[6:]: v for n, v in base.state().items() if n.startswith("model.")}
    whole.load_state_dict(state, strict=False)
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                added = tensors[name.replace("lora_A", "lora_B")] @ a
                added = added * (settings["lora_alpha"] / settings["r"])
                weight = whole.get_submodule(path).weight
                weight += added.T if settings["fan_in_fan_out"] else added
    loss = cases.library_loss(whole, cases.global_tokens(7)).item()
    assert loss == pytest.approx(trained[0], rel=1e-5)
    assert settings["peft_type"] == "LORA"
    with pytest.raises(LaunchError, match="has adapters without the weights"):
        to_huggingface(tmp_path / "saved", tmp_path / "whole")


@pytest.mark.matrix
def test_adapters_go_on_under_another_plan(tmp_path: Path) -> None:
    model = cases.transformer("llama")
    on_ranks(2, trained_and_saved, model, plan(model, data_shard=2, zero=3), str(tmp_path))
    engine = token_engine(plan(model), model, device=CPU)
    for step in range(3):
        engine.step(cases.global_tokens(step))
    again = token_engine(plan(model), model, device=CPU)

    load(tmp_path / "step-000003", again.state())

    assert again.step(cases.global_tokens(3)).loss == pytest.approx(
        engine.step(cases.global_tokens(3)).loss, rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_peft_itself_reads_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = cases.transformer("llama")
    trained = on_ranks(1, trained_and_saved, model, plan(model), str(tmp_path / "saved"))
    to_peft(tmp_path / "saved", tmp_path / "adapters")
    base = token_engine(cases.plan(model), model, device=CPU)
    whole = AutoModelForCausalLM.from_config(base._model.adapter.config)
    whole.load_state_dict({n[6:]: v for n, v in base.state().items() if n.startswith("model.")})

    adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "adapters")

    loss = cases.library_loss(adapted, cases.global_tokens(7)).item()
    assert loss == pytest.approx(trained[0], rel=1e-5)
