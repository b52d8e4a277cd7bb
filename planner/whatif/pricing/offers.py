"""Dated offers of the catalogue: which of them can make a cluster, and what its rent is then.

A price for one card is no price for nodes with a network.  An offer makes a cluster if it has its
accelerator, whole nodes with their host in the price, a network where there are several nodes, and
enough devices.  Specialists and hyperscalers are two markets: a price is the median of one of them.
Of few quotes the range is widened by what quotes of a market usually differ, and of old ones by
what prices move.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, get_args

from meshwright.planner.catalog import Market, Rent, accelerators, rents
from meshwright.planner.whatif.formatting import price_ages, price_dates
from meshwright.planner.whatif.uncertain_value import UncertainValue, product, total

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup
    from meshwright.planner.whatif.study import Commitment, Rental

MANY = 5
"""Prices of which the middle 80 % are known."""
FEW = 3
"""Prices below which their own range says little."""
NO_NETWORK = "an offer that names no network between nodes"
MOST_LEFT_OUT = 2
"""Offers named that are cheaper and cannot make a cluster."""
FALL_A_YEAR, RISE_A_YEAR = 0.56, 1.53
"""Factors within which 80 of 100 prices move in a year: what was published of 2025 and 2026 is
taken for the ends.  AWS cut H100 by 44 % in June 2025; nebius asked 2.95 for it on 2026-05-18 and
4.50 on 2026-10-24 (PRICE_MOVES)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """Price of one offer, a device of the cluster and hour."""

    usd_per_device_hour: float
    offer: Rent
    paid_over_used: float
    """Devices paid over devices used: an instance is rented whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An offer that cannot make a cluster, what it would cost and why it cannot."""

    usd_per_device_hour: float
    offer: Rent
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A cluster's rent from offers, or why there is none."""

    usd_per_device_hour: UncertainValue | None
    how: str
    cause: str = ""
    """Who asks it, a line each: two prices of one provider move together."""
    term_months: float | None = None
    prepaid: float = 0.0
    markets: tuple[Market, ...] = ()
    """Markets of its quotes."""
    elsewhere: float | None = None
    """Dollars that the other market asks, where it rents all of the cluster."""


def rent_of(rental: Rental, cluster: ClusterSpec, rents: Sequence[Rent]) -> Rented:
    """Return a device's rent from the offers that can make a cluster, and what they are."""
    spans, words, terms, causes, markets = [], [], [], set(), set()
    elsewhere: list[float | None] = []
    for group in cluster.groups:
        name = group.accelerator.name
        several = cluster.devices > group.devices_per_node
        asked = [rent for rent in rents if _matches(rent, name, rental)]
        quotes, left = quotes_of(asked, rental.commitment, group, several=several)
        kind = rental.commitment.replace("_", "-")
        if not any(rental.market in (None, quote.offer.market) for quote in quotes):
            why = f": {'; '.join(dict.fromkeys(map(_left_words, left)))}" if left else ""
            return Rented(usd_per_device_hour=None, how=f"no price known, {kind} {name}{why}")
        taken, others = _one_market(_newest(quotes), rental.market)
        price = aged(range_of(_prices(taken)), _age_years(taken))
        spans.append(price.times(group.devices / cluster.devices))
        causes |= {quote.offer.provider for quote in taken}
        markets |= {quote.offer.market for quote in taken}
        other = statistics.median(_prices(others)) if others else None
        elsewhere.append(None if other is None else other * group.devices / cluster.devices)
        terms.append(max(taken, key=lambda quote: quote.offer.term_months or 0.0).offer)
        words.append(
            _words(taken, kind, name, rental)
            + _other_market_text(others)
            + _left_out(left, price.value)
        )
    return Rented(
        usd_per_device_hour=total(spans),
        how="; ".join(words),
        cause="\n".join(sorted(causes)),
        term_months=max((offer.term_months or 0.0 for offer in terms), default=0.0) or None,
        prepaid=max(offer.prepaid for offer in terms),
        markets=tuple(sorted(markets)),
        elsewhere=None if None in elsewhere else sum(filter(None, elsewhere)),
    )


def common_market(
    asked: Sequence[tuple[Rental, ClusterSpec]], rents: Sequence[Rent]
) -> Market | None:
    """Return the market in which every cluster has a rent that has one in any; None if none does.

    Of two such markets it is the cheaper one, by the geometric mean over the clusters.
    """
    priced = [(rental, c) for rental, c in asked if rent_of(rental, c, rents).usd_per_device_hour]
    means: dict[Market, float] = {}
    for market in get_args(Market):
        in_market = [
            rent_of(rental.model_copy(update={"market": market}), cluster, rents)
            for rental, cluster in priced
        ]
        prices = [r.usd_per_device_hour.value for r in in_market if r.usd_per_device_hour]
        if priced and len(prices) == len(priced) and min(prices) > 0:
            means[market] = statistics.geometric_mean(prices)
    return min(means, key=means.__getitem__, default=None)


