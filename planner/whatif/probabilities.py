"""Probabilities from ranges: how likely a figure stays within a limit.

A range is of 80 of 100 outcomes and a figure log-normal around its value, with a width of its own
to each side: one outcome in ten lies below `low`, one in ten above `high`, half below `value`.

Futures are drawn as a Latin hypercube: each cause has the same `DRAWS` quantiles of the normal
distribution, in an order of its own.  So the probability of a figure with one cause is the same
whatever the cause is called, and `chances.mjs` draws the same futures.
"""

from __future__ import annotations

import bisect
import math
import zlib
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.whatif.uncertain_value import UncertainValue

NORMAL = NormalDist()
DRAWS = 10_000
"""Futures that are drawn, always the same ones."""
TENTH = NORMAL.inv_cdf(0.9)
"""Standard deviations from the middle to the end of an 80 % range."""
QUANTILES = [NORMAL.inv_cdf((k + 0.5) / DRAWS) for k in range(DRAWS)]
"""Quantiles of the normal distribution, in equal steps of probability."""


def probability_within(figure: UncertainValue, limit: float) -> float:
    """Return the probability that a figure is no greater than a limit.

    >>> span = UncertainValue(value=10.0, low=5.0, high=20.0)
    >>> [round(probability_within(span, limit), 3) for limit in (5.0, 10.0, 20.0)]
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
    return bisect.bisect_right(QUANTILES, TENTH * distance / width) / DRAWS


def quantile(figure: UncertainValue, probability: float) -> float:
    """Return what a figure stays below with a probability.

    >>> span = UncertainValue(value=10.0, low=5.0, high=20.0)
    >>> [round(quantile(span, probability), 6) for probability in (0.1, 0.5, 0.9)]
    [5.0, 10.0, 20.0]
    """
    below, above = figure.spreads()
    deviations = NORMAL.inv_cdf(probability) / TENTH
    return figure.value * math.exp(deviations * (above if deviations >= 0 else below))


def outcomes_of(figure: UncertainValue, normals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return outcomes of a figure, drawn in standard deviations.

    >>> figure = UncertainValue(value=10.0, low=5.0, high=20.0)
    >>> outcomes_of(figure, np.array([-TENTH, 0.0, TENTH])).round(6)
    array([ 5., 10., 20.])
    """
    down, up = figure.spreads()
    return figure.value * np.exp(np.where(normals < 0, down, up) * normals / TENTH)


def order_of(cause: str) -> NDArray[np.int64]:
    """Return the order in which a cause takes the quantiles, the same one whoever asks.

    The k-th key is the bits of crc32(cause) + k 2654435769, mixed; equal keys keep their order.
    """
    steps = np.arange(DRAWS, dtype=np.uint64) * 2_654_435_769
    keys: NDArray[np.uint32] = (steps + zlib.crc32(cause.encode())).astype(np.uint32)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        keys = np.multiply(keys ^ (keys >> shift), factor, dtype=np.uint32)
    return np.argsort(keys ^ (keys >> 15), kind="stable")


@lru_cache(maxsize=64)
def normals(cause: str) -> NDArray[np.float64]:
    """Return a cause's futures in standard deviations."""
    return np.array(QUANTILES)[order_of(cause)]
