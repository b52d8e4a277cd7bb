"""Where to cut a chain, given what every stage would cost for every run of layers.

A table `x[stage, first, n - 1]` says what `stage` costs with the n layers from `first` on; inf
where it cannot hold them.  `best_cuts` minimises exactly

    steady · max_s stage_s + Σ_s fill_s + max_s once_s + ...

by threshold descent: the smallest Σ fill under a ceiling on stage_s is one dynamic program.  With
its solution (maximum τ, sum S) known, every other split below the ceiling and not below τ costs at
least as much, so the next ceiling lies strictly below τ; S only grows as the ceiling falls, so
steady · τ_min + S bounds all that is left.  A ceiling on each table whose largest entry counts once
descends around it the same way.

Among equal sums the dynamic program takes the earliest cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Two sums of the same seconds in different orders; a bound this close to the incumbent meets it.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Cuts:
    """Positions 0 = cuts[0] < ... < cuts[P] = L, and the parts of what they cost."""

    cuts: tuple[int, ...]
    largest_s: float
    fill_s: float
    once_s: float
    value_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Tables [stage, first, n - 1] of what is minimised; all are inf where a stage cannot hold it.

    `once_s` are tables whose largest entry counts once (they need not be inf anywhere).
    """

    stage_s: Floats
    fill_s: Floats
    once_s: tuple[Floats, ...]
    steady: float


def meets(bound_s: float, incumbent_s: float) -> bool:
    """Whether nothing above `bound_s` can improve on the incumbent."""
    return bound_s >= incumbent_s - _ROUNDING * abs(incumbent_s)


class _Tails:
    """Two rows of best values by position, seen as windows [first, n - 1] -> value[first + n]."""

    def __init__(self, layers: int, width: int) -> None:
        self._layers = layers
        self._rows = [np.full(layers + width + 1, np.inf) for _ in range(2)]
        self._windows = [
            as_strided(row[1:], (layers, width), row.strides * 2) for row in self._rows
        ]
        self._now = 0

    def start(self) -> Floats:
        """Windows when no stage is left: only the end of the chain is reached."""
        self._rows[self._now][: self._layers] = np.inf
        self._rows[self._now][self._layers] = 0.0
        return self._windows[self._now]

    def step(self, values: Floats) -> Floats:
        """Windows after one more stage in front."""
        self._now = 1 - self._now
        row = self._rows[self._now]
        row[: self._layers] = values
        row[self._layers] = np.inf
        return self._windows[self._now]


class Chain:
    """The dynamic programs over one shape of table; it keeps their work arrays."""

    def __init__(self, stages: int, layers: int, width: int) -> None:
        self._shape = (stages, layers, width)
        self._tails = _Tails(layers, width)
        self._total = np.empty((layers, width))
        self._rows = np.arange(layers) * width
        self._picks = np.empty((stages, layers), dtype=np.intp)

    def smallest_maximum(self, cost: Floats) -> float:
        """Least possible maximum of `cost` over the stages; inf if the chain cannot be split."""
        total = self._total
        windows = self._tails.start()
        best = np.empty(0)
        for s in range(self._shape[0] - 1, -1, -1):
            np.maximum(cost[s], windows, out=total)
            best = total.min(axis=1)
            windows = self._tails.step(best)
        return float(best[0])

    def smallest_sum(self, cost: Floats) -> tuple[int, ...] | None:
        """Earliest cuts with the least sum of `cost`, None if the chain cannot be split."""
        stages = self._shape[0]
        total, picks = self._total, self._picks
        flat = total.reshape(-1)
        windows = self._tails.start()
        best = np.empty(0)
        for s in range(stages - 1, -1, -1):
            np.add(cost[s], windows, out=total)
            pick = total.argmin(axis=1, out=picks[s])
            best = flat[self._rows + pick]
            windows = self._tails.step(best)
        if not np.isfinite(best[0]):
            return None
        cuts = [0]
        for s in range(stages):
            cuts.append(cuts[-1] + int(picks[s, cuts[-1]]) + 1)
        return tuple(cuts)


def along(table: Floats, cuts: tuple[int, ...]) -> list[float]:
    """Entries of `table` that a split uses, stage by stage."""
    return [
        float(table[s, first, end - first - 1]) for s, (first, end) in enumerate(pairwise(cuts))
    ]


def price(costs: Costs, cuts: tuple[int, ...]) -> Cuts:
    """Evaluate a split on the tables."""
    largest_s = max(along(costs.stage_s, cuts))
    sum_s = sum(along(costs.fill_s, cuts))
    once_s = sum(max(along(table, cuts)) for table in costs.once_s)
    return Cuts(cuts, largest_s, sum_s, once_s, costs.steady * largest_s + sum_s + once_s)


def best_cuts(costs: Costs, *, cutoff_s: float = np.inf) -> Cuts | None:
    """Cheapest split, or None if there is none below `cutoff_s`."""
    return _under_ceilings(Chain(*costs.stage_s.shape), costs, cutoff_s)


def _under_ceilings(chain: Chain, costs: Costs, cutoff_s: float) -> Cuts | None:
    """Minimise by a falling ceiling on the first of the tables that count once, if there is one."""
    if not costs.once_s:
        return _descend(chain, costs, cutoff_s)
    first_s, *others_s = costs.once_s
    least_s = chain.smallest_maximum(np.where(np.isfinite(costs.stage_s), first_s, np.inf))
    best: Cuts | None = None
    ceiling_s = np.inf
    while ceiling_s >= least_s:
        allowed = first_s <= ceiling_s
        below = replace(
            costs,
            stage_s=np.where(allowed, costs.stage_s, np.inf),
            fill_s=np.where(allowed, costs.fill_s, np.inf),
            once_s=tuple(others_s),
        )
        found = _under_ceilings(chain, below, cutoff_s - least_s)
        if found is None:
            break
        whole = price(costs, found.cuts)
        if whole.value_s < cutoff_s:
            best, cutoff_s = whole, whole.value_s
        ceiling_s = float(np.nextafter(max(along(first_s, found.cuts)), -np.inf))
    return best


def _descend(chain: Chain, costs: Costs, cutoff_s: float) -> Cuts | None:
    """Minimise steady · max + Σ fill by a falling ceiling on the maximum."""
    stage_s, fill_s, steady = costs.stage_s, costs.fill_s, costs.steady
    least_max_s = chain.smallest_maximum(stage_s)
    freest = chain.smallest_sum(fill_s)
    if freest is None or not np.isfinite(least_max_s):
        return None
    least_sum_s = sum(along(fill_s, freest))
    if meets(steady * least_max_s + least_sum_s, cutoff_s):
        return None
    best: Cuts | None = None

    def under(ceiling_s: float) -> Cuts:
        cuts = chain.smallest_sum(np.where(stage_s <= ceiling_s, fill_s, np.inf))
        assert cuts is not None, "the ceiling is never below the least maximum"
        return price(costs, cuts)

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
