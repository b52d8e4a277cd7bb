"""The exact solver of one chain: the best cuts and options of an `Instance`, with its proof.

    solve(instance) -> Solution            optimal: its lower bound is its objective
                     | Infeasible          no split fits in memory, and why
                     | Fathomed            nothing is below the cutoff

A chain is a problem on stages of one type (`planner.solver.unequal.unequal`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.solver.frontier import FrontierStore
from planner.solver.graph_instance import chain_problem
from planner.solver.instance import (
    Fathomed,
    Infeasible,
    Instance,
    Solution,
)
from planner.solver.memory_reach import why_infeasible
from planner.solver.prefixes import Prefixes
from planner.solver.sizes import NO_ROW, best_row
from planner.solver.unequal.unequal import Search

HOSTS_TOO_SMALL = "whatever fits the devices puts more on a host than it has room for"
NEARLY_FITS = "no split fits, though the sums of its layers' bytes would"


def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
) -> Solution | Infeasible | Fathomed:
    """Minimise the time of `instance` exactly; only objectives below `cutoff_s` are of interest.

    `frontiers` that the caller stores spare the Pareto sets that earlier instances had in common.
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
    every = Prefixes(len(instance.layers))
    best, bound_s = Search(chain_problem(instance), store, cutoff_s, every, None).solved()
    if best is not None:
        return replace(best.split, lower_bound_s=min(bound_s, best.objective_s))
    if bound_s < math.inf:
        return Fathomed(bound_s)
    beside = HOSTS_TOO_SMALL if instance.hosts else NEARLY_FITS
    if any(stage.most_layers is not None for stage in instance.stages):
        beside = NO_ROW
    return Infeasible(why_infeasible(instance) or beside)
