"""How far along the chain stages get under a ceiling, when the order of their types is open.

From a first layer a, a stage of type g at position s can hold layers up to end_gs(a) at most: until
the ceiling in their fastest options, or until its bytes in their leanest.  Starting later it never
ends earlier.  So the stages before a cut, n_g of type g, end at

    F(n) = max_g end_gs(F(n - e_g))        s = Σ n - 1

at most, whatever their order, and those behind it begin at least as late as the mirror image says.
Each set of counts is left with a short range of cuts.

What is left is a `Spans`, as it is of a graph (`planner.solver.unequal.ideal_reach`): a chain's
downsets are the numbers of its first layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solver.knapsack import Knapsacks
from planner.tolerances import SLACK

Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]
Counts = tuple[int, ...]
# First and last position at which stages of these counts can end together.
Ranges = dict[Counts, tuple[int, int]]

LEAST_SHARE = 0.01
"""How much more than the least ceiling `least_s` may be, as a share of it."""


# A run of layers is what the second of two downsets adds to the first.
Runs = tuple[Indices, Indices]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """What stages may hold under a ceiling.

    `runs` [position] are what some type can hold there, by rising first downset, and `holds`
    [type][position] tells of each whether that type can; `between[counts]` [downset] tells where
    stages of these counts may end together.
    """

    runs: list[Runs]
    holds: list[list[Booleans]]
    between: dict[Counts, Booleans]


class Reaches(Protocol):
    """How far stages get under any ceiling."""

    def least_s(self, whole_s: float) -> float:
        """Ceiling, to `LEAST_SHARE`, below which they do not get to the end; inf if none do."""

    def spans(self, ceiling_s: float) -> Spans | None:
        """Return what stages may hold; None if they do not get to the end."""


class Reach:
    """Ranges of cuts under any ceiling; `knapsacks[type]` have all stages of one type each.

    Each of two stages that meet spends `cut_s` there at least.
    """

    def __init__(
        self, knapsacks: Sequence[Knapsacks], numbers: Sequence[int], cut_s: float = 0.0
    ) -> None:
        self._full = tuple(numbers)
        self._every = sorted(product(*(range(n + 1) for n in numbers)), key=sum)
        types = range(len(self._full))
        self._before = [[(g, changed(one, g, -1)) for g in types if one[g]] for one in self._every]
        self._behind = [
            [(g, changed(one, g, +1)) for g in types if one[g] < self._full[g]]
            for one in self._every
        ]
        self._layers = len(knapsacks[0].layers)
        self._seconds = []
        self._exposed_s = []
        for one in knapsacks:
            least_s = one.time_scale[0] * one.options.least_time_s[one.layers]
            self._seconds.append(np.append(0.0, np.cumsum(least_s)))
            self._exposed_s.append(one.exposed_s + cut_s * meets_of(sum(self._full)))
        self._holds = [_by_bytes(one) for one in knapsacks]
        self._least = [stage.least_layers for stage in knapsacks[0].instance.stages]

    def ends(self, ceiling_s: float) -> list[list[Indices]]:
        """[type][position][first] End of the longest run that a stage can hold; `first` if none."""
        found = []
        for until, exposed_s, holds in zip(
            self._seconds, self._exposed_s, self._holds, strict=True
        ):
            room_s = ceiling_s - exposed_s + SLACK * (ceiling_s + float(until[-1]))
            each_s, of_stage = np.unique(np.maximum(room_s, 0.0), return_inverse=True)
            in_time = np.searchsorted(until, until + each_s[:, None], "right") - 1
            found.append(list(np.minimum(in_time[of_stage.reshape(-1)], holds)))
        return found

    def ranges(self, ends: list[list[Indices]]) -> Ranges:
        """Ranges of all counts that lie on a way from the first layer to the last."""
        stages, layers = sum(self._full), self._layers
        end_of = [[each.tolist() for each in of_type] for of_type in ends]
        last = {self._every[0]: 0}
        for counts, before in zip(self._every[1:], self._before[1:], strict=True):
            position = sum(counts) - 1
            end = -1
            for g, less in before:
                start = last.get(less)
                if start is not None:
                    end = max(end, end_of[g][position][start])
            end = min(end, layers - stages + position + 1)
            if end > position:
                last[counts] = end
        if last.get(self._full) != layers:
            return {}
        first = {self._full: layers}
        for counts, behind in zip(
            reversed(self._every[:-1]), reversed(self._behind[:-1]), strict=True
        ):
            most = last.get(counts)
            if most is None:
                continue
            position = sum(counts)
            start = layers + 1
            for g, more in behind:
                end = first.get(more, -1)
                if end >= 0:
                    start = min(start, bisect_left(end_of[g][position], end))
            start = max(start, position)
            if start <= most:
                first[counts] = start
        return {counts: (first[counts], last[counts]) for counts in self._every if counts in first}

    def least_s(self, whole_s: float) -> float:
        """Ceiling, to `LEAST_SHARE`, below which the stages do not reach the end; inf if none is.

        At most `whole_s`, which limits no stage.
        """
        return least_ceiling_s(
            lambda ceiling_s: self.arrives(self.ranges(self.ends(ceiling_s))),
            whole_s,
            sum(self._full),
        )

    def spans(self, ceiling_s: float) -> Spans | None:
        """Return what stages may hold; None if they do not get to the end."""
        ends = self.ends(ceiling_s)
        ranges = self.ranges(ends)
        if not self.arrives(ranges):
            return None
        runs = [self._runs(position, ends, ranges) for position in range(sum(self._full))]
        at = np.arange(self._layers + 1)
        return Spans(
            runs=runs,
            holds=[
                [end <= own[position][first] for position, (first, end) in enumerate(runs)]
                for own in ends
            ],
            between={counts: (a <= at) & (at <= b) for counts, (a, b) in ranges.items()},
        )

    def _runs(self, position: int, ends: list[list[Indices]], ranges: Ranges) -> Runs:
        """Runs that some type can hold at a position, by rising first layer."""
        begins = [span for counts, span in ranges.items() if sum(counts) == position]
        stops = [span for counts, span in ranges.items() if sum(counts) == position + 1]
        first = np.arange(min(a for a, _ in begins), max(b for _, b in begins) + 1)
        end = np.arange(min(a for a, _ in stops), max(b for _, b in stops) + 1)
        furthest = np.max([own[position][first] for own in ends], axis=0)
        least = first + self._least[position]
        row, column = np.nonzero((end >= least[:, None]) & (end <= furthest[:, None]))
        return first[row], end[column]

    def arrives(self, ranges: Ranges) -> bool:
        """Whether the stages may get from the first layer to the last."""
        return self._every[0] in ranges


def least_ceiling_s(enough: Callable[[float], bool], whole_s: float, stages: int) -> float:
    """Least ceiling, to `LEAST_SHARE`, that is enough; inf if `whole_s` is not."""
    if not enough(whole_s):
        return np.inf
    high = min(whole_s, 2 * whole_s / stages)
    while not enough(high):
        high = min(2 * high, whole_s)
    low = 0.0
    while high - low > LEAST_SHARE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def meets_of(stages: int) -> NDArray[np.float64]:
    """[stage] How many neighbours it has.

    >>> meets_of(3).tolist()
    [1.0, 2.0, 1.0]
    """
    at = np.arange(stages)
    return (at > 0) + (at < stages - 1) * 1.0


def changed(counts: Counts, place: int, by: int) -> Counts:
    """Counts with one of them changed."""
    return (*counts[:place], counts[place] + by, *counts[place + 1 :])


def _by_bytes(knapsacks: Knapsacks) -> Indices:
    """[stage, first] End of the longest run whose leanest options fit, for each transient level.

    One entry more than layers: nothing follows the last.
    """
    options, layers = knapsacks.options, knapsacks.layers
    held = np.array([knapsacks.in_flight, knapsacks.waiting, knapsacks.free_bytes]).T
    unlike, stage_of = np.unique(held, axis=0, return_inverse=True)
    free = unlike[:, 2] + SLACK * np.abs(unlike[:, 2])
    with np.errstate(invalid="ignore"):
        load = options.resident + unlike[:, 0, None, None] * options.stored
        load = np.where(options.present, load, np.inf)
        if unlike[:, 1].any():
            kept = np.where(options.present, options.kept, 0.0)
            load = load + unlike[:, 1, None, None] * kept
    at = np.arange(len(layers) + 1)
    longest = np.tile(at, (len(unlike), 1))
    for level in sorted({u for levels in options.levels for u in levels}):
        able = (options.transient <= level) & options.present
        forbidden = np.append(np.flatnonzero(~able.any(axis=1)[layers]), len(layers))
        next_forbidden = forbidden[np.searchsorted(forbidden, at)]
        lean = np.where(able, load, np.inf).min(axis=2)
        lean = np.where(np.isinf(lean), 0.0, lean)[:, layers]
        until = np.zeros((len(unlike), len(layers) + 1))
        np.cumsum(lean, axis=1, out=until[:, 1:])
        for own, room in enumerate((free - level).tolist()):
            if room >= 0:
                end = np.searchsorted(until[own], until[own] + room, "right") - 1
                longest[own] = np.maximum(longest[own], np.minimum(end, next_forbidden))
    found: Indices = longest[stage_of.reshape(-1)]
    return found
