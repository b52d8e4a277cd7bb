"""Ranges of 80 % around the seconds of a step, as docs/results/accuracy.md measures them.

On a machine whose kernels and links were measured, each cause misses by its own share.  Elsewhere
rates of kernels come from other software and sheets, and a range is that of a run's class, as wide
as predictions miss runs of sources that were left out of all constants, with every other source of
their class and year (benchmarks/accuracy.py, docs/results/accuracy.md).  That a framework's own
runs were measured makes no range narrower: held runs of such frameworks miss by as much.

    width = least + experts e + doubt d + waiting u + spanning s

on each side, with constants of its own: e says that a model has experts, d how many things of a run
are new or not known, u is the share of a step that does not compute, and s says that
tensor-parallel groups span nodes.  The constants are quantiles of misses of left-out runs, fitted
by `benchmarks/range_widths.py`; natural routing is at least so wide as measured runs with it and
with forced balance lie apart.  What a slow host would add to a step comes to its upper end as it
is: steps of small kernels wait for the host on one machine and not on another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.prediction import Assumption, Prediction

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.requests.request import Request

LINK_SPREAD = 0.15
"""Relative error of collective seconds: the alpha-beta model misses NCCL's curves by 7-21 %."""
UNMODELLED_SPREAD = 0.1
"""Relative error of what no fit speaks of: caches, clocks, stragglers, the host.  Of all 72 layouts
that were run on a measured machine 80 % lie within 9.6 % (benchmarks/results/local_truth.md).

It is also what layouts of one model on one machine do not share: within a sweep of published runs
80 % lie within 8 % of the sweep's common error (middle of sources), and measured ratios of two that
are predicted alike lie within 12 % of the predicted ones in the three largest sources
(docs/results/accuracy.md)."""
LAYOUT_ERROR = 0.06
"""Logarithm within which half of the measured ratios of two layouts of one request lie of the
predicted one: the middle of five sources of sweeps, 7,516 pairs that are predicted within 15 % of
each other (benchmarks/layout_error.py; 80 of 100 lie within 0.15).  What a prediction errs by alike
for all layouts does not count."""


class RunTraits(NamedTuple):
    """Traits of a run that say how far its step may lie from its prediction."""

    experts: bool
    doubts: int
    """Things of it that no measured run of its framework had, or that are not known."""
    waiting: float
    """Share of the step that waits: for links, for other stages and for the host."""
    spanning: bool
    """True if tensor-parallel groups span nodes."""


class WidthLaw(NamedTuple):
    """Logarithm by which steps lie below or above their prediction, by what each trait adds."""

    least: float
    experts: float
    doubt: float
    waiting: float = 0.0
    spanning: float = 0.0

    def width(self, traits: RunTraits) -> float:
        """Return the logarithm of a run.

        >>> law = WidthLaw(least=0.1, experts=0.2, doubt=0.02, waiting=0.5)
        >>> round(law.width(RunTraits(experts=True, doubts=2, waiting=0.1, spanning=False)), 2)
        0.39
        """
        return self.least + sum(x * each for x, each in zip(self[1:], traits, strict=True))


BELOW = WidthLaw(least=0.105, experts=0.168, doubt=0.020)
ABOVE = WidthLaw(least=0.109, experts=0.000, doubt=0.060, waiting=0.600, spanning=1.199)
"""Nothing is added below for what waits: what nobody knows of takes time.  Today's runs would have
0.105 below for experts: theirs became better predicted by what was read in their frameworks' code,
and ranges stay as wide until sources that nobody looked at show the same."""
NATURAL_BELOW, NATURAL_ABOVE = 0.45, 0.5
"""The least of natural routing, which is as uneven as data and training make it, and of experts
that are gathered for each pass: the same layout took 1.09 to 1.9 times as long with natural as with
forced routing (docs/results/accuracy.md)."""
UNKNOWN_DOUBTS = 2
"""Number of doubts about a framework that is not known, beside that one is assumed."""
EIGHT_BITS_GAIN = 0.4
"""Logarithm: what products in 8 bits save of a step in 16 at most (1.2 to 1.5 times as fast, as
published for H100), where nobody says that a run was in 16 and its devices have both."""
MEASURED_MEMORY_SPREAD = 0.03
"""Logarithm: standard deviation of what a run needs of memory over what is predicted of it, on a
machine where layers were measured (benchmarks/results/local_truth.md)."""
MEMORY_BELOW, MEMORY_ABOVE = 0.53, 1.67
"""Factors of a framework's spread: 80 of 100 peaks of published runs lie between these logarithms,
means over six sources, each left out (docs/results/accuracy.md).  What nobody knows of takes memory
rather than that it frees some."""
BESIDE_BYTES = 0.25e9
"""Standard deviation of what lies beside tensors, however many they are: contexts of 0.4 to 1.4 GB,
buffers of communicators of 0.35 to 0.4, workspaces of products, the ends of segments of 20 MB."""
BEYOND = 2.0
"""Factor by which sizes may pass those of a framework's runs and still count as like them."""


