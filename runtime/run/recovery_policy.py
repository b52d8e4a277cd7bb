"""Verdicts: what is done about what ended the ranks of a run, as a table.

The first row that fits counts.  `times` is how often this cause has ended the run on this rank,
`stuck` how many ends in a row, by whatever cause, were after the same step.  What is not understood
stops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.events import Cause, Reaction
from meshwright.planner.documents.units import Count, Factor, Text

ATTEMPTS = 3
"""Ends after one step by one cause, until that is the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A row: where a cause has come so often, and this number of devices is left, this is done."""

    causes: frozenset[Cause]
    stuck: int = 1
    """At least so often after one step."""
    times: int = 1
    """At least so often on one rank."""
    ever: int = 1
    """At least so often on any."""
    named: bool = False
    """Only where the rank that did it is known."""
    devices: int = 1
    """At least."""
    reaction: Reaction
    why: str


VERDICTS: Sequence[Verdict] = (
    Verdict(
        causes=frozenset({"crash", "device", "node", "hang", "transient", "straggler"}),
        stuck=ATTEMPTS,
        reaction="stop",
        why=f"it ended {ATTEMPTS} times after the same step",
    ),
    Verdict(
        causes=frozenset({"device", "node"}),
        devices=2,
        reaction="shrink",
        why="its device or node is gone",
    ),
    Verdict(
        causes=frozenset({"crash"}),
        times=2,
        devices=2,
        reaction="shrink",
        why="it crashed before",
    ),
    Verdict(
        causes=frozenset({"transient"}),
        times=ATTEMPTS,
        devices=2,
        named=True,
        reaction="shrink",
        why=f"its device gave such errors {ATTEMPTS} times",
    ),
    Verdict(
        causes=frozenset({"transient"}),
        reaction="restart",
        why="such errors may pass, and what failed answers a test",
    ),
    Verdict(
        causes=frozenset({"crash", "hang"}),
        reaction="restart",
        why="it happened once here",
    ),
    Verdict(
        causes=frozenset({"straggler"}),
        devices=2,
        named=True,
        reaction="shrink",
        why="a rank is slower than others, which wait for it, and a spare is there",
    ),
    Verdict(
        causes=frozenset({"corruption"}),
        ever=ATTEMPTS,
        reaction="stop",
        why=f"data corruption was detected {ATTEMPTS} times; one faulty device does not explain it",
    ),
    Verdict(
        causes=frozenset({"corruption"}),
        devices=2,
        named=True,
        reaction="shrink",
        why="its memory or arithmetic is damaged",
    ),
    Verdict(
        causes=frozenset({"corruption"}),
        reaction="restart",
        why="numbers were damaged, and nobody knows where",
    ),
    Verdict(
        causes=frozenset({"doubtful_step"}),
        stuck=2,
        reaction="stop",
        why="the same step gave no number again, so the cause is the data or the model",
    ),
    Verdict(
        causes=frozenset({"doubtful_step"}),
        ever=ATTEMPTS,
        reaction="stop",
        why=f"{ATTEMPTS} steps gave no number; test the devices, and look at the data",
    ),
    Verdict(
        causes=frozenset({"doubtful_step"}),
        reaction="restart",
        why="the step is done again: a number would mean that a device was wrong",
    ),
    Verdict(
        causes=frozenset({"out_of_memory"}),
        ever=2,
        reaction="stop",
        why="a plan for less memory ran out of it too",
    ),
    Verdict(
        causes=frozenset({"out_of_memory"}),
        reaction="replan",
        why="the plan needs more memory than was predicted",
    ),
    Verdict(
        causes=frozenset(get_args(Cause)),
        reaction="stop",
        why="another attempt would end as this one did",
    ),
)


REPLANNED: Sequence[Verdict] = (
    Verdict(
        causes=frozenset({"crash", "device"}), devices=2, reaction="shrink", why="a rank is lost"
    ),
)
"""Verdicts of `--replan` alone."""


class RankEnd(Part):
    """End of an attempt; nodes tell it to each other."""

    cause: Cause
    rank: Count
    after_step: Count
    waits: bool = False
    """The rank only waits for others: whoever names another rank knows more."""
    needed: Factor | None = None
    """Memory that the rank needed at least, over what was predicted, where it ran out of it."""
    on_host: bool = False
    """True if the memory is the host's, beside devices with memory of their own."""
    named: bool = True
    """True if it is known that this rank did it."""
    copies_hold: bool = False
    """True if corruption came behind the newest copy, whose replicas were compared since."""
    said: Text | None = None
    """By its own node's launcher."""

    @property
    def spoils_copies(self) -> bool:
        """True if copies in memory may be damaged; checkpoints were compared before each save."""
        return self.cause == "corruption" and not self.copies_hold


def verdict(
    ends: Sequence[RankEnd], table: Sequence[Verdict] = VERDICTS, *, devices: int
) -> Verdict | None:
    """Return what a table says is done after the last of these ends; None where no row fits.

    >>> first = RankEnd(cause="crash", rank=1, after_step=7)
    >>> later = RankEnd(cause="crash", rank=1, after_step=9)
    >>> verdict([first], devices=2).reaction, verdict([first, later], devices=2).reaction
    ('restart', 'shrink')
    """
    last = ends[-1]
    alike = [end for end in ends if end.cause == last.cause]
    times = sum(end.rank == last.rank for end in alike)
    behind = itertools.takewhile(lambda end: end.after_step == last.after_step, reversed(ends))
    stuck = sum(1 for _ in behind)
    fitting = (
        row
        for row in table
        if last.cause in row.causes
        and times >= row.times
        and stuck >= row.stuck
        and len(alike) >= row.ever
        and (last.named or not row.named)
        and devices >= row.devices
    )
    return next(fitting, None)
