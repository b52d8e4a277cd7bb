"""Choice of the option to try next and of the answer, with its probability.

A trial is worth what it is expected to make the answer faster, for each second that it takes (the
knowledge gradient: Frazier, Powell and Dayanik, INFORMS J. Computing 21 (2009) 599-613).  An answer
is always an option that ran, once one has.  Where predictions foretold the last trial better than
what trials taught, the next is the one predicted fastest: what is learned does no harm.

Which options fit: one constant of memory, from runs that ran and runs that ran out of it.

    an option fits  <=>  δ + e_i < margin_i,      δ ~ N(0, COMMON²),  e_i ~ N(0, OWN²)

δ is how far needs of memory on this cluster lie above their predictions, as a logarithm, in units
of the spread behind the predicted probabilities; COMMON² + OWN² = 1, so that those hold before any
trial.  The peak of a run shows δ + e_i, and a run out of memory that it passed the margin.  δ is
one number, so its distribution is stored on a grid and no approximation is made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.requests.request import SURE_TO_FIT
from meshwright.planner.tuning.measurement_noise import Steadiness
from meshwright.planner.tuning.posterior import NOISE, Array, Belief, Posterior, Timed
from meshwright.planner.tuning.trial_options import PROFILED, TrialOption

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


TRIED_ABOVE = 0.9
"""Probability of fitting below which an option is not tried while others are left to try."""
NEAR = 0.02
"""An answer is as good as the best one if that is no more than this share faster."""
ENOUGH = 0.95
"""Probability that the answer is so good at which trials end."""
DRAWS = 1_000
ALONE = 0.3
"""Share of an answer's untried rivals that counts as independent.  With that exponent the stated
probability that none of them wins agrees with the observed one (docs/results/tuning.md)."""
UNSURE = 2 * NOISE
"""Spread of a measured step beyond which its trial may be repeated."""
TIE = NOISE / 2
"""Difference of logarithms of step times that counts as a tie: a smaller one does not make another
plan the answer, since trials of one plan lie as far apart."""
START_S = 30.0
"""Seconds of a trial before its first step, until a trial has shown fewer."""
STEPS = 12
"""Number of steps of a trial, including warm-up."""
USUAL = NormalDist()
QUANTILES = np.array([USUAL.inv_cdf((k + 0.5) / 16) for k in range(16)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of the trial of an option."""

    option: int
    step_s: float | None
    """Median seconds of a step; None: the trial ran out of memory."""
    noise: float = NOISE
    """Relative standard error of the median, by the trial's own steps."""
    steps: int = 0
    """Number of timed steps; 0: unknown, so that only `noise` counts."""
    memory_ratio: float | None = None
    """Measured peak over predicted peak of memory."""


