"""How far a step may lie from its prediction: 80 % ranges by class of run.

A run is *measured* where its framework, accelerator, size, devices and sequence were all among the
runs that its stack was fitted to: then 80 of 100 residuals of that framework give the range.  All
others are *extrapolated*, and get the residuals of sources that were left out of the fit: steps
are rather slower than predicted than faster, since what nobody knows of takes time.
"""

from __future__ import annotations

import math

from planner.costs.uncertainty import EXPERTS_SPREAD, UNMEASURED_ABOVE, UNMEASURED_BELOW
from planner.setup import Setup

BEYOND = 2.0
"""Factor by which sizes may pass those that were measured and still count as such."""
QUOTED_SPREAD = 0.05
"""What a device without measured kernels adds."""
ASSUMED_SPREAD = 0.05
"""What a run adds whose row leaves something open."""


def outside(setup: Setup) -> tuple[str, ...]:
    """Return what of a run is outside the measured runs of its framework; empty: nothing."""
    request, layout = setup.request, setup.layout
    seen = request.stack.accuracy.seen if setup.known else None
    if seen is None:
        return (f"framework '{setup.framework}'",)
    accelerator = request.cluster.groups[0].accelerator.name
    parameters = float(request.model.parameters)
    found = {
        accelerator: accelerator not in seen.accelerators,
        f"{parameters / 1e9:.2g}B parameters": _beyond(parameters, seen.parameters),
        f"{layout.devices} devices": _beyond(layout.devices, seen.devices),
        f"sequences of {request.job.seq_len}": _beyond(request.job.seq_len, seen.seq_len),
        setup.task: not (seen.tuning if setup.tuned else seen.pretraining),
    }
    return tuple(name for name, is_out in found.items() if is_out)


def _beyond(value: float, measured: tuple[float, float]) -> bool:
    low, high = measured
    return not low / BEYOND <= value <= high * BEYOND


def spreads(setup: Setup, *, beyond: tuple[str, ...], open_points: int) -> tuple[float, float]:
    """Return the logarithms of the range below and above the predicted step."""
    accuracy, model = setup.request.stack.accuracy, setup.request.model
    below = above = accuracy.spread
    if beyond:
        below, above = max(below, UNMEASURED_BELOW), max(above, UNMEASURED_ABOVE)
    if model.architecture is not None and model.architecture.experts is not None:
        below, above = max(below, EXPERTS_SPREAD), max(above, EXPERTS_SPREAD)
    more = 0.0
    group = setup.request.cluster.groups[0]
    if group.accelerator.curve.provenance == "quoted":
        more += QUOTED_SPREAD
    if open_points:
        more += ASSUMED_SPREAD
    if setup.layout.pipeline > 1 and group.nodes > 1:
        above = max(above, accuracy.pipelined_spread)
    return below + more, above + more


def bounds_s(step_s: float, widths: tuple[float, float]) -> tuple[float, float]:
    """Return the ends of the range of a step.

    >>> bounds_s(1.0, (0.0, math.log(2)))
    (1.0, 2.0)
    """
    below, above = widths
    return step_s * math.exp(-below), step_s * math.exp(above)