class StepRange(NamedTuple):
    """Range in which a step should end, in 80 of 100 runs."""

    low_s: float
    high_s: float
    basis: Assumption | None
    """Assumption whose residuals the range is made of; None on a measured machine."""


def is_link(cause: str) -> bool:
    """Say whether a cause of a step is waiting for links between devices.

    >>> is_link("tensor communication"), is_link("pipeline")
    (True, False)
    """
    return cause.endswith(" communication")


def link_seconds(parts: Mapping[str, float]) -> float:
    """Return the seconds of a step that wait for links between devices."""
    return sum(seconds for cause, seconds in parts.items() if is_link(cause))


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
    slow_host_s: float = 0.0,
    uncaptured_high_s: float = 0.0,
    assumed: Sequence[str] = (),
) -> StepRange:
    """Return the range of a step whose seconds by cause are `parts`.

    `spread` is the relative error of its kernels; `measured` says that a profile of this machine is
    behind them, `slow_host_s` is what the slowest host would add to it, `uncaptured_high_s`
    the end of its range if no captured graph ran, and `assumed` is what of the run is not known.
    """
    step_s = sum(parts.values())
    if measured:
        miss, fitted = own_miss(parts, spread), _fitted_spread(request)
        low = min(max(0.0, 1 - miss), math.exp(-fitted))
        return StepRange(low * step_s, max(1 + miss, math.exp(fitted)) * step_s, None)
    new = outside_of(request, layout)
    below, above = _widths(request, layout, parts, assumed)
    reason = f"left-out runs of its class, {class_name(request, layout)}"
    if new:
        reason += f", wider since no measured run of its framework has {', '.join(new)}"
    if slow_host_s > 0.01 * step_s:
        reason += f", and of a host that takes {request.framework.host.slowest:g} times as long"
    if uncaptured_high_s:
        reason += ", and of passes that are not captured: no device has run these graphs"
    basis = Assumption(
        what=f"range of the step: that of {reason}",
        provenance=f"framework {request.framework.name}",
        source="docs/results/accuracy.md",
    )
    high_s = max(step_s * math.exp(above) + slow_host_s, uncaptured_high_s)
    return StepRange(step_s * math.exp(-below), high_s, basis)


def _fitted_spread(request: Request) -> float:
    """Return within which logarithm the runs lie that constants were fitted to; 0: none were."""
    profile = request.only_profile
    return profile.calibration.spread if profile and profile.calibration else 0.0


def waiting_share(parts: Mapping[str, float]) -> float:
    """Return the share of a step that waits: for links, for other stages and for the host.

    >>> waiting_share({"forward": 2.0, "optimizer": 1.0, "pipeline": 0.5, "fixed": 0.5})
    0.25
    """
    step_s = sum(parts.values())
    computing_s = sum(parts.get(cause, 0.0) for cause in COMPUTING)
    return 1 - computing_s / step_s if step_s else 0.0


COMPUTING = ("forward", "backward", "recompute", "optimizer", "compression")
"""Causes in which a device works."""


RunClass = Literal["dense", "balanced experts", "natural routing"]


def class_name(request: Request, layout: Layout) -> RunClass:
    """Return the class of a run, whose left-out runs its range is that of."""
    a = request.model.architecture
    if a is None or a.experts is None:
        return "dense"
    gathered = layout.expert <= 1 and layout.zero == 3
    natural = layout.expert > 1 and request.framework.experts.load_spread > 0
    return "natural routing" if gathered or natural else "balanced experts"


def run_traits(
    request: Request, layout: Layout, parts: Mapping[str, float], assumed: Sequence[str]
) -> RunTraits:
    """Return what of a run says how wide its range is."""
    groups = request.cluster.groups
    doubts = (
        bool(outside_of(request, layout)),
        bool(assumed),
        any(group.accelerator.curve.provenance == "quoted" for group in groups),
    )
    unknown = base_of(request.framework.name) == "unknown"
    return RunTraits(
        experts=class_name(request, layout) != "dense",
        doubts=sum(doubts) + UNKNOWN_DOUBTS * unknown,
        waiting=waiting_share(parts),
        spanning=layout.tensor > max(group.devices_per_node for group in groups),
    )


