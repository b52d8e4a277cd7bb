"""Pareto sets and knapsacks against every multiset of options, on tables small enough to list."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from meshwright.planner.solver.frontier import (
    FrontierStore,
    Runs,
    fastest_choice,
    fastest_s,
    hull_steps,
    unbeaten,
)

Table = list[tuple[float, float]]


def random_table(rng: random.Random, options: int) -> Table:
    """(bytes, seconds) per option; often whole numbers, so that sums tie."""
    if rng.random() < 0.5:
        return [(float(rng.randint(0, 6)), float(rng.randint(0, 6))) for _ in range(options)]
    return [(rng.uniform(0, 6), rng.uniform(0, 6)) for _ in range(options)]


def runs_of(table: Table) -> Runs:
    loads, times = zip(*table, strict=True)
    return Runs(np.array(loads), np.array(times))


def every_total(tables: list[tuple[Table, int]]) -> set[tuple[float, float]]:
    """(bytes, seconds) of all ways to choose an option for each layer of each group."""
    choices = [table for table, count in tables for _ in range(count)]
    return {
        (math.fsum(x for x, _ in taken), math.fsum(t for _, t in taken))
        for taken in itertools.product(*choices)
    }


@pytest.mark.parametrize("seed", range(30))
def test_a_set_of_n_layers_holds_exactly_the_unbeaten_multisets(seed: int) -> None:
    rng = random.Random(seed)
    table, count = random_table(rng, rng.randint(1, 4)), rng.randint(1, 5)

    found = runs_of(table).frontier(count)

    totals = every_total([(table, count)])
    unbeaten_totals = sorted(
        (x, t)
        for x, t in totals
        if not any(
            (x2 <= x + 1e-12 and t2 < t - 1e-12) or (x2 < x - 1e-12 and t2 <= t + 1e-12)
            for x2, t2 in totals
        )
    )
    expected = [
        point
        for before, point in zip([(-1.0, -1.0), *unbeaten_totals], unbeaten_totals, strict=False)
        if abs(before[0] - point[0]) > 1e-12
    ]
    assert found.load_bytes == pytest.approx([x for x, _ in expected])
    assert found.time_s == pytest.approx([t for _, t in expected])


@pytest.mark.parametrize("seed", range(30))
def test_the_options_of_a_point_add_up_to_it(seed: int) -> None:
    rng = random.Random(seed)
    table, count = random_table(rng, rng.randint(1, 5)), rng.randint(1, 9)
    runs = runs_of(table)
    found = runs.frontier(count)

    for point in range(len(found.time_s)):
        taken = runs.options(count, point)

        assert len(taken) == count
        assert sum(table[o][0] for o in taken) == pytest.approx(found.load_bytes[point])
        assert sum(table[o][1] for o in taken) == pytest.approx(found.time_s[point])


@pytest.mark.parametrize("seed", range(60))
def test_knapsacks_find_the_fastest_choice_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    tables = [
        (random_table(rng, rng.randint(1, 3)), rng.randint(1, 3)) for _ in range(rng.randint(1, 3))
    ]
    groups = [(runs_of(table), count) for table, count in tables]
    totals = every_total(tables)
    # Sums in another order may exceed the largest by a bit, hence the hair.
    budgets = [rng.uniform(0, 30) for _ in range(5)] + [max(x for x, _ in totals) + 1e-9]

    together = fastest_s(groups, np.array(budgets))

    for budget, fast_s in zip(budgets, together, strict=True):
        best_s = min((t for x, t in totals if x <= budget), default=math.inf)
        assert fast_s == pytest.approx(best_s, abs=1e-12)
        choice = fastest_choice(groups, budget)
        if best_s == math.inf:
            assert choice is None
            continue
        assert choice is not None
        assert choice[0] == pytest.approx(best_s, abs=1e-12)
        taken = [
            table[o]
            for (table, count), (runs, _), point in zip(tables, groups, choice[1], strict=True)
            for o in runs.options(count, point)
        ]
        assert sum(t for _, t in taken) == pytest.approx(best_s, abs=1e-9)
        assert sum(x for x, _ in taken) <= budget + 1e-9
        assert fastest_choice(groups, budget, upper_s=best_s - 1e-9) is None


def test_the_hull_leaves_out_what_a_mixture_beats() -> None:
    added, saved = hull_steps(np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 9.0, 2.0, 2.0]))

    assert added.tolist() == [2.0]
    assert saved.tolist() == [8.0]


def test_of_equal_points_the_first_stays() -> None:
    kept = unbeaten(np.array([1.0, 1.0, 0.0, 2.0]), np.array([5.0, 5.0, 9.0, 5.0]))

    assert kept.tolist() == [2, 0]


def test_equal_tables_share_one_set() -> None:
    store = FrontierStore()
    load, time = np.array([0.0, 2.0]), np.array([3.0, 1.0])

    assert store.runs(load, time) is store.runs(load.copy(), time.copy())
    assert store.runs(load, time) is not store.runs(load, 2 * time)
