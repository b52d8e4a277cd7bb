"""Which options fit: one constant of memory, from runs that ran and runs that ran out of it.

    an option fits  <=>  δ + e_i < margin_i,      δ ~ N(0, COMMON²),  e_i ~ N(0, OWN²)

δ is how far needs of memory on this cluster lie above their predictions, as a logarithm, in units
of the spread behind the predicted probabilities; COMMON² + OWN² = 1, so that those hold before any
trial.  The peak of a run shows δ + e_i, and a run out of memory that it passed the margin.  δ is
one number, so its distribution is stored on a grid and no approximation is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.tuning.trial_options import TrialOption

COMMON = OWN = math.sqrt(0.5)
"""Standard deviations: shared by the plans of a cluster, and of one of them."""
GRID = np.linspace(-4.0, 4.0, 81)
IMPROBABLE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrial:
    """A trial's memory: it ran with this peak, or there was not enough."""

    option: int
    ran: bool
    ratio: float | None = None
    """Measured over predicted peak."""


def fit_probabilities(
    options: Sequence[TrialOption], trials: Sequence[MemoryTrial]
) -> NDArray[np.float64]:
    """[option] Return the probability that each fits; 1 and 0 for those that were tried.

    >>> from meshwright.planner.documents.plan import Layout
    >>> some = [TrialOption(layout=Layout(), kept="", step_s=1.0, parts={"forward": 1.0},
    ...                devices_per_node=8, fit_probability=p) for p in (0.5, 0.6)]
    >>> fit_probabilities(some, [MemoryTrial(option=0, ran=False)]).round(2).tolist()
    [0.0, 0.44]
    """
    margins = np.array([option.margin for option in options])
    weights = -0.5 * (GRID / COMMON) ** 2
    for trial in trials:
        fits = _probability_below(margins[trial.option] - GRID)
        weights += np.log(np.maximum(fits if trial.ran else 1 - fits, IMPROBABLE))
        if trial.ran and trial.ratio:
            above = math.log(trial.ratio) / options[trial.option].memory_spread
            weights -= 0.5 * ((above - GRID) / OWN) ** 2
    density = np.exp(weights - weights.max())
    chances: NDArray[np.float64] = _probability_below(margins[:, None] - GRID) @ (
        density / density.sum()
    )
    for trial in trials:
        chances[trial.option] = float(trial.ran)
    return chances


def _probability_below(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that an option's own part is below a distance."""
    cdf = NormalDist(sigma=OWN).cdf
    return np.array([cdf(float(each)) for each in distance.ravel()]).reshape(distance.shape)
