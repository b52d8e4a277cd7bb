"""The cheapest way through stages where the dearest one counts many times.

Ways are paths through a lattice of states (`planner.solver.paths`); tables say what each stage
would cost.  `cheapest` minimises exactly

    steady · max_s stage_s + Σ_s fill_s + max_s once_s + ...

by threshold descent: the smallest Σ fill under a ceiling on stage_s is one dynamic program.  With
its solution (maximum τ, sum S) known, every other way below the ceiling and not below τ costs at
least as much, so the next ceiling lies strictly below τ; S only grows as the ceiling falls, so
steady · τ_min + S bounds all that is left.  A ceiling on each table whose largest entry counts once
descends around it the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.solver.paths import Paths

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Tables of what is minimised, one entry per stage and what it may hold; inf where it cannot.

    `once_s` are tables whose largest entry counts once (they need not be inf anywhere).
    """

    stage_s: Floats
    fill_s: Floats
    once_s: tuple[Floats, ...]
    steady: float


@dataclass(frozen=True, slots=True)
class Way:
    """A way through all stages, and the parts of what it costs."""

    way: tuple[int, ...]
    """Steps of a path."""
    largest_s: float
    """Seconds of its slowest stage."""
    fill_s: float
    """Sum over its stages."""
    once_s: float
    value_s: float
    """All that it costs."""


def evaluate_way(ways: Paths, costs: Costs, way: tuple[int, ...]) -> Way:
    """Evaluate a way on the tables."""
    largest_s = max(ways.along(costs.stage_s, way))
    sum_s = sum(ways.along(costs.fill_s, way))
    once_s = sum(max(ways.along(table, way)) for table in costs.once_s)
    return Way(way, largest_s, sum_s, once_s, costs.steady * largest_s + sum_s + once_s)


def meets(bound_s: float, incumbent_s: float) -> bool:
    """Return whether nothing with at least this lower bound can improve on the incumbent."""
    return bound_s >= incumbent_s - ROUNDING * abs(incumbent_s)


def cheapest(ways: Paths, costs: Costs, *, cutoff_s: float = np.inf) -> Way | None:
    """Cheapest way, or None if there is none below `cutoff_s`."""
    if not costs.once_s:
        return _descend(ways, costs, cutoff_s)
    first_s, *others_s = costs.once_s
    least_s = ways.smallest_maximum(np.where(np.isfinite(costs.stage_s), first_s, np.inf))
    best: Way | None = None
    ceiling_s = np.inf
    while ceiling_s >= least_s:
        allowed = first_s <= ceiling_s
        below = replace(
            costs,
            stage_s=np.where(allowed, costs.stage_s, np.inf),
            fill_s=np.where(allowed, costs.fill_s, np.inf),
            once_s=tuple(others_s),
        )
        path = cheapest(ways, below, cutoff_s=cutoff_s - least_s)
        if path is None:
            break
        whole = evaluate_way(ways, costs, path.way)
        if whole.value_s < cutoff_s:
            best, cutoff_s = whole, whole.value_s
        ceiling_s = float(np.nextafter(max(ways.along(first_s, path.way)), -np.inf))
    return best


def _descend(ways: Paths, costs: Costs, cutoff_s: float) -> Way | None:
    """Minimise steady · max + Σ fill by a falling ceiling on the maximum."""
    stage_s, fill_s, steady = costs.stage_s, costs.fill_s, costs.steady
    least_max_s = ways.smallest_maximum(stage_s)
    freest = ways.smallest_sum(fill_s)
    if freest is None or not np.isfinite(least_max_s):
        return None
    least_sum_s = evaluate_way(ways, costs, freest).fill_s
    if meets(steady * least_max_s + least_sum_s, cutoff_s):
        return None
    best: Way | None = None

    def best_under(ceiling_s: float) -> Way:
        way = ways.smallest_sum(np.where(stage_s <= ceiling_s, fill_s, np.inf))
        assert way is not None, "the ceiling is never below the least maximum"
        return evaluate_way(ways, costs, way)

    tightest = best_under(least_max_s)
    if tightest.value_s < cutoff_s:
        best, cutoff_s = tightest, tightest.value_s
    ceiling_s = (cutoff_s - least_sum_s) / steady if steady > 0 else np.inf
    while ceiling_s >= least_max_s:
        path = best_under(ceiling_s)
        if path.value_s < cutoff_s:
            best, cutoff_s = path, path.value_s
        if meets(steady * least_max_s + path.fill_s, cutoff_s):
            break
        ceiling_s = float(np.nextafter(path.largest_s, -np.inf))
        if steady > 0:
            ceiling_s = min(ceiling_s, (cutoff_s - path.fill_s) / steady)
    return best
