"""Buying against renting: dollars per useful hour over the share of hours used."""

from __future__ import annotations

from dataclasses import dataclass

from planner.whatif.candidates import Candidate
from planner.whatif.economics import break_even_utilisation, owned_usd_per_device_hour
from planner.whatif.evaluate import power_usd_per_device_hour
from planner.whatif.run import Result
from planner.whatif.span import exact

SHARES = tuple(share / 100 for share in range(10, 101, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One candidate's price of a useful device hour; a rent's is the same at every share."""

    name: str
    utilisation: tuple[float, ...]
    usd_per_device_hour: tuple[float, ...]
    against: tuple[tuple[str, float | None], ...] = ()
    """For each rented candidate, the share of hours above which this purchase is cheaper."""


def break_evens(result: Result) -> list[BreakEven]:
    """Return curves of all bought and rented candidates; none if only one kind is there."""
    bought = [c for c in result.candidates.values() if c.priced.purchase is not None]
    rented = [
        c for c in result.candidates.values() if c.priced.rent_usd_per_device_hour is not None
    ]
    if not bought or not rented:
        return []
    return [*(_bought(result, c, rented) for c in bought), *(_rented(c) for c in rented)]


def _bought(result: Result, candidate: Candidate, rented: list[Candidate]) -> BreakEven:
    purchase = candidate.priced.purchase
    assert purchase is not None
    power = power_usd_per_device_hour(candidate.cluster, result.study.assumptions) or exact(0.0)
    return BreakEven(
        name=candidate.name,
        utilisation=SHARES,
        usd_per_device_hour=tuple(
            owned_usd_per_device_hour(
                purchase, utilisation=share, power_usd_per_device_hour=power
            ).value
            for share in SHARES
        ),
        against=tuple(
            (
                other.name,
                break_even_utilisation(
                    purchase,
                    rent_usd_per_device_hour=other.priced.rent_usd_per_device_hour.value,
                    power_usd_per_device_hour=power.value,
                ),
            )
            for other in rented
            if other.priced.rent_usd_per_device_hour is not None
        ),
    )


def _rented(candidate: Candidate) -> BreakEven:
    span = candidate.priced.rent_usd_per_device_hour
    assert span is not None
    return BreakEven(
        name=candidate.name,
        utilisation=SHARES,
        usd_per_device_hour=(span.value,) * len(SHARES),
    )
