"""What is believed of the steps of all options at once: Gaussian on logarithms, in closed form.

    y_i = ln p_i + x_i·θ + f(family) + t(tensor) + b(micro-batch) + l_i        Σ their covariance
    measured_i = y_i + noise

p_i is the predicted step, x_i its sensitivities, θ the constants of the cluster.  All terms are
normal with mean 0; what the options have in common is K, times one unknown scale s whose inverse
is gamma with ν degrees of freedom: clusters differ in how far predictions miss.  After trials I
with residuals r = measured - ln p

    s     = (ν + r·(K[I, I] + noise²)⁻¹ r) / (ν + |I|)
    mean  = ln p + sK[:, I] S⁻¹ r,     S = sK[I, I] + noise²
    covariance = sK - sK[:, I] S⁻¹ sK[I, :],     of a t with ν + |I| degrees of freedom

(docs/tuning.md has a worked number.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.tuning.options import CONSTANTS, TrialOption

Array = NDArray[np.float64]

FAMILY, TENSOR, MICRO_BATCH, LAYOUT = 0.06, 0.04, 0.065, 0.08
"""Spreads of what options of one family, of one tensor degree, of one micro-batch have in common
beside the constants, and of what each has alone."""
KEPT_AT_SCALE = 0.6
"""Of what two options have in common, for each doubling of devices between them."""
DEGREES_OF_FREEDOM = 6.0
"""How surely the scale is 1 before any trial: as if six had shown it."""
NOISE = 0.02
"""Spread of a trial's median step, where its own steps do not say more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A trial that ran: which option, its step, and how far that may lie off (of the logarithm)."""

    option: int
    step_s: float
    noise: float = NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBelief:
    """What is known of a constant: how its seconds stand to the predicted ones, as a logarithm."""

    name: str
    mean: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Belief after trials: a multivariate t of the logarithms of all steps."""

    mean: Array
    """[option]"""
    covariance: Array
    """[option, option]; the scale is in it."""
    degrees: float
    constants: tuple[ConstantBelief, ...]

    def seconds(self, option: int) -> tuple[float, float, float]:
        """Return the step of an option, and the ends between which 80 of 100 should lie."""
        middle, wide = float(self.mean[option]), 1.28 * self.spread(option)
        return math.exp(middle), math.exp(middle - wide), math.exp(middle + wide)

    def spread(self, option: int) -> float:
        """Return the standard deviation of an option's logarithm."""
        return math.sqrt(max(0.0, float(self.covariance[option, option])))


class Belief:
    """The belief before trials; `after` says what it becomes."""

    def __init__(self, options: Sequence[TrialOption]) -> None:
        names = list(CONSTANTS)
        self._rows = np.array(
            [[one.sensitivities()[name] for name in names] for one in options], dtype=float
        )
        self._weights = np.array([CONSTANTS[name].spread ** 2 for name in names])
        self._predicted = np.log([one.step_s for one in options])
        self._prior = (self._rows * self._weights) @ self._rows.T
        self._prior += FAMILY**2 * _alike(options, lambda one: one.family)
        self._prior += TENSOR**2 * _alike(options, lambda one: one.layout.tensor)
        self._prior += MICRO_BATCH**2 * _alike(options, lambda one: one.layout.micro_batch)
        self._prior += LAYOUT**2 * np.eye(len(options))
        doublings = np.array([one.doublings for one in options])
        self._prior *= KEPT_AT_SCALE ** np.abs(doublings[:, None] - doublings)

    def of_constants(self, names: Collection[str]) -> Array:
        """[option, option] Return what some constants alone add to the covariance before trials."""
        chosen = self._weights * [name in names for name in CONSTANTS]
        shared: Array = (self._rows * chosen) @ self._rows.T
        return shared

    def after(self, trials: Sequence[Timed]) -> Posterior:
        """Return the belief that follows from trials."""
        at = [trial.option for trial in trials]
        residuals = np.log([t.step_s for t in trials]) - self._predicted[at] if at else np.zeros(0)
        noise = np.diag([trial.noise**2 for trial in trials])
        misfit = residuals @ np.linalg.solve(self._prior[np.ix_(at, at)] + noise, residuals)
        degrees = DEGREES_OF_FREEDOM + len(at)
        scale = (DEGREES_OF_FREEDOM + float(misfit)) / degrees
        prior, weights = scale * self._prior, scale * self._weights
        seen = prior[np.ix_(at, at)] + noise
        gains = np.linalg.solve(seen, prior[at]).T  # [option, trial]
        of_constants = np.linalg.solve(seen, self._rows[at] * weights).T  # [constant, trial]
        left = weights - np.einsum("ct,tc->c", of_constants, self._rows[at] * weights)
        return Posterior(
            mean=self._predicted + gains @ residuals,
            covariance=prior - gains @ prior[at],
            degrees=degrees,
            constants=tuple(
                ConstantBelief(name=name, mean=float(mean), spread=math.sqrt(max(0.0, float(rest))))
                for name, mean, rest in zip(CONSTANTS, of_constants @ residuals, left, strict=True)
            ),
        )


def _alike(options: Sequence[TrialOption], key: Callable[[TrialOption], Hashable]) -> Array:
    """[option, option] 1 where two have the same key, else 0."""
    numbers: dict[Hashable, int] = {}
    of = np.array([numbers.setdefault(key(one), len(numbers)) for one in options])
    same: Array = (of[:, None] == of[None, :]).astype(float)
    return same
