"""The cheapest ways against every split, on random tables that obey no law a pipeline would."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.solver.bottleneck_path import Costs, Way, cheapest
from meshwright.planner.solver.paths import Paths


def best_cuts(costs: Costs, *, cutoff_s: float = math.inf) -> Way | None:
    """Cheapest split by tables [stage, first, layers - 1], its way given by its cuts."""
    shape = costs.stage_s.shape
    steps = Costs(
        in_steps(costs.stage_s),
        in_steps(costs.fill_s),
        tuple(map(in_steps, costs.once_s)),
        costs.steady,
    )
    found = cheapest(every_way(*shape), steps, cutoff_s=cutoff_s)
    return found and replace(found, way=cuts_of(found.way, *shape))


def every_way(stages: int, layers: int, width: int) -> Paths:
    first, end = runs(layers, width)
    return Paths([layers + 1] * (stages + 1), [(first, end)] * stages)


def runs(layers: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """First layers of all runs, and the layers behind them, rising."""
    first, n_less_1 = np.divmod(np.arange(layers * width), width)
    inside = first + n_less_1 < layers
    return first[inside], (first + n_less_1 + 1)[inside]


def in_steps(table: np.ndarray) -> np.ndarray:
    """[step] The entries of a table that lie within the chain, and begin and end as they must."""
    _, layers, width = table.shape
    first, end = runs(layers, width)
    held = np.array([one[first, end - first - 1] for one in table])
    held[0, first > 0] = np.inf
    held[-1, end < layers] = np.inf
    every: np.ndarray = held.reshape(-1)
    return every


def cuts_of(way: tuple[int, ...], _: int, layers: int, width: int) -> tuple[int, ...]:
    _, end = runs(layers, width)
    return (0, *(int(end[step % len(end)]) for step in way))


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [(0, *cut, layers) for cut in inner]


def random_tables(seed: int) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Stage and fill seconds and two tables that count once; holes, half of it whole numbers."""
    rng = np.random.default_rng(seed)
    stages = int(rng.integers(1, 5))
    layers = int(rng.integers(stages, 9))
    width = int(rng.integers(1, layers - stages + 2))
    shape = (stages, layers, width)
    stage_s, fill_s = rng.uniform(0, 10, shape), rng.uniform(-2, 10, shape)
    once_s = rng.uniform(0, 10, (2, *shape))
    if seed % 2:
        stage_s, fill_s, once_s = (np.round(x / 3) for x in (stage_s, fill_s, once_s))
    if seed % 4 >= 2:  # what is slow is cheap, so that the optimum lies many ceilings down
        stage_s = stage_s / 10
        fill_s = 2.0 - stage_s * stage_s.shape[0] + 0.1 * fill_s
        once_s = 2.0 - stage_s - 0.5 * fill_s + 0.05 * once_s
    outside = np.arange(layers)[:, None] + np.arange(1, width + 1) > layers
    holes = (rng.random(shape) < 0.1) | outside
    stage_s[holes] = fill_s[holes] = np.inf
    return stage_s, fill_s, tuple(once_s)


@pytest.mark.spread(90)
@pytest.mark.parametrize("seed", range(120))
@pytest.mark.parametrize("tables", [0, 1, 2])
def test_no_split_is_cheaper(seed: int, tables: int) -> None:
    stage_s, fill_s, once_s = random_tables(seed)
    once_s = once_s[:tables]
    stages, layers, width = stage_s.shape
    steady = [0.0, 1.0, 3.0, 7.0, 15.0][seed % 5]

    def value_s(cuts: tuple[int, ...]) -> float:
        at = [(s, cuts[s], cuts[s + 1] - cuts[s] - 1) for s in range(stages)]
        if any(n >= width or stage_s[s, first, n] == math.inf for s, first, n in at):
            return math.inf
        return (
            steady * max(stage_s[place] for place in at)
            + sum(fill_s[place] for place in at)
            + sum(max(table[place] for place in at) for table in once_s)
        )

    best_s = min(map(value_s, every_split(layers, stages)))

    costs = Costs(stage_s, fill_s, once_s, steady)
    found = best_cuts(costs)

    if best_s == math.inf:
        assert found is None
        return
    assert found is not None
    assert found.value_s == pytest.approx(best_s, abs=1e-9)
    assert value_s(found.way) == pytest.approx(best_s, abs=1e-9)
    none_below = best_cuts(costs, cutoff_s=best_s - 1e-9)
    assert none_below is None


def test_equal_sums_are_cut_as_early_as_possible() -> None:
    cost = np.ones((3, 7, 5))

    found = every_way(3, 7, 5).smallest_sum(in_steps(cost))

    assert found is not None
    assert cuts_of(found, 3, 7, 5) == (0, 1, 2, 7)
