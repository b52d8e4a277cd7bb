"""A pipeline step, action by action: when each rank does what, and how long the step takes.

Stages take their own forward and backward seconds, and a rank may hold several stages.  Every rank
follows its order of `planner.schedules.schedule` and waits where an input is not there yet.  An
activation or gradient that goes to another rank occupies its sender for `exposed_s` and arrives
`transfer_s` later, while both ranks go on computing; between two stages of one rank it costs
nothing.  Nothing here knows where the seconds come from, nor what happens after the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter, sub
from typing import NamedTuple, get_args

from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.schedule_record import Action, Kind, Order

_STAGE = itemgetter(Action._fields.index("stage"))
_MICRO_BATCH = itemgetter(Action._fields.index("micro_batch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Start and end of every action of every rank."""

    makespan_s: float
    orders: tuple[Order, ...]
    starts_s: tuple[tuple[float, ...], ...]
    """[rank, action]"""
    ends_s: tuple[tuple[float, ...], ...]
    """[rank, action]"""

    def finish_s(self, rank: int) -> float:
        """Return the time at which a rank has done its last action."""
        return self.ends_s[rank][-1] if self.ends_s[rank] else 0.0

    def busy_s(self, rank: int) -> float:
        """Return the seconds in which a rank computes and sends."""
        seconds: float = sum(map(sub, self.ends_s[rank], self.starts_s[rank]))
        return seconds

    def actions(self, rank: int) -> list[tuple[float, float, Action]]:
        """Return (start, end, action) of a rank in order."""
        return list(zip(self.starts_s[rank], self.ends_s[rank], self.orders[rank], strict=True))


def timeline(
    orders: Sequence[Order],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] | None = None,
    transfer_s: float | Sequence[float] = 0.0,
    exposed_s: float | Sequence[float] = 0.0,
) -> Timeline:
    """Return the step in which each rank runs its order as early as it can.

    `forward_s` and `backward_s` are per stage and micro-batch; of the latter, `weight_s` is the
    part that W takes in a split backward.  `transfer_s` and `exposed_s` may differ between
    boundaries: one for each stage but the last.  The timeline is the longest path through all
    dependencies: order on a rank; forward after the stage before; backward after the stage behind
    and after the own forward; W after its I.

    >>> from meshwright.planner.schedules.schedule import orders
    >>> order = orders("1f1b", stages=4, micro_batches=8)
    >>> timeline(order, forward_s=[1.0] * 4, backward_s=[2.0] * 4).makespan_s
    33.0
    >>> order = orders("zb-h1", stages=4, micro_batches=8)
    >>> timeline(order, forward_s=[1.0] * 4, backward_s=[2.0] * 4, weight_s=[1.0] * 4).makespan_s
    27.0
    """
    stages = len(forward_s)
    count = 1 + max((max(map(_MICRO_BATCH, order)) for order in orders if order), default=-1)
    steps = _steps(
        _rank_of_stage(orders, stages),
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        transfer_s=[transfer_s] * (stages - 1) if isinstance(transfer_s, float) else transfer_s,
        exposed_s=[exposed_s] * (stages - 1) if isinstance(exposed_s, float) else exposed_s,
        count=count,
    )
    # When a micro-batch is through a step of a stage, [row + micro-batch]; -1 is not yet.
    done_s = [-1.0] * (3 * stages * count)
    waiting: dict[int, int] = {}
    position = [0] * len(orders)
    # A rank's next actions: the one that it waited for, then the rest of its order.
    first: list[Sequence[Action]] = [()] * len(orders)
    rest = [iter(order) for order in orders]
    clock = [0.0] * len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        order, now, at = orders[rank], clock[rank], position[rank]
        own_starts, own_ends = starts[rank], ends[rank]
        for stage, kind, m in chain(first[rank], rest[rank]):
            step = steps[kind][stage]
            if step is None:
                raise DocumentError(
                    "schedule", f"{order[at]} needs seconds of its own; give its stage some"
                )
            seconds, row, source, delay_s, local = step
            if local >= 0 and done_s[local + m] < 0.0:
                before = "I" if kind == "W" else "forward"
                raise DocumentError("schedule", f"{order[at]} stands before its {before}")
            start = now
            if source >= 0:
                made_s = done_s[source + m]
                if made_s < 0.0:
                    waiting[source + m] = rank
                    first[rank] = order[at : at + 1]
                    break
                arrival_s = made_s + delay_s
                start = arrival_s if arrival_s > now else now
            output = row + m
            now = done_s[output] = start + seconds
            own_starts.append(start)
            own_ends.append(now)
            at += 1
            if output in waiting:
                ready.append(waiting.pop(output))
        clock[rank], position[rank] = now, at
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            stuck = order[position[rank]]
            raise DocumentError("schedule", f"rank {rank} waits for ever before {stuck}")
    return Timeline(
        makespan_s=max(clock, default=0.0),
        orders=tuple(orders),
        starts_s=tuple(map(tuple, starts)),
        ends_s=tuple(map(tuple, ends)),
    )


class _Step(NamedTuple):
    """Figures that all actions of one kind and one stage share.

    Results are in rows of one entry per micro-batch: outputs by stage, then gradients of inputs,
    then those of weights.  Rows are named by their first entry.
    """

    seconds: float
    row: int
    """Row of the action's results."""
    source: int
    """Row that the action reads from another stage, -1 if none."""
    delay_s: float
    """Seconds until `source` arrives."""
    local: int
    """Row that the same rank must have computed before, -1 if none."""


def _steps(
    rank_of: Sequence[int],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float] | None,
    transfer_s: Sequence[float],
    exposed_s: Sequence[float],
    count: int,
) -> dict[Kind, list[_Step | None]]:
    """[kind][stage]; None where a backward that is split has no seconds for its parts."""
    stages = len(rank_of)
    last = stages - 1
    steps: dict[Kind, list[_Step | None]] = {kind: [None] * stages for kind in get_args(Kind)}
    for s in range(stages):
        before = s > 0 and rank_of[s - 1] != rank_of[s]
        behind = s < last and rank_of[s + 1] != rank_of[s]
        forward, gradient, weight = s * count, (stages + s) * count, (2 * stages + s) * count
        source, delay_s = (forward - count if s else -1), (transfer_s[s - 1] if before else 0.0)
        sending_s = exposed_s[s] if behind else 0.0
        steps["F"][s] = _Step(forward_s[s] + sending_s, forward, source, delay_s, -1)
        source, delay_s = gradient + count if s < last else -1, transfer_s[s] if behind else 0.0
        sending_s = exposed_s[s - 1] if before else 0.0
        steps["B"][s] = _Step(backward_s[s] + sending_s, gradient, source, delay_s, forward)
        if weight_s is not None:
            input_s = backward_s[s] - weight_s[s] + sending_s
            steps["I"][s] = _Step(input_s, gradient, source, delay_s, forward)
            steps["W"][s] = _Step(weight_s[s], weight, -1, 0.0, gradient)
    return steps


def _rank_of_stage(orders: Sequence[Order], stages: int) -> list[int]:
    """Return the rank of each stage's actions; -1 for a stage without actions."""
    rank_of = [-1] * stages
    for rank, order in enumerate(orders):
        for stage in set(map(_STAGE, order)):
            rank_of[stage] = rank
    return rank_of


def closed_form_s(stage_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of a step by the form that the solver optimises: (m - 1) max_s t_s + Σ_s t_s.

    >>> closed_form_s([3.0] * 4, 8)
    33.0
    """
    return (micro_batches - 1) * max(stage_s) + sum(stage_s)
