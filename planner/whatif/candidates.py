"""Candidates of a study: each offer as clusters with their prices, every figure with its source."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.catalog import Rent, network_purchase, purchases, rents
from planner.cluster import ClusterSpec
from planner.errors import DocumentError
from planner.expressions import resolve_cluster
from planner.whatif.changes import changed
from planner.whatif.economics import Power, Purchase
from planner.whatif.span import Span, exact, product, span_of, total
from planner.whatif.study import Assumptions, Buying, ChangeName, Offer, Rental, Study, Tuning

MANY = 5
"""Prices of which the middle 80 % are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A price per device and hour, or a purchase; neither means that nothing is known."""

    rent_usd_per_device_hour: Span | None = None
    purchase: Purchase | None = None
    owned: bool = False
    how: str = "no price known"
    """Commitment, date and source, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cluster on one set of terms."""

    name: str
    cluster: ClusterSpec
    priced: Priced
    spot: bool
    tuning: Tuning
    fix: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    changes: tuple[tuple[ChangeName, float], ...] = ()
    """How its cluster differs from the one that its offer names."""
    plain: str = ""
    """The cluster that its offer names."""

    @property
    def devices(self) -> int:
        """Of the whole cluster."""
        return self.cluster.devices


def candidates_of(study: Study, offers: Sequence[Rent] | None = None) -> list[Candidate]:
    """Return all candidates in the order of their offers; names are unique.

    `offers` are dated rents instead of the catalogue's.
    """
    known = rents() if offers is None else offers
    found: dict[str, Candidate] = {}
    for place, offer in enumerate(study.offers):
        try:
            listed = list(_of_offer(study, offer, known))
        except DocumentError as error:
            raise DocumentError(
                f"offers[{place}].{error.path or 'cluster'}", error.message
            ) from error
        for candidate in listed:
            if candidate.name in found:
                raise DocumentError(
                    f"offers[{place}]", f"'{candidate.name}' is there twice; give it a name"
                )
            found[candidate.name] = candidate
    return list(found.values())


def power_of(assumptions: Assumptions) -> Power:
    """Return what devices draw, by the assumptions or the catalogue."""
    known = assumptions.facility
    return Power(
        node_over_tdp=span_of(known.node_power_over_tdp),
        network_w_per_device=span_of(known.network_w_per_device),
        usage_effectiveness=span_of(known.power_usage_effectiveness),
    )


def watts_of(cluster: ClusterSpec, assumptions: Assumptions) -> Span | None:
    """Return what a cluster draws at the meter; None if an accelerator's figure is not known."""
    power, spans = power_of(assumptions), []
    for group in cluster.groups:
        if group.accelerator.tdp_w is None:
            return None
        spans.append(power.watts(group.devices, group.accelerator.tdp_w))
    return total(spans)


def power_usd_per_device_hour(cluster: ClusterSpec, assumed: Assumptions) -> Span | None:
    """Return what a device's electricity costs an hour."""
    watts = watts_of(cluster, assumed)
    if watts is None:
        return None
    electricity = span_of(assumed.facility.electricity_usd_per_kwh)
    return product([watts.times(1e-3 / cluster.devices), electricity])


def _of_offer(study: Study, offer: Offer, known: Sequence[Rent]) -> Iterator[Candidate]:
    texts = [offer.cluster.replace("{n}", str(n)) for n in offer.n] or [offer.cluster]
    listed = [
        _candidate(study, each, text, known)
        for text in texts
        for each in _of_each_provider(offer, text, known)
    ]
    if not offer.largest:
        yield from listed
        return
    cap = study.goal.power_cap_w
    if cap is None:
        raise DocumentError("largest", "needs goal.power_cap_w")
    draws = [(watts_of(candidate.cluster, study.assumptions), candidate) for candidate in listed]
    within = [c for watts, c in draws if watts is not None and watts.value <= cap]
    if not within:
        raise DocumentError("n", f"no number of nodes keeps {cap / 1e3:g} kW; list smaller ones")
    yield max(within, key=lambda candidate: candidate.devices)


