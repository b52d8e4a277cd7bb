"""Adapters as figures: counted against the runtime's own, and what they save."""

from __future__ import annotations

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.collectives import Level
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.lora import adapter_parameters
from meshwright.planner.costs.memory import state_bytes as memory
from meshwright.planner.costs.memory.state_bytes import StateSharding, frozen_states, state_types
from meshwright.planner.documents.plan import Job, Layout, Offload
from meshwright.planner.documents.training import Lora
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.operators.layer_operators import local_parameters
from meshwright.planner.requests.request import Request


@pytest.mark.ranks
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
    """QLoRA with bitsandbytes: 4 bytes for 64 weights, attributes that sharding does not know."""
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

    assert held(1) == pytest.approx(32e6 + 4e6)
    assert held(8) == pytest.approx(32e6 / 8 + 4e6)
    assert held(8, "parameters") == pytest.approx(4e6)
    # Rounded themselves, as fsdp_qlora has them: a byte for 64, and 4 for 256 of these.
    assert frameworks()["fsdp_qlora"].types.scales == pytest.approx(1 / 64 + 4 / 256 / 64, rel=1e-3)
