"""Adapters as figures: counted against the runtime's own, and what they save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.calibration.tables.predictions import framework_prediction
from meshwright.planner.catalog import frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.collectives import Level
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.lora import adapter_parameters
from meshwright.planner.costs.memory import state_bytes as memory
from meshwright.planner.costs.memory.state_bytes import (
    StateSharding,
    frozen_states,
    state_types,
)
from meshwright.planner.costs.predict import layout_prediction as predict
from meshwright.planner.documents.plan import Job, Layout, Offload
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.documents.training import Lora, Objective
from meshwright.planner.errors import DocumentError
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.operators.layer_operators import local_parameters
from meshwright.planner.requests.pins import read_layout
from meshwright.planner.requests.request import Request, pinned_layout


@pytest.mark.ranks
@pytest.mark.long("qwen3", "gpt2", "mixtral")
@pytest.mark.parametrize("family", ["reference", "llama", "qwen3", "gpt2", "mixtral", "qwen3_moe"])
def test_adapters_have_the_parameters_that_the_runtime_makes(family: str) -> None:
    torch = pytest.importorskip("torch")
    from meshwright.runtime.launch.training_loop import token_engine
    from tests.runtime import cases

    lora = Lora(rank=3)
    model = cases.transformer(family)
    plan = cases.plan(model)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"lora": lora})})
    engine = token_engine(plan, model, device=torch.device("cpu"))

    made = sum(v.numel() for n, v in engine.state().items() if n.startswith("model."))

    kinds = {name: layer.kind for name, layer in model.chain}
    assert made == sum(adapter_parameters(model, kind, lora) for kind in kinds.values())


def test_tensor_ranks_share_one_side_of_each_adapter() -> None:
    model = resolve_model("llama-3.1-8b")
    both = Lora(rank=16, targets=("q_proj", "o_proj"))

    alone = adapter_parameters(model, "block", both)
    of_four = adapter_parameters(model, "block", both, tensor=4)

    assert alone == 16 * 4 * 4096
    assert of_four == 16 * 2 * (4096 + 4096 / 4)


def test_frozen_weights_take_their_own_bytes_and_no_others() -> None:
    full = memory.state_types(native(), "fp32")
    alone = StateSharding(types=full, zero=0, shard=1, data=1, pipelined=False, accumulated=True)

    held = memory.frozen_states(10.0, alone)

    assert held.resident_bytes == 40.0
    assert held.backward_transient_bytes == 0.0


def test_adapters_of_other_families_are_not_run_here() -> None:
    model, machine = resolve_model("falcon-40b"), resolve_cluster("8xh100-sxm-80gb")
    job = Job(seq_len=2048, global_batch=8, lora=Lora(rank=4))

    found = refusal(model, machine, job, Layout(data_shard=8, zero=3))

    assert found is not None
    assert "adapters are planned for the families ref" in found


def test_adapters_alone_are_reduced_and_the_frozen_rest_is_gathered() -> None:
    model, machine = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
    job = Job(seq_len=2048, global_batch=8, lora=Lora(rank=16))
    costs, layout = CostTables(Request(model, machine, job)), Layout(data_shard=8, zero=3)

    held, moving, _ = costs.resident_and_traffic("block", layout)
    links = costs.rates.link_s

    eight = (Level(machine.tiers[0], 8),)
    gather_s = links("all_gather", 2 * held.parameters, eight)
    assert held.parameters - held.adapters == sum(local_parameters(model, model.layers[1]))
    assert moving.forward_gather_s == pytest.approx(gather_s)
    reduced_s = links("reduce_scatter", 4 * held.adapters, eight)
    assert moving.backward_s == pytest.approx(gather_s + reduced_s)


def test_scales_of_four_bits_are_whole_on_every_rank() -> None:
    """QLoRA with bitsandbytes: scales are attributes that sharding does not know.

    They are rounded themselves: a byte for 64 weights, and 4 for 256 of these.
    """
    types = state_types(frameworks()["transformers"], "bf16", weights="nf4")

    def held(shard: int, offload: Offload = "none") -> float:
        sharing = StateSharding(
            types=types,
            zero=3,
            shard=shard,
            data=shard,
            pipelined=False,
            accumulated=False,
            offload=offload,
        )
        return frozen_states(64e6, sharing).resident_bytes

    scales = 64e6 * (1 / 64 + 4 / 256 / 64)
    assert held(1) == pytest.approx(32e6 + scales, rel=1e-3)
    assert held(8) == pytest.approx(32e6 / 8 + scales, rel=1e-3)
    assert held(8, "parameters") == pytest.approx(scales, rel=1e-3)
    assert frameworks()["fsdp_qlora"].types.scales == frameworks()["transformers"].types.scales


def test_preferences_have_pairs_and_a_reference_that_runs_forward() -> None:
    """DPO beside supervised tuning: twice the sequences, one forward and frozen weights more."""
    model, machine = resolve_model("llama-3.1-8b"), resolve_cluster("8xa100-sxm-80gb")
    layout = "zero=3 dp=8 micro_batch={} recompute=full"

    def predicted(objective: Objective, micro_batch: int, **lora: Lora) -> Prediction:
        job = Job(seq_len=1024, global_batch=64, objective=objective, **lora)
        request = Request(model, machine, job, framework=frameworks()["transformers"])
        request = replace(request, pins=read_layout(layout.format(micro_batch))[0])
        return framework_prediction(request, pinned_layout(request))

    tuned, preferred = predicted("sft", 4), predicted("dpo", 2)
    [with_one], [with_two] = tuned.stages, preferred.stages

    parameters = sum(layer.parameters for _, layer in model.chain)
    more = with_two.memory_parts["parameters"] - with_one.memory_parts["parameters"]
    # Both ends are in the root, which is gathered whole.
    assert 2 * parameters / 8 <= more <= 2 * parameters / 8 + 2.2 * 2 * 128256 * 4096
    assert preferred.step_parts["forward"] == pytest.approx(
        4 * tuned.step_parts["forward"], rel=0.02
    )
    assert preferred.step_parts["backward"] == pytest.approx(
        2 * tuned.step_parts["backward"], rel=0.02
    )
    assert predicted("reward", 2).step_parts["forward"] == pytest.approx(
        2 * tuned.step_parts["forward"], rel=0.02
    )
    adapted = Lora(rank=8)
    alone = predicted("sft", 4, lora=adapted).stages[0].memory_parts["parameters"]
    switched = predicted("dpo", 2, lora=adapted).stages[0].memory_parts["parameters"]
    assert switched == alone


def notes_of_targets(*targets: str) -> tuple[str, ...]:
    request = Request.create(
        resolve_model("llama-3.1-8b"),
        resolve_cluster("1xh100-sxm-80gb"),
        seq_len=2048,
        lora=["rank=16", f"targets=[{','.join(targets)}]"],
    )
    return predict(request, pinned_layout(request)).notes


def test_targets_that_nothing_has_are_refused_and_others_are_named() -> None:
    """A plan whose adapters stand nowhere would train nothing; lists are often of many models."""
    with pytest.raises(DocumentError, match=r"lora\.targets: no linear layer .* named w1 or w2"):
        notes_of_targets("w1", "w2")

    assert any("beside c_attn" in note for note in notes_of_targets("q_proj", "c_attn"))
    assert not any("adapters beside" in note for note in notes_of_targets("q_proj"))


@pytest.mark.parametrize(
    ("framework", "zero", "bytes_each"),
    [
        ("native", 0, 2),
        ("native", 2, 2 / 8 + 2),
        ("native", 3, 2 / 8),
        ("fsdp", 0, 4 + 2),
        ("fsdp", 2, 4 / 8 + 2),
        ("fsdp", 3, 4 / 8),
        ("deepspeed", 2, 2),
        ("deepspeed", 3, 2 / 8),
    ],
)
def test_a_frozen_weight_is_kept_in_shards_and_whole_as_its_level_says(
    framework: str, zero: int, bytes_each: float
) -> None:
    """bf16 on eight ranks; FSDP loads in fp32, and below ZeRO-3 keeps what it gathered."""
    sharing = StateSharding(
        types=state_types(frameworks()[framework], "bf16"),
        zero=zero,
        shard=8,
        data=8,
        pipelined=False,
        accumulated=True,
    )

    assert frozen_states(1e9, sharing).resident_bytes == bytes_each * 1e9
