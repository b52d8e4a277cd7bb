"""Models that the library alone knows are recorded, launched, and train as in a plain loop."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from meshwright.api.inputs import model_of
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.profiler.chain import Case, Chain
from meshwright.profiler.layers import measurements
from meshwright.runtime.checkpoint.weight_export import to_huggingface
from meshwright.runtime.checkpoint.writer import Saver
from meshwright.runtime.engine.traced_transformer import graph_of_library
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases
from tests.runtime.checkpoint.test_weight_export import progress
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import STEPS, Run, errors, train

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"intermediate_size": 64},
    "falcon": {"multi_query": True},
    "glm4": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    "deepseek_v2": {
        **{"intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4},
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "num_experts_per_tok": 2},
        **{"n_group": 1, "topk_group": 1},
    },
    "mamba": {"state_size": 4},
    "jetmoe": {
        **{"intermediate_size": 64, "num_key_value_heads": 2, "kv_channels": 8, "pad_token_id": 0},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    },
    "longcat_flash": {
        **{"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 48, "head_dim": 8},
        **{"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "num_key_value_heads": 4},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
        **{"v_head_dim": 8, "pad_token_id": 0},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def source(kind: str, folder: Path) -> Path:
    """Return a folder with the configuration of a small model."""
    path = folder / kind
    if not path.exists():
        transformers.AutoConfig.for_model(kind, **SIZES, **KINDS[kind]).save_pretrained(path)
    return path


@functools.cache
def graph(kind: str, folder: Path) -> ModelGraph:
    """Return a model as it is recorded, which takes long."""
    if kind == "mamba":  # which has no figures
        return model_of(str(source(kind, folder)), seq_len=cases.SEQ_LEN)
    return graph_of_library(f"{source(kind, folder)}:recorded", seq_len=cases.SEQ_LEN)


def graph_module(kind: str, folder: Path, seed: int) -> Any:
    """Return the library's own model as it draws its first values."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder / kind)
    )


def plainly(kind: str, folder: Path, weights: Path | None = None) -> Run:
    """Train the library's own class as its users do, by the settings of `cases.plan`."""
    training = cases.plan(graph(kind, folder)).training
    if weights is None:
        model = graph_module(kind, folder, training.seed)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(weights)
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrices], "weight_decay": wd}
        for matrices, wd in ((True, training.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=training.learning_rate, betas=(training.beta1, training.beta2),
        eps=training.epsilon,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        tokens = cases.global_tokens(step)
        logits = model(tokens[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / training.warmup_steps)
            group["lr"] = training.learning_rate * warm
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held = dict([*model.named_parameters(), *model.named_buffers()])
    named = {
        f"model.{name}": value.numpy() for name, value in model.state_dict().items() if name in held
    }
    return Run(losses, norms, named)


LAYOUTS: list[dict[str, Any]] = [
    {"data_shard": 2, "zero": 3, "recompute": "full", "offload": "parameters"},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"tensor": 2},
    {"data_replicate": 2},
    {"context": 2, "zero": 3},
]


def trained(model: ModelGraph, layouts: list[dict[str, Any]]) -> list[Run]:
    return [train(cases.plan(model, **layout), model) for layout in layouts]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        pytest.param("gpt_neox", LAYOUTS[2:3], id="some"),
        *(pytest.param(kind, LAYOUTS, id=kind, marks=pytest.mark.matrix) for kind in KINDS),
    ],
)
def test_two_ranks_train_as_the_librarys_own_class(
    kind: str, layouts: list[dict[str, Any]], folder: Path
) -> None:
    model, expected = graph(kind, folder), plainly(kind, folder)
    if kind in ("falcon", "mamba"):  # which have attention of their own, or none
        layouts = layouts[:-1]
    if not model.tensor_degrees:
        layouts = [layout for layout in layouts if "tensor" not in layout]

    every = on_ranks(2, trained, model, layouts)

    for at, layout in enumerate(layouts):
        found = errors([runs[at] for runs in every], expected)
        assert found["loss"] < 1e-6, (layout, found)
        assert found["norm"] < 1e-5, (layout, found)
        assert found["weights"] < 1e-5, (layout, found)


def test_training_begins_with_weights_of_a_folder(folder: Path, tmp_path: Path) -> None:
    model = graph("falcon", folder)
    torch.manual_seed(7)
    config = transformers.AutoConfig.from_pretrained(folder / "falcon")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = plainly("falcon", folder, tmp_path)

    engine = token_engine(cases.plan(model), model, device=CPU, weights=tmp_path)

    losses = [engine.step(cases.global_tokens(step)).loss for step in range(STEPS)]
    assert losses == pytest.approx(expected.losses, rel=1e-6)


def test_a_type_without_figures_is_recorded_and_others_keep_theirs(folder: Path) -> None:
    recorded = graph("mamba", folder)
    known = model_of(str(source("gpt_neox", folder)), seq_len=cases.SEQ_LEN)

    assert recorded.source == f"{folder / 'mamba'}:recorded"
    assert [name for name, _ in recorded.chain][1:3] == [f"backbone.layers.{n}" for n in range(2)]
    assert known.architecture is not None


