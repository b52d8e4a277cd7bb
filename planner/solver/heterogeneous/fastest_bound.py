"""Lower bound of every split over stages of several types: each layer at its fastest.

With P_g stages of type g, n_k layers of kind k, t_gk and c_gk a layer's seconds and credit on type
g, and T_g = Σ_k n_k t_gk, a split whose slowest stage takes τ takes, memory and cuts ignored,

    T >= steady · τ + Σ_k n_k min_g (fill · t_gk - c_gk)

and weighing the stages by 1 / T_g gives

    τ Σ_g P_g / T_g  >=  Σ_g (seconds of g's stages) / T_g  >=  Σ_k n_k min_g t_gk / T_g

The slowest stage takes no less than a mean of stages either.  With weights y_g >= 0 that are the
same for all stages of a type, Σ_g P_g y_g = 1,

    T >= Σ_k n_k min_g ((steady y_g + fill) t_gk - c_gk)

which is best where (steady y_g + fill) T_g is the same for every type whose y_g is above 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FastestOnTypes:
    """`counts` [kind], `time_s` and `credits_s` [type, kind], `stages` [type] of a problem."""

    counts: NDArray[np.intp]
    time_s: Floats
    credits_s: Floats
    stages: NDArray[np.intp]
    steady: float
    fill: float

    def weighed_s(self, weights: Floats | float) -> float:
        """Least sum of layers less credits, each on the type where it weighs least."""
        weighed: Floats = np.reshape(weights, (-1, 1)) * self.time_s - self.credits_s
        return float(self.counts @ weighed.min(axis=0))

    def weights(self) -> Floats:
        """[type] How often a stage's seconds count, the slowest as a mean of all."""
        even = even_weights(self.stages, self.time_s @ self.counts, self.steady, self.fill)
        bound_s: Floats = self.steady * even + self.fill
        return bound_s

    def passes_s(self, *, divided: bool = False) -> float:
        """Least that all micro-batches take; `divided` layers may be shared among stages."""
        whole_s, slowest_s = self.time_s @ self.counts, 0.0
        if whole_s.all():
            weighed = float(self.counts @ (self.time_s / whole_s[:, None]).min(axis=0))
            slowest_s = weighed / float((self.stages / whole_s).sum())
        if not divided:
            slowest_s = max(slowest_s, float(self.time_s[:, self.counts > 0].min(axis=0).max()))
        fill_s = self.steady * slowest_s + self.weighed_s(self.fill)
        return max(fill_s, self.weighed_s(self.weights()))


def even_weights(stages: NDArray[np.intp], whole_s: Floats, steady: float, fill: float) -> Floats:
    """[type] Return weights y with Σ stages · y = 1 that even out (steady y + fill) · whole_s.

    Types on which that would take a weight below 0 have 0.  The slowest stage takes no less than
    the mean of all by these weights.

    >>> even_weights(np.array([1, 1]), np.array([1.0, 3.0]), steady=9.0, fill=1.0).round(3).tolist()
    [0.806, 0.194]
    >>> even_weights(np.array([1, 1]), np.array([1.0, 3.0]), steady=1.0, fill=1.0).tolist()
    [1.0, 0.0]
    """
    if steady <= ROUNDING * fill or not whole_s.all():
        return np.zeros(len(stages))
    used = np.ones(len(stages), dtype=bool)
    while True:
        level_s = (steady + fill * stages[used].sum()) / (stages[used] / whole_s[used]).sum()
        above = used & (level_s > fill * whole_s)
        if (above == used).all():
            break
        used = above
    weights: Floats = np.where(used, level_s / whole_s - fill, 0.0)
    return weights / float(stages @ weights)