class Tuner:
    """Knowledge after some trials; each outcome makes a new value."""

    def __init__(
        self,
        options: Sequence[TrialOption],
        outcomes: Sequence[Outcome] = (),
        *,
        stand_ins: int = 0,
        start_s: float = START_S,
        steps: int = STEPS,
    ) -> None:
        """`stand_ins`: that number of the last options are tried instead of the others."""
        self.options, self.outcomes = options, tuple(outcomes)
        self._stand_ins, self._start_s, self._steps = stand_ins, start_s, steps

    @cached_property
    def _belief(self) -> Belief:
        return Belief(self.options)

    def with_outcome(self, outcome: Outcome) -> Tuner:
        """Return the tuner after another trial."""
        tuner = Tuner(
            self.options,
            (*self.outcomes, outcome),
            stand_ins=self._stand_ins,
            start_s=self._start_s,
            steps=self._steps,
        )
        tuner.__dict__["_belief"] = self._belief
        tuner.__dict__["_before_last"] = self
        return tuner

    @cached_property
    def _before_last(self) -> Tuner:
        """Tuner as it was before the last trial."""
        return Tuner(self.options, self.outcomes[:-1], stand_ins=self._stand_ins)

    @property
    def _misled(self) -> bool:
        """True if predictions foretold the last step better than earlier trials did."""
        last = self.outcomes[-1] if self.outcomes else None
        if last is None or last.step_s is None:
            return False
        before, step = self._before_last, math.log(last.step_s)
        believed, predicted = (
            abs(float(each.posterior.mean[last.option]) - step)
            for each in (before, before.without_outcomes)
        )
        return believed > predicted + self._noise(last)

    @cached_property
    def without_outcomes(self) -> Tuner:
        """Tuner before any trial."""
        return Tuner(self.options, stand_ins=self._stand_ins)

    @cached_property
    def posterior(self) -> Posterior:
        """Belief about the steps of all options."""
        return self._belief.posterior_after(
            [
                Timed(option=outcome.option, step_s=outcome.step_s, noise=self._noise(outcome))
                for outcome in self.outcomes
                if outcome.step_s is not None
            ]
        )

    @cached_property
    def fits(self) -> Array:
        """[option] Probability that the option fits in memory."""
        held = [
            MemoryTrial(
                option=outcome.option, ran=outcome.step_s is not None, ratio=outcome.memory_ratio
            )
            for outcome in self.outcomes
        ]
        return fit_probabilities(self.options, held)

    @cached_property
    def steadiness(self) -> Steadiness:
        """Variation of the steps of all trials."""
        steadiness = Steadiness()
        for outcome in self.outcomes:
            if outcome.step_s is not None:
                steadiness = steadiness.and_trial(outcome.noise, outcome.steps)
        return steadiness

    def _noise(self, outcome: Outcome) -> float:
        """Return the relative error of a trial's step, by its own steps and those of all trials."""
        if not outcome.steps:
            return outcome.noise
        return max(NOISE, outcome.noise, self.steadiness.noise(outcome.steps))

    @property
    def tried_options(self) -> frozenset[int]:
        """Options that were tried."""
        return frozenset(outcome.option for outcome in self.outcomes)

    @property
    def best(self) -> Timed | None:
        """The fastest of the options that ran, as it was measured."""
        measured = (self.measured_step(option) for option in self.ran)
        return min(measured, key=lambda step: step.step_s, default=None)

    def measured_step(self, option: int) -> Timed:
        """Return the step that an option was measured to take, over its trials that ran."""
        seen = [
            (outcome.step_s, self._noise(outcome) ** -2)
            for outcome in self.outcomes
            if outcome.option == option and outcome.step_s is not None
        ]
        weights = [weight for _, weight in seen]
        step_s = statistics.fmean((step_s for step_s, _ in seen), weights)
        return Timed(option=option, step_s=step_s, noise=sum(weights) ** -0.5)

    @property
    def _answers(self) -> range:
        """Options that may be the answer."""
        return range(len(self.options) - self._stand_ins)

    @property
    def _triable(self) -> range:
        """Options that may be tried."""
        return range(len(self._answers) if self._stand_ins else 0, len(self.options))

    @property
    def ran(self) -> list[int]:
        """Options that ran."""
        return sorted({outcome.option for outcome in self.outcomes if outcome.step_s is not None})

    @cached_property
    def answer(self) -> int:
        """The fastest option that ran; before, the one believed fastest that surely fits.

        Of those that ran and are within `TIE` of the fastest it is the one that was tried first.
        Where others are tried for it, it is always the one believed fastest.
        """
        measured = [] if self._stand_ins else self.ran
        if not measured:
            return min(self._surest(self._answers, SURE_TO_FIT), key=self._mean)
        least = min(map(self._mean, measured))
        tied = [option for option in measured if self._mean(option) <= least + TIE]
        return min(tied, key=[outcome.option for outcome in self.outcomes].index)

    def _mean(self, option: int) -> float:
        return float(self.posterior.mean[option])

    def _surest(self, among: Sequence[int], above: float) -> list[int]:
        """Return the options that fit with a probability, or those most likely to fit."""
        runnable = [option for option in among if self.fits[option] >= above]
        most = max((float(self.fits[option]) for option in among), default=0.0)
        return runnable or [option for option in among if self.fits[option] == most > 0]

    def next_trial(self, skip: frozenset[int] = frozenset()) -> int | None:
        """Return the option whose trial gains most for each second; None if none is left."""
        sure = self.tried_options - {
            option for option in self.ran if self.posterior.spread(option) > UNSURE
        }
        left = [option for option in self._triable if option not in sure | skip]
        may_run = self._surest(left, TRIED_ABOVE)
        if not may_run:
            return None
        if not self.ran and not self._stand_ins:
            return min(self._surest(left, SURE_TO_FIT), key=self._mean)
        untried = [option for option in may_run if option not in self.tried_options]
        if self._misled and untried and not self._stand_ins:
            return min(untried, key=self.without_outcomes._mean)
        gains = {option: self._gain(option) / self.trial_s(option) for option in may_run}
        return min(may_run, key=lambda option: (-gains[option], self._mean(option)))

    def trial_s(self, option: int) -> float:
        """Return the seconds that a trial is expected to take."""
        return self._start_s + self._steps * math.exp(self._mean(option))

    def _gain(self, option: int) -> float:
        """Return by how much a trial is expected to make the answer faster, as a logarithm.

        The answer gains where another that ran, or the one that is tried, passes it; the gain is
        that of the likeliest of those passes (exact where there is one).
        """
        if self._stand_ins:
            return self._best_spread(option)
        mean, covariance, answer = self.posterior.mean, self.posterior.covariance, self.answer
        spread = math.hypot(self.posterior.spread(option), self._next_noise)
        gain = 0.0
        for other in {*self.ran, option} - {answer}:
            moves = abs(float(covariance[other, option] - covariance[answer, option])) / spread
            if moves:
                behind = float(mean[other] - mean[answer]) / moves
                gain = max(gain, moves * (USUAL.pdf(behind) - behind * USUAL.cdf(-behind)))
        return gain * float(self.fits[option])

    @property
    def _next_noise(self) -> float:
        """Relative standard error of the step of another trial."""
        return max(NOISE, self.steadiness.noise(self._steps))

    def _best_spread(self, option: int) -> float:
        """Return the same of the plan that is believed fastest after it, measured or not."""
        lower = self._mean(self.answer) - self._possible_means(self._undecided_options, option).min(
            axis=0
        )
        return float(lower.mean() * self.fits[option])

    def _possible_means(self, options: Sequence[int], option: int) -> Array:
        """Return the possible means after the trial of an option, [option, quantile]."""
        mean, covariance = self.posterior.mean, self.posterior.covariance
        spread = math.hypot(self.posterior.spread(option), self._next_noise)
        moved: Array = (
            mean[options][:, None] + covariance[options, option][:, None] / spread * QUANTILES
        )
        return moved

    def profile_pays(self, seconds: float) -> bool:
        """Return True if measuring the machine gains more for each second than any trial."""
        among = self._undecided_options
        if len(among) < 2:
            return False
        shared = self._belief.of_constants(PROFILED)[np.ix_(among, among)]
        normal = np.random.default_rng(0).standard_normal((DRAWS, len(among)))
        normal -= normal.mean(axis=0)  # what all have in common decides nothing
        spread = np.linalg.cholesky(shared + ROUNDING * np.eye(len(among)))
        moved = self.posterior.mean[among] + normal @ spread.T
        gained = self._mean(self.answer) - float(moved.min(axis=1).mean())
        trials = (self._best_spread(option) / self.trial_s(option) for option in self._triable)
        return gained / seconds > max(trials, default=0.0)

    @cached_property
    def _undecided_options(self) -> list[int]:
        """Options among which belief alone decides."""
        return self._surest(self._answers, SURE_TO_FIT)

    @cached_property
    def sure(self) -> float:
        """The probability that no option is more than NEAR faster than the answer."""
        mean, covariance = self.posterior.mean, self.posterior.covariance
        spreads = np.sqrt(np.maximum(0.0, np.diag(covariance)))
        may_win = (mean - 4 * spreads < self._mean(self.answer)) & (self.fits > 0)
        among = np.union1d(np.flatnonzero(may_win[: len(self._answers)]), [self.answer])
        rng = np.random.default_rng(0)
        part = covariance[np.ix_(among, among)] + ROUNDING * np.eye(len(among))
        normal = rng.standard_normal((DRAWS, len(among))) @ np.linalg.cholesky(part).T
        degrees = self.posterior.degrees
        steps = mean[among] + normal * np.sqrt(degrees / rng.chisquare(degrees, DRAWS))[:, None]
        fit = rng.random((DRAWS, len(among))) < self.fits[among]
        least = steps[:, int(np.searchsorted(among, self.answer))] + math.log1p(-NEAR)
        slower = ~fit | (steps >= least[:, None])
        of_ran = slower[:, np.isin(among, [*self.ran, self.answer])].all(axis=1)
        measured = float(np.mean(of_ran))
        every = float(np.mean(of_ran & slower.all(axis=1)))
        return measured * math.pow(every / measured, ALONE) if measured else 0.0

    @property
    def is_done(self) -> bool:
        """True if another trial would hardly change the answer."""
        return bool(self.ran) and self.sure >= ENOUGH

    def shift(self) -> Mapping[str, tuple[float, float]]:
        """Return by constant the logarithm of its seconds over the predicted ones; its spread."""
        return {
            constant.name: (constant.mean, constant.spread) for constant in self.posterior.constants
        }
