"""Paths through levels of states, and what they cost.

Level s has the states between steps s - 1 and s; a path takes one step per level.  The costs are
tables [step]; `planner.solver.bottleneck_path` finds the cheapest path.  The smallest sum is one
dynamic program backward over the levels; among equal sums a path takes the earliest steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


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
        self._stops = [level.stop for level in self._levels]
        self._starts = []  # of each level: states that have steps, and the first step of each
        for starts, _ in hops:
            first = np.flatnonzero(np.diff(starts, prepend=-1))
            self._starts.append((starts[first], first, np.append(first[1:], len(starts))))

    def __len__(self) -> int:
        return sum(len(ends) for ends in self._ends)

    def level(self, step: int) -> int:
        """Level of a step."""
        return bisect_right(self._stops, step)

    def steps(self, level: int) -> slice:
        """Steps of a level."""
        return self._levels[level]

    def smallest_maximum(self, cost: Floats) -> float:
        """Least possible maximum of `cost` along a path; inf if there is no path."""
        values = np.zeros(self._widths[-1])
        for s in range(len(self._ends) - 1, -1, -1):
            total = np.maximum(cost[self._levels[s]], values[self._ends[s]])
            values = self._minima(s, total)
        return float(values.min())

    def smallest_sum(self, cost: Floats) -> tuple[int, ...] | None:
        """Earliest path with the least sum of `cost`, None if there is no path."""
        values = [np.zeros(self._widths[-1])]
        for s in range(len(self._ends) - 1, -1, -1):
            values.append(self._minima(s, cost[self._levels[s]] + values[-1][self._ends[s]]))
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

    def along(self, table: Floats, way: tuple[int, ...]) -> list[float]:
        """[level] Entries of a table that a path uses."""
        entries: list[float] = table[list(way)].tolist()
        return entries

    def _minima(self, level: int, total: Floats) -> Floats:
        """[state] Least `total` of the steps that start there; inf where none does."""
        starts, first, _ = self._starts[level]
        values = np.full(self._widths[level], np.inf)
        if len(starts):
            values[starts] = np.minimum.reduceat(total, first)
        return values
