"""paths.cheapest is checked against every path there is, where they are few enough to list."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from meshwright.planner.solver.bottleneck_path import Costs, cheapest, evaluate_way
from meshwright.planner.solver.paths import Paths


def random_levels(seed: int) -> tuple[Paths, Costs, list[list[tuple[int, int]]]]:
    rng = random.Random(seed)
    widths = [rng.randint(1, 4) for _ in range(rng.randint(2, 5))]
    steps = [
        sorted(
            (a, b)
            for a, b in itertools.product(range(before), range(after))
            for _ in range(rng.choice([0, 1, 1, 2]))
        )
        for before, after in itertools.pairwise(widths)
    ]
    hops = [
        (np.array([a for a, _ in level], dtype=int), np.array([b for _, b in level], dtype=int))
        for level in steps
    ]
    count = sum(len(level) for level in steps)
    whole = rng.random() < 0.5

    def table(low: int, high: int) -> np.ndarray:
        return np.array(
            [
                float(rng.randint(low, high)) if whole else rng.uniform(low, high)
                for _ in range(count)
            ]
        )

    stage_s = table(0, 6)
    fill_s = table(-3, 6)
    impossible = np.array([rng.random() < 0.15 for _ in range(count)], dtype=bool)
    stage_s[impossible] = fill_s[impossible] = np.inf
    once_s = tuple(table(0, 6) for _ in range(rng.randint(0, 2)))
    costs = Costs(stage_s, fill_s, once_s, float(rng.choice([0, 1, 4, 30])))
    return Paths(widths, hops), costs, steps


def every_path(steps: list[list[tuple[int, int]]]) -> list[tuple[int, ...]]:
    offsets = list(itertools.accumulate((len(level) for level in steps), initial=0))
    numbered = [
        [(offset + i, a, b) for i, (a, b) in enumerate(level)]
        for offset, level in zip(offsets, steps, strict=False)
    ]
    return [
        tuple(number for number, _, _ in path)
        for path in itertools.product(*numbered)
        if all(here[2] == there[1] for here, there in itertools.pairwise(path))
    ]


def value_s(costs: Costs, path: tuple[int, ...]) -> float:
    taken = list(path)
    value = costs.steady * max(costs.stage_s[taken]) if costs.steady else 0.0
    value += sum(costs.fill_s[taken]) + sum(max(table[taken]) for table in costs.once_s)
    return float(value) if np.isfinite(costs.stage_s[taken]).all() else math.inf


@pytest.mark.spread(60)
@pytest.mark.parametrize("seed", range(200))
def test_no_path_is_cheaper(seed: int) -> None:
    paths, costs, steps = random_levels(seed)
    best_s = min((value_s(costs, path) for path in every_path(steps)), default=math.inf)

    found = cheapest(paths, costs)

    if best_s == math.inf:
        assert found is None
        return
    assert found is not None
    assert found.way in every_path(steps)
    assert found.value_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
    assert found == evaluate_way(paths, costs, found.way)


def test_among_equals_the_earliest_steps_are_taken() -> None:
    one = np.array([0, 0, 0]), np.array([0, 1, 1])
    two = np.array([0, 1, 1]), np.array([0, 0, 0])
    costs = Costs(np.ones(6), np.ones(6), (), 3.0)

    found = cheapest(Paths([1, 2, 1], [one, two]), costs)

    assert found is not None
    assert found.way == (0, 3)
    assert found.value_s == 5.0
