"""The table of a chain: every stage with every run of layers it might hold.

Runs with equal counts of each kind are one *signature* and share a knapsack.  The table starts from
the Lagrangian bounds of the knapsacks, once for each signature; a chain of like layers has few.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.documents.tolerances import ROUNDING
from planner.solver.cuts import ChainWays
from planner.solver.step_bounds import StepBounds
from planner.solver.table import Known, StageSecondsTable

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class StageTable(StageSecondsTable):
    """Entry (stage · layers + first) · width + n - 1 is `stage` with the n layers from `first` on.

    Runs of layers that take more than `ceiling_s` on every stage are inf; so is what does not fit.
    All seconds are rounded to a grid that is fine beside `whole_s`, the sum over the stages.
    """

    def __init__(
        self,
        bounds: StepBounds,
        known: Known,
        ceiling_s: float,
        whole_s: float,
        *,
        limit_s: float = math.inf,
    ) -> None:
        """`bounds` are those between all prefixes of the chain."""
        knapsacks = bounds.knapsacks
        super().__init__(knapsacks, known, limit_s=limit_s)
        self._bounds = bounds
        # Sums rarely exceed whole_s: multiples of this add up without rounding, so that equal sums
        # are equal in any order, and ties are broken by position instead of by noise.
        self._quantum = 2.0 ** (np.frexp(whole_s)[1] - 48)
        self._whole_s = whole_s
        layers, stages = len(knapsacks.layers), knapsacks.instance.stages
        until_s = bounds.total(knapsacks.options.least_time_s)
        pace, exposed_s = float(knapsacks.time_scale.min()), float(knapsacks.exposed_s.min())
        # A little more than the ceiling: one run too many is harmless, one too few is not.
        longest_s = (ceiling_s - exposed_s) / pace + ROUNDING * float(until_s[-1])
        reach = np.searchsorted(until_s, until_s[:-1] + longest_s, "right") - 1
        width = int(np.max(reach - np.arange(layers)))
        self._width = max(1, min(width, layers - len(stages) + 1))
        self._first = np.arange(layers)[:, None]
        self._end = self._first + np.arange(1, self._width + 1)
        inside = self._end <= np.maximum(reach, 0)[:, None]
        self._end = np.minimum(self._end, layers)
        self._each = self._end.size
        cut_s = bounds.cut_s[self._first] + bounds.cut_s[self._end]
        self._besides_s = np.add.outer(knapsacks.exposed_s, cut_s).reshape(-1)
        self.ways = ChainWays(len(stages), layers, self._width)

        at = np.flatnonzero(inside.reshape(-1))
        self._signature = np.full(inside.size, -1, dtype=np.intp)
        sample = self._signature[at] = np.arange(len(at), dtype=np.intp)
        codes = bounds.codes
        if codes is not None:
            held = (codes[self._end] - codes[self._first]).reshape(-1)[at]
            _, sample, self._signature[at] = np.unique(held, return_index=True, return_inverse=True)
        self._same: dict[int, Indices] = {}
        """By signature, its runs."""
        seconds = np.full((len(stages), self._each), np.inf)
        if len(at):
            some = at[sample]
            own_s = bounds.layers_s(some // self._width, self._end.reshape(-1)[some])
            seconds[:, at] = own_s[:, self._signature[at]]
        for s, stage in enumerate(stages):
            barred = [n for n in range(1, self._width + 1) if not stage.may_hold(n)]
            if barred:
                seconds[s].reshape(layers, -1)[:, [n - 1 for n in barred]] = np.inf
        stage_s = self._rounded(seconds.reshape(-1) + self._besides_s)
        self._begin(stage_s, ~np.isfinite(stage_s))

    def entries(self, way: tuple[int, ...]) -> list[int]:
        """[stage] Entries of a split."""
        return [
            stage * self._each + first * self._width + end - first - 1
            for stage, (first, end) in enumerate(pairwise(way))
        ]

    def layers(self, entry: int) -> range:
        """Layers of an entry, rising."""
        first, n_less_1 = divmod(entry % self._each, self._width)
        return range(first, first + n_less_1 + 1)

    def _before(self, entry: int) -> range:
        return range(self._place(entry))

    def _stage_of(self, entry: int) -> int:
        return entry // self._each

    def _place(self, entry: int) -> int:
        return entry % self._each // self._width

    def _kinds_of(self, entry: int) -> tuple[int, ...]:
        held = self.layers(entry)
        return self._knapsacks.instance.layers[held.start : held.stop]

    def _like(self, stage: int, entry: int) -> Indices:
        run = entry % self._each
        number = int(self._signature[run])
        if number not in self._same:
            self._same[number] = np.flatnonzero(self._signature == number)
        same = self._same[number]
        if not self._knapsacks.instance.stages[stage].may_hold(run % self._width + 1):
            return same[:0]
        found: Indices = stage * self._each + same
        return found

    def _over(self, per_kind: Floats, scale: Floats) -> Floats:
        until = self._bounds.total(per_kind)
        own = (until[self._end] - until[self._first]).reshape(-1)
        every: Floats = np.multiply.outer(scale, own).reshape(-1)
        return every

    def _rounded(self, values: Floats) -> Floats:
        rounded: Floats = np.round(values / self._quantum) * self._quantum
        return rounded

    def _enough_s(self, entry: int) -> float:
        stage = self._stage_of(entry)
        staged_s = float(self.stage_s[entry] - self._besides_s[entry])
        # A hair more than exactly.
        return (staged_s + 2.0**-46 * self._whole_s) / float(self._knapsacks.time_scale[stage])
