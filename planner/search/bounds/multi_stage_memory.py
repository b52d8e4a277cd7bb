"""Lower bounds of the memory of ranks with several stages, for many pipelines at once.

The formulas are those of meshwright.planner.search.bounds.memory_bounds.

Arrays are [rank], or [stage of the rank, rank]; all ranks have V stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_HALVINGS = 5
_LOWEST = 0.25
"""Lowest α, which a solver's stage counts as micro-batches in flight."""


class StageMemorySpread(NamedTuple):
    """[rank] Multiple of what a layer stores; bytes of a layer beside that, and of all of them."""

    in_flight: Floats
    each_bytes: Floats
    fixed_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """Memory of a rank: alive, waiting and free, and the least and most bytes of a like layer."""

    alive: Floats
    kept_bytes: Floats
    """Bytes kept of what waits, for each like layer of a stage."""
    free_bytes: Floats
    number: Floats
    """Like layers of a mean rank."""
    least_stored: Floats
    most_stored: Floats
    resident: Floats

    def layer_bytes(self, alpha: Floats) -> Floats:
        """[stage, rank] Bytes of a like layer there beside α of its stored ones, at least."""
        stored = np.where(self.alive < alpha, self.most_stored, self.least_stored)
        layer_bytes: Floats = (self.alive - alpha) * stored + self.kept_bytes
        return layer_bytes

    def alpha(self) -> Floats:
        """Return a_c of the stage up to which a mean rank has to store less to fit."""
        virtual = len(self.alive)
        left = self.free_bytes / self.number - self.resident
        left -= (self.kept_bytes + self.alive * self.least_stored).sum(axis=0) / virtual
        more = (self.most_stored - self.least_stored) / virtual
        lowest: Floats = np.maximum(_LOWEST, self.alive.min(axis=0))
        alpha: Floats = np.where(left < 0, self.alive[-1], self.alive.max(axis=0))
        for count in reversed(self.alive):
            fits = left >= 0
            left = left - count * more
            alpha = np.where(fits & (left < 0), count, alpha)
        alpha = np.maximum(alpha, lowest)
        for _ in range(_HALVINGS):
            # Where the leanest layers would hold less than nothing it is less.
            lower = self._leanest(alpha)
            if not (lower < 0).any():
                return alpha
            alpha = np.where(lower < 0, (alpha + lowest) / 2, alpha)
        return np.where(self._leanest(alpha) < 0, lowest, alpha)

    def _leanest(self, alpha: Floats) -> Floats:
        """Return what a like layer has at least."""
        mean: Floats = self.layer_bytes(alpha).mean(axis=0)
        return mean + alpha * self.least_stored + self.resident


def evenly(ranks: RankMemory) -> StageMemorySpread:
    """Return what ranks count whose stages are alike up to a layer, the later ones larger."""
    virtual, alpha = len(ranks.alive), ranks.alpha()
    layer_bytes = ranks.layer_bytes(alpha)
    slope = layer_bytes.sum(axis=0) / virtual
    behind = np.cumsum(layer_bytes[::-1], axis=0)[:-1]
    beside = behind - np.arange(1, virtual)[:, None] * slope
    return StageMemorySpread(alpha, slope, np.minimum(0.0, beside.min(axis=0)))


def alike(ranks: RankMemory) -> StageMemorySpread:
    """Return what ranks count that may have any layers on any stage."""
    lowest = np.maximum(_LOWEST, ranks.alive.min(axis=0))
    layer_bytes = ranks.layer_bytes(lowest).min(axis=0)
    return StageMemorySpread(lowest, layer_bytes, np.zeros(len(lowest)))


def evenly_but(ranks: RankMemory, relieved: NDArray[np.bool_]) -> StageMemorySpread:
    """Return what ranks count whose stages are alike up to a layer, but for `relieved` [rank].

    Their last stage takes what the other ranks leave.
    """
    both = zip(alike(ranks), evenly(ranks), strict=True)
    return StageMemorySpread(*(np.where(relieved, free, even) for free, even in both))
