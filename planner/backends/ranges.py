"""How far a step may lie from its prediction: 80 % ranges by class of run.

A run is *measured* where its framework, accelerator, size, devices and sequence were all among the
runs that the rules were fitted to: then 80 of 100 residuals of that framework give the range.  All
others are *extrapolated*, and get the residuals of sources that were left out of the fit: steps
are rather slower than predicted than faster, since what nobody knows of takes time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.backends.rules import Rules, known_name
from planner.backends.runs import Run
from planner.costs.uncertainty import EXPERTS_SPREAD, UNMEASURED_ABOVE, UNMEASURED_BELOW
from planner.layers.parameters import graph_of

BEYOND = 2.0
"""Factor by which sizes may pass those that were measured and still count as such."""
QUOTED_SPREAD = 0.05
"""What a device without measured kernels adds."""
ASSUMED_SPREAD = 0.05
"""What a run adds whose row leaves something open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the runs were that a framework's rules were fitted to."""

    accelerators: frozenset[str]
    parameters: tuple[float, float]
    devices: tuple[int, int]
    seq_len: tuple[int, int]
    tuning: bool = False
    """Fine-tuning was among them."""
    pretraining: bool = True


SEEN: dict[str, Seen] = {
    "megatron": Seen(
        accelerators=frozenset({"a100-sxm-80gb", "h100-sxm-80gb", "b200"}),
        parameters=(1.6e9, 1.0e12),
        devices=(4, 11616),
        seq_len=(2048, 131072),
        tuning=True,
    ),
    "megatron-deepspeed": Seen(
        accelerators=frozenset({"a100-sxm-80gb"}),
        parameters=(2.0e8, 2.0e11),
        devices=(2, 512),
        seq_len=(1024, 2048),
    ),
    "nanotron": Seen(
        accelerators=frozenset({"h100-sxm-80gb"}),
        parameters=(1.3e9, 8.9e9),
        devices=(8, 512),
        seq_len=(4096, 4096),
    ),
    "aleph-alpha-scaling": Seen(
        accelerators=frozenset({"a100-sxm-80gb"}),
        parameters=(1.4e10, 6.5e10),
        devices=(32, 256),
        seq_len=(2048, 8192),
    ),
    "internevo": Seen(
        accelerators=frozenset({"a100-sxm-80gb"}),
        parameters=(7.3e9, 7.3e9),
        devices=(8, 1024),
        seq_len=(2048, 2048),
    ),
    "llm-foundry-fsdp": Seen(
        accelerators=frozenset({"a100-sxm-80gb", "h100-sxm-80gb"}),
        parameters=(1.2e8, 6.5e10),
        devices=(8, 512),
        seq_len=(512, 65536),
    ),
    "fsdp_qlora": Seen(
        accelerators=frozenset({"rtx-3090", "rtx-a5000", "rtx-6000-ada", "h100-sxm-80gb"}),
        parameters=(6.7e9, 6.9e10),
        devices=(2, 8),
        seq_len=(512, 2048),
        tuning=True,
        pretraining=False,
    ),
    "deepspeed": Seen(
        accelerators=frozenset({"a100-sxm-80gb"}),
        parameters=(1.75e11, 5.3e11),
        devices=(384, 2240),
        seq_len=(2048, 2048),
    ),
}
"""By framework; those that are not here have rules of their documentation, and no runs."""


def outside(run: Run, *, known: bool) -> tuple[str, ...]:
    """Return what of a run is outside the measured runs of its framework; empty: nothing."""
    seen = SEEN.get(known_name(run.framework)) if known else None
    if seen is None:
        return (f"framework '{run.framework}'",)
    accelerator = run.cluster.groups[0].accelerator.name
    parameters = float(graph_of(run.architecture, name="model").parameters)
    tuned = run.task != "pretrain"
    found = {
        accelerator: accelerator not in seen.accelerators,
        f"{parameters / 1e9:.2g}B parameters": _beyond(parameters, seen.parameters),
        f"{run.devices} devices": _beyond(run.devices, seen.devices),
        f"sequences of {run.seq_len}": _beyond(run.seq_len, seen.seq_len),
        run.task: not (seen.tuning if tuned else seen.pretraining),
    }
    return tuple(name for name, is_out in found.items() if is_out)


def _beyond(value: float, measured: tuple[float, float]) -> bool:
    low, high = measured
    return not low / BEYOND <= value <= high * BEYOND


def spreads(
    run: Run, rules: Rules, *, beyond: tuple[str, ...], open_points: int
) -> tuple[float, float]:
    """Return the logarithms of the range below and above the predicted step."""
    below = above = rules.spread
    if beyond:
        below, above = max(below, UNMEASURED_BELOW), max(above, UNMEASURED_ABOVE)
    if run.architecture.experts is not None:
        below, above = max(below, EXPERTS_SPREAD), max(above, EXPERTS_SPREAD)
    more = 0.0
    group = run.cluster.groups[0]
    if group.accelerator.curve.provenance == "quoted":
        more += QUOTED_SPREAD
    if open_points:
        more += ASSUMED_SPREAD
    if run.pipeline > 1 and group.nodes > 1:
        above = max(above, rules.pipelined_spread)
    return below + more, above + more


def bounds_s(step_s: float, widths: tuple[float, float]) -> tuple[float, float]:
    """Return the ends of the range of a step.

    >>> bounds_s(1.0, (0.0, math.log(2)))
    (1.0, 2.0)
    """
    below, above = widths
    return step_s * math.exp(-below), step_s * math.exp(above)
