"""Where to cut a chain, given what every stage would cost for every run of layers.

A table `x[stage, first, n - 1]` says what `stage` costs with the n layers from `first` on, flat or
not; inf where it cannot hold them.  `planner.solver.descent` has what is minimised.

Among equal sums the dynamic program takes the earliest cuts.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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


class ChainWays:
    """The dynamic programs over one shape of table; it keeps their work arrays."""

    def __init__(self, stages: int, layers: int, width: int) -> None:
        self._shape = (stages, layers, width)
        self._tails = _Tails(layers, width)
        self._total = np.empty((layers, width))
        self._rows = np.arange(layers) * width
        self._picks = np.empty((stages, layers), dtype=np.intp)

    def smallest_maximum(self, cost: Floats) -> float:
        """Least possible maximum of `cost` over the stages; inf if the chain cannot be split."""
        total, cost = self._total, cost.reshape(self._shape)
        windows = self._tails.start()
        best = np.empty(0)
        for s in range(self._shape[0] - 1, -1, -1):
            np.maximum(cost[s], windows, out=total)
            best = total.min(axis=1)
            windows = self._tails.step(best)
        return float(best[0])

    def smallest_sum(self, cost: Floats) -> tuple[int, ...] | None:
        """Earliest cuts with the least sum of `cost`, None if the chain cannot be split."""
        stages, cost = self._shape[0], cost.reshape(self._shape)
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

    def along(self, table: Floats, way: tuple[int, ...]) -> list[float]:
        """[stage] Entries of a table that a split uses."""
        table = table.reshape(self._shape)
        return [
            float(table[s, first, end - first - 1]) for s, (first, end) in enumerate(pairwise(way))
        ]
