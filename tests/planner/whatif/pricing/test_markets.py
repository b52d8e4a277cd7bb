"""One market for all candidates, or the difference is the first sentence; rents are by hand."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.catalog import Rent
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.conclusions import caveat_texts, verdicts
from meshwright.planner.whatif.evaluate import candidate_of_size
from meshwright.planner.whatif.ranking import rank_outcomes
from meshwright.planner.whatif.run_study import Result, run
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact
from tests.planner.whatif.test_conclusions import outcome, result
from tests.planner.whatif.test_study import study

A, B = "8xh100-sxm-80gb", "8xa100-sxm-80gb"


def rent(provider: str, accelerator: str, usd: float) -> Rent:
    fields: dict[str, Any] = {
        "provider": provider,
        "instance": f"a node of {provider}",
        "accelerator": accelerator,
        "devices": 8,
        "region": "all",
        "on_demand_usd_per_device_hour": usd,
        "date": "2026-11",
        "source": "by hand",
        "confidence": "high",
    }
    return Rent.model_validate(fields)


DEAR = [rent("aws", "h100-sxm-80gb", 7.0), rent("aws", "a100-sxm-80gb", 4.0)]
CHEAP = [rent("lambda", "h100-sxm-80gb", 3.0), rent("lambda", "a100-sxm-80gb", 1.5)]


def prices(rents: list[Rent]) -> list[float]:
    asked = study(offers=[{"cluster": A}, {"cluster": B}])
    quotes = [candidate.priced.quote for candidate in candidates_of(asked, rents)]
    return [quote.value for quote in quotes if quote is not None]


@pytest.mark.parametrize(
    ("rents", "expected"),
    [
        (DEAR + CHEAP, [3.0, 1.5]),
        (DEAR + CHEAP[:1], [7.0, 4.0]),  # specialists lack the A100
        (DEAR[1:] + CHEAP[:1], [3.0, 4.0]),  # no market has both
        (DEAR[:1] + CHEAP[:1], [3.0]),  # an A100 that nobody rents decides nothing
    ],
)
def test_all_are_priced_in_one_market_where_one_has_them(
    rents: list[Rent], expected: list[float]
) -> None:
    assert prices(rents) == expected


def test_a_size_is_found_at_the_prices_that_it_is_compared_at() -> None:
    asked = study(offers=[{"cluster": "{n}x" + A, "solve": "afford"}, {"cluster": B}])
    rents = DEAR + CHEAP[:1]

    quote = candidate_of_size(asked, asked.offers[0], 1, rents).priced.quote
    assert quote is not None
    assert quote.value == 7.0


def test_two_markets_are_the_first_sentence() -> None:
    asked = study(offers=[{"cluster": A}, {"cluster": B}])
    candidates = candidates_of(asked, DEAR[1:] + CHEAP[:1])
    each = [outcome(c, "gpt2", 100.0, 100.0 + k) for k, c in enumerate(candidates)]

    first = verdicts(replace(result(asked, each), candidates={c.name: c for c in candidates}))[0]
    assert first.startswith(f"Prices are of two markets, {B} at hyperscalers and {A} at specialist")


def test_what_would_be_cheaper_elsewhere_is_the_first_sentence() -> None:
    """By hand: 800 device hours at 7 are 5,600 USD, and 1,700 at 3.00 elsewhere 5,100."""
    asked = study(offers=[{"cluster": B}, {"cluster": A}])
    rents = [*DEAR, rent("lambda", "a100-sxm-80gb", 3.0)]
    slow, fast = candidates_of(asked, rents)
    each = [
        outcome(slow, "gpt2", 212.5, 6800.0, usd_per_device_hour=exact(4.0)),
        outcome(fast, "gpt2", 100.0, 5600.0, usd_per_device_hour=exact(7.0)),
    ]

    both = {c.name: c for c in (slow, fast)}
    answer = replace(result(asked, each), candidates=both)
    first = verdicts(answer)[0]
    assert caveat_texts(answer)[0] == first  # a page has it above its decision
    assert first.startswith("Who is asked decides: candidates are priced at hyperscalers")
    assert f"elsewhere {B} costs 3.00 USD per device-hour, 5,100 USD in all" in first


def median(rents: list[Rent], accelerator: str, providers: tuple[str, ...]) -> float | None:
    asked = [
        r.on_demand_usd_per_device_hour
        for r in rents
        if r.accelerator == accelerator and r.provider in providers
    ]
    return statistics.median(filter(None, asked)) if asked else None


@pytest.mark.parametrize("budget", [None, 4000.0])
def test_nothing_is_cheaper_than_the_first_without_saying_so_first(budget: float | None) -> None:
    """Costs by hand in both markets, of random rents: none is below the first's unsaid."""
    rng, markets, seen = random.Random(5), (("aws", "oci"), ("lambda", "nebius")), 0
    hours = {A: 100.0, B: 230.0, "8xh200-sxm": 80.0}
    goal = {"goal": {"tokens": 1e9, "budget_usd": budget}} if budget else {}
    asked = study(offers=[{"cluster": name} for name in hours], **goal)
    for _ in range(12):
        rents = [
            rent(provider, name[2:], rng.uniform(1.5, 9.0))
            for provider in (*markets[0], *markets[1])
            for name in hours
            if rng.random() < 0.6
        ]
        each, costs, listed = [], {}, candidates_of(asked, rents)
        for candidate in listed:
            known = [median(rents, candidate.name[2:], market) for market in markets]
            least = min(filter(None, known), default=None)
            quote = candidate.priced.quote
            if least is None or quote is None:
                continue
            costs[candidate.name] = 8 * hours[candidate.name] * least
            usd = 8 * hours[candidate.name] * quote.value
            missed = ("budget: more",) if budget and usd > budget else ()
            price = {"usd_per_device_hour": quote, "misses": missed}
            each.append(outcome(candidate, "gpt2", hours[candidate.name], usd, **price))
        if not each:
            continue
        answer = Result(
            study=asked,
            outcomes=tuple(each),
            ranks={"gpt2": rank_outcomes(asked, each)},
            candidates={candidate.name: candidate for candidate in listed},
        )
        best = answer.best
        name = min(costs, key=costs.__getitem__)
        cheapest = budget if best is None else best.usd.value if best.usd else None
        assert cheapest is not None
        if costs[name] < cheapest * (1 - 1e-9):
            seen += 1
            assert f" {name} costs {costs[name] / 8 / hours[name]:.2f} USD" in verdicts(answer)[0]
    assert seen >= 2


