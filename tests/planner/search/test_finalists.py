"""Finalists: solved and simulated near the optimum; the fastest simulated is the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.catalog import stacks
from planner.expressions import resolve_cluster, resolve_model
from planner.pins import Pins
from planner.plan import Job
from planner.predict import predict
from planner.prediction import Simulated
from planner.request import Request
from planner.search.answer import Answer
from planner.search.best_first import search
from planner.search.finalists import MARGIN

CASES = {
    "pipelines": (
        "llama-3.2-3b",
        "8xa100-sxm-40gb",
        4096,
        32,
        Pins(pipeline=4, micro_batch=1, compile="none"),
    ),
    "tied": ("gpt2", "4xv100-sxm-32gb", 1024, 32, Pins(pipeline=4)),
    "open": ("llama-3.2-3b", "4xa100-sxm-40gb", 4096, 32, Pins()),
    "1f1b": ("llama-3.2-3b", "8xa100-sxm-40gb", 4096, 32, Pins(pipeline=4, schedule="1f1b")),
}


@cache
def answer(name: str) -> Answer:
    model, cluster, seq_len, global_batch, pins = CASES[name]
    job = Job(seq_len=seq_len, global_batch=global_batch)
    return search(Request(resolve_model(model), resolve_cluster(cluster), job, pins=pins))


def simulated(name: str) -> Simulated:
    found = answer(name).certificate.simulated
    assert found is not None
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_fastest_of_those_simulated_and_fits(name: str) -> None:
    model, cluster, _, _, _ = CASES[name]
    found, finals = answer(name), simulated(name)

    again = predict(found.plan, resolve_model(model), resolve_cluster(cluster))

    assert again.fits
    assert again.step_time_s == pytest.approx(finals.step_time_s)
    assert finals.layout == found.plan.layout.text() == finals.finalists[0].layout
    seconds = [final.step_time_s for final in finals.finalists]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-12)
    assert len({final.layout for final in finals.finalists}) == len(seconds)


@pytest.mark.parametrize("name", CASES)
def test_finalists_are_within_the_margin_of_the_proven_optimum(name: str) -> None:
    certificate, finals = answer(name).certificate, simulated(name)

    objectives = {final.layout: final.objective_s for final in finals.finalists}

    assert certificate.gap == 0
    assert certificate.layout is not None
    assert objectives[certificate.layout] == certificate.objective_s == min(objectives.values())
    assert max(objectives.values()) <= certificate.objective_s * (1 + MARGIN) * (1 + 1e-12)


def test_pipelines_have_finalists_of_several_schedules() -> None:
    plans = {final.layout.split()[4] for final in simulated("pipelines").finalists}

    assert len(plans) > 1


@pytest.mark.parametrize("name", CASES)
def test_the_bound_in_the_simulator_is_told_only_where_it_holds(name: str) -> None:
    found, finals = answer(name), simulated(name)

    if found.plan.schedule == "1f1b":
        assert finals.lower_bound_s is not None
        assert 0.8 * finals.step_time_s < finals.lower_bound_s <= finals.step_time_s * (1 + 1e-9)
    else:
        assert finals.lower_bound_s is None
        assert "none is known" in finals.bound


def test_a_single_stage_is_bounded_by_what_it_takes() -> None:
    job = Job(seq_len=1024, global_batch=32)
    found = search(
        Request(
            resolve_model("gpt2"), resolve_cluster("4xv100-sxm-32gb"), job, pins=Pins(pipeline=1)
        )
    )

    finals = found.certificate.simulated

    assert finals is not None
    assert finals.lower_bound_s == pytest.approx(finals.step_time_s, rel=1e-9)


def test_finalists_recompute_differently_where_all_blocks_do_the_same() -> None:
    """Every choice of recompute has plans within the margin: its own search finds them too."""
    node = resolve_cluster("8xa100-sxm-40gb")
    [group] = node.groups
    small = group.accelerator.model_copy(update={"memory_bytes": 13 * 10**9})
    cluster = node.model_copy(update={"groups": (group.model_copy(update={"accelerator": small}),)})
    asked = Request(
        resolve_model("llama-3.2-3b"),
        cluster,
        Job(seq_len=4096, global_batch=32),
        stack=stacks()["torchtitan"],
    )

    found = search(asked)

    assert found.certificate.simulated is not None
    listed = {one.layout: one for one in found.certificate.simulated.finalists}
    assert {text.rpartition("=")[2] for text in listed} == {"selective", "full"}
    for recompute in ("selective", "full"):
        alone = search(replace(asked, pins=Pins(recompute=recompute)))
        closest = listed[f"{alone.certificate.layout} recompute={recompute}"]
        assert closest.objective_s == pytest.approx(alone.certificate.objective_s, rel=1e-12)
