"""Measurements of a profile, in the order of their value to the decision.

The planner runs first, with its arithmetic alone: the settings that its best plans use come first,
each worth as much as its plans come near to the best one.  Then the ends of the range of
micro-batches, between which the planner interpolates, then what halves the widest gap.  Measuring
ends where the budget does.  Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Plan
from meshwright.planner.documents.profile import ChunkedLoss, Recompute
from meshwright.planner.errors import MeshwrightError
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
CANDIDATES = 6
"""Number of plans of different kinds that the planner returns."""
SHARPNESS = 4.0
"""A plan that is slower by a quarter is worth 1 / e of the best one."""
LINKS_SHARE, PAIRS_SHARE, LAYERS_SHARE, STAGES_SHARE = 0.2, 0.05, 0.52, 0.08
"""Shares of the budget; the runtime's own costs take the rest, which does not grow with it."""
MOST_LINKS_S = 12.0
"""Largest number of seconds for one size of group."""
MOST_HEADS = 4
"""Largest number of heads with chunked losses, each measured in some passes of one layer."""
MOST_STAGES, MOST_LAYERS = 3, 12
"""Largest number of whole stages, and of layers in each."""

Degrees = tuple[int, int, int]
"""Degrees of tensor, context and expert parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRequest:
    """One setting of the layers to measure, and its value: 1 is what the best plan uses."""

    tensor: int
    micro_batch: int
    recompute: Recompute
    value: float
    context: int = 1
    expert: int = 1
    compiled: bool = False

    @property
    def division(self) -> Degrees:
        """Numbers of ranks over which tensor, context and expert parallelism divide the layers."""
        return self.tensor, self.context, self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWish:
    """A head to measure with its loss in chunks."""

    division: Degrees
    micro_batch: int
    loss: ChunkedLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A whole stage to measure under one setting."""

    wish: LayerRequest
    layers: tuple[str, ...]


def best_plans(model: ModelGraph, machine: ClusterSpec, job: Job) -> list[tuple[float, Plan]]:
    """Return the planner's best plans by arithmetic alone, each with its value, the best first."""
    try:
        answer = search(Request(model, machine, job), top=CANDIDATES)
    except MeshwrightError:  # nothing fits, or nothing is known: all settings are alike
        return []
    best_s = min(ranked.objective_s for ranked in answer.top)
    valued = [
        (math.exp(-SHARPNESS * (ranked.objective_s / best_s - 1.0)), ranked.plan)
        for ranked in answer.top
    ]
    return sorted(valued, key=lambda pair: -pair[0])


def wishes(
    plans: Sequence[tuple[float, Plan]],
    *,
    divisions: Sequence[Degrees],
    micro_batches: Sequence[int],
) -> list[LayerRequest]:
    """Return all settings that a plan can have, most valuable first.

    Among settings that no good plan uses, layers that tensor parallelism divides come before
    others.
    """
    values = used(plans)
    sizes = sorted({*micro_batches, *(size for _, size, _, _ in values)})
    order = _ends_first(sizes)
    every = [
        LayerRequest(
            tensor=division[0],
            context=division[1],
            expert=division[2],
            micro_batch=size,
            recompute=recompute,
            compiled=compiled,
            value=values.get((division, size, recompute, compiled), 0.0),
        )
        for size in order
        for division in divisions
        for recompute in RECOMPUTES
        for compiled in (False, True)
        # Each compiled choice is a graph that takes seconds: those alone that a plan uses.
        if not compiled or (division, size, recompute, True) in values
    ]
    # Stable: the ends stay first among equals.
    return sorted(every, key=lambda wish: (-wish.value, max(wish.division[1:]) > 1))


def used(
    plans: Sequence[tuple[float, Plan]],
) -> dict[tuple[Degrees, int, Recompute, bool], float]:
    """Return the value of each (degrees, micro-batch, recompute, compiled) that plans use.

    Compiled layers are measured eager too: others are scaled by it.
    """
    values: dict[tuple[Degrees, int, Recompute, bool], float] = {}
    for value, plan in plans:
        for item in (item for stage in plan.all_stages for item in stage.layers):
            for compiled in {False, plan.compile == "block"}:
                key = (degrees_of(plan), plan.micro_batch, item.recompute, compiled)
                values[key] = max(value, values.get(key, 0.0))
    return values


def head_wishes(
    plans: Sequence[tuple[float, Plan]], *, divisions: Sequence[Degrees]
) -> list[HeadWish]:
    """Return the losses in chunks of the best plans, each setting once."""
    every = [
        HeadWish(division=degrees_of(plan), micro_batch=plan.micro_batch, loss=plan.loss)
        for _, plan in plans
        if plan.loss is not None and degrees_of(plan) in divisions
    ]
    return list(dict.fromkeys(every))[:MOST_HEADS]


def degrees_of(plan: Plan) -> Degrees:
    """Return over how many ranks a plan divides its layers."""
    return plan.mesh.tensor, plan.mesh.context, plan.mesh.expert


def stage_wishes(
    model: ModelGraph, plans: Sequence[tuple[float, Plan]], *, divisions: Sequence[Degrees]
) -> list[StageRequest]:
    """Return the stages worth running as a whole: the first ones of the best plans, cut if long.

    Each setting once; without a plan, the begin of the undivided model.
    """
    names = [name for name, _ in model.chain]
    if model.edges:
        return []  # a graph's layers are always run whole
    wishes: dict[tuple[Degrees, int, Recompute], StageRequest] = {}
    for value, plan in plans:
        of_stage = plan.stages[0].layers
        chosen = Counter(item.recompute for item in of_stage).most_common(1)[0][0]
        key = (degrees_of(plan), plan.micro_batch, chosen)
        if key[0] in divisions and key not in wishes:
            tensor, context, expert = key[0]
            wish = LayerRequest(
                tensor=tensor,
                context=context,
                expert=expert,
                micro_batch=plan.micro_batch,
                recompute=chosen,
                value=value,
            )
            layers = tuple(item.layer for item in of_stage[:MOST_LAYERS])
            wishes[key] = StageRequest(wish=wish, layers=layers)
    if not wishes:
        wish = LayerRequest(tensor=1, micro_batch=1, recompute="none", value=0.0)
        return [StageRequest(wish=wish, layers=tuple(names[:MOST_LAYERS]))]
    return list(wishes.values())[:MOST_STAGES]


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
    """Seconds for each size of group of ranks."""
    pairs_s: float
    layers_s: float
    stages_s: float


def budget(total_s: float, *, groups: int) -> Budget:
    """Divide the seconds of a whole profile.

    >>> budget(100.0, groups=1)
    Budget(group_s=12.0, pairs_s=5.0, layers_s=52.0, stages_s=8.0)
    """
    return Budget(
        group_s=min(MOST_LINKS_S, LINKS_SHARE * total_s / max(1, groups)),
        pairs_s=PAIRS_SHARE * total_s,
        layers_s=LAYERS_SHARE * total_s,
        stages_s=STAGES_SHARE * total_s,
    )
