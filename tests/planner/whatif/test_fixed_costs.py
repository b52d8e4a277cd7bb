"""What is paid whole does not move with the hours that are used, against a simulation of its own.

A year of jobs pays a contract's year, and a purchase's, whatever hours the jobs take.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.monte_carlo import chances_to_be_first, drawn_figure
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.planning import Planned, plan_candidate, year_of
from meshwright.planner.whatif.ranking import doubts
from meshwright.planner.whatif.study import Study
from tests.planner.whatif.test_study import study

QUOTE = {"date": "2026-11-28", "source": "a quote"}


def contract(usd: float, months: float, **more: float) -> dict[str, Any]:
    terms = {"commitment": "reserved", "term_months": months, "low": usd, "high": usd}
    return {"usd_per_device_hour": usd, **terms, **more, **QUOTE}


def on_demand(usd: float) -> dict[str, Any]:
    return {"usd_per_device_hour": usd, "low": usd, "high": usd, **QUOTE}


def year(offers: list[dict[str, Any]]) -> tuple[Study, list[Planned]]:
    """Return a study of a year of jobs on eight devices, and its plan: two of its days a run."""
    jobs = [{"name": "trials", "model": "gpt2", "tokens": 4e10, "runs_a_year": 12.0}]
    asked = study(models=[], goal={}, jobs=jobs, offers=offers)
    plain = study(offers=offers)
    planned = plan_candidate(plain, "gpt2", candidates_of(plain)[0])
    return asked, [year_of([(asked.jobs[0], planned)])] * len(offers)


def outcomes_of_year(offers: list[dict[str, Any]]) -> list[CandidateOutcome]:
    asked, plans = year(offers)
    each = candidates_of(asked)
    return [evaluate(asked, asked.rows[0], c, p) for c, p in zip(each, plans, strict=True)]


def test_a_contract_of_a_year_costs_the_year_whatever_hours_are_used() -> None:
    [outcome] = outcomes_of_year([{"cluster": "8xa10g", "rent": contract(1.2, 12.0)}])

    assert outcome.hours is not None and outcome.hours.low < outcome.hours.high < 8760
    drawn = drawn_figure(outcome, "cost")
    assert outcome.usd is not None and drawn is not None
    by_hand = 8 * 8760 * 1.2
    for usd in (outcome.usd.value, outcome.usd.low, outcome.usd.high, *drawn[:100]):
        assert usd == pytest.approx(by_hand)
    assert outcome.outlay_usd is not None
    assert outcome.outlay_usd.low == pytest.approx(outcome.outlay_usd.high)


def test_a_rent_is_cheaper_than_a_contract_as_often_as_it_takes_fewer_hours() -> None:
    """By hand: 8 x hours x 1.50 stay below 8 x 8,760 x p in as many futures as hours do."""
    [rented] = outcomes_of_year([{"cluster": "8xa10g", "rent": on_demand(1.5)}])
    assert rented.hours is not None and rented.step_s is not None and rented.goodput is not None
    limit_h = 1.1 * rented.hours.value
    usd = 1.5 * limit_h / 8760
    pair = outcomes_of_year(
        [
            {"name": "rented", "cluster": "8xa10g", "rent": on_demand(1.5)},
            {"name": "reserved", "cluster": "8xa10g", "rent": contract(usd, 12.0)},
        ]
    )

    rng, below, futures = random.Random(3), 0, 40_000
    step, goodput = rented.step_s, rented.goodput
    for _ in range(futures):
        slower, trains = rng.gauss(0, 1), rng.gauss(0, 1)
        end = step.high if slower > 0 else step.low
        factor = math.exp(math.log(end / step.value) * abs(slower) / 1.2815516)
        end = goodput.high if trains > 0 else goodput.low
        factor /= math.exp(math.log(end / goodput.value) * abs(trains) / 1.2815516)
        below += rented.hours.value * factor < limit_h
    assert 0.55 < below / futures < 0.95
    assert chances_to_be_first(pair, "cost")[0] == pytest.approx(below / futures, abs=0.02)


def test_what_a_purchase_fixes_moves_by_its_price_alone() -> None:
    """Its hours move what electricity costs beside, and nothing else."""
    buy = {"usd_per_device": 9000.0, "low": 9000.0, "high": 9000.0, **QUOTE}
    [bought] = outcomes_of_year([{"cluster": "8xa10g", "buy": buy}])
    assert bought.fixed_usd_per_device_hour is not None and bought.hours is not None
    assert bought.used_usd_per_device_hour is not None

    longer = replace(bought, hours=bought.hours.times(1.2))
    costs = [drawn_figure(each, "cost") for each in (bought, longer)]
    assert costs[0] is not None and costs[1] is not None
    used = bought.used_usd_per_device_hour
    more = 8 * 0.2 * bought.hours.value * used.value
    assert np.median(costs[1] - costs[0]) == pytest.approx(more, rel=0.05)


def test_hours_are_no_doubt_of_what_is_fixed() -> None:
    asked, _ = year(offers := [{"cluster": "8xa10g", "rent": contract(1.2, 12.0)}])
    [outcome] = outcomes_of_year(offers)
    assert doubts(asked, outcome) == []
    [rented] = outcomes_of_year([{"cluster": "8xa10g", "rent": on_demand(1.5)}])
    assert sum(doubt.share for doubt in doubts(asked, rented)) == pytest.approx(1.0)
