"""Splits whose stages hold more than sums over layers say, against the list of all splits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.solver import ilp
from planner.solver.inner import solve
from planner.solver.instance import (
    Infeasible,
    Instance,
    Solution,
    UsedBytes,
    fits,
    priced,
    stage_bytes,
)
from tests.planner.small_instances import all_splits, random_instance


def with_more_bytes(instance: Instance, seed: int) -> Instance:
    """Return the instance with stages that hold more, by what they hold and in which order."""

    def used_bytes(
        stage: int, _: Sequence[int], held: Sequence[int], options: Sequence[int]
    ) -> float:
        first = held[0]
        kinds = instance.layers[first : first + len(options)]
        rng = random.Random(f"{seed} {stage} {kinds} {tuple(options)}")
        padded = [0] * first + list(options)
        sums = stage_bytes(instance, stage, range(first, first + len(options)), padded)
        return sums + rng.choice((0.0, 0.0, 1.0, 5.0, rng.uniform(0, 25)))

    return replace(instance, used_bytes=UsedBytes(used_bytes))


def in_order(instance: Instance, solution: Solution) -> bool:
    """Whether on every stage alike layers that come first take the later options."""
    for first, end in zip(solution.cuts, solution.cuts[1:], strict=False):
        taken: dict[int, int] = {}
        for layer in range(first, end):
            kind, option = instance.layers[layer], solution.options[layer]
            if option > taken.get(kind, option):
                return False
            taken[kind] = option
    return True


@pytest.mark.parametrize("sync_by_option", [False, True])
@pytest.mark.parametrize("start", [0, 60])
def test_the_best_split_that_fits_is_found(start: int, sync_by_option: bool) -> None:
    compared = costs = 0
    for seed in range(start, start + 60):
        plain = random_instance(seed, sync_by_option=sync_by_option)
        instance = with_more_bytes(plain, seed)
        every = (priced(instance, *split) for split in all_splits(instance))
        fitting = [one for one in every if fits(instance, one) and in_order(instance, one)]
        best_s = min((one.objective_s for one in fitting), default=math.inf)

        found = solve(instance)

        if math.isinf(best_s):
            assert isinstance(found, Infeasible), seed
            assert found.reason
            continue
        assert isinstance(found, Solution), seed
        assert fits(instance, found)
        # Ties may be told apart by options out of order, which are no slower.
        assert found.objective_s == pytest.approx(best_s, rel=1e-9), seed
        assert found.optimal
        compared += 1
        bounded = solve(plain)
        assert isinstance(bounded, Solution)
        costs += bounded.objective_s < best_s * (1 - 1e-9)

    assert compared > 20
    assert costs > 2


@pytest.mark.parametrize("start", [0, 40])
def test_the_integer_program_finds_a_split_that_fits_and_a_bound_below_the_best(start: int) -> None:
    compared = 0
    for seed in range(start, start + 40):
        plain = random_instance(seed)
        instance = with_more_bytes(replace(plain, cut_s=()), seed)
        best = solve(instance)

        found = ilp.solve(instance, time_limit_s=10.0)

        if isinstance(found, Infeasible):
            assert isinstance(best, Infeasible)
        if isinstance(found, Solution) and isinstance(best, Solution):
            assert fits(instance, found)
            hair_s = 1e-6 * abs(best.objective_s)
            assert found.lower_bound_s - hair_s <= best.objective_s <= found.objective_s + hair_s
            compared += 1
    assert compared > 10
