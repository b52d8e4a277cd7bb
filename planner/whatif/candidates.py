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
from planner.whatif.span import Span, exact, span_of, total
from planner.whatif.study import Assumptions, Buying, Offer, Rental, Study, Tuning


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
    fix: tuple[str, ...]

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


def _of_offer(study: Study, offer: Offer, known: Sequence[Rent]) -> Iterator[Candidate]:
    texts = [offer.cluster.replace("{n}", str(n)) for n in offer.n] or [offer.cluster]
    listed = [_candidate(study, offer, text, known) for text in texts]
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
    )


def _name(offer: Offer, text: str) -> str:
    """Return an offer's name; one of several clusters is told apart by its text."""
    if offer.name is None:
        return text
    if not offer.n:
        return offer.name
    named = offer.name if "{n}" in offer.name else f"{offer.name} {{n}}"
    return named.replace("{n}", text)


def _priced(study: Study, offer: Offer, cluster: ClusterSpec, known: Sequence[Rent]) -> Priced:
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
        middle = statistics.median(prices)
        spans.append((group.devices, Span(value=middle, low=prices[0], high=prices[-1])))
        dates = sorted({date for _, date in found})
        words.append(
            f"median of {len(prices)} {rental.commitment.replace('_', '-')} rents of "
            f"{group.accelerator.name}, {dates[0]}" + (f" to {dates[-1]}" if dates[1:] else "")
        )
    devices = sum(count for count, _ in spans)
    return Priced(
        rent_usd_per_device_hour=total(span.times(count / devices) for count, span in spans),
        how="; ".join(words),
    )


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
