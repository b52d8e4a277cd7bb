"""A twin dominates only where none of its figures is higher: each is made higher in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.costs.layout_costs import CostTables, LayoutCosts, StrategyCost
from planner.expressions import resolve_cluster, resolve_model
from planner.plan import INSIDE_OUT, Job, Layout
from planner.search.dominance import dominates, twins

LAYOUT = Layout(pipeline=4, data_shard=2, zero=2, micro_batches=16)
TWIN = replace(LAYOUT, zero=1)


@pytest.fixture
def costs() -> LayoutCosts:
    model, cluster = resolve_model("gpt2"), resolve_cluster("8xa100-sxm-80gb")
    return CostTables(model, cluster, Job(seq_len=1024, global_batch=32)).of(TWIN)


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


@pytest.mark.parametrize(
    "figure",
    ["forward_s", "backward_s", "stored_bytes", "transient_bytes", "resident_bytes", "sync_s"],
)
def test_no_figure_of_a_layer_may_be_higher(figure: str, costs: LayoutCosts) -> None:
    assert not dominates(TWIN, changed(costs, **{figure: 1.001}), LAYOUT, costs)
    assert dominates(TWIN, changed(costs, **{figure: 0.999}), LAYOUT, costs)


@pytest.mark.parametrize("figure", ["fixed_bytes", "slack", "boundary_s"])
def test_no_figure_of_a_rank_may_be_higher(figure: str, costs: LayoutCosts) -> None:
    higher = replace(costs, **{figure: getattr(costs, figure) * 1.001})

    assert not dominates(TWIN, higher, LAYOUT, costs)
    assert dominates(TWIN, costs, LAYOUT, higher)


def test_a_transient_above_may_be_paid_for_by_what_is_held(costs: LayoutCosts) -> None:
    spared = 0.1 * min(c.resident_bytes / c.transient_bytes for c in costs.kinds["block"])

    within = changed(costs, resident_bytes=0.8, transient_bytes=1 + spared)
    beyond = changed(costs, resident_bytes=0.95, transient_bytes=1 + spared)

    assert dominates(TWIN, within, LAYOUT, costs)
    assert not dominates(TWIN, beyond, LAYOUT, costs)


def test_more_micro_batches_in_flight_are_more_memory(costs: LayoutCosts) -> None:
    gpipe = replace(TWIN, schedule="gpipe")

    assert dominates(TWIN, costs, gpipe, costs)
    assert not dominates(gpipe, changed(costs, sync_s=0.5), TWIN, costs)


def test_a_layout_that_synchronises_less_everywhere_may_dominate_a_simpler_one(
    costs: LayoutCosts,
) -> None:
    less = {
        kind: tuple(replace(cost, sync_s=0.9 * cost.sync_s) for cost in table)
        for kind, table in costs.kinds.items()
    }

    assert dominates(LAYOUT, replace(costs, kinds=less), TWIN, costs)


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
