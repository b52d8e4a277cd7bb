"""One way into the exact solvers: the best split of a layer graph over stages of any device types.

    solve(problem) -> GraphSolution     optimal, or with the gap that is left
                    | Infeasible        no order of types, no split fits in memory
                    | Fathomed          none is below the cutoff, or none was found there
                    | Unfinished        none was found, and too many to be sure

The order of types, the branches and the cuts are chosen together along paths of (downset, stages
used of each type) (`planner.solver.heterogeneous.search`), those of a chain on one type too
(`planner.solver.chain`); graphs on one type are `planner.solver.graphs.lattice`'s.  A
graph with more downsets than that allows is split through those of several orders of the branches
(`meshwright.planner.solver.graphs.nearby`), under a bound of all orders
(`meshwright.planner.solver.heterogeneous.fastest_bound` on several types).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.solver import ilp
from meshwright.planner.solver.bounds.downsets import Downsets, Prefixes, Runs
from meshwright.planner.solver.bounds.memory_feasibility import why_no_split
from meshwright.planner.solver.chain import solve_chain, synced_apart
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import (
    GraphEffort,
    GraphInstance,
    GraphSolution,
    too_few,
)
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.graphs.lattice import split_alike
from meshwright.planner.solver.graphs.nearby import along_orders, of_bits
from meshwright.planner.solver.heterogeneous.search import Search, fastest_on
from meshwright.planner.solver.knapsack import Knapsacks
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Solution,
    Unfinished,
    broken,
)


def solve(
    problem: GraphInstance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    effort: GraphEffort | None = None,
    most_nodes: int | None = None,
) -> GraphSolution | Infeasible | CutOff | Unfinished:
    """Minimise the time of `problem` over all orders of types and branches, cuts and options.

    Only objectives below `cutoff_s` are of interest; with a finite one a problem that does not fit
    may be reported as fathomed.  Exact unless the graph has more downsets than `effort` allows, or
    the integer program, which decides where ties are not met by themselves, meets its limit.
    """
    few = too_few(problem)
    if few:
        return Infeasible(few)
    store = frontiers if frontiers is not None else FrontierStore()
    if problem.one_order and len(problem.types) == 1:
        return _chain(problem, cutoff_s, store, most_nodes)
    relaxed = _solve_relaxed(problem, cutoff_s, store, effort or GraphEffort())
    if not isinstance(relaxed, GraphSolution):
        return relaxed
    laid = problem.laid(relaxed.order, relaxed.split.cuts, relaxed.types)
    if broken(laid, relaxed.split) is None:
        return replace(relaxed, problem=problem)
    return ilp.solve_graph(
        problem, most_nodes=most_nodes, at_least_s=relaxed.lower_bound_s, cutoff_s=cutoff_s
    )


def _chain(
    problem: GraphInstance, cutoff_s: float, store: FrontierStore, most_nodes: int | None
) -> GraphSolution | Infeasible | CutOff | Unfinished:
    """Return the best split of layers that have one order, on devices of one type."""
    order = tuple(range(len(problem.chain.layers)))
    solution = solve_chain(
        problem.along(order), cutoff_s=cutoff_s, frontiers=store, most_nodes=most_nodes
    )
    if isinstance(solution, Infeasible) and problem.names and not problem.chain.sides:
        return Infeasible(why_no_split(problem))
    if not isinstance(solution, Solution):
        return solution
    types = (0,) * len(problem.chain.stages)
    return GraphSolution(problem=problem, order=order, types=types, split=solution, method="chain")


def _solve_relaxed(
    problem: GraphInstance, cutoff_s: float, store: FrontierStore, effort: GraphEffort
) -> GraphSolution | Infeasible | CutOff | Unfinished:
    """Return the best split where ties need not be kept, and hosts only as far as one stage goes.

    `cutoff_s`, `effort` as of `solve`.
    """
    apart = any(synced_apart(device_type.chain) for device_type in problem.types)
    if problem.chain.sides or (
        apart and any(device_type.chain.hosts for device_type in problem.types)
    ):
        types = (
            replace(
                device_type,
                chain=replace(
                    device_type.chain, sides=(), hosts=() if apart else device_type.chain.hosts
                ),
            )
            for device_type in problem.types
        )
        problem = replace(problem, types=tuple(types))
    if len(problem.types) == 1:
        every = ideals(problem.readers(), most=effort.most_ideals, colocated=problem.colocated)
        best, bound_s = split_alike(problem, every, store, cutoff_s, effort)
    else:
        best, bound_s = _on_types(problem, cutoff_s, store, effort)
    if best is not None:
        split = replace(best.split, lower_bound_s=min(bound_s, best.objective_s))
        return replace(best, split=split)
    if bound_s == math.inf:
        return Infeasible(why_no_split(problem))
    if cutoff_s < math.inf:
        return CutOff(bound_s)
    return Unfinished(
        bound_s,
        "no split that was tried fits in memory, and the "
        f"{len(problem.chain.layers)} layers can be split in too many ways to try them all",
    )


def split_bound_s(
    problem: GraphInstance,
    *,
    frontiers: FrontierStore | None = None,
    effort: GraphEffort | None = None,
) -> float:
    """Return seconds below which no split within memory stays; inf if none is known to fit."""
    if too_few(problem):
        return math.inf
    store = frontiers if frontiers is not None else FrontierStore()
    downsets = _downsets(problem, effort or GraphEffort())
    if downsets is None:
        return _any_order_s(problem, store)
    return Search(problem, store, math.inf, *downsets).bound_s


def _on_types(
    problem: GraphInstance, cutoff_s: float, store: FrontierStore, effort: GraphEffort
) -> tuple[GraphSolution | None, float]:
    downsets = _downsets(problem, effort)
    if downsets is not None:
        return Search(problem, store, cutoff_s, *downsets).solve()
    bound_s = _any_order_s(problem, store)
    if bound_s >= cutoff_s:
        return None, bound_s
    some = of_bits(along_orders(problem), len(problem.chain.layers))
    pairs = some.nested_pairs(GraphEffort().most_steps)
    best = pairs and Search(problem, store, cutoff_s, some, pairs).solve()[0]
    return (replace(best, method="orders") if best else None), bound_s


def _downsets(problem: GraphInstance, effort: GraphEffort) -> tuple[Downsets, Runs | None] | None:
    """Return the downsets of a problem with few of them, and those that lie in others.

    Of a chain those follow from how long stages may take.
    """
    most = effort.most_steps // (len(problem.chain.stages) * len(problem.types))
    if problem.one_order:
        return Prefixes(len(problem.chain.layers)), None
    every = ideals(problem.readers(), most=max(most, 2), colocated=problem.colocated)
    pairs = None if every is None else every.nested_pairs(most)
    return None if every is None or pairs is None else (every, pairs)


def _any_order_s(problem: GraphInstance, store: FrontierStore) -> float:
    """Bound on all orders, memory and cuts ignored."""
    knapsacks = [Knapsacks(device_type.chain, store) for device_type in problem.types]
    fastest, sync_s = fastest_on(problem, knapsacks)
    exposed_s = float(np.min([knapsack.exposed_s for knapsack in knapsacks], axis=0).sum())
    return (1 - ROUNDING) * (fastest.passes_s() + fastest.fill * exposed_s + sync_s)
