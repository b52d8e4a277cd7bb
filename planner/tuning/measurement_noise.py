"""Noise of the median of a trial's timed steps, from the steps of all trials.

A few steps that happen to agree show little of how steps vary; those of all trials of a machine do.
Spreads are standard deviations of steps as a share of their median, pooled over trials by degrees
of freedom, and `USUAL_SPREAD` counts as one trial of `USUAL_STEPS`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MEDIAN_NOISE = 1.25
"""Standard error of a median over that of a mean, for normal errors."""
USUAL_SPREAD, USUAL_STEPS = 0.01, 3
"""Relative spread, and number, of steps on a machine that trains nothing else."""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Variation of the steps of a machine's trials."""

    squares: float = (USUAL_STEPS - 1) * USUAL_SPREAD**2
    degrees: int = USUAL_STEPS - 1

    @property
    def spread(self) -> float:
        """Return the standard deviation of a step, as a share."""
        return math.sqrt(self.squares / self.degrees)

    def noise(self, steps: int) -> float:
        """Return the standard error of a median of `steps` steps, as a share.

        >>> round(Steadiness().noise(4), 5)
        0.00625
        """
        return MEDIAN_NOISE * self.spread / math.sqrt(steps)

    def and_trial(self, noise: float, steps: int) -> Steadiness:
        """Return the steadiness with another trial, and that noise of its median."""
        if steps < 2:
            return self
        spread = noise * math.sqrt(steps) / MEDIAN_NOISE
        return Steadiness(self.squares + (steps - 1) * spread * spread, self.degrees + steps - 1)


def noise_of(steps_s: Sequence[float]) -> float:
    """Return the relative standard error of the median of steps by their own spread.

    >>> noise_of([1.0, 1.0, 1.0]), round(noise_of([1.0, 1.1, 0.9, 1.0]), 3)
    (0.0, 0.051)
    """
    if len(steps_s) < 2:
        return 1.0
    error = statistics.stdev(steps_s) / math.sqrt(len(steps_s))
    return MEDIAN_NOISE * error / statistics.median(steps_s)
