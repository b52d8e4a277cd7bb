"""Finalists: solved and simulated near the optimum; the fastest simulated is the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Job
from meshwright.planner.documents.prediction import Certificate
from meshwright.planner.documents.units import seconds_text
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.proof_account import certificate_of, of_plan
from meshwright.planner.search.search import search

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


def simulated(name: str) -> Certificate:
    return answer(name).certificate


@pytest.mark.long("pipelines", "tied", "open")
@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_fastest_of_those_simulated_and_fits(name: str) -> None:
    model, cluster, _, _, _ = CASES[name]
    found, finals = answer(name), simulated(name)

    again = predict(found.plan, resolve_model(model), resolve_cluster(cluster))

    assert again.fits
    assert again.step_time_s == pytest.approx(finals.objective_s)
    assert finals.layout == found.plan.layout.text() == finals.finalists[0].layout
    seconds = [final.step_time_s for final in finals.finalists]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-12)
    assert len({final.layout for final in finals.finalists}) == len(seconds)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long("pipelines", "tied", "open")
def test_finalists_have_the_optimum_of_the_closed_form_among_them(name: str) -> None:
    closed_form, finals = answer(name).closed_form, simulated(name)

    each = {final.layout: final.closed_form_s for final in finals.finalists}

    assert min(each.values()) >= closed_form.objective_s * (1 - 1e-12)
    assert each[closed_form.plan.layout.text()] == closed_form.objective_s


def test_pipelines_have_finalists_of_several_schedules() -> None:
    plans = {final.layout.split()[4] for final in simulated("pipelines").finalists}

    assert len(plans) > 1


@pytest.mark.parametrize("name", CASES)
def test_the_bound_in_the_simulator_is_told_in_words_and_figures(name: str) -> None:
    found, finals = answer(name), simulated(name)
    proof = found.certificate.plan
    assert proof is not None

    assert 0.7 * finals.objective_s < finals.lower_bound_s <= finals.objective_s
    assert finals.gap == pytest.approx(1 - finals.lower_bound_s / finals.objective_s)
    assert proof.gap == pytest.approx(finals.gap)
    assert f"takes less than {seconds_text(finals.lower_bound_s)} " in proof.statement
    assert proof.statement == found.certificate.statement


def test_a_single_stage_is_bounded_by_what_it_takes() -> None:
    job = Job(seq_len=1024, global_batch=32)
    found = search(
        Request(
            resolve_model("gpt2"), resolve_cluster("4xv100-sxm-32gb"), job, pins=Pins(pipeline=1)
        )
    )

    finals = found.certificate

    assert finals.lower_bound_s == pytest.approx(finals.objective_s, rel=1e-9)


@pytest.mark.matrix
def test_every_choice_of_recompute_counts_where_all_blocks_do_the_same() -> None:
    """No choice alone has a faster plan, and the bound holds for each."""
    node = resolve_cluster("8xa100-sxm-40gb")
    [group] = node.groups
    small = group.accelerator.model_copy(update={"memory_bytes": 13 * 10**9})
    cluster = node.model_copy(update={"groups": (group.model_copy(update={"accelerator": small}),)})
    asked = Request(
        resolve_model("llama-3.2-3b"),
        cluster,
        Job(seq_len=4096, global_batch=32),
        framework=frameworks()["torchtitan"],
    )

    found = search(asked)

    finals = found.certificate
    for recompute in ("selective", "full"):
        alone = search(replace(asked, pins=Pins(recompute=recompute))).prediction.step_time_s
        assert finals.lower_bound_s <= alone * (1 + 1e-9)
        assert finals.objective_s <= alone * 1.01


def test_a_bound_below_the_step_leaves_a_gap() -> None:
    finals = simulated("tied")
    account: Any = SimpleNamespace(counts={"pruned": 3})

    left = certificate_of(
        account,
        frameworks()["native"],
        solver="exact",
        finalists=finals.finalists,
        lower_bound_s=np.float64(0.9 * finals.objective_s),  # as bounds of arrays are
        looked_at={},
        runners_up=(),
    )

    assert left.lower_bound_s == 0.9 * finals.objective_s
    assert left.gap == pytest.approx(0.1) and not left.optimal
    proof = of_plan(left, layout=answer("tied").plan.layout, step_s=finals.objective_s).plan
    assert proof is not None and proof.gap == pytest.approx(0.1)
