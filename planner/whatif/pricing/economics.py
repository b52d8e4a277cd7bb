"""Costs of devices and runs: hours, rents, purchases, energy, carbon.  Arithmetic alone.

Symbols: n devices, T hours, g goodput (share of the hours that trains), P the thermal design power
of a device, k node power over the devices' design power, w network watts per device, PUE the power
usage effectiveness, c price of a kWh, u share of hours used, i interest a year, Y years.

    hours    = tokens / (tokens per second) / 3600 / g
    power    = n (k P + w) PUE
    energy   = power T
    carbon   = energy x grams per kWh
    an hour  = fixed / u + used            USD of a device: of every hour, and of an hour used

Rent on demand is all `used`, a reservation all `fixed`.  A purchase is levelised: its payments,
each at its present value, over the hours of its years at theirs.  What is paid through a year
counts at the year's middle: d(s) = (1 + i)^-s, H = sum over years of 8,760 d(middle).

    fixed = capital lost / H + yearly / 8,760 + idle power's price
    lost  = (p - t (D + I) - (r - t (r - b)) d(Y)) / (1 - t)
    D     = sum over years of d(middle) / depreciation years
    p, I  = sums of d(when) over instalments, and over the interest in them; at once p = 1, I = 0

r is the resale and b what is not written off yet, as shares of the capital; t is the income tax.
All figures are before tax, as rents are quoted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.planner.documents.tolerances import NOTHING, ROUNDING
from meshwright.planner.whatif.pricing.financing import AT_ONCE, Instalments
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact, product, total

HOURS_PER_YEAR = 8760.0
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86_400.0


def hours(tokens: float, tokens_per_s: UncertainValue, goodput: UncertainValue) -> UncertainValue:
    """Hours on the wall clock to train a number of tokens.

    >>> hours(3.6e9, exact(1e6), exact(0.5)).value
    2.0
    """
    return product([exact(tokens / SECONDS_PER_HOUR), tokens_per_s.inverse, goodput.inverse])


def rent_usd(
    devices: int, run_hours: UncertainValue, usd_per_device_hour: UncertainValue
) -> UncertainValue:
    """Rent of all devices for a run.

    >>> rent_usd(8, exact(10.0), exact(2.5)).value
    200.0
    """
    return product([exact(float(devices)), run_hours, usd_per_device_hour])


def whole_usd(
    devices: int, hourly: Hourly, fixed_hours: UncertainValue, run_hours: UncertainValue
) -> UncertainValue:
    """Price of all devices where what is fixed is paid for its own hours, and no other.

    >>> hourly = Hourly(fixed=exact(2.0), used=exact(0.5))
    >>> whole_usd(8, hourly, exact(100.0), UncertainValue(value=40.0, low=30.0, high=60.0))
    UncertainValue(value=1760.0, low=1720.0, high=1840.0)
    """
    fixed = product([hourly.fixed, fixed_hours])
    return total([fixed, product([hourly.used, run_hours])]).times(devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power that a device draws beside the figure on its sheet."""

    node_over_tdp: UncertainValue
    network_w_per_device: UncertainValue
    usage_effectiveness: UncertainValue

    def watts(self, devices: int, tdp_w: float) -> UncertainValue:
        """Watts of the whole job at the building's meter.

        >>> one = Power(node_over_tdp=exact(1.2), network_w_per_device=exact(60.0),
        ...     usage_effectiveness=exact(1.5))
        >>> one.watts(10, 700.0).value
        13500.0
        """
        each = total([self.node_over_tdp.times(tdp_w), self.network_w_per_device])
        return product([exact(float(devices)), each, self.usage_effectiveness])


def at_least(figure: UncertainValue, least: float) -> UncertainValue:
    """Return a figure of which a least amount is paid.

    >>> at_least(UncertainValue(value=5.0, low=1.0, high=9.0), 4.0)
    UncertainValue(value=5.0, low=4.0, high=9.0)
    """
    return UncertainValue(
        value=max(figure.value, least), low=max(figure.low, least), high=max(figure.high, least)
    )


