"""What is done about an end of ranks: rows of a table, the first that fits."""

from __future__ import annotations

from typing import get_args

import pytest

from meshwright.planner.documents.events import Cause
from meshwright.runtime.run.recovery_policy import ATTEMPTS, REPLANNED, VERDICTS, RankEnd, verdict


def end(cause: Cause, *, rank: int = 1, after_step: int = 5) -> RankEnd:
    return RankEnd(cause=cause, rank=rank, after_step=after_step)


OF_A_DISK = end("transient").model_copy(update={"named": False})
"""Nobody knows whether it is this rank that gives the errors."""


@pytest.mark.parametrize(
    ("ends", "devices", "reaction"),
    [
        ([end("crash")], 4, "restart"),
        ([end("crash"), end("crash", after_step=9)], 4, "shrink"),
        ([end("crash"), end("crash", rank=2, after_step=9)], 4, "restart"),
        ([end("crash"), end("crash", after_step=9)], 1, "restart"),
        ([end("hang"), end("hang", rank=0)], 4, "restart"),
        ([end("hang", rank=rank) for rank in range(ATTEMPTS)], 4, "stop"),
        ([end("hang", after_step=step) for step in range(9)], 4, "restart"),
        ([end("hang", after_step=step) for step in (5, 9, 5, 9, 5)], 4, "restart"),
        ([end("hang"), end("crash"), end("hang")], 4, "stop"),
        ([end("device")], 4, "shrink"),
        ([end("device")], 1, "stop"),
        ([end("program")], 4, "stop"),
        ([end("transient")], 4, "restart"),
        ([end("transient", after_step=step) for step in range(3)], 4, "shrink"),
        ([end("transient", after_step=step) for step in range(3)], 1, "restart"),
        ([OF_A_DISK.model_copy(update={"after_step": step}) for step in range(9)], 4, "restart"),
        ([OF_A_DISK] * ATTEMPTS, 4, "stop"),
        ([end("not_a_number")], 4, "stop"),
        ([end("doubtful_step")], 1, "restart"),
        ([end("doubtful_step"), end("doubtful_step", rank=0)], 4, "stop"),
        ([end("doubtful_step"), end("doubtful_step", after_step=9)], 4, "restart"),
        ([end("doubtful_step", after_step=step) for step in range(3)], 4, "stop"),
        ([end("corruption")], 4, "shrink"),
        ([end("corruption")], 1, "restart"),
        ([end("corruption").model_copy(update={"named": False})], 4, "restart"),
        ([end("corruption", rank=rank, after_step=9 * rank) for rank in range(3)], 4, "stop"),
        ([end("out_of_memory")], 4, "replan"),
        ([end("out_of_memory"), end("crash")], 4, "restart"),
        ([end("out_of_memory"), end("out_of_memory", rank=0, after_step=90)], 4, "stop"),
    ],
)
def test_the_first_row_that_fits_counts(ends: list[RankEnd], devices: int, reaction: str) -> None:
    found = verdict(ends, devices=devices)

    assert found is not None
    assert found.reaction == reaction


def test_every_cause_has_a_reaction_and_no_cause_has_one_for_ever() -> None:
    """Restarted or shrunk behind one step again and again, a run stops."""
    for cause in get_args(Cause):
        ends: list[RankEnd] = []
        for devices in (8, 8, 8):
            ends.append(end(cause))
            found = verdict(ends, devices=devices)
            assert found is not None
        assert found.reaction == "stop"


def test_replanning_alone_does_without_lost_ranks_and_nothing_else() -> None:
    reactions = {}
    for cause in get_args(Cause):
        found = verdict([end(cause)], REPLANNED, devices=2)
        reactions[cause] = found and found.reaction
    assert {cause for cause, reaction in reactions.items() if reaction} == {"crash", "device"}
    assert verdict([end("crash")], REPLANNED, devices=1) is None
    assert not {row.reaction for row in VERDICTS} - {"stop", "shrink", "restart", "replan"}
