"""The integer program of every kind of problem, against the exact solvers and enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.ilp import solve_graph
from meshwright.planner.solver.partition_problem import Infeasible
from meshwright.planner.solver.side_constraints import HostMemory, SideConstraint
from meshwright.planner.solver.solve import solve
from tests.planner.solver import small_graphs
from tests.planner.solver.small_graphs import (
    least_objective_s,
    random_unequal,
    random_unequal_graph,
)


def one_optimum(problem: GraphInstance) -> bool:
    """Solve both ways, compare, and say whether anything fits."""
    exact, found = solve(problem), solve_graph(problem)
    if isinstance(exact, Infeasible):
        assert isinstance(found, Infeasible)
        return False
    assert isinstance(exact, GraphSolution)
    assert isinstance(found, GraphSolution)
    best_s, hair_s = exact.split.objective_s, 1e-6 * abs(exact.split.objective_s) + 1e-6
    assert found.split.objective_s == pytest.approx(best_s, rel=1e-6, abs=1e-6)
    assert found.split.lower_bound_s <= best_s + hair_s
    return True


@pytest.mark.spread(1)
@pytest.mark.parametrize("types", [1, 2, 3])
@pytest.mark.parametrize("made", [random_unequal, random_unequal_graph])
def test_both_ways_lead_to_one_optimum(made: Callable[[int], GraphInstance], types: int) -> None:
    some = (made(seed) for seed in range(300))
    problems = [one for one in some if len(one.types) == types][: 10 - 2 * types]

    assert sum(map(one_optimum, problems)) > 1


def test_the_program_finds_what_enumeration_finds() -> None:
    for seed in range(6):
        problem = random_unequal(seed)
        best_s = least_objective_s(problem)

        found = solve_graph(problem)

        if math.isinf(best_s):
            assert isinstance(found, Infeasible)
        else:
            assert isinstance(found, GraphSolution)
            assert found.split.objective_s == pytest.approx(best_s, rel=1e-6, abs=1e-6)


def test_groups_and_straight_outputs_are_in_the_program() -> None:
    grouped = fitting = 0
    for seed in range(24):
        problem = small_graphs.with_groups(small_graphs.random_graph(seed), seed)
        problem = replace(problem, relayed=seed % 2 == 0, unpaid=(0,) if seed % 4 == 1 else ())
        if math.prod(len(problem.chain.kinds[kind]) for kind in problem.chain.layers) > 200:
            continue
        best_s = small_graphs.least_objective_s(problem)

        found = solve_graph(problem)

        grouped += bool(problem.colocated)
        if math.isinf(best_s):
            assert isinstance(found, Infeasible), seed
            continue
        assert isinstance(found, GraphSolution), seed
        assert found.objective_s == pytest.approx(best_s, rel=1e-6, abs=1e-6), seed
        fitting += 1
    assert grouped > 8
    assert fitting > 8


def test_hosts_are_kept_to() -> None:
    problem = random_unequal(1)
    stages = range(len(problem.chain.stages))
    alone = tuple(
        HostMemory(capacity_bytes=2.0, ranks=tuple(int(s == own) for s in stages)) for own in stages
    )
    fed = replace(
        problem,
        types=tuple(
            replace(
                one,
                chain=replace(
                    one.chain,
                    hosts=alone,
                    kinds=tuple(
                        tuple(replace(o, host_bytes=o.stored_bytes / 2) for o in table)
                        for table in one.chain.kinds
                    ),
                ),
            )
            for one in problem.types
        ),
    )
    free = solve_graph(problem)
    kept = solve_graph(fed)

    assert isinstance(free, GraphSolution)
    assert isinstance(kept, Infeasible) or kept.split.objective_s >= free.split.objective_s  # type: ignore[union-attr]


def random_tie(rng: random.Random, problem: GraphInstance) -> SideConstraint:
    """Return any requirement of some layers, not always in a row."""
    count, stages = len(problem.chain.layers), len(problem.chain.stages)
    some = tuple(sorted(rng.sample(range(count), rng.randint(1, min(2, count)))))
    names = sorted({option.name for table in problem.chain.kinds for option in table})
    return rng.choice(
        [
            SideConstraint(layers=some, together=True),
            SideConstraint(layers=some, stages=(rng.randrange(stages),)),
            SideConstraint(at_most=rng.randint(1, count), stages=(rng.randrange(stages),)),
            SideConstraint(layers=some, options=(names[0],)),
        ]
    )


def test_no_split_that_keeps_what_is_required_is_faster() -> None:
    compared = costs = 0
    for seed in range(60):
        rng, problem = random.Random(seed), small_graphs.random_graph(seed)
        tables = [problem.chain.kinds[kind] for kind in problem.chain.layers]
        if len(tables) > 5 or math.prod(map(len, tables)) > 81:
            continue
        tie, best_s, free_s = random_tie(rng, problem), math.inf, math.inf
        for stage_of in small_graphs.splits(problem):
            for options in itertools.product(*(range(len(table)) for table in tables)):
                seconds = small_graphs.objective_s(problem, stage_of, options)
                free_s = min(free_s, seconds)
                names = [table[o].name for table, o in zip(tables, options, strict=True)]
                if tie.is_kept(stage_of, names):
                    best_s = min(best_s, seconds)

        tied = small_graphs.changed(problem, sides=(tie,))
        found = rng.choice((solve, solve_graph))(tied)

        if math.isinf(best_s):
            assert isinstance(found, Infeasible), seed
            continue
        assert isinstance(found, GraphSolution), seed
        assert found.objective_s == pytest.approx(best_s, rel=1e-6, abs=1e-6), seed
        compared += 1
        costs += best_s > free_s * (1 + 1e-6)
    assert compared > 10
    assert costs > 2
