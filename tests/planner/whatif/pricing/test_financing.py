"""Loans and leases by a ledger that is kept month by month here."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.candidates import Candidate, candidates_of
from meshwright.planner.whatif.evaluate import evaluate
from meshwright.planner.whatif.findings import financed_texts
from meshwright.planner.whatif.pricing.break_even import cash_usd, present_value_usd
from meshwright.planner.whatif.pricing.economics import Horizon, Purchase, Tax
from meshwright.planner.whatif.pricing.financing import loan_instalments
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.uncertain_value import exact
from tests.planner.whatif.test_study import study

QUOTE = {"date": "2026-11", "source": "a quote"}
LOAN = {"interest": 0.12, "months": 24, "share": 0.8}


def ledger(price: float, loan: dict[str, Any], months_kept: int) -> list[tuple[int, float, float]]:
    """Return (month, paid, interest in it) of a loan, from a payment that is found by halving."""
    monthly = (1 + loan["interest"]) ** (1 / 12) - 1

    def left_after(payment: float) -> float:
        owed = loan["share"] * price
        for _ in range(loan["months"]):
            owed += owed * monthly - payment
        return owed

    low, high = 0.0, price
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if left_after(middle) > 0 else (low, middle)
    rows, owed = [(0, (1 - loan["share"]) * price, 0.0)], loan["share"] * price
    for month in range(1, min(loan["months"], months_kept) + 1):
        rows.append((month, high, owed * monthly))
        owed += owed * monthly - high
    if loan["months"] > months_kept:
        rows.append((months_kept, owed, 0.0))
    return rows


def bought(**changes: Any) -> Purchase:
    said: dict[str, Any] = {
        "hardware_usd": exact(40_000.0),
        "yearly_usd": exact(0.0),
        "horizon": Horizon(years=3.0, interest=0.05),
        "residual": exact(0.25),
        "idle_power": exact(0.0),
        "running_usd_per_hour": exact(0.0),
    }
    return Purchase(**{**said, **changes})


@pytest.mark.parametrize(("years", "tax"), [(3.0, 0.0), (1.5, 0.0), (3.0, 0.3), (1.5, 0.3)])
def test_what_a_loan_costs_is_the_ledgers_present_value(years: float, tax: float) -> None:
    """The levelised price pays the same after tax, at present value, as the ledger's rows."""
    rows = ledger(40_000.0, LOAN, round(12 * years))
    horizon = Horizon(years=years, interest=0.05)
    instalments = loan_instalments(share=0.8, interest=0.12, months=24, years=years)

    purchase = bought(
        horizon=horizon, instalments=instalments, tax=Tax(rate=tax, depreciation_years=5.0)
    )

    after_tax = sum((usd - tax * interest) / 1.05 ** (month / 12) for month, usd, interest in rows)
    for year in range(10):
        length = min(1.0, max(0.0, years - year))
        after_tax -= tax * 40_000 / 5 * length / 1.05 ** (year + length / 2)
    book = 40_000 * (1 - years / 5)
    after_tax -= (10_000 - tax * (10_000 - book)) / 1.05**years
    hours = sum(
        8760 * min(1.0, years - year) / 1.05 ** (year + min(1.0, years - year) / 2)
        for year in range(10)
        if years > year
    )
    assert purchase.hourly.fixed.value == pytest.approx(after_tax / (1 - tax) / hours, rel=1e-9)


def candidates(**changes: Any) -> list[Candidate]:
    price = {"usd_per_device": 10_000.0, "network_usd_per_device": 0.0, **QUOTE}
    lease = {"usd_per_device_month": 300.0, "term_months": 36, **QUOTE}
    offers = [
        {"name": "at once", "cluster": "8xa10g", "buy": price},
        {"name": "loan", "cluster": "8xa10g", "buy": {**price, "loan": LOAN}},
        {"name": "lease", "cluster": "8xa10g", "buy": {"lease": lease}},
    ]
    return candidates_of(study(offers=offers, **changes))


