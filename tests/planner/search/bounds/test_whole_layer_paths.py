"""Paths through ranks with whole layers, beside all splits of few layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.planner.search.bounds.whole_layer_paths import HALVINGS, RankPaths, paths_s

LAYERS = 6


@pytest.mark.parametrize("seed", range(40))
def test_no_split_takes_less_than_the_bound_nor_much_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 5))
    each = rng.uniform(0.5, 1.5, (LAYERS + 1, ranks)) + np.arange(LAYERS + 1)[:, None]
    way = rng.uniform(0.0, 0.4, (LAYERS + 1, ranks)).cumsum(axis=0)
    behind = each - rng.uniform(0.0, 0.5, each.shape)
    each[rng.random(each.shape) < 0.2] = np.inf  # what a rank cannot have
    splits = itertools.product(range(LAYERS + 1), repeat=ranks)
    least = min(
        max(
            max(
                each[n, rank],
                sum(way[m, at] for at, m in enumerate(split[:rank])) + behind[n, rank],
            )
            for rank, n in enumerate(split)
        )
        for split in splits
        if sum(split) == LAYERS
    )
    low, high = np.array([0.5]), np.array([9.0])

    (bound,) = paths_s(RankPaths(np.array([ranks]), each, behind, way), LAYERS, low, high.copy())

    assert bound <= least * (1 + 1e-12)
    step = (high[0] - low[0]) / 2**HALVINGS
    assert bound >= min(least, high[0]) - step * (1 + 1e-9) - 1e-9
