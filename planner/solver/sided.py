"""Partition problems whose stages are tied together: shared hosts, and sides that a user asks for.

Without ties `planner.solver.inner` is exact, and with hosts of which each has devices of one
stage.  With others its answer is the optimum of a relaxation: if it keeps every host and side it
is the optimum here too, and if not it bounds the integer program (`planner.solver.ilp`), which
then decides.  Options that only some layers may take need no tie: such layers become kinds of
their own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import overload

from planner.solver import inner
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Fathomed, Infeasible, Instance, Solution, Unfinished, broken
from planner.solver.sides import Chosen


@overload
def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    time_limit_s: None = None,
) -> Solution | Infeasible | Fathomed: ...


@overload
def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    time_limit_s: float,
) -> Solution | Infeasible | Fathomed | Unfinished: ...


def solve(
    instance: Instance,
    *,
    cutoff_s: float = math.inf,
    frontiers: FrontierStore | None = None,
    time_limit_s: float | None = None,
) -> Solution | Infeasible | Fathomed | Unfinished:
    """Minimise the time of `instance`; only objectives below `cutoff_s` are of interest.

    Without a limit on the seconds of the integer program the answer is proven.
    """
    if not instance.hosts and not instance.sides:
        return inner.solve(instance, cutoff_s=cutoff_s, frontiers=frontiers)
    narrow, kept = narrowed(instance)
    if narrow is None:
        return Infeasible("a layer has none of the options that are asked for")
    synced_apart = any(len({o.sync_s for o in table}) > 1 for table in narrow.kinds)
    plain = replace(narrow, hosts=() if synced_apart else narrow.hosts, sides=())
    relaxed = inner.solve(plain, cutoff_s=cutoff_s, frontiers=frontiers)
    if not isinstance(relaxed, Solution):
        return relaxed
    whole = replace(
        relaxed,
        options=tuple(
            kept[kind][option] for kind, option in zip(narrow.layers, relaxed.options, strict=True)
        ),
    )
    if broken(instance, whole) is None:
        return whole
    from planner.solver import ilp  # noqa: PLC0415 - loads HiGHS

    known_s = relaxed.objective_s
    if time_limit_s is None:
        return ilp.solve(instance, at_least_s=known_s, cutoff_s=cutoff_s)
    return ilp.solve(instance, time_limit_s=time_limit_s, at_least_s=known_s, cutoff_s=cutoff_s)


def narrowed(instance: Instance) -> tuple[Instance | None, list[list[int]]]:
    """Return the instance with only the options that are allowed, and which those are by kind.

    None if a layer has no option left.
    """
    chosen = [side for side in instance.sides if isinstance(side, Chosen)]
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    layers = []
    for layer, kind in enumerate(instance.layers):
        allowed = tuple(
            k
            for k, option in enumerate(instance.kinds[kind])
            if all(
                option.name in side.options for side in chosen if side.first <= layer <= side.last
            )
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
