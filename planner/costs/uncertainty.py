"""How far a step may lie from its prediction: 80 % ranges, as docs/accuracy.md found them.

On a machine whose kernels and links were measured, each cause misses by its own share.  Elsewhere
rates of kernels come from other software and sheets, and what holds is how far runs lay from their
predictions: residuals of the stack's own runs where this one is like them, else those of sources
that were left out of the fit.  Layouts of one model on one machine share those rates, so what tells
them apart is the first range, not the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from planner.documents.cluster import EIGHT_BITS
from planner.documents.plan import Layout
from planner.documents.prediction import Assumption
from planner.requests.request import Request

LINK_SPREAD = 0.15
"""Relative error of collective seconds: the alpha-beta model misses NCCL's curves by 7-21 %."""
UNMODELLED_SPREAD = 0.1
"""Relative error of what no fit speaks of: caches, clocks, stragglers, the host.  Of all 72 layouts
that were run on a measured machine 80 % lie within 9.6 % (benchmarks/results/local_truth.md).

It is also what layouts of one model on one machine do not share: within a sweep of published runs
80 % lie within 8 % of the sweep's common error (middle of sources), and measured ratios of two that
are predicted alike lie within 12 % of the predicted ones in the three largest sources
(docs/accuracy.md)."""
UNMEASURED_BELOW, UNMEASURED_ABOVE = 0.12, 0.22
"""Logarithms: 80 of 100 steps of a source that no constant was fitted to lie between, mean over
sources whose framework's code is known (docs/accuracy.md, leaving sources out).  Steps are rather
slower than predicted than faster, since what nobody knows of takes time."""
EXPERTS_BELOW, EXPERTS_ABOVE = 0.2, 0.35
"""Logarithms: the same of steps with experts, since routing is as skewed as the data makes it, and
releases of one framework differ by 1.8 times on one plan."""
EIGHT_BITS_GAIN = 0.4
"""Logarithm: what products in 8 bits save of a step in 16 at most (1.2 to 1.5 times as fast, as
published for H100), where nobody says that a run was in 16 and its devices have both."""
QUOTED_SPREAD = 0.05
"""Logarithm: what a device without measured kernels adds."""
ASSUMED_SPREAD = 0.05
"""Logarithm: what a run adds of which not all is told."""
MEASURED_MEMORY_SPREAD = 0.03
"""Logarithm: standard deviation of what a run needs of memory over what is predicted of it, on a
machine where layers were measured (benchmarks/results/local_truth.md)."""
MEMORY_BELOW, MEMORY_ABOVE = 0.53, 1.67
"""Of a framework's spread: 80 of 100 peaks of published runs lie between these logarithms, means
over six sources, each left out (docs/accuracy.md).  What nobody knows of holds memory rather than
that it frees some."""
BEYOND = 2.0
"""Factor by which sizes may pass those of a stack's runs and still count as like them."""


class StepRange(NamedTuple):
    """Where a step should end, in 80 of 100 runs."""

    low_s: float
    high_s: float
    basis: Assumption | None
    """Whose residuals the range is made of; None on a measured machine."""


def link_seconds(parts: Mapping[str, float]) -> float:
    """Return the seconds of a step that wait for links between devices."""
    return sum(seconds for cause, seconds in parts.items() if cause.endswith(" communication"))


def own_miss(parts: Mapping[str, float], spread: float = UNMODELLED_SPREAD) -> float:
    """Return by what share of a step its causes miss together, all in the same direction.

    >>> round(own_miss({"forward": 2.0, "data communication": 2.0}), 3)
    0.125
    """
    step_s = sum(parts.values())
    links_s = link_seconds(parts)
    miss_s = (step_s - links_s) * max(spread, UNMODELLED_SPREAD) + links_s * LINK_SPREAD
    return miss_s / step_s if step_s else 0.0


def step_range(
    request: Request,
    layout: Layout,
    parts: Mapping[str, float],
    spread: float,
    *,
    measured: bool,
    assumed: Sequence[str] = (),
) -> StepRange:
    """Return the range of a step whose seconds by cause are `parts`.

    `spread` is the relative error of its kernels; `measured` says that a profile of this machine is
    behind them, `assumed` is what of the run was not told.
    """
    step_s, miss = sum(parts.values()), own_miss(parts, spread)
    if measured:
        return StepRange(max(0.0, 1 - miss) * step_s, (1 + miss) * step_s, None)
    outside = outside_of(request, layout)
    below, above = _widths(request, layout, miss if outside else None, assumed=assumed)
    said = "its own runs"
    if outside:
        said = f"sources left out of the fit, since outside its runs are {', '.join(outside)}"
    basis = Assumption(
        what=f"range of the step: residuals of {said}",
        provenance=f"stack {request.stack.name}",
        source="docs/accuracy.md",
    )
    return StepRange(step_s * math.exp(-below), step_s * math.exp(above), basis)