def test_a_configuration_that_the_library_refuses_keeps_the_planners_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')

    with pytest.raises(DocumentError, match="no_such_type', which is not supported"):
        model_of(str(tmp_path))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tensor": 3}, r"mesh\.tensor: 3 divides no layer"),
        ({"context": 3}, r"mesh\.context: 3 ranks need 2 x 3 chunks of seq_len 16"),
    ],
)
def test_what_a_recorded_model_cannot_be_is_refused(
    layout: dict[str, Any], said: str, folder: Path
) -> None:
    model = graph("gpt_neox", folder)

    assert re.search(said, str(unsupported_reason(cases.plan(model, **layout), model)))


@pytest.mark.long("True")
@pytest.mark.parametrize("causal", [False, True])
def test_a_model_that_sees_what_it_is_to_predict_is_refused(causal: bool, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(
        "roberta", **SIZES | {"num_hidden_layers": 1}, intermediate_size=64, is_decoder=causal
    ).save_pretrained(tmp_path)
    model = graph_of_library(f"{tmp_path}:recorded", seq_len=cases.SEQ_LEN)
    plan = cases.plan(model)

    if causal:
        assert token_engine(plan, model, device=CPU).step(cases.global_tokens(0)).loss > 0
        return
    with pytest.raises(
        LaunchError,
        match=r"roberta: its results change .* set is_decoder: true in its config.json, or train",
    ):
        token_engine(plan, model, device=CPU)


def test_attention_stays_within_documents(folder: Path) -> None:
    """The loss of documents in one sample is that of each in a sample of its own."""
    model = graph("gpt_neox", folder)
    plan = cases.plan(model)
    tokens = cases.global_tokens(0)
    starts = torch.arange(cases.SEQ_LEN) // 5 * 5

    engine = token_engine(plan, model, device=CPU, documents=True)
    found = engine.evaluate((tokens, None, starts.expand(len(tokens), -1)))

    library = graph_module("gpt_neox", folder, plan.training.seed).requires_grad_(False)
    losses = []
    for begin in range(0, cases.SEQ_LEN, 5):
        part = tokens[:, begin : min(begin + 5, cases.SEQ_LEN) + 1]
        logits = library(part[:, :-1]).logits.flatten(0, 1)
        losses.append(functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum"))
    assert found.loss == pytest.approx(float(sum(losses)) / tokens[:, 1:].numel(), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("falcon", "takes no other attention"), ("mamba", "gets no positions with")],
)
def test_attention_of_its_own_is_neither_divided_nor_kept_within_documents(
    kind: str, said: str, folder: Path
) -> None:
    model = graph(kind, folder)

    with pytest.raises(LaunchError, match=said):
        token_engine(cases.plan(model), model, device=CPU, documents=True)


def test_positions_are_priced_where_the_library_gives_them(folder: Path) -> None:
    found = graph("gpt_neox", folder)

    assert found.positions == cases.SEQ_LEN
    assert [graph(kind, folder).positions for kind in ("falcon", "mamba")] == [None, None]
    keys = [layer.keys_bytes for layer in found.layers if layer.keys_bytes]
    width = SIZES["hidden_size"]
    assert keys == [cases.SEQ_LEN * 2 * width * 4] * SIZES["num_hidden_layers"]
    assert found.layers[-1].logits is not None


def test_a_run_is_exported_as_the_library_reads_it(folder: Path, tmp_path: Path) -> None:
    """From a plan on disk to a folder that `from_pretrained` takes, its embedding tied."""
    transformers.AutoConfig.for_model(
        "falcon", **SIZES | {"num_hidden_layers": 1}, multi_query=True, tie_word_embeddings=True
    ).save_pretrained(folder / "tied")
    model = graph_of_library(f"{folder / 'tied'}:recorded", seq_len=cases.SEQ_LEN)
    plan = cases.plan(model)
    engine = token_engine(plan, model, device=CPU)
    engine.step(cases.global_tokens(0))
    logits = engine.outputs(engine.slice(engine._model.example)).logits
    saver = Saver(
        tmp_path / "saved", plan=plan, model=model, run="run", config=engine.configuration()
    )
    saver.begin(engine.state(), progress(plan, model))
    saver.finish()

    to_huggingface(tmp_path / "saved", tmp_path / "exported")

    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        torch.testing.assert_close(read(engine._model.example[0]).logits, logits)


@pytest.mark.long("True")
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_of_a_recorded_model_are_measured(compiled: bool, folder: Path) -> None:
    model = graph("gpt_neox", folder)
    chain = Chain(model, seq_len=cases.SEQ_LEN, precision="bf16", tensor=1, device=CPU)
    case = Case(tensor=1, micro_batch=2, recompute="full", compiled=compiled)

    with torch.compiler.set_stance("force_eager"):  # a graph takes long to make
        rows = measurements([chain], [case], budget_s=0.0)

    assert [row.kind for row in rows] == list(dict.fromkeys(layer.kind for layer in model.layers))
    assert all(row.forward_s > 0 and row.resident_bytes > 0 for row in rows)
