"""Dated offers of the catalogue: which of them can make a cluster, and what its rent is then.

A price for one card is no price for nodes with a network.  An offer makes a cluster if it has its
accelerator, whole nodes with their host in the price, a network where there are several nodes, and
enough devices.  Of few quotes the range is widened by what quotes usually differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from planner.catalog import Rent, accelerators, rents
from planner.documents.cluster import ClusterSpec, DeviceGroup
from planner.whatif.span import Span, total
from planner.whatif.study import Commitment, Rental

MANY = 5
"""Prices of which the middle 80 % are known."""
FEW = 3
"""Prices below which their own range says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What one offer costs, a device of the cluster and hour."""

    usd_per_device_hour: float
    offer: Rent


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A cluster's rent from offers, or why there is none."""

    usd_per_device_hour: Span | None
    how: str
    term_months: float | None = None
    prepaid: float = 0.0


def rent_of(rental: Rental, cluster: ClusterSpec, known: Sequence[Rent]) -> Rented:
    """Return a device's rent from the offers that can make a cluster, and what they are."""
    spans, words, terms = [], [], []
    for group in cluster.groups:
        name = group.accelerator.name
        several = cluster.devices > group.devices_per_node
        asked = [rent for rent in known if _asked(rent, name, rental)]
        quotes, reasons = quotes_of(asked, rental.commitment, group, several=several)
        kind = rental.commitment.replace("_", "-")
        if not quotes:
            why = f": {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
            return Rented(usd_per_device_hour=None, how=f"no price known, {kind} {name}{why}")
        prices = sorted(quote.usd_per_device_hour for quote in quotes)
        spans.append(range_of(prices).times(group.devices / cluster.devices))
        terms.append(max(quotes, key=lambda quote: quote.offer.term_months or 0.0).offer)
        words.append(_words(quotes, kind, name, rental, len(reasons)))
    return Rented(
        usd_per_device_hour=total(spans),
        how="; ".join(words),
        term_months=max((offer.term_months or 0.0 for offer in terms), default=0.0) or None,
        prepaid=max(offer.prepaid for offer in terms),
    )


def _asked(rent: Rent, accelerator: str, rental: Rental) -> bool:
    return (
        rent.accelerator == accelerator
        and rental.provider in (None, rent.provider)
        and rental.region in (None, rent.region)
    )


def quotes_of(
    offers: Iterable[Rent], commitment: Commitment, group: DeviceGroup, *, several: bool
) -> tuple[list[Quote], list[str]]:
    """Return what offers that can make a group cost, and why others cannot."""
    quotes, reasons = [], []
    for offer in offers:
        price = price_of(offer, commitment)
        if price is None:
            continue
        reason = unfit(offer, group, several=several)
        if reason:
            reasons.append(reason)
            continue
        host = 0.0 if offer.whole_node else (offer.host_usd_per_device_hour or 0.0)
        quotes.append(Quote(usd_per_device_hour=(price + host) * _paid(offer, group), offer=offer))
    return quotes, reasons


def price_of(offer: Rent, commitment: Commitment) -> float | None:
    """Return an offer's price on some terms.

    Of spot prices the lowest seen is known, which is none that can be had for weeks: the geometric
    mean of it and the on-demand price is taken.
    """
    match commitment:
        case "on_demand":
            return offer.on_demand_usd_per_device_hour
        case "spot":
            lowest, most = offer.spot_usd_per_device_hour, offer.on_demand_usd_per_device_hour
            return lowest if lowest is None or most is None else math.sqrt(lowest * most)
        case "reserved":
            return offer.reserved_usd_per_device_hour


def unfit(offer: Rent, group: DeviceGroup, *, several: bool) -> str | None:
    """Say why an offer cannot make a group, alone or among several nodes; None if it can."""
    if not offer.whole_node and offer.host_usd_per_device_hour is None:
        return "an offer without its host"
    if offer.most_devices is not None and offer.most_devices < group.devices:
        return f"an offer of {offer.most_devices} devices at most"
    if offer.devices < _of_one_host(group):
        return f"an offer of {offer.devices} device{'s' * (offer.devices > 1)} is no node"
    if several and offer.fabric is None:
        return "an offer that names no network between nodes"
    return None


def _of_one_host(group: DeviceGroup) -> int:
    """Return the devices of one host: some of a node, where links join several hosts."""
    entry = accelerators().get(group.accelerator.name)
    hosts = entry.host_devices if entry is not None else None
    return min(group.devices_per_node, hosts or group.devices_per_node)


def _paid(offer: Rent, group: DeviceGroup) -> float:
    """Return devices paid over devices used: an instance is rented whole."""
    used = group.devices_per_node
    if offer.divisible:
        return 1.0
    return math.ceil(used / offer.devices) * offer.devices / used


def _words(quotes: Sequence[Quote], kind: str, name: str, rental: Rental, left: int) -> str:
    dates = sorted({quote.offer.date for quote in quotes})
    text = "one" if len(quotes) == 1 else f"median of {len(quotes)}"
    text += f" {kind} rent{'s' * (len(quotes) > 1)} of {name}"
    text += f" at {rental.provider}" if rental.provider else ""
    text += f", {dates[0]}" + (f" to {dates[-1]}" if dates[1:] else "")
    if left:
        text += f" ({left} offer{'s' * (left > 1)} cannot make it)"
    return text


def range_of(prices: Sequence[float]) -> Span:
    """Return the median of sorted prices, and a range that few prices do not narrow.

    >>> range_of([1.0, 2.0, 3.0, 4.0, 5.0])
    Span(value=3.0, low=1.4, high=4.6)
    """
    middle = statistics.median(prices)
    low, high = prices[0], prices[-1]
    if len(prices) >= MANY:
        tenths = statistics.quantiles(prices, n=10, method="inclusive")
        low, high = tenths[0], tenths[-1]
    if len(prices) < FEW:
        below, above = usual_spread()
        low, high = min(low, middle * below), max(high, middle * above)
    return Span(value=middle, low=low, high=high)


@cache
def usual_spread() -> tuple[float, float]:
    """Return how far the ends of the catalogue's on-demand offers lie from their median.

    Of accelerators with at least three offers of whole nodes, the geometric mean.
    """
    by_name: dict[str, list[float]] = {}
    for offer in rents():
        price = offer.on_demand_usd_per_device_hour
        if price is not None and offer.whole_node and offer.devices > 1:
            by_name.setdefault(offer.accelerator, []).append(price)
    ends = [
        (min(prices) / statistics.median(prices), max(prices) / statistics.median(prices))
        for prices in by_name.values()
        if len(prices) >= FEW
    ]
    return (
        statistics.geometric_mean([low for low, _ in ends]),
        statistics.geometric_mean([high for _, high in ends]),
    )
