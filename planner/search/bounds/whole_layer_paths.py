"""Lower bounds of the simulated steps of many pipelines, by paths and whole layers.

A rank begins with the forward of its first stage, which the first micro-batch reaches through the
first stages of the ranks before it; behind its last way back, that micro-batch goes back through
them (planner.search.bounds.simulated_cuts).  With n_r like layers on rank r, N of them together,
p_r(n) the least seconds of both ways through its first stage, t_r(n) those of all that it does for
a micro-batch, W_r(n) those of the weight gradients behind its last way back, at most, and σ(n) what
it does once,

    T >= Σ_{s<r} p_s(n_s) + m t_r(n_r) - W_r(n_r) + σ(n_0)        T >= m t_r(n_r) + σ(n_r)

The first ranks have more seconds left than the last ones, but layers are whole: that a rank may
have no n between two neighbours is what neither a mean over the ranks nor the slowest rank sees.
Of all ways in which the first r ranks hold k layers under a limit of T, what lies behind needs to
know the least Σ p alone.  A limit is a bound where no way reaches N on the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]

HALVINGS = 6
"""Number of halvings of the interval in which the least limit lies."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPaths:
    """[n, rank] Seconds of the ranks of all pipelines, those of one in a row, with n like layers.

    A rank cannot have n of them where they are inf.
    """

    ranks: Indices
    """[pipeline] Number of its ranks."""
    alone_s: Floats
    """What a rank does in a step."""
    behind_s: Floats
    """The same from its first forward to its last way back."""
    way_s: Floats
    """What it adds to the paths to the ranks behind it."""

    def for_pipelines(self, pipelines: Indices) -> RankPaths:
        """Return those of some pipelines."""
        ends = np.cumsum(self.ranks)
        kept = [np.arange(ends[at] - self.ranks[at], ends[at]) for at in pipelines.tolist()]
        at = np.concatenate(kept)
        return RankPaths(
            self.ranks[pipelines], self.alone_s[:, at], self.behind_s[:, at], self.way_s[:, at]
        )


def paths_s(paths: RankPaths, layers: int, low_s: Floats, limit_s: Floats) -> Floats:
    """[pipeline] No split takes less; between a bound that is known and the limit."""
    result = low_s.copy()
    for ranks in sorted(set(paths.ranks.tolist())):
        at = np.flatnonzero(paths.ranks == ranks)
        some = _Alike(paths.for_pipelines(at), ranks, layers)
        low, high = low_s[at], limit_s[at]
        open_ = some.possible(high)
        low = np.where(open_, low, high)
        for _ in range(HALVINGS):
            left = np.flatnonzero(open_)
            if not len(left):
                break
            middle_s = (low[left] + high[left]) / 2
            reached = some.for_pipelines(left).possible(middle_s)
            high[left] = np.where(reached, middle_s, high[left])
            low[left] = np.where(reached, low[left], middle_s)
        result[at] = np.maximum(result[at], low * (1 - ROUNDING))
    return result


class _Alike:
    """Pipelines of as many ranks: arrays [rank, n, pipeline]."""

    def __init__(self, paths: RankPaths, ranks: int, layers: int) -> None:
        shape = len(paths.alone_s), len(paths.ranks), ranks
        self._layers = layers
        self._alone_s, self._behind_s, self._way_s = (
            seconds.reshape(shape).transpose(2, 0, 1)
            for seconds in (paths.alone_s, paths.behind_s, paths.way_s)
        )

    def for_pipelines(self, pipelines: Indices) -> _Alike:
        """Return some of them."""
        part: _Alike = object.__new__(_Alike)
        part._layers = self._layers
        part._alone_s = self._alone_s[:, :, pipelines]
        part._behind_s = self._behind_s[:, :, pipelines]
        part._way_s = self._way_s[:, :, pipelines]
        return part

    def possible(self, limit_s: Floats) -> Booleans:
        """[pipeline] Whether some way holds all layers with every path within a limit."""
        layers, count = self._layers, len(limit_s)
        way_s = np.where(self._alone_s <= limit_s, self._way_s, np.inf)
        able = np.isfinite(way_s)
        anywhere: Booleans = np.any(able, axis=2)
        most: Indices = (anywhere * np.arange(able.shape[1])).max(axis=1)
        room_s = limit_s - self._behind_s
        # [rank] Layers that the ranks from it on hold at most, in any pipeline.
        behind = np.append(np.cumsum(most[::-1])[::-1], 0)
        first, least_s = 0, np.zeros((1, count))
        """Least Σ p of the first ranks with `first` layers and more: array [layers, pipeline]."""
        for rank, widest in enumerate(most.tolist()):
            start = max(first, layers - int(behind[rank + 1]))
            end = min(layers, first + len(least_s) - 1 + widest)
            if end < start:
                return np.zeros(count, dtype=bool)
            after_s = np.full((end - start + 1, count), np.inf)
            for n in range(widest + 1):
                # Layers before that make between start and end with these.
                lower, upper = max(first, start - n), min(first + len(least_s) - 1, end - n)
                if upper < lower or not anywhere[rank, n]:
                    continue
                before_s = least_s[lower - first : upper - first + 1]
                there = after_s[lower + n - start : upper + n - start + 1]
                reached_s = np.where(before_s <= room_s[rank, n], before_s + way_s[rank, n], np.inf)
                np.minimum(there, reached_s, out=there)
            first, least_s = start, after_s
        reached: Booleans = np.isfinite(least_s[layers - first])
        return reached
