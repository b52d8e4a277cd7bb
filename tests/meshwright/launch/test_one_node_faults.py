"""Faults of a run on one node with two ranks, as the command line meets them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.limits import PATIENCE_S
from tests.meshwright.launch.test_multi_node import ForkingRoom, forks, losses, room, two_ranks

__all__ = ["forks", "room"]

STEPS = 40


def options(room: ForkingRoom) -> str:
    """Return options by which a run is saved after its last step alone."""
    folder = room.folder
    every = f"--checkpoint {folder}/saved --checkpoint-every {STEPS}"
    return f"--elastic --steps {STEPS} -o {folder}/out {every}"


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["replaced", "touched"])
def test_data_that_change_under_a_run_are_refused_at_the_restart(
    room: ForkingRoom, what: str
) -> None:
    """Nothing is saved, so the state that a restart finds is a copy in memory."""
    pytest.importorskip("torch")
    room.let_steps_sleep(0.05)
    launcher = room.launched(room.plan(two_ranks(room)), options(room))
    room.wait_for_step(5, while_running=launcher)
    if what == "replaced":
        room.text.write_text("pack my box with five dozen liquor jugs\n" * 20)
    else:
        room.text.touch()
    os.kill(room.ranks()[1], signal.SIGKILL)

    _, said = launcher.communicate(timeout=PATIENCE_S)

    room.wait_until_empty()
    if what == "touched":
        assert launcher.returncode == 0, said
        assert len(losses(room)) == STEPS
        return
    assert launcher.returncode == 1
    assert f"{room.text}: has changed since the run began: it had 8.8K tokens" in said
    assert len(losses(room)) < STEPS
