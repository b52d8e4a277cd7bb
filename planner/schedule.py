"""Pipeline schedules as text: who does what in which order.

A schedule is one list of actions per rank.  An action reads `2F0`: stage 2, forward, micro-batch 0.
The simulator times these lists, the memory model counts in-flight micro-batches from them, and the
runtime executes them; there is no second description of a schedule anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from planner.errors import DocumentError

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        """Return `2F0` for stage 2, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Action, ...]


def read_action(text: str) -> Action:
    """Return the action that a text names.

    >>> read_action("2F0")
    Action(stage=2, kind='F', micro_batch=0)
    """
    match = re.fullmatch(r"([0-9]{1,6})([FB])([0-9]{1,9})", text.strip())
    if match is None:
        raise DocumentError("", f"'{text}' is no action; write stage, F or B, micro-batch: 2F0")
    kind: Kind = "F" if match[2] == "F" else "B"
    return Action(int(match[1]), kind, int(match[3]))


def orders(name: str, *, stages: int, micro_batches: int) -> tuple[Order, ...]:
    """Return each rank's order of actions, one stage per rank.

    >>> [" ".join(map(str, order)) for order in orders("1f1b", stages=2, micro_batches=3)]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    if name == "gpipe":
        return tuple(_gpipe(stage, micro_batches) for stage in range(stages))
    if name == "1f1b":
        return tuple(
            _one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)
        )
    raise DocumentError("schedule", f"'{name}' is not known; known: gpipe, 1f1b")


def _gpipe(stage: int, micro_batches: int) -> Order:
    """All forwards, then all backwards in the same order (Huang et al., 2019)."""
    return (
        *(Action(stage, "F", m) for m in range(micro_batches)),
        *(Action(stage, "B", m) for m in range(micro_batches)),
    )


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Order:
    """Warm up with as many forwards as stages follow, then alternate (PipeDream-flush, 2021)."""
    warm_up = min(micro_batches, stages - stage - 1)
    result = [Action(stage, "F", m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        result += [Action(stage, "F", warm_up + m), Action(stage, "B", m)]
    result += [Action(stage, "B", m) for m in range(micro_batches - warm_up, micro_batches)]
    return tuple(result)


def in_flight(order: Sequence[Action]) -> int:
    """Return the most micro-batches that hold activations at once on a rank.

    >>> [in_flight(order) for order in orders("1f1b", stages=4, micro_batches=8)]
    [4, 3, 2, 1]
    """
    alive = most = 0
    for action in order:
        alive += 1 if action.kind == "F" else -1
        most = max(most, alive)
    return most


def most_in_flight(name: str, stage: int, *, stages: int, micro_batches: int) -> int:
    """Return what `in_flight` counts, without the order: min(m, P - s) for 1F1B, m for GPipe.

    >>> [most_in_flight("1f1b", stage, stages=4, micro_batches=8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    if name == "gpipe":
        return micro_batches
    if name == "1f1b":
        return min(micro_batches, stages - stage)
    raise DocumentError("schedule", f"'{name}' is not known; known: gpipe, 1f1b")


def csv_text(ranks: Sequence[Order]) -> str:
    """Return the schedule as lines of comma-separated actions, one line per rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in ranks)
