"""Pipeline schedules as text: who does what in which order.

A schedule is one list of actions per rank.  An action reads `2F0`: stage 2, forward, micro-batch 0
(planner.schedules.schedule_record).  The simulator times these lists, the memory model counts
in-flight micro-batches from them, and the runtime executes them; there is no second description of
a schedule anywhere.

P ranks of V stages each hold P V stages; stages are numbered as the model runs through them.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules import SCHEDULES, Schedule, Shape, schedule_of
from meshwright.planner.schedules.schedule_record import Action, Kind, Order, csv_text, read_action

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Order",
    "csv_text",
    "most_in_flight",
    "obstacle",
    "orders",
    "rank_of_stage",
    "read_action",
    "splits_backward",
    "too_long",
]

MOST_ACTIONS = 2_000_000
"""Largest number of forwards and backwards of all ranks in one step: simulating them takes some
seconds and 0.4 GB."""


def splits_backward(name: str) -> bool:
    """Return True if a schedule computes gradients of inputs and of weights separately."""
    return schedule_of(name).splits_backward


@lru_cache(maxsize=1 << 10)
def rank_of_stage(name: str, *, stages: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Return the pipeline rank of each stage.

    >>> rank_of_stage("interleaved", stages=6, virtual_stages=2)
    (0, 1, 2, 0, 1, 2)
    >>> rank_of_stage("zbv", stages=6, virtual_stages=2)
    (0, 1, 2, 2, 1, 0)
    """
    return schedule_of(name).homes(Shape(stages // virtual_stages, 0, virtual_stages))


def obstacle(
    name: str, *, stages: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[str, str] | None:
    """Return (field, why) if a schedule cannot be run in this shape, or None if it can.

    >>> obstacle("interleaved", stages=8, micro_batches=6, virtual_stages=2)
    ('micro_batches', 'is 6; interleaved needs a multiple of its 4 ranks: 4 or 8')
    """
    schedule = schedule_of(name)
    if virtual_stages < 1 or stages < 1 or stages % virtual_stages:
        return (
            "virtual_stages",
            f"is {virtual_stages}, which does not divide {stages} stages; every rank has equally "
            "many",
        )
    if not schedule.takes(virtual_stages):
        least, most = schedule.stages_per_rank
        wanted = f"puts {least} stage{'s' * (least > 1)}"
        if most != least:
            wanted = f"needs at least {least} stages"
        return "virtual_stages", f"is {virtual_stages}; {name} {wanted} on every rank"
    links = stages // virtual_stages - 1
    if schedule.ahead and len(schedule.ahead) != links:
        return (
            "schedule",
            f"is {name:.60}; a pipeline of {links + 1} ranks has {links} link{'s' * (links != 1)}, "
            f"and {len(schedule.ahead)} have a number: give one for each",
        )
    if micro_batches < 1:
        return "micro_batches", f"is {micro_batches}; a step needs at least one"
    needed = schedule.micro_batches_needed(
        Shape(stages // virtual_stages, micro_batches, virtual_stages)
    )
    if needed:
        return "micro_batches", f"is {micro_batches}; {name} needs {needed}"
    return too_long(stages=stages, micro_batches=micro_batches)


def too_long(*, stages: int, micro_batches: int) -> tuple[str, str] | None:
    """Return (field, why) if a step has more actions than are listed, or None.

    >>> too_long(stages=8, micro_batches=1_000_003)
    ('micro_batches', 'is 1000003; a schedule of 8 stages is listed for at most 125000: enlarge \
micro_batch, or the data-parallel degree')
    """
    most = MOST_ACTIONS // (2 * stages)
    if micro_batches <= most:
        return None
    stage = "stage" if stages == 1 else "stages"
    return (
        "micro_batches",
        f"is {micro_batches}; a schedule of {stages} {stage} is listed for at most {most}: "
        "enlarge micro_batch, or the data-parallel degree",
    )


def orders(
    name: str, *, stages: int, micro_batches: int, virtual_stages: int = 1, steps: int = 1
) -> tuple[Order, ...]:
    """Return each rank's order of actions; `stages` counts those of all ranks.

    Only a schedule that never drains has an order for several `steps`: it continues the count of
    micro-batches.  The first step fills the pipeline, each further one takes its steady time.

    >>> [" ".join(map(str, order)) for order in orders("1f1b", stages=2, micro_batches=3)]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    reason = obstacle(
        name, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    if reason:
        raise DocumentError(*reason)
    schedule = schedule_of(name)
    if steps != 1 and not schedule.stale:
        raise DocumentError("steps", f"is {steps}; {name} ends each step with an empty pipeline")
    shape = Shape(stages // virtual_stages, micro_batches * steps, virtual_stages)
    return _orders(schedule, shape)


@lru_cache(maxsize=16)
def _orders(schedule: Schedule, shape: Shape) -> tuple[Order, ...]:
    """Return the orders of all ranks; many layouts of a search share them."""
    return tuple(schedule.order(rank, shape) for rank in range(shape.ranks))


def most_in_flight(
    name: str, rank: int, *, stages: int, micro_batches: int, virtual_stages: int = 1
) -> int:
    """Return the most micro-batches of any stage that hold activations at once on a rank.

    They are min(m, P - s) for 1F1B, m for GPipe.

    zbv on fewer than 2 P - 1 micro-batches may have one less.

    >>> [most_in_flight("1f1b", stage, stages=4, micro_batches=8) for stage in range(4)]
    [4, 3, 2, 1]
    >>> [most_in_flight("interleaved", rank, stages=8, micro_batches=8, virtual_stages=2)
    ...     for rank in range(4)]
    [11, 9, 7, 5]
    """
    shape = Shape(stages // virtual_stages, micro_batches, virtual_stages)
    return schedule_of(name).counts(rank, shape).whole
