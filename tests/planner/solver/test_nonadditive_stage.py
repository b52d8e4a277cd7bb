"""Splits whose stages hold more than sums over layers say, against the list of all splits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.planner.solver import ilp
from meshwright.planner.solver import nonadditive_stage as checked
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.partition_problem import (
    Infeasible,
    Instance,
    Solution,
    UsedBytes,
    evaluate_split,
    fits,
    stage_bytes,
)
from tests.planner.solver.small_instances import all_splits, random_instance


def with_more_bytes(instance: Instance, seed: int, *, by_place: bool = False) -> Instance:
    """Return the instance with stages that hold more, by what they hold and in which order.

    With `by_place` the same kinds hold other bytes elsewhere in the chain.
    """

    def used_bytes(
        stage: int, _: Sequence[int], held: Sequence[int], options: Sequence[int]
    ) -> float:
        first = held[0]
        kinds = instance.layers[first : first + len(options)]
        place = f" at {first}" if by_place else ""
        rng = random.Random(f"{seed} {stage} {kinds} {tuple(options)}{place}")
        padded = [0] * first + list(options)
        sums = stage_bytes(instance, stage, range(first, first + len(options)), padded)
        return sums + rng.choice((0.0, 0.0, 1.0, 5.0, rng.uniform(0, 25)))

    def of_many(
        stage: int, before: Sequence[int], held: Sequence[int], ways: NDArray[np.intp]
    ) -> NDArray[np.float64]:
        tables = [range(len(instance.options_of(layer))) for layer in held]
        return np.array(
            [
                min(
                    used_bytes(stage, before, held, options)
                    for options in itertools.product(
                        *(
                            table if option == checked.ANY_OPTION else [option]
                            for table, option in zip(tables, way, strict=True)
                        )
                    )
                )
                for way in ways.tolist()
            ]
        )

    return replace(instance, used_bytes=UsedBytes(used_bytes, by_place, of_many))


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


@pytest.mark.spread(1)
@pytest.mark.long("60-True")
@pytest.mark.parametrize("sync_by_option", [False, True])
@pytest.mark.parametrize("start", [0, 60])
@pytest.mark.matrix
def test_the_best_split_that_fits_is_found(start: int, sync_by_option: bool) -> None:
    compared = costs = 0
    for seed in range(start, start + 60):
        plain = random_instance(seed, sync_by_option=sync_by_option)
        best_s = is_best(with_more_bytes(plain, seed))
        if math.isinf(best_s):
            continue
        compared += 1
        bounded = solve(plain)
        assert isinstance(bounded, Solution)
        costs += bounded.objective_s < best_s * (1 - 1e-9)

    assert compared > 20
    assert costs > 2


@pytest.mark.matrix
def test_alike_layers_may_hold_other_bytes_elsewhere() -> None:
    compared = 0
    for seed in range(200):
        plain = random_instance(seed)
        if len(plain.stages) < 3:  # as many layers are in another place on middle stages alone
            continue
        alike = replace(plain, layers=(0,) * len(plain.layers))

        compared += is_best(with_more_bytes(alike, seed, by_place=True)) < math.inf

    assert compared > 10


def is_best(instance: Instance) -> float:
    """Solve, hold the answer against the best of all splits, and return its seconds."""
    every = (evaluate_split(instance, *split) for split in all_splits(instance))
    fitting = [one for one in every if fits(instance, one) and in_order(instance, one)]
    best_s = min((one.objective_s for one in fitting), default=math.inf)
    found = solve(instance)
    if math.isinf(best_s):
        assert isinstance(found, Infeasible)
        assert found.reason
        return best_s
    assert isinstance(found, Solution)
    assert fits(instance, found)
    # Ties may be told apart by options out of order, which are no slower.
    assert found.objective_s == pytest.approx(best_s, rel=1e-9)
    assert found.optimal
    return best_s


def test_what_was_not_looked_at_any_more_is_left_as_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = 0
    for seed in range(60):
        instance = with_more_bytes(random_instance(seed), seed)
        best = solve(instance)
        with monkeypatch.context() as few:
            few.setattr(checked, "_VISITED", 3)
            found = solve(instance)
        if isinstance(best, Infeasible):
            continue
        assert isinstance(best, Solution)
        assert not isinstance(found, Infeasible)
        hair_s = 1e-9 * abs(best.objective_s)
        assert found.lower_bound_s <= best.objective_s + hair_s
        if isinstance(found, Solution):
            assert fits(instance, found)
            assert found.objective_s >= best.objective_s - hair_s
        gaps += not isinstance(found, Solution) or not found.optimal

    assert gaps > 0


@pytest.mark.parametrize("start", [0, 40])
@pytest.mark.long("40")
def test_the_integer_program_finds_a_split_that_fits_and_a_bound_below_the_best(start: int) -> None:
    compared = 0
    for seed in range(start, start + 40):
        plain = random_instance(seed)
        instance = with_more_bytes(replace(plain, cut_s=()), seed)
        best = solve(instance)

        found = ilp.solve(instance, most_nodes=1_000)

        if isinstance(found, Infeasible):
            assert isinstance(best, Infeasible)
        if isinstance(found, Solution) and isinstance(best, Solution):
            assert fits(instance, found)
            hair_s = 1e-6 * abs(best.objective_s)
            assert found.lower_bound_s - hair_s <= best.objective_s <= found.objective_s + hair_s
            compared += 1
    assert compared > 10