def _of_each_provider(offer: Offer, text: str, known: Sequence[Rent]) -> list[Offer]:
    """Return an offer for each provider that rents the cluster's accelerators, or the one given."""
    if offer.rent is None or not offer.rent.each_provider:
        return [offer]
    names = {group.accelerator.name for group in resolve_cluster(text).groups}
    rentals = [
        Rental(commitment=offer.rent.commitment, provider=provider)
        for provider in sorted({rent.provider for rent in known})
    ]
    having = [r for r in rentals if all(_offers(name, r, known) for name in names)]
    if not having:
        raise DocumentError("rent.each_provider", f"nobody is known to rent {', '.join(names)}")
    return [
        offer.model_copy(
            update={"name": f"{offer.name or offer.cluster} at {rental.provider}", "rent": rental}
        )
        for rental in having
    ]


def _candidate(study: Study, offer: Offer, text: str, known: Sequence[Rent]) -> Candidate:
    cluster = resolve_cluster(text)
    if offer.host_memory_bytes is not None:
        size = {"host_memory_bytes": offer.host_memory_bytes}
        groups = tuple(group.model_copy(update=size) for group in cluster.groups)
        cluster = cluster.model_copy(update={"groups": groups})
    for change, factor in offer.change.items():
        other = changed(cluster, change, factor)
        if other is None:
            raise DocumentError("change", f"{text} has no {change} to change by {factor:g}")
        cluster = other
    return Candidate(
        name=_name(offer, text),
        cluster=cluster,
        priced=_priced(study, offer, cluster, known),
        spot=offer.rent is not None and offer.rent.commitment == "spot",
        tuning=offer.tuning or study.work.tuning,
        fix=offer.fix,
        allow=offer.allow,
        changes=tuple(offer.change.items()),
        plain=text,
    )


def _name(offer: Offer, text: str) -> str:
    """Return an offer's name; one of several clusters is told apart by its text."""
    if offer.name is None:
        return text
    if not offer.n:
        return offer.name
    named = offer.name if "{n}" in offer.name else f"{offer.name} {{n}}"
    if "{n}" in offer.cluster and offer.cluster in offer.name:
        return named.replace(offer.cluster, text)
    return named.replace("{n}", text)


def _priced(study: Study, offer: Offer, cluster: ClusterSpec, known: Sequence[Rent]) -> Priced:
    if isinstance(offer.owned, tuple):
        return _owned_in_part(study, offer.owned, offer.rent or Rental(), cluster, known)
    if offer.owned:
        return Priced(owned=True, how="owned: power alone is paid")
    if offer.buy is not None:
        return _bought(study, offer.buy, cluster)
    if offer.rent is None and cluster.price is not None:
        price = cluster.price
        return Priced(
            rent_usd_per_device_hour=exact(price.usd_per_device_hour),
            how=f"{price.commitment}, {price.date}, {price.source}",
        )
    return _rented(offer.rent or Rental(), cluster, known)


def _owned_in_part(
    study: Study, owned: Sequence[str], rental: Rental, cluster: ClusterSpec, known: Sequence[Rent]
) -> Priced:
    """Return the mean price of a device of which some are rented and others take power alone."""
    mine = tuple(g for g in cluster.groups if g.accelerator.name in owned)
    others = tuple(g for g in cluster.groups if g.accelerator.name not in owned)
    missing = set(owned) - {group.accelerator.name for group in mine}
    if missing or not others:
        raise DocumentError(
            "owned",
            f"names {', '.join(sorted(missing) or owned)}; the cluster has "
            f"{', '.join(g.accelerator.name for g in cluster.groups)}, and some must be rented",
        )
    rent = _rented(rental, cluster.model_copy(update={"groups": others}), known)
    power = power_usd_per_device_hour(
        cluster.model_copy(update={"groups": mine}), study.assumptions
    )
    if rent.rent_usd_per_device_hour is None or power is None:
        return rent if power is not None else Priced(how="the power of what is owned is not known")
    rented = sum(group.devices for group in others)
    share = rented / cluster.devices
    return Priced(
        rent_usd_per_device_hour=total(
            [rent.rent_usd_per_device_hour.times(share), power.times(1 - share)]
        ),
        how=f"{rented} of {cluster.devices} devices: {rent.how}; power alone for the others",
    )


