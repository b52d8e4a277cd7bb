"""What a purchase takes out of a budget and when it is there, by hand and by drawn outcomes."""

from __future__ import annotations

import datetime
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif import evaluate as evaluation
from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.conclusions import verdicts
from meshwright.planner.whatif.evaluate import evaluate, size_of
from meshwright.planner.whatif.findings import answers, slack_days
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.planning import plan_candidate
from meshwright.planner.whatif.pricing.break_even import break_evens, present_value_usd
from meshwright.planner.whatif.run_study import Result, run
from meshwright.planner.whatif.study import Study
from meshwright.planner.whatif.uncertain_value import UncertainValue
from tests.planner.whatif.test_study import PRICE, study

QUOTE = {"date": "2026-11", "source": "a quote"}


def quantity(value: float) -> dict[str, Any]:
    return {"value": value, "low": value, "high": value, "source": "a quote"}


# A device of 10,000 USD, then 1,000 USD a year of staff for 2 years.  It draws 150 W, half of that
# while it waits, which is half of the hours: 17,520 h x 0.75 x 0.15 kW x 0.1 USD = 197.1 USD.
OUTLAY = 10_000 + 2_000 + 197.1
ASSUMED = {
    "years": 2.0,
    "utilisation": 0.5,
    "electricity_usd_per_kwh": quantity(0.1),
    "power_usage_effectiveness": quantity(1.0),
    "node_power_over_tdp": quantity(1.0),
    "network_w_per_device": quantity(0.0),
    "owning": {
        "storage_usd_per_device": quantity(0.0),
        "spares": quantity(0.0),
        "support_a_year": quantity(0.0),
        "insurance_a_year": quantity(0.0),
        "staff_usd_per_device_year": quantity(1_000.0),
        "hosting_usd_per_kw_month": quantity(0.0),
        "idle_power": quantity(0.5),
    },
}
BUYING = {
    "usd_per_device": 10_000.0,
    "low": 8_000.0,
    "high": 12_500.0,
    "network_usd_per_device": 0.0,
    **QUOTE,
}


def bought(goal: dict[str, float], **offer: Any) -> Study:
    one = {"cluster": "4xa10g", "buy": BUYING, **offer}
    return study(goal=goal, offers=[one], assumptions=ASSUMED)


def outcome_of(asked: Study) -> CandidateOutcome:
    [candidate] = candidates_of(asked)
    return evaluate(asked, "gpt2", candidate)


def drawn(value: float, low: float, high: float, rng: random.Random) -> float:
    """Return one outcome: log-normal to each side, one in ten below low, one in ten above high."""
    normal = rng.gauss(0, 1)
    end = high if normal > 0 else low
    return value * math.exp(abs(math.log(end / value)) * normal / 1.2815516)


def test_the_present_value_of_a_purchase_by_hand() -> None:
    """Paid at once, in the middle of each year, and sold for 0.67 squared of it after two."""
    [candidate] = candidates_of(bought({"tokens": 1e9}))

    yearly = 1_000 + 197.1 / 2
    value = 10_000 + yearly * (1.08**-0.5 + 1.08**-1.5) - 10_000 * 0.67**2 * 1.08**-2
    assert present_value_usd(candidate).value == pytest.approx(4 * value, rel=1e-9)


def test_payback_and_one_sentence_for_twenty_purchases_and_rents() -> None:
    """By hand: renting at 2 USD for half of 8,760 h saves 8,760 - 1,098.55 of 10,000 a year."""
    offers = [
        *({"name": f"buy {k}", "cluster": "4xa10g", "buy": BUYING} for k in range(20)),
        *(
            {"name": f"rent {k}", "cluster": "4xa10g", "rent": {**PRICE, "source": f"quote {k}"}}
            for k in range(20)
        ),
    ]
    asked = study(offers=offers, assumptions=ASSUMED)
    candidates = {candidate.name: candidate for candidate in candidates_of(asked)}
    curves = tuple(break_evens(list(candidates.values())))

    found = Result(
        study=asked, outcomes=(), ranks={"gpt2": []}, candidates=candidates, break_even=curves
    )

    assert sum(len(curve.against) for curve in curves) == 400
    [said] = [text for text in answers(found) if "utilisation" in text]
    assert f"Payback after {10_000 / (8_760 - 1_098.55):.1f} years." in said


