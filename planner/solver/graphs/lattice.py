"""The exact solver for graphs on devices of one type: the best split over all orders of branches.

Splits are paths through the lattice of ideals (`planner.solver.graphs.ideals`), one step per
stage.  The search rises from target to target, beginning at a bound for all splits.  A target
allows no stage above

    ceiling = (target - least sum - least sync) / steady

which leaves narrow bands of ideals (`planner.solver.graphs.lattice`), and only those steps between
them that some split below the target can take (`planner.solver.graphs.sweep`).  Steps start with
bounds on their seconds (`planner.solver.bounds.lagrangian_bounds`) that become exact when the
cheapest path wants to use them (`planner.solver.lazy_path`).  All costs being bounds, a path whose
steps are exact is the optimum; if there is no path, the target is a bound for all splits, and the
next one higher.

Where a target leaves too much of the lattice, the last one is a proven bound.  The split is then
the best one through some ideals (`planner.solver.graphs.nearby`): those of several orders, and
those around the cuts of the split so far.  What cuts cost at least wherever they are bounds it
(`meshwright.planner.solver.graphs.cut_bounds`).

Which ideals can lie between two stages under a ceiling on stage seconds.

The stages before a cut host at most as much work as they have room for, and so do those after it:
`planner.solver.bounds.fractional_bound` turns a ceiling into a range of work for each cut, which
leaves a band of ideals.  No split under the ceiling is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.solver.bottleneck_path import Way, cheapest, evaluate_way
from meshwright.planner.solver.bounds.fractional_bound import Fluid
from meshwright.planner.solver.bounds.lagrangian_bounds import StepBounds
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphEffort, GraphInstance, GraphSolution
from meshwright.planner.solver.graphs.cut_bounds import CutBounds
from meshwright.planner.solver.graphs.ideals import Ideals
from meshwright.planner.solver.graphs.nearby import Neighbourhood, along_orders, cuts_of, of_bits
from meshwright.planner.solver.graphs.sweep import Sweep, TargetBound
from meshwright.planner.solver.knapsack import Knapsacks
from meshwright.planner.solver.lazy_path import WaysLeft, best_split, loose_s
from meshwright.planner.solver.split import graph_solution
from meshwright.planner.solver.stage_table import Known, StepTable
from meshwright.planner.system.lazy_imports import OnUse

_TURNS = 4  # of narrowing the bands of one ceiling ...
_WORTHWHILE_SHARE = 0.9  # ... while at most this share of them is left


class Bands:
    """Bands of ideals for any ceiling.

    `cut_s` [ideal] is what a cut costs each of the stages that meet there.
    """

    def __init__(self, every: Ideals, knapsacks: Knapsacks, fluid: Fluid, cut_s: Floats) -> None:
        self._every = every
        self._fluid = fluid
        self._cut_s = cut_s
        self._scale, self._exposed_s = knapsacks.time_scale, knapsacks.exposed_s
        least_s = knapsacks.options.least_time_s[knapsacks.layers]
        totals = every.totals(np.stack([least_s, np.ones(len(least_s))], axis=1))
        self._until_s = totals[:, 0]
        self._sizes = totals[:, 1]
        self._slack_s = ROUNDING * float(self._until_s[-1])

    def ideals_under(self, ceiling_s: float) -> list[Indices]:
        """[cut] Ideals that can lie there, rising; the ends of the pipeline included.

        A cut costs at least what it costs at the cheapest ideal of its band.  That leaves the
        stages less room, which narrows the bands again.
        """
        bands = self._roughly(ceiling_s)
        member = np.zeros(len(self._every), dtype=bool)
        for band in bands:
            member[band] = True
        members = np.flatnonzero(member)
        work = self._every.totals(self._fluid.prices.T, members)
        done = [work[np.searchsorted(members, band)] for band in bands]
        for _ in range(_TURNS):
            if not all(len(band) for band in bands):
                break
            least_s = np.array([self._cut_s[band].min() for band in bands])
            ranges = self._fluid.ranges(ceiling_s, least_s)
            before = sum(len(band) for band in bands)
            for cut, band in enumerate(bands):
                further_s = (self._cut_s[band] - least_s[cut])[:, None]
                lower = ranges.lower[:, cut] + further_s * ranges.lower_per_s[:, cut]
                upper = ranges.upper[:, cut] - further_s * ranges.upper_per_s[:, cut]
                inside = np.all((done[cut] >= lower) & (done[cut] <= upper), axis=1)
                bands[cut], done[cut] = band[inside], done[cut][inside]
            if sum(len(band) for band in bands) > _WORTHWHILE_SHARE * before:
                break
        return [np.zeros(1, dtype=np.intp), *bands, np.array([len(self._every) - 1])]

    def _roughly(self, ceiling_s: float) -> list[Indices]:
        """[cut] Ideals that leave the stages on both sides layers enough, not too many seconds."""
        stages, layers = len(self._scale), self._every.layers
        own_s = np.maximum((ceiling_s - self._exposed_s) / self._scale, 0.0)
        before = np.cumsum(own_s)[:-1] + self._slack_s
        after = np.cumsum(own_s[::-1])[-2::-1] + self._slack_s
        return [
            np.flatnonzero(
                (self._until_s <= before[cut])
                & (self._until_s >= self._until_s[-1] - after[cut])
                & (self._sizes > cut)
                & (self._sizes <= layers - stages + cut + 1)
            )
            for cut in range(stages - 1)
        ]


networkx = OnUse("networkx", "a graph of layers")  # loads slowly, and chains need none of it

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_ROWS = 1 << 16  # steps looked at together
# Moves of all cuts of a split, at most; ideals around each; what is gained to go on, as a share.
_MOVES, _NEAR, _WORTHWHILE = 12, 400, 1e-4
# Pairs of them that are compared at once, and ways through them that are looked at exactly.
_PAIRS, _SETTLED = 10_000_000, 8
# Ideals of a graph from which on a first split from several orders is worth its time.
_LARGE = 3000
# By what share of the fluid bound targets rise, at first and as a share of the rise so far.
_RISE_SMALL, _RISE_LARGE, _RISE_ON = 0.08, 0.01, 0.3
# Targets this close together are not worth a search of their own.
_LEAST_RISE = 0.004


def split_alike(
    problem: GraphInstance,
    every: Ideals | None,
    store: FrontierStore,
    cutoff_s: float,
    effort: GraphEffort,
) -> tuple[GraphSolution | None, float]:
    """Return a split below the cutoff, and what none takes less than; inf if none fits.

    Exact if the graph has few enough downsets that they are all known, and few pairs of them are
    compared at once.
    """
    best: GraphSolution | None = None
    if every is None:
        fluid = _any_order(problem, store)
        bound_s = fluid.beyond_s(fluid.largest_s, problem.chain.steady)
    else:
        rival = _along_orders(problem, cutoff_s, store) if len(every) > _LARGE else None
        lattice = Lattice(problem, every, store)
        left = WaysLeft(min(effort.ways, effort.most_ways))
        first = left.number
        best, bound_s = lattice.search(rival, effort.most_pairs, cutoff_s, left)
        if first < math.inf:
            effort.ways -= first - left.number
    if bound_s < (cutoff_s if best is None else best.objective_s):
        best, bound_s = _closer(problem, best, bound_s, cutoff_s, store, effort)
    return best, bound_s


class Lattice:
    """All splits of a graph whose ideals are known."""

    def __init__(
        self,
        problem: GraphInstance,
        every: Ideals,
        store: FrontierStore,
        *,
        settled: int | None = None,
        visited: int = 0,
    ) -> None:
        """With `settled` this number of ways is looked at exactly, and the best of those is taken.

        `visited` parts of choices were looked at before.
        """
        self._settled = settled
        self._problem = problem
        self._every = every
        self._knapsacks = Knapsacks(problem.chain, store)
        self._knapsacks.visited = visited
        readers = problem.readers()
        self._sent = None if problem.relayed else Sent(readers, problem.sent_s())
        self._cut_s = np.zeros(len(every))
        if problem.relayed:
            self._cut_s = every.crossing(readers, np.array(problem.sent_s()))
        self._fluid = Fluid(
            self._knapsacks,
            least_cut_s=float(self._cut_s[1:-1].min(initial=math.inf)),
            most_cut_s=float(self._cut_s.max()) if problem.relayed else sum(problem.sent_s()),
        )
        self._bands = Bands(every, self._knapsacks, self._fluid, self._cut_s)
        self._known: Known = {}

    @property
    def visited_parts(self) -> int:
        """Parts of choices of options that were looked at, those before included."""
        return self._knapsacks.visited

    def search(
        self,
        rival: GraphSolution | None,
        most_pairs: int,
        cutoff_s: float = math.inf,
        left: WaysLeft | None = None,
    ) -> tuple[GraphSolution | None, float]:
        """Return the best split below the cutoff, or else `rival`, and a bound of all splits.

        The bound is inf if nothing fits.
        """
        fluid = self._fluid
        steady, stages = self._problem.chain.steady, len(self._problem.chain.stages)
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
            if self._settled is not None:
                split = self._good(table, target_s)
                if split is not None or target_s == most_s or self._settled <= 0:
                    return split or rival, least_s
                proven_s = target_s
                rise_s = max(rise_s, _RISE_ON * (proven_s - least_s))
                continue
            left = left or WaysLeft()
            assemble = partial(self._assemble, table)
            split = best_split(table, assemble, cutoff_s=target_s, left=left)
            known_s = target_s if split is None else split.objective_s
            least_open_s = min(loose_s(table, cutoff_s=known_s), left.open_s)
            if least_open_s < known_s:
                return split or rival, max(proven_s, least_open_s)
            if split is not None:
                return split, split.objective_s
            if target_s == most_s:
                return rival, most_s
            proven_s = target_s
            if rises:
                rise_s = max(rise_s, _RISE_ON * (proven_s - least_s))

    def _good(self, table: StepTable, below_s: float) -> GraphSolution | None:
        """Return the best of the cheapest ways below a limit, few of which are looked at."""
        best: GraphSolution | None = None
        assert self._settled is not None
        while self._settled > 0:
            path = cheapest(table.ways, table.costs(), cutoff_s=below_s)
            if path is None:
                break
            self._settled -= 1
            table.settle(path.way)
            actual = evaluate_way(table.ways, table.costs(), path.way)
            if actual.value_s < below_s:
                best = self._assemble(table, actual)
                below_s = best.objective_s * (1 - _WORTHWHILE)
        return best

    def _table(self, target_s: float, most_pairs: int) -> StepTable | None:
        """Steps of all splits below the target; None if too many pairs must be compared for it."""
        fluid, steady = self._fluid, self._problem.chain.steady
        ceiling_s = fluid.whole_s
        if steady:
            ceiling_s = min(ceiling_s, (target_s - fluid.fill_s - fluid.sync_s) / steady)
        bands = self._bands.ideals_under(ceiling_s)
        member = np.zeros(len(self._every), dtype=bool)
        for band in bands:
            member[band] = True
        members = np.flatnonzero(member)
        places = [np.searchsorted(members, band) for band in bands]
        sent = None if self._sent is None else self._sent.between(self._every, members)
        bounds = StepBounds(
            self._knapsacks, self._every, members, self._cut_s, sent, self._problem.unpaid
        )
        aim = TargetBound(ceiling_s=ceiling_s, cutoff_s=target_s, sync_s=fluid.sync_s)
        hops = Sweep(bounds, self._every, places, aim).hops(most_pairs)
        if hops is None:
            return None
        return StepTable(
            bounds,
            [(hop.smaller, hop.larger) for hop in hops],
            self._known,
            np.concatenate([hop.stage_s for hop in hops]),
        )

    def _assemble(self, table: StepTable, path: Way) -> GraphSolution:
        """Choose the options of every stage and evaluate the split as that of a chain."""
        order, cuts, options = table.laid(path.way)
        return graph_solution(self._problem, order, cuts, options)


def _along_orders(
    problem: GraphInstance,
    cutoff_s: float,
    store: FrontierStore,
    effort: GraphEffort | None = None,
) -> GraphSolution | None:
    """Best split below the cutoff through what a few orders have first."""
    some = of_bits(along_orders(problem), len(problem.chain.layers))
    solution = _through(problem, some, None, cutoff_s, store, effort or GraphEffort())
    return None if solution is None else replace(solution, method="orders")


def _through(
    problem: GraphInstance,
    some: Ideals,
    rival: GraphSolution | None,
    cutoff_s: float,
    store: FrontierStore,
    effort: GraphEffort,
) -> GraphSolution | None:
    """Best split below the cutoff through some downsets, few ways looked at; or else the rival."""
    lattice = Lattice(problem, some, store, settled=_SETTLED, visited=effort.visited)
    split, _ = lattice.search(rival, _PAIRS, cutoff_s)
    effort.visited = lattice.visited_parts
    return split


def _closer(
    problem: GraphInstance,
    best: GraphSolution | None,
    bound_s: float,
    cutoff_s: float,
    store: FrontierStore,
    effort: GraphEffort,
) -> tuple[GraphSolution | None, float]:
    """Return a better split below the cutoff, and a higher bound, within an effort."""
    best = best or _along_orders(problem, cutoff_s, store, effort)
    known_s = cutoff_s if best is None else best.objective_s
    if problem.relayed and effort.programs > 0:
        # A first bound may spare the moves.
        few = min(effort.programs, 2 * len(problem.chain.stages))
        bound_s = max(bound_s, _cut_bound_s(problem, known_s, best, store, effort, few))
    if best is None or bound_s >= known_s:
        return best, bound_s
    best = _improve(problem, best, store, effort)
    more = min(effort.programs, effort.most_programs)
    if problem.relayed and more > 0 and bound_s < best.objective_s:
        bound_s = max(bound_s, _cut_bound_s(problem, best.objective_s, best, store, effort, more))
    return best, bound_s


def _improve(
    problem: GraphInstance, best: GraphSolution, store: FrontierStore, effort: GraphEffort
) -> GraphSolution:
    """Move all cuts of a split at once, as long as that makes it faster and not too often."""
    around, orders = Neighbourhood(problem), along_orders(problem)
    for _ in range(_MOVES):
        if effort.moves <= 0:
            break
        effort.moves -= 1
        cuts = cuts_of(best)
        some = of_bits({*orders, *around.cuts(cuts[1:-1], _NEAR)}, len(problem.chain.layers))
        solution = _through(problem, some, best, math.inf, store, effort)
        if solution is None or solution.objective_s >= best.objective_s * (1 - _WORTHWHILE):
            break
        best = replace(solution, method="orders")
    return best


def _cut_bound_s(
    problem: GraphInstance,
    below_s: float,
    best: GraphSolution | None,
    store: FrontierStore,
    effort: GraphEffort,
    programs: int,
) -> float:
    """Bound all splits by what cuts cost at least wherever they are, by a number of programs."""
    cuts_s = [0.0]
    if best is not None:
        along = problem.along(best.order).cut_s
        cuts_s = [along[cut] for cut in best.split.cuts[1:-1]] or cuts_s
    knapsacks = Knapsacks(problem.chain, store)
    fluid = Fluid(knapsacks, least_cut_s=0.0, most_cut_s=sum(problem.sent_s()))
    bounds = CutBounds(
        problem,
        fluid,
        knapsacks.exposed_s,
        programs=programs,
        iterations=min(effort.iterations, effort.most_iterations),
    )
    least_s = bounds.bound_s(below_s, sum(cuts_s) / len(cuts_s))
    effort.programs -= bounds.programs_run
    effort.iterations -= bounds.iterations_run
    return least_s


def _any_order(problem: GraphInstance, store: FrontierStore) -> Fluid:
    """Fluid of the layers where the cuts are not known.

    In a connected graph some output crosses every cut.
    """
    graph, output_s = networkx.Graph(problem.edges), problem.sent_s()
    connected = len(graph) == len(problem.chain.layers) and networkx.is_connected(graph)
    sent_s = [output_s[before] for before, _ in problem.edges]
    return Fluid(
        Knapsacks(problem.chain, store),
        least_cut_s=min(sent_s) if connected and problem.relayed else 0.0,
        most_cut_s=sum(output_s),
    )


@dataclass(frozen=True, slots=True)
class Sent:
    """Seconds that stages pay for outputs sent straight to their readers, without relays.

    A step from ideal I to J sends the outputs of J - I that a layer outside J reads, and receives
    those of I that a layer of J - I reads: each output once, whatever lies between.  `readers`
    [layer] of each output, and its seconds at either end.
    """

    readers: Sequence[Sequence[int]]
    output_s: Sequence[float]

    def between(self, every: Ideals, members: Indices) -> Callable[[Indices, Indices], Floats]:
        """Return what steps between these members pay, by positions among them."""
        layers = [at for at, s in enumerate(self.output_s) if s and self.readers[at]]
        output_s = np.array([self.output_s[at] for at in layers])
        most = np.array([len(self.readers[at]) for at in layers], dtype=np.int16)
        counted = np.zeros((len(members), len(layers)), dtype=np.int16)
        inside = np.zeros((len(members), len(layers)), dtype=bool)
        for column, layer in enumerate(layers):
            inside[:, column] = every.contains(layer)[members]
            for reader in self.readers[layer]:
                counted[:, column] += every.contains(reader)[members]

        def seconds(smaller: Indices, larger: Indices) -> Floats:
            bounds = np.empty(len(smaller))
            for start in range(0, len(smaller), _ROWS):
                a, b = smaller[start : start + _ROWS], larger[start : start + _ROWS]
                received = inside[a] & (counted[b] > counted[a])
                sends = inside[b] & ~inside[a] & (counted[b] < most)
                bounds[start : start + _ROWS] = (received | sends) @ output_s
            return bounds

        return seconds
