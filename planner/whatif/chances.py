"""Probabilities from ranges: how likely a figure stays within a limit.

A range is of 80 of 100 outcomes and a figure log-normal around its value, with a width of its own
to each side: one outcome in ten lies below `low`, one in ten above `high`, half below `value`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from planner.whatif.span import Span

NORMAL = NormalDist()
DRAWS = 10_000
"""Outcomes that are drawn where a probability has no closed form; their seed is always the same."""
TENTH = NORMAL.inv_cdf(0.9)
"""Standard deviations from the middle to the end of an 80 % range."""


def within(figure: Span, limit: float) -> float:
    """Return the probability that a figure is no greater than a limit.

    >>> span = Span(value=10.0, low=5.0, high=20.0)
    >>> [round(within(span, limit), 3) for limit in (5.0, 10.0, 20.0)]
    [0.1, 0.5, 0.9]
    """
    below, above = figure.spreads()
    if figure.value <= 0:
        return 1.0
    if limit <= 0:
        return 0.0
    distance = math.log(limit / figure.value)
    width = above if distance >= 0 else below
    if width == 0:
        return 1.0 if distance >= 0 else 0.0
    return NORMAL.cdf(TENTH * distance / width)


def quantile(figure: Span, probability: float) -> float:
    """Return what a figure stays below with a probability.

    >>> span = Span(value=10.0, low=5.0, high=20.0)
    >>> [round(quantile(span, probability), 6) for probability in (0.1, 0.5, 0.9)]
    [5.0, 10.0, 20.0]
    """
    below, above = figure.spreads()
    deviations = NORMAL.inv_cdf(probability) / TENTH
    return figure.value * math.exp(deviations * (above if deviations >= 0 else below))


def outcomes_of(figure: Span, normals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return outcomes of a figure, drawn in standard deviations.

    >>> outcomes_of(Span(value=10.0, low=5.0, high=20.0), np.array([-TENTH, 0.0, TENTH])).round(6)
    array([ 5., 10., 20.])
    """
    down, up = figure.spreads()
    return figure.value * np.exp(np.where(normals < 0, down, up) * normals / TENTH)


def sum_within(terms: Sequence[Span], limit: float) -> float:
    """Return the probability that a sum of independent figures is no greater than a limit.

    >>> span = Span(value=10.0, low=5.0, high=20.0)
    >>> sum_within([span, Span(value=2.0, low=2.0, high=2.0)], 22.0) == within(span, 20.0)
    True
    """
    open_ended = [term for term in terms if term.low < term.high]
    left = limit - sum(term.value for term in terms if term not in open_ended)
    if len(open_ended) < 2:
        return within(open_ended[0], left) if open_ended else float(left >= 0)
    generator = np.random.Generator(np.random.PCG64(0))
    drawn = [outcomes_of(term, generator.standard_normal(DRAWS)) for term in open_ended]
    summed = sum(drawn, np.zeros(DRAWS))
    return float(np.mean(summed <= left))