@pytest.mark.parametrize("budget", [42_000.0, 46_000.0, 50_000.0, 58_000.0])
@pytest.mark.long("50000.0", "42000.0")
def test_a_budget_holds_the_years_of_what_is_bought_and_its_prices_range(budget: float) -> None:
    outcome = outcome_of(bought({"tokens": 1e9, "budget_usd": budget}))

    rng = random.Random(1)
    draws = [4 * (drawn(10_000, 8_000, 12_500, rng) + 2_197.1) for _ in range(20_000)]
    kept = sum(draw <= budget for draw in draws) / len(draws)
    assert outcome.outlay_usd is not None
    assert outcome.outlay_usd.value == pytest.approx(4 * OUTLAY, rel=1e-9)
    assert outcome.capital_usd == pytest.approx(40_000)
    assert outcome.chances["budget"] == pytest.approx(kept, abs=0.02)
    assert any(miss.startswith("budget") for miss in outcome.misses) == (budget < 4 * OUTLAY)


@pytest.mark.parametrize("days", [20.0, 61.0, 120.0])
@pytest.mark.long("20.0")
def test_a_deadline_counts_from_the_order(days: float) -> None:
    asked = bought({"tokens": 1e9, "deadline_days": days})
    result = run(asked, processes=1)
    [outcome] = result.outcomes

    rng = random.Random(2)
    assert outcome.hours is not None
    run_days = [outcome.hours.times(1 / 24)] * 20_000
    draws = [drawn(60, 14, 180, rng) + drawn(s.value, s.low, s.high, rng) for s in run_days]
    assert outcome.chances["deadline"] == pytest.approx(
        sum(draw <= days for draw in draws) / len(draws), abs=0.02
    )
    assert slack_days(result, outcome) == pytest.approx(days - 60 - outcome.hours.value / 24)
    if days > 61:
        assert "until delivery" in verdicts(result)[0]


@pytest.mark.parametrize(
    ("goal", "hours"),
    [
        # 2,000 USD pay for 4 devices at 1,000 / 8,760 + 0.75 x 0.015 USD an hour, half of it used.
        ({"budget_usd": 42_000.0}, 2_000 / (4 * (1_000 / 8_760 + 0.01125)) / 2),
        ({"budget_usd": 60_000.0}, 8_760.0),
        ({"budget_usd": 60_000.0, "deadline_days": 100.0}, 24 * (100 - 60.0)),
        ({"budget_usd": 60_000.0, "deadline_days": 50.0}, 0.0),
        ({"budget_usd": 39_000.0}, 0.0),
    ],
)
@pytest.mark.long("goal1-8760.0", "goal2-960.0", "goal4-0.0")
def test_tokens_in_a_budget_are_of_hours_that_are_paid(
    goal: dict[str, float], hours: float
) -> None:
    outcome = outcome_of(bought(goal))

    assert outcome.tokens_per_s is not None
    assert outcome.goodput is not None
    rate = outcome.tokens_per_s.value * outcome.goodput.value * 3_600
    assert outcome.tokens_in_budget == pytest.approx(rate * hours, rel=1e-6)


@pytest.mark.matrix
def test_what_is_bought_for_a_budget_is_surely_paid() -> None:
    def size(budget: float, **goal: float) -> int:
        asked = bought({"budget_usd": budget, **goal}, cluster="{n}x4xa10g", solve="afford")
        return size_of(asked, 0, "gpt2")

    # Half of the times two nodes of 4 take 97,576.8 USD; four times in five 1.25^0.6567 as much
    # for the devices, 110,199 in all.
    assert size(100e3, confidence=0.5) == 2
    assert size(100e3) == 1
    assert size(113e3) == 2
    with pytest.raises(DocumentError, match=r"50,000 USD pay for none with probability 0\.8"):
        size(50e3)


def test_no_size_keeps_a_deadline_before_the_delivery() -> None:
    asked = bought({"tokens": 1e9, "deadline_days": 30.0}, cluster="{n}x4xa10g", solve="need")

    with pytest.raises(DocumentError, match=r"delivery takes 60.0 \(14.0-180.0\) days; rent"):
        size_of(asked, 0, "gpt2")


def test_devices_that_the_plan_leaves_idle_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evaluated(question: Any, model: str, candidate: Any, store: Any) -> CandidateOutcome:
        idle = max(0, candidate.devices - 20)
        found = CandidateOutcome(
            candidate=candidate.name, model=model, devices=candidate.devices, accelerator="a10g",
            fits=True, binding="", idle=idle,
        )  # fmt: skip
        return replace(found, hours=UncertainValue(value=1.0, low=1.0, high=1.0))

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    one = {"cluster": "{n}x8xa10g", "solve": "power", "rent": PRICE}

    # 100 kW feed more than 20 nodes of 8; 20 devices are 3 nodes.
    asked = study(goal={"tokens": 1e9, "power_cap_w": 100e3}, offers=[one])
    assert size_of(asked, 0, "gpt2") == 3


