"""Probabilities from ranges: how likely a figure stays within a limit.

A range is of 80 of 100 outcomes and a figure log-normal around its value, with a width of its own
to each side: one outcome in ten lies below `low`, one in ten above `high`, half below `value`.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from planner.whatif.span import Span

NORMAL = NormalDist()
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


def below(one: Span, other: Span) -> float:
    """Return the probability that one figure is below another, both independent.

    >>> a, b = Span(value=1.0, low=0.5, high=2.0), Span(value=2.0, low=1.0, high=4.0)
    >>> round(below(a, b), 3), below(a, a)
    (0.818, 0.5)
    """
    if one.value <= 0 or other.value <= 0:
        return 0.5 if one.value == other.value else float(one.value < other.value)
    distance = math.log(other.value / one.value)
    if distance < 0:
        return 1 - below(other, one)
    width = math.hypot(one.spreads()[1], other.spreads()[0])
    if width == 0:
        return 1.0 if distance > 0 else 0.5
    return NORMAL.cdf(TENTH * distance / width)
