"""A pipeline step, action by action: when each rank does what, and how long the step takes.

Stages take their own forward and backward seconds; an activation or gradient reaches the next
stage `transfer_s` after it was made, while both ranks go on computing.  Every rank follows its
order of `planner.schedule` and waits where an input is not there yet.  Nothing here knows where
the seconds come from, nor what happens after the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import DocumentError
from planner.schedule import Action, Order

_NOT_YET = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When every action of every rank starts and ends."""

    makespan_s: float
    orders: tuple[Order, ...]
    starts_s: tuple[tuple[float, ...], ...]
    """[rank, action]"""
    ends_s: tuple[tuple[float, ...], ...]
    """[rank, action]"""

    def finish_s(self, rank: int) -> float:
        """Return when a rank has done its last action."""
        return self.ends_s[rank][-1] if self.ends_s[rank] else 0.0

    def busy_s(self, rank: int) -> float:
        """Return how long a rank computes."""
        return sum(
            end - start for start, end in zip(self.starts_s[rank], self.ends_s[rank], strict=True)
        )

    def actions(self, rank: int) -> list[tuple[float, float, Action]]:
        """Return (start, end, action) of a rank in order."""
        return list(zip(self.starts_s[rank], self.ends_s[rank], self.orders[rank], strict=True))


def timeline(
    orders: Sequence[Order],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
) -> Timeline:
    """Return the step in which each rank runs its order as early as it can.

    `forward_s` and `backward_s` are per stage and micro-batch.  The timeline is the longest path
    through all dependencies: order on a rank, forward after the stage before, backward after the
    stage behind and after the own forward.

    >>> from planner.schedule import orders
    >>> order = orders("1f1b", stages=4, micro_batches=8)
    >>> timeline(order, forward_s=[1.0] * 4, backward_s=[2.0] * 4).makespan_s
    33.0
    """
    stages = len(forward_s)
    micro_batches = 1 + max(
        (action.micro_batch for order in orders for action in order), default=-1
    )
    # Rows: forwards by stage, then backwards by stage.
    done_s = [[_NOT_YET] * micro_batches for _ in range(2 * stages)]
    seconds = (*forward_s, *backward_s)
    waiting: dict[tuple[int, int], int] = {}
    position = [0] * len(orders)
    clock = [0.0] * len(orders)
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    ready = list(range(len(orders) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        order, now, at = orders[rank], clock[rank], position[rank]
        own_starts, own_ends = starts[rank], ends[rank]
        while at < len(order):
            stage, kind, micro_batch = order[at]
            if kind == "F":
                row, arrival = stage, 0.0
                before = stage - 1 if stage else None
            else:
                row, arrival = stages + stage, done_s[stage][micro_batch]
                if arrival == _NOT_YET:
                    raise DocumentError("schedule", f"{order[at]} stands before its forward")
                before = row + 1 if stage < stages - 1 else None
            if before is not None:
                made = done_s[before][micro_batch]
                if made == _NOT_YET:
                    waiting[before, micro_batch] = rank
                    break
                arrival = made + transfer_s
            start = arrival if arrival > now else now
            now = start + seconds[row]
            own_starts.append(start)
            own_ends.append(now)
            done_s[row][micro_batch] = now
            at += 1
            if waiting and (row, micro_batch) in waiting:
                ready.append(waiting.pop((row, micro_batch)))
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


def peak_alive(order: Sequence[Action]) -> dict[int, int]:
    """Return, for each stage of a rank, the most micro-batches that hold activations at once.

    A micro-batch is alive from the start of its forward to the end of its backward; on one rank
    actions do not overlap, so their order alone decides.
    """
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in order:
        alive[action.stage] = alive.get(action.stage, 0) + (1 if action.kind == "F" else -1)
        most[action.stage] = max(most.get(action.stage, 0), alive[action.stage])
    return most


def closed_form_s(stage_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of a step by the form that the solver optimises: (m - 1) max_s t_s + Σ_s t_s.

    >>> closed_form_s([3.0] * 4, 8)
    33.0
    """
    return (micro_batches - 1) * max(stage_s) + sum(stage_s)
