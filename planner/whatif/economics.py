"""What a run costs: hours, rent, purchase, energy, carbon.  Arithmetic alone.

Symbols: n devices, T hours, g goodput (share of the hours that trains), P the thermal design power
of a device, k node power over the devices' design power, w network watts per device, PUE the power
usage effectiveness, c price of a kWh.

    hours    = tokens / (tokens per second) / 3600 / g
    rent     = n T price
    power    = n (k P + w) PUE
    energy   = power T
    carbon   = energy x grams per kWh
    purchase = n (device + network), residual value r of it left after Y years
    annuity  = (purchase - r purchase / (1 + i)^Y) i / (1 - (1 + i)^-Y)       a year, interest i
    owned    = n T (annuity / n / (8,760 u) + energy's price an hour)         u share of hours used
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.whatif.span import Span, exact, product, total

HOURS_PER_YEAR = 8760.0
SECONDS_PER_HOUR = 3600.0


def hours(tokens: float, tokens_per_s: Span, goodput: Span) -> Span:
    """Hours on the wall clock to train so many tokens.

    >>> hours(3.6e9, exact(1e6), exact(0.5)).value
    2.0
    """
    return product([exact(tokens / SECONDS_PER_HOUR), tokens_per_s.inverse, goodput.inverse])


def rent_usd(devices: int, run_hours: Span, usd_per_device_hour: Span) -> Span:
    """Rent of all devices for a run.

    >>> rent_usd(8, exact(10.0), exact(2.5)).value
    200.0
    """
    return product([exact(float(devices)), run_hours, usd_per_device_hour])


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a device draws beside the figure on its sheet."""

    node_over_tdp: Span
    network_w_per_device: Span
    usage_effectiveness: Span

    def watts(self, devices: int, tdp_w: float) -> Span:
        """Watts of the whole job at the building's meter.

        >>> one = Power(node_over_tdp=exact(1.2), network_w_per_device=exact(60.0),
        ...     usage_effectiveness=exact(1.5))
        >>> one.watts(10, 700.0).value
        13500.0
        """
        each = total([self.node_over_tdp.times(tdp_w), self.network_w_per_device])
        return product([exact(float(devices)), each, self.usage_effectiveness])


def energy_kwh(watts: Span, run_hours: Span) -> Span:
    """Energy of a run at the meter."""
    return product([watts, run_hours]).times(1e-3)


def carbon_kg(energy: Span, g_per_kwh: float) -> Span:
    """Carbon dioxide of so many kWh."""
    return energy.times(g_per_kwh * 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Devices that are bought: with their share of nodes and network, and what is left of them."""

    usd_per_device: Span
    """Node included."""
    network_usd_per_device: Span
    years: float
    residual: Span
    """Share of the purchase that it sells for after these years."""
    interest: float
    """A year; 0.08 is 8 %."""

    @property
    def capital_usd_per_device(self) -> Span:
        """What is paid on the first day."""
        return total([self.usd_per_device, self.network_usd_per_device])

    @property
    def usd_per_device_year(self) -> Span:
        """The annuity of the capital less what the resale brings, discounted.

        >>> Purchase(usd_per_device=exact(1000.0), network_usd_per_device=exact(0.0), years=4.0,
        ...     residual=exact(0.2), interest=0.0).usd_per_device_year.value
        200.0
        """
        rate, years = self.interest, self.years
        repaid = -math.expm1(-years * math.log1p(rate))  # above 0 for the smallest rates too
        discount = 1 - repaid
        share = rate / repaid if rate else 1 / years
        lost = Span(
            value=1 - self.residual.value * discount,
            low=1 - self.residual.high * discount,
            high=1 - self.residual.low * discount,
        )
        return product([self.capital_usd_per_device, lost, exact(share)])


def owned_usd_per_device_hour(
    purchase: Purchase, *, utilisation: float, power_usd_per_device_hour: Span
) -> Span:
    """What a useful hour of a bought device costs: its annuity over the hours used, and power.

    Power is counted for the hours used alone; an idle device is taken to be off.
    """
    capital = purchase.usd_per_device_year.times(1 / (HOURS_PER_YEAR * utilisation))
    return total([capital, power_usd_per_device_hour])


def break_even_utilisation(
    purchase: Purchase, *, rent_usd_per_device_hour: float, power_usd_per_device_hour: float
) -> float | None:
    """Share of all hours above which buying is cheaper than renting; None if it never is.

    >>> bought = Purchase(usd_per_device=exact(8760.0), network_usd_per_device=exact(0.0),
    ...     years=1.0, residual=exact(0.0), interest=0.0)
    >>> break_even_utilisation(bought, rent_usd_per_device_hour=2.5,
    ...     power_usd_per_device_hour=0.5)
    0.5
    """
    saved = rent_usd_per_device_hour - power_usd_per_device_hour
    if saved <= 0:
        return None
    share = purchase.usd_per_device_year.value / HOURS_PER_YEAR / saved
    return share if share <= 1 else None
