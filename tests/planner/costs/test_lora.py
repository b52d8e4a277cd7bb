"""Adapters as figures: counted against the runtime's own, and what they save."""

from __future__ import annotations

import pytest

from planner.catalog import native
from planner.costs import memory
from planner.costs.lora import adapter_parameters
from planner.costs.memory import Sharing
from planner.errors import DocumentError
from planner.expressions import resolve_cluster, resolve_model
from planner.pins import Pins
from planner.plan import Job, Layout
from planner.predict import layout_prediction
from planner.request import Request
from planner.training import Lora


@pytest.mark.ranks
@pytest.mark.parametrize("family", ["reference", "llama", "qwen3", "gpt2", "mixtral", "qwen3_moe"])
def test_adapters_have_the_parameters_that_the_runtime_makes(family: str) -> None:
    torch = pytest.importorskip("torch")
    from runtime.engine import Engine
    from tests.runtime import cases

    lora = Lora(rank=3)
    model = cases.transformer(family)
    plan = cases.plan(model)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"lora": lora})})
    engine = Engine(plan, model, device=torch.device("cpu"))

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
    alone = Sharing(types=full, zero=0, shard=1, data=1, pipelined=False, accumulated=True)

    held = memory.frozen_states(10.0, alone)

    assert held.resident_bytes == 40.0
    assert held.backward_transient_bytes == 0.0


def test_adapters_fit_where_the_whole_model_does_not() -> None:
    model, machine = resolve_model("llama-3.1-8b"), resolve_cluster("1xh100-sxm-80gb")
    layout = Layout(micro_batch=1, micro_batches=8)
    whole = Job(seq_len=2048, global_batch=8)
    adapters = Job(seq_len=2048, global_batch=8, lora=Lora(rank=16))

    full = layout_prediction(Request(model, machine, whole, pins=Pins(recompute="full")), layout)
    tuned = layout_prediction(
        Request(model, machine, adapters, pins=Pins(recompute="full")), layout
    )

    assert not full.fits
    assert tuned.fits
    assert any("adapters" in assumption.what for assumption in tuned.assumptions)


def test_models_without_known_layers_are_refused() -> None:
    with pytest.raises(DocumentError, match="adapters are planned for the families ref"):
        adapter_parameters(resolve_model("deepseek-v3"), "block", Lora(rank=4))
