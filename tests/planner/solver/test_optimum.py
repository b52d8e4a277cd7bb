"""What the exact solvers answer is the best of all there is, on random problems of every kind.

Chains and graphs of layers, on one type of devices and on several, small enough to list each split,
order of types and choice of options.  The other files here test single parts and laws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from meshwright.planner.solver import chain as inner
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Solution,
    fits,
)
from meshwright.planner.solver.solve import solve, split_bound_s
from tests.conftest import kept_of
from tests.planner.solver import small_graphs, small_instances
from tests.planner.solver.small_graphs import (
    changed,
    graphs_on_types,
    more_bytes,
    orders,
    random_graph,
    random_unequal,
    random_unequal_graph,
    with_groups,
    with_more_bytes,
)
from tests.planner.solver.small_instances import random_instance

Problem = Instance | GraphInstance


def solved(problem: Problem, cutoff_s: float = math.inf) -> Any:
    solver: Any = inner.solve if isinstance(problem, Instance) else solve
    return solver(problem, cutoff_s=cutoff_s)


def agrees_with_enumeration(problem: Problem) -> bool:
    """Solve, compare with the best of all there is, and say whether anything fits."""
    if isinstance(problem, Instance):
        best_s = small_instances.least_objective_s(problem)
    else:
        best_s = small_graphs.least_objective_s(problem)
        if len(problem.types) > 1:  # whose stages differ by type alone
            assert split_bound_s(problem) <= best_s * (1 + 1e-9) + 1e-9
    answer = solved(problem)
    if best_s == math.inf:
        assert isinstance(answer, Infeasible)
        assert answer.reason
        return False
    assert isinstance(answer, Solution | GraphSolution)
    assert answer.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
    assert answer.optimal
    check_sound(problem, answer)
    return True


def check_sound(problem: Problem, answer: Solution | GraphSolution) -> None:
    """Check that an answer is a split that fits and takes what it says, from the definition."""
    if isinstance(problem, Instance):
        assert isinstance(answer, Solution)
        assert fits(problem, answer)
        seconds = small_instances.objective_s(problem, answer.cuts, answer.options)
    else:
        assert isinstance(answer, GraphSolution)
        assert answer.split.optimal == answer.optimal
        assert answer.types in orders(problem)
        assert fits(problem.laid(answer.order, answer.split.cuts, answer.types), answer.split)
        cuts = itertools.pairwise(answer.split.cuts)
        stages = [answer.order[first:end] for first, end in cuts]
        stage_of = tuple(
            next(s for s, layers in enumerate(stages) if at in layers)
            for at in range(len(answer.order))
        )
        assert all(stage_of[a] <= stage_of[b] for a, b in problem.edges)
        assert all(len({stage_of[at] for at in group}) == 1 for group in problem.colocated)
        place = {layer: at for at, layer in enumerate(answer.order)}
        assert all(place[a] < place[b] for a, b in problem.edges)
        chosen = dict(zip(answer.order, answer.split.options, strict=True))
        options = tuple(chosen[at] for at in range(len(chosen)))
        seconds = small_graphs.objective_s(problem, stage_of, options, order=answer.types)
    assert seconds == pytest.approx(answer.objective_s)


def in_bytes_of_their_own(seed: int, **drawn: bool) -> GraphInstance:
    """Draw a graph whose stages hold more than sums; of one in three layers have one order."""
    problem = random_graph(seed, **drawn)
    sums = problem.chain
    if seed % 3 == 0:  # bytes depend on the place all the same
        edges = {*problem.edges, *itertools.pairwise(range(len(problem.chain.layers)))}
        problem = replace(problem, edges=tuple(sorted(edges)))
    return changed(problem, used_bytes=more_bytes(sums, seed, by_place=True))


def straight(seed: int) -> GraphInstance:
    """Draw a graph whose outputs go straight to their readers; every other has a free stage."""
    problem = random_graph(seed)
    unpaid = (seed % len(problem.chain.stages),) if seed % 2 else ()
    return replace(problem, relayed=False, unpaid=unpaid)


class Kind(NamedTuple):
    """Random problems by seed: in parts of `size`, of which a number fits, `some` in every run."""

    made: Callable[[int], Problem]
    first: int
    parts: int
    size: int
    least: int
    some: int
    settings: Mapping[str, float | Callable[..., bool]] = {}
    """Of the solver, for problems on which its usual ones decide nothing."""


KINDS = {
    "chain": Kind(random_instance, 0, 5, 60, 20, 2),
    "chain, stages settled one by one": Kind(
        random_instance, 300, 3, 60, 20, 1,
        {"meshwright.planner.solver.knapsack.Knapsacks.alike": lambda _, __: False},
    ),
    "chain, sync by option": Kind(
        lambda seed: random_instance(seed, sync_by_option=True), 600, 2, 50, 15, 1
    ),
    "chain, forward apart": Kind(
        lambda seed: random_instance(seed, forward_apart=True), 700, 2, 50, 15, 1
    ),
    "chain, forward apart, sync by option": Kind(
        lambda seed: random_instance(seed, forward_apart=True, sync_by_option=True),
        700, 2, 50, 15, 1,
    ),
    "graph": Kind(random_graph, 0, 5, 60, 30, 1),
    "graph, sync by option": Kind(
        lambda seed: random_graph(seed, sync_by_option=True), 600, 2, 60, 30, 1
    ),
    "graph, small rises of the target": Kind(
        random_graph,
        300,
        2,
        60,
        30,
        1,
        {"meshwright.planner.solver.graphs.lattice._RISE_SMALL": 0.01},
    ),
    "graph, bytes that are no sums": Kind(in_bytes_of_their_own, 0, 2, 60, 10, 1),
    "graph, bytes that are no sums, sync by option": Kind(
        lambda seed: in_bytes_of_their_own(seed, sync_by_option=True), 0, 2, 60, 10, 0
    ),
    "graph, layers that stay together": Kind(
        lambda seed: with_groups(random_graph(seed), seed), 0, 2, 60, 20, 1
    ),
    "graph, layers that stay together, straight outputs": Kind(
        lambda seed: replace(with_groups(random_graph(seed), seed), relayed=False),
        0, 2, 60, 20, 1,
    ),
    "graph, straight outputs": Kind(straight, 0, 2, 60, 30, 1),
    "types": Kind(random_unequal, 0, 4, 60, 20, 1),
    "types, sync by option": Kind(
        lambda seed: random_unequal(seed, sync_by_option=True), 300, 2, 50, 10, 1
    ),
    "types, from a ceiling far too low": Kind(
        random_unequal, 240, 2, 30, 10, 1,
        {
            "meshwright.planner.solver.heterogeneous.search._FIRST": 0.3,
            "meshwright.planner.solver.heterogeneous.search._RISE": 1.04,
        },
    ),
    "types, bytes that are no sums": Kind(
        lambda seed: with_more_bytes(random_unequal(seed), seed, by_place=False), 0, 3, 40, 5, 1
    ),
    "types, bytes that are no sums, sync by option": Kind(
        lambda seed: with_more_bytes(
            random_unequal(seed, sync_by_option=True), seed, by_place=False
        ),
        0, 3, 40, 5, 1,
    ),
    "graph on types": Kind(lambda at: graphs_on_types()[at], 0, 5, 20, 5, 2),
    "graph on types, bytes that are no sums": Kind(
        lambda at: with_more_bytes(graphs_on_types()[at], at % 20, by_place=True),
        0, 5, 20, 5, 2,
    ),
    "graph on types, layers that stay together": Kind(
        lambda at: with_groups(graphs_on_types()[at], at), 0, 1, 40, 10, 1
    ),
}  # fmt: skip


def parts_of(kinds: Mapping[str, Kind]) -> Iterator[Any]:
    """Yield each kind's parts, which are of the matrix, and the first quarters of some of them."""
    for name, kind in kinds.items():
        some = kept_of(kind.parts, kind.some) if kind.some else frozenset()
        for at in range(kind.parts):
            first = kind.first + at * kind.size
            yield pytest.param(kind, first, id=f"{name}, {first}", marks=pytest.mark.matrix)
            if at in some:
                quarter = kind._replace(size=kind.size // 4, least=kind.least // 4)
                yield pytest.param(quarter, first, id=f"{name}, quarter from {first}")


@pytest.mark.parametrize(("kind", "first"), list(parts_of(KINDS)))
def test_nothing_beats_the_solution(
    kind: Kind, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in kind.settings.items():
        monkeypatch.setattr(name, value)

    seeds = range(first, first + kind.size)
    feasible = [agrees_with_enumeration(kind.made(seed)) for seed in seeds]

    assert kind.least < sum(feasible)
    assert sum(feasible) < kind.size or kind.made(first) in graphs_on_types()


CUTOFFS: dict[str, tuple[Callable[[int], Problem], float, range]] = {
    "chain": (random_instance, 1e-6, range(480, 520)),
    "graph": (random_graph, 0.01, range(0, 24, 3)),
    "graph on types": (random_unequal_graph, 1e-6, range(20)),
}


@pytest.mark.spread(60)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", CUTOFFS)
def test_only_what_is_below_a_cutoff_is_of_interest(kind: str, seed: int) -> None:
    made, share, seeds = CUTOFFS[kind]
    problem = made(seeds[seed % len(seeds)])
    best = solved(problem)
    if isinstance(best, Infeasible):
        assert not isinstance(solved(problem, 1e9), Solution | GraphSolution)
        return
    margin_s = share * abs(best.objective_s) + 1e-9

    below = solved(problem, best.objective_s - margin_s)
    above = solved(problem, best.objective_s + margin_s)

    assert isinstance(below, CutOff)
    assert below.lower_bound_s <= best.objective_s
    assert below.lower_bound_s >= (best.objective_s - margin_s) * (1 - 1e-9) or not best.optimal
    assert above == best
