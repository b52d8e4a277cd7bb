"""solve.solve is checked against every split there is, on graphs small enough to list."""

from __future__ import annotations

import math

import networkx
import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver.graph_instance import (
    GraphEffort,
    GraphInstance,
    GraphSolution,
    graph_instance,
)
from meshwright.planner.solver.graphs.orders import orders
from meshwright.planner.solver.partition_problem import (
    Infeasible,
    Option,
    Solution,
    StageLimits,
    Unfinished,
)
from meshwright.planner.solver.solve import solve
from tests.planner.solver.small_graphs import (
    least_objective_s,
    random_graph,
)
from tests.planner.solver.test_optimum import check_sound

TOO_FEW: list[dict[str, int]] = [
    {"most_ideals": 1},
    {"most_pairs": 12},
    {"ways": 0},
    {"ways": 2, "most_ways": 1},
]


@pytest.mark.spread(5)
@pytest.mark.parametrize("seed", range(420, 480))
def test_a_lattice_too_large_to_finish_still_bounds_every_split(seed: int) -> None:
    problem = random_graph(seed)
    best_s = least_objective_s(problem)

    for answer in (solve(problem, effort=GraphEffort(**few)) for few in TOO_FEW):
        if best_s == math.inf:
            assert isinstance(answer, Infeasible | Unfinished)
        elif isinstance(answer, GraphSolution):
            check_sound(problem, answer)
            assert answer.lower_bound_s <= best_s * (1 + 1e-9) + 1e-9
            assert answer.objective_s >= best_s * (1 - 1e-9) - 1e-9
            assert not answer.optimal or answer.objective_s == pytest.approx(best_s)
        else:
            assert isinstance(answer, Unfinished)


def option(name: str, time_s: float, stored: float) -> Option:
    return Option(
        name=name,
        forward_s=time_s / 3,
        backward_s=2 * time_s / 3,
        stored_bytes=stored,
        resident_bytes=1e9,
    )


def two_towers(
    room: float = 14e9,
    *,
    send_s: float = 1e-4,
    depth: int = 4,
    lengths: tuple[int, int] = (9, 6),
) -> GraphInstance:
    """Two unlike encoders that end in one trunk."""
    text = (option("none", 0.008, 1.0e9), option("full", 0.011, 0.1e9))
    image = (option("none", 0.013, 1.6e9), option("full", 0.017, 0.1e9))
    graph = networkx.DiGraph()
    networkx.add_path(graph, [*(f"text.{i}" for i in range(lengths[0])), "join"])
    networkx.add_path(graph, [*(f"image.{i}" for i in range(lengths[1])), "join", "head"])
    return graph_instance(
        graph,
        options={name: image if name.startswith("image") else text for name in graph},
        output_s=dict.fromkeys(graph, send_s),
        stages=[StageLimits(capacity_bytes=room, in_flight=depth - s) for s in range(depth)],
        steady=15,
    )


def objective_of(problem: GraphInstance) -> float:
    answer = solve(problem)
    assert isinstance(answer, GraphSolution)
    assert answer.optimal
    return answer.objective_s


def test_no_order_solved_as_a_chain_is_faster_and_parallel_branches_share_a_stage() -> None:
    problem = two_towers()
    chains = [inner.solve(problem.along(order)) for order in orders(problem).values()]

    answer = solve(problem)

    assert isinstance(answer, GraphSolution)
    assert answer.method == "lattice"
    for chain in chains:
        assert isinstance(chain, Solution)
        assert answer.objective_s <= chain.objective_s * (1 + 1e-12)
    assert any({name.split(".")[0] for name in held} >= {"text", "image"} for held in answer.stages)


@pytest.mark.spread(1)
@pytest.mark.parametrize("room", [6e9, 9e9, 30e9])
def test_it_is_the_best_of_all_orders_solved_as_chains(room: float) -> None:
    problem = two_towers(room, send_s=5e-4, lengths=(5, 4))
    graph = networkx.DiGraph(problem.edges)

    every = [inner.solve(problem.along(o)) for o in networkx.all_topological_sorts(graph)]

    assert len(every) == 126
    best_s = min(chain.objective_s for chain in every if isinstance(chain, Solution))
    assert objective_of(problem) == pytest.approx(best_s, rel=1e-12)


def test_a_cycle_is_refused_with_its_layers() -> None:
    graph = networkx.DiGraph([("a", "b"), ("b", "a")])

    with pytest.raises(ValueError, match="a -> b"):
        graph_instance(graph, options={}, output_s={}, stages=[], steady=0)
