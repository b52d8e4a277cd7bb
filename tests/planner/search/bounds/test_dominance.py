"""A twin dominates only where none of its figures is higher: each is made higher in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.layout_costs import (
    CostTables,
    LayoutCosts,
    StrategyCost,
    StrategyParts,
)
from meshwright.planner.documents.plan import INSIDE_OUT, Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.dominance import dominates, twins

LAYOUT = Layout(pipeline=4, data_shard=2, zero=2, micro_batches=16)
TWIN = replace(LAYOUT, zero=1)


@pytest.fixture
def costs() -> LayoutCosts:
    model, cluster = resolve_model("gpt2"), resolve_cluster("8xa100-sxm-80gb")
    return CostTables(Request(model, cluster, Job(seq_len=1024, global_batch=32))).costs_of(TWIN)


def changed(costs: LayoutCosts, **figures: float) -> LayoutCosts:
    """Return costs in which the blocks' figures are these factors higher."""

    def option(cost: StrategyCost) -> StrategyCost:
        return replace(cost, **{name: getattr(cost, name) * by for name, by in figures.items()})

    kinds = {
        kind: tuple(option(cost) if kind == "block" else cost for cost in table)
        for kind, table in costs.kinds.items()
    }
    return replace(costs, kinds=kinds)


def test_equal_costs_let_the_simpler_layout_dominate(costs: LayoutCosts) -> None:
    assert dominates(TWIN, costs, LAYOUT, costs)
    assert not dominates(LAYOUT, costs, TWIN, costs)


def holding(costs: LayoutCosts, part: str, figure: str, by: float) -> LayoutCosts:
    """Return costs in which a figure of what the blocks hold is this factor higher."""

    def changed_part(one: StrategyParts) -> StrategyParts:
        own = getattr(one, part)
        return replace(one, **{part: replace(own, **{figure: by * getattr(own, figure)})})

    parts = {
        kind: tuple(changed_part(one) if kind == "block" else one for one in every)
        for kind, every in costs.parts.items()
    }
    return replace(costs, parts=parts)


@pytest.mark.parametrize("figure", ["forward_s", "backward_s", "sync_s"])
def test_no_seconds_of_a_layer_may_be_higher(figure: str, costs: LayoutCosts) -> None:
    assert not dominates(TWIN, changed(costs, **{figure: 1.001}), LAYOUT, costs)
    assert dominates(TWIN, changed(costs, **{figure: 0.999}), LAYOUT, costs)


@pytest.mark.parametrize(
    ("part", "figure"),
    [
        ("treated", "stored_bytes"),
        ("figures", "backward_transient_bytes"),
        ("states", "parameters_bytes"),
        ("states", "gradients_bytes"),
        ("states", "optimizer_bytes"),
    ],
)
def test_no_bytes_of_a_layer_may_be_more(part: str, figure: str, costs: LayoutCosts) -> None:
    assert not dominates(TWIN, holding(costs, part, figure, 1.001), LAYOUT, costs)
    assert dominates(TWIN, holding(costs, part, figure, 0.999), LAYOUT, costs)


@pytest.mark.parametrize("figure", ["fixed_bytes", "slack", "boundary_s"])
def test_no_figure_of_a_rank_may_be_higher(figure: str, costs: LayoutCosts) -> None:
    higher = replace(costs, **{figure: getattr(costs, figure) * 1.001})

    assert not dominates(TWIN, higher, LAYOUT, costs)
    assert dominates(TWIN, costs, LAYOUT, higher)


def test_more_micro_batches_in_flight_are_more_memory(costs: LayoutCosts) -> None:
    gpipe = replace(TWIN, schedule="gpipe")

    assert dominates(TWIN, costs, gpipe, costs)
    # GPipe has no gradients yet in its forwards.
    forwards = holding(costs, "figures", "forward_transient_bytes", 1e3)
    assert not dominates(TWIN, forwards, gpipe, forwards)
    assert not dominates(gpipe, changed(costs, sync_s=0.5), TWIN, costs)


def test_twins_differ_in_one_choice() -> None:
    hybrid = Layout(
        pipeline=2,
        data_shard=4,
        data_replicate=2,
        zero=3,
        schedule="gpipe",
        order=(*INSIDE_OUT[::-1],),
    )

    found = list(twins(hybrid))

    assert [twin.schedule for twin in found] == ["1f1b", "gpipe", "gpipe", "gpipe"]
    assert [twin.zero for twin in found] == [3, 1, 3, 3]
    assert [twin.data_replicate for twin in found] == [2, 2, 1, 2]
    assert all(twin.devices == hybrid.devices for twin in found)
    assert not list(twins(Layout(tensor=8)))
