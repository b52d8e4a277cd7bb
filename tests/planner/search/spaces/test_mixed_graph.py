"""Graphs of layers on several kinds of devices, against every layout, order of kinds and split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.requests.pins import Allowance, Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
from meshwright.planner.search.search import search
from meshwright.planner.search.spaces.mixed import GraphSpace
from tests.planner.search.spaces.every_layout import bounded
from tests.planner.search.spaces.test_graph import graph, layer, random_model
from tests.planner.solver.small_graphs import least_objective_s

JOB = Job(seq_len=64, global_batch=6, precision="fp32")
THREE = "1xa100-sxm-40gb+2xv100-sxm-32gb"


def least_s(model: ModelGraph, cluster: str, pins: Pins) -> float:
    """Seconds of the best layout of all groups, each by listing; bounds must not exceed any."""
    space = GraphSpace(GroupCandidates(Request(model, resolve_cluster(cluster), JOB, pins)))
    best = math.inf
    for layout, bound_s in bounded(space):
        step_s = max(costs.step_s for costs in space.costs_of(layout))
        listed_s = least_objective_s(space.instance(layout)) + step_s
        bounds_s = [bound_s, space.candidates.communication_s(layout), space.memory_s(layout)]
        assert max(bounds_s) <= listed_s * (1 + 1e-9)
        best = min(best, listed_s)
    return best


@pytest.mark.spread(2)
@pytest.mark.parametrize("seed", [s for s in range(40) if len(random_model(s).layers) <= 5][:10])
def test_no_order_of_kinds_and_branches_beats_the_plan(seed: int) -> None:
    model, cluster = random_model(seed), resolve_cluster(THREE)
    schedule = ("1f1b", "gpipe", "zb-h1")[seed % 3]
    pins = Pins(tensor=1, pipeline=3, data=1, micro_batch=(1, 2, 3)[seed % 3], schedule=schedule)

    answer = search(Request(model, cluster, JOB, pins=pins))

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert answer.closed_form.objective_s == pytest.approx(least_s(model, THREE, pins), rel=1e-9)
    assert answer.prediction.fits
    assert predict(answer.plan, model, cluster) == answer.prediction
    groups = [stage.group for stage in answer.plan.stages]
    assert sorted(map(str, groups)) == ["a100-sxm-40gb", "v100-sxm-32gb", "v100-sxm-32gb"]
    # The closed form charges what is sent to both stages; the simulation hides some of it.
    assert answer.prediction.step_time_s <= 1.05 * answer.closed_form.objective_s


def storing(model: ModelGraph, factor: int) -> ModelGraph:
    """Return the model with so much more to store for backward."""
    layers = []
    for one in model.layers:
        assert one.trace is not None
        more = {"stored_bytes": factor * one.trace.stored_bytes}
        layers.append(one.model_copy(update={"trace": one.trace.model_copy(update=more)}))
    return model.model_copy(update={"layers": tuple(layers)})


@pytest.mark.spread(1)
@pytest.mark.parametrize("word", ["offload", "compress"])
@pytest.mark.matrix
def test_no_treatment_of_activations_beats_the_plan(word: Allowance) -> None:
    model, cluster = storing(random_model(2), 16), resolve_cluster(THREE)
    pins = Pins(
        tensor=1,
        pipeline=3,
        data=1,
        micro_batch=2,
        schedule="1f1b",
        recompute="none",
        offload="none",
        gradient_compression="full",
        allowed=frozenset({word}),
    )

    answer = search(Request(model, cluster, JOB, pins=pins))

    assert answer.closed_form.objective_s == pytest.approx(least_s(model, THREE, pins), rel=1e-9)
    assert {item.activations for stage in answer.plan.stages for item in stage.layers} >= {word}
    assert predict(answer.plan, model, cluster) == answer.prediction
    with pytest.raises(NoPlanFits, match=f"with --allow {word}"):
        search(Request(model, cluster, JOB, pins=replace(pins, allowed=frozenset())))


@pytest.mark.matrix
def test_states_on_hosts_and_narrow_gradients_are_weighed_with_splits() -> None:
    model, cluster = random_model(2), "2xa100-sxm-40gb+4xv100-sxm-32gb"
    pins = Pins(tensor=1, pipeline=3, data=2, zero=1, micro_batch=1, schedule="1f1b")
    allowed = replace(pins, activations="keep", allowed=frozenset({"offload", "compress"}))
    each = {
        (offload, wire): replace(allowed, offload=offload, gradient_compression=wire)
        for offload in ("none", "optimizer", "parameters")
        for wire in ("full", "bf16", "fp16")
    }

    answer = search(Request(model, resolve_cluster(cluster), JOB, pins=allowed))

    listed_s = {named: least_s(model, cluster, own) for named, own in each.items()}
    best_s = min(listed_s.values())
    assert answer.closed_form.objective_s == pytest.approx(best_s, rel=1e-9)
    assert best_s < listed_s["none", "full"]
    best = listed_s[answer.plan.offload, answer.plan.gradient_compression]
    assert best == pytest.approx(best_s, rel=1e-9)
    # What is pinned is solved too, wherever states are.
    for named, own in each.items():
        asked = Request(model, resolve_cluster(cluster), JOB, pins=own)
        assert search(asked).closed_form.objective_s == pytest.approx(listed_s[named], rel=1e-9)


def test_graphs_close_to_the_best_are_simulated_on_devices_that_differ() -> None:
    model, cluster = random_model(8), resolve_cluster(THREE)

    answer = search(Request(model, cluster, JOB))

    assert answer.closed_form in answer.finalists
    assert len({one.plan.layout for one in answer.finalists}) > 1
    steps_s = [one.prediction.step_time_s for one in answer.finalists]
    assert answer.prediction.step_time_s <= min(steps_s) * (1 + 1e-9)
    for one in answer.finalists:
        assert predict(one.plan, model, cluster).step_time_s == one.prediction.step_time_s
        assert one.objective_s >= answer.closed_form.objective_s * (1 - 1e-9)


def test_without_a_pipeline_ranks_of_a_graph_have_shares() -> None:
    model = random_model(3)
    cluster = resolve_cluster(THREE)

    answer = search(Request(model, cluster, JOB, pins=Pins(pipeline=1, tensor=1)))

    assert answer.plan.shares is not None
    assert answer.plan.model.digest == model.digest
    assert predict(answer.plan, model, cluster) == answer.prediction


@pytest.mark.matrix
def test_a_slower_device_does_not_help() -> None:
    model, pins = random_model(5), Pins(pipeline=2, data=1, tensor=1, schedule="1f1b")
    mixed = resolve_cluster("1xa100-sxm-40gb+1xv100-sxm-32gb")

    both = search(Request(model, mixed, JOB, pins=pins))
    fast = search(Request(model, resolve_cluster("2xa100-sxm-40gb"), JOB, pins=pins))

    # A slower device cannot help, whatever the link between them.
    assert fast.closed_form.objective_s <= both.closed_form.objective_s


@pytest.mark.matrix
def test_a_graph_that_fits_nowhere_is_told_what_would_help() -> None:
    huge = [layer(f"l{n}", scale=400.0) for n in range(4)]
    model = graph(huge, [("l0", "l1"), ("l0", "l2"), ("l1", "l3"), ("l2", "l3")])

    with pytest.raises(NoPlanFits) as error:
        search(Request(model, resolve_cluster(THREE), JOB, pins=Pins(pipeline=3, micro_batch=1)))

    words = str(error.value)
    assert "The closest, " in words
    assert " times their memory: stage " in words
    assert "It would fit " in words or "times the devices" in words
