"""Cut bounds are below every split there is; splits through some downsets are splits."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.solver.bounds.fractional_bound import Fluid
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import (
    GraphEffort,
    GraphInstance,
    GraphSolution,
    alike,
)
from meshwright.planner.solver.graphs.cut_bounds import CutBounds
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.graphs.nearby import Neighbourhood, along_orders, of_bits
from meshwright.planner.solver.knapsack import Knapsacks
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Option,
    StageLimits,
    Unfinished,
)
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import least_objective_s, random_graph, with_groups


def bounds_of(problem: GraphInstance, programs: int, iterations: int = 10**6) -> CutBounds:
    knapsacks = Knapsacks(problem.chain, FrontierStore())
    fluid = Fluid(knapsacks, least_cut_s=0.0, most_cut_s=sum(problem.sent_s()))
    return CutBounds(problem, fluid, knapsacks.exposed_s, programs=programs, iterations=iterations)


@pytest.mark.spread(1)
@pytest.mark.parametrize("start", range(0, 60, 30))
def test_no_split_is_faster_than_its_cuts_allow(start: int) -> None:
    above_fluid = 0
    for seed in range(start, start + 30):
        problem = with_groups(random_graph(seed), seed)
        best_s = least_objective_s(problem)
        if best_s == math.inf:
            continue
        rng = random.Random(seed)

        plain_s = bounds_of(problem, programs=0).bound_s(math.inf, 0.0)
        few = rng.randint(1, 12)
        few_s = bounds_of(problem, programs=few).bound_s(best_s + 1.0, rng.uniform(0, 3))
        least_s = bounds_of(problem, programs=20).bound_s(best_s + 1.0, rng.uniform(0, 3))

        assert least_s <= best_s * (1 + 1e-9) + 1e-9, seed
        assert max(plain_s, few_s) <= best_s * (1 + 1e-9) + 1e-9, seed
        knapsacks = Knapsacks(problem.chain, FrontierStore())
        fluid = Fluid(knapsacks, least_cut_s=0.0, most_cut_s=sum(problem.sent_s()))
        above_fluid += least_s > fluid.beyond_s(fluid.largest_s, problem.chain.steady) + 1e-6
    assert above_fluid > 3


@pytest.mark.parametrize("seed", range(20))
def test_what_is_near_are_downsets_that_keep_groups(seed: int) -> None:
    problem = with_groups(random_graph(seed), seed)
    count = len(problem.chain.layers)
    every = ideals(problem.readers(), most=1000, colocated=problem.colocated)
    assert every is not None
    known = {tuple(row) for row in every.words.tolist()}

    along = of_bits(along_orders(problem), count)
    near = of_bits(Neighbourhood(problem).cuts([0], 1000), count)

    assert {tuple(row) for row in along.words.tolist()} <= known
    assert len(along) >= len(problem.blocks()) + 1
    assert {tuple(row) for row in near.words.tolist()} == known
    sizes = [sum(bin(word).count("1") for word in row) for row in near.words.tolist()]
    assert sizes == sorted(sizes)


@pytest.mark.spread(1)
@pytest.mark.parametrize("relayed", [True, False])
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_a_graph_with_too_many_downsets_is_bounded_and_split(start: int, relayed: bool) -> None:
    found = 0
    for seed in range(start, start + 20):
        problem = replace(with_groups(random_graph(seed), seed), relayed=relayed)
        best_s = least_objective_s(problem)

        few = {"programs": 12, "most_programs": 6, "most_ideals": 1}
        answer = solve(problem, effort=GraphEffort(**few))

        if best_s == math.inf:
            assert isinstance(answer, Infeasible | Unfinished)
            continue
        if isinstance(answer, Unfinished):
            continue
        assert isinstance(answer, GraphSolution)
        assert answer.lower_bound_s <= best_s * (1 + 1e-9) + 1e-9
        assert answer.objective_s >= best_s * (1 - 1e-9) - 1e-9
        cut = solve(problem, effort=GraphEffort(**few), cutoff_s=best_s * 0.9)
        if isinstance(cut, CutOff):
            assert cut.lower_bound_s <= best_s * (1 + 1e-9) + 1e-9
        # Small graphs are near throughout.
        assert answer.objective_s <= best_s * 1.2 + 1e-9
        found += 1
    assert found > 8


def wide(count: int, seed: int) -> GraphInstance:
    """A graph of many branches, whose downsets are beyond counting."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(max(0, at - 16), at), at) for at in range(1, count)]
    tables = tuple(
        (Option(name="run", forward_s=rng.uniform(1, 3), backward_s=rng.uniform(2, 6)),)
        for _ in range(8)
    )
    chain = Instance(
        layers=tuple(rng.randrange(8) for _ in range(count)),
        kinds=tables,
        stages=(StageLimits(capacity_bytes=1.0),) * 4,
        steady=7.0,
    )
    edges = sorted({*pairs, *((at, count - 1) for at in range(count - 6, count - 1))})
    return alike(chain, edges=edges, output_s=[rng.uniform(0.1, 1) for _ in range(count)])


@pytest.mark.matrix
def test_programs_end_with_the_iterations_they_may_take() -> None:
    problem = wide(80, 1)
    limited, free = (bounds_of(problem, 20, iterations) for iterations in (500, 10**6))

    limited_s, free_s = (bounds.bound_s(1e9, 1.0) for bounds in (limited, free))

    # The last program begun may go over, no other is begun.
    assert 500 <= limited.iterations_run < free.iterations_run
    assert 0 < limited.programs_run < free.programs_run == 20
    assert limited_s <= free_s


@pytest.mark.matrix
def test_a_wide_graph_gets_a_split_and_a_gap() -> None:
    problem, effort = wide(80, 1), GraphEffort(programs=28, most_programs=20, most_ideals=1000)

    answer = solve(problem, effort=effort)

    assert effort.programs < 28
    assert effort.iterations < GraphEffort().iterations

    assert ideals(problem.readers(), most=1000) is None
    assert isinstance(answer, GraphSolution)
    assert answer.method == "orders"
    assert 0 <= answer.gap < 0.1
    place = {layer: at for at, layer in enumerate(answer.order)}
    assert all(place[a] < place[b] for a, b in problem.edges)
    whole = sum(
        sum(option.time_s for option in problem.chain.kinds[kind]) for kind in problem.chain.layers
    )
    assert answer.lower_bound_s > whole / 4 * 7.0 + whole
    assert np.isfinite(answer.lower_bound_s)
