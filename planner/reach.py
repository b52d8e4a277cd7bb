"""How far along the chain stages get under a ceiling, when the order of their types is open.

From a first layer a, a stage of type g at position s can hold layers up to end_gs(a) at most: until
the ceiling in their fastest options, or until its bytes in their leanest.  Starting later it never
ends earlier.  So the stages before a cut, n_g of type g, end at

    F(n) = max_g end_gs(F(n - e_g))        s = Σ n - 1

at most, whatever their order, and those behind it begin at least as late as the mirror image says.
Each set of counts is left with a short range of cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.knapsack import Knapsacks

Indices = NDArray[np.intp]
Counts = tuple[int, ...]
# First and last position at which stages of these counts can end together.
Ranges = dict[Counts, tuple[int, int]]

_ROUNDING = 1e-9


class Reach:
    """Ranges of cuts under any ceiling; `knapsacks[type]` have all stages of one type each."""

    def __init__(self, knapsacks: Sequence[Knapsacks], numbers: Sequence[int]) -> None:
        self._full = tuple(numbers)
        self._every = sorted(product(*(range(n + 1) for n in numbers)), key=sum)
        self._layers = len(knapsacks[0].layers)
        self._seconds = []
        self._exposed_s = []
        for one in knapsacks:
            least_s = one.time_scale[0] * one.options.least_time_s[one.layers]
            self._seconds.append(np.append(0.0, np.cumsum(least_s)))
            self._exposed_s.append(float(one.exposed_s[0]))
        self._holds = [[_by_bytes(one, s) for s in range(sum(numbers))] for one in knapsacks]

    def ends(self, ceiling_s: float) -> list[list[Indices]]:
        """[type][position][first] End of the longest run that a stage can hold; `first` if none."""
        found = []
        for until, exposed_s, holds in zip(
            self._seconds, self._exposed_s, self._holds, strict=True
        ):
            room_s = ceiling_s - exposed_s + _ROUNDING * (ceiling_s + float(until[-1]))
            in_time = np.searchsorted(until, until + max(room_s, 0.0), "right") - 1
            found.append([np.minimum(in_time, by_bytes) for by_bytes in holds])
        return found

    def ranges(self, ends: list[list[Indices]]) -> Ranges:
        """Ranges of all counts that lie on a way from the first layer to the last."""
        stages = sum(self._full)
        last = {self._every[0]: 0}
        for counts in self._every[1:]:
            position = sum(counts) - 1
            end = max(
                (
                    int(ends[g][position][last[less]])
                    for g in range(len(counts))
                    for less in [changed(counts, g, -1)]
                    if less in last
                ),
                default=-1,
            )
            end = min(end, self._layers - stages + sum(counts))
            if end >= sum(counts):
                last[counts] = end
        if last.get(self._full) != self._layers:
            return {}
        first = {self._full: self._layers}
        for counts in reversed(self._every[:-1]):
            position = sum(counts)
            start = min(
                (
                    int(np.searchsorted(ends[g][position], first[more], "left"))
                    for g in range(len(counts))
                    for more in [changed(counts, g, +1)]
                    if more in first
                ),
                default=self._layers + 1,
            )
            start = max(start, sum(counts))
            if start <= last.get(counts, -1):
                first[counts] = start
        return {counts: (first[counts], last[counts]) for counts in self._every if counts in first}

    def least_s(self, whole_s: float) -> float:
        """Ceiling, to a hundredth, below which the stages do not reach the end; inf if none is.

        At most `whole_s`, which limits no stage.
        """

        def enough(ceiling_s: float) -> bool:
            return self.arrives(self.ranges(self.ends(ceiling_s)))

        if not enough(whole_s):
            return np.inf
        high = min(whole_s, 2 * whole_s / sum(self._full))
        while not enough(high):
            high = min(2 * high, whole_s)
        low = 0.0
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def arrives(self, ranges: Ranges) -> bool:
        """Whether the stages may get from the first layer to the last."""
        return self._every[0] in ranges


def changed(counts: Counts, place: int, by: int) -> Counts:
    """Counts with one of them changed."""
    return (*counts[:place], counts[place] + by, *counts[place + 1 :])


def _by_bytes(knapsacks: Knapsacks, stage: int) -> Indices:
    """[first] End of the longest run whose leanest options fit the stage, for each transient level.

    One entry more than layers: nothing follows the last.
    """
    options, layers = knapsacks.options, knapsacks.layers
    load = options.resident + float(knapsacks.in_flight[stage]) * options.stored
    free = float(knapsacks.free_bytes[stage])
    free += _ROUNDING * abs(free)
    longest = np.arange(len(layers) + 1)
    for level in sorted({u for levels in options.levels for u in levels if u <= free}):
        lean = np.where(options.transient <= level, load, np.inf).min(axis=1)[layers]
        forbidden = np.append(np.flatnonzero(np.isinf(lean)), len(layers))
        until = np.append(0.0, np.cumsum(np.where(np.isinf(lean), 0.0, lean)))
        end = np.searchsorted(until, until + (free - level), "right") - 1
        next_forbidden = forbidden[np.searchsorted(forbidden, np.arange(len(layers) + 1))]
        longest = np.maximum(longest, np.minimum(end, next_forbidden))
    return longest
