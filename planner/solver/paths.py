"""The cheapest path through levels of states, where the dearest step counts many times.

Level s holds the states between steps s - 1 and s; a path takes one step per level.  The costs are
tables [step], and `cheapest` minimises exactly

    steady · max_e stage_s + Σ_e fill_s + max_e once_s + ...

by the threshold descent of `planner.solver.cuts`: the smallest Σ fill under a ceiling on stage_s
is one dynamic program backward over the levels.  With its solution (maximum τ, sum S) known, every
other path below the ceiling and not below τ costs at least as much, so the next ceiling lies
strictly below τ; S only grows as the ceiling falls, so steady · τ_min + S bounds all that is left.
A ceiling on each table whose largest entry counts once descends around it the same way.

Among equal sums a path takes the earliest steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.solver.cuts import Costs, meets

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Path:
    """Indices of the steps of a path, and the parts of what it costs."""

    steps: tuple[int, ...]
    largest_s: float
    fill_s: float
    once_s: float
    value_s: float


class Paths:
    """All paths from any state of the first level to any state of the last.

    `hops[s]` are two arrays: where each step of level s starts (state of level s, not falling) and
    ends (state of level s + 1).  `widths[s]` counts the states of level s.  Steps are numbered over
    all levels in turn.
    """

    def __init__(self, widths: Sequence[int], hops: Sequence[tuple[Indices, Indices]]) -> None:
        self._widths = widths
        self._ends = [ends for _, ends in hops]
        bounds = accumulate((len(ends) for ends in self._ends), initial=0)
        self._levels = [slice(a, b) for a, b in pairwise(bounds)]
        self._starts = []  # of each level: states that have steps, and the first step of each
        for starts, _ in hops:
            first = np.flatnonzero(np.diff(starts, prepend=-1))
            self._starts.append((starts[first], first, np.append(first[1:], len(starts))))

    def __len__(self) -> int:
        return sum(len(ends) for ends in self._ends)

    def level(self, step: int) -> int:
        """Level of a step."""
        return next(s for s, level in enumerate(self._levels) if step < level.stop)

    def steps(self, level: int) -> slice:
        """Steps of a level."""
        return self._levels[level]

    def smallest_maximum(self, cost: Floats) -> float:
        """Least possible maximum of `cost` along a path; inf if there is no path."""
        values = np.zeros(self._widths[-1])
        for s in range(len(self._ends) - 1, -1, -1):
            total = np.maximum(cost[self._levels[s]], values[self._ends[s]])
            values = self._least(s, total)
        return float(values.min())

    def smallest_sum(self, cost: Floats) -> tuple[int, ...] | None:
        """Earliest path with the least sum of `cost`, None if there is no path."""
        values = [np.zeros(self._widths[-1])]
        for s in range(len(self._ends) - 1, -1, -1):
            values.append(self._least(s, cost[self._levels[s]] + values[-1][self._ends[s]]))
        values.reverse()
        state = int(values[0].argmin())
        if not np.isfinite(values[0][state]):
            return None
        path = []
        for s, (starts, first, last) in enumerate(self._starts):
            at = int(np.searchsorted(starts, state))
            ends = self._ends[s][first[at] : last[at]]
            begin = self._levels[s].start + int(first[at])
            total = cost[begin : begin + len(ends)] + values[s + 1][ends]
            pick = int(total.argmin())
            path.append(begin + pick)
            state = int(ends[pick])
        return tuple(path)

    def _least(self, level: int, total: Floats) -> Floats:
        """[state] Least `total` of the steps that start there; inf where none does."""
        starts, first, _ = self._starts[level]
        values = np.full(self._widths[level], np.inf)
        if len(starts):
            values[starts] = np.minimum.reduceat(total, first)
        return values


def priced_path(costs: Costs, steps: tuple[int, ...]) -> Path:
    """Evaluate a path."""
    taken = list(steps)
    largest_s, sum_s = float(costs.stage_s[taken].max()), float(costs.fill_s[taken].sum())
    once_s = sum(float(table[taken].max()) for table in costs.once_s)
    return Path(steps, largest_s, sum_s, once_s, costs.steady * largest_s + sum_s + once_s)


def cheapest(paths: Paths, costs: Costs, *, cutoff_s: float = np.inf) -> Path | None:
    """Cheapest path, or None if there is none below `cutoff_s`; tables of costs are [step]."""
    if not costs.once_s:
        return _descend(paths, costs, cutoff_s)
    first_s, *others_s = costs.once_s
    least_s = paths.smallest_maximum(np.where(np.isfinite(costs.stage_s), first_s, np.inf))
    best: Path | None = None
    ceiling_s = np.inf
    while ceiling_s >= least_s:
        allowed = first_s <= ceiling_s
        below = replace(
            costs,
            stage_s=np.where(allowed, costs.stage_s, np.inf),
            fill_s=np.where(allowed, costs.fill_s, np.inf),
            once_s=tuple(others_s),
        )
        found = cheapest(paths, below, cutoff_s=cutoff_s - least_s)
        if found is None:
            break
        whole = priced_path(costs, found.steps)
        if whole.value_s < cutoff_s:
            best, cutoff_s = whole, whole.value_s
        ceiling_s = float(np.nextafter(first_s[list(found.steps)].max(), -np.inf))
    return best


def _descend(paths: Paths, costs: Costs, cutoff_s: float) -> Path | None:
    """Minimise steady · max + Σ fill by a falling ceiling on the maximum."""
    stage_s, fill_s, steady = costs.stage_s, costs.fill_s, costs.steady
    least_max_s = paths.smallest_maximum(stage_s)
    freest = paths.smallest_sum(fill_s)
    if freest is None or not np.isfinite(least_max_s):
        return None
    least_sum_s = float(fill_s[list(freest)].sum())
    if meets(steady * least_max_s + least_sum_s, cutoff_s):
        return None
    best: Path | None = None

    def under(ceiling_s: float) -> Path:
        steps = paths.smallest_sum(np.where(stage_s <= ceiling_s, fill_s, np.inf))
        assert steps is not None, "the ceiling is never below the least maximum"
        return priced_path(costs, steps)

    tightest = under(least_max_s)
    if tightest.value_s < cutoff_s:
        best, cutoff_s = tightest, tightest.value_s
    ceiling_s = (cutoff_s - least_sum_s) / steady if steady > 0 else np.inf
    while ceiling_s >= least_max_s:
        found = under(ceiling_s)
        if found.value_s < cutoff_s:
            best, cutoff_s = found, found.value_s
        if meets(steady * least_max_s + found.fill_s, cutoff_s):
            break
        ceiling_s = float(np.nextafter(found.largest_s, -np.inf))
        if steady > 0:
            ceiling_s = min(ceiling_s, (cutoff_s - found.fill_s) / steady)
    return best