def _newest(quotes: Sequence[Quote]) -> list[Quote]:
    """Return of each provider the quotes of its latest month: older ones are of another market."""
    months: dict[str, str] = {}
    for quote in quotes:
        dates = price_dates(quote.offer.date)
        month = dates[0] if dates else ""
        months[quote.offer.provider] = max(month, months.get(quote.offer.provider, ""))
    return [
        quote
        for quote in quotes
        if (price_dates(quote.offer.date) or [""])[0] == months[quote.offer.provider]
    ]


def _one_market(quotes: Sequence[Quote], market: Market | None) -> tuple[list[Quote], list[Quote]]:
    """Return the quotes of a market, or of the one whose median is lower, and the others."""
    markets: dict[Market, list[Quote]] = {}
    for quote in quotes:
        markets.setdefault(quote.offer.market, []).append(quote)
    cheaper = min(markets.values(), key=lambda of: statistics.median(_prices(of)))
    taken = cheaper if market is None else markets[market]
    return taken, [quote for quote in quotes if quote.offer.market != taken[0].offer.market]


def _prices(quotes: Sequence[Quote]) -> list[float]:
    return sorted(quote.usd_per_device_hour for quote in quotes)


def _age_years(quotes: Sequence[Quote]) -> float:
    """Return the mean age of quotes."""
    return statistics.mean(age_years(quote.offer.date) for quote in quotes)


def age_years(date: str) -> float:
    """Return the years since a price's date; without one, since the catalogue's oldest rent."""
    today = datetime.date.today()
    return max(price_ages(date, today), default=_oldest(today)) / 12


def _oldest(today: datetime.date) -> int:
    return max((age for rent in rents() for age in price_ages(rent.date, today)), default=0)


def aged(price: UncertainValue, years: float) -> UncertainValue:
    """Return a price with the range that it has some years after it was asked.

    >>> aged(UncertainValue(value=2.0, low=2.0, high=2.0), 1.0)
    UncertainValue(value=2.0, low=1.12, high=3.06)
    """
    moved = UncertainValue(value=1.0, low=FALL_A_YEAR**years, high=RISE_A_YEAR**years)
    return product([price, moved])


def _matches(rent: Rent, accelerator: str, rental: Rental) -> bool:
    return (
        rent.accelerator == accelerator
        and rental.provider in (None, rent.provider)
        and rental.region in (None, rent.region)
    )


def quotes_of(
    offers: Iterable[Rent], commitment: Commitment, group: DeviceGroup, *, several: bool
) -> tuple[list[Quote], list[LeftOut]]:
    """Return what offers that can make a group cost, and which others cannot and why."""
    quotes, left = [], []
    listed = list(offers)
    for offer in listed:
        price = price_of(offer, commitment, listed)
        if price is None:
            continue
        host = 0.0 if offer.whole_node else (offer.host_usd_per_device_hour or 0.0)
        paid = _paid(offer, group)
        usd = (price + host) * paid
        reason = unfit(offer, group, several=several)
        if reason:
            left.append(LeftOut(usd_per_device_hour=usd, offer=offer, reason=reason))
        else:
            quotes.append(Quote(usd_per_device_hour=usd, offer=offer, paid_over_used=paid))
    return _least_idle(quotes), left


def _least_idle(quotes: Sequence[Quote]) -> list[Quote]:
    """Return of each market the quotes with the fewest devices paid and not used.

    Nobody rents eight devices for the work of one where another provider rents one.
    """
    least: dict[Market, float] = {}
    for quote in quotes:
        market = quote.offer.market
        least[market] = min(quote.paid_over_used, least.get(market, math.inf))
    return [quote for quote in quotes if quote.paid_over_used == least[quote.offer.market]]


def price_of(offer: Rent, commitment: Commitment, listed: Sequence[Rent] = ()) -> float | None:
    """Return an offer's price on some terms.

    Of spot prices the lowest seen is known, which is none that can be had for weeks: the geometric
    mean of it and the on-demand price is taken, which may be that of another offer `listed` of the
    provider, of as many devices.
    """
    match commitment:
        case "on_demand":
            return offer.on_demand_usd_per_device_hour
        case "spot":
            lowest, most = offer.spot_usd_per_device_hour, _on_demand_usd(offer, listed)
            return lowest if lowest is None or most is None else math.sqrt(lowest * most)
        case "reserved":
            return offer.reserved_usd_per_device_hour


