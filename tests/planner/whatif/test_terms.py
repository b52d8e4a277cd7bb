"""What a candidate costs on its terms, by hand: contracts, currencies, sites, limits, budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.compute import limited_rate
from meshwright.planner.whatif.candidates import Candidate, candidates_of, watts_of
from meshwright.planner.whatif.evaluate import tokens_in_budget
from meshwright.planner.whatif.outcome import CandidateOutcome
from meshwright.planner.whatif.pricing.break_even import break_evens
from meshwright.planner.whatif.study import Study
from meshwright.planner.whatif.uncertain_value import exact
from tests.planner.whatif.test_study import PRICE, study


def one(**offer: Any) -> Candidate:
    [candidate] = candidates_of(study(offers=[{"cluster": "8xh200-sxm", **offer}]))
    return candidate


RESERVED = {**PRICE, "commitment": "reserved", "term_months": 12.0}


def test_a_contract_is_paid_for_all_of_its_hours() -> None:
    candidate = one(rent=RESERVED, assumptions={"utilisation": 0.6})
    hourly = candidate.priced.hourly
    assert hourly is not None
    # 2.00 of every hour is 3.33 of a used one; a device's year is 17,520 USD.
    assert hourly.useful_hour_usd(candidate.assumed.utilisation).value == pytest.approx(10 / 3)
    assert candidate.priced.at_once_usd_per_device == pytest.approx(17_520.0)


def test_prepaying_costs_interest() -> None:
    # A year prepaid at 21 %: 1.1 times the price (test_economics), half of it 1.05 times.
    candidate = one(rent={**RESERVED, "prepaid": 0.5}, assumptions={"interest": 0.21})
    assert candidate.priced.hourly is not None
    assert candidate.priced.hourly.fixed.value == pytest.approx(2.1)
    assert "50 % paid at once" in candidate.priced.how


def test_buying_wins_against_a_contract_that_looks_cheaper() -> None:
    # At 60 % of hours a contract at 2.00 is 3.33 an hour; the purchase is less at any share.
    asked = study(
        offers=[
            {"name": "reserved", "cluster": "8xh200-sxm", "rent": RESERVED},
            {"name": "bought", "cluster": "8xh200-sxm", "buy": {**BUY, "usd_per_device": 20_000.0}},
        ],
        assumptions={"utilisation": 0.6, "years": 3.0},
    )
    curves = {curve.name: curve for curve in break_evens(candidates_of(asked))}
    assert curves["reserved"].price_at(0.6) == pytest.approx(10 / 3)
    assert curves["bought"].price_at(0.6) < 10 / 3
    [against] = curves["bought"].against
    assert (against.name, against.share) == ("reserved", 0.0)


BUY = {"date": "2026-11", "source": "a quote"}


def test_all_that_owning_costs_by_hand() -> None:
    # 30,000 + 1,000 network + 600 storage = 31,600; spares 3 %: 32,548; sales tax 10 %: 35,802.80.
    # A device draws (1.23 x 700 + 60) x 1.3 = 1,197.3 W at the meter, 921 W in its rack.
    # A year: support 4 % 1,264, insurance 0.5 % 158, staff 500, hosting 0.921 x 190 x 12 = 2,099.9.
    candidate = one(
        buy={**BUY, "usd_per_device": 30_000.0, "network_usd_per_device": 1_000.0},
        assumptions={"owning": {"sales_tax": 0.1}, "electricity_usd_per_kwh": 0.1},
    )
    bought = candidate.priced.purchase
    assert bought is not None
    assert bought.hardware_usd.value == pytest.approx(35_802.80)
    assert bought.yearly_usd.value == pytest.approx(1_264 + 158 + 500 + 2_099.88)
    assert bought.running_usd_per_hour.value == pytest.approx(0.11973)
    # Sold after three years at 0.67^3 = 0.300763 of the price.
    assert bought.residual.value == pytest.approx(0.300763)


def test_another_currency_at_a_dated_rate() -> None:
    rate = {"usd": 1.1, "date": "2026-11-02", "source": "a bank"}
    candidate = one(rent={**PRICE, "currency": "EUR"}, assumptions={"currencies": {"EUR": rate}})
    assert candidate.priced.hourly is not None
    assert candidate.priced.hourly.used.value == pytest.approx(2.2)
    assert "EUR at 1.1 USD of 2026-11-02" in candidate.priced.how


def test_a_power_limit_by_hand() -> None:
    candidate = one(rent=PRICE, power_limit=0.8)
    # 0.8 of the power: (1.23 x 560 + 60) x 1.3 = 973.44 W a device; compute 0.8^0.75 = 0.845897.
    watts = watts_of(candidate.cluster, candidate.assumed, candidate.power_limit)
    assert watts is not None
    assert watts.value == pytest.approx(8 * 973.44)
    limited, whole = candidate.limited_cluster.groups[0].accelerator, candidate.cluster.groups[0]
    assert limited_rate(limited.power_limit or 1.0) == pytest.approx(0.845897, abs=1e-6)
    assert limited.peak_flops == whole.accelerator.peak_flops  # of which MFU is the share


def test_a_study_and_a_plan_take_as_long_under_one_limit() -> None:
    candidate = one(rent=PRICE, power_limit=0.8)
    named = resolve_cluster("8xh200-sxm,power_limit=0.8")
    assert [group.accelerator for group in candidate.limited_cluster.groups] == [
        group.accelerator for group in named.groups
    ]


def test_a_limit_beside_one_that_the_cluster_has_and_another_exponent() -> None:
    exponent = {"value": 0.5, "low": 0.33, "high": 1.0, "source": "a measurement"}
    candidate = one(rent=PRICE, power_limit=0.8, assumptions={"power_limit_exponent": exponent})
    owned = candidate.cluster.with_power_limits(lambda _: 0.9)
    [group] = replace(candidate, cluster=owned).limited_cluster.groups
    # 0.9 of the power and its 0.75th power; of the further 0.8 the square root.
    rate = limited_rate(group.accelerator.power_limit or 1.0)
    assert rate == pytest.approx(0.9**0.75 * 0.8**0.5)


def outcome(candidate: Candidate, **said: Any) -> CandidateOutcome:
    fitting = CandidateOutcome(
        candidate="c",
        model="m",
        devices=candidate.devices,
        accelerator="h200-sxm",
        fits=True,
        binding="",
        tokens_per_s=exact(1e5),
        goodput=exact(0.9),
    )
    return replace(fitting, **said)


def test_tokens_that_a_budget_pays_for_by_hand() -> None:
    def tokens(candidate: Candidate, goal: dict[str, float], **said: Any) -> float | None:
        asked: Study = study(goal=goal)
        return tokens_in_budget(asked.goal, candidate, outcome(candidate, **said))

    rented = one(rent=PRICE)
    price = {"usd_per_device_hour": exact(2.0)}
    # 16,000 USD are 1,000 h of 8 devices at 2 USD: 1,000 x 3,600 x 1e5 x 0.9 = 3.24e11 tokens.
    assert tokens(rented, {"budget_usd": 16_000.0}, **price) == pytest.approx(3.24e11)
    # Ten days are 240 h.
    limited = {"budget_usd": 16_000.0, "deadline_days": 10.0}
    assert tokens(rented, limited, **price) == pytest.approx(0.24 * 3.24e11)
    # Signing binds to 140,160 USD first: less pays for none, the same for the whole year.
    contract = one(rent=RESERVED)
    bound = {"usd_per_device_hour": exact(2.5), "capital_usd": 140_160.0}
    assert tokens(contract, {"budget_usd": 140_000.0}, **bound) == 0.0
    assert tokens(contract, {"budget_usd": 140_160.0}, **bound) == pytest.approx(8.76 * 3.24e11)
    # At least 2,000 h must be paid: 16,000 USD do not.
    least = one(rent={**PRICE, "minimum_hours": 2_000.0})
    assert tokens(least, {"budget_usd": 16_000.0}, **price) == 0.0
