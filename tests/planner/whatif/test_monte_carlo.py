"""How often each candidate is the least, against a simulation of the same futures written here."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.monte_carlo import chances_to_be_first
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from tests.planner.whatif.test_study import study

FUTURES = 20_000
STEP = {"a": (10.0, 8.0, 16.0), "b": (9.0, 6.0, 11.0)}
GOODPUT = (0.9, 0.8, 0.95)


def span(figure: tuple[float, float, float]) -> UncertainValue:
    value, low, high = figure
    return UncertainValue(value=value, low=low, high=high)


def outcome(
    name: str, accelerator: str, price: tuple[float, float, float], quote: str
) -> CandidateOutcome:
    step_s = span(STEP[accelerator])
    hours = 1000 * step_s.value / 0.9 / 3600
    return CandidateOutcome(
        candidate=name,
        model="m",
        devices=8,
        accelerator=accelerator,
        fits=True,
        binding="",
        step_s=step_s,
        step_parts={"forward": 0.7 * step_s.value, "tensor": 0.3 * step_s.value},
        tokens_per_s=exact(1e6 / step_s.value),
        goodput=span(GOODPUT),
        hours=exact(hours),
        usd=exact(hours * 8 * price[0]),
        usd_per_device_hour=span(price),
        price=quote,
        watts=exact(8e3),
    )


def drawn(figure: tuple[float, float, float], normal: float) -> float:
    value, low, high = figure
    return value * math.exp(
        math.log((high if normal > 0 else low) / value) * abs(normal) / 1.2815516
    )


CHEAP, DEAR = (2.0, 1.5, 3.0), (2.2, 2.0, 2.5)
LEAD = (2.0, 1.0, 6.0)


def simulated(
    rows: list[tuple[str, tuple[float, float, float], str, bool]], by: str
) -> list[float]:
    """Return how often each row is the least; rows of one accelerator or quote share its draw."""
    rng = random.Random(5)
    won = [0.0] * len(rows)
    for _ in range(FUTURES):
        kernels = {name: rng.gauss(0, 1) for name in STEP}
        links = {name: rng.gauss(0, 1) for name in STEP}
        lost, lead = rng.gauss(0, 1), rng.gauss(0, 1)
        quotes = {quote: rng.gauss(0, 1) for quote in sorted({row[2] for row in rows})}
        figures = []
        for accelerator, price, quote, bought in rows:
            both = (0.7 * kernels[accelerator] + 0.3 * links[accelerator]) / math.hypot(0.7, 0.3)
            hours = 1000 * drawn(STEP[accelerator], both) / drawn(GOODPUT, lost) / 3600
            wait = 24 * drawn(LEAD, lead) if bought else 0.0
            figures.append(hours + wait if by == "time" else hours * drawn(price, quotes[quote]))
        best = min(figures)
        ties = [at for at, figure in enumerate(figures) if figure <= best * (1 + 1e-9)]
        for at in ties:
            won[at] += 1 / len(ties) / FUTURES
    return won


ROWS: list[tuple[str, tuple[float, float, float], str, bool]] = [
    ("a", CHEAP, "one quote", False),
    ("a", DEAR, "another", False),
    ("b", DEAR, "another", True),
    ("b", DEAR, "another", False),
]


@pytest.mark.parametrize("by", ["cost", "time"])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.long("4-time", "3-cost", "2-time")
def test_each_is_first_as_often_as_in_a_simulation(by: Any, count: int) -> None:
    outcomes = []
    for at, (accelerator, price, quote, bought) in enumerate(ROWS[:count]):
        one = outcome(str(at), accelerator, price, quote)
        outcomes.append(replace(one, lead_days=span(LEAD)) if bought else one)

    found = [chance or 0.0 for chance in chances_to_be_first(outcomes, by)]

    assert found == pytest.approx(simulated(ROWS[:count], by), abs=0.02)
    assert sum(found) == pytest.approx(1.0)


def test_two_figures_of_one_source_are_two_quotes() -> None:
    """By hand: ln y/x is normal about ln 1.1, with two independent widths of ln 1.3 / 1.2816.

    ln 1.1 / (sqrt 2 x 0.2047) = 0.329, and the normal distribution has 0.629 below it.
    """

    def rent(usd: float) -> dict[str, Any]:
        ends = {"low": usd / 1.3, "high": usd * 1.3}
        return {"usd_per_device_hour": usd, **ends, "date": "2026-11", "source": "a quote"}

    offers = [
        {"name": "x", "cluster": "8xa10g", "rent": rent(2.0)},
        {"name": "y", "cluster": "8xa10g", "rent": rent(2.2)},
        {"name": "same as x", "cluster": "8xa10g", "rent": rent(2.0)},
    ]
    priced = [candidate.priced for candidate in candidates_of(study(offers=offers))]
    x, y, twin = (
        replace(
            outcome(p.how, "a", (p.quote.value, p.quote.low, p.quote.high), p.how),
            price_cause=p.cause,
        )
        for p in priced
        if p.quote is not None
    )

    assert chances_to_be_first([x, y], "cost") == pytest.approx([0.629, 0.371], abs=0.01)
    assert chances_to_be_first([x, twin], "cost") == [0.5, 0.5]


def test_what_owning_costs_moves_all_purchases_and_a_quote_its_own() -> None:
    """Two vendors' quotes differ; resale, hosting and staff are those of one buyer.

    By hand: of deviations w q + sqrt(1 - w2) o the shared o cancels in the ratio of two prices, so
    ln y/x = ln 1.1 + w s (q2 - q1), with s = ln 1.5 / 1.2816 and w = 0.6.
    """
    price = (2.0, 2.0 / 1.5, 3.0), (2.2, 2.2 / 1.5, 3.3)
    x, y = (
        replace(outcome(name, "a", of, name), price_quote_weight=0.6)
        for name, of in zip("xy", price, strict=True)
    )
    deviation = 0.6 * math.log(1.5) / 1.2815516 * math.sqrt(2)
    expected = NormalDist().cdf(math.log(1.1) / deviation)

    assert chances_to_be_first([x, y], "cost") == pytest.approx([expected, 1 - expected], abs=0.01)


def test_a_price_of_six_months_from_now_moves_by_itself() -> None:
    """By hand: 0.8 a year is 0.894 in six months, and above 1 where a rise of 11.2 % is exceeded.

    Half a year's rise of 1.53^0.5 is the end of 80 %, so that z is 0.673 and P 0.75, although both
    prices are of one quote.
    """
    quote = {"usd_per_device_hour": 2.0, "low": 1.6, "high": 2.5, "date": "2026-11", "source": "a"}
    offer = {"name": "now", "cluster": "8xa10g", "rent": quote}
    asked = study(
        offers=[offer, {**offer, "name": "then", "wait_months": 6.0}],
        assumptions={"rent_change_a_year": -0.2},
    )
    each = []
    for candidate in candidates_of(asked):
        price = candidate.priced.quote
        assert price is not None
        each.append(
            replace(
                outcome(candidate.name, "a", CHEAP, candidate.priced.cause),
                usd_per_device_hour=price,
                price_cause=candidate.priced.cause,
                price_moves_weight=candidate.priced.moves_weight,
                usd=price,
            )
        )

    below = math.log(0.8**-0.5) / (math.log(1.53) / 2 / 1.2815516)
    chances = chances_to_be_first(each, "cost")

    assert chances[1] == pytest.approx(NormalDist().cdf(below), abs=0.03)
    assert below == pytest.approx(0.673, abs=0.001)


def test_the_weight_of_a_quote_is_what_is_left_of_a_range_without_it() -> None:
    """Of a rent all, of what is owned nothing; an exact quote leaves a purchase's other costs."""
    quote = {"usd_per_device": 20_000.0, "date": "2026-11", "source": "a quote"}
    wide = {**quote, "low": 10_000.0, "high": 40_000.0}
    offers = [
        {"name": "rented", "cluster": "8xa10g"},
        {"name": "owned", "cluster": "8xa10g", "owned": True},
        {"name": "signed", "cluster": "8xa10g", "buy": quote},
        {"name": "asked", "cluster": "8xa10g", "buy": wide},
    ]
    priced = {c.name: c.priced for c in candidates_of(study(offers=offers))}
    weight = {name: one.quote_weight(0.8) for name, one in priced.items()}

    assert weight["rented"] == 1 and weight["owned"] == 0 and weight["signed"] == 0
    whole, rest = (
        sum(of.useful_hour_usd(0.8).spreads())
        for of in (priced["asked"].hourly, priced["signed"].hourly)
        if of
    )
    assert weight["asked"] == pytest.approx(math.sqrt(1 - (rest / whole) ** 2))
    assert 0.5 < weight["asked"] < 1


def test_what_has_no_price_is_not_compared() -> None:
    one = outcome("x", "a", CHEAP, "one quote")

    assert chances_to_be_first([one, replace(one, usd_per_device_hour=None)], "cost") == [1.0, None]
