"""The exact inner solver: the best cuts and options of one `Instance`, with its proof.

    solve(instance) -> Solution            optimal: its lower bound is its objective
                     | Infeasible          no split fits in memory, and why
                     | Fathomed            nothing is below the cutoff

A table of stage seconds (`planner.stage_table`) and the dynamic program over cuts
(`planner.cuts`).  Table entries are exact or lower bounds; the best cuts over bounds are a bound
for the instance, and once all the entries they use are exact they are its optimum.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cuts import best_cuts, meets
from planner.frontier import FrontierStore
from planner.instance import (
    Fathomed,
    Infeasible,
    Instance,
    Solution,
    fits,
    priced,
    stage_bytes,
)
from planner.knapsack import Knapsacks
from planner.memory_reach import why_infeasible
from planner.stage_table import StageTable

Floats = NDArray[np.float64]


def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
) -> Solution | Infeasible | Fathomed:
    """Minimise the time of `instance` exactly; only objectives below `cutoff_s` are of interest.

    `frontiers` kept by the caller spares the Pareto sets that earlier instances had in common.
    With a finite cutoff an instance that does not fit may be reported as fathomed.

    Among equally fast splits the one with the earliest cuts is returned; inside a stage the layers
    that come first take the later options of their kind (recompute the first layers).
    """
    if len(instance.stages) > len(instance.layers):
        return Infeasible(why_infeasible(instance))
    knapsacks = Knapsacks(instance, frontiers if frontiers is not None else FrontierStore())
    if knapsacks.sync_depends:
        raise ValueError("sync_s differs between the options of one kind")
    floor = _Floor(knapsacks)
    ceiling_s = min(floor.likely_ceiling_s, floor.ceiling_s(cutoff_s))
    while True:
        best = _best_under(knapsacks, ceiling_s, cutoff_s)
        known_s = cutoff_s if best is None else best.objective_s
        if ceiling_s >= floor.whole_chain_s or meets(floor.beyond_s(ceiling_s), known_s):
            break
        if known_s == math.inf:
            reason = why_infeasible(instance)
            if reason:
                return Infeasible(reason)
            ceiling_s *= 2
        else:
            ceiling_s = floor.ceiling_s(known_s)
    if best is not None:
        return best
    return Infeasible(why_infeasible(instance)) if cutoff_s == math.inf else Fathomed(cutoff_s)


class _Floor:
    """Bounds that need no table, and how long a stage of a good split can be."""

    def __init__(self, knapsacks: Knapsacks) -> None:
        instance = knapsacks.instance
        layers = knapsacks.layers
        least_s = np.array([kind.time_s.min() for kind in knapsacks.kinds])[layers]
        most_s = np.array([kind.time_s.max() for kind in knapsacks.kinds])[layers]
        sync_s = np.array([kind.sync_s.min() for kind in knapsacks.kinds])[layers]
        credit_s = np.array(instance.credits_s)[layers] if instance.credits_s else 0.0
        scale, exposed_s = knapsacks.time_scale, knapsacks.exposed_s

        gain_s = instance.fill * least_s - credit_s
        fill_s = float(np.minimum(gain_s * scale.min(), gain_s * scale.max()).sum())
        fill_s += instance.fill * float(exposed_s.sum())
        once_s = max(float(sync_s.max()), float(sync_s.sum()) / len(scale))
        self._steady = instance.steady
        self._rest_s = fill_s + once_s
        cut_s = 2 * max(instance.cut_s, default=0.0)
        self.whole_chain_s = float(least_s.sum() * scale.min() + exposed_s.min())
        balanced_s = float(most_s.sum()) / float((1 / scale).sum())
        self.likely_ceiling_s = (
            balanced_s + float(most_s.max() * scale.min()) + float(exposed_s.max()) + cut_s
        )

    def beyond_s(self, ceiling_s: float) -> float:
        """Least objective of any split with a stage above `ceiling_s`."""
        return self._steady * ceiling_s + self._rest_s

    def ceiling_s(self, known_s: float) -> float:
        """Stage seconds above which no split is below `known_s`."""
        if self._steady == 0 or known_s == math.inf:
            return self.whole_chain_s
        return min((known_s - self._rest_s) / self._steady, self.whole_chain_s)


def _best_under(knapsacks: Knapsacks, ceiling_s: float, cutoff_s: float) -> Solution | None:
    """Best split below the cutoff whose stages are runs within `ceiling_s`."""
    instance = knapsacks.instance
    table = StageTable(knapsacks, ceiling_s)
    sync_s = table.sync_s()
    best: Solution | None = None
    while True:
        found = best_cuts(
            table.seconds, table.fill_s(), sync_s, steady=instance.steady, cutoff_s=cutoff_s
        )
        if found is None:
            return best
        bounded = [
            (s, first, end - first)
            for s, (first, end) in enumerate(pairwise(found.cuts))
            if not table.settled[s, first, end - first - 1]
        ]
        for stage, first, n in bounded:
            table.settle(stage, first, n)
        if table.holds(found.cuts):
            candidate = _assembled(knapsacks, found.cuts)
            if candidate.objective_s < cutoff_s:
                best, cutoff_s = candidate, candidate.objective_s
        if not bounded:
            return best


def _assembled(knapsacks: Knapsacks, cuts: tuple[int, ...]) -> Solution:
    """Lay the options of every stage out over its layers; evaluate from the raw numbers."""
    instance = knapsacks.instance
    options: list[int] = []
    for stage, (first, end) in enumerate(pairwise(cuts)):
        content = knapsacks.content(first, end - first)
        found = knapsacks.fastest_choice(content, stage)
        assert found is not None, "only stages that fit are assembled"
        left = {kind: taken for (kind, _), taken in zip(content, found[1], strict=True)}
        options.extend(left[kind].pop() for kind in instance.layers[first:end])
    solution = priced(instance, cuts, _simplest(instance, cuts, options))
    assert fits(instance, solution), "the knapsacks and the formulas of the instance disagree"
    return replace(solution, lower_bound_s=solution.objective_s)


def _simplest(instance: Instance, cuts: tuple[int, ...], options: list[int]) -> list[int]:
    """Move layers to earlier options where this costs no time, no sync and still fits.

    A knapsack saves bytes nobody needs: of two options equally fast it takes the leaner, which
    may be a recomputation that takes no time.
    """
    options = list(options)
    for stage, (first, end) in zip(instance.stages, pairwise(cuts), strict=True):
        for layer in range(first, end):
            table = instance.options_of(layer)
            taken = table[options[layer]]
            for simpler, option in enumerate(table[: options[layer]]):
                if option.time_s > taken.time_s or option.sync_s > taken.sync_s:
                    continue
                before, options[layer] = options[layer], simpler
                if stage_bytes(instance, stage, range(first, end), options) <= stage.capacity_bytes:
                    break
                options[layer] = before
    return options
