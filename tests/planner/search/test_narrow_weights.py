"""Weights gathered in 8 bits, and scales by row, as choices with a price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.memory.resident_states import ResidentStates
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import Precision
from meshwright.planner.documents.plan import Job, Layout, Plan, WeightGatherDtype
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layouts

MODEL, CLUSTER = resolve_model("llama-3.1-8b"), resolve_cluster("8xh100-sxm-80gb")
JOB = Job(seq_len=8192, global_batch=8, precision="fp8")
PINS = {"tensor": 1, "pipeline": 1, "context": 1, "data_shard": 8, "zero": 3, "micro_batch": 1}


def asked(job: Job = JOB, **pins: object) -> Request:
    return Request(MODEL, CLUSTER, job, pins=Pins(**{**PINS, **pins}))  # type: ignore[arg-type]


def changed(plan: Plan, **choices: str) -> Prediction:
    return predict(plan.model_copy(update=choices), MODEL, CLUSTER)


def test_what_is_gathered_in_each_pass_comes_in_8_bits_where_products_are() -> None:
    every = list(layouts(Request(MODEL, CLUSTER, JOB)))

    assert {layout.zero for layout in every if layout.weight_gather_dtype == "fp8"} == {3}
    assert {layout.weight_gather_dtype for layout in every if layout.zero == 3} == {"fp8"}
    wide = Job(seq_len=8192, global_batch=8)
    assert {layout.weight_gather_dtype for layout in layouts(asked(wide))} == {"full"}
    for pins in ({"scales": "rowwise"}, {"weight_gather_dtype": "full"}):
        assert {layout.weight_gather_dtype for layout in layouts(asked(**pins))} == {"full"}


def test_scales_by_row_cost_what_torchtitan_measured() -> None:
    """Llama-3-8B on 8 H100, torchtitan commit 7a04053 (2025-01): 7,186 and 6,424 tokens/s."""
    plan = search(asked(recompute="selective")).plan

    tensorwise = changed(plan).step_time_s
    rowwise = changed(plan, scales="rowwise", weight_gather_dtype="full").step_time_s

    assert rowwise / tensorwise == pytest.approx(7186 / 6424, rel=0.02)


def test_frameworks_that_always_gather_in_8_bits_hold_as_little() -> None:
    block = next(layer for layer in MODEL.layers if layer.repeat > 1)
    layout = Layout(data_shard=8, zero=3)

    def transient_bytes(
        framework: str, precision: Precision, wire: WeightGatherDtype = "full"
    ) -> float:
        held = ResidentStates(MODEL, replace(JOB, precision=precision), frameworks()[framework])
        so = replace(layout, weight_gather_dtype=wire)
        return held.resident_parameters(block, so, held.sharing(so)).states.forward_transient_bytes

    assert transient_bytes("nemo-automodel", "fp8") == 3 * block.parameters
    assert transient_bytes("torchtitan", "fp8", "fp8") == 3 * block.parameters
    assert transient_bytes("torchtitan", "fp8") == transient_bytes("torchtitan", "bf16")
    assert transient_bytes("torchtitan", "bf16") == transient_bytes("fsdp", "fp8")
    assert transient_bytes("fsdp", "fp8") == 6 * block.parameters
