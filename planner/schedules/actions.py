"""Actions: the words of a pipeline schedule, and how they are written.

An action reads `2F0`: stage 2, forward, micro-batch 0.  Its kind is one of

    F   forward
    B   whole backward
    I   the part of backward that makes the gradient of the stage's input, which others wait for
    W   the rest: gradients of weights, which nobody waits for before the end of the step

A backward is either one B, or an I and some time later its W.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple, cast

from meshwright.planner.errors import DocumentError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        """Return `2F0` for stage 2, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Action, ...]


def actions(stages: int | Iterable[int], kind: Kind, micro_batches: Iterable[int]) -> list[Action]:
    """Return actions of one kind, of one stage or of one each.

    Orders of a table's rows are millions of actions; one by one they take several times as long.

    >>> list(map(str, actions(2, "F", range(3))))
    ['2F0', '2F1', '2F2']
    """
    each = repeat(stages) if isinstance(stages, int) else stages
    return list(map(_OF, zip(each, repeat(kind), micro_batches)))


_OF = partial(tuple.__new__, Action)


def read_action(text: str) -> Action:
    """Return the action that a text names.

    >>> read_action("2F0")
    Action(stage=2, kind='F', micro_batch=0)
    """
    match = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,9})", text.strip())
    if match is None:
        raise DocumentError(
            "", f"'{text}' is no action; write stage, F, B, I or W, micro-batch: 2F0"
        )
    return Action(int(match[1]), cast(Kind, match[2]), int(match[3]))


def csv_text(ranks: Sequence[Order]) -> str:
    """Return the schedule as lines of comma-separated actions, one line per rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in ranks)
