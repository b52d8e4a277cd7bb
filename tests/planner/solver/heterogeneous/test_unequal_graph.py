"""solve.solve of graphs on several types against every split, order of types and options."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphEffort, GraphSolution
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.heterogeneous.search import Search
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import (
    graphs_on_types,
    least_objective_s,
    random_unequal_graph,
    with_groups,
)


def test_layers_of_a_group_stay_together_where_orders_are_tried() -> None:
    found = 0
    for seed, plain in enumerate(graphs_on_types()[:40]):
        problem = with_groups(plain, seed)

        tried = solve(problem, effort=GraphEffort(most_steps=0))

        if isinstance(tried, GraphSolution):
            stages = [set(tried.order[a:b]) for a, b in itertools.pairwise(tried.split.cuts)]
            assert all(any(set(g) <= stage for stage in stages) for g in problem.colocated), seed
            found += bool(problem.colocated)
    assert found > 5


@pytest.mark.parametrize("seed", range(30))
def test_with_too_many_downsets_orders_are_tried_and_the_gap_is_honest(seed: int) -> None:
    problem = graphs_on_types()[seed]
    best_s = least_objective_s(problem)

    answer = solve(problem, effort=GraphEffort(most_steps=0))

    if isinstance(answer, GraphSolution):
        assert answer.split.lower_bound_s <= best_s * (1 + 1e-9) + 1e-9
        assert answer.split.objective_s >= best_s * (1 - 1e-9) - 1e-9
        place = {layer: at for at, layer in enumerate(answer.order)}
        assert all(place[a] < place[b] for a, b in problem.edges)


@pytest.mark.parametrize("seed", range(20))
def test_a_graph_with_one_order_is_a_chain(seed: int) -> None:
    problem = random_unequal_graph(seed)
    edges = {*problem.edges, *itertools.pairwise(range(len(problem.names)))}
    problem = replace(problem, edges=tuple(sorted(edges)))
    every = ideals(problem.readers(), most=100)
    assert every is not None

    answer = solve(problem)
    pairs = every.nested_pairs(100)
    assert pairs is not None
    found, bound_s = Search(problem, FrontierStore(), math.inf, every, pairs).solve()

    if isinstance(answer, GraphSolution):
        assert answer.method == "chain"
        assert found is not None
        assert answer.objective_s == pytest.approx(found.objective_s, abs=1e-9)
    else:
        assert bound_s == math.inf
