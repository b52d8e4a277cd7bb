"""Constants fitted to what was measured: a few numbers that make predictions come true.

Minimised is  Σ_i ρ(ln predicted_i(x) - ln measured_i) + k² Σ_j x_j²

x_j = 0 is a constant's usual value: rates and ratios are usual exp(x), seconds that are added are
usual + unit x, where a unit changes the median run by a tenth.  ρ is Huber's, so that a few odd
runs do not pull all of it, and the second sum keeps constants that runs hardly determine near their
usual values.  A constant is fitted where enough runs feel it, and one whose best value is outside
its bounds is refused and stays at its usual one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.calibration.fitting.fitted_constants import Constant
from meshwright.planner.documents.tolerances import NOTHING, ROUNDING

Floats = NDArray[np.float64]
Predict = Callable[[int, Mapping[str, float]], float]
"""Prediction of a run with some constants: (run, constants) -> seconds or bytes."""

LEAST_RUNS = 3
"""Number of runs that must be sensitive to a constant for each one fitted."""
FELT = 0.02
"""Relative change of a prediction per relative change of a constant from which a run is sensitive
to it."""
HUBER = 0.15
"""Relative error above which a run's pull stops growing."""
KEEP = 0.02
"""k above: a factor e, or a tenth of the median run, counts like an error of 2 % of one run."""
TENTH = 0.1
WORTHWHILE = 0.1
"""Share of the remaining squares that one more constant must take away."""
_PROBE = 1e-4
_STEP = 0.05
_TURNS = 8
_FARTHEST = 2.0
_SMALLEST = 0.02
_CLOSE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfittedConstant:
    """A constant that was not fitted, and why."""

    name: str
    reason: str
    pulled_by: tuple[int, ...] = ()
    """Runs that pull it out of its bounds, the strongest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """Constants that were fitted, and what they are worth."""

    values: dict[str, float]
    refused: tuple[UnfittedConstant, ...]
    before: tuple[float, ...]
    """Relative errors of the predictions with usual constants  [run]."""
    after: tuple[float, ...]
    """Relative errors of the predictions with fitted constants  [run]."""
    left_out: tuple[float, ...]
    """Relative error of each run, with constants fitted to the others  [run]."""


def fit(
    constants: Sequence[Constant], measured: Sequence[float], predict: Predict
) -> FittedConstants:
    """Fit constants to runs."""
    usual = {c.name: c.usual for c in constants}
    predict = _extend_below_zero(predict)
    runs = range(len(measured))
    now = [predict(i, usual) for i in runs]
    refused: list[UnfittedConstant] = []
    chosen: list[_Scaled] = []
    for constant in constants:
        scaled = _scaled_constant(constant, usual, now, predict)
        feeling = int((np.abs(_slopes([scaled], usual, runs, predict)) >= FELT).sum())
        if feeling >= LEAST_RUNS:
            chosen.append(scaled)
            continue
        reason = f"{feeling} runs feel it, and it takes {LEAST_RUNS}"
        refused.append(UnfittedConstant(name=constant.name, reason=reason))
    residuals = np.log(np.array(now) / np.array(measured))
    kept = _telling(_slopes(chosen, usual, runs, predict), residuals)
    for column, scaled in enumerate(chosen):
        if column not in kept:
            reason = f"{len(measured)} runs are explained as well without it"
            if len(kept) == len(measured) // LEAST_RUNS:
                reason = (
                    f"{len(measured)} runs tell {len(kept)} constants at most, {LEAST_RUNS} for "
                    "each, and others explain them better"
                )
            refused.append(UnfittedConstant(name=scaled.of.name, reason=reason))
    chosen = [chosen[column] for column in kept]
    values = dict(usual)
    while chosen:
        values = {**usual, **_best(chosen, measured, predict, usual)}
        outside = [c for c in chosen if not c.of.least <= values[c.of.name] <= c.of.most]
        if not outside:
            break
        worst = max(outside, key=lambda c: _beyond(c.of, values[c.of.name]))
        refused.append(_out_of_bounds(worst.of, values, measured, predict))
        chosen.remove(worst)
        values = dict(usual)
    return FittedConstants(
        values={c.of.name: values[c.of.name] for c in chosen},
        refused=tuple(refused),
        before=tuple(each / seen - 1 for each, seen in zip(now, measured, strict=True)),
        after=tuple(predict(i, values) / measured[i] - 1 for i in runs),
        left_out=_left_out(chosen, values, measured, predict),
    )


def _telling(slopes: Floats, residuals: Floats) -> list[int]:
    """Return the constants that explain the errors, the one that explains most first.

    One by one the constant that leaves the fewest squares beside those chosen before, as long as
    there are runs enough for one more and it takes away a tenth of what was left.
    """
    kept: list[int] = []
    left = _residual_squares(slopes[:, []], residuals)
    while len(kept) < min(slopes.shape[1], len(residuals) // LEAST_RUNS):
        others = [column for column in range(slopes.shape[1]) if column not in kept]
        lefts = [_residual_squares(slopes[:, [*kept, column]], residuals) for column in others]
        best = int(np.argmin(lefts))
        if left <= NOTHING or lefts[best] > (1 - WORTHWHILE) * left:
            break
        left = lefts[best]
        kept.append(others[best])
    return kept


def _residual_squares(slopes: Floats, residuals: Floats) -> float:
    """Return the weighted squares that a linear fit leaves."""
    at = np.zeros(slopes.shape[1])
    after = residuals
    for _ in range(3):  # the weights are those of what is left
        at = at + _move(slopes, after, at)
        after = residuals + slopes @ at
    return float((_weights(after) * after**2).sum())


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A constant and the unit in which it is looked for; None: by its logarithm."""

    of: Constant
    unit: float | None

    def value(self, x: float) -> float:
        """Return the constant at a place; 0 is the usual one."""
        usual = self.of.usual
        return usual * math.exp(x) if self.unit is None else usual + self.unit * x

    def place(self, value: float) -> float:
        """Return the place of a value."""
        if self.unit is None:
            return math.log(value / self.of.usual)
        return (value - self.of.usual) / self.unit