def _on_demand_usd(offer: Rent, listed: Sequence[Rent]) -> float | None:
    """Return an offer's on-demand price, or the least that its provider asks for the same."""
    if offer.on_demand_usd_per_device_hour is not None:
        return offer.on_demand_usd_per_device_hour
    prices = [
        other.on_demand_usd_per_device_hour
        for other in listed
        if (other.provider, other.accelerator, other.devices)
        == (offer.provider, offer.accelerator, offer.devices)
        and other.on_demand_usd_per_device_hour is not None
    ]
    return min(prices, default=None)


def unfit(offer: Rent, group: DeviceGroup, *, several: bool) -> str | None:
    """Say why an offer cannot make a group, alone or among several nodes; None if it can."""
    if not offer.whole_node and offer.host_usd_per_device_hour is None:
        return "an offer without its host"
    if offer.most_devices is not None and offer.most_devices < group.devices:
        return f"an offer of {offer.most_devices} devices at most"
    if offer.devices < _of_one_host(group):
        return f"an offer of {offer.devices} device{'s' * (offer.devices > 1)} is no node"
    if several and offer.fabric is None:
        return NO_NETWORK
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


def _words(quotes: Sequence[Quote], kind: str, name: str, rental: Rental) -> str:
    dates = sorted({quote.offer.date for quote in quotes})
    text = "one" if len(quotes) == 1 else f"median of {len(quotes)}"
    text += f" {kind} rent{'s' * (len(quotes) > 1)} of {name}"
    of_market = (
        f" from {'a ' * (len(quotes) == 1)}{quotes[0].offer.market}{'s' * (len(quotes) > 1)}"
    )
    text += f" at {rental.provider}" if rental.provider else of_market
    text += _unconfirmed_words([quote.offer for quote in quotes])
    return text + f", {dates[0]}" + (f" to {dates[-1]}" if dates[1:] else "")


def _unconfirmed_words(offers: Sequence[Rent]) -> str:
    """Name providers whose prices others report, and who confirms them."""
    names = sorted({offer.provider for offer in offers if offer.confidence == "low"})
    if not names:
        return ""
    return f" (reported by others than {' and '.join(names)}: a quote of theirs confirms it)"


def _other_market_text(quotes: Sequence[Quote]) -> str:
    """Say what the other market asks."""
    if not quotes:
        return ""
    price = statistics.median(_prices(quotes))
    return f"; {quotes[0].offer.market}s ask {price:.2f}"


def _left_out(left: Sequence[LeftOut], price: float) -> str:
    """Name offers below a price that cannot make the cluster, first those that lack a network."""
    cheaper = sorted(
        (rent for rent in left if rent.usd_per_device_hour < price),
        key=lambda rent: (rent.reason != NO_NETWORK, rent.usd_per_device_hour),
    )
    if not cheaper:
        return ""
    more = len(cheaper) - MOST_LEFT_OUT
    named = "; ".join(map(_left_words, cheaper[:MOST_LEFT_OUT]))
    return f"; left out: {named}" + (f"; and {more} more" if more > 0 else "")


def _left_words(left: LeftOut) -> str:
    unsure = " as others report" if left.offer.confidence == "low" else ""
    return f"{left.offer.provider} at {left.usd_per_device_hour:.2f}{unsure}, {left.reason}"


def range_of(prices: Sequence[float]) -> UncertainValue:
    """Return the median of sorted prices, and a range that few prices do not narrow.

    >>> range_of([1.0, 2.0, 3.0, 4.0, 5.0])
    UncertainValue(value=3.0, low=1.4, high=4.6)
    """
    middle = statistics.median(prices)
    low, high = prices[0], prices[-1]
    if len(prices) >= MANY:
        tenths = statistics.quantiles(prices, n=10, method="inclusive")
        low, high = tenths[0], tenths[-1]
    if len(prices) < FEW:
        below, above = usual_spread()
        low, high = min(low, middle * below), max(high, middle * above)
    return UncertainValue(value=middle, low=low, high=high)


@cache
def usual_spread() -> tuple[float, float]:
    """Return how far the ends of the catalogue's on-demand offers lie from their median.

    Of accelerators with at least three offers of whole nodes in a market, the geometric mean.
    """
    by_name: dict[tuple[str, Market], list[float]] = {}
    for offer in rents():
        price = offer.on_demand_usd_per_device_hour
        if price is not None and offer.whole_node and offer.devices > 1:
            by_name.setdefault((offer.accelerator, offer.market), []).append(price)
    ends = [
        (min(prices) / statistics.median(prices), max(prices) / statistics.median(prices))
        for prices in by_name.values()
        if len(prices) >= FEW
    ]
    return (
        statistics.geometric_mean([low for low, _ in ends]),
        statistics.geometric_mean([high for _, high in ends]),
    )
