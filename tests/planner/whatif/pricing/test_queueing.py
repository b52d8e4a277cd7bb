"""Jobs of a year: a simulation of queues that shares no formula, and a year by hand."""

from __future__ import annotations

import heapq
import random

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate, with_load
from meshwright.planner.whatif.findings import year_texts
from meshwright.planner.whatif.planning import plan_candidate
from meshwright.planner.whatif.pricing.queueing import load, shortest_first_h, wait_h
from meshwright.planner.whatif.ranking import rank_outcomes
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.study import YEAR
from tests.planner.whatif.test_study import PRICE, study

QUOTE = {"date": "2026-11", "source": "a quote"}


def simulated(jobs: list[tuple[float, float]], *, shortest: bool, years: int = 150) -> list[float]:
    """Return what each class of jobs waits on average; (runs a year, hours of a run)."""
    rng = random.Random(11)
    arrivals = []
    for kind, (runs, _) in enumerate(jobs):
        # Of a Poisson process whose number of arrivals is known, the times are independent.
        times = (rng.random() * years * 8760 for _ in range(round(runs * years)))
        arrivals += [(came, kind) for came in times]
    arrivals.sort()
    waiting: list[tuple[float, float, int]] = []
    waits: list[list[float]] = [[] for _ in jobs]
    free, at = 0.0, 0
    while at < len(arrivals) or waiting:
        if not waiting and free < arrivals[at][0]:
            free = arrivals[at][0]
        while at < len(arrivals) and arrivals[at][0] <= free:
            came, kind = arrivals[at]
            heapq.heappush(waiting, (jobs[kind][1] if shortest else 0.0, came, kind))
            at += 1
        _, came, kind = heapq.heappop(waiting)
        waits[kind].append(free - came)
        free += jobs[kind][1]
    return [sum(each) / len(each) for each in waits]


JOBS = [(20.0, 100.0), (150.0, 20.0), (700.0, 2.0)]
"""2,000 + 3,000 + 1,400 of 8,760 hours: 73 %."""


def test_a_simulation_waits_as_long_in_order_of_arrival() -> None:
    found = wait_h(JOBS)

    assert load(JOBS) == pytest.approx(6_400 / 8_760)
    # By hand: (20 x 100² + 150 x 20² + 700 x 2²) / 2 / 8,760 = 15.0 h, over 1 - 0.7306.
    assert found == pytest.approx(15.0 / 0.269406, rel=1e-5)
    assert simulated(JOBS, shortest=False) == pytest.approx([found] * 3, rel=0.06)


def test_a_simulation_waits_as_long_where_the_shortest_goes_first() -> None:
    found = shortest_first_h(JOBS)

    assert found is not None
    assert simulated(JOBS, shortest=True) == pytest.approx(found, rel=0.06)
    assert found[2] < found[1] < found[0]


def test_more_jobs_than_hours_wait_for_ever() -> None:
    jobs = [(10.0, 800.0), (100.0, 10.0)]

    assert load(jobs) > 1
    assert wait_h(jobs) is None and shortest_first_h(jobs) is None


@pytest.mark.matrix
def test_a_year_of_jobs_by_hand() -> None:
    """Two jobs that are planned alone and added by hand; what is bought costs all hours."""
    jobs = [
        {"name": "pretraining", "model": "gpt2", "tokens": 6e10, "runs_a_year": 2.0},
        {"name": "tuning", "model": "gpt2", "tokens": 1e9, "runs_a_year": 20.0, "tuning": "lora"},
    ]
    offers = [
        {"name": "rented", "cluster": "8xa10g", "rent": PRICE},
        {"name": "bought", "cluster": "8xa10g", "buy": {"usd_per_device": 9e3, **QUOTE}},
    ]
    assumed = {"goodput": {"value": 0.8, "low": 0.8, "high": 0.8, "source": "a log"}}
    asked = study(models=[], goal={}, jobs=jobs, offers=offers, assumptions=assumed)
    alone = study(offers=offers, assumptions=assumed)
    [rented, bought] = candidates_of(asked)
    plan = plan_candidate(asked, YEAR, rented)

    outcomes = [evaluate(asked, YEAR, candidate, plan) for candidate in (rented, bought)]

    hours = []
    for tokens, tuning in ((6e10, "pretrain"), (1e9, "lora")):
        own = alone.model_copy(update={"work": alone.work.model_copy(update={"tuning": tuning})})
        prediction = plan_candidate(own, "gpt2", candidates_of(own)[0]).prediction
        assert prediction is not None
        hours.append(tokens / 64 / 1024 * prediction.step_time_s / 3600 / 0.8)
    year = 2 * hours[0] + 20 * hours[1]
    assert year < 8760
    for outcome in outcomes:
        assert outcome.hours is not None and outcome.usd is not None
        assert outcome.hours.value == pytest.approx(year)
        assert [job.hours for job in outcome.jobs] == pytest.approx(hours)
        assert outcome.chances["hours of a year"] > 0.5
    assert outcomes[0].usd is not None and outcomes[0].usd.value == pytest.approx(8 * 2.0 * year)
    hourly = bought.priced.hourly
    assert hourly is not None and outcomes[1].usd is not None
    by_hand = 8 * (8760 * hourly.fixed.value + year * hourly.used.value)
    assert outcomes[1].usd.value == pytest.approx(by_hand)

    candidates = {c.name: with_load(c, o) for c, o in zip((rented, bought), outcomes, strict=True)}
    assert candidates["bought"].assumed.utilisation == pytest.approx(year / 8760)
    ranks = {YEAR: rank_outcomes(asked, outcomes)}
    result = Result(study=asked, outcomes=tuple(outcomes), ranks=ranks, candidates=candidates)
    said = list(year_texts(result))
    assert len(said) == 2 and f"{100 * year / 8760:.0f} % of a year's hours are used" in said[0]
    assert "pretraining" in said[0] and "tuning" in said[0]


def test_jobs_that_take_more_hours_than_a_year_has_are_a_miss() -> None:
    job = {"name": "pretraining", "model": "gpt2", "tokens": 3e11, "runs_a_year": 90.0}
    asked = study(models=[], goal={}, jobs=[job], offers=[{"cluster": "4xa10g", "rent": PRICE}])
    [candidate] = candidates_of(asked)

    outcome = evaluate(asked, YEAR, candidate)

    [miss] = outcome.misses
    assert miss.startswith("hours of a year: ") and miss.endswith("of 8,760 hours")
    assert outcome.chances["hours of a year"] < 0.01


@pytest.mark.parametrize(
    "change",
    [
        {"goal": {"tokens": 1e9}},
        {"goal": {"deadline_days": 9.0}},
        {"models": ["gpt2"]},
        {"marginal": {}},
        {"offers": [{"cluster": "8xa10g", "tuning": "lora"}]},
    ],
)
def test_what_is_of_one_training_is_refused_beside_jobs(change: dict[str, object]) -> None:
    job = {"name": "pretraining", "model": "gpt2", "tokens": 3e11, "runs_a_year": 9.0}

    with pytest.raises(DocumentError, match="jobs"):
        study(**{"models": [], "goal": {}, "jobs": [job], **change})
