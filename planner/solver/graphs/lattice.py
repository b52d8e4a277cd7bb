"""The exact solver for graphs: the best split over all orders in which branches can be taken.

    solve_graph(problem) -> GraphSolution     optimal, or with the gap that is left
                          | Infeasible        no split fits in memory
                          | Fathomed          none is below the cutoff, or none was found there
                          | Undecided         none was found, and too many to be sure

Splits are paths through the lattice of ideals (`planner.solver.graphs.ideals`), one step per
stage.  The search rises from target to target, beginning at a bound for all splits.  A target
allows no stage above

    ceiling = (target - least sum - least sync) / steady

which leaves narrow bands of ideals (`planner.solver.graphs.bands`), and only those steps between
them that some split below the target can take (`planner.solver.graphs.sweep`).  Steps start with
bounds on their seconds (`planner.solver.step_bounds`) that become exact when the cheapest
path wants to use them (`planner.solver.settled`).  All costs being bounds, a path whose steps are
exact is the optimum; if there is no path, the target is a bound for all splits, and the next one
higher.

Where a target leaves too much of the lattice, the last one is the proven bound of the best of
several orders (`planner.solver.graphs.orders`), each solved exactly as a chain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from planner.on_use import OnUse
from planner.solver.assembly import assembled
from planner.solver.descent import Way
from planner.solver.fluid import Fluid
from planner.solver.frontier import FrontierStore
from planner.solver.graphs.bands import Bands
from planner.solver.graphs.graph_instance import GraphInstance, GraphSolution, Method, Undecided
from planner.solver.graphs.ideals import Ideals, ideals
from planner.solver.graphs.orders import Order, orders
from planner.solver.graphs.step_table import StepTable
from planner.solver.graphs.sweep import Aim, Sweep
from planner.solver.inner import solve
from planner.solver.instance import Fathomed, Infeasible, Solution, leanest_bytes
from planner.solver.knapsack import Knapsacks
from planner.solver.settled import best_split, loose_s
from planner.solver.step_bounds import StepBounds
from planner.solver.table import Known
from planner.units import bytes_text

networkx = OnUse("networkx", "a graph of layers")  # loads slowly, and chains need none of it

# Ideals of a graph from which on a first split from several orders is worth its time.
_LARGE = 3000
# By what share of the fluid bound targets rise, at first and as a share of the rise so far.
_RISE_SMALL, _RISE_LARGE, _RISE_ON = 0.08, 0.01, 0.3
# Targets this close together are not worth a search of their own.
_LEAST_RISE = 0.004


def solve_graph(
    problem: GraphInstance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    most_ideals: int = 400_000,
    most_pairs: int = 100_000_000,
) -> GraphSolution | Infeasible | Fathomed | Undecided:
    """Minimise the time of `problem` over all contiguous splits of its graph.

    Only objectives below `cutoff_s` are of interest.  Exact unless the graph has more than
    `most_ideals` downsets, or more than `most_pairs` pairs of them would have to be compared at
    once.
    """
    layers, stages = len(problem.layers), len(problem.stages)
    if stages > layers:
        return Infeasible(f"{stages} stages need as many layers; the graph has {layers}")
    store = frontiers if frontiers is not None else FrontierStore()
    every = ideals(problem.readers(), most=most_ideals)
    if every is not None and len(every) == layers + 1:
        return _only_order(problem, cutoff_s, store)
    least_s = _any_order_s(problem, store) if every is None else 0.0
    large = every is None or len(every) > _LARGE
    rival = _best_order(problem, cutoff_s, store) if large and least_s < cutoff_s else None
    best, bound_s = rival, least_s
    if every is not None:
        best, bound_s = Lattice(problem, every, store).search(rival, most_pairs, cutoff_s)
    if bound_s == math.inf:
        return Infeasible(_why_infeasible(problem))
    if best is None and bound_s < cutoff_s and not large:
        best = _best_order(problem, cutoff_s, store)
    if best is None:
        if cutoff_s < math.inf:
            return Fathomed(bound_s)
        return Undecided(
            f"none of the orders tried fits in memory, and the {layers} layers can be split in too "
            f"many ways to try them all"
        )
    split = replace(best.split, lower_bound_s=min(bound_s, best.objective_s))
    return replace(best, split=split)


class Lattice:
    """All splits of a graph whose ideals are known."""

    def __init__(self, problem: GraphInstance, every: Ideals, store: FrontierStore) -> None:
        self._problem = problem
        self._every = every
        self._knapsacks = Knapsacks(problem.chain_along(range(len(problem.layers))), store)
        self._cut_s = every.crossing(problem.readers(), np.array(problem.output_s))
        self._fluid = Fluid(
            self._knapsacks,
            least_cut_s=float(self._cut_s[1:-1].min(initial=math.inf)),
            most_cut_s=float(self._cut_s.max()),
        )
        self._bands = Bands(every, self._knapsacks, self._fluid, self._cut_s)
        self._known: Known = {}

    def search(
        self, rival: GraphSolution | None, most_pairs: int, cutoff_s: float = math.inf
    ) -> tuple[GraphSolution | None, float]:
        """Return the best split below the cutoff, or else `rival`, and a bound of all splits.

        The bound is inf if nothing fits.
        """
        fluid = self._fluid
        if fluid.largest_s == math.inf:
            return None, math.inf
        steady, stages = self._problem.steady, len(self._problem.stages)
        most_s = cutoff_s if rival is None else rival.objective_s
        least_s = proven_s = fluid.beyond_s(fluid.largest_s, steady)
        if least_s >= most_s:
            return rival, least_s
        size_s = steady * fluid.largest_s + abs(fluid.fill_s) + fluid.sync_s
        rise_s = size_s * (_RISE_LARGE if len(self._every) > _LARGE else _RISE_SMALL)
        rises = True
        while True:
            target_s = min(proven_s + rise_s, most_s)
            if target_s - least_s > (2 * steady + stages) * fluid.whole_s or not size_s:
                target_s = most_s
            table = self._table(target_s, most_pairs)
            if table is None:
                rises = False
                rise_s /= 2
                if rise_s < _LEAST_RISE * size_s:
                    return rival, proven_s
                continue
            found = best_split(table, partial(self._assembled, table), cutoff_s=target_s)
            known_s = target_s if found is None else found.objective_s
            least_open_s = loose_s(table, cutoff_s=known_s)
            if least_open_s < known_s:
                return found or rival, least_open_s
            if found is not None:
                return found, found.objective_s
            if target_s == most_s:
                return rival, most_s
            proven_s = target_s
            if rises:
                rise_s = max(rise_s, _RISE_ON * (proven_s - least_s))

    def _table(self, target_s: float, most_pairs: int) -> StepTable | None:
        """Steps of all splits below the target; None if too many pairs must be compared for it."""
        fluid, steady = self._fluid, self._problem.steady
        ceiling_s = fluid.whole_s
        if steady:
            ceiling_s = min(ceiling_s, (target_s - fluid.fill_s - fluid.sync_s) / steady)
        bands = self._bands.under(ceiling_s)
        member = np.zeros(len(self._every), dtype=bool)
        for band in bands:
            member[band] = True
        members = np.flatnonzero(member)
        places = [np.searchsorted(members, band) for band in bands]
        bounds = StepBounds(self._knapsacks, self._every, members, self._cut_s)
        aim = Aim(ceiling_s=ceiling_s, cutoff_s=target_s, sync_s=fluid.sync_s)
        hops = Sweep(bounds, self._every, places, aim).hops(most_pairs)
        if hops is None:
            return None
        return StepTable(
            bounds,
            [(hop.smaller, hop.larger) for hop in hops],
            self._known,
            np.concatenate([hop.stage_s for hop in hops]),
        )

    def _assembled(self, table: StepTable, path: Way) -> GraphSolution:
        """Choose the options of every stage and evaluate the split as that of a chain."""
        problem = self._problem
        order, cuts, options = table.laid(path.way)
        return _named(problem, order, assembled(problem.chain_along(order), cuts, options))


def _named(
    problem: GraphInstance, order: Order, split: Solution, method: Method = "lattice"
) -> GraphSolution:
    return GraphSolution(names=problem.names, order=order, split=split, method=method)


def _only_order(
    problem: GraphInstance, cutoff_s: float, store: FrontierStore
) -> GraphSolution | Infeasible | Fathomed:
    """Solve a graph that has one order as the chain that it is."""
    order = tuple(range(len(problem.layers)))
    answer = solve(problem.chain_along(order), cutoff_s=cutoff_s, frontiers=store)
    if isinstance(answer, Solution):
        return _named(problem, order, answer, "chain")
    if isinstance(answer, Fathomed):
        return answer
    return Infeasible(_why_infeasible(problem))


def _best_order(
    problem: GraphInstance, cutoff_s: float, store: FrontierStore
) -> GraphSolution | None:
    """Best of several orders below the cutoff, each solved exactly as a chain."""
    best: GraphSolution | None = None
    for order in orders(problem).values():
        cutoff_s = cutoff_s if best is None else best.objective_s
        answer = solve(problem.chain_along(order), cutoff_s=cutoff_s, frontiers=store)
        if isinstance(answer, Solution):
            best = _named(problem, order, answer, "orders")
    return best


def _any_order_s(problem: GraphInstance, store: FrontierStore) -> float:
    """Fluid bound where the cuts are not known; inf if nothing can fit.

    In a connected graph some output crosses every cut.
    """
    graph = networkx.Graph(problem.edges)
    connected = len(graph) == len(problem.layers) and networkx.is_connected(graph)
    sent_s = [problem.output_s[before] for before, _ in problem.edges]
    fluid = Fluid(
        Knapsacks(problem.chain_along(range(len(problem.layers))), store),
        least_cut_s=min(sent_s) if connected else 0.0,
        most_cut_s=sum(problem.output_s),
    )
    return fluid.beyond_s(fluid.largest_s, problem.steady)


def _why_infeasible(problem: GraphInstance) -> str:
    """Name a layer that fits nowhere, or else what all of them need and what there is."""
    instance = problem.chain_along(range(len(problem.layers)))
    for layer, name in enumerate(problem.names):
        alone = range(layer, layer + 1)
        needs = [leanest_bytes(instance, stage, alone) for stage in instance.stages]
        free = [stage.free_bytes for stage in instance.stages]
        if all(n > f for n, f in zip(needs, free, strict=True)):
            return (
                f"layer '{name}' alone fits on no stage: in its leanest option it needs at least "
                f"{bytes_text(min(needs))}, and a stage has at most {bytes_text(max(free))} free"
            )
    lightest = min(instance.stages, key=lambda stage: stage.in_flight)
    needs_all = leanest_bytes(instance, lightest, range(len(problem.layers)))
    return (
        f"no contiguous split into {len(instance.stages)} stages fits: in their leanest options "
        f"all layers need at least {bytes_text(needs_all)}, and the stages have "
        f"{bytes_text(sum(stage.free_bytes for stage in instance.stages))} free, "
        f"{bytes_text(min(stage.free_bytes for stage in instance.stages))} on the smallest"
    )
