"""A run's step time by cause and its memory by stage, by the stack of its framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.backends.ranges import bounds_s, outside, spreads
from planner.errors import DocumentError
from planner.predict import placement_prediction
from planner.prediction import Prediction, StagePrediction
from planner.setup import Setup
from planner.tables.stages import Tables, linked, placements, runnable


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run should take."""

    step_time_s: float
    low_s: float
    high_s: float
    step_parts: dict[str, float]
    stages: tuple[StagePrediction, ...]
    fits: bool
    prediction: Prediction
    """What `planner.predict` has of the run's plan."""
    beyond: tuple[str, ...] = ()
    """What of the run is outside those that its stack was fitted to: its range is wider."""
    assumptions: tuple[str, ...] = ()

    def memory_bytes(self, kind: str, rank: str) -> float:
        """Return the peak of a kind of memory (allocated, reserved, device) on a rank."""
        values = [_memory(stage, kind) for stage in self.stages]
        if rank == "first":
            return values[0]
        return values[-1] if rank == "last" else max(values)


def _memory(stage: StagePrediction, kind: str) -> float:
    size = stage.peak_memory_bytes
    if kind != "device":
        size -= stage.memory_parts["context"]
    return size - stage.memory_parts["slack"] if kind == "allocated" else size


def estimate(setup: Setup, tables: Tables | None = None) -> Estimate:
    """Return step time and memory of a run, as `planner.predict` has them of its plan.

    Of many runs, those of a sweep share `tables`.
    """
    setup = linked(setup)
    layout, more = runnable(setup)
    assumptions = [*setup.assumed, *more]
    costs = (tables or Tables()).of(setup)
    found = placement_prediction(costs, layout, placements(setup, layout))
    if setup.recompute is None:
        if not found.fits:
            setup = replace(setup, recompute="full")
            found = placement_prediction(costs, layout, placements(setup, layout))
        assumptions.append(f"recompute {setup.recompute or 'none'}")
    if not 0 < found.step_time_s < math.inf:
        raise DocumentError("", "figures are out of all proportion: no step time follows from them")
    beyond = outside(setup)
    widths = spreads(setup, beyond=beyond, open_points=len(assumptions))
    low_s, high_s = bounds_s(found.step_time_s, widths)
    return Estimate(
        step_time_s=found.step_time_s,
        low_s=low_s,
        high_s=high_s,
        step_parts=found.step_parts,
        stages=found.stages,
        fits=found.fits,
        prediction=found,
        beyond=beyond,
        assumptions=tuple(assumptions),
    )
