"""Price of a useful device hour over the share of hours used, and where two terms cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.whatif.pricing.economics import (
    HOURS_PER_YEAR,
    Horizon,
    Hourly,
    cheaper_above,
    rent_cash_usd,
)

if TYPE_CHECKING:
    from meshwright.planner.whatif.candidates import Candidate
    from meshwright.planner.whatif.uncertain_value import UncertainValue

SHARES = tuple(share / 100 for share in range(10, 101, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Terms with fixed payments against others: the share of hours used above which they win."""

    name: str
    share: float | None
    """0 where they always are cheaper, None where they never are."""
    low: float | None
    """With all that is paid for them at the low ends of its ranges."""
    high: float | None
    """At the high ends."""
    waiting_usd: float | None = None
    """Rent of as many devices until bought ones can be used."""
    payback_years: float | None = None
    """Until what a purchase saves in rent, less what owning costs, has paid for the hardware; None
    of other terms, or if it never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One candidate's price of a useful device hour at each share of hours used."""

    name: str
    utilisation: tuple[float, ...]
    usd_per_device_hour: tuple[float, ...]
    cash_usd: tuple[float, ...]
    """Dollars of all its devices: on the first day, then in each year."""
    present_value_usd: UncertainValue
    """Present value of all its devices' costs over the years, at the study's interest, before
    tax."""
    against: tuple[Against, ...] = ()
    """For each candidate of the same devices that binds to less."""

    def price_at(self, share: float) -> float:
        """Return the price at one of the shares of the curve."""
        return self.usd_per_device_hour[self.utilisation.index(share)]


def break_evens(candidates: Sequence[Candidate]) -> list[BreakEven]:
    """Return curves of candidates that bind to payments, and of others with the same devices."""
    priced = [c for c in candidates if c.priced.hourly is not None and not c.priced.owned]
    bound = [c for c in priced if c.priced.at_once_usd_per_device is not None]
    pairs = [
        (candidate, [c for c in priced if c is not candidate and _comparable(candidate, c)])
        for candidate in bound
    ]
    pairs = [(candidate, others) for candidate, others in pairs if others]
    shown = {c.name: c for candidate, others in pairs for c in (candidate, *others)}
    against = {
        candidate.name: [c for c in others if _freer(c, candidate)] for candidate, others in pairs
    }
    return [_curve(c, against.get(c.name, [])) for c in shown.values()]


def _comparable(first: Candidate, other: Candidate) -> bool:
    def freedom_of(candidate: Candidate) -> tuple[object, ...]:
        names = {group.accelerator.name for group in candidate.cluster.groups}
        return frozenset(names), candidate.changes, candidate.power_limit

    return freedom_of(first) == freedom_of(other)


def _freer(other: Candidate, first: Candidate) -> bool:
    """Return whether other terms bind to less: rent on demand, then contracts, then purchases."""

    def bond(candidate: Candidate) -> int:
        priced = candidate.priced
        return 2 if priced.purchase is not None else int(priced.reservation is not None)

    return bond(other) < bond(first)


def over_years(candidate: Candidate) -> Hourly:
    """Return a candidate's price an hour over the years that are compared: rents may change."""
    hourly, assumed = candidate.priced.hourly, candidate.assumed
    assert hourly is not None  # of the priced ones
    if candidate.priced.purchase is not None:
        return hourly
    horizon = Horizon(years=assumed.years, interest=assumed.interest)
    reserved = candidate.priced.reservation
    term = reserved.years if reserved is not None else 0.0
    factor = horizon.rent(1.0, assumed.rent_change_a_year, term)
    return Hourly(fixed=hourly.fixed.times(factor), used=hourly.used.times(factor))


def cash_usd(candidate: Candidate) -> tuple[float, ...]:
    """Return what a candidate's devices cost on the first day and in each year, before tax."""
    priced, assumed = candidate.priced, candidate.assumed
    assert priced.hourly is not None  # of the priced ones
    if priced.purchase is not None:
        each = priced.purchase.cash_usd(assumed.utilisation)
        if priced.beside is not None:
            a_year = (
                HOURS_PER_YEAR
                * assumed.utilisation
                * priced.beside.useful_hour_usd(assumed.utilisation).value
            )
            parts = Horizon(years=assumed.years, interest=assumed.interest).parts
            lengths = (0.0, *(length for _, length in parts))
            each = tuple(usd + a_year * length for usd, length in zip(each, lengths, strict=True))
    else:
        reserved = priced.reservation
        # Of a cluster that is owned in part all hours cost something, used or not.
        price = priced.hourly.useful_hour_usd(assumed.utilisation)
        each = rent_cash_usd(
            price.value if reserved is None else reserved.usd_per_device_hour.value,
            Horizon(years=assumed.years, interest=assumed.interest),
            utilisation=assumed.utilisation,
            change_a_year=assumed.rent_change_a_year,
            term_years=reserved.years if reserved is not None else None,
            prepaid=reserved.prepaid if reserved is not None else 0.0,
        )
    return tuple(usd * candidate.devices for usd in each)


def present_value_usd(candidate: Candidate) -> UncertainValue:
    """Return the present value of what all devices of a candidate cost over the years.

    The levelised price of a useful hour, times the useful hours at their present value.
    """
    assumed = candidate.assumed
    horizon = Horizon(years=assumed.years, interest=assumed.interest)
    useful = horizon.hours * assumed.utilisation * candidate.devices
    return over_years(candidate).useful_hour_usd(assumed.utilisation).times(useful)


def _curve(candidate: Candidate, others: Sequence[Candidate]) -> BreakEven:
    hourly = over_years(candidate)
    return BreakEven(
        name=candidate.name,
        utilisation=SHARES,
        usd_per_device_hour=tuple(hourly.useful_hour_usd(share).value for share in SHARES),
        cash_usd=cash_usd(candidate),
        present_value_usd=present_value_usd(candidate),
        against=tuple(_against(candidate, hourly, other) for other in others),
    )


def _against(candidate: Candidate, hourly: Hourly, other: Candidate) -> Against:
    its = over_years(other)
    waiting = None
    if candidate.priced.purchase is not None:
        assumed = candidate.assumed
        hours = 24 * assumed.lead_days.value * assumed.utilisation
        waiting = hours * candidate.devices * its.useful_hour_usd(assumed.utilisation).value

    def end(of: UncertainValue, at: str) -> float:
        return float(getattr(of, at))

    low, high = (
        cheaper_above((end(hourly.fixed, at), end(hourly.used, at)), its.middle)
        for at in ("low", "high")
    )
    return Against(
        name=other.name,
        share=cheaper_above(hourly.middle, its.middle),
        low=low,
        high=high,
        waiting_usd=waiting,
        payback_years=_payback_years(candidate, its),
    )


def _payback_years(candidate: Candidate, rent: Hourly) -> float | None:
    """Return hardware's price over what a year of use saves against a rent, without interest."""
    purchase, used = candidate.priced.purchase, candidate.assumed.utilisation
    if purchase is None or purchase.leased:
        return None
    rent_usd = rent.useful_hour_usd(used).value * used
    beside = candidate.priced.beside
    others_usd = 0.0 if beside is None else beside.useful_hour_usd(used).value * used
    saved = HOURS_PER_YEAR * (rent_usd - others_usd - purchase.owning_usd_per_hour(used).value)
    return purchase.hardware_usd.value / saved if saved > 0 else None