def terms_begun(run_hours: UncertainValue, term_hours: float) -> UncertainValue:
    """Return how many terms of a contract a run begins: each is paid whole.

    >>> terms_begun(UncertainValue(value=730.0, low=400.0, high=1600.0), 730.0)
    UncertainValue(value=1.0, low=1.0, high=3.0)
    """

    def begun_hours(hours: float) -> float:
        return float(max(1, math.ceil(hours / term_hours * (1 - ROUNDING))))

    low, high = begun_hours(run_hours.low), begun_hours(run_hours.high)
    return UncertainValue(value=begun_hours(run_hours.value), low=low, high=high)


def energy_kwh(watts: UncertainValue, run_hours: UncertainValue) -> UncertainValue:
    """Energy of a run at the meter."""
    return product([watts, run_hours]).times(1e-3)


def carbon_kg(energy: UncertainValue, g_per_kwh: float) -> UncertainValue:
    """Carbon dioxide of a number of kWh."""
    return energy.times(g_per_kwh * 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hourly:
    """US dollars of a device and hour: of every hour, used or not, and of an hour that is used."""

    fixed: UncertainValue
    used: UncertainValue

    def useful_hour_usd(self, utilisation: float) -> UncertainValue:
        """Return the price of a useful hour, where so large a share of hours is used.

        >>> reserved = Hourly(fixed=exact(2.0), used=exact(0.0))
        >>> f"{reserved.useful_hour_usd(0.6).value:.2f}"
        '3.33'
        """
        return total([self.fixed.times(1 / utilisation), self.used])

    def times(self, share: float) -> Hourly:
        """Return a share of it."""
        return Hourly(fixed=self.fixed.times(share), used=self.used.times(share))

    @property
    def middle(self) -> tuple[float, float]:
        """Both figures without their ranges."""
        return self.fixed.value, self.used.value


def sum_hourly(parts: Sequence[Hourly]) -> Hourly:
    """Return what several devices, or parts of one, cost together."""
    return Hourly(
        fixed=total([part.fixed for part in parts]), used=total([part.used for part in parts])
    )


def cheaper_above(price: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Share of hours used above which one (fixed, used) price is cheaper; 0 always, None never.

    one / u + a < other / u + b where u (b - a) > one - other.

    >>> cheaper_above((1.2, 0.1), (0.0, 2.1)), cheaper_above((1.0, 0.0), (2.0, 0.0))
    (0.6, 0.0)
    """
    more_fixed, less_used = price[0] - other[0], other[1] - price[1]
    if less_used <= 0:
        return 0.0 if more_fixed < less_used else None
    share = more_fixed / less_used
    return max(0.0, share) if share < 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """Years over which payments and hours are compared, and the interest between them."""

    years: float
    interest: float

    def discount(self, years: float) -> float:
        """Return what a dollar after some years is worth now."""
        return math.exp(-years * math.log1p(self.interest))

    @property
    def parts(self) -> tuple[tuple[float, float], ...]:
        """Start and length of each year; the last may be shorter.

        >>> Horizon(years=2.5, interest=0.1).parts
        ((0.0, 1.0), (1.0, 1.0), (2.0, 0.5))
        """
        whole = math.ceil(self.years - NOTHING)
        return tuple((float(k), min(1.0, self.years - k)) for k in range(whole))

    @property
    def hours(self) -> float:
        """Hours of all years, each year's at its present value: H of the module."""
        return HOURS_PER_YEAR * sum(
            length * self.discount(start + length / 2) for start, length in self.parts
        )

    def per_hour(self, usd_now: float) -> float:
        """Return what a payment on the first day is an hour."""
        return usd_now / self.hours

    def rent(self, usd_per_hour: float, change_a_year: float, fixed_years: float = 0.0) -> float:
        """Return the one price that costs what a changing rent does; a contract fixes it a while.

        >>> f"{Horizon(years=2.0, interest=0.0).rent(2.0, -0.5, fixed_years=1.0):.2f}"
        '1.50'
        """
        paid = 0.0
        for start, length in self.parts:
            middle = start + length / 2
            when = middle
            if fixed_years:
                when = fixed_years * math.floor(start / fixed_years + NOTHING)
            price = usd_per_hour * math.exp(when * math.log1p(change_a_year))
            paid += price * HOURS_PER_YEAR * length * self.discount(middle)
        return paid / self.hours


def prepaid_factor(share: float, years: float, interest: float) -> float:
    """By how much a price an hour rises if a share of a contract is paid on its first day.

    >>> f"{prepaid_factor(1.0, 1.0, 0.21):.3f}"
    '1.100'
    """
    term = Horizon(years=years, interest=interest)
    return share * HOURS_PER_YEAR * years / term.hours + (1 - share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tax:
    """Income tax, and over how many years hardware is written off."""

    rate: float = 0.0
    depreciation_years: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Devices that are bought: all that is paid for one, and what is left of it."""

    hardware_usd: UncertainValue
    """The device with its share of nodes, network, storage and spares, sales tax included."""
    yearly_usd: UncertainValue
    """Hosting, staff, support, insurance."""
    horizon: Horizon
    residual: UncertainValue
    """Share of the hardware's price that it sells for in the end."""
    idle_power: UncertainValue
    """Share of the power in use that a device draws while it waits."""
    running_usd_per_hour: UncertainValue
    """Electricity of a device that trains."""
    tax: Tax = Tax()
    instalments: Instalments = AT_ONCE
    """When the hardware is paid."""
    bound_share: float = 1.0
    """Share of the hardware's price bound by signing: less than a lease that goes on costs."""
    leased: bool = False
    """Its hardware is somebody else's: its price is all that the lease costs."""

    def times(self, share: float) -> Purchase:
        """Return what a share of a device costs."""
        return replace(
            self,
            hardware_usd=self.hardware_usd.times(share),
            yearly_usd=self.yearly_usd.times(share),
            running_usd_per_hour=self.running_usd_per_hour.times(share),
        )

    @property
    def paid_share(self) -> float:
        """All instalments over the price of the hardware: above 1 by the interest of a loan."""
        return sum(part.share for part in self.instalments)

    @property
    def hourly(self) -> Hourly:
        """Levelised: see the module."""
        each_year = self.yearly_usd.times(1 / HOURS_PER_YEAR)
        idle, running = self.idle_power, self.running_usd_per_hour
        saved = UncertainValue(value=1 - idle.value, low=1 - idle.high, high=1 - idle.low)
        capital = product([self.hardware_usd, self._lost]).times(1 / self.horizon.hours)
        return Hourly(
            fixed=total([capital, each_year, product([running, idle])]),
            used=product([running, saved]),
        )

    @property
    def _lost(self) -> UncertainValue:
        """Share of the hardware's price that is not recovered, at present value before tax."""
        return UncertainValue(
            value=self._lost_with(self.residual.value),
            low=self._lost_with(self.residual.high),
            high=self._lost_with(self.residual.low),
        )

    def _lost_with(self, residual: float) -> float:
        years, tax = self.horizon.years, self.tax
        over = tax.depreciation_years
        written_off = sum(
            max(0.0, min(length, over - start)) * self.horizon.discount(start + length / 2) / over
            for start, length in self.horizon.parts
        )
        book = max(0.0, 1 - years / over)
        end = self.horizon.discount(years)
        after_tax = residual - tax.rate * (residual - book)
        paid = sum(part.share * self.horizon.discount(part.years) for part in self.instalments)
        interest = sum(
            part.interest * self.horizon.discount(part.years) for part in self.instalments
        )
        deducted = tax.rate * (written_off + interest)
        return max(0.0, (paid - deducted - end * after_tax) / (1 - tax.rate))

    def owning_usd_per_hour(self, utilisation: float) -> UncertainValue:
        """Return what a device costs in each hour beside its price, at a utilisation.

        Hosting, staff, support and insurance are paid in all hours, power while it waits too.
        """
        idle = self.idle_power.times(1 - utilisation)
        drawn = total([exact(utilisation), idle])
        power = product([self.running_usd_per_hour, drawn])
        return total([self.yearly_usd.times(1 / HOURS_PER_YEAR), power])

    def outlay_usd(
        self, utilisation: float, run_hours: UncertainValue | None = None
    ) -> UncertainValue:
        """Return what is paid for a device over its years, interest of a loan too; no resale.

        A run that takes longer than the years keeps it so long; a lease goes on as it began.
        """
        planned = HOURS_PER_YEAR * self.horizon.years
        kept = exact(planned) if run_hours is None else at_least(run_hours, planned)
        paid = self.hardware_usd.times(self.paid_share)
        if self.leased:
            paid = product([paid, kept.times(1 / planned)])
        return total([paid, product([self.owning_usd_per_hour(utilisation), kept])])

    def cash_usd(self, utilisation: float) -> tuple[float, ...]:
        """Return what is paid for a device: on the first day, then in each year, before tax.

        The last year has the resale.
        """
        drawn = utilisation + (1 - utilisation) * self.idle_power.value
        power = HOURS_PER_YEAR * drawn * self.running_usd_per_hour.value
        years = [length * (self.yearly_usd.value + power) for _, length in self.horizon.parts]
        years[-1] -= self.residual.value * self.hardware_usd.value
        cash = [0.0, *years]
        for part in self.instalments:
            cash[math.ceil(part.years - NOTHING)] += part.share * self.hardware_usd.value
        return tuple(cash)


def rent_cash_usd(
    usd_per_hour: float,
    horizon: Horizon,
    *,
    utilisation: float,
    change_a_year: float,
    term_years: float | None = None,
    prepaid: float = 0.0,
) -> tuple[float, ...]:
    """Return what a device's rent is on the first day and in each year; contracts are renewed.

    >>> rent_cash_usd(1.0, Horizon(years=2.0, interest=0.1), utilisation=0.5, change_a_year=0.0)
    (0.0, 4380.0, 4380.0)
    """

    def price_at(years: float) -> float:
        return usd_per_hour * math.exp(years * math.log1p(change_a_year))

    paid = [0.0]
    for start, length in horizon.parts:
        when, share = start + length / 2, utilisation
        if term_years:
            when, share = term_years * math.floor(start / term_years + NOTHING), 1 - prepaid
        paid.append(price_at(when) * HOURS_PER_YEAR * length * share)
    begins = 0.0
    while term_years and prepaid and begins < horizon.years - NOTHING:
        hours = HOURS_PER_YEAR * min(term_years, horizon.years - begins)
        paid[math.ceil(begins)] += prepaid * price_at(begins) * hours
        begins += term_years
    return tuple(paid)


def power_usd_per_hour(watts: UncertainValue, usd_per_kwh: UncertainValue) -> UncertainValue:
    """Price of an hour of a number of watts.

    >>> power_usd_per_hour(exact(1000.0), exact(0.1)).value
    0.1
    """
    return product([watts.times(1e-3), usd_per_kwh])


def residual_share(age: float, *, retained_a_year: float, by_age: Sequence[float] = ()) -> float:
    """Share of its price that hardware sells for at an age in years.

    Between the ages of a curve values fall by the same factor each day, from the whole price at 0;
    beyond its last age nothing is known, and they go on falling as in its last year.

    >>> f"{residual_share(3.0, retained_a_year=0.67):.3f}"
    '0.301'
    >>> residual_share(2.0, retained_a_year=0.67, by_age=(0.6, 0.4, 0.3))
    0.4
    """
    if not by_age:
        return float(retained_a_year**age)
    points = [1.0, *by_age]
    year = min(int(age), len(points) - 2)
    before, after = points[year], points[year + 1]
    if before == 0 or after == 0:
        return max(0.0, before + (after - before) * (age - year))
    return min(1.0, before * float((after / before) ** (age - year)))
