"""fastest_synced against every choice of options."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from planner.solver.synced import Choices, fastest_synced, unbeaten_in_three


def random_choices(rng: random.Random) -> Choices:
    options = rng.randint(1, 4)
    whole = rng.random() < 0.5

    def column() -> np.ndarray:
        return np.array(
            [float(rng.randint(0, 5)) if whole else rng.uniform(0, 5) for _ in range(options)]
        )

    return Choices(load_bytes=column(), time_s=column(), sync_s=column(), count=rng.randint(1, 3))


@pytest.mark.parametrize("seed", range(80))
def test_the_fastest_choice_within_both_limits(seed: int) -> None:
    rng = random.Random(seed)
    groups = [random_choices(rng) for _ in range(rng.randint(1, 2))]
    budget, limit = rng.uniform(0, 20), rng.uniform(0, 20)
    layers = [group for group in groups for _ in range(group.count)]

    found = fastest_synced(groups, budget, limit)

    best_s = math.inf
    for taken in itertools.product(*[range(len(layer.time_s)) for layer in layers]):
        picks = list(zip(layers, taken, strict=True))
        if (
            sum(layer.load_bytes[o] for layer, o in picks) <= budget
            and sum(layer.sync_s[o] for layer, o in picks) <= limit
        ):
            best_s = min(best_s, sum(layer.time_s[o] for layer, o in picks))
    if best_s == math.inf:
        assert found is None
        return
    assert found is not None
    assert found[0] == pytest.approx(best_s, abs=1e-12)
    chosen = [(g, o) for g, options in zip(groups, found[1], strict=True) for o in options]
    assert len(chosen) == len(layers)
    assert sum(g.time_s[o] for g, o in chosen) == pytest.approx(best_s, abs=1e-9)
    assert sum(g.load_bytes[o] for g, o in chosen) <= budget + 1e-9
    assert sum(g.sync_s[o] for g, o in chosen) <= limit + 1e-9
    assert fastest_synced(groups, budget, limit, upper_s=best_s - 1e-9) is None


def test_unbeaten_in_three_crosses_chunks() -> None:
    rng = np.random.default_rng(3)
    points = np.round(rng.uniform(0, 9, (900, 3)))

    kept = unbeaten_in_three(*points.T)

    every = [tuple(p) for p in points.tolist()]
    expected = {
        p
        for p in every
        if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in every)
    }
    assert sorted(map(tuple, points[kept].tolist())) == sorted(expected)
