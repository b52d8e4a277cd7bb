"""Buying against renting: dollars per useful hour over the share of hours used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.whatif.candidates import Candidate, power_usd_per_device_hour
from planner.whatif.economics import (
    Purchase,
    break_even_utilisation,
    owned_usd_per_device_hour,
)
from planner.whatif.span import Span, exact
from planner.whatif.study import Assumptions

SHARES = tuple(share / 100 for share in range(10, 101, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A purchase against one rent: the share of hours used above which it is cheaper, or None."""

    name: str
    share: float | None
    low: float | None
    """With the best resale and the cheapest electricity of their ranges."""
    high: float | None
    """With the worst of both."""
    waiting_usd: float
    """Rent of as many devices until the bought ones can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One candidate's price of a useful device hour; a rent's is the same at every share."""

    name: str
    utilisation: tuple[float, ...]
    usd_per_device_hour: tuple[float, ...]
    against: tuple[Against, ...] = ()
    """For each rented candidate."""

    def at(self, share: float) -> float:
        """Return the price at one of the shares of the curve."""
        return self.usd_per_device_hour[self.utilisation.index(share)]


def break_evens(candidates: Sequence[Candidate], assumptions: Assumptions) -> list[BreakEven]:
    """Return curves of bought candidates and of those that rent the same devices."""
    bought = [c for c in candidates if c.priced.purchase is not None]
    rented = [c for c in candidates if c.priced.rent_usd_per_device_hour is not None]
    pairs = [(b, [r for r in rented if _devices(r) == _devices(b)]) for b in bought]
    pairs = [(b, same) for b, same in pairs if same]
    matched = {r.name: r for _, same in pairs for r in same}
    return [
        *(_bought(b, same, assumptions) for b, same in pairs),
        *(_rented(r) for r in matched.values()),
    ]


def _devices(candidate: Candidate) -> set[str]:
    return {group.accelerator.name for group in candidate.cluster.groups}


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
        against=tuple(_against(candidate, other, purchase, power, assumptions) for other in rented),
    )


def _against(
    candidate: Candidate, other: Candidate, purchase: Purchase, power: Span, assumed: Assumptions
) -> Against:
    rent = other.priced.rent_usd_per_device_hour
    assert rent is not None  # of the rented ones

    def share(residual: float, power_usd: float) -> float | None:
        return break_even_utilisation(
            replace(purchase, residual=exact(residual)),
            rent_usd_per_device_hour=rent.value,
            power_usd_per_device_hour=power_usd,
        )

    resale = purchase.residual
    waiting_hours = 24 * assumed.lead_days.value * assumed.utilisation
    return Against(
        name=other.name,
        share=share(resale.value, power.value),
        low=share(resale.high, power.low),
        high=share(resale.low, power.high),
        waiting_usd=waiting_hours * candidate.devices * rent.value,
    )


def _rented(candidate: Candidate) -> BreakEven:
    span = candidate.priced.rent_usd_per_device_hour
    assert span is not None
    return BreakEven(
        name=candidate.name,
        utilisation=SHARES,
        usd_per_device_hour=(span.value,) * len(SHARES),
    )
