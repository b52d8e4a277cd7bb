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
from meshwright.planner.whatif.ranking import doubts, rank_outcomes
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


def test_a_run_pays_each_term_of_a_contract_that_it_begins() -> None:
    """By hand: eight devices at 1.20 USD, 730 hours a term; the run is made 0.3 and 2.4 terms."""
    offers = [{"cluster": "8xa10g", "rent": contract(1.2, 1.0)}]
    plain = study(offers=offers)
    [candidate] = candidates_of(plain)
    planned = plan_candidate(plain, "gpt2", candidate)
    once = evaluate(plain, "gpt2", candidate, planned)
    assert once.hours is not None
    for terms, paid in ((0.3, 1), (2.4, 3)):
        asked = study(offers=offers, goal={"tokens": 1e9 * terms * 730 / once.hours.value})
        outcome = evaluate(asked, "gpt2", candidate, planned)
        assert outcome.usd is not None
        assert outcome.usd.value == pytest.approx(8 * 1.2 * 730 * paid)
        assert outcome.outlay_usd is not None
        assert outcome.outlay_usd.value == pytest.approx(outcome.usd.value)

    short = evaluate(plain, "gpt2", candidate, planned)
    shared = study(offers=offers, assumptions={"utilisation": 0.5})
    [other] = candidates_of(shared)
    share = evaluate(shared, "gpt2", other, planned)
    assert share.usd is not None and short.usd is not None
    assert share.usd.value == pytest.approx(8 * 1.2 * once.hours.value / 0.5)


def test_a_purchase_is_paid_whole_by_the_only_run_in_its_year() -> None:
    """By hand: no interest, resale or running costs: a third of 8 x 9,000 USD, of three years."""
    asked = study(**free_of_all_but_the_price())
    [candidate] = candidates_of(asked)
    outcome = evaluate(asked, "gpt2", candidate)

    assert outcome.usd is not None and outcome.hours is not None
    assert outcome.hours.value < 1000
    assert outcome.usd.value == pytest.approx(24_000.0)
    assert outcome.usd.high == pytest.approx(24_000.0)
    assert outcome.capital_usd == pytest.approx(72_000.0)


def free_of_all_but_the_price() -> dict[str, Any]:
    """Return a purchase of eight devices at 9,000 USD that costs nothing else in three years."""
    nothing = {"value": 0.0, "low": 0.0, "high": 0.0, "source": "by hand"}
    names = ("storage_usd_per_device", "spares", "support_a_year", "insurance_a_year")
    names += ("staff_usd_per_device_year", "hosting_usd_per_kw_month", "idle_power")
    owning = dict.fromkeys(names, nothing)
    owning |= {"income_tax": 0.0, "sales_tax": 0.0, "residual_by_age": [0.0, 0.0, 0.0]}
    buy = {"usd_per_device": 9000.0, "network_usd_per_device": 0.0, **QUOTE}
    ends = {"low": 9000.0, "high": 9000.0}
    power = {"value": 1e-12, "low": 1e-12, "high": 1e-12, "source": "by hand"}
    return {
        "offers": [{"cluster": "8xa10g", "buy": {**buy, **ends}}],
        "assumptions": {"owning": owning, "interest": 0.0, "electricity_usd_per_kwh": power},
    }


def test_a_year_of_one_job_costs_what_its_run_costs() -> None:
    """One question in two forms: rented, reserved for a year and bought, within 5 %."""
    offers = [
        {"name": "rented", "cluster": "8xa10g", "rent": on_demand(1.5)},
        {"name": "reserved", "cluster": "8xa10g", "rent": contract(0.9, 12.0)},
        {"name": "bought", "cluster": "8xa10g", "buy": {"usd_per_device": 9e3, **QUOTE}},
    ]
    for tokens in (4e10, 4.8e11):
        jobs = [{"name": "all", "model": "gpt2", "tokens": tokens, "runs_a_year": 1.0}]
        yearly = study(models=[], goal={}, jobs=jobs, offers=offers)
        once = study(goal={"tokens": tokens}, offers=offers)
        each = candidates_of(once)
        planned = plan_candidate(once, "gpt2", each[0])
        runs = [evaluate(once, "gpt2", c, planned) for c in each]
        year_plan = year_of([(yearly.jobs[0], planned)])
        years = [evaluate(yearly, yearly.rows[0], c, year_plan) for c in candidates_of(yearly)]

        for run_outcome, year_outcome in zip(runs, years, strict=True):
            assert run_outcome.usd is not None and year_outcome.usd is not None
            assert run_outcome.usd.value == pytest.approx(year_outcome.usd.value, rel=0.05)
        order = [
            [rank.outcome.candidate for rank in rank_outcomes(asked, outcomes)]
            for asked, outcomes in ((once, runs), (yearly, years))
        ]
        assert order[0] == order[1]


def test_a_budget_pays_each_term_that_a_run_begins() -> None:
    """A run of 0.96 terms begins a second one in some futures: 1.5 terms' money does for one."""
    asked = study(offers=[{"cluster": "8xa10g", "rent": contract(1.2, 12.0)}])
    [plan] = [plan_candidate(asked, "gpt2", candidate) for candidate in candidates_of(asked)]
    [candidate] = candidates_of(asked)
    whole_h = evaluate(asked, "gpt2", candidate, plan).hours
    assert whole_h is not None
    months = 12 * whole_h.value / 0.96 / 8760
    term_usd = 8 * 1.2 * 8760 * months / 12
    goal = {"tokens": 1e9, "budget_usd": 1.5 * term_usd}
    asked = study(offers=[{"cluster": "8xa10g", "rent": contract(1.2, months)}], goal=goal)
    [candidate] = candidates_of(asked)

    outcome = evaluate(asked, "gpt2", candidate, plan)

    assert outcome.step_s is not None and outcome.goodput is not None
    rng, one_term, futures = random.Random(7), 0, 40_000
    for _ in range(futures):
        step_s, goodput = (
            span.value * ((span.high if z > 0 else span.low) / span.value) ** (abs(z) / 1.2815516)
            for span, z in (
                (outcome.step_s, rng.gauss(0, 1)),
                (outcome.goodput, rng.gauss(0, 1)),
            )
        )
        hours = 0.96 * (step_s / outcome.step_s.value) / (goodput / outcome.goodput.value)
        one_term += hours <= 1.0
    expected = outcome.fit_probability * one_term / futures
    assert outcome.chances["budget"] == pytest.approx(expected, abs=0.02)
