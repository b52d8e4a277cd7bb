"""Statistics of predictions against measurements: relative errors, Kendall's tau, regret.

Every function takes plain sequences and returns fractions (0.1 is 10 %); nothing here knows what
was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScore:
    """Errors of predictions relative to the measurements."""

    median_abs_error: float
    mean_abs_error: float
    p90_abs_error: float
    bias: float
    """Mean of signed errors: above 0, predictions are too large."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryScore:
    """Shares of right and wrong predictions of 'fits' and 'does not fit' among n."""

    accuracy: float
    false_fits: float
    """Share that was predicted to fit and ran out of memory."""
    false_misfits: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScore:
    """Agreement of the predicted with the measured order of a sweep's layouts, mean over sweeps."""

    kendall_tau: float
    regret: float
    """Measured time of the layout predicted fastest over the fastest measured, less 1."""
    n: int
    """Number of sweeps."""


def error_score(pairs: Sequence[tuple[float, float]]) -> ErrorScore | None:
    """Return the errors of (predicted, measured) pairs; None if there are none.

    >>> error_score([(1.1, 1.0), (0.8, 1.0), (1.0, 1.0)]).median_abs_error
    0.10000000000000009
    """
    if not pairs:
        return None
    errors = [predicted / measured - 1.0 for predicted, measured in pairs]
    sizes = sorted(abs(error) for error in errors)
    return ErrorScore(
        median_abs_error=quantile(sizes, 0.5),
        mean_abs_error=sum(sizes) / len(sizes),
        p90_abs_error=quantile(sizes, 0.9),
        bias=sum(errors) / len(errors),
        n=len(sizes),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ordered values, straight between the two nearest.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def out_of_memory_score(calls: Sequence[tuple[bool, bool]]) -> OutOfMemoryScore | None:
    """Return the agreement of (predicted to fit, ran out of memory); None for no pairs."""
    if not calls:
        return None
    n = len(calls)
    false_fits = sum(fits and failed for fits, failed in calls)
    false_misfits = sum(not fits and not failed for fits, failed in calls)
    return OutOfMemoryScore(
        accuracy=(n - false_fits - false_misfits) / n,
        false_fits=false_fits / n,
        false_misfits=false_misfits / n,
        n=n,
    )


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Kendall's tau-b of (predicted, measured) pairs; None where one side is constant.

        tau_b = (C - D) / sqrt((C + D + T_x) (C + D + T_y))

    C and D count concordant and discordant pairs, T those tied on one side only.  Source: Kendall,
    Biometrika 33 (1945) 239-251.

    >>> kendall_tau([(1, 1), (2, 2), (3, 4), (4, 3)])
    0.6666666666666666
    """
    concordant = discordant = tied_x = tied_y = 0
    for i, (x, y) in enumerate(pairs):
        for other_x, other_y in pairs[:i]:
            dx, dy = x - other_x, y - other_y
            if dx == 0 and dy == 0:
                continue
            if dx == 0:
                tied_x += 1
            elif dy == 0:
                tied_y += 1
            elif (dx > 0) == (dy > 0):
                concordant += 1
            else:
                discordant += 1
    untied = concordant + discordant
    scale = math.sqrt((untied + tied_x) * (untied + tied_y))
    return (concordant - discordant) / scale if scale else None


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the relative slowness of the layout predicted fastest against the fastest measured.

    >>> regret([(1.0, 12.0), (2.0, 10.0)])
    0.19999999999999996
    """
    _, chosen = min(pairs)
    return chosen / min(measured for _, measured in pairs) - 1.0


def rank_score(sweeps: Sequence[Sequence[tuple[float, float]]]) -> RankScore | None:
    """Return tau and regret, mean over the sweeps of two layouts or more; None without any."""
    compared = [pairs for pairs in sweeps if len(pairs) > 1]
    taus = [tau for pairs in compared if (tau := kendall_tau(pairs)) is not None]
    if not compared or not taus:
        return None
    return RankScore(
        kendall_tau=sum(taus) / len(taus),
        regret=sum(regret(pairs) for pairs in compared) / len(compared),
        n=len(compared),
    )