def _widths(
    request: Request, layout: Layout, miss: float | None, *, assumed: Sequence[str]
) -> tuple[float, float]:
    """Return the logarithms of the range below and above a step on a machine of sheets.

    `miss` is that of its causes, of a run that is like none of the stack's; None of one that is.
    """
    accuracy, groups = request.stack.accuracy, request.cluster.groups
    below = above = accuracy.spread
    if miss is not None:
        below = max(accuracy.outside_below, UNMEASURED_BELOW, -math.log1p(-min(miss, 0.5)))
        above = max(accuracy.outside_above, UNMEASURED_ABOVE, math.log1p(miss))
    a = request.model.architecture
    if a is not None and a.experts is not None:
        below, above = max(below, EXPERTS_BELOW), max(above, EXPERTS_ABOVE)
    if any(said.startswith("precision") for said in assumed) and all(
        "fp8" in group.accelerator.peak_flops for group in groups
    ):
        below += EIGHT_BITS_GAIN
    more = ASSUMED_SPREAD * bool(assumed)
    if any(group.accelerator.curve.provenance == "quoted" for group in groups):
        more += QUOTED_SPREAD
    if layout.pipeline > 1 and sum(group.nodes for group in groups) > 1:
        above = max(above, accuracy.pipelined_spread)
    return below + more, above + more


def fit_probability(needed_bytes: float, room_bytes: float, spread: float) -> float:
    """Return the probability that a device holds tensors that are predicted to need so much.

        P = Φ(ln(room / needed) / σ)

    Needs are log-normal about their prediction, with σ = `spread`.

    >>> [round(fit_probability(needed, 80e9, 0.15), 2) for needed in (60e9, 76e9, 90e9)]
    [0.97, 0.63, 0.22]
    """
    if needed_bytes <= 0:
        return 1.0
    if room_bytes <= 0:
        return 0.0
    return NormalDist().cdf(math.log(room_bytes / needed_bytes) / spread)


def room_share(probability: float, spread: float) -> float:
    """Return the share of a device's room that predicted needs may take to fit with `probability`.

        exp(-σ Φ⁻¹(P))

    The inverse of `fit_probability`.

    >>> round(room_share(0.95, 0.15), 2), room_share(0.5, 0.15)
    (0.78, 1.0)
    """
    return math.exp(-spread * NormalDist().inv_cdf(probability))


def memory_range(needed_bytes: float, spread: float) -> tuple[float, float]:
    """Return between what a run's memory should peak, in 80 of 100 runs.

    >>> [round(end, 1) for end in memory_range(60.0, 0.15)], memory_range(60.0, 0.03)[0] > 57
    ([55.4, 77.1], True)
    """
    below, above = 1.28 * spread, 1.28 * spread
    if spread > MEASURED_MEMORY_SPREAD:
        below, above = MEMORY_BELOW * spread, MEMORY_ABOVE * spread
    return needed_bytes * math.exp(-below), needed_bytes * math.exp(above)


def outside_of(request: Request, layout: Layout) -> tuple[str, ...]:
    """Return what of a run is unlike the measured ones of its stack; empty: nothing."""
    job, seen = request.job, request.stack.accuracy.seen
    if seen is None:
        return (f"all of stack {request.stack.name}",)
    accelerators = {group.accelerator.name for group in request.cluster.groups}
    parameters = float(request.model.parameters)
    task = "pretraining" if job.lora is None else "adapters"
    found = {
        " and ".join(sorted(accelerators)): not accelerators <= set(seen.accelerators),
        f"{parameters / 1e9:.2g}B parameters": _beyond(parameters, seen.parameters),
        f"{layout.devices} devices": _beyond(layout.devices, seen.devices),
        f"sequences of {job.seq_len}": _beyond(job.seq_len, seen.seq_len),
        task: not (seen.pretraining if job.lora is None else seen.tuning),
        f"products in {job.precision}": job.precision in EIGHT_BITS and not seen.eight_bits,
    }
    return tuple(name for name, is_out in found.items() if is_out)


def _beyond(value: float, measured: tuple[float, float]) -> bool:
    low, high = measured
    return not low / BEYOND <= value <= high * BEYOND
