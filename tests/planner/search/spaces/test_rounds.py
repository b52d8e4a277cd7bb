"""Two stages a rank for unlike layers: searched, predicted and simulated."""

from __future__ import annotations

import random

import pytest

from planner.expressions import resolve_cluster
from planner.model import Layer, ModelGraph
from planner.pins import Pins
from planner.plan import Job, ScheduleName
from planner.predict import predict
from planner.request import Request
from planner.search.best_first import search
from planner.search.candidates import Candidates
from planner.search.ranks import run_of
from planner.search.spaces.rounds import RoundSpace, unlike
from tests.planner.rounds.test_solve import least_objective_s
from tests.planner.search.spaces.every_layout import bounded, layouts_of
from tests.planner.search.spaces.test_graph import layer, towers, unet

JOB = Job(seq_len=64, global_batch=16, precision="fp32")
SCHEDULES: tuple[ScheduleName, ...] = ("interleaved", "interleaved-zb", "zbv", "dualpipe-v")


def unlike_chain(count: int, seed: int = 0) -> ModelGraph:
    """Layers of three kinds in no order."""
    rng = random.Random(seed)
    kinds = {"a": 0.6, "b": 1.0, "c": 1.7}
    layers = []
    for at in range(count):
        kind = rng.choice(list(kinds))
        made: Layer = layer(f"l{at}", kind=kind, scale=kinds[kind], output=20)
        layers.append(made)
    return ModelGraph(name="unlike", layers=tuple(layers))


def space_of(model: ModelGraph, cluster: str, pins: Pins) -> RoundSpace:
    machine = resolve_cluster(cluster)
    return RoundSpace(Candidates(Request(model, machine, JOB, pins)))


@pytest.mark.parametrize("model", [unlike_chain(7), unet(3)], ids=lambda model: model.name)
def test_no_layout_and_split_beats_the_best(model: ModelGraph) -> None:
    pins = Pins(pipeline=2, data=1, micro_batch=2)
    space = space_of(model, "2xa100-sxm-40gb", pins)
    assert unlike(model)
    step_s = 0.0
    best_s = float("inf")
    for layout, bound_s in bounded(space):
        least_s = least_objective_s(space.problem(layout)) + step_s
        assert max(bound_s, space.bound_s(layout)) <= least_s * (1 + 1e-9)
        best_s = min(best_s, least_s)

    answer = search(Request(model, resolve_cluster("2xa100-sxm-40gb"), JOB, pins=pins))

    assert answer.certificate.optimal
    assert answer.certificate.objective_s <= best_s * (1 + 1e-9)
    if answer.plan.virtual_stages == 2:
        assert answer.certificate.objective_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_was_split_fits_and_takes_what_the_simulation_says(schedule: ScheduleName) -> None:
    model = unlike_chain(16)
    assert run_of(model) is None
    pins = Pins(pipeline=4, data=1, micro_batch=1, schedule=schedule)
    space = space_of(model, "4xa100-sxm-40gb", pins)
    (layout, *_) = layouts_of(space)

    found = space.solve(layout, float("inf"))
    ranked = space.ranked(found)  # type: ignore[arg-type]

    assert ranked.plan.schedule == schedule
    assert ranked.plan.virtual_stages == 2
    assert ranked.prediction.fits
    ranked.plan.check_model(model)
    assert ranked.prediction.step_time_s == pytest.approx(ranked.objective_s, rel=0.12)
    answer = search(Request(model, resolve_cluster("4xa100-sxm-40gb"), JOB, pins=pins))
    assert answer.plan.stages == ranked.plan.stages
    again = predict(ranked.plan, model, resolve_cluster("4xa100-sxm-40gb"))
    assert again == ranked.prediction


def test_only_one_order_of_unlike_layers_is_split_so() -> None:
    assert unlike(unet())
    assert not unlike(towers(2, 2))
    alike = ModelGraph(name="alike", layers=(layer("x").model_copy(update={"repeat": 12}),))
    assert not unlike(alike)
