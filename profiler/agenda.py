"""What is worth measuring, in the order of its value to the decision.

The planner is asked first, with its arithmetic alone: the settings that its best plans use come
first, each worth as much as its plans come near to the best one.  Then the ends of the range of
micro-batches, between which the planner interpolates, then what halves the widest gap.  Measuring
ends where the budget does.  Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import ClusterSpec
from planner.errors import MeshwrightError
from planner.model import ModelGraph
from planner.plan import Job
from planner.profile import Recompute
from planner.search.best_first import search

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
CANDIDATES = 6
"""Plans of different kinds that the planner is asked for."""
SHARPNESS = 4.0
"""A plan that is slower by a quarter is worth 1 / e of the best one."""
LINKS_SHARE, PAIRS_SHARE, LAYERS_SHARE = 0.2, 0.05, 0.6
"""Of the budget; the runtime's own costs take what is left, which does not grow with it."""
MOST_LINKS_S = 12.0
"""For one size of group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One setting of the layers to measure, and its value: 1 is what the best plan uses."""

    tensor: int
    micro_batch: int
    recompute: Recompute
    value: float


def wishes(
    model: ModelGraph,
    machine: ClusterSpec,
    job: Job,
    *,
    degrees: Sequence[int],
    micro_batches: Sequence[int],
) -> list[Wish]:
    """Return all settings that a plan can have, most valuable first."""
    values = used(model, machine, job)
    sizes = sorted({*micro_batches, *(size for _, size, _ in values)})
    order = _ends_first(sizes)
    every = [
        Wish(
            tensor=tensor,
            micro_batch=size,
            recompute=recompute,
            value=values.get((tensor, size, recompute), 0.0),
        )
        for size in order
        for tensor in degrees
        for recompute in RECOMPUTES
    ]
    return sorted(every, key=lambda wish: -wish.value)  # stable: ends stay first among equals


def used(
    model: ModelGraph, machine: ClusterSpec, job: Job
) -> dict[tuple[int, int, Recompute], float]:
    """Return the value of each (tensor, micro-batch, recompute) that the best plans use."""
    try:
        answer = search(model, machine, job, top=CANDIDATES)
    except MeshwrightError:  # nothing fits, or nothing is known: all settings are alike
        return {}
    best_s = min(ranked.objective_s for ranked in answer.top)
    values: dict[tuple[int, int, Recompute], float] = {}
    for ranked in answer.top:
        value = math.exp(-SHARPNESS * (ranked.objective_s / best_s - 1.0))
        for item in (item for stage in ranked.plan.stages for item in stage.layers):
            key = (ranked.plan.mesh.tensor, ranked.plan.micro_batch, item.recompute)
            values[key] = max(value, values.get(key, 0.0))
    return values


def _ends_first(sizes: Sequence[int]) -> list[int]:
    """Order sizes so that each halves the widest gap, in ratio, that those before it leave.

    >>> _ends_first([1, 2, 4, 8, 16])
    [1, 16, 4, 2, 8]
    """
    left = list(sizes)
    taken = [left.pop(0)] if left else []
    if left:
        taken.append(left.pop())
    while left:
        best = max(
            left,
            key=lambda size: (
                min(abs(math.log(size / other)) for other in taken),
                -size,
            ),
        )
        left.remove(best)
        taken.append(best)
    return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Seconds for each part of a profile."""

    group_s: float
    """For each size of group of ranks."""
    pairs_s: float
    layers_s: float


def budget(total_s: float, *, groups: int) -> Budget:
    """Divide the seconds of a whole profile.

    >>> budget(100.0, groups=1)
    Budget(group_s=12.0, pairs_s=5.0, layers_s=60.0)
    """
    return Budget(
        group_s=min(MOST_LINKS_S, LINKS_SHARE * total_s / max(1, groups)),
        pairs_s=PAIRS_SHARE * total_s,
        layers_s=LAYERS_SHARE * total_s,
    )
