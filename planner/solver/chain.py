"""The exact solver of one chain: the best cuts and options of an `Instance`, with its proof.

    solve(instance) -> Solution            optimal: its lower bound is its objective
                     | Infeasible          no split fits in memory, and why
                     | Fathomed            nothing is below the cutoff

A chain is a problem on stages of one type (`planner.solver.heterogeneous.search`).  Ties of layers
and hosts that several stages share are met by `solve_chain`, which is exact too.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.planner.solver.bounds.downsets import Prefixes
from meshwright.planner.solver.bounds.memory_feasibility import why_infeasible
from meshwright.planner.solver.fixed_sizes import NO_ROW, best_row
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.graph_instance import chain_problem
from meshwright.planner.solver.heterogeneous.search import Search
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Solution,
    Unfinished,
    broken,
)

HOSTS_TOO_SMALL = "every split that fits in device memory exceeds host memory"
NEARLY_FITS = "no split fits, though the sums of its layers' bytes would"


def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
) -> Solution | Infeasible | CutOff:
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
    return best_row(
        instance, cutoff_s, lambda row, below_s: _solve_without_rows(row, below_s, store)
    )


def _solve_without_rows(
    instance: Instance, cutoff_s: float, store: FrontierStore
) -> Solution | Infeasible | CutOff:
    """Return the best split of an instance without rows of sizes."""
    if sum(stage.least_layers for stage in instance.stages) > len(instance.layers):
        return Infeasible(why_infeasible(instance))
    every = Prefixes(len(instance.layers))
    best, bound_s = Search(chain_problem(instance), store, cutoff_s, every, None).solve()
    if best is not None:
        return replace(best.split, lower_bound_s=min(bound_s, best.objective_s))
    if bound_s < math.inf:
        return CutOff(bound_s)
    beside = HOSTS_TOO_SMALL if instance.hosts else NEARLY_FITS
    if any(stage.most_layers is not None for stage in instance.stages):
        beside = NO_ROW
    return Infeasible(why_infeasible(instance) or beside)


def solve_chain(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    most_nodes: int | None = None,
) -> Solution | Infeasible | CutOff | Unfinished:
    """Minimise the time of a chain on devices of one type; only objectives below the cutoff.

    Without ties `solve` is exact, and with hosts of which each has devices of one
    stage.  With others its answer is the optimum of a relaxation: if it keeps every host and tie it
    is the optimum here too, and if not it bounds the integer program, which then decides.  Without
    a limit on the nodes of that the answer is proven.
    """
    if not instance.hosts and not instance.sides:
        return solve(instance, cutoff_s=cutoff_s, frontiers=frontiers)
    narrow, kept = with_allowed_options(instance)
    if narrow is None:
        return Infeasible("a layer has none of the options that are asked for")
    plain = replace(narrow, hosts=() if synced_apart(narrow) else narrow.hosts, sides=())
    relaxed = solve(plain, cutoff_s=cutoff_s, frontiers=frontiers)
    if not isinstance(relaxed, Solution):
        return relaxed
    chosen = zip(narrow.layers, relaxed.options, strict=True)
    whole = replace(relaxed, options=tuple(kept[kind][option] for kind, option in chosen))
    if broken(instance, whole) is None:
        return whole
    from meshwright.planner.solver import ilp  # noqa: PLC0415 - few chains need it

    return ilp.solve(
        instance, most_nodes=most_nodes, at_least_s=relaxed.objective_s, cutoff_s=cutoff_s
    )


def synced_apart(chain: Instance) -> bool:
    """Return whether options of one kind differ in `sync_s`; limits of hosts are then not kept."""
    return any(len({o.sync_s for o in table}) > 1 for table in chain.kinds)


def with_allowed_options(instance: Instance) -> tuple[Instance | None, list[list[int]]]:
    """Return the instance with only the options that are allowed, and which those are by kind.

    None if a layer has no option left.
    """
    chosen = [tie for tie in instance.sides if tie.options]
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    layers = []
    for layer, kind in enumerate(instance.layers):
        allowed = tuple(
            k
            for k, option in enumerate(instance.kinds[kind])
            if all(option.name in tie.options for tie in chosen if layer in tie.layers)
        )
        if not allowed:
            return None, []
        layers.append(numbers.setdefault((kind, allowed), len(numbers)))
    narrow = replace(
        instance,
        layers=tuple(layers),
        kinds=tuple(tuple(instance.kinds[kind][k] for k in allowed) for kind, allowed in numbers),
        credits_s=tuple(instance.credits_s[kind] for kind, _ in numbers)
        if instance.credits_s
        else (),
    )
    return narrow, [list(allowed) for _, allowed in numbers]
