"""Storage and transfers of data by hand, and in a simulation of futures written here."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.findings import data_texts
from meshwright.planner.whatif.monte_carlo import chances_to_be_first
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.ranking import rank_outcomes
from meshwright.planner.whatif.run_study import Result
from tests.planner.whatif.test_study import PRICE, study

QUOTE = {"date": "2026-11", "source": "a quote"}
DATA = {"stored_tb": 73.0, "usd_per_tb_month": 20.0, "moved_tb": 40.0, "usd_per_tb_moved": 50.0}
GOODPUT = {"value": 0.8, "low": 0.8, "high": 0.8, "source": "a log"}
RENT = {"name": "rented", "cluster": "4xa10g", "rent": PRICE}
BUY = {"name": "bought", "cluster": "4xa10g", "buy": {"usd_per_device": 9e3, **QUOTE}}
NEAR = {
    "name": "near",
    "cluster": "4xa10g",
    "rent": PRICE,
    "assumptions": {"data": {"moved_tb": 0.0}},
}


def outcomes(**changes: Any) -> list[CandidateOutcome]:
    assumed = {"goodput": GOODPUT, "data": DATA}
    asked = study(offers=[RENT, BUY, NEAR], assumptions=assumed, **changes)
    return [evaluate(asked, asked.rows[0], candidate) for candidate in candidates_of(asked)]


def test_a_run_pays_storage_by_the_hour_and_transfers_once() -> None:
    rented, bought, near = outcomes()

    # 73 TB at 20 USD a month of 730 hours are 2 USD an hour; 40 TB at 50 USD are 2,000 USD.
    assert rented.hours is not None and rented.usd is not None
    run = rented.hours.value
    assert rented.usd.value == pytest.approx(4 * 2.0 * run + 2.0 * run + 2000.0)
    assert rented.outlay_usd is not None
    assert rented.outlay_usd.value == pytest.approx(rented.usd.value)
    assert near.usd is not None and near.usd.value == pytest.approx(4 * 2.0 * run + 2.0 * run)
    # What is bought has storage of its own, and the data must come to it too.
    assert bought.usd is not None and bought.usd_per_device_hour is not None
    by_hand = 4 * bought.usd_per_device_hour.value * run + 2000.0
    assert bought.usd.value == pytest.approx(by_hand)


@pytest.mark.matrix
def test_a_year_of_jobs_stores_all_year_and_moves_data_for_each_run() -> None:
    job = {"name": "pretraining", "model": "gpt2", "tokens": 1e9, "runs_a_year": 6.0}

    rented, bought, _ = outcomes(models=[], goal={}, jobs=[job])

    assert rented.data_usd.value == pytest.approx(8760 * 2.0 + 6 * 2000.0)
    assert bought.data_usd.value == pytest.approx(6 * 2000.0)


@pytest.mark.matrix
def test_the_price_of_a_tie_leaves_storage_and_transfers_as_they_are() -> None:
    asked = study(offers=[RENT, NEAR], assumptions={"goodput": GOODPUT, "data": DATA})
    first, other = rank_outcomes(asked, [evaluate(asked, "gpt2", c) for c in candidates_of(asked)])

    assert first.outcome.candidate == "near" and other.outcome.usd is not None
    assert first.outcome.usd is not None and other.outcome.hours is not None
    price = other.ties_at_usd_per_device_hour
    if price is not None:
        run = other.outcome.hours.value
        assert 4 * price * run + 2.0 * run + 2000.0 == pytest.approx(first.outcome.usd.value)
    else:  # transfers alone cost more than the first in all
        assert first.outcome.usd.value < other.outcome.data_usd.value


@pytest.mark.matrix
def test_tokens_in_budget_pay_for_transfers_first() -> None:
    [rented, *_] = outcomes(goal={"tokens": 1e9, "budget_usd": 3000.0})

    assert rented.tokens_per_s is not None
    hours = (3000.0 - 2000.0) / (4 * 2.0 + 2.0)
    by_hand = rented.tokens_per_s.value * 0.8 * hours * 3600
    assert rented.tokens_in_budget == pytest.approx(by_hand)


@pytest.mark.matrix
def test_futures_draw_both_prices() -> None:
    """A cluster without transfers at 2.30 an hour against one with them at 2.00."""
    moved = {"value": 50.0, "low": 10.0, "high": 120.0, "source": "lists"}
    offers = [
        {**RENT, "assumptions": {"data": {"moved_tb": 10.0, "usd_per_tb_moved": moved}}},
        {"name": "dearer", "cluster": "4xa10g", "rent": {**PRICE, "usd_per_device_hour": 2.3}},
    ]
    asked = study(offers=offers, goal={"tokens": 5e10}, assumptions={"goodput": GOODPUT})
    pair = [evaluate(asked, "gpt2", candidate) for candidate in candidates_of(asked)]
    step = pair[0].step_s
    assert step is not None and pair[0].hours is not None

    rng, won, futures = random.Random(4), 0, 40_000
    for _ in range(futures):
        one, two = rng.gauss(0, 1), rng.gauss(0, 1)
        width = math.log(step.high / step.value) if one > 0 else math.log(step.value / step.low)
        hours = pair[0].hours.value * math.exp(width * one / 1.2815516)
        width = math.log(120 / 50) if two > 0 else math.log(50 / 10)
        transfers = 500.0 * math.exp(width * two / 1.2815516)
        won += 4 * 2.0 * hours + transfers < 4 * 2.3 * hours

    assert 0.1 < won / futures < 0.9
    found = chances_to_be_first(pair, "cost")
    assert found[0] == pytest.approx(won / futures, abs=0.015)


@pytest.mark.matrix
def test_the_answer_says_what_they_are_of_the_cost() -> None:
    found = outcomes()
    ranks = {"gpt2": rank_outcomes(study(), found)}

    [said] = data_texts(Result(study=study(), outcomes=tuple(found), ranks=ranks))

    rented = found[0]
    assert rented.usd is not None
    share = 100 * rented.data_usd.value / rented.usd.value
    assert f"rented {rented.data_usd.value:,.0f} USD ({share:.0f} %)" in said


def test_nothing_is_paid_where_no_data_is_named() -> None:
    asked = study(offers=[RENT])
    [candidate] = candidates_of(asked)

    assert evaluate(asked, "gpt2", candidate).data_usd.value == 0
