"""The exact solver for devices of several types: their order along the pipeline, and the split.

Between two stages a split is in a state (layers so far, stages used of each type, type before,
type after), and takes one step per stage: `planner.solver.unequal.unequal_steps` has the steps,
`planner.solver.paths` finds the cheapest path exactly.  A ceiling on stage seconds keeps the
states few (`planner.solver.unequal.reach`), and rises until it is high enough: a split with a stage
above it takes at least

    steady · ceiling + Σ_l min_g (fill · time_scale_g · t_gl - credit) + fill · Σ exposed + sync

with the fastest options t_gl of layer l on type g, and a least sync of the mean over stages or of
the one layer with the most (`planner.solver.unequal.fastest`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.documents.tolerances import ROUNDING, SLACK
from planner.solver.assembly import placed
from planner.solver.descent import Way, meets
from planner.solver.frontier import FrontierStore
from planner.solver.graph_instance import GraphInstance, GraphSolution, Method
from planner.solver.knapsack import Knapsacks
from planner.solver.prefixes import Downsets, Prefixes, Runs
from planner.solver.settled import best_split, loose_s
from planner.solver.table import Known
from planner.solver.unequal.fastest import FastestOnTypes
from planner.solver.unequal.reach import Reach
from planner.solver.unequal.unequal_steps import CutSeconds, UnequalSteps

Floats = NDArray[np.float64]

# Ceiling to begin with over the least that could do, and its rise while nothing fits under it.
_FIRST, _RISE = 1.06, 1.1


class Search:
    """One problem under rising ceilings; `least_s` is the first that can do, `whole_s` the last.

    No split takes less than `bound_s`.  Stages end with some of the downsets of `every`; `pairs`
    are those that lie in others.
    """

    def __init__(
        self,
        problem: GraphInstance,
        store: FrontierStore,
        cutoff_s: float,
        every: Downsets,
        pairs: Runs,
    ) -> None:
        self._problem, self._chain = problem, problem.chain
        self._cutoff_s = cutoff_s
        self._every = every
        readers = problem.readers() if problem.output_s else []
        self._cut_s: CutSeconds = [
            [every.crossing(readers, np.array(output_s)) for output_s in row]
            for row in problem.output_s
        ]
        inner = [cuts[1:-1] for row in self._cut_s for cuts in row if len(cuts) > 2]
        self._least_cut_s = min((float(cuts.min()) for cuts in inner), default=0.0)
        self._most_cut_s = max((float(cuts.max()) for cuts in inner), default=0.0)
        self._knapsacks = [Knapsacks(one.chain, store) for one in problem.types]
        self._known: list[Known] = [{} for _ in problem.types]
        self._loose_s = math.inf
        """What splits under the last ceiling take at least, if some are not known exactly."""
        numbers = [one.stages for one in problem.types]
        self._reach = Reach(self._knapsacks, numbers, every, pairs, self._least_cut_s)
        chain, exposed_s = self._chain, np.min([one.exposed_s for one in self._knapsacks], axis=0)
        self._fastest, self._sync_s = fastest_on(problem, self._knapsacks)
        besides_s = float(exposed_s.sum()) + 2 * (len(exposed_s) - 1) * self._least_cut_s
        # What a split takes besides its slowest stage.
        self._rest_s = self._fastest.weighed_s(chain.fill) + chain.fill * besides_s + self._sync_s
        self.whole_s = self._longest_stage_s()
        self.least_s = self._reach.lowest_ceiling_s
        self.bound_s = math.inf  # not 0 · inf, with one micro-batch
        if self.least_s < math.inf:
            self.bound_s = chain.steady * (1 - SLACK) * self.least_s + self._rest_s
            self.bound_s = max(self.bound_s, self._mean_s())

    def solved(self) -> tuple[GraphSolution | None, float]:
        """Return a split below the cutoff, and what none takes less than; inf if none fits."""
        if self.least_s == math.inf or meets(self.bound_s, self._cutoff_s):
            return None, self.bound_s
        best: GraphSolution | None = None
        searched_s, ceiling_s = -math.inf, self.first_s()
        while ceiling_s > searched_s:
            best = self.under(ceiling_s, best)
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

    def _mean_s(self) -> float:
        """Least seconds with the slowest stage as a mean of stages."""
        weights, stages = self._fastest.weights(), self._fastest.stages
        each = np.repeat(weights, stages)
        neighbours = np.full(len(each), 2.0)
        neighbours[:2] -= 1.0 if len(each) > 1 else 2.0
        besides_s = float(np.sort(each)[::-1] @ neighbours) * self._least_cut_s
        exposed_s = [float(one.exposed_s.min()) for one in self._knapsacks]
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

    def under(self, ceiling_s: float, best: GraphSolution | None) -> GraphSolution | None:
        """Best split with no stage above the ceiling, if it is better than `best`."""
        spans = self._reach.spans(ceiling_s)
        if spans is None:
            return best
        steps = UnequalSteps(
            self._reach.bounds,
            known=self._known,
            spans=spans,
            cut_s=self._cut_s,
        )
        cutoff_s = self._cutoff_s if best is None else best.objective_s
        better = best_split(steps, lambda path: self._assembled(steps, path), cutoff_s=cutoff_s)
        best = best if better is None else better
        known_s = self._cutoff_s if best is None else best.objective_s
        self._loose_s = loose_s(steps, cutoff_s=known_s)
        return best

    def _assembled(self, steps: UnequalSteps, path: Way) -> GraphSolution:
        """Choose the options of every stage and evaluate the split from raw numbers."""
        types, cuts, layers, options = list[int](), [0], list[int](), list[int]()
        for step in path.way:
            types.append(int(steps.type_of[step]))
            table, entry = steps.tables[types[-1]], int(steps.entry[step])
            layers += table.layers(entry)
            options += table.options(entry)
            cuts.append(len(layers))
        method: Method = "chain" if isinstance(self._every, Prefixes) else "lattice"
        return placed(self._problem, layers, cuts, options, types, method)


def fastest_on(
    problem: GraphInstance, knapsacks: Sequence[Knapsacks]
) -> tuple[FastestOnTypes, float]:
    """Return layers at their fastest, and the least sync of a mean stage or of a layer."""
    chain = problem.chain
    counts = np.bincount(knapsacks[0].layers, minlength=len(chain.kinds))
    sync_s = np.min([one.options.sync_s.min(axis=1) for one in knapsacks], axis=0)
    scale = np.array([[one.time_scale[0]] for one in knapsacks])
    none = (0.0,) * len(chain.kinds)
    fastest = FastestOnTypes(
        counts=counts,
        time_s=scale * [one.options.least_time_s for one in knapsacks],
        credits_s=scale * [one.chain.credits_s or none for one in problem.types],
        stages=np.array([one.stages for one in problem.types]),
        steady=chain.steady,
        fill=chain.fill,
    )
    mean_s = float(counts @ sync_s) / len(chain.stages)
    return fastest, max(float(sync_s[counts > 0].max()), mean_s)
