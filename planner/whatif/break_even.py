"""Buying against renting: dollars per useful hour over the share of hours used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.whatif.candidates import Candidate
from planner.whatif.economics import break_even_utilisation, owned_usd_per_device_hour
from planner.whatif.evaluate import power_usd_per_device_hour
from planner.whatif.span import exact
from planner.whatif.study import Assumptions

SHARES = tuple(share / 100 for share in range(10, 101, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One candidate's price of a useful device hour; a rent's is the same at every share."""

    name: str
    utilisation: tuple[float, ...]
    usd_per_device_hour: tuple[float, ...]
    against: tuple[tuple[str, float | None], ...] = ()
    """For each rented candidate, the share of hours above which this purchase is cheaper."""


def break_evens(candidates: Sequence[Candidate], assumptions: Assumptions) -> list[BreakEven]:
    """Return curves of all bought and rented candidates; none if only one kind is there."""
    bought = [c for c in candidates if c.priced.purchase is not None]
    rented = [c for c in candidates if c.priced.rent_usd_per_device_hour is not None]
    if not bought or not rented:
        return []
    return [*(_bought(c, rented, assumptions) for c in bought), *(_rented(c) for c in rented)]


def _bought(candidate: Candidate, rented: list[Candidate], assumptions: Assumptions) -> BreakEven:
    purchase = candidate.priced.purchase
    assert purchase is not None
    power = power_usd_per_device_hour(candidate.cluster, assumptions) or exact(0.0)
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
