"""Candidates of a study: each offer as clusters with their prices, every figure with its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from meshwright.planner.catalog import (
    Market,
    PurchasePrice,
    Rent,
    network_purchase,
    purchases,
    rents,
)
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.compute import POWER_EXPONENT
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import MOST_DEVICES
from meshwright.planner.errors import DocumentError
from meshwright.planner.whatif.formatting import price_dates
from meshwright.planner.whatif.pricing.economics import (
    HOURS_PER_YEAR,
    Horizon,
    Hourly,
    Power,
    Purchase,
    Tax,
    power_usd_per_hour,
    prepaid_factor,
    residual_share,
    sum_hourly,
    terms_begun,
)
from meshwright.planner.whatif.pricing.financing import (
    Instalments,
    lease_instalments,
    lease_months,
    loan_instalments,
)
from meshwright.planner.whatif.pricing.offers import (
    age_years,
    aged,
    common_market,
    price_of,
    rent_of,
)
from meshwright.planner.whatif.probabilities import probability_within
from meshwright.planner.whatif.study import (
    Assumptions,
    Buying,
    ChangeName,
    Lease,
    Loan,
    Offer,
    Owning,
    Rental,
    Study,
    Tuning,
)
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact, product, span_of, total
from meshwright.planner.whatif.what_if_changes import changed_cluster

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec

MONTHS_PER_YEAR = 12.0
DAYS_PER_MONTH = 365 / 12
SOLD: frozenset[ChangeName] = frozenset({"host_memory", "devices"})
"""Changes that a buyer can order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A contract whose every hour is paid."""

    years: float
    prepaid: float = 0.0
    """Share of it that is paid on the first day."""
    usd_per_device_hour: UncertainValue

    @property
    def term_usd_per_device(self) -> UncertainValue:
        """Dollars of the whole term, a device."""
        return self.usd_per_device_hour.times(self.years * HOURS_PER_YEAR)


Share = Literal["owned", "bought", "rented"]
"""Terms of a part of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrice:
    """A price of a device and hour, with what stands behind it; none if nothing is known."""

    hourly: Hourly | None = None
    purchase: Purchase | None = None
    reservation: Reservation | None = None
    minimum_hours: float = 0.0
    """Hours of a run that are paid at least."""
    owned: bool = False
    quote: UncertainValue | None = None
    """Quote as it was asked: the rent of a device and hour, or the price of a device."""
    network: UncertainValue | None = None
    """Price of the network of what is bought, a device."""
    parts: tuple[Share, ...] = ()
    """Terms of each group of a cluster that is had on several terms."""
    beside: Hourly | None = None
    """Hourly price of a device's share in what is not bought, where a part is bought."""
    part_quotes: dict[Share, UncertainValue] = field(default_factory=dict)
    """Quotes for each part of a cluster that is had on several terms."""
    words_beside: tuple[str, str] = ("", "")
    """Words before and after those of the quote in `how`."""
    how: str = "no price known"
    """Commitment, date and source, in words."""
    cause: str = ""
    """The quotes that it rests on: prices of the same quotes move together."""
    moves_weight: float = 0.0
    """Part of its quotes' deviation that comes between now and a later order."""
    markets: tuple[Market, ...] = ()
    """Markets of the catalogue's offers that it rests on."""
    elsewhere_usd: float | None = None
    """Dollars that the other market's offers ask, a device and hour."""
    settled: Hourly | None = None
    """Price of what is not rented alone, with its quotes exact: the range left is that of
    owning."""

    def quote_weight(self, utilisation: float) -> float:
        """Return how much of the price's deviation is its quotes', beside what owning costs.

        Squares of both add up to 1.  Of a rent it is 1; of what is owned, 0.
        """
        if self.hourly is None or self.settled is None:
            return 0.0 if self.owned else 1.0
        whole, rest = (
            sum(of.useful_hour_usd(utilisation).spreads()) for of in (self.hourly, self.settled)
        )
        return math.sqrt(max(0.0, 1 - (rest / whole) ** 2)) if whole else 0.0

    @property
    def at_once_usd_per_device(self) -> float | None:
        """Dollars a device bound by signing: a purchase, or a contract's whole term."""
        if self.purchase is not None:
            return self.purchase.hardware_usd.value * self.purchase.bound_share
        return None if self.reservation is None else self.reservation.term_usd_per_device.value

    def outlay_usd_per_device(
        self, utilisation: float, run_hours: UncertainValue | None = None
    ) -> UncertainValue | None:
        """Return what binding terms take out of a budget for each device; None on others.

        A purchase takes its price and what its years cost, a contract its whole term; a run that
        takes longer takes more of both.
        """
        if self.purchase is not None:
            return self.purchase.outlay_usd(utilisation, run_hours)
        if self.reservation is None:
            return None
        once = self.reservation.term_usd_per_device
        if run_hours is None:
            return once
        return product([once, terms_begun(run_hours, self.reservation.years * HOURS_PER_YEAR)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cluster on one set of terms."""

    name: str
    cluster: ClusterSpec
    priced: DevicePrice
    spot: bool
    tuning: Tuning
    assumed: Assumptions = field(default_factory=Assumptions)
    """The study's, with the offer's own in their place."""
    power_limit: float = 1.0
    narrower: ClusterSpec | None = None
    """The cluster without its wider scale-up domain, as which it can be used too."""
    fix: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    changes: tuple[tuple[ChangeName, float], ...] = ()
    """Changes of its cluster from the one that its offer names, with their factors."""
    plain: str = ""
    """The cluster that its offer names."""
    place: int = 0
    """Place of its offer among the study's."""
    provider: str = ""
    """Provider of an offer that is made of each provider's."""
    wait_days: float = 0.0
    """Until it is ordered."""

    @property
    def devices(self) -> int:
        """Number of devices of the whole cluster."""
        return self.cluster.devices

    @property
    def lead_days(self) -> UncertainValue | None:
        """Days until devices are there, bought or waited for; None of what can be used at once."""
        waits = [exact(self.wait_days)] if self.wait_days else []
        if self.priced.purchase is not None:
            waits.append(span_of(self.assumed.lead_days))
        waited = total(waits) if waits else exact(0.0)
        return waited if waited.high else None

    @property
    def whole_term_hours(self) -> float | None:
        """Hours of a commitment that one run has to pay whole, used or not.

        Each term of a contract or lease; of a purchase and of what is owned the year that the run
        is in, at the price of an hour over all its years: it is sold, or works on, afterwards.  So
        a run of a year costs what a year of jobs does.  None where nothing binds, or where the
        study says by its utilisation what else it does.
        """
        if "utilisation" in self.assumed.model_fields_set:
            return None
        purchase, reserved = self.priced.purchase, self.priced.reservation
        years = self.assumed.years
        if purchase is not None and purchase.leased:
            return years * purchase.bound_share * HOURS_PER_YEAR
        if purchase is not None or self.priced.owned or "owned" in self.priced.parts:
            return min(1.0, years) * HOURS_PER_YEAR
        return None if reserved is None else reserved.years * HOURS_PER_YEAR

    @property
    def limited_cluster(self) -> ClusterSpec:
        """The cluster as fast as its devices are at their power limit."""
        if self.power_limit == 1:
            return self.cluster
        # Rates of products fall with the limit to a power that the study may give.
        power = self.assumed.power_limit_exponent.value / POWER_EXPONENT
        share = self.power_limit**power
        return self.cluster.with_power_limits(lambda device: share * (device.power_limit or 1.0))

    quoted: bool = False
    """Its offer has a price of its own: somebody sells it."""

    @property
    def hypothetical(self) -> bool:
        """True if no such product is sold."""
        return not self.quoted and any(change not in SOLD for change, _ in self.changes)


def candidates_of(
    study: Study, offers: Sequence[Rent] | None = None, *, together: bool = True
) -> list[Candidate]:
    """Return all candidates in the order of their offers; names are unique.

    `offers` are dated rents instead of the catalogue's.  Prices are of one market that has them
    all where candidates are compared `together`, else each is of the market that asks less.
    """
    catalogue = rents() if offers is None else offers
    candidates: dict[str, Candidate] = {}
    priced = in_one_market(study, catalogue) if together else study
    for place, offer in enumerate(priced.offers):
        try:
            listed = list(_of_offer(study, offer, catalogue))
        except DocumentError as error:
            raise DocumentError(
                f"offers[{place}].{error.path or 'cluster'}", error.message
            ) from error
        for candidate in listed:
            if candidate.name in candidates:
                raise DocumentError(
                    f"offers[{place}]", f"'{candidate.name}' is there twice; give it a name"
                )
            candidates[candidate.name] = replace(candidate, place=place)
    return list(candidates.values())


def in_one_market(study: Study, catalogue: Sequence[Rent]) -> Study:
    """Return the study with the market that prices all its rents, where there is one.

    Specialists ask half of what hyperscalers do: a candidate at the one beside another at the
    other would be told apart by who was asked.
    """
    places: dict[int, tuple[Rental, ClusterSpec]] = {}
    for place, offer in enumerate(study.offers):
        rental = offer.rent or Rental()
        given = rental.usd_per_device_hour or rental.provider or rental.each_provider
        if offer.buy is not None or offer.owned or given or rental.market:
            continue
        size = max(offer.n, default=1)
        try:
            cluster = resolve_cluster(offer.cluster.replace("{n}", str(size)))
        except DocumentError:
            continue  # it is refused at its place
        if offer.rent is not None or cluster.price is None:
            places[place] = rental, cluster
    market = common_market(list(places.values()), catalogue) if len(places) > 1 else None
    if market is None:
        return study
    offers = [
        offer.model_copy(update={"rent": places[at][0].model_copy(update={"market": market})})
        if at in places and rent_of(*places[at], catalogue).usd_per_device_hour is not None
        else offer
        for at, offer in enumerate(study.offers)
    ]
    return study.model_copy(update={"offers": tuple(offers)})


def power_of(assumptions: Assumptions) -> Power:
    """Return what devices draw, by the assumptions or the catalogue."""
    facility = assumptions.facility
    return Power(
        node_over_tdp=span_of(facility.node_power_over_tdp),
        network_w_per_device=span_of(facility.network_w_per_device),
        usage_effectiveness=span_of(facility.power_usage_effectiveness),
    )


def watts_of(
    cluster: ClusterSpec, assumptions: Assumptions, power_limit: float = 1.0
) -> UncertainValue | None:
    """Return what a cluster draws at the meter; None if an accelerator's figure is not known."""
    power, spans = power_of(assumptions), []
    for group in cluster.groups:
        if group.accelerator.tdp_w is None:
            return None
        share = power_limit * (group.accelerator.power_limit or 1.0)
        spans.append(power.watts(group.devices, group.accelerator.tdp_w * share))
    return total(spans)


def power_usd_per_device_hour(
    cluster: ClusterSpec, assumed: Assumptions, power_limit: float = 1.0
) -> UncertainValue | None:
    """Return what a device's electricity costs an hour."""
    watts = watts_of(cluster, assumed, power_limit)
    if watts is None:
        return None
    return power_usd_per_hour(
        watts.times(1 / cluster.devices), span_of(assumed.facility.electricity_usd_per_kwh)
    )


def _of_offer(study: Study, offer: Offer, rents_known: Sequence[Rent]) -> Iterator[Candidate]:
    if offer.solve is not None and not offer.n:
        raise DocumentError(
            "solve", "is carried out by meshwright.planner.whatif.evaluate; call that"
        )
    texts = [offer.cluster.replace("{n}", str(n)) for n in offer.n] or [offer.cluster]
    listed = [
        _candidate(study, each, text, rents_known)
        for text in texts
        for each in _of_each_provider(offer, text, rents_known)
    ]
    if not offer.largest:
        yield from listed
        return
    yield max(_within_cap(study, listed), key=lambda candidate: candidate.devices)


def _within_cap(study: Study, listed: Sequence[Candidate]) -> list[Candidate]:
    cap = study.goal.power_cap_w
    if cap is None:
        raise DocumentError("largest", "needs goal.power_cap_w; add it, or give a number")
    draws = [(watts_of(c.cluster, c.assumed, c.power_limit), c) for c in listed]
    kept = [c for watts, c in draws if watts is not None and _fed(study, watts)]
    if not kept:
        raise DocumentError(
            "n",
            f"no number of nodes keeps {cap / 1e3:g} kW with probability "
            f"{study.goal.confidence:g}; list smaller ones",
        )
    return kept


def _fed(study: Study, watts: UncertainValue) -> bool:
    """Return whether a draw meets the goal's power cap as surely as the goal wants."""
    cap = study.goal.power_cap_w
    return cap is None or probability_within(watts, cap * (1 + ROUNDING)) >= study.goal.confidence


class NoSizeError(DocumentError):
    """No number of devices of an offer reaches the goal that its number is solved for."""


def powered_devices(study: Study, offer: Offer) -> int:
    """Return the most that the goal's power cap surely feeds of an offer's `n`."""
    cap = study.goal.power_cap_w
    if cap is None:
        raise DocumentError(
            "solve",
            "power needs goal.power_cap_w (--power-cap); add it, or solve for budget or deadline",
        )
    cluster = resolve_cluster(offer.cluster.replace("{n}", "1"))
    watts = watts_of(cluster, study.assumptions.but(offer.assumptions), offer.power_limit)
    if watts is None:
        raise DocumentError(
            "solve",
            f"the power of {cluster.name} is not known; "
            "see `meshwright catalog accelerators` for those with a power",
        )
    most = min(MOST_DEVICES // cluster.devices, math.floor(cap / watts.value * (1 + ROUNDING)))
    while most > 0 and not _fed(study, watts.times(most)):
        most -= 1
    if most < 1:
        raise NoSizeError(
            "solve",
            f"{cap / 1e3:g} kW feed none with probability {study.goal.confidence:g}; one takes "
            f"{watts.value:,.0f} ({watts.low:,.0f} to {watts.high:,.0f}) W",
        )
    return most


def _of_each_provider(offer: Offer, text: str, rents_known: Sequence[Rent]) -> list[Offer]:
    """Return an offer for each provider that rents the cluster's accelerators, or the one given."""
    if offer.rent is None or not offer.rent.each_provider:
        return [offer]
    rentals = [
        Rental(commitment=offer.rent.commitment, market=offer.rent.market, provider=provider)
        for provider in sorted({rent.provider for rent in rents_known})
    ]
    cluster = resolve_cluster(text)
    having = [
        r for r in rentals if rent_of(r, cluster, rents_known).usd_per_device_hour is not None
    ]
    if not having:
        names = ", ".join(sorted({group.accelerator.name for group in cluster.groups}))
        raise DocumentError(
            "rent.each_provider",
            f"nobody is known to rent {text} ({names}); give usd_per_device_hour",
        )
    return [
        offer.model_copy(
            update={"name": f"{offer.name or offer.cluster} at {rental.provider}", "rent": rental}
        )
        for rental in having
    ]


def _candidate(study: Study, offer: Offer, text: str, rents_known: Sequence[Rent]) -> Candidate:
    cluster = resolve_cluster(text)
    if offer.host_memory_bytes is not None:
        size = {"host_memory_bytes": offer.host_memory_bytes, "host_memory_range_bytes": None}
        groups = tuple(group.model_copy(update=size) for group in cluster.groups)
        cluster = cluster.model_copy(update={"groups": groups})
    narrower = None
    for change, factor in offer.change.items():
        other = changed_cluster(cluster, change, factor)
        if other is None:
            raise DocumentError("change", f"{text} has no {change} to change by {factor:g}")
        narrower = cluster if change == "domain" and factor > 1 else narrower
        cluster = other
    return Candidate(
        name=_name(offer, text),
        cluster=cluster,
        priced=_device_price(study, offer, cluster, rents_known),
        spot=offer.rent is not None and offer.rent.commitment == "spot",
        tuning=offer.tuning or study.work.tuning,
        assumed=study.assumptions.but(offer.assumptions),
        power_limit=offer.power_limit,
        narrower=narrower if list(offer.change)[-1:] == ["domain"] else None,
        fix=offer.fix,
        allow=offer.allow,
        changes=tuple(offer.change.items()),
        plain=text,
        provider=(offer.rent.provider or "") if offer.rent is not None else "",
        wait_days=offer.wait_months * DAYS_PER_MONTH,
        quoted=_has_price(offer),
    )


def _has_price(offer: Offer) -> bool:
    rented = offer.rent is not None and offer.rent.usd_per_device_hour is not None
    bought = offer.buy is not None and (offer.buy.usd_per_device or offer.buy.lease)
    return rented or bool(bought)


def _name(offer: Offer, text: str) -> str:
    """Return an offer's name; one of several clusters is identified by its text."""
    if offer.name is None:
        return text
    if not offer.n:
        return offer.name
    named = offer.name if "{n}" in offer.name else f"{offer.name} {{n}}"
    if "{n}" in offer.cluster and offer.cluster in offer.name:
        return named.replace(offer.cluster, text)
    return named.replace("{n}", text)


def _device_price(
    study: Study, offer: Offer, cluster: ClusterSpec, rents_known: Sequence[Rent]
) -> DevicePrice:
    assumed = study.assumptions.but(offer.assumptions)
    priced = _price_of(assumed, offer, cluster, rents_known)
    if priced.hourly is None or not (priced.purchase or priced.parts):
        return priced
    settled = _price_of(assumed, offer, cluster, rents_known, settled=True)
    return replace(priced, settled=settled.hourly)


def _price_of(
    assumed: Assumptions,
    offer: Offer,
    cluster: ClusterSpec,
    rents_known: Sequence[Rent],
    *,
    settled: bool = False,
) -> DevicePrice:
    """Return an offer's price; `settled` with quotes that are exact, as signed ones are."""
    if isinstance(offer.owned, tuple) or (offer.buy is not None and offer.buy.of):
        return _in_parts(assumed, offer, cluster, rents_known, settled)
    if offer.owned:
        return DevicePrice(
            hourly=kept_hourly(assumed, cluster, offer.power_limit),
            owned=True,
            how="owned: hosting, staff, support and power are paid, the hardware is not",
        )
    waits = offer.wait_months / MONTHS_PER_YEAR
    if offer.buy is not None:
        return _bought(assumed, offer.buy, cluster, offer.power_limit, settled, waits)
    if offer.rent is None and cluster.price is not None:
        price = cluster.price
        quote = _quoted_price(price.usd_per_device_hour, None, None, "USD", price.date, assumed)
        return DevicePrice(
            quote=quote,
            hourly=_used_alone(quote),
            how=f"{commitment_words(price.commitment)}, {price.date}, {price.source}",
        )
    return _rented_price(assumed, offer.rent or Rental(), cluster, rents_known, settled, waits)


def later_price(price: UncertainValue, years: float, change_a_year: float) -> UncertainValue:
    """Return what a price should be in some years, with the range that prices move in them."""
    return aged(price.times((1 + change_a_year) ** years), years) if years else price


def moves_weight(asked: UncertainValue, later: UncertainValue) -> float:
    """Return how much of a later price's deviation is not that of the price that was asked.

    >>> price = UncertainValue(value=2.0, low=1.0, high=4.0)
    >>> moves_weight(price, price.times(0.9)), moves_weight(exact(2.0), price)
    (0.0, 1.0)
    """
    now, then = (sum(price.spreads()) for price in (asked, later))
    return math.sqrt(1 - (now / then) ** 2) if then > now else 0.0


def _used_alone(price: UncertainValue) -> Hourly:
    return Hourly(fixed=exact(0.0), used=price)


def _in_usd(amount: float, currency: str, assumed: Assumptions) -> float:
    if currency == "USD":
        return amount
    if currency not in assumed.currencies:
        raise DocumentError(
            "currency", f"is {currency:.20}; give assumptions.currencies its rate, date and source"
        )
    return amount * assumed.currencies[currency].usd


def _quoted_price(
    value: float,
    low: float | None,
    high: float | None,
    currency: str,
    date: str | None,
    assumed: Assumptions,
) -> UncertainValue:
    """Return a given price in US dollars, with the range that it states or that its age gives it.

    What states neither a range nor a month is exact.
    """
    price = UncertainValue(
        value=_in_usd(value, currency, assumed),
        low=_in_usd(low or value, currency, assumed),
        high=_in_usd(high or value, currency, assumed),
    )
    if low is not None or high is not None or not price_dates(date or ""):
        return price
    return aged(price, age_years(date or ""))


def _in_parts(
    assumed: Assumptions,
    offer: Offer,
    cluster: ClusterSpec,
    rents_known: Sequence[Rent],
    settled: bool,
) -> DevicePrice:
    """Return the mean price of a device of which some are owned or bought, and others rented."""
    roles = _roles(offer, cluster)
    parts = {
        role: cluster.model_copy(
            update={
                "groups": tuple(g for g, r in zip(cluster.groups, roles, strict=True) if r == role)
            }
        )
        for role in dict.fromkeys(roles)
    }
    share = {role: part.devices / cluster.devices for role, part in parts.items()}
    hourly: list[Hourly] = []
    priced: dict[Share, DevicePrice] = {}
    if "owned" in parts:
        kept = kept_hourly(assumed, parts["owned"], offer.power_limit)
        hourly.append(kept.times(share["owned"]))
    if "rented" in parts:
        priced["rented"] = _rented_price(
            assumed, offer.rent or Rental(), parts["rented"], rents_known, settled
        )
    if "bought" in parts:
        assert offer.buy is not None  # it names what is bought
        priced["bought"] = _bought(assumed, offer.buy, parts["bought"], offer.power_limit, settled)
    missing = next((part for part in priced.values() if part.hourly is None), None)
    if missing is not None:
        return missing
    if "rented" in priced:
        rent = priced["rented"].hourly
        assert rent is not None  # it has a price
        hourly.append(rent.times(share["rented"]))
    beside = sum_hourly(hourly)
    bought = priced["bought"].purchase if "bought" in priced else None
    purchase = None if bought is None else bought.times(share["bought"])
    words = {role: f"{parts[role].devices} of {cluster.devices} devices: " for role in priced}
    owned = "; the others are owned: hosting, staff, support and power are paid"
    after = owned if "owned" in parts else ""
    lead: Share = "bought" if "bought" in priced else "rented"
    if lead == "bought" and "rented" in priced:
        after = f"; {words['rented']}{priced['rented'].how}{after}"
    return DevicePrice(
        quote=priced[lead].quote,
        network=priced[lead].network,
        cause=priced["rented"].cause if lead == "rented" else "",
        parts=roles,
        part_quotes={role: part.quote for role, part in priced.items() if part.quote is not None},
        purchase=purchase,
        beside=None if purchase is None else beside,
        hourly=beside if purchase is None else sum_hourly([purchase.hourly, beside]),
        how=f"{words[lead]}{priced[lead].how}{after}",
        words_beside=(words[lead], after),
    )


def _roles(offer: Offer, cluster: ClusterSpec) -> tuple[Share, ...]:
    """Return on which terms each group of a cluster is had."""
    owned = offer.owned if isinstance(offer.owned, tuple) else ()
    bought = offer.buy.of if offer.buy is not None else ()
    there = [group.accelerator.name for group in cluster.groups]
    for path, names in (("owned", owned), ("buy.of", bought)):
        missing = sorted(set(names) - set(there))
        if missing:
            raise DocumentError(
                path, f"names {', '.join(missing)}; the cluster has {', '.join(there)}"
            )
    if set(owned) & set(bought):
        raise DocumentError("buy.of", "names what is owned already; leave it out of `buy`")
    roles: list[Share] = []
    for name in there:
        roles.append("owned" if name in owned else "bought" if name in bought else "rented")
    if len(set(roles)) == 1:
        raise DocumentError(
            "buy.of" if bought else "owned", "names all of the cluster; leave it out"
        )
    if bought and "rented" in roles and offer.rent is None:
        raise DocumentError(
            "rent",
            "is missing, of what is neither bought nor owned; "
            "add `rent`, or name it under `buy` or `own`",
        )
    return tuple(roles)


def _rented_price(
    assumed: Assumptions,
    rental: Rental,
    cluster: ClusterSpec,
    rents_known: Sequence[Rent],
    settled: bool,
    waits: float = 0.0,
) -> DevicePrice:
    """Return a given rent, or that of the catalogue's offers that can make the cluster."""
    term, prepaid, cause = rental.term_months, rental.prepaid or 0.0, ""
    markets: tuple[Market, ...] = ()
    elsewhere: float | None = None
    if rental.usd_per_device_hour is not None:
        price = _quoted_price(
            rental.usd_per_device_hour,
            rental.low,
            rental.high,
            rental.currency,
            rental.date,
            assumed,
        )
        _check_spot(price.value, rental, cluster, rents_known)
        how = f"{commitment_words(rental.commitment)}, {rental.date}, {rental.source}"
        if rental.currency != "USD":
            rate = assumed.currencies[rental.currency]
            how += f", {rental.currency} at {rate.usd:g} USD of {rate.date}"
        cause = quote_cause(how, price)
    else:
        rent = rent_of(rental, cluster, rents_known)
        if rent.usd_per_device_hour is None:
            return DevicePrice(how=rent.how)
        price, how, cause = rent.usd_per_device_hour, rent.how, rent.cause
        markets, elsewhere = rent.markets, rent.elsewhere
        term = term or rent.term_months
        prepaid = rent.prepaid if rental.prepaid is None else prepaid
    asked, price = price, later_price(price, waits, assumed.rent_change_a_year)
    moves = moves_weight(asked, price)
    price = exact(price.value) if settled else price
    if rental.commitment != "reserved":
        hourly = _used_alone(price)
        return DevicePrice(
            quote=price,
            hourly=hourly,
            minimum_hours=rental.minimum_hours,
            how=how,
            cause=cause,
            moves_weight=moves,
            markets=markets,
            elsewhere_usd=elsewhere,
        )
    assert term is not None  # of every reservation
    years = term / MONTHS_PER_YEAR
    level = price.times(prepaid_factor(prepaid, years, assumed.interest))
    reservation = Reservation(years=years, prepaid=prepaid, usd_per_device_hour=price)
    return DevicePrice(
        quote=price,
        hourly=Hourly(fixed=level, used=exact(0.0)),
        reservation=reservation,
        how=f"{how}, {term_words(reservation)}",
        cause=cause,
        moves_weight=moves,
        markets=markets,
    )


def quote_cause(how: str, price: UncertainValue) -> str:
    """Return what moves a quoted price: another figure of the same source is another quote.

    >>> quote_cause("bought, 2026-11, a quote", exact(25_000.0))
    'bought, 2026-11, a quote at 25000.000000'
    """
    return f"{how} at {price.value:.6f}"


def commitment_words(commitment: str) -> str:
    """Return how something is rented, as people write it.

    >>> commitment_words("on_demand")
    'on demand'
    """
    return commitment.replace("_", " ")


def term_words(reservation: Reservation) -> str:
    """Return a contract's term and what of it is paid at once.

    >>> term_words(Reservation(years=1.0, prepaid=0.5, usd_per_device_hour=exact(2.0)))
    '12 months, 50 % paid at once'
    """
    prepaid = 100 * reservation.prepaid
    months = f"{reservation.years * MONTHS_PER_YEAR:g} months"
    return f"{months}, {prepaid:.0f} % paid at once" if prepaid else months


def _check_spot(
    price: float, rental: Rental, cluster: ClusterSpec, rents_known: Sequence[Rent]
) -> None:
    """Refuse a spot price above every on-demand price that is known: a column has slipped."""
    if rental.commitment != "spot":
        return
    names = {group.accelerator.name for group in cluster.groups}
    of_names = [price_of(offer, "on_demand") for offer in rents_known if offer.accelerator in names]
    prices = [price for price in of_names if price is not None]
    if prices and price > max(prices):
        raise DocumentError(
            "rent.usd_per_device_hour",
            f"is {price:g} on spot, above every on-demand price known, {max(prices):g} at most; "
            "give a lower one, or leave spot out",
        )


def _bought(
    assumed: Assumptions,
    buying: Buying,
    cluster: ClusterSpec,
    power_limit: float,
    settled: bool,
    waits: float = 0.0,
) -> DevicePrice:
    if len({group.accelerator.name for group in cluster.groups}) > 1:
        raise DocumentError(
            "buy", "one price cannot be that of accelerators that differ; leave usd_per_device out"
        )
    if buying.lease is not None:
        return _leased_price(assumed, buying.lease, cluster, power_limit, settled)
    name = cluster.groups[0].accelerator.name
    if buying.usd_per_device is not None:
        price = _quoted_price(
            buying.usd_per_device, buying.low, buying.high, buying.currency, buying.date, assumed
        )
        how = f"bought, {buying.date}, {buying.source}"
    else:
        listed = purchases().get(name)
        if listed is None:
            return DevicePrice(how=f"no price known, purchase of {name}")
        price = listed_price(listed)
        node = "with its node" if listed.with_node else "without its node"
        how = f"bought {node}, {listed.date}, {listed.source}"
    asked, price = price, later_price(price, waits, 0.0)
    moves = moves_weight(asked, price)
    price = exact(price.value) if settled else price
    network = span_of(network_purchase())
    if buying.network_usd_per_device is not None:
        network = exact(buying.network_usd_per_device)
    purchase = purchase_of(assumed, price, network, cluster, power_limit)
    cause = quote_cause(how, price)
    if buying.loan is not None:
        purchase = replace(purchase, instalments=instalments_of(buying.loan, assumed.years))
        how = f"{how}, {loan_words(buying.loan)}"
    return DevicePrice(
        quote=price,
        network=network,
        hourly=purchase.hourly,
        purchase=purchase,
        how=how,
        cause=cause,
        moves_weight=moves,
    )


def instalments_of(loan: Loan, years: float) -> Instalments:
    """Return what is paid for hardware under a loan, and that is sold after `years`."""
    return loan_instalments(
        share=loan.share, interest=loan.interest, months=loan.months, years=years
    )


def loan_words(loan: Loan) -> str:
    """Return a loan's terms.

    >>> loan_words(Loan(interest=0.09, months=36, share=0.8))
    'loan of 80 % at 9 % over 36 months'
    """
    return (
        f"loan of {100 * loan.share:.0f} % at {100 * loan.interest:g} % over {loan.months} months"
    )


def _leased_price(
    assumed: Assumptions, lease: Lease, cluster: ClusterSpec, power_limit: float, settled: bool
) -> DevicePrice:
    """Return what leased devices cost: the lease for its hardware, all else as if bought."""
    price = _quoted_price(
        lease.usd_per_device_month, lease.low, lease.high, lease.currency, lease.date, assumed
    )
    price = exact(price.value) if settled else price
    purchase = lease_of(assumed, price, lease.term_months, cluster, power_limit)
    how = f"leased for {lease.term_months} months, {lease.date}, {lease.source}"
    return DevicePrice(
        quote=price,
        hourly=purchase.hourly,
        purchase=purchase,
        how=how,
        cause=quote_cause(how, price),
    )


def lease_of(
    assumed: Assumptions,
    usd_per_month: UncertainValue,
    term_months: int,
    cluster: ClusterSpec,
    power_limit: float = 1.0,
) -> Purchase:
    """Return a device's lease as a purchase that is paid each month and leaves nothing to sell.

    Its payments lower the income that is taxed, so that before tax they count as they are.
    """
    name, years = cluster.groups[0].accelerator.name, assumed.years
    purchase = purchases().get(name)
    listed = exact(0.0) if purchase is None else listed_price(purchase)
    months = lease_months(term_months=term_months, years=years)
    tax = 1 + assumed.owning.sales_tax
    return replace(
        purchase_of(assumed, listed, span_of(network_purchase()), cluster, power_limit),
        hardware_usd=usd_per_month.times(months * tax),
        residual=exact(0.0),
        tax=Tax(),
        instalments=lease_instalments(term_months=term_months, years=years),
        bound_share=term_months / months,
        leased=True,
    )


def listed_price(price: PurchasePrice) -> UncertainValue:
    """Return the catalogue's price of a device with its range, which its age widens."""
    low, high = price.ends
    return aged(
        UncertainValue(value=price.usd_per_device, low=low, high=high), age_years(price.date)
    )


def kept_hourly(assumed: Assumptions, cluster: ClusterSpec, power_limit: float) -> Hourly:
    """Return what an owned device costs: the same as a bought one, but for the hardware.

    Support and insurance are shares of the hardware's price, and 0 where no price is known.
    """
    parts = []
    for group in cluster.groups:
        price = purchases().get(group.accelerator.name)
        purchase = purchase_of(
            assumed,
            exact(0.0) if price is None else listed_price(price),
            span_of(network_purchase()),
            cluster.model_copy(update={"groups": (group,)}),
            power_limit,
        )
        hourly = replace(purchase, hardware_usd=exact(0.0)).hourly
        parts.append((group.devices / cluster.devices, hourly))
    return Hourly(
        fixed=total([hourly.fixed.times(share) for share, hourly in parts]),
        used=total([hourly.used.times(share) for share, hourly in parts]),
    )


def purchase_of(
    assumed: Assumptions,
    price: UncertainValue,
    network: UncertainValue,
    cluster: ClusterSpec,
    power_limit: float = 1.0,
) -> Purchase:
    """Return a device's purchase with all that owning it costs."""
    owning = assumed.owning
    bare = total([price, network, span_of(owning.storage_usd_per_device)])
    spares = span_of(owning.spares)
    with_spares = UncertainValue(value=1 + spares.value, low=1 + spares.low, high=1 + spares.high)
    hardware = product([bare, with_spares]).times(1 + owning.sales_tax)
    running = power_usd_per_device_hour(cluster, assumed, power_limit) or exact(0.0)
    return Purchase(
        hardware_usd=hardware,
        yearly_usd=total(
            [
                product([bare, span_of(owning.support_a_year)]),
                product([bare, span_of(owning.insurance_a_year)]),
                span_of(owning.staff_usd_per_device_year),
                product(
                    [_it_kw_per_device(cluster, assumed, power_limit), _hosting_usd_per_kw(owning)]
                ),
            ]
        ),
        horizon=Horizon(years=assumed.years, interest=assumed.interest),
        residual=_residual(assumed),
        idle_power=span_of(owning.idle_power),
        running_usd_per_hour=running,
        tax=Tax(rate=owning.income_tax, depreciation_years=owning.depreciation_years),
    )


def _it_kw_per_device(
    cluster: ClusterSpec, assumed: Assumptions, power_limit: float
) -> UncertainValue:
    """Return the kilowatts that a device's share of hosts and network needs in a rack."""
    watts = watts_of(cluster, assumed, power_limit)
    if watts is None:
        return exact(0.0)
    effectiveness = assumed.facility.power_usage_effectiveness
    return watts.times(1e-3 / cluster.devices / effectiveness.value)


def _hosting_usd_per_kw(owning: Owning) -> UncertainValue:
    """Return dollars a year for the space and cooling of a kilowatt."""
    return span_of(owning.hosting_usd_per_kw_month).times(MONTHS_PER_YEAR)


def _residual(assumed: Assumptions) -> UncertainValue:
    owning, age = assumed.owning, assumed.years
    if owning.residual_by_age:
        return exact(residual_share(age, retained_a_year=1.0, by_age=owning.residual_by_age))
    kept = owning.retained_a_year
    return UncertainValue(
        value=residual_share(age, retained_a_year=kept.value),
        low=residual_share(age, retained_a_year=kept.low),
        high=residual_share(age, retained_a_year=kept.high),
    )
