"""Time weighed against money: by hand, and against a simulation of futures written here."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.findings import worth_of_a_day
from meshwright.planner.whatif.monte_carlo import chances_to_be_first
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.ranking import rank_outcomes
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from tests.planner.whatif.test_study import study

QUOTE = {"date": "2026-11", "source": "a quote"}


def run_of(name: str, days: float, usd: UncertainValue, day_usd: float) -> CandidateOutcome:
    hours, devices = 24 * days, 10
    return CandidateOutcome(
        candidate=name,
        model="m",
        devices=devices,
        accelerator=name,
        fits=True,
        binding="",
        step_s=exact(1.0),
        tokens_per_s=exact(1.0),
        goodput=exact(1.0),
        hours=exact(hours),
        usd=usd,
        usd_per_device_hour=usd.times(1 / hours / devices),
        price=name,
        day_usd=day_usd,
    )


SLOW, FAST, MIDDLE = (30.0, 100e3), (10.0, 220e3), (20.0, 150e3)
"""Days and dollars.  A day of the 10 to 20 between them costs 5,000 and 7,000 USD."""


@pytest.mark.parametrize(
    ("day_usd", "first", "said"),
    [
        (1_000.0, "slow", "above 5,000 USD middle"),
        (6_500.0, "middle", "below 5,000 USD slow ranks first, above 7,000 USD fast"),
        (8_000.0, "fast", "below 7,000 USD middle ranks first"),
    ],
)
def test_the_first_by_a_stated_worth_of_a_day(day_usd: float, first: str, said: str) -> None:
    asked = study(models=["m"], goal={"tokens": 1.0, "by": "weighted", "day_usd": day_usd})
    known = {"slow": SLOW, "fast": FAST, "middle": MIDDLE}
    outcomes = tuple(run_of(n, days, exact(usd), day_usd) for n, (days, usd) in known.items())
    ranks = rank_outcomes(asked, outcomes)
    result = Result(study=asked, outcomes=outcomes, ranks={"m": ranks})

    figures = {n: usd + day_usd * days for n, (days, usd) in known.items()}
    assert [rank.outcome.candidate for rank in ranks] == sorted(figures, key=lambda n: figures[n])
    beginning = f"A day sooner is worth {day_usd:,.0f} USD: {first} ranks first"
    assert list(worth_of_a_day(result)) == [f"{beginning}; {said}."]


def test_how_often_each_is_first_is_that_of_a_simulation() -> None:
    rng, won, futures = random.Random(3), 0, 40_000
    ends = {"slow": (80e3, 100e3, 160e3), "fast": (180e3, 220e3, 260e3)}
    for _ in range(futures):
        figures = {}
        for name, days in (("slow", 30.0), ("fast", 10.0)):
            low, value, high = ends[name]
            normal = rng.gauss(0, 1)
            width = math.log(high / value) if normal > 0 else math.log(value / low)
            figures[name] = value * math.exp(width * normal / 1.2815516) + 5_500 * days
        won += figures["slow"] < figures["fast"]

    outcomes = [
        run_of(
            name,
            days,
            UncertainValue(value=ends[name][1], low=ends[name][0], high=ends[name][2]),
            5_500,
        )
        for name, days in (("slow", 30.0), ("fast", 10.0))
    ]

    assert chances_to_be_first(outcomes, "weighted")[0] == pytest.approx(won / futures, abs=0.015)
    unpriced = replace(outcomes[0], usd=None, usd_per_device_hour=None)
    assert chances_to_be_first([unpriced, outcomes[1]], "weighted") == [None, 1.0]


def test_delivery_counts_among_the_days() -> None:
    """By hand: 8 bought devices wait 30 days for delivery, at 1,000 USD each day."""
    offers = [{"cluster": "8xa10g", "buy": {"usd_per_device": 9e3, **QUOTE}}]
    goal = {"tokens": 1e9, "by": "weighted", "day_usd": 1e3}
    delivery = {"value": 30.0, "low": 30.0, "high": 30.0, "source": "a contract"}
    asked = study(offers=offers, goal=goal, assumptions={"lead_days": delivery})

    [found] = [evaluate(asked, "gpt2", candidate) for candidate in candidates_of(asked)]

    assert found.hours is not None and found.usd is not None
    by_hand = found.usd.value + 1e3 * (30 + found.hours.value / 24)
    assert found.weighted_usd == pytest.approx(by_hand)


@pytest.mark.parametrize("goal", [{"by": "weighted"}, {"by": "weighted", "day_usd": 5.0}])
def test_a_weight_needs_its_figure_and_a_goal(goal: dict[str, object]) -> None:
    with pytest.raises(DocumentError, match="give day_usd and tokens"):
        study(goal=goal)