def test_nobody_takes_what_another_candidate_costs_less_than_elsewhere() -> None:
    """By hand: each at the lower of two medians; the first is never above the least of them."""
    asked = study(
        offers=[{"cluster": A}, {"cluster": B}],
        goal={"tokens": 1e10},
        work={"seq_len": 1024, "global_batch": 64, "framework": "native"},
    )
    rng, apart = random.Random(8), 0
    for _ in range(6):
        usd = [rng.uniform(1.0, 9.0) for _ in range(3)]
        rents = [
            rent("aws", A[2:], usd[0]),
            rent("aws", B[2:], usd[1]),
            rent("lambda", A[2:], usd[2]),
        ]
        answer = run(asked, processes=1, offers=rents)
        best = answer.best
        assert best is not None and best.usd is not None
        hours = {o.candidate: o.hours.value for o in answer.outcomes if o.hours}
        costs = [8 * hours[A] * min(usd[0], usd[2]), 8 * hours[B] * usd[1]]
        assert best.usd.value <= min(costs) * (1 + 1e-9) or verdicts(answer)[0].startswith("Who is")
        if answer.apart:
            apart += 1
            assert best.usd.value == pytest.approx(min(costs))
            first = verdicts(answer)[0]
            assert first.startswith(f"Prices are of two markets, {B} at hyperscalers and {A} at")
            assert f"only hyperscalers rent them all, where {B} is first; --market hyp" in first
    assert apart >= 1


def test_a_verdict_that_turns_within_what_prices_move_says_so_first() -> None:
    """By hand: 800 device hours; at 4.20 the first costs 3,360 USD, as the second does."""
    offers = [{"cluster": B, "rent": {"provider": "aws"}}, {"cluster": A, "rent": {}}]
    asked = study(offers=offers)
    old = rent("aws", "a100-sxm-80gb", 4.0)
    first, second = candidates_of(asked, [old, DEAR[0]])
    near = UncertainValue(value=4.0, low=3.0, high=5.0)
    both = {c.name: c for c in (first, second)}
    for high, turns in ((5.0, True), (4.1, False)):
        each = [
            outcome(first, "gpt2", 100.0, 3200.0, usd_per_device_hour=replace(near, high=high)),
            outcome(second, "gpt2", 60.0, 3360.0, price_cause="b"),
        ]
        said = verdicts(replace(result(asked, each), candidates=both))[0]
        assert said.startswith(f"Prices decide: above 4.20 USD per device-hour of {B}") is turns