def _rented(rental: Rental, cluster: ClusterSpec, known: Sequence[Rent]) -> Priced:
    """Return a given rent, or the middle of the catalogue's offers for the accelerators."""
    value = rental.usd_per_device_hour
    if value is not None:
        return Priced(
            rent_usd_per_device_hour=Span(
                value=value, low=rental.low or value, high=rental.high or value
            ),
            how=f"{rental.commitment}, {rental.date}, {rental.source}",
        )
    if rental.commitment == "reserved":
        raise DocumentError(
            "rent", "the catalogue has no reserved prices; give usd_per_device_hour"
        )
    spans, words = [], []
    for group in cluster.groups:
        found = _offers(group.accelerator.name, rental, known)
        if not found:
            return Priced(how=f"no {rental.commitment} rent of {group.accelerator.name} is known")
        prices = sorted(price for price, _ in found)
        spans.append((group.devices, middle_of(prices)))
        dates = sorted({date for _, date in found})
        words.append(
            f"median of {len(prices)} {rental.commitment.replace('_', '-')} rents of "
            f"{group.accelerator.name}"
            + (f" at {rental.provider}" if rental.provider else "")
            + f", {dates[0]}"
            + (f" to {dates[-1]}" if dates[1:] else "")
        )
    devices = sum(count for count, _ in spans)
    return Priced(
        rent_usd_per_device_hour=total(span.times(count / devices) for count, span in spans),
        how="; ".join(words),
    )


def middle_of(prices: Sequence[float]) -> Span:
    """Return the median of sorted prices and the range of the middle 80 %, of all if they are few.

    >>> middle_of([1.0, 2.0, 4.0])
    Span(value=2.0, low=1.0, high=4.0)
    """
    low, high = prices[0], prices[-1]
    if len(prices) >= MANY:
        tenths = statistics.quantiles(prices, n=10, method="inclusive")
        low, high = tenths[0], tenths[-1]
    return Span(value=statistics.median(prices), low=low, high=high)


def _offers(accelerator: str, rental: Rental, known: Sequence[Rent]) -> list[tuple[float, str]]:
    """Return prices with their dates, of whole nodes."""
    result = []
    for rent in known:
        if rent.accelerator != accelerator or rental.provider not in (None, rent.provider):
            continue
        price = rent.on_demand_usd_per_device_hour
        if rental.commitment == "spot":
            price = rent.spot_usd_per_device_hour
        if price is not None:
            result.append((price, rent.date))
    return result


def _bought(study: Study, buying: Buying, cluster: ClusterSpec) -> Priced:
    assumed = study.assumptions
    network = span_of(network_purchase())
    if buying.network_usd_per_device is not None:
        network = exact(buying.network_usd_per_device)
    if len({group.accelerator.name for group in cluster.groups}) > 1:
        raise DocumentError("buy", "one price cannot be that of accelerators that differ")
    name = cluster.groups[0].accelerator.name
    value, low, high = buying.usd_per_device, buying.low, buying.high
    how = f"bought, {buying.date}, {buying.source}"
    if value is None:
        known = purchases().get(name)
        if known is None:
            return Priced(how=f"no purchase price of {name} is known")
        value, low, high = known.usd_per_device, known.low, known.high
        node = "with its node" if known.with_node else "without its node"
        how = f"bought {node}, {known.date}, {known.source}"
    return Priced(
        purchase=Purchase(
            usd_per_device=Span(value=value, low=low or value, high=high or value),
            network_usd_per_device=network,
            years=assumed.years,
            residual=span_of(assumed.residual),
            interest=assumed.interest,
        ),
        how=how,
    )
