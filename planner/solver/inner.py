"""The exact inner solver: the best cuts and options of one `Instance`, with its proof.

    solve(instance) -> Solution            optimal: its lower bound is its objective
                     | Infeasible          no split fits in memory, and why
                     | Fathomed            nothing is below the cutoff

A table of stage seconds (`planner.solver.stage_table`) and the dynamic program over cuts
(`planner.solver.cuts`).  Table entries are exact or lower bounds; the best cuts over bounds are a
bound for the instance, and once all the entries they use are exact they are its optimum.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from planner.documents.tolerances import SETTLED
from planner.solver.assembly import assembled
from planner.solver.descent import Way, meets
from planner.solver.frontier import FrontierStore
from planner.solver.instance import (
    Fathomed,
    Infeasible,
    Instance,
    Solution,
)
from planner.solver.knapsack import Knapsacks
from planner.solver.memory_reach import why_infeasible
from planner.solver.prefixes import Prefixes
from planner.solver.settled import best_split, loose_s
from planner.solver.sizes import NO_ROW, best_row
from planner.solver.stage_table import StageTable
from planner.solver.step_bounds import StepBounds
from planner.solver.table import Known

_COARSE = 2.0**10
HOSTS_TOO_SMALL = "whatever fits the devices puts more on a host than it has room for"
NEARLY_FITS = "no split fits, though the sums of its layers' bytes would"


def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
) -> Solution | Infeasible | Fathomed:
    """Minimise the time of `instance` exactly; only objectives below `cutoff_s` are of interest.

    `frontiers` kept by the caller spares the Pareto sets that earlier instances had in common.
    Of hosts that several stages share, each stage alone is limited to the whole.
    With a finite cutoff an instance that does not fit may be reported as fathomed.  Where bytes are
    more than sums (`used_bytes`) and a stage has very many choices, the bound may stay below the
    objective, or below the cutoff.

    Among equally fast splits the one with the earliest cuts is returned; inside a stage the layers
    that come first take the later options of their kind (recompute the first layers).
    """
    store = frontiers if frontiers is not None else FrontierStore()
    return best_row(instance, cutoff_s, lambda row, below_s: _solved(row, below_s, store))


def _solved(
    instance: Instance, cutoff_s: float, store: FrontierStore
) -> Solution | Infeasible | Fathomed:
    """Return the best split of an instance without rows of sizes."""
    if sum(stage.least_layers for stage in instance.stages) > len(instance.layers):
        return Infeasible(why_infeasible(instance))
    knapsacks = Knapsacks(instance, store)
    floor = _Floor(knapsacks)
    ceiling_s = min(floor.likely_ceiling_s, floor.ceiling_s(cutoff_s))
    whole_s = floor.most_s
    every = Prefixes(len(instance.layers))
    cut_s = np.array(instance.cut_s or (0.0,) * len(every))
    cut_s[0] = cut_s[-1] = 0.0
    bounds = StepBounds(knapsacks, every, np.arange(len(every)), cut_s)
    known: Known = {}
    while True:
        limit_s = floor.slowest_s(cutoff_s)
        table = StageTable(bounds, known, ceiling_s, whole_s, limit_s=limit_s)
        best = best_split(table, partial(_assembled, instance, table), cutoff_s=cutoff_s)
        known_s = cutoff_s if best is None else best.objective_s
        if best is not None and whole_s > _COARSE * sum(best.stage_s):
            # Options that nobody would take made the grid of the table coarse beside the answer.
            whole_s = 2 * sum(best.stage_s)
            continue
        if ceiling_s >= floor.whole_chain_s or meets(floor.beyond_s(ceiling_s), known_s):
            break
        if known_s == math.inf:
            reason = why_infeasible(instance)
            if reason:
                return Infeasible(reason)
            ceiling_s *= 2
        else:
            ceiling_s = floor.ceiling_s(known_s)
    bound_s = cutoff_s if best is None else best.objective_s
    bound_s = min(bound_s, loose_s(table, cutoff_s=bound_s))
    if best is not None:
        return replace(best, lower_bound_s=bound_s)
    if bound_s < math.inf:
        return Fathomed(bound_s)
    beside = HOSTS_TOO_SMALL if instance.hosts else NEARLY_FITS
    if any(stage.most_layers is not None for stage in instance.stages):
        beside = NO_ROW
    return Infeasible(why_infeasible(instance) or beside)


class _Floor:
    """Bounds that need no table, and how long a stage of a good split can be."""

    def __init__(self, knapsacks: Knapsacks) -> None:
        instance = knapsacks.instance
        layers, options = knapsacks.layers, knapsacks.options
        least_s = knapsacks.options.least_time_s[layers]
        most_s = options.time_s.max(axis=1, where=options.present, initial=0.0)[layers]
        sync_s = options.sync_s.min(axis=1)[layers]
        credit_s = np.array(instance.credits_s)[layers] if instance.credits_s else 0.0
        scale, exposed_s = knapsacks.time_scale, knapsacks.exposed_s

        gain_s = instance.fill * least_s - credit_s
        fill_s = float(np.minimum(gain_s * scale.min(), gain_s * scale.max()).sum())
        fill_s += instance.fill * float(exposed_s.sum())
        once_s = max(float(sync_s.max()), float(sync_s.sum()) / len(scale))
        self._steady = instance.steady
        self._rest_s = fill_s + once_s
        cut_s = 2 * max(instance.cut_s, default=0.0)
        self.most_s = float(most_s.sum() * scale.max() + exposed_s.sum() + 2 * sum(instance.cut_s))
        self.whole_chain_s = float(least_s.sum() * scale.min() + exposed_s.min())
        balanced_s = float(most_s.sum()) / float((1 / scale).sum())
        self.likely_ceiling_s = (
            balanced_s + float(most_s.max() * scale.min()) + float(exposed_s.max()) + cut_s
        )

    def beyond_s(self, ceiling_s: float) -> float:
        """Least objective of any split with a stage above `ceiling_s`."""
        return self._steady * ceiling_s + self._rest_s

    def slowest_s(self, known_s: float) -> float:
        """Seconds that no stage of a split below `known_s` takes, or more."""
        if self._steady == 0 or known_s == math.inf:
            return math.inf
        return (known_s - self._rest_s) / self._steady * (1 + SETTLED)

    def ceiling_s(self, known_s: float) -> float:
        """Stage seconds above which no split is below `known_s`."""
        if self._steady == 0 or known_s == math.inf:
            return self.whole_chain_s
        return min((known_s - self._rest_s) / self._steady, self.whole_chain_s)


def _assembled(instance: Instance, table: StageTable, found: Way) -> Solution:
    _, cuts, options = table.laid(found.way)
    return assembled(instance, cuts, options)
