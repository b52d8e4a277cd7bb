"""Belief about the steps of all options at once: Gaussian on logarithms, in closed form.

    y_i = ln p_i + x_i·θ + n_i + l_i        Σ their covariance
    measured_i = y_i + noise

p_i is the predicted step, x_i its sensitivities, θ the constants of the cluster, n_i what option i
has in common with its neighbours and l_i what it has alone.  All terms are normal with mean 0; what
the options have in common is K, times one unknown scale s whose inverse is gamma with ν degrees of
freedom: clusters differ in how far predictions miss.  After trials I with residuals
r = measured - ln p

    s     = (ν + r·(K[I, I] + noise²)⁻¹ r) / (ν + |I|)
    mean  = ln p + sK[:, I] S⁻¹ r,     S = sK[I, I] + noise²
    covariance = sK - sK[:, I] S⁻¹ sK[I, :],     of a t with ν + |I| degrees of freedom

(docs/explanation/tuning.md has a worked number.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.tuning.trial_options import CONSTANTS, TrialOption

Array = NDArray[np.float64]

NEIGHBOURS, LAYOUT = 0.14, 0.04
"""Spread that options share beside the constants, more so the nearer they are; and the spread of
each option alone."""
NEXT = 0.7
"""Factor on the shared spread of two options for each doubling between their tensor degrees, stages
and micro-batches."""
KEPT_AT_SCALE = 0.6
"""Factor on the shared spread of two options for each doubling of devices between them."""
DEGREES_OF_FREEDOM = 6.0
"""Certainty that the scale is 1 before any trial: as much as from six trials."""
NOISE = 0.02
"""Spread of a trial's median step, unless its own steps are noisier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A trial that ran: its option, its step, and the error of the step's logarithm."""

    option: int
    step_s: float
    noise: float = NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBelief:
    """Belief about a constant: the logarithm of its seconds over the predicted ones."""

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
        """Return the step of an option, and the range that contains 80 of 100 steps."""
        middle, wide = float(self.mean[option]), 1.28 * self.spread(option)
        return math.exp(middle), math.exp(middle - wide), math.exp(middle + wide)

    def spread(self, option: int) -> float:
        """Return the standard deviation of an option's logarithm."""
        return math.sqrt(max(0.0, float(self.covariance[option, option])))

    def usual_width(self) -> float:
        """Return the logarithm that 80 of 100 steps stay within, of the median option."""
        return 1.28 * float(np.median(np.sqrt(np.maximum(0.0, np.diag(self.covariance)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineKind:
    """Distance of a machine from its predictions: spreads of constants that are not usual."""

    share: float
    """Share of such machines among all."""
    spreads: Mapping[str, float]


FAR = 1.5
"""Spread of a constant of a machine that is several times slower than its sheets: a factor 4.5."""
MACHINES = (
    MachineKind(share=0.9, spreads={}),
    MachineKind(share=0.05, spreads={"kernels": FAR}),
    MachineKind(
        share=0.05, spreads=dict.fromkeys(("inner links", "outer links", "data links"), FAR)
    ),
)
TURNS = 4
"""Number of times that a belief is recomputed about the constants that it found."""
FARTHEST = 5.0
"""Largest logarithm by which a constant is taken to have moved: a factor of 150."""


@dataclass(frozen=True, slots=True)
class _Tangent:
    """Linear form of the steps' logarithms in the constants, about some values of them."""

    rows: Array
    """[option, constant]"""
    steps: Array
    """[option] Values of the lines at constants as predicted."""


@dataclass(frozen=True, slots=True)
class _Conditioned:
    """A belief about one kind of machine."""

    mean: Array
    covariance: Array
    constants: Array
    spreads: Array
    evidence: float
    """Logarithm of how likely the trials are, times the share of such machines."""


class Belief:
    """The belief before trials; `after` returns the belief after trials."""

    def __init__(self, options: Sequence[TrialOption]) -> None:
        self._options = options
        self._own = NEIGHBOURS**2 * _nearness(options) + LAYOUT**2 * np.eye(len(options))
        self._kept = KEPT_AT_SCALE ** _distances([option.doublings for option in options])
        self._unmoved = self._tangent(np.zeros(len(CONSTANTS)))

    def _tangent(self, constants: Array) -> _Tangent:
        factors = dict(zip(CONSTANTS, np.exp(constants).tolist(), strict=True))
        rows = np.array([list(option.sensitivities(factors).values()) for option in self._options])
        steps = np.log([option.moved_s(factors) for option in self._options])
        return _Tangent(rows, steps - rows @ constants)

    def of_constants(self, names: Collection[str]) -> Array:
        """[option, option] Return what some constants alone add to the covariance before trials."""
        rows = self._unmoved.rows
        chosen = _variances({}) * [name in names for name in CONSTANTS]
        shared: Array = (rows * chosen) @ rows.T
        return shared

    def posterior_after(self, trials: Sequence[Timed]) -> Posterior:
        """Return the belief that follows from trials."""
        kinds = MACHINES if trials else MACHINES[:1]
        each = [self._condition_on(machine, trials) for machine in kinds]
        evidence = np.array([hypothesis.evidence for hypothesis in each])
        shares = np.exp(evidence - evidence.max())
        shares /= shares.sum()
        mean, covariance = _mix_distributions(
            [(hypothesis.mean, hypothesis.covariance) for hypothesis in each], shares
        )
        moved, of_moved = _mix_distributions(
            [(hypothesis.constants, np.diag(hypothesis.spreads**2)) for hypothesis in each], shares
        )
        return Posterior(
            mean=mean,
            covariance=covariance,
            degrees=DEGREES_OF_FREEDOM + len(trials),
            constants=tuple(
                ConstantBelief(name=name, mean=float(at), spread=math.sqrt(max(0.0, float(rest))))
                for name, at, rest in zip(CONSTANTS, moved, np.diag(of_moved), strict=True)
            ),
        )

    def _condition_on(self, machine: MachineKind, trials: Sequence[Timed]) -> _Conditioned:
        """Return the belief on one kind of machine."""
        weights = _variances(machine.spreads)
        at = [trial.option for trial in trials]
        measured = np.log([trial.step_s for trial in trials]) if at else np.zeros(0)
        noise = np.diag([trial.noise**2 for trial in trials])
        degrees = DEGREES_OF_FREEDOM + len(at)
        constants = np.zeros(len(CONSTANTS))
        for turn in range(TURNS if at else 1):
            tangent = self._unmoved if turn == 0 else self._tangent(constants)
            rows = tangent.rows
            prior = ((rows * weights) @ rows.T + self._own) * self._kept
            residuals = measured - tangent.steps[at]
            observed = prior[np.ix_(at, at)] + noise
            misfit = float(residuals @ np.linalg.solve(observed, residuals))
            scale = (DEGREES_OF_FREEDOM + misfit) / degrees
            seen = scale * prior[np.ix_(at, at)] + noise
            of_constants = scale * np.linalg.solve(seen, rows[at] * weights).T
            constants = np.clip(of_constants @ residuals, -FARTHEST, FARTHEST)
        gains = scale * np.linalg.solve(seen, prior[at]).T  # [option, trial]
        left = scale * (weights - np.einsum("ct,tc->c", of_constants, rows[at] * weights))
        likely = -0.5 * (
            float(np.linalg.slogdet(observed)[1])
            + degrees * math.log1p(misfit / DEGREES_OF_FREEDOM)
        )
        return _Conditioned(
            mean=tangent.steps + gains @ residuals,
            covariance=scale * prior - scale * gains @ prior[at],
            constants=constants,
            spreads=np.sqrt(np.maximum(0.0, left)),
            evidence=likely + math.log(machine.share),
        )


def _variances(spreads: Mapping[str, float]) -> Array:
    """[constant] Return variances before trials, some of them other than usual."""
    return np.array(
        [spreads.get(name, constant.spread) ** 2 for name, constant in CONSTANTS.items()]
    )


def _mix_distributions(parts: Sequence[tuple[Array, Array]], shares: Array) -> tuple[Array, Array]:
    """Return mean and covariance of a mixture of distributions, each with its own."""
    mean = sum(share * each for share, (each, _) in zip(shares, parts, strict=True))
    covariance = sum(
        share * (spread + np.outer(each - mean, each - mean))
        for share, (each, spread) in zip(shares, parts, strict=True)
    )
    return np.asarray(mean), np.asarray(covariance)


def _nearness(options: Sequence[TrialOption]) -> Array:
    """[option, option] Return how near two are: 1 as neighbours differ in nothing, 0 in kind."""
    layouts = [option.layout for option in options]
    doublings = (
        _distances([math.log2(layout.tensor) for layout in layouts])
        + _distances([math.log2(layout.pipeline) for layout in layouts])
        + _distances([math.log2(layout.micro_batch) for layout in layouts])
    )
    numbers: dict[Hashable, int] = {}
    kinds = [
        numbers.setdefault((option.kept, option.layout.zero > 1), len(numbers))
        for option in options
    ]
    near: Array = NEXT**doublings * (_distances(kinds) == 0)
    return near


def _distances(values: Sequence[float]) -> Array:
    """[value, value] Return how far each is from each."""
    array = np.array(values, dtype=float)
    apart: Array = np.abs(array[:, None] - array)
    return apart
