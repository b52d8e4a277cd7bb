"""A rank's peak by walking its order, against the peak of one stage and against hand counts."""

from __future__ import annotations

import pytest

from planner.costs import rank_memory
from planner.costs.layout_costs import CostTables
from planner.layers.operator_table import RECOMPUTES
from planner.plan import Mesh
from planner.predict import placements_of, predict, stage_seconds
from planner.request import Request
from planner.schedule import orders
from planner.simulate import timeline
from tests.planner.test_predict_peaks import cluster, model, plan


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("stage", [0, 1])
def test_one_stage_with_whole_backwards_peaks_as_a_stage_does(recompute: str, stage: int) -> None:
    graph = model()
    of = plan(graph, "fp32", recompute, Mesh(pipeline=2), 0, "1f1b")
    costs = CostTables(Request(graph, cluster(), of.job)).of(of.layout)
    placement = placements_of(of, graph)[stage]
    layers = {
        stage: [
            rank_memory.layer_bytes(costs.parts[kind][RECOMPUTES.index(choice)])
            for kind, choice, _ in placement
        ]
    }

    as_a_stage = rank_memory.dynamic_parts(costs, of.layout, layers, rank=stage)
    at_its_fullest = rank_memory._of_several(of.layout, layers, stage, costs.boundary_bytes)

    assert at_its_fullest == pytest.approx(as_a_stage)


def test_a_split_backward_takes_the_seconds_of_a_whole_one() -> None:
    graph = model()
    of = plan(graph, "fp32", "none", Mesh(pipeline=2), 0, "zb-h1")
    costs = CostTables(Request(graph, cluster(), of.job)).of(of.layout)
    stages = [stage_seconds(costs, placement) for placement in placements_of(of, graph)]

    for stage in stages:
        # Half of the products of Linears, which are most of a backward but not all.
        assert 0.2 * stage.backward_s < stage.weight_s < 0.5 * stage.backward_s
    run = timeline(
        orders("zb-h1", stages=2, micro_batches=4),
        forward_s=[stage.whole_forward_s for stage in stages],
        # Of each action's host time, that of W comes on top of what a whole backward takes.
        backward_s=[stage.whole_backward_s + stage.action_s for stage in stages],
        weight_s=[stage.weight_s + stage.action_s for stage in stages],
        transfer_s=costs.transfer_s,
    )
    predicted = predict(of, graph, cluster())
    rest = predicted.step_parts["optimizer"] + costs.step_s
    assert predicted.step_time_s == pytest.approx(run.makespan_s + rest)