def _widths(
    request: Request, layout: Layout, parts: Mapping[str, float], assumed: Sequence[str]
) -> tuple[float, float]:
    """Return the logarithms of the range below and above a step on a machine of sheets."""
    traits = run_traits(request, layout, parts, assumed)
    below, above = BELOW.width(traits), ABOVE.width(traits)
    if class_name(request, layout) == "natural routing":
        below, above = max(below, NATURAL_BELOW), max(above, NATURAL_ABOVE)
    return below + eight_bits_gain(request, assumed), above


def eight_bits_gain(request: Request, assumed: Sequence[str]) -> float:
    """Return the logarithm that products in 8 bits may save of a run whose precision is unsaid."""
    both = all("fp8" in group.accelerator.peak_flops for group in request.cluster.groups)
    unsaid = any(note.startswith("precision") for note in assumed)
    return EIGHT_BITS_GAIN * (both and unsaid)


def fit_probability(needed_bytes: float, room_bytes: float, spread: float) -> float:
    """Return the probability that tensors fit a device which are predicted to need so much.

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

    Where no layers were measured, what lies beside tensors is uncertain by as much in small runs as
    in large ones.

    >>> [round(end / 1e9, 1) for end in (*memory_range(60e9, 0.15), *memory_range(2e9, 0.08))]
    [55.4, 77.1, 1.8, 2.6]
    """
    below, above = 1.28 * spread, 1.28 * spread
    if spread > MEASURED_MEMORY_SPREAD:
        whole = math.hypot(spread, BESIDE_BYTES / needed_bytes) if needed_bytes else spread
        below, above = MEMORY_BELOW * whole, MEMORY_ABOVE * whole
    return needed_bytes * math.exp(-below), needed_bytes * math.exp(above)


def outside_of(request: Request, layout: Layout) -> tuple[str, ...]:
    """Return what of a run is unlike the measured ones of its framework; empty: nothing known."""
    job, seen = request.job, request.framework.accuracy.seen
    if seen is None:
        return ()
    accelerators = {group.accelerator.name for group in request.cluster.groups}
    parameters = float(request.model.parameters)
    task = "pretraining" if job.lora is None else "adapters"
    spreads = {
        " and ".join(sorted(accelerators)): not accelerators <= set(seen.accelerators),
        f"{parameters / 1e9:.2g}B parameters": _beyond(parameters, seen.parameters),
        f"{layout.devices} devices": _beyond(layout.devices, seen.devices),
        f"sequences of {job.seq_len}": _beyond(job.seq_len, seen.seq_len),
        task: not (seen.pretraining if job.lora is None else seen.tuning),
        f"products in {job.precision}": job.precision in EIGHT_BITS and not seen.eight_bits,
    }
    return tuple(name for name, is_out in spreads.items() if is_out)


def _beyond(value: float, measured: tuple[float, float]) -> bool:
    low, high = measured
    return not low / BEYOND <= value <= high * BEYOND


WIDER = 1.25
"""Factor by which the ends of a range lie farther for one word that was not understood."""
WIDER_EACH, MOST_OTHERS = 0.05, 5
"""The same for each other word, and of how many."""
NOT_UNDERSTOOD = "not understood"
"""Start of the note that names the words."""
LEAST_ODDS, MOST_ODDS = 0.15, 0.85
"""Bounds of the probability to fit, where words were not understood that may change memory."""


def words_notes(prediction: Prediction) -> tuple[str, ...]:
    """Return the notes that name words of the inputs which were not understood."""
    return tuple(note for note in prediction.notes if note.startswith(NOT_UNDERSTOOD))


def bounded_by_words(prediction: Prediction, words: Sequence[str]) -> Prediction:
    """Return a prediction of what was understood: its range is wider, nothing in it is certain."""
    if not words:
        return prediction
    wider = WIDER * (1 + WIDER_EACH * min(len(words) - 1, MOST_OTHERS))
    odds = prediction.fit_probability
    odds = (1.0 if prediction.fits else 0.0) if odds is None else odds
    named = ", ".join(word[:60] for word in words[:3])
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    peak = prediction.peak_memory_range_bytes
    update = {
        "step_time_low_s": prediction.step_time_low_s / wider,
        "step_time_high_s": prediction.step_time_high_s * wider,
        "fit_probability": min(max(odds, LEAST_ODDS), MOST_ODDS),
        "peak_memory_range_bytes": None if peak is None else (peak[0] / wider, peak[1] * wider),
    }
    bounded = prediction.model_copy(update=update)
    return bounded.with_notes(f"{NOT_UNDERSTOOD}: {named}{more}; time and memory may differ")
