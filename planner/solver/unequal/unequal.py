"""The exact solver for unequal devices: the order of their types along the pipeline, and the cuts.

    solve_unequal(problem) -> UnequalSolution     no order, cuts and options take less
                            | Infeasible          none fit in memory
                            | Fathomed            nothing is below the cutoff

Between two stages a split is in a state (layers so far, stages used of each type, type before,
type after), and takes one step per stage: `planner.solver.unequal.unequal_steps` has the steps,
`planner.solver.paths` finds the cheapest path exactly.  A ceiling on stage seconds keeps the
states few (`planner.solver.unequal.reach`), and rises until it is high enough: a split with a stage
above it takes at least

    steady · ceiling + Σ_l min_g (fill · time_scale_g · t_gl - credit) + fill · Σ exposed + sync

with the fastest options t_gl of layer l on type g, and a least sync of the mean over stages or of
the one layer with the most.  With weights y_g >= 0 of stages, Σ_g stages_g y_g = 1, no split takes
less than

    Σ_l min_g ((steady y_g + fill) · time_scale_g · t_gl - credit) + the same of exposed + sync
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solver.assembly import assembled
from planner.solver.descent import Way, meets
from planner.solver.frontier import FrontierStore
from planner.solver.inner import NEARLY_FITS
from planner.solver.instance import Fathomed, Infeasible, leanest_bytes
from planner.solver.knapsack import Knapsacks
from planner.solver.prefixes import Downsets, Prefixes
from planner.solver.settled import best_split, loose_s
from planner.solver.table import Known
from planner.solver.unequal.reach import LEAST_SHARE, Reach, Reaches, meets_of
from planner.solver.unequal.unequal_instance import UnequalInstance, UnequalSolution
from planner.solver.unequal.unequal_steps import CutSeconds, UnequalSteps
from planner.tolerances import ROUNDING, SLACK
from planner.units import bytes_text

Floats = NDArray[np.float64]

# Ceiling to begin with over the least that could do, and its rise while nothing fits under it.
_FIRST, _RISE = 1.06, 1.1


def solve_unequal(
    problem: UnequalInstance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
) -> UnequalSolution | Infeasible | Fathomed:
    """Minimise the time of `problem` over all orders of its device types, cuts and options.

    Only objectives below `cutoff_s` are of interest; with a finite one a problem that does not fit
    may be reported as fathomed.
    """
    layers, stages = len(problem.layers), len(problem.in_flight)
    if stages > layers:
        return Infeasible(f"{stages} stages need as many layers; the chain has {layers}")
    store = frontiers if frontiers is not None else FrontierStore()
    return Search(problem, store, cutoff_s, _Chain(problem)).solved()


def least_s(problem: UnequalInstance, *, frontiers: FrontierStore | None = None) -> float:
    """Return seconds below which no split within memory stays; inf if none fits."""
    if len(problem.in_flight) > len(problem.layers):
        return math.inf
    store = frontiers if frontiers is not None else FrontierStore()
    return Search(problem, store, math.inf, _Chain(problem)).bound_s


class Layers(Protocol):
    """How layers hang together: the downsets that stages can end with, and what cuts cost there."""

    @property
    def every(self) -> Downsets:
        """All downsets."""

    @property
    def cut_s(self) -> CutSeconds | None:
        """[type before][type after][downset] Seconds of each of the stages that meet behind it."""

    def reach(self, knapsacks: Sequence[Knapsacks], cut_s: float) -> Reaches:
        """Return how far stages get; `knapsacks` [type] have all stages of one type each.

        Each of two stages that meet spends `cut_s` there at least.
        """

    def along(self, order: Sequence[int]) -> UnequalInstance:
        """Return the chain of the layers in an order."""


class _Chain:
    """Layers in a chain: the first few are a downset."""

    def __init__(self, problem: UnequalInstance) -> None:
        self._problem = problem
        self.every = Prefixes(len(problem.layers))
        self.cut_s: CutSeconds | None = None
        if problem.cut_s:
            self.cut_s = [[np.array(cuts) for cuts in row] for row in problem.cut_s]

    def reach(self, knapsacks: Sequence[Knapsacks], cut_s: float) -> Reaches:
        """Return how far along the chain stages get."""
        return Reach(knapsacks, [one.stages for one in self._problem.types], cut_s)

    def along(self, order: Sequence[int]) -> UnequalInstance:
        """Return the chain; it has only one order."""
        assert list(order) == list(range(len(self._problem.layers))), "stages hold runs of layers"
        return self._problem


class Search:
    """One problem under rising ceilings; `least_s` is the first that can do, `whole_s` the last.

    No split takes less than `bound_s`.  What cuts cost is read from `layers` alone.
    """

    def __init__(
        self, problem: UnequalInstance, store: FrontierStore, cutoff_s: float, layers: Layers
    ) -> None:
        self._problem = problem
        self._cutoff_s = cutoff_s
        self._layers = layers
        inner = [cuts[1:-1] for row in layers.cut_s or () for cuts in row if len(cuts) > 2]
        self._least_cut_s = min((float(cuts.min()) for cuts in inner), default=0.0)
        self._most_cut_s = max((float(cuts.max()) for cuts in inner), default=0.0)
        self._knapsacks = [
            Knapsacks(problem.all_of(number), store) for number in range(len(problem.types))
        ]
        self._known: list[Known] = [{} for _ in problem.types]
        self._loose_s = math.inf
        """What splits under the last ceiling take at least, if some are not known exactly."""
        self._reach = layers.reach(self._knapsacks, self._least_cut_s)
        self._rest_s = self._least_besides_s()
        self.whole_s = self._longest_stage_s()
        self.least_s = self._reach.least_s(self.whole_s)
        self.bound_s = math.inf  # not 0 · inf, with one micro-batch
        if self.least_s < math.inf:
            self.bound_s = problem.steady * (1 - LEAST_SHARE) * self.least_s + self._rest_s
            self.bound_s = max(self.bound_s, self._mean_s())

    def solved(self) -> UnequalSolution | Infeasible | Fathomed:
        """Return the best order of types, cuts and options."""
        if self.least_s == math.inf:
            return Infeasible(why_infeasible(self._problem))
        if meets(self.bound_s, self._cutoff_s):
            return Fathomed(self.bound_s)
        best: UnequalSolution | None = None
        searched_s, ceiling_s = -math.inf, self.first_s()
        while ceiling_s > searched_s:
            best = self.under(ceiling_s, best)
            searched_s = ceiling_s
            ceiling_s = self.needed_s(best, searched_s)
        if best is not None:
            lower_bound_s = min(best.split.lower_bound_s, self._loose_s)
            return replace(best, split=replace(best.split, lower_bound_s=lower_bound_s))
        if self._cutoff_s < math.inf or self._loose_s < math.inf:
            return Fathomed(max(self.bound_s, min(self._cutoff_s, self._loose_s)))
        if any(one.used_bytes is not None for one in self._problem.types):
            return Infeasible(NEARLY_FITS)
        return Infeasible(why_infeasible(self._problem))

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

    def _least_besides_s(self) -> float:
        """Least sum over stages and least sync: what a split takes besides its slowest stage."""
        problem = self._problem
        each = [problem.fill] * len(problem.types)
        exposed_s = float(np.min([one.exposed_s for one in self._knapsacks], axis=0).sum())
        exposed_s += 2 * (len(problem.in_flight) - 1) * self._least_cut_s
        return self._weighed_s(each) + problem.fill * exposed_s + self._least_sync_s()

    def _mean_s(self) -> float:
        """Least seconds with the slowest stage as a mean of stages (`evened`)."""
        problem = self._problem
        stages = np.array([one.stages for one in problem.types])
        whole_s = np.array(
            [
                (one.time_scale[0] * one.options.least_time_s)[one.layers].sum()
                for one in self._knapsacks
            ]
        )
        if not whole_s.all():
            return 0.0
        weights = problem.steady * evened(stages, whole_s, problem.steady, problem.fill)
        weights += problem.fill
        exposed_s = [float(one.exposed_s.min()) for one in self._knapsacks]
        each = np.repeat(weights, stages)
        besides_s = float(stages @ (weights * exposed_s))
        neighbours = np.sort(meets_of(len(each)))
        besides_s += float(np.sort(each)[::-1] @ neighbours) * self._least_cut_s
        total_s = self._weighed_s(weights.tolist()) + besides_s + self._least_sync_s()
        return total_s * (1 - ROUNDING)

    def _weighed_s(self, weights: Sequence[float]) -> float:
        """Least seconds of layers less credits, each on the type where they weigh least."""
        each = []
        for number, (weight, one) in enumerate(zip(weights, self._knapsacks, strict=True)):
            credits_s = np.array(self._problem.credits_of(number) or (0.0,))
            own_s = weight * one.options.least_time_s - credits_s
            each.append((one.time_scale[0] * own_s)[one.layers])
        return float(np.min(each, axis=0).sum())

    def _least_sync_s(self) -> float:
        each = [one.options.sync_s.min(axis=1)[one.layers] for one in self._knapsacks]
        least_s = np.min(each, axis=0)
        return max(float(least_s.max()), float(least_s.sum()) / len(self._problem.in_flight))

    def first_s(self) -> float:
        """Ceiling to begin with; above 0, so that it can rise.

        It is no higher than what a split below the cutoff can have.
        """
        first_s = min(_FIRST * max(self.least_s, 1e-3 * self.whole_s), self.whole_s)
        return max(self.least_s, min(first_s, self._highest_s(self._cutoff_s)))

    def needed_s(self, best: UnequalSolution | None, searched_s: float) -> float:
        """Ceiling above which no split can be better, or one somewhat higher if none is known."""
        steady = self._problem.steady
        known_s = self._cutoff_s if best is None else best.split.objective_s
        if meets(steady * searched_s + self._rest_s, known_s):
            return searched_s
        highest_s = self._highest_s(known_s)
        return highest_s if best is not None else min(_RISE * searched_s, highest_s)

    def _highest_s(self, known_s: float) -> float:
        """Seconds of a stage above which a split takes more than what is known."""
        steady = self._problem.steady
        if steady > 0 and known_s < math.inf:
            return min((known_s - self._rest_s) / steady, self.whole_s)
        return self.whole_s

    def under(self, ceiling_s: float, best: UnequalSolution | None) -> UnequalSolution | None:
        """Best split with no stage above the ceiling, if it is better than `best`."""
        spans = self._reach.spans(ceiling_s)
        if spans is None:
            return best
        steps = UnequalSteps(
            self._problem,
            self._knapsacks,
            every=self._layers.every,
            known=self._known,
            spans=spans,
            cut_s=self._layers.cut_s,
        )
        cutoff_s = self._cutoff_s if best is None else best.split.objective_s
        better = best_split(steps, lambda path: self._assembled(steps, path), cutoff_s=cutoff_s)
        best = best if better is None else better
        known_s = self._cutoff_s if best is None else best.split.objective_s
        self._loose_s = loose_s(steps, cutoff_s=known_s)
        return best

    def _assembled(self, steps: UnequalSteps, path: Way) -> UnequalSolution:
        """Choose the options of every stage and evaluate the split from raw numbers."""
        problem = self._problem
        order, cuts, layers = [], [0], list[int]()
        options: list[int] = []
        for step in path.way:
            number = int(steps.type_of[step])
            held = steps.tables[number].layers(int(steps.entry[step]))
            options += steps.tables[number].options(int(steps.entry[step]))
            order.append(number)
            layers += held
            cuts.append(len(layers))
        chain = self._layers.along(layers).in_order(order, cuts)
        return UnequalSolution(
            names=tuple(one.name for one in problem.types),
            order=tuple(order),
            split=assembled(chain, cuts, options),
            layers=tuple(layers),
        )


def evened(stages: Floats, whole_s: Floats, steady: float, fill: float) -> Floats:
    """[type] Return weights y with Σ stages · y = 1 that even out (steady y + fill) · whole_s.

    Types on which that would take a weight below 0 have 0.  The slowest stage takes no less than
    the mean of all by these weights.

    >>> evened(np.array([1, 1]), np.array([1.0, 3.0]), steady=9.0, fill=1.0).round(3).tolist()
    [0.806, 0.194]
    >>> evened(np.array([1, 1]), np.array([1.0, 3.0]), steady=1.0, fill=1.0).tolist()
    [1.0, 0.0]
    """
    if steady <= ROUNDING * fill:
        return np.zeros(len(stages))
    used = np.ones(len(stages), dtype=bool)
    while True:
        level_s = (steady + fill * stages[used].sum()) / (stages[used] / whole_s[used]).sum()
        above = used & (level_s > fill * whole_s)
        if (above == used).all():
            break
        used = above
    weights: Floats = np.where(used, level_s / whole_s - fill, 0.0)
    return weights / float(stages @ weights)


def why_infeasible(problem: UnequalInstance) -> str:
    """Say what all layers need on the roomiest type, and what all stages together have."""
    layers = range(len(problem.layers))
    instances = [problem.all_of(number) for number in range(len(problem.types))]
    some = dict(zip(reversed(problem.layers), reversed(layers), strict=True))
    for layer in sorted(some.values()):
        alone = range(layer, layer + 1)
        short = [
            leanest_bytes(one, stage, alone) - stage.free_bytes
            for one in instances
            for stage in dict.fromkeys(one.stages)
        ]
        if min(short) > 0:
            return (
                f"layer {layer} alone fits on no device: at best it lacks {bytes_text(min(short))}"
            )
    needs = min(
        leanest_bytes(one, min(one.stages, key=lambda stage: stage.in_flight), layers)
        for one in instances
    )
    free = sum(
        one.stages * max(stage.free_bytes for stage in instance.stages)
        for one, instance in zip(problem.types, instances, strict=True)
    )
    names = " and ".join(f"{one.stages} x {one.name}" for one in problem.types)
    return (
        f"no order of {names} and no cuts fit: in their leanest options all layers need at least "
        f"{bytes_text(needs)}, and the stages have {bytes_text(free)} free at most"
    )
