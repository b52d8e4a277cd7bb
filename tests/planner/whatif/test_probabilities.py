"""Probabilities from ranges, against draws of a program that shares no formula with them."""

from __future__ import annotations

import math
import random

import pytest

from meshwright.planner.whatif.probabilities import probability_within
from meshwright.planner.whatif.uncertain_value import UncertainValue, exact


def draws(span: UncertainValue, count: int, seed: int) -> list[float]:
    """Log-normal to each side of the value, a tenth beyond each end: 1.2815516 widths."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        z = rng.gauss(0.0, 1.0)
        end = span.high / span.value if z > 0 else span.value / span.low
        found.append(span.value * math.exp(z * math.log(end) / 1.2815516))
    return found


def test_within_by_hand() -> None:
    # 10 days, 8 to 15: to 12 days ln(1.2) / ln(1.5) = 0.4496602 of the way to the end, which is
    # 1.2815516 x 0.4496602 = 0.5762628 standard deviations: 0.7178 of outcomes.
    days = UncertainValue(value=10.0, low=8.0, high=15.0)
    assert probability_within(days, 12.0) == pytest.approx(0.7178, abs=1e-4)
    assert [round(probability_within(days, limit), 9) for limit in (8.0, 10.0, 15.0)] == [
        0.1,
        0.5,
        0.9,
    ]
    assert (
        probability_within(exact(5.0), 5.0),
        probability_within(exact(5.0), 4.9),
        probability_within(days, 0.0),
    ) == (1.0, 0.0, 0.0)