def _scaled_constant(
    constant: Constant, usual: Mapping[str, float], now: Sequence[float], predict: Predict
) -> _Scaled:
    if not constant.added:
        return _Scaled(constant, None)
    more = {**usual, constant.name: constant.usual + _PROBE * constant.most}
    slopes = sorted(
        slope
        for i, before in enumerate(now)
        if (slope := (predict(i, more) / before - 1) / (_PROBE * constant.most)) > 0
    )
    return _Scaled(constant, TENTH / slopes[len(slopes) // 2] if slopes else constant.most)


def _extend_below_zero(predict: Predict) -> Predict:
    """Return predictions that go on straight where added seconds are below none."""

    def extended_prediction(run: int, values: Mapping[str, float]) -> float:
        below = {name: value for name, value in values.items() if value < 0}
        if not below:
            return predict(run, values)
        none = {**values, **dict.fromkeys(below, 0.0)}
        at_none = predict(run, none)
        less = sum(predict(run, {**none, name: -value}) - at_none for name, value in below.items())
        return max(at_none - less, at_none / 100)

    return extended_prediction


def _beyond(constant: Constant, value: float) -> float:
    """Return the distance of a value outside of the bounds, as a ratio of at least 1."""
    if value > constant.most:
        return value / constant.most
    return constant.least / value if value > 0 else math.inf


def _out_of_bounds(
    constant: Constant,
    values: Mapping[str, float],
    measured: Sequence[float],
    predict: Predict,
) -> UnfittedConstant:
    """Return the runs that pull a constant out of its bounds: those that its bound fits worst."""
    above = values[constant.name] > constant.most
    bound = constant.most if above else constant.least
    at_bound = {**values, constant.name: bound}
    pulls = [
        abs(math.log(predict(i, at_bound) / seen)) - abs(math.log(predict(i, values) / seen))
        for i, seen in enumerate(measured)
    ]
    order = sorted(range(len(measured)), key=lambda i: -pulls[i])
    return UnfittedConstant(
        name=constant.name,
        reason=f"the runs want {values[constant.name]:.4g}, {'above' if above else 'below'} "
        f"{bound:.4g}, which is not possible for {constant.what}",
        pulled_by=tuple(i for i in order[:3] if pulls[i] > 0),
    )


def _slopes(
    chosen: Sequence[_Scaled], values: Mapping[str, float], runs: Sequence[int], predict: Predict
) -> Floats:
    """[run, constant] Relative change of a prediction per step of a constant."""
    now = np.array([predict(i, values) for i in runs])
    slopes = np.empty((len(now), len(chosen)))
    for column, constant in enumerate(chosen):
        name = constant.of.name
        moved = constant.value(constant.place(values[name]) + _STEP)
        changed = {**values, name: moved}
        slopes[:, column] = [math.log(predict(i, changed) / now[i]) / _STEP for i in runs]
    return slopes


def _weights(residuals: Floats) -> Floats:
    """Huber's, of the squares."""
    sizes = np.abs(residuals)
    weights: Floats = np.where(sizes <= HUBER, 1.0, HUBER / np.maximum(sizes, ROUNDING))
    return weights


def _move(slopes: Floats, residuals: Floats, away: Floats) -> Floats:
    """Return the Gauss-Newton step; `away` is how far constants are from usual."""
    weighted = _weights(residuals)[:, None] * slopes
    normal = weighted.T @ slopes + KEEP**2 * np.eye(slopes.shape[1])
    target = weighted.T @ residuals + KEEP**2 * away
    step: Floats = np.clip(-np.linalg.solve(normal, target), -_FARTHEST, _FARTHEST)
    return step


def _best(
    chosen: Sequence[_Scaled],
    measured: Sequence[float],
    predict: Predict,
    usual: Mapping[str, float],
) -> dict[str, float]:
    """Return the constants that fit best, without regard to bounds."""
    runs = range(len(measured))
    seen = np.log(np.array(measured))

    def values(at: Floats) -> dict[str, float]:
        return {c.of.name: c.value(float(x)) for c, x in zip(chosen, at, strict=True)}

    def residuals(at: Floats) -> Floats:
        now = {**usual, **values(at)}
        off: Floats = np.array([math.log(predict(i, now)) for i in runs]) - seen
        return off

    def loss(each: Floats, at: Floats) -> float:
        sizes = np.abs(each)
        huber = np.where(sizes <= HUBER, sizes**2, 2 * HUBER * sizes - HUBER**2)
        return float(huber.sum() + KEEP**2 * (at**2).sum())

    at: Floats = np.zeros(len(chosen))
    now = residuals(at)
    for _ in range(_TURNS):
        step = _move(_slopes(chosen, {**usual, **values(at)}, runs, predict), now, at)
        size = 1.0
        while size > _SMALLEST:
            there = residuals(at + size * step)
            if loss(there, at + size * step) < loss(now, at):
                break
            size /= 2
        else:
            break
        at, now = at + size * step, there
        if float(np.abs(size * step).max()) < _CLOSE:
            break
    return values(at)


def _left_out(
    chosen: Sequence[_Scaled],
    values: Mapping[str, float],
    measured: Sequence[float],
    predict: Predict,
) -> tuple[float, ...]:
    """[run] Errors with constants fitted without the run: one step from the constants of all."""
    runs = range(len(measured))
    if not chosen:
        return tuple(predict(i, values) / measured[i] - 1 for i in runs)
    slopes = _slopes(chosen, values, runs, predict)
    residuals = np.array([math.log(predict(i, values) / measured[i]) for i in runs])
    at = np.array([c.place(values[c.of.name]) for c in chosen])
    result = []
    for i in runs:
        others = np.arange(len(measured)) != i
        moved = at + _move(slopes[others], residuals[others], at)
        without = {
            c.of.name: min(max(c.value(float(x)), c.of.least), c.of.most)
            for c, x in zip(chosen, moved, strict=True)
        }
        result.append(predict(i, {**values, **without}) / measured[i] - 1)
    return tuple(result)
