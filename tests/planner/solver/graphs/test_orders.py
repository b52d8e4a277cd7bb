"""orders are topological, and each does what its name says."""

from __future__ import annotations

import itertools

import pytest

from meshwright.planner.solver.graph_instance import GraphInstance, alike
from meshwright.planner.solver.graphs.orders import Nodes, orders
from meshwright.planner.solver.partition_problem import Instance, Option, StageLimits
from tests.planner.solver.small_graphs import random_graph


def graph(edges: list[tuple[int, int]], output_s: list[float]) -> GraphInstance:
    one = (Option(name="none", forward_s=1, backward_s=2),)
    chain = Instance(
        layers=(0,) * len(output_s), kinds=(one,), stages=(StageLimits(capacity_bytes=1),), steady=0
    )
    return alike(chain, edges=edges, output_s=output_s, names="abcdefghij"[: len(output_s)])


@pytest.mark.parametrize("seed", range(60))
def test_no_layer_comes_before_what_it_reads(seed: int) -> None:
    problem = random_graph(seed)

    for order in orders(problem).values():
        place = {layer: at for at, layer in enumerate(order)}
        assert sorted(order) == list(range(len(problem.chain.layers)))
        assert all(place[a] < place[b] for a, b in problem.edges)


def test_depth_takes_one_branch_after_the_other() -> None:
    # a -> b -> d -> f, a -> c -> e -> f
    problem = graph([(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)], [1.0] * 6)

    assert Nodes(problem).depth_first() == (0, 1, 3, 2, 4, 5)
    assert orders(problem)["breadth"] == (0, 1, 2, 3, 4, 5)


def test_narrow_takes_next_what_leaves_the_cheapest_cut() -> None:
    # Two branches of two; the first layer of one is wide, its second narrow.
    problem = graph([(0, 1), (1, 4), (2, 3), (3, 4)], [9.0, 1.0, 2.0, 2.0, 0.0])

    order = Nodes(problem).narrow()

    assert order == (2, 3, 0, 1, 4)
    cuts = problem.along(order).cut_s
    others = [
        problem.along(other).cut_s
        for other in itertools.permutations(range(5))
        if all(other.index(a) < other.index(b) for a, b in problem.edges)
    ]
    assert cuts[1] == min(other[1] for other in others)


def test_narrow_counts_what_no_later_cut_carries() -> None:
    # Layer 2 is the last to read the wide output of layer 0.
    problem = graph([(0, 1), (0, 2), (1, 3), (2, 4), (3, 4)], [5.0, 1.0, 2.0, 1.5, 0.0])

    assert Nodes(problem).narrow() == (0, 1, 2, 3, 4)