def test_a_budget_holds_what_is_paid_with_interest_and_a_leases_whole_term() -> None:
    at_once, loan, lease = candidates(assumptions={"years": 2.0})
    hardware = at_once.priced.purchase
    assert hardware is not None
    paid = sum(usd for _, usd, _ in ledger(hardware.hardware_usd.value, LOAN, 24))

    found = [c.priced.outlay_usd_per_device(0.8) for c in (at_once, loan, lease)]

    assert all(found) and found[0] is not None and found[1] is not None and found[2] is not None
    more = found[1].value - found[0].value
    assert more == pytest.approx(paid - hardware.hardware_usd.value)
    assert more == pytest.approx(0.0983 * hardware.hardware_usd.value, rel=0.01)
    # 36 months are paid, though the devices are used for 24.
    running = found[0].value - hardware.hardware_usd.value
    assert lease.priced.at_once_usd_per_device == pytest.approx(36 * 300)
    assert lease.priced.purchase is not None
    owned = lease.priced.purchase.owning_usd_per_hour(0.8).value * 2 * 8760
    assert found[2].value == pytest.approx(36 * 300 + owned)
    assert running > 0


def test_cash_by_year_by_hand() -> None:
    at_once, loan, lease = candidates(assumptions={"years": 2.0})
    rows = ledger(8 * at_once.priced.purchase.hardware_usd.value, LOAN, 24)  # type: ignore[union-attr]
    cash = cash_usd(at_once)

    years = [sum(usd for month, usd, _ in rows if 12 * k < month <= 12 * (k + 1)) for k in (0, 1)]
    assert cash_usd(loan)[0] == pytest.approx(0.2 * cash[0])
    assert cash_usd(loan)[1] == pytest.approx(cash[1] + years[0])
    assert cash_usd(loan)[2] == pytest.approx(cash[2] + years[1])
    # The lease of 8: month 0, months 1 to 12, then 13 to 23 and 12 more at the end; no resale.
    first, one, two = cash_usd(lease)
    assert first == pytest.approx(8 * 300)
    assert lease.priced.purchase is not None
    running = 8 * 8760 * lease.priced.purchase.owning_usd_per_hour(0.8).value
    assert one == pytest.approx(12 * 8 * 300 + running)
    assert two == pytest.approx(23 * 8 * 300 + running)


def test_sentences_say_the_payment_of_a_month_and_what_the_loan_costs() -> None:
    asked = candidates()
    result = Result(study=study(), outcomes=(), ranks={}, candidates={c.name: c for c in asked})

    loan, lease = financed_texts(result)

    price = asked[0].priced.purchase
    assert price is not None
    monthly = ledger(8 * price.hardware_usd.value, LOAN, 36)[1][1]
    more = present_value_usd(asked[1]).value - present_value_usd(asked[0]).value
    assert loan.startswith(f"loan: {monthly:,.0f} USD a month")
    assert f"{more:,.0f} more than paid at once (8 % a year)" in loan and more > 0
    assert lease.startswith("lease: 2,400 USD a month")


@pytest.mark.matrix
def test_tokens_in_budget_leave_room_for_the_interest() -> None:
    goal = {"tokens": 1e9, "budget_usd": 110_000.0}
    at_once, loan, _ = candidates(goal=goal)

    found = [evaluate(study(goal=goal), "gpt2", c).tokens_in_budget for c in (at_once, loan)]

    assert found[0] is not None and found[1] is not None
    price = at_once.priced.purchase
    assert price is not None
    paid = sum(usd for _, usd, _ in ledger(8 * price.hardware_usd.value, LOAN, 36))
    hardware = 8 * price.hardware_usd.value
    assert found[1] / found[0] == pytest.approx((110e3 - paid) / (110e3 - hardware))


def test_a_loan_and_a_lease_exclude_each_other() -> None:
    lease = {"usd_per_device_month": 300.0, "term_months": 36, **QUOTE}
    with pytest.raises(DocumentError, match="make an offer of each"):
        study(offers=[{"cluster": "8xa10g", "buy": {"loan": LOAN, "lease": lease}}])
