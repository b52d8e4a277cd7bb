"""Goodput: the share of the wall clock that trains, by how many devices a run has.

A run stops when one of its devices fails.  Symbols: n devices, λ failures of a device an hour,
M = 1 / (n λ) hours between failures, δ seconds that a checkpoint stops training (a stall of any
size, and the copy to the host), w >= δ seconds until it is written, R seconds to restart, τ seconds
between checkpoints, q the share lost at any size.

    τ = max(w, sqrt(2 δ M))                         the least is lost; one is written at a time
    lost = δ / τ + (τ / 2 + (w - δ) + R) / M        over the time that trains
    goodput = (1 - q) / (1 + lost)

A checkpoint counts once it is written, so training of w - δ seconds more is done again.

The interval is that of `planner.whatif.pricing.survival`.  Failures of a spot instance add its
interruptions to its devices' own.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

from meshwright.planner.documents.events import Expected
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_HOUR
from meshwright.planner.whatif.pricing.survival import (
    RunSeconds,
    SaveFigures,
    every_s,
    expected_run_seconds,
)
from meshwright.planner.whatif.study import Failures
from meshwright.planner.whatif.uncertain_value import Ranged, UncertainValue

RESTART_IN_PLACE_S = UncertainValue(value=20.0, low=2.0, high=150.0)
"""From a failure until ranks train again, where launchers stay: 2 s on two ranks of one machine
(docs/results/survival.md), 20 s published for 1,024 devices (arXiv:2412.12636), 150 s for 4,800
(arXiv:2509.03047)."""


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

    The rate λ is distributed as a logarithmic normal, whose median is the published value and whose
    range from low to high is four standard deviations σ.  With f failures in h device-hours its
    density is

        p(ln λ)  ~  exp(-(ln λ - ln value)² / (2 σ²))  λ^f exp(-λ h)

    of which the median is returned.  Whether value and range are those of devices or of spot
    instances is what makes the failures that were seen likelier; devices where nothing was seen.

    >>> believed = failures_per_device_hour(Failures(), observed=0, device_hours=0.0)
    >>> believed == Failures().per_device_hour.value
    True
    >>> f"{failures_per_device_hour(Failures(), observed=4, device_hours=50_000.0):.1e}"
    '3.8e-05'
    >>> f"{failures_per_device_hour(Failures(), observed=30, device_hours=300.0):.1e}"
    '9.5e-02'
    """
    devices, spots = failures.per_device_hour, failures.spot_per_node_hour
    if not device_hours or devices.low == devices.high:
        return devices.value
    kinds = [
        _RateBelief.from_observed(kind, observed=observed, device_hours=device_hours)
        for kind in (devices, spots)
        if kind.low < kind.high
    ]
    return max(kinds, key=lambda kind: kind.likelihood).median


@dataclass(frozen=True, slots=True)
class _RateBelief:
    """Belief about a rate after some failures, and how likely these were."""

    median: float
    likelihood: float
    """Its logarithm, but for what all beliefs have in common."""

    @classmethod
    def from_observed(cls, usual: Ranged, *, observed: int, device_hours: float) -> _RateBelief:
        """Return what a published rate becomes."""
        deviation = math.log(usual.high / usual.low) / 4
        # Where failures are many, what was seen is narrower than what was published.
        width = min(deviation, 1 / math.sqrt(observed) if observed else math.inf)
        seen = math.log(max(observed, 0.5) / device_hours)
        middle = math.log(usual.value)
        low = min(middle - _REACH * deviation, seen - _REACH * width)
        high = max(middle + _REACH * deviation, seen + _REACH * width)
        count = math.ceil((high - low) / width * _POINTS)
        points = [low + (high - low) * at / count for at in range(count + 1)]
        logs = [
            observed * x - math.exp(x) * device_hours - ((x - middle) / deviation) ** 2 / 2
            for x in points
        ]
        most = max(logs)
        sums = list(itertools.accumulate(math.exp(log - most) for log in logs))
        at = next(i for i, partial in enumerate(sums) if partial >= sums[-1] / 2)
        before = sums[at - 1] if at else 0.0
        between = (sums[-1] / 2 - before) / (sums[at] - before) - 0.5
        step = (high - low) / count
        likelihood = most + math.log(sums[-1] * step / deviation)
        return cls(math.exp(points[at] + between * step), likelihood)


_REACH = 6.0
"""Standard deviations that are looked at, to both sides."""
_POINTS = 12
"""Points in each of them."""


def save_figures(
    failures: Failures, run_s: RunSeconds, *, parameters: float, devices: int
) -> SaveFigures:
    """Return what decides how often a run is saved, before it has measured a save."""
    rate = failures_per_device_hour(
        failures, observed=run_s.failures, device_hours=run_s.device_hours
    )
    return SaveFigures(
        failures_per_hour=devices * rate,
        blocked_s=blocked_s(failures, parameters=parameters, devices=devices),
        written_s=written_s(failures, parameters=parameters, devices=devices),
    )


def expected_of(
    failures: Failures,
    run_s: RunSeconds,
    saves: SaveFigures,
    *,
    steps: int,
    step_s: float,
    every_steps: int,
    elastic: bool,
    copies: float = 0.0,
) -> Expected:
    """Return the goodput of a run before it, by parts, with its range.

    Of an `elastic` run launchers start ranks again, from copies in memory that may take the
    share `copies` of training.  The low end has the most failures, the longest restarts, and no
    copies; the high end the opposite.

    >>> run = expected_of(
    ...     Failures(), RunSeconds(),
    ...     SaveFigures(failures_per_hour=0.01, blocked_s=14.0, written_s=60.0),
    ...     steps=100_000, step_s=6.0, every_steps=500, elastic=True, copies=0.01,
    ... )
    >>> f"{run.goodput:.3f}, {run.goodput_low:.3f} to {run.goodput_high:.3f}"
    '0.984, 0.966 to 0.984'
    """
    rate = failures.per_device_hour
    copied_s = max(0.0, saves.blocked_s - failures.checkpoint_stall_s.value)
    copied_every = math.ceil(copied_s / (copies * step_s)) if copies else 0

    def run(at: str) -> tuple[RunSeconds, float]:
        start_s: float = getattr(RESTART_IN_PLACE_S, at)
        again_s: float = start_s if elastic else getattr(failures.restart_s, at)
        if run_s.start_s is not None:
            start_s = run_s.start_s
        if run_s.attempts > 1:
            again_s = run_s.restart_s / (run_s.attempts - 1)
        copied = elastic and copies > 0 and at != "high"
        per_hour = saves.failures_per_hour * getattr(rate, at) / rate.value
        return expected_run_seconds(
            saves.model_copy(update={"failures_per_hour": per_hour}),
            steps=steps,
            step_s=step_s,
            every_steps=every_steps,
            start_s=start_s,
            restart_s=again_s,
            copied_every=max(1, copied_every) if copied else None,
            other=copied_s / (max(1, copied_every) * step_s) if copied else 0.0,
        )

    usual, count = run("value")
    return Expected(
        at_unix_s=time.time(),
        seconds=usual.parts_s,
        failures=count,
        goodput=usual.goodput,
        goodput_low=min(usual.goodput, run("high")[0].goodput),
        goodput_high=max(usual.goodput, run("low")[0].goodput),
    )


_OPPOSITE = {"value": "value", "low": "high", "high": "low"}
"""End of a figure's range that goes with another's end, where more of it is better."""


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
) -> UncertainValue:
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

    return UncertainValue(value=share("value"), low=share("high"), high=share("low"))
