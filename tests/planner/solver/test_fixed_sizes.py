"""Splits whose stages hold given numbers of layers, against the list of all such splits."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver import ilp
from meshwright.planner.solver.partition_problem import CutOff, Infeasible, Instance, Solution
from tests.planner.solver.small_instances import all_splits, objective_s, random_instance

Row = tuple[tuple[int, int], ...]


def with_rows(seed: int) -> Instance:
    """Return a small problem of which a few rows of sizes are asked for."""
    rng = random.Random(seed)
    instance = random_instance(seed, sync_by_option=seed % 2 == 0)
    layers, stages = len(instance.layers), len(instance.stages)

    def span() -> tuple[int, int]:
        least = rng.randint(1, layers)
        return least, rng.randint(least, layers)

    rows = {tuple(span() for _ in range(stages)) for _ in range(rng.randint(1, 3))}
    return replace(instance, sizes=tuple(sorted(rows)))


def keeps(row: Row, cuts: tuple[int, ...]) -> bool:
    sizes = [end - first for first, end in pairwise(cuts)]
    return all(least <= size <= most for size, (least, most) in zip(sizes, row, strict=True))


def least_s(instance: Instance) -> float:
    """Return the seconds of the best split of all that keep a row; inf if none does."""
    return min(
        (
            objective_s(instance, cuts, options)
            for cuts, options in all_splits(instance)
            if any(keeps(row, cuts) for row in instance.sizes)
        ),
        default=math.inf,
    )


@pytest.mark.parametrize("start", range(0, 240, 60))
@pytest.mark.long("180", "60")
def test_no_split_of_the_rows_beats_the_solution(start: int) -> None:
    possible = 0
    for seed in range(start, start + 60):
        instance = with_rows(seed)
        best_s = least_s(instance)

        answer = inner.solve(instance)

        if best_s == math.inf:
            assert isinstance(answer, Infeasible)
            assert answer.reason
            continue
        possible += 1
        assert isinstance(answer, Solution)
        assert any(keeps(row, answer.cuts) for row in instance.sizes)
        assert answer.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
        assert answer.optimal
        hair_s = 1e-6 * abs(best_s) + 1e-9
        above = inner.solve(instance, cutoff_s=best_s + hair_s)
        below = inner.solve(instance, cutoff_s=best_s - hair_s)
        assert isinstance(above, Solution)
        assert isinstance(below, CutOff | Infeasible)

    assert 10 < possible < 60


@pytest.mark.parametrize("seed", range(0, 40))
def test_the_integer_program_keeps_the_same_rows(seed: int) -> None:
    instance = with_rows(seed)
    exact = inner.solve(instance)

    program = ilp.solve(instance)

    assert isinstance(program, Solution) == isinstance(exact, Solution)
    if isinstance(exact, Solution) and isinstance(program, Solution):
        assert program.objective_s == pytest.approx(exact.objective_s, rel=1e-6, abs=1e-6)
