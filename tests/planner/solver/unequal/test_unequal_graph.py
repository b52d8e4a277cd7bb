"""solve.solve of graphs on several types against every split, order of types and options."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from planner.solver.frontier import FrontierStore
from planner.solver.graph_instance import GraphInstance, GraphSolution
from planner.solver.graphs.ideals import ideals
from planner.solver.graphs.lattice import GraphEffort
from planner.solver.instance import Fathomed, Infeasible
from planner.solver.solve import least_s, solve
from planner.solver.unequal.unequal import Search
from tests.planner.solver.small_graphs import with_groups
from tests.planner.solver.unequal.test_unequal import (
    choices_of,
    orders,
    random_unequal,
    scale,
    with_more_bytes,
)


def random_graph(seed: int) -> GraphInstance:
    """At most 6 layers on 4 stages of 3 types, whose cuts cost what crosses them."""
    rng = random.Random(1000 + seed)
    chain = random_unequal(seed)
    layers, types = len(chain.chain.layers), len(chain.types)
    share = rng.choice([0.1, 0.3, 0.5])
    pairs = itertools.combinations(range(layers), 2)
    return replace(
        chain,
        names=tuple(f"layer {i}" for i in range(layers)),
        edges=tuple(pair for pair in pairs if rng.random() < share),
        output_s=tuple(
            tuple(tuple(float(rng.randint(0, 3)) for _ in range(layers)) for _ in range(types))
            for _ in range(types)
        ),
    )


def least_objective_s(problem: GraphInstance) -> float:
    """Seconds of the best split, order of types and options from the definition; inf if none."""
    chain = problem.chain
    stages, layers = len(chain.stages), len(problem.names)
    apart = 0.5 if chain.forward_apart else 0.0
    best, every = math.inf, orders(problem)
    known: dict[tuple[object, ...], list[tuple[float, ...]]] = {}
    for stage_of in itertools.product(range(stages), repeat=layers):
        backward = any(stage_of[a] > stage_of[b] for a, b in problem.edges)
        apart_from = any(len({stage_of[at] for at in group}) > 1 for group in problem.colocated)
        if backward or apart_from or len(set(stage_of)) < stages:
            continue
        held = [[at for at in range(layers) if stage_of[at] == s] for s in range(stages)]
        last = [
            max([stage_of[b] for a, b in problem.edges if a == at], default=0)
            for at in range(layers)
        ]
        for order in every:
            choices = []
            for s, g in enumerate(order):
                before = [at for at in range(layers) if stage_of[at] < s]
                key = s, g, tuple(held[s]), tuple(before)
                if key not in known:
                    known[key] = choices_of(problem, s, g, held[s], before=before)
                choices.append(known[key])
            beside = [0.0] * stages
            for s in range(stages - 1):
                sent_s = problem.output_s[order[s]][order[s + 1]]
                cut_s = sum(sent_s[at] for at in range(layers) if stage_of[at] <= s < last[at])
                beside[s] += cut_s
                beside[s + 1] += cut_s
            credit_s = sum(
                scale(problem, g) * problem.types[g].chain.credit_s(at)
                for s, g in enumerate(order)
                for at in held[s]
            )
            for parts in itertools.product(*choices):
                both = list(zip(parts, beside, strict=True))
                slowest_s = max(f + apart * cut for (f, _, _), cut in both)
                slowest_s += max(b + (1 - apart) * cut for (_, b, _), cut in both)
                sum_s = sum(f + b + cut for (f, b, _), cut in both)
                total_s = chain.steady * slowest_s + chain.fill * sum_s - credit_s
                best = min(best, total_s + max(sync for _, _, sync in parts))
    return best


def small(problem: GraphInstance) -> bool:
    """Whether all splits, orders of types and options are soon listed."""
    chain = problem.chain
    options = max(len(table) for one in problem.types for table in one.chain.kinds)
    splits = len(chain.stages) ** len(problem.names)
    return splits * len(orders(problem)) * options <= 3000


GRAPHS = [
    problem
    for problem in map(random_graph, range(520))
    if small(problem) and len(problem.types) > 1
]


@pytest.mark.spread(4)
@pytest.mark.parametrize("exact", [True, False], ids=["sums", "no sums"])
@pytest.mark.parametrize("start", range(0, 100, 20))
def test_no_split_and_no_order_of_types_beats_the_solution(start: int, exact: bool) -> None:
    feasible = 0
    for seed, plain in enumerate(GRAPHS[start : start + 20]):
        problem = plain
        if not exact:
            problem = with_more_bytes(plain, seed, by_place=True)
        best_s = least_objective_s(problem)

        answer = solve(problem)

        assert least_s(problem) <= best_s * (1 + 1e-9) + 1e-9, seed
        if best_s == math.inf:
            assert isinstance(answer, Infeasible), seed
            continue
        assert isinstance(answer, GraphSolution), seed
        assert answer.optimal
        assert answer.split.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9), seed
        place = {layer: at for at, layer in enumerate(answer.order)}
        assert all(place[a] < place[b] for a, b in problem.edges)
        feasible += 1
    assert feasible > 5


def test_layers_of_a_group_stay_on_one_stage() -> None:
    feasible = 0
    for seed, plain in enumerate(GRAPHS[:40]):
        problem = with_groups(plain, seed)
        best_s = least_objective_s(problem)

        answer = solve(problem)
        tried = solve(problem, effort=GraphEffort(most_steps=0))

        assert least_s(problem) <= best_s * (1 + 1e-9) + 1e-9, seed
        if best_s == math.inf:
            assert isinstance(answer, Infeasible), seed
            continue
        assert isinstance(answer, GraphSolution), seed
        assert answer.split.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9), seed
        for one in (answer, tried):
            if isinstance(one, GraphSolution):
                held = [set(one.order[a:b]) for a, b in itertools.pairwise(one.split.cuts)]
                assert all(any(set(g) <= stage for stage in held) for g in problem.colocated), seed
        feasible += 1
    assert feasible > 10


@pytest.mark.parametrize("seed", range(30))
def test_with_too_many_downsets_orders_are_tried_and_the_gap_is_honest(seed: int) -> None:
    problem = GRAPHS[seed]
    best_s = least_objective_s(problem)

    answer = solve(problem, effort=GraphEffort(most_steps=0))

    if isinstance(answer, GraphSolution):
        assert answer.split.lower_bound_s <= best_s * (1 + 1e-9) + 1e-9
        assert answer.split.objective_s >= best_s * (1 - 1e-9) - 1e-9
        place = {layer: at for at, layer in enumerate(answer.order)}
        assert all(place[a] < place[b] for a, b in problem.edges)


@pytest.mark.parametrize("seed", range(20))
def test_a_graph_with_one_order_is_a_chain(seed: int) -> None:
    problem = random_graph(seed)
    edges = {*problem.edges, *itertools.pairwise(range(len(problem.names)))}
    problem = replace(problem, edges=tuple(sorted(edges)))
    every = ideals(problem.readers(), most=100)
    assert every is not None

    answer = solve(problem)
    pairs = every.nested(100)
    assert pairs is not None
    found, bound_s = Search(problem, FrontierStore(), math.inf, every, pairs).solved()

    if isinstance(answer, GraphSolution):
        assert answer.method == "chain"
        assert found is not None
        assert answer.objective_s == pytest.approx(found.objective_s, abs=1e-9)
    else:
        assert bound_s == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_nothing_below_the_cutoff_is_said(seed: int) -> None:
    problem = random_graph(seed)
    best = solve(problem)
    if not isinstance(best, GraphSolution) or not best.split.objective_s:
        return

    hair_s = 1e-6 * abs(best.split.objective_s)

    assert isinstance(solve(problem, cutoff_s=best.split.objective_s - hair_s), Fathomed)
    above = solve(problem, cutoff_s=best.split.objective_s + hair_s)
    assert isinstance(above, GraphSolution)
    assert above.split.objective_s == pytest.approx(best.split.objective_s)
