"""Orders of axes are those of all permutations that lie on other links."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.planner.documents.plan import INSIDE_OUT, Axis
from meshwright.planner.search.axis_orders import Spans, distinct_orders, spans


def of_all_permutations(
    tiers: tuple[int, ...], degrees: tuple[int, ...]
) -> dict[Spans, tuple[Axis, ...]]:
    divided = [axis for axis, degree in zip(INSIDE_OUT, degrees, strict=True) if degree > 1]
    result: dict[Spans, tuple[Axis, ...]] = {}
    for permuted in itertools.permutations(divided):
        left = iter(permuted)
        order = tuple(next(left) if axis in divided else axis for axis in INSIDE_OUT)
        result.setdefault(spans(tiers, degrees, order), order)
    return result


@pytest.mark.parametrize("seed", range(100))
def test_no_order_is_missed_and_the_nearest_to_the_usual_one_stands_for_all(seed: int) -> None:
    rng = random.Random(seed)
    degrees = tuple(rng.choice([1, 1, 2, 2, 3, 4, 6, 8, 16]) for _ in INSIDE_OUT)
    tiers = tuple(sorted(rng.sample([2, 4, 6, 8, 16, 64, 1024, 10**6], rng.randint(1, 3))))

    assert distinct_orders(tiers, degrees) == of_all_permutations(tiers, degrees)
