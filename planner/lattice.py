"""The exact solver for graphs: the best split over all orders in which branches can be taken.

    solve_graph(problem) -> GraphSolution     optimal, or with the gap that is left
                          | Infeasible        no split fits in memory
                          | Undecided         none was found, and too many to be sure

Splits are paths through the lattice of ideals (`planner.ideals`), one step per stage.  A ceiling on
stage seconds leaves narrow bands of it (`planner.bands`), in which every split under the ceiling
lies.  The steps start with bounds (`planner.step_table`) that become exact when the cheapest path
(`planner.paths`) wants to use them.  All costs being bounds, a path whose steps are exact is the
optimum under the ceiling.

A split with a stage above the ceiling takes at least steady · ceiling + (least sum) + (least sync).
Once that meets the best split known, this one is optimal among all.  Where the lattice is too large
for such a ceiling, it is the proven bound, and the best of several orders, each solved exactly as a
chain, competes with what was found.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import networkx
import numpy as np
from numpy.typing import NDArray

from planner.assembly import assembled, fastest_options
from planner.bands import Bands
from planner.cuts import meets
from planner.fluid import Fluid
from planner.frontier import FrontierStore
from planner.graph_instance import GraphInstance, GraphSolution, Method, Undecided
from planner.ideals import Ideals, ideals
from planner.inner import solve
from planner.instance import Infeasible, Solution, leanest_bytes
from planner.knapsack import Knapsacks
from planner.orders import Order, orders
from planner.paths import Path
from planner.settled import best_split
from planner.step_table import Known, StepTable
from planner.units import bytes_text

Indices = NDArray[np.intp]

# Ceiling to begin with over the fluid bound, and how much it rises while nothing fits under it.
_FIRST, _RISE = 1.06, 1.06
# Ceilings this close together are not worth a search of their own.
_LEAST_RISE = 1.002


def solve_graph(
    problem: GraphInstance,
    *,
    frontiers: FrontierStore | None = None,
    most_ideals: int = 400_000,
    most_pairs: int = 30_000_000,
) -> GraphSolution | Infeasible | Undecided:
    """Minimise the time of `problem` over all contiguous splits of its graph.

    Exact unless the graph has more than `most_ideals` downsets, or the ceiling that the proof needs
    leaves more than `most_pairs` pairs of them to compare.
    """
    layers, stages = len(problem.layers), len(problem.stages)
    if stages > layers:
        return Infeasible(f"{stages} stages need as many layers; the graph has {layers}")
    store = frontiers if frontiers is not None else FrontierStore()
    every = ideals(problem.readers(), most=most_ideals)
    if every is not None and len(every) == layers + 1:
        return _only_order(problem, store)
    if every is None:
        best, bound_s = None, _any_order_s(problem, store)
    else:
        best, bound_s = Lattice(problem, every, store).search(most_pairs)
    if bound_s < math.inf and not (best and meets(bound_s, best.objective_s)):
        best = _best_order(problem, store, best)
        if best is None:
            return Undecided(
                f"none of the orders tried fits in memory, and the {layers} layers can be split "
                f"in too many ways to try them all"
            )
    if best is None:
        return Infeasible(_why_infeasible(problem))
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

    def search(self, most_pairs: int) -> tuple[GraphSolution | None, float]:
        """Return the best split under the highest ceiling tried, and a bound for all others.

        The bound is inf if there are no others.
        """
        fluid = self._fluid
        if fluid.largest_s == math.inf:
            return None, math.inf
        best: GraphSolution | None = None
        searched_s = -math.inf
        ceiling_s = min(_FIRST * max(fluid.largest_s, 1e-3 * fluid.whole_s), fluid.whole_s)
        while ceiling_s > searched_s:
            bands = self._bands.under(ceiling_s)
            if self._bands.pairs(bands, ceiling_s) > most_pairs:
                ceiling_s = (max(searched_s, fluid.largest_s) + ceiling_s) / 2
                if ceiling_s < max(searched_s, fluid.largest_s) * _LEAST_RISE:
                    break
                continue
            best = self._under(bands, ceiling_s, best)
            searched_s = ceiling_s
            ceiling_s = self._needed_s(best, searched_s)
        if searched_s >= fluid.whole_s:
            return best, math.inf
        return best, fluid.beyond_s(max(searched_s, fluid.largest_s), self._problem.steady)

    def _needed_s(self, best: GraphSolution | None, searched_s: float) -> float:
        """Ceiling above which no split can be better, or one somewhat higher if none is known."""
        fluid, steady = self._fluid, self._problem.steady
        if best is None:
            return min(_RISE * searched_s, fluid.whole_s)
        if meets(fluid.beyond_s(searched_s, steady), best.objective_s):
            return searched_s
        if steady == 0:
            return fluid.whole_s
        return min((best.objective_s - fluid.fill_s - fluid.sync_s) / steady, fluid.whole_s)

    def _under(
        self, bands: list[Indices], ceiling_s: float, best: GraphSolution | None
    ) -> GraphSolution | None:
        """Best split with no stage above the ceiling, if it is better than `best`."""
        hops = self._bands.hops(bands, ceiling_s)
        table = StepTable(
            self._knapsacks,
            every=self._every,
            bands=bands,
            hops=hops,
            cut_s=self._cut_s,
            known=self._known,
        )
        better = best_split(
            table,
            lambda path: self._assembled(table, path),
            cutoff_s=math.inf if best is None else best.objective_s,
        )
        return best if better is None else better

    def _assembled(self, table: StepTable, path: Path) -> GraphSolution:
        """Choose the options of every stage and evaluate the split as that of a chain."""
        problem = self._problem
        stages = [table.layers(step) for step in path.steps]
        options: list[int] = []
        for stage, held in enumerate(stages):
            kinds = [problem.layers[layer] for layer in held]
            options += fastest_options(self._knapsacks, kinds, stage, table.sync_limit_s)
        order = tuple(layer for held in stages for layer in held)
        cuts = tuple(accumulate((len(held) for held in stages), initial=0))
        return _named(problem, order, assembled(problem.chain_along(order), cuts, options))


def _named(
    problem: GraphInstance, order: Order, split: Solution, method: Method = "lattice"
) -> GraphSolution:
    return GraphSolution(names=problem.names, order=order, split=split, method=method)


def _only_order(problem: GraphInstance, store: FrontierStore) -> GraphSolution | Infeasible:
    """Solve a graph that has one order as the chain that it is."""
    order = tuple(range(len(problem.layers)))
    answer = solve(problem.chain_along(order), frontiers=store)
    if isinstance(answer, Solution):
        return _named(problem, order, answer, "chain")
    return Infeasible(_why_infeasible(problem))


def _best_order(
    problem: GraphInstance, store: FrontierStore, best: GraphSolution | None
) -> GraphSolution | None:
    """Best of `best` and of several orders, each solved exactly as a chain."""
    for order in orders(problem).values():
        cutoff_s = math.inf if best is None else best.objective_s
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
