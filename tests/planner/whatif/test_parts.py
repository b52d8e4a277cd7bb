"""A cluster of which a part is bought, and the rest rented or owned already: by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import Candidate, candidates_of
from meshwright.planner.whatif.conclusions import caveat_texts, verdicts
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.planning import plan_candidate
from meshwright.planner.whatif.pricing.break_even import cash_usd, present_value_usd
from meshwright.planner.whatif.run_study import run
from tests.planner.whatif.test_study import PRICE, study

QUOTE = {"date": "2026-11", "source": "a quote"}
BUY = {"usd_per_device": 4_000.0, "network_usd_per_device": 100.0, **QUOTE}
OFFERS: list[dict[str, Any]] = [
    {"name": "half", "cluster": "8xa10g+4xl4", "buy": {"of": ["l4"], **BUY}, "rent": PRICE},
    {"name": "added", "cluster": "8xa10g+4xl4", "owned": ["a10g"], "buy": {"of": ["l4"], **BUY}},
    {"name": "bought", "cluster": "4xl4", "buy": BUY},
    {"name": "owned", "cluster": "8xa10g", "owned": True},
    {"name": "rented", "cluster": "8xa10g", "rent": PRICE},
]


def candidates(**changes: Any) -> dict[str, Candidate]:
    return {c.name: c for c in candidates_of(study(offers=OFFERS, **changes))}


def test_an_hour_is_the_mean_of_its_parts() -> None:
    known = {name: c.priced.hourly for name, c in candidates().items()}

    for name, other in (("half", "rented"), ("added", "owned")):
        whole, bought, rest = known[name], known["bought"], known[other]
        assert whole is not None and bought is not None and rest is not None
        for used in (0.3, 1.0):
            by_hand = (
                4 * bought.useful_hour_usd(used).value + 8 * rest.useful_hour_usd(used).value
            ) / 12
            assert whole.useful_hour_usd(used).value == pytest.approx(by_hand)


def test_cash_and_present_value_add_up() -> None:
    known = candidates(assumptions={"years": 2.0, "utilisation": 0.5})

    cash = {name: cash_usd(known[name]) for name in ("half", "bought", "rented")}

    # 8 rented at 2.00 for half of the hours: 70,080 a year.
    assert cash["rented"] == pytest.approx((0.0, 70_080.0, 70_080.0))
    by_hand = [a + b for a, b in zip(cash["bought"], cash["rented"], strict=True)]
    assert cash["half"] == pytest.approx(by_hand)
    parts = [present_value_usd(known[name]).value for name in ("bought", "rented")]
    assert present_value_usd(known["half"]).value == pytest.approx(sum(parts))


def test_a_budget_pays_the_years_of_what_is_bought_and_the_run_of_the_rest() -> None:
    known = candidates()
    asked = study(offers=OFFERS)
    alike = plan_candidate(
        asked, "gpt2", known["rented"]
    )  # whose plan is asked is all the same here
    outcome = evaluate(asked, "gpt2", known["half"], alike)

    assert outcome.hours is not None and outcome.outlay_usd is not None
    used = outcome.hours.value / 8760  # nothing else runs on what is bought for it
    bought = known["bought"].priced.outlay_usd_per_device(used)
    assert bought is not None
    by_hand = 4 * bought.value + 8 * 2.0 * outcome.hours.value
    assert outcome.outlay_usd.value == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ({"cluster": "8xa10g+4xl4", "buy": {"of": ["t4"], **BUY}, "rent": PRICE}, "names t4"),
        ({"cluster": "8xa10g+4xl4", "buy": {"of": ["l4"], **BUY}}, "rent: is missing"),
        (
            {"cluster": "8xa10g+4xl4", "buy": {"of": ["l4", "a10g"], **BUY}, "rent": PRICE},
            "names all",
        ),
        (
            {"cluster": "8xa10g+4xl4", "owned": ["l4"], "buy": {"of": ["l4"], **BUY}},
            "owned already",
        ),
        ({"cluster": "8xa10g+4xl4", "owned": ["l4"], "buy": BUY}, "name in buy.of"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(offer: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        candidates_of(study(offers=[offer]))


@pytest.mark.parametrize("name", ["owned", "added", "half", "bought"])
def test_a_run_of_a_part_of_a_year_pays_the_year_of_what_is_bought_or_owned(name: str) -> None:
    """By hand: every hour of the year at the price of one that waits, and those used beside it."""
    tokens = {"goal": {"tokens": 1e9}, "work": {"seq_len": 1024, "global_batch": 64}}
    known = {c.name: c for c in candidates_of(study(offers=OFFERS, **tokens))}
    alike = plan_candidate(study(offers=OFFERS, **tokens), "gpt2", known["rented"])
    outcome = evaluate(study(offers=OFFERS, **tokens), "gpt2", known[name], alike)

    assert outcome.hours is not None and outcome.usd is not None
    hourly = known[name].priced.hourly
    assert hourly is not None and hourly.fixed.value > 0
    each = 8760 * hourly.fixed.value + outcome.hours.value * hourly.used.value
    assert outcome.usd.value == pytest.approx(outcome.devices * each)


def test_what_is_owned_and_paid_anyway_is_named_first_where_it_adds_less() -> None:
    """By hand: power of the hours that are used is all that a run on it adds."""
    asked = study(
        offers=[OFFERS[3], {"name": "new", "cluster": "8xl4", "rent": PRICE}],
        goal={"tokens": 1e9},
        work={"seq_len": 1024, "global_batch": 64, "framework": "native"},
    )
    answer = run(asked, processes=1)
    by_name = {o.candidate: o for o in answer.outcomes}
    mine, best = by_name["owned"], answer.best
    used = answer.candidates["owned"].priced.hourly
    assert best is not None and best.candidate == "new" and used is not None
    assert mine.hours is not None and best.usd is not None
    added = mine.hours.value * 8 * used.used.value
    assert added < best.usd.value

    first = verdicts(answer)[0]
    assert first.startswith("owned is paid whether it runs or not")
    assert f"adds {added:,.0f} USD of power" in first and first in caveat_texts(answer)
