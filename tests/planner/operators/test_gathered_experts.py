"""Experts whose tokens are gathered: bytes by hand, and the products of those that are sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Job
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import ManySettings, Setting
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

MIXTRAL = resolve_model("mixtral-8x7b")
BLOCK = next(layer for layer in MIXTRAL.layers if layer.repeat > 1)
SENT = Setting(micro_batch=1, seq_len=4096, expert=4)
GATHERED = replace(SENT, dispatch="allgather")


def test_buffers_have_rows_for_all_that_may_come_and_products_for_what_does() -> None:
    sent, gathered = (table(MIXTRAL, BLOCK, setting) for setting in (SENT, GATHERED))
    by_name = {op.name: op for op in gathered.operators}

    assert by_name["expert_gather"].moved_bytes == 4 * 4096 * 4096 * 2  # all tokens of 4 ranks
    # 2 of 8 experts are a rank's own, and each token chose 2: it may want both.
    assert by_name["dispatch"].outputs == {"arrived": 4 * 4096 * 2 * 4096 * 2}
    flops = [sum(op.flops for op in one.operators) for one in (sent, gathered)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)
    assert gathered.stored_bytes("none") > sent.stored_bytes("none")
    assert not [op for op in gathered.operators if op.kind == "all_to_all"]


def test_many_settings_are_each_alone() -> None:
    places = [
        replace(GATHERED, micro_batch=size, expert=ranks) for size in (1, 2) for ranks in (2, 8)
    ]
    several = [one for one in places if one.micro_batch > 1]

    for group in ([one for one in places if one not in several], several):
        together = table(MIXTRAL, BLOCK, ManySettings.framework(group))
        for at, one in enumerate(group):
            alone = table(MIXTRAL, BLOCK, one).stored_bytes("none")
            assert together.stored_bytes("none")[at] == pytest.approx(alone)  # type: ignore[index]


def test_it_is_planned_where_it_is_asked_for_and_costs_memory() -> None:
    cluster = resolve_cluster("4x8xh100-sxm-80gb")
    pins = Pins(expert=8, tensor=1, context=1, pipeline=1, zero=3, dispatch="allgather")
    job = Job(seq_len=2048, global_batch=32)

    plan = search(Request(MIXTRAL, cluster, job, pins=pins)).plan
    found = predict(plan, MIXTRAL, cluster)
    other = predict(plan.model_copy(update={"dispatch": "alltoall"}), MIXTRAL, cluster)

    assert plan.dispatch == "allgather" and "dispatch=allgather" in plan.layout.text()
    assert found.stages[0].peak_memory_bytes > other.stages[0].peak_memory_bytes
    assert found.step_time_s > other.step_time_s