def test_what_is_owned_costs_all_but_the_hardware() -> None:
    asked = study(offers=[{"cluster": "4xa10g", "owned": True}], assumptions=ASSUMED)
    [candidate] = candidates_of(asked)

    hourly = candidate.priced.hourly
    assert hourly is not None
    # Staff and half of the 0.015 USD of power in all hours, the other half in those that are used.
    assert hourly.fixed.value == pytest.approx(1_000 / 8_760 + 0.0075)
    assert hourly.used.value == pytest.approx(0.0075)
    [bought_one] = candidates_of(bought({"tokens": 1e9}))
    assert bought_one.priced.hourly is not None
    assert bought_one.priced.hourly.used.value == pytest.approx(0.0075)


def test_a_run_longer_than_its_contract_takes_more_terms_out_of_the_budget() -> None:
    """A month of 730 h at 1 USD for 4 devices is 2,920 USD; each month that is begun is paid."""
    month = {"usd_per_device_hour": 1.0, "commitment": "reserved", "term_months": 1.0, **QUOTE}
    offers = [{"cluster": "4xa10g", "rent": month}]
    [candidate] = candidates_of(study(offers=offers))
    plan = plan_candidate(study(offers=offers), "gpt2", candidate)

    for tokens, budget in ((1e9, 3_000.0), (2e12, 9_000.0)):
        asked = study(offers=offers, goal={"tokens": tokens, "budget_usd": budget})
        found = evaluate(asked, "gpt2", candidate, plan)

        assert found.hours is not None and found.outlay_usd is not None
        for end in ("low", "value", "high"):
            terms = math.ceil(getattr(found.hours, end) / 730)
            assert getattr(found.outlay_usd, end) == pytest.approx(2_920 * terms)
        assert (found.chances["budget"] > 0.8) == (math.ceil(found.hours.value / 730) == 1)


@pytest.mark.parametrize("leased", [False, True])
def test_a_run_longer_than_the_years_keeps_what_is_bought_or_leased_so_long(leased: bool) -> None:
    """A tenth of a year is planned: 876 h; staff and power go on, and so does a lease."""
    lease = {"usd_per_device_month": 500.0, "term_months": 1, **QUOTE}
    buying = {"lease": lease} if leased else {**BUYING, "low": 10_000.0, "high": 10_000.0}
    [short, long] = [
        study(
            goal={"tokens": tokens},
            offers=[{"cluster": "4xa10g", "buy": buying}],
            assumptions={**ASSUMED, "years": 0.1, "goodput": quantity(0.9)},
        )
        for tokens in (1e8, 2e13)
    ]
    [candidate] = candidates_of(short)
    plan = plan_candidate(short, "gpt2", candidate)
    brief, late = (evaluate(asked, "gpt2", candidate, plan) for asked in (short, long))

    assert brief.hours is not None and brief.hours.value < 876
    assert late.hours is not None and late.hours.value > 2 * 876
    an_hour = 4 * (1_000 / 8_760 + 0.75 * 0.15 * 0.1)
    assert brief.outlay_usd is not None and late.outlay_usd is not None
    hardware = brief.outlay_usd.value - an_hour * 876
    assert leased or hardware == pytest.approx(40_000)
    kept = hardware * (late.hours.value / 876 if leased else 1)
    assert late.outlay_usd.value == pytest.approx(kept + an_hour * late.hours.value)


def test_the_age_of_a_quote_without_a_range_widens_it() -> None:
    """80 of 100 prices move by 0.56 to 1.53 in a year; what is asked today is exact."""
    today = datetime.date.today()
    for years, low, high in ((0, 1.0, 1.0), (1, 0.56, 1.53)):
        dated = {"date": f"{today.year - years}-{today.month:02}", "source": "a quote"}
        for terms in (
            {"rent": {"usd_per_device_hour": 2.0, **dated}},
            {"buy": {"usd_per_device": 2.0, **dated}},
            {"buy": {"lease": {"usd_per_device_month": 2.0, "term_months": 12, **dated}}},
        ):
            [candidate] = candidates_of(study(offers=[{"cluster": "4xa10g", **terms}]))
            quote = candidate.priced.quote
            assert quote is not None
            ends = [quote.value, quote.low, quote.high]
            assert ends == pytest.approx([2.0, 2.0 * low, 2.0 * high])
    stated = {"usd_per_device_hour": 2.0, "low": 1.9, "date": "2023-01", "source": "a quote"}
    [candidate] = candidates_of(study(offers=[{"cluster": "4xa10g", "rent": stated}]))
    assert candidate.priced.quote == UncertainValue(value=2.0, low=1.9, high=2.0)
