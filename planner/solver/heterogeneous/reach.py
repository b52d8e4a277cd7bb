"""Reach of stages under a ceiling, when the order of their types is open.

A stage of type g at position s can hold what one downset I adds to another J under a ceiling of the
seconds t_gs(I, J) that its layers take at least (`planner.solver.bounds.lagrangian_bounds`), none
where their minimum-memory options do not fit.  Stages with n_g of type g, in any order, end at J
under a ceiling of

    F(n, J) = min_{g, I} max(F(n - e_g, I), t_gs(I, J))         s = Σ n - 1

at least, and the mirror image says what those behind them need.  Under a ceiling no lower than both
J can lie between the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.solver.bounds.downsets import Downsets, Runs
from meshwright.planner.solver.bounds.lagrangian_bounds import StepBounds
from meshwright.planner.solver.knapsack import Knapsacks

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Runs of layers that stages may hold under a ceiling.

    `runs` [position] are what some type can hold there, by rising first downset, and `least_s`
    [type][position] the seconds that each takes at least without its cuts, inf where that type
    cannot hold it; `between[counts]` [downset] tells where stages of these counts may end together.
    """

    runs: list[Runs]
    least_s: list[list[Floats]]
    between: dict[Counts, Booleans]


class Reach:
    """Downsets between stages under any ceiling; `knapsacks[type]` have all stages of one type.

    `pairs` are downsets that lie in others, those that matter.  Each of two stages that meet behind
    a downset spends `cut_s` there at least; where all stages are of one type it spends just that.
    """

    def __init__(
        self,
        knapsacks: Sequence[Knapsacks],
        numbers: Sequence[int],
        every: Downsets,
        pairs: Runs,
        cut_s: Floats,
    ) -> None:
        self._full = tuple(numbers)
        self._counts = sorted(product(*(range(n + 1) for n in numbers)), key=sum)
        self._downsets, self._pairs = len(every), pairs
        smaller, larger = pairs
        sizes = every.totals(np.ones((every.layers, 1)))[:, 0]
        stages = knapsacks[0].instance.stages
        fewest = np.array([stage.least_layers for stage in stages])
        most = np.array([math.inf if s.most_layers is None else s.most_layers for s in stages])
        before, behind = np.cumsum(fewest) - fewest, np.cumsum(fewest[::-1])[::-1] - fewest
        at = np.arange(len(fewest))
        # Every stage has layers enough; the first and last have the ends.
        layers = sizes[larger] - sizes[smaller]
        possible = (layers >= fewest[:, None]) & (layers <= most[:, None])
        possible &= sizes[smaller] >= before[:, None]
        possible &= every.layers - sizes[larger] >= behind[:, None]
        possible &= (sizes[smaller] == 0) == (at == 0)[:, None]
        possible &= (sizes[larger] == every.layers) == (at == at[-1])[:, None]
        meets_s = cut_s.copy()
        meets_s[[0, -1]] = 0.0
        paid_s = meets_s if len(knapsacks) == 1 else np.zeros(len(every))
        self._meets_s: Floats = meets_s[smaller] + meets_s[larger]
        self.bounds = [
            StepBounds(knapsack, every, np.arange(len(every)), paid_s) for knapsack in knapsacks
        ]
        self._alone_s: list[Floats] = [
            np.where(possible, bound.stages_s(*pairs), np.inf) for bound in self.bounds
        ]

    @property
    def lowest_ceiling_s(self) -> float:
        """Ceiling below which the stages do not get to the end; inf if none does."""
        return float(self._from_start[self._full][-1])

    @cached_property
    def _from_start(self) -> dict[Counts, Floats]:
        return self._ceilings_s(forward=True)

    @cached_property
    def _from_end(self) -> dict[Counts, Floats]:
        return self._ceilings_s(forward=False)

    def _ceilings_s(self, *, forward: bool) -> dict[Counts, Floats]:
        """[downset] Least ceiling of a way from one end, behind stages of all counts."""
        origin, target = self._pairs if forward else self._pairs[::-1]
        order = np.argsort(target, kind="stable")
        ends, first = np.unique(target[order], return_index=True)
        none, *others = self._counts if forward else self._counts[::-1]
        reached = {none: np.full(self._downsets, np.inf)}
        reached[none][0 if forward else -1] = 0.0
        for counts in others:
            best = np.full(self._downsets, np.inf)
            for g, alone_s in enumerate(self._alone_s):
                before = reached.get(shift_count(counts, g, -1 if forward else +1))
                if before is not None:
                    own_s = alone_s[sum(counts) - forward] + self._meets_s
                    way_s = np.maximum(before[origin], own_s)[order]
                    best[ends] = np.minimum(best[ends], np.minimum.reduceat(way_s, first))
            reached[counts] = best
        return reached

    def spans(self, ceiling_s: float) -> Spans | None:
        """Return what stages may hold; None if they do not get to the end."""
        highest_s = ceiling_s * (1 + SLACK)
        between: dict[Counts, Booleans] = {}
        ends = np.zeros((sum(self._full) + 1, self._downsets), dtype=bool)
        for counts in self._counts:
            reached = np.maximum(self._from_start[counts], self._from_end[counts]) <= highest_s
            if reached.any():
                between[counts] = reached
                ends[sum(counts)] |= reached
        if not between:
            return None
        smaller, larger = self._pairs
        runs, least_s = [], [[] for _ in self._alone_s]  # type: tuple[list[Runs], list[list[Floats]]]
        for position in range(sum(self._full)):
            may_end = ends[position][smaller] & ends[position + 1][larger]
            fitting = [reached[position] + self._meets_s <= highest_s for reached in self._alone_s]
            some = np.logical_or.reduce(fitting) & may_end
            runs.append((smaller[some], larger[some]))
            for kept, alone_s, holds in zip(least_s, self._alone_s, fitting, strict=True):
                kept.append(np.where(holds, alone_s[position], np.inf)[some])
        return Spans(runs=runs, least_s=least_s, between=between)


def shift_count(counts: Counts, place: int, by: int) -> Counts:
    """Counts with one of them changed."""
    return (*counts[:place], counts[place] + by, *counts[place + 1 :])
