"""Which ideals can lie between two stages under a ceiling on stage seconds, and the steps between.

The stages before a cut host at most as much work as they have room for, and so do those after it:
`planner.fluid` turns a ceiling into a range of work for each cut, which leaves a band of ideals.
A step of stage s leads from an ideal of band s to a larger one of band s + 1 whose further layers
take no more than the ceiling in their fastest options.  No split under the ceiling is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.fluid import Fluid
from planner.ideals import Ideals
from planner.knapsack import Knapsacks

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_ROUNDING = 1e-12
_CHUNK = 1 << 19  # pairs of ideals compared at a time
_TURNS = 4  # of narrowing the bands of one ceiling ...
_WORTHWHILE = 0.9  # ... while at most this share of them is left


class Bands:
    """Bands of ideals and the steps between them, for any ceiling.

    `cut_s` [ideal] is what a cut costs each of the stages that meet there.
    """

    def __init__(self, every: Ideals, knapsacks: Knapsacks, fluid: Fluid, cut_s: Floats) -> None:
        self._every = every
        self._fluid = fluid
        self._cut_s = cut_s
        self._scale, self._exposed_s = knapsacks.time_scale, knapsacks.exposed_s
        least_s = knapsacks.options.least_time_s[knapsacks.layers]
        totals = every.totals(np.stack([least_s, np.ones(len(least_s))], axis=1))
        self.until_s = totals[:, 0]
        self._sizes = totals[:, 1]
        self._slack_s = _ROUNDING * float(self.until_s[-1])

    def under(self, ceiling_s: float) -> list[Indices]:
        """[cut] Ideals that can lie there, by rising seconds; the ends of the pipeline included.

        A cut costs at least what it costs at the cheapest ideal of its band.  That leaves the
        stages less room, which narrows the bands again.
        """
        bands = self._roughly(ceiling_s)
        member = np.zeros(len(self._every), dtype=bool)
        for band in bands:
            member[band] = True
        members = np.flatnonzero(member)
        work = self._every.totals(self._fluid.prices.T, members)
        done = [work[np.searchsorted(members, band)] for band in bands]
        for _ in range(_TURNS):
            if not all(len(band) for band in bands):
                break
            least_s = np.array([self._cut_s[band].min() for band in bands])
            ranges = self._fluid.ranges(ceiling_s, least_s)
            before = sum(len(band) for band in bands)
            for cut, band in enumerate(bands):
                further_s = (self._cut_s[band] - least_s[cut])[:, None]
                low = ranges.low[:, cut] + further_s * ranges.low_per_s[:, cut]
                high = ranges.high[:, cut] - further_s * ranges.high_per_s[:, cut]
                inside = np.all((done[cut] >= low) & (done[cut] <= high), axis=1)
                bands[cut], done[cut] = band[inside], done[cut][inside]
            if sum(len(band) for band in bands) > _WORTHWHILE * before:
                break
        bands = [band[np.argsort(self.until_s[band], kind="stable")] for band in bands]
        return [np.zeros(1, dtype=np.intp), *bands, np.array([len(self._every) - 1])]

    def _roughly(self, ceiling_s: float) -> list[Indices]:
        """[cut] Ideals that leave the stages on both sides layers enough, not too many seconds."""
        stages, layers = len(self._scale), self._every.layers
        own_s = np.maximum((ceiling_s - self._exposed_s) / self._scale, 0.0)
        before = np.cumsum(own_s)[:-1] + self._slack_s
        after = np.cumsum(own_s[::-1])[-2::-1] + self._slack_s
        return [
            np.flatnonzero(
                (self.until_s <= before[cut])
                & (self.until_s >= self.until_s[-1] - after[cut])
                & (self._sizes > cut)
                & (self._sizes <= layers - stages + cut + 1)
            )
            for cut in range(stages - 1)
        ]

    def pairs(self, bands: list[Indices], ceiling_s: float) -> int:
        """How many pairs of ideals `hops` has to compare."""
        return sum(
            int(np.sum(last - first))
            for stage in range(len(bands) - 1)
            for first, last in [self._reach(stage, bands, ceiling_s)]
        )

    def hops(self, bands: list[Indices], ceiling_s: float) -> list[tuple[Indices, Indices]]:
        """[stage] Positions in its band and the next of each step's ends, by rising start."""
        return [self._hops_of(stage, bands, ceiling_s) for stage in range(len(bands) - 1)]

    def _reach(self, stage: int, bands: list[Indices], ceiling_s: float) -> tuple[Indices, Indices]:
        """[start] Range in the next band of the ends whose seconds allow a step."""
        band, until = bands[stage], self.until_s[bands[stage + 1]]
        own_s = (ceiling_s - self._exposed_s[stage] - self._cut_s[band]) / self._scale[stage]
        own_s = np.maximum(own_s, 0.0) + self._slack_s
        first = np.searchsorted(until, self.until_s[band] - self._slack_s, "left")
        last = np.searchsorted(until, self.until_s[band] + own_s, "right")
        return first, np.maximum(first, last)

    def _hops_of(
        self, stage: int, bands: list[Indices], ceiling_s: float
    ) -> tuple[Indices, Indices]:
        band, following = bands[stage], bands[stage + 1]
        words, further = self._every.words[band], self._every.words[following]
        # Words that every start fills no more than every end cannot tell a pair apart.
        anywhere = np.bitwise_or.reduce(words, axis=0) if len(band) else words[:0].sum(axis=0)
        telling = [
            word for word in range(words.shape[1]) if np.any(anywhere[word] & ~further[:, word])
        ]
        ceiling_s = ceiling_s * (1 + _ROUNDING) + self._slack_s
        starts, ends = [], []
        for pairs in _ranges(*self._reach(stage, bands, ceiling_s)):
            rows, columns = pairs
            for word in telling:
                inside = (words[rows, word] & ~further[columns, word]) == 0
                rows, columns = rows[inside], columns[inside]
            smaller, larger = band[rows], following[columns]
            stage_s = self._scale[stage] * (self.until_s[larger] - self.until_s[smaller])
            stage_s += self._exposed_s[stage] + self._cut_s[smaller] + self._cut_s[larger]
            inside = (stage_s <= ceiling_s) & (smaller != larger)
            starts.append(rows[inside])
            ends.append(columns[inside])
        none = np.empty(0, dtype=np.intp)
        return np.concatenate([none, *starts]), np.concatenate([none, *ends])


def _ranges(first: Indices, last: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Row and column of all pairs with first[row] <= column < last[row], some at a time."""
    counts = last - first
    until = np.cumsum(counts)
    row = 0
    while row < len(counts):
        done = int(until[row - 1]) if row else 0
        end = max(row + 1, int(np.searchsorted(until, done + _CHUNK, "right")))
        some = counts[row:end]
        rows = np.repeat(np.arange(row, end), some)
        offsets = first[row:end] - (np.cumsum(some) - some)
        yield rows, np.arange(len(rows)) + np.repeat(offsets, some)
        row = end
