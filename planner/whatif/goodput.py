"""Goodput: the share of the wall clock that trains, by how many devices a run has.

A run stops when one of its devices fails.  Symbols: n devices, λ failures of a device an hour,
M = 1 / (n λ) hours between failures, δ seconds that a checkpoint stops training (a stall of any
size, and the copy to the host), w >= δ seconds until it is written, R seconds to restart, τ seconds
between checkpoints, q the share lost at any size.

    τ = max(w, sqrt(2 δ M))                         the least is lost; one is written at a time
    lost = δ / τ + (τ / 2 + (w - δ) + R) / M        over the time that trains
    goodput = (1 - q) / (1 + lost)

A checkpoint counts once it is written, so training of w - δ seconds more is done again.

The interval is that of `planner.whatif.survival`.  Failures of a spot instance add its
interruptions to its devices' own.
"""

from __future__ import annotations

import math

from planner.whatif.economics import SECONDS_PER_HOUR
from planner.whatif.span import Span
from planner.whatif.study import Failures
from planner.whatif.survival import RunSeconds, SaveFigures, every_s


def written_s(failures: Failures, *, parameters: float, devices: int, at: str = "value") -> float:
    """Seconds until a checkpoint is written."""
    store: float = devices * getattr(failures.store_bytes_per_s_per_device, _OPPOSITE[at])
    written: float = parameters * getattr(failures.checkpoint_bytes_per_parameter, at)
    stall: float = getattr(failures.checkpoint_stall_s, at)
    return stall + written / store


def blocked_s(failures: Failures, *, parameters: float, devices: int, at: str = "value") -> float:
    """Seconds that training waits for a checkpoint: a stall, and until it is on the host."""
    copied: float = parameters * getattr(failures.checkpoint_bytes_per_parameter, at)
    link: float = devices * getattr(failures.copy_bytes_per_s_per_device, _OPPOSITE[at])
    written = written_s(failures, parameters=parameters, devices=devices, at=at)
    stall: float = getattr(failures.checkpoint_stall_s, at)
    return min(stall + copied / link, written)


def failures_per_device_hour(failures: Failures, *, observed: int, device_hours: float) -> float:
    """Return the rate that is expected after some failures in some device-hours.

    The rate λ is Gamma distributed, of mean m and shape k.  With f failures in h device-hours,

        λ = (k + f) / (k / m + h)

    k is that of a logarithmic normal whose range from low to high is four standard deviations σ:
    1 / k = exp(σ²) - 1.

    >>> believed = failures_per_device_hour(Failures(), observed=0, device_hours=0.0)
    >>> believed == Failures().per_device_hour.value
    True
    >>> f"{failures_per_device_hour(Failures(), observed=40, device_hours=50_000.0):.1e}"
    '2.4e-04'
    """
    usual = failures.per_device_hour
    deviation = math.log(usual.high / usual.low) / 4
    shape = 1 / math.expm1(deviation**2) if deviation else math.inf
    if math.isinf(shape):
        return usual.value
    return (shape + observed) / (shape / usual.value + device_hours)


def save_figures(
    failures: Failures, known: RunSeconds, *, parameters: float, devices: int
) -> SaveFigures:
    """Return what decides how often a run is saved, before it has measured a save."""
    rate = failures_per_device_hour(
        failures, observed=known.failures, device_hours=known.device_hours
    )
    return SaveFigures(
        failures_per_hour=devices * rate,
        blocked_s=blocked_s(failures, parameters=parameters, devices=devices),
        written_s=written_s(failures, parameters=parameters, devices=devices),
    )


_OPPOSITE = {"value": "value", "low": "high", "high": "low"}
"""Which end of a figure's range goes with another's, where more of it is better."""


def goodput_share(
    *, failures_per_hour: float, blocked_s: float, written_s: float, restart_s: float, other: float
) -> float:
    """Share of the wall clock that trains, between checkpoints at the best interval.

    >>> share = goodput_share(
    ...     failures_per_hour=0.36, blocked_s=50.0, written_s=50.0, restart_s=500.0, other=0.0
    ... )
    >>> round(share, 4)
    0.8696
    """
    if failures_per_hour == 0:
        return 1 - other
    between_s = SECONDS_PER_HOUR / failures_per_hour
    interval = every_s(blocked_s=blocked_s, written_s=written_s, between_failures_s=between_s)
    waiting = blocked_s / interval if interval else 0.0
    again_s = interval / 2 + written_s - blocked_s
    return (1 - other) / (1 + waiting + (again_s + restart_s) / between_s)


def goodput_of(
    failures: Failures, *, parameters: float, devices: int, nodes: int, spot: bool
) -> Span:
    """Return the goodput of a run with its range: all figures good at once, and all bad."""

    def share(at: str) -> float:
        rate = devices * getattr(failures.per_device_hour, at)
        if spot:
            rate += nodes * getattr(failures.spot_per_node_hour, at)
        return goodput_share(
            failures_per_hour=rate,
            blocked_s=blocked_s(failures, parameters=parameters, devices=devices, at=at),
            written_s=written_s(failures, parameters=parameters, devices=devices, at=at),
            restart_s=getattr(failures.restart_s, at),
            other=getattr(failures.other, at),
        )

    return Span(value=share("value"), low=share("high"), high=share("low"))
