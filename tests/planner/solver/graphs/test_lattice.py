"""solve.solve is checked against every split there is, on graphs small enough to list."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import networkx
import pytest

from planner.solver import inner
from planner.solver.frontier import FrontierStore
from planner.solver.graph_instance import (
    GraphEffort,
    GraphInstance,
    GraphSolution,
    alike,
    graph_instance,
    in_a_row,
)
from planner.solver.graphs.ideals import ideals
from planner.solver.graphs.lattice import Lattice
from planner.solver.graphs.orders import orders
from planner.solver.instance import (
    Infeasible,
    Option,
    Solution,
    StageLimits,
    Unfinished,
)
from planner.solver.solve import solve
from tests.planner.solver.small_graphs import (
    least_objective_s,
    random_graph,
)
from tests.planner.solver.small_instances import random_instance
from tests.planner.solver.test_optimum import check_sound


def test_a_relay_costs_what_no_straight_way_does() -> None:
    problem = random_graph(0)
    for seed in range(40):
        problem = random_graph(seed)
        relayed, straight = (solve(replace(problem, relayed=one)) for one in (True, False))
        if isinstance(relayed, GraphSolution):
            assert isinstance(straight, GraphSolution)
            assert straight.objective_s <= relayed.objective_s * (1 + 1e-9) + 1e-9


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


@pytest.mark.parametrize("seed", range(60))
def test_the_lattice_of_a_chain_gives_what_the_chain_solver_gives(seed: int) -> None:
    chain = random_instance(seed)
    rng = random.Random(seed)
    count = len(chain.layers)
    output_s = tuple(rng.choice([0.0, rng.uniform(0, 3)]) for _ in range(count))
    plain = replace(chain, cut_s=(), forward_apart=chain.forward_apart)
    problem = alike(plain, edges=in_a_row(count), output_s=output_s)
    expected = inner.solve(replace(chain, cut_s=(0.0, *output_s[:-1], 0.0)))

    every = ideals(problem.readers(), most=100)
    assert every is not None
    found, bound_s = Lattice(problem, every, FrontierStore()).search(None, 10**6)

    if isinstance(expected, Solution):
        assert found is not None
        assert found.objective_s == pytest.approx(expected.objective_s, rel=1e-9, abs=1e-9)
        assert bound_s >= found.objective_s - 1e-9 * abs(found.objective_s)
    else:
        assert found is None
        assert bound_s == math.inf


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


def test_more_memory_is_never_slower() -> None:
    times_s = [objective_of(two_towers(room)) for room in (6e9, 7e9, 9e9, 12e9, 16e9, 40e9)]

    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]


def test_a_faster_link_is_never_slower() -> None:
    times_s = [objective_of(two_towers(send_s=send_s)) for send_s in (0, 1e-4, 1e-3, 4e-3)]

    assert times_s == sorted(times_s)
    assert times_s[0] < times_s[-1]


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


def test_a_skip_connection_leaves_one_order_and_makes_the_cut_dearer() -> None:
    layer = (option("none", 0.01, 1e9),)
    graph = networkx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    problem = graph_instance(
        graph,
        options=dict.fromkeys(graph, layer),
        output_s={"a": 0.5, "b": 0.25, "c": 0.125},
        stages=[StageLimits(capacity_bytes=1e12)] * 2,
        steady=0,
    )

    answer = solve(problem)

    assert isinstance(answer, GraphSolution)
    assert answer.method == "chain"
    assert problem.along(answer.order).cut_s == (0.0, 0.5, 0.75, 0.625, 0.0)
    assert answer.stages == (("a",), ("b", "c", "d"))
    assert answer.objective_s == pytest.approx(4 * 0.01 + 2 * 0.5)


def test_a_cycle_is_refused_with_its_layers() -> None:
    graph = networkx.DiGraph([("a", "b"), ("b", "a")])

    with pytest.raises(ValueError, match="a -> b"):
        graph_instance(graph, options={}, output_s={}, stages=[], steady=0)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (two_towers(depth=20), "20 stages need as many layers; there are 17"),
        (two_towers(0.5e9), "layer 'text.0' alone fits on no stage"),
        (two_towers(4e9), "no order of 4 x all and no cuts fit"),
    ],
)
def test_an_infeasible_graph_says_what_binds(problem: GraphInstance, words: str) -> None:
    answer = solve(problem)

    assert isinstance(answer, Infeasible)
    assert words in answer.reason


def test_the_order_in_which_edges_and_nodes_are_given_changes_no_time() -> None:
    problem = two_towers()
    expected_s = objective_of(problem)
    edges = [(problem.names[a], problem.names[b]) for a, b in problem.edges]
    tables = {
        name: problem.chain.kinds[kind]
        for name, kind in zip(problem.names, problem.chain.layers, strict=True)
    }

    for seed in range(5):
        random.Random(seed).shuffle(edges)
        again = graph_instance(
            networkx.DiGraph(edges),
            options=tables,
            output_s=dict(zip(problem.names, problem.sent_s(), strict=True)),
            stages=problem.chain.stages,
            steady=problem.chain.steady,
        )
        assert objective_of(again) == pytest.approx(expected_s, rel=1e-12)
