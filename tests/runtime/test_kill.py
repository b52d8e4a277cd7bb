"""Ranks are killed at random moments, saving included: no checkpoint is lost, and no rank is left.

Saving is slowed down, so that most moments fall into it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from meshwright.runtime.checkpoint.checkpoint import newest, progress
from meshwright.runtime.run import run_folder as files_of
from tests.limits import PATIENCE_S
from tests.runtime.rooms import ENOUGH, Room, plan_of

PLANS = (plan_of(data=2), plan_of(pipeline=2), plan_of(data=2, zero=3))
SLOW_DISK = """
import os, time

def slow(action):
    def slowly(*args, **kwargs):
        time.sleep(0.05)
        result = action(*args, **kwargs)
        time.sleep(0.05)
        return result
    return slowly

os.fsync, os.rename, os.unlink = slow(os.fsync), slow(os.rename), slow(os.unlink)
"""


def kill_and_resume(room: Room, *, moments: int, seed: int) -> int:
    """Kill a rank at each of so many moments; return how many of them fell into a save."""
    room.begin_with(SLOW_DISK)
    draw = random.Random(seed)
    saved = room.folder / "saved"
    hits = 0
    for moment in range(moments):
        done = step_of(saved)
        starting = done > 0 and draw.random() < 0.2
        launcher = room.start(
            PLANS[moment % len(PLANS)],
            step=0 if starting else done + 3 + draw.randrange(2),
            steps=ENOUGH,
            checkpoint=str(saved),
            checkpoint_every=1,
            resume=done > 0,
        )
        while room.ranks() == {} and launcher.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 4.0 if starting else 1.0))
        ranks = room.ranks()
        victim = draw.choice(sorted(ranks.values()))
        before = step_of(saved)
        hits += any(saved.glob(".step-*"))
        os.kill(victim, signal.SIGKILL)
        _, message = launcher.communicate(timeout=PATIENCE_S)

        assert launcher.returncode == 1
        assert "was killed by SIGKILL" in message
        assert room.ranks() == {}
        assert before <= step_of(saved)
    return hits


def step_of(folder: Path) -> int:
    last = newest(folder)
    return progress(last).step if last else 0


def check_as_if_nothing_had_happened(room: Room) -> None:
    """Go on to an end, and compare every step with those of a run that nobody disturbed."""
    steps = step_of(room.folder / "saved") + 2
    room.run(plan_of(), steps=steps, checkpoint=room.folder / "saved", resume=True)
    room.run(plan_of(), steps=steps, output=room.folder / "whole")

    found = list(files_of.read_records(files_of.metrics_file(room.folder / "out")))
    wanted = list(files_of.read_records(files_of.metrics_file(room.folder / "whole")))
    assert [record.step for record in found] == list(range(1, steps + 1))
    for mine, whole in zip(found, wanted, strict=True):
        assert mine.loss == pytest.approx(whole.loss, rel=1e-4), mine.step


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_kill_costs_nothing(room: Room) -> None:
    pytest.importorskip("torch")

    kill_and_resume(room, moments=1, seed=1)

    check_as_if_nothing_had_happened(room)


@pytest.mark.ranks
@pytest.mark.matrix
def test_twenty_kills_cost_nothing(room: Room) -> None:
    pytest.importorskip("torch")

    hits = kill_and_resume(room, moments=20, seed=2)

    assert hits >= 5
    check_as_if_nothing_had_happened(room)
