"""The exact solver of chains, and of graphs on several types: the order of types, and the split.

Between two stages a split is in a state (layers so far, stages used of each type, type before,
type after), and takes one step per stage: `planner.solver.heterogeneous.steps` has the steps,
`planner.solver.paths` finds the cheapest path exactly.  A ceiling on stage seconds keeps the
states few (`planner.solver.heterogeneous.reach`), and rises until it is high enough: a split with a
stage above it takes at least

    steady · ceiling + Σ_l min_g (fill · time_scale_g · t_gl - credit) + fill · Σ exposed + sync

with the fastest options t_gl of layer l on type g, and a least sync of the mean over stages or of
the one layer with the most (`meshwright.planner.solver.heterogeneous.fastest_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SETTLED, SLACK
from meshwright.planner.solver.bottleneck_path import Way, meets
from meshwright.planner.solver.bounds.downsets import Downsets, Prefixes, Runs
from meshwright.planner.solver.bounds.memory_feasibility import why_infeasible
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution, Method
from meshwright.planner.solver.heterogeneous.fastest_bound import FastestOnTypes
from meshwright.planner.solver.heterogeneous.reach import Reach, Spans
from meshwright.planner.solver.knapsack import Knapsacks
from meshwright.planner.solver.lazy_path import best_split, loose_s
from meshwright.planner.solver.split import graph_solution
from meshwright.planner.solver.stage_table import Known, StepTable

if TYPE_CHECKING:
    from meshwright.planner.solver.heterogeneous.steps import CutSeconds, UnequalSteps

Floats = NDArray[np.float64]

# Ceiling to begin with over the least that could do, and its rise while nothing fits under it.
_FIRST, _RISE = 1.06, 1.1


class Search:
    """One problem under rising ceilings; `least_s` is the first that can do, `whole_s` the last.

    No split takes less than `bound_s`.  Stages end with some of the downsets of `every`; `pairs`
    are those that lie in others, None for a chain, of which the ceilings tell how long runs are.

    Among equally fast splits of a chain the one with the earliest cuts is found: seconds are
    rounded to a grid, so that equal sums are equal in any order.
    """

    def __init__(
        self,
        problem: GraphInstance,
        store: FrontierStore,
        cutoff_s: float,
        every: Downsets,
        pairs: Runs | None,
    ) -> None:
        self._problem, self._chain = problem, problem.chain
        self._cutoff_s = cutoff_s
        self._every, self._pairs = every, pairs
        readers = problem.readers() if problem.output_s else []
        self._cut_s: CutSeconds = [
            [every.crossing(readers, np.array(output_s)) for output_s in row]
            for row in problem.output_s
        ]
        each_s = [cuts for row in self._cut_s for cuts in row]
        self._least_cut_s = np.min(each_s, axis=0) if each_s else np.zeros(len(every))
        inner = [cuts[1:-1] for cuts in each_s if len(cuts) > 2]
        least_cut_s = min((float(cuts.min()) for cuts in inner), default=0.0)
        self._most_cut_s = max((float(cuts.max()) for cuts in inner), default=0.0)
        self._knapsacks = [Knapsacks(device_type.chain, store) for device_type in problem.types]
        self._known: list[Known] = [{} for _ in problem.types]
        self._loose_s = math.inf
        """Least seconds of splits under the last ceiling, if some are not known exactly."""
        chain, exposed_s = (
            self._chain,
            np.min([knapsack.exposed_s for knapsack in self._knapsacks], axis=0),
        )
        self._fastest, self._sync_s = fastest_on(problem, self._knapsacks)
        besides_s = float(exposed_s.sum()) + 2 * (len(exposed_s) - 1) * least_cut_s
        # What a split takes besides its slowest stage.
        self._rest_s = self._fastest.weighed_s(chain.fill) + chain.fill * besides_s + self._sync_s
        self.whole_s = self._longest_stage_s()
        self._quantum_s = self._grid_s()
        self._span_s = math.inf
        self._reach = self._reach_under(self._likely_s())
        self.least_s = self._reach.lowest_ceiling_s
        self.bound_s = math.inf  # not 0 · inf, with one micro-batch
        if self.least_s < math.inf:
            self.bound_s = chain.steady * (1 - SLACK) * self.least_s + self._rest_s
            self.bound_s = max(self.bound_s, self._mean_s(least_cut_s))

    def _grid_s(self) -> float:
        """Seconds of which all others are multiples: far finer than sums, which stay exact."""
        fastest_s = float(self._fastest.time_s.min(axis=0) @ self._fastest.counts)
        return 2.0 ** (math.frexp(fastest_s or 1.0)[1] - 43)

    def _likely_s(self) -> float:
        """Seconds of a stage of a good split, or more."""
        balanced_s = longest_s = exposed_s = 0.0
        rate = 0.0
        for device_type, knapsacks in zip(self._problem.types, self._knapsacks, strict=True):
            options, pace = knapsacks.options, knapsacks.time_scale
            most_s = options.time_s.max(axis=1, where=options.present, initial=0.0)
            balanced_s = max(balanced_s, float(most_s[knapsacks.layers].sum()))
            longest_s = max(longest_s, float(most_s.max() * pace.min()))
            exposed_s = max(exposed_s, float(knapsacks.exposed_s.max()))
            rate += device_type.stages * float((1 / pace).mean())
        return balanced_s / rate + longest_s + exposed_s + 2 * self._most_cut_s

    def _reach_under(self, ceiling_s: float) -> Reach:
        """Return what stages may hold; a ceiling that is enough limits the runs of a chain.

        The least ceiling is exact if it is no higher.
        """
        numbers = [device_type.stages for device_type in self._problem.types]
        cut_s = self._least_cut_s
        if self._pairs is not None:
            return Reach(self._knapsacks, numbers, self._every, self._pairs, cut_s)
        while True:
            self._span_s = ceiling_s if ceiling_s < self.whole_s else math.inf
            runs = self._runs(self._span_s)
            reach = Reach(self._knapsacks, numbers, self._every, runs, cut_s)
            if reach.lowest_ceiling_s <= self._span_s:
                return reach
            nowhere = len(numbers) == 1 and reach.lowest_ceiling_s == math.inf
            if nowhere and why_infeasible(self._problem.along(range(self._every.layers))):
                return reach
            ceiling_s = min(2 * ceiling_s, reach.lowest_ceiling_s)

    def _runs(self, ceiling_s: float) -> Runs:
        """Runs of a chain whose layers at their fastest take no more than a ceiling, rising."""
        layers = self._knapsacks[0].layers
        least_s = np.min(
            [
                knapsack.options.least_time_s[layers] * knapsack.time_scale.min()
                for knapsack in self._knapsacks
            ],
            axis=0,
        )
        until_s = np.append(0.0, np.cumsum(least_s))
        # A little more than the ceiling: one run too many is harmless, one too few is not.
        longest_s = until_s[:-1] + ceiling_s + ROUNDING * until_s[-1]
        ends = np.searchsorted(until_s, longest_s, "right") - 1
        numbers = ends - np.arange(len(layers))
        smaller = np.repeat(np.arange(len(layers)), numbers)
        within = np.arange(len(smaller)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        return smaller, smaller + within + 1

    def solve(self) -> tuple[GraphSolution | None, float]:
        """Return a split below the cutoff, and what none takes less than; inf if none fits."""
        if self.least_s == math.inf or meets(self.bound_s, self._cutoff_s):
            return None, self.bound_s
        best: GraphSolution | None = None
        searched_s, ceiling_s = -math.inf, self.first_s()
        while ceiling_s > searched_s:
            best = self.best_under(ceiling_s, best)
            searched_s = ceiling_s
            ceiling_s = self.needed_s(best, searched_s)
        known_s = self._cutoff_s if best is None else best.objective_s
        return best, max(self.bound_s, min(known_s, self._loose_s))

    def _longest_stage_s(self) -> float:
        """Seconds of all layers in their slowest options on the slowest type."""
        longest_s = 0.0
        for knapsacks in self._knapsacks:
            options = knapsacks.options
            slowest_s = options.time_s.max(axis=1, where=options.present, initial=0.0)
            own_s = float(knapsacks.time_scale.max() * slowest_s[knapsacks.layers].sum())
            exposed_s = float(knapsacks.exposed_s.max())
            longest_s = max(longest_s, own_s + exposed_s + 2 * self._most_cut_s)
        return longest_s * (1 + SLACK)

    def _mean_s(self, least_cut_s: float) -> float:
        """Least seconds with the slowest stage as a mean of stages."""
        weights, stages = self._fastest.weights(), self._fastest.stages
        of_stages = np.repeat(weights, stages)
        neighbours = np.full(len(of_stages), 2.0)
        neighbours[:2] -= 1.0 if len(of_stages) > 1 else 2.0
        besides_s = float(np.sort(of_stages)[::-1] @ neighbours) * least_cut_s
        exposed_s = np.array([knapsack.exposed_s.min() for knapsack in self._knapsacks])
        besides_s += float(stages @ (weights * exposed_s))
        return (1 - ROUNDING) * (self._fastest.weighed_s(weights) + besides_s + self._sync_s)

    def first_s(self) -> float:
        """Ceiling to begin with; above 0, so that it can rise.

        It is no higher than what a split below the cutoff can have.
        """
        first_s = min(_FIRST * max(self.least_s, 1e-3 * self.whole_s), self.whole_s)
        return max(self.least_s, min(first_s, self._highest_s(self._cutoff_s)))

    def needed_s(self, best: GraphSolution | None, searched_s: float) -> float:
        """Ceiling above which no split can be better, or one somewhat higher if none is known."""
        steady = self._chain.steady
        known_s = self._cutoff_s if best is None else best.objective_s
        if meets(steady * searched_s + self._rest_s, known_s):
            return searched_s
        highest_s = self._highest_s(known_s)
        return highest_s if best is not None else min(_RISE * searched_s, highest_s)

    def _highest_s(self, known_s: float) -> float:
        """Seconds of a stage above which a split takes more than what is known."""
        steady = self._chain.steady
        if steady > 0 and known_s < math.inf:
            return min((known_s - self._rest_s) / steady, self.whole_s)
        return self.whole_s

    def best_under(self, ceiling_s: float, best: GraphSolution | None) -> GraphSolution | None:
        """Best split with no stage above the ceiling, if it is better than `best`."""
        if ceiling_s > self._span_s:
            self._reach = self._reach_under(ceiling_s)
        spans = self._reach.spans(ceiling_s)
        if spans is None:
            return best
        cutoff_s = self._cutoff_s if best is None else best.objective_s
        limit_s = self._highest_s(cutoff_s) * (1 + SETTLED)
        steps = self._steps(spans, limit_s)
        better = best_split(steps, lambda path: self._assemble(steps, path), cutoff_s=cutoff_s)
        best = best if better is None else better
        known_s = self._cutoff_s if best is None else best.objective_s
        self._loose_s = loose_s(steps, cutoff_s=known_s)
        return best

    def _steps(self, spans: Spans, limit_s: float) -> StepTable | UnequalSteps:
        """Steps under a ceiling; of stages above a limit nobody wants to know how long."""
        bounds = self._reach.bounds
        if len(bounds) > 1:
            from meshwright.planner.solver.heterogeneous.steps import UnequalSteps  # noqa: PLC0415 - see below

            return UnequalSteps(
                bounds,
                cached_costs=self._known,
                spans=spans,
                cut_s=self._cut_s,
                quantum_s=self._quantum_s,
                limit_s=limit_s,
            )
        stages = zip(spans.runs, spans.least_s[0], strict=True)
        cuts_s = bounds[0].cut_s
        least_s = [own_s + cuts_s[a] + cuts_s[b] for (a, b), own_s in stages]
        return StepTable(
            bounds[0],
            spans.runs,
            self._known[0],
            np.concatenate(least_s),
            quantum_s=self._quantum_s,
            limit_s=limit_s,
        )

    def _assemble(self, steps: StepTable | UnequalSteps, path: Way) -> GraphSolution:
        """Choose the options of every stage and evaluate the split from raw numbers."""
        method: Method = "chain" if isinstance(self._every, Prefixes) else "lattice"
        types = () if isinstance(steps, StepTable) else steps.type_of[list(path.way)].tolist()
        return graph_solution(self._problem, *steps.laid(path.way), types, method)


def fastest_on(
    problem: GraphInstance, knapsacks: Sequence[Knapsacks]
) -> tuple[FastestOnTypes, float]:
    """Return layers at their fastest, and the least sync of a mean stage or of a layer.

    Stages of one type have one pace, or there is one type.
    """
    chain = problem.chain
    counts = np.bincount(knapsacks[0].layers, minlength=len(chain.kinds))
    sync_s = np.min([knapsack.options.sync_s.min(axis=1) for knapsack in knapsacks], axis=0)
    none = (0.0,) * len(chain.kinds)
    each_s = np.array([knapsack.options.least_time_s for knapsack in knapsacks])
    credits_s = np.array([device_type.chain.credits_s or none for device_type in problem.types])
    scale = np.array([knapsack.time_scale[0] for knapsack in knapsacks])
    stages = np.array([device_type.stages for device_type in problem.types])
    if len(knapsacks) == 1:  # whose stages may each have a pace of their own
        scale, stages = np.unique(knapsacks[0].time_scale, return_counts=True)
    fastest = FastestOnTypes(
        counts=counts,
        time_s=scale[:, None] * each_s,
        credits_s=scale[:, None] * credits_s,
        stages=stages,
        steady=chain.steady,
        fill=chain.fill,
    )
    mean_s = float(counts @ sync_s) / len(chain.stages)
    return fastest, max(float(sync_s[counts > 0].max()), mean_s)
