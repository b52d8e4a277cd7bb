"""A run's step time by cause and its memory by stage, by the stack of its framework."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.backends.held_bytes import StageEstimate, fits, stages_of
from planner.backends.placed import priced
from planner.backends.ranges import bounds_s, outside, spreads
from planner.backends.runs import run_of
from planner.backends.step import step_parts
from planner.errors import DocumentError
from planner.setup import Setup
from planner.tables.stages import linked


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run should take."""

    step_time_s: float
    low_s: float
    high_s: float
    step_parts: dict[str, float]
    stages: tuple[StageEstimate, ...]
    fits: bool
    beyond: tuple[str, ...] = ()
    """What of the run is outside those that its stack was fitted to: its range is wider."""
    assumptions: tuple[str, ...] = ()

    def memory_bytes(self, kind: str, rank: str) -> float:
        """Return the peak of a kind of memory (allocated, reserved, device) on a rank."""
        values = [_memory(stage, kind) for stage in self.stages]
        if rank == "first":
            return values[0]
        return values[-1] if rank == "last" else max(values)


def _memory(stage: StageEstimate, kind: str) -> float:
    if kind == "allocated":
        return stage.allocated_bytes
    return stage.device_bytes if kind == "device" else stage.reserved_bytes


def estimate(setup: Setup) -> Estimate:
    """Return step time and memory of a run by the stack that trains it."""
    setup = linked(setup)
    run = run_of(setup)
    assumptions = list(setup.assumed)
    recompute = run.recompute
    layers = priced(setup, run)
    if recompute is None:
        recompute = "none"
        if not fits(layers, stages_of(layers, "none")):
            recompute = "full"
        assumptions.append(f"recompute {recompute}")
    stages = stages_of(layers, recompute)
    parts = step_parts(layers, recompute)
    step_s = sum(parts.values())
    beyond = outside(setup)
    widths = spreads(setup, beyond=beyond, open_points=len(assumptions))
    low_s, high_s = bounds_s(step_s, widths)
    if not 0 < step_s < math.inf:
        raise DocumentError("", "figures are out of all proportion: no step time follows from them")
    return Estimate(
        step_time_s=step_s,
        low_s=low_s,
        high_s=high_s,
        step_parts=parts,
        stages=stages,
        fits=fits(layers, stages),
        beyond=beyond,
        assumptions=tuple(assumptions),
    )
