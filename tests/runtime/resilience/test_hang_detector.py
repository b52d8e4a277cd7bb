"""A rank that stands still is found and named; ranks of uneven pace are not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.runtime.resilience import hang_detector as hang
from meshwright.runtime.resilience.hang_detector import LEAST_S, HangWatch, collective_of
from meshwright.runtime.resilience.heartbeat import BEACONS, PARTS, Beacon, Beacons, Part, beacons
from tests.limits import PATIENCE_S
from tests.runtime.rooms import ROOT

START_S = 600.0
SLEEPING = """
import os, sys, time
from pathlib import Path
from meshwright.runtime.resilience.heartbeat import Beacon, answer_with_stack

answer_with_stack(Path(sys.argv[1]), int(os.environ["RANK"]))
beacon = Beacon(int(os.environ["LOCAL_RANK"]))
for step in range(1, 10**6):
    for part in ("batch", "step"):
        beacon.begin_part(step, part)
        time.sleep(0.01)
    if step == 20:
        Path(sys.argv[1], f"far-{os.environ['RANK']}").touch()
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The monotonic clock, in seconds, set by hand."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: round(now[0] * 1e9))
    yield now


def watch_of(
    seen: Beacons, clock: list[float], output: Path, *, own_code: bool = False
) -> HangWatch:
    ranks = {4: 0, 5: 1}
    return HangWatch(
        seen, ranks, output, start_s=START_S, own_code=own_code, now_s=lambda: clock[0]
    )


def told(seen: Beacons, monkeypatch: pytest.MonkeyPatch) -> list[Beacon]:
    monkeypatch.setenv(BEACONS, str(seen.file))
    monkeypatch.setattr(os, "kill", lambda process, number: None)
    return [Beacon(local) for local in range(2)]


def steps(
    ranks: list[Beacon], clock: list[float], watch: HangWatch, seconds: list[float]
) -> list[object]:
    """Go through steps of so many seconds, looked at as a launcher does; return what it finds."""
    for number, step_s in enumerate(seconds, start=1):
        for rank in ranks:
            rank.begin_part(number, "step")
        for _ in range(4):
            clock[0] += step_s / 4
            if found := watch.look():
                return list(found)
    return []


def test_places_are_read_as_they_are_told(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with beacons(2) as seen:
        ranks = told(seen, monkeypatch)
        ranks[1].begin_part(7, "save")
        first, second = seen.places()

        assert (first.step, first.part, first.process) == (0, "start", os.getpid())
        assert (second.step, second.part, second.since_s) == (7, "save", 1000.0)
        seen.file.write_bytes(os.urandom(128))
        assert {place.part for place in seen.places()} <= set(PARTS)
    assert not seen.file.exists()


def test_without_a_launcher_that_looks_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BEACONS, raising=False)
    Beacon(0).begin_part(1, "step")


@pytest.mark.parametrize("step_s", [0.5, 4.0, 60.0])
def test_uneven_steps_and_a_long_first_one_are_no_hang(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step_s: float
) -> None:
    rng = random.Random(0)
    with beacons(2) as seen:
        watch = watch_of(seen, clock, tmp_path)
        uneven = [step_s * rng.uniform(0.8, 1.2) for _ in range(300)]

        assert steps(told(seen, monkeypatch), clock, watch, [START_S * 0.9, *uneven]) == []


@pytest.mark.parametrize(("step_s", "within_s"), [(0.5, LEAST_S - 0.5), (4.0, 3 * 4.0 - 4.0)])
def test_a_rank_that_stands_still_is_found_and_comes_first(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    step_s: float,
    within_s: float,
) -> None:
    monkeypatch.setattr(hang, "ANSWER_S", 0.0)
    with beacons(2) as seen:
        watch, ranks = watch_of(seen, clock, tmp_path), told(seen, monkeypatch)
        assert steps(ranks, clock, watch, [step_s] * 10) == []
        begin_s = clock[0]
        ranks[0].begin_part(11, "step")
        while not (found := watch.look()):
            clock[0] += 0.1

        assert clock[0] - begin_s == pytest.approx(within_s, abs=0.5)
        assert [one.rank for one in found] == [5, 4]  # rank 5 is a step behind
        assert found[0].text == "rank 5 does not answer (step of step 10)"


@pytest.mark.parametrize("part", ["start", "step"])
def test_a_rank_that_is_stopped_before_its_second_step_is_found(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: Part
) -> None:
    monkeypatch.setattr(hang, "ANSWER_S", 0.0)
    stopped = False
    monkeypatch.setattr(hang, "is_stopped", lambda _: stopped)
    with beacons(2) as seen:
        watch, ranks = watch_of(seen, clock, tmp_path), told(seen, monkeypatch)
        for rank in ranks:
            rank.begin_part(1, part)
        for stopped in (False, True, False, True):
            begin_s, for_s = clock[0], LEAST_S - 0.5 if stopped else 20.0
            while clock[0] < begin_s + for_s:
                assert watch.look() == []
                clock[0] += 0.25
        while not (found := watch.look()):
            clock[0] += 0.25
            assert clock[0] - begin_s < START_S

        assert clock[0] - begin_s == pytest.approx(LEAST_S, abs=0.5)
        assert len(found) == 2


def test_the_first_call_outside_torch_is_where_a_collective_is_called(tmp_path: Path) -> None:
    stack = (
        '  File "/x/torch/distributed/distributed_c10d.py", line 2 in barrier\n'
        '  File "/x/torch/distributed/c10d_logger.py", line 3 in wrapper\n'
        '  File "/me/train.py", line 4 in end\n'
    )

    assert collective_of(stack) == "barrier at train.py:4 in end"
    assert collective_of('  File "/me/train.py", line 4 in read\n') is None
    (tmp_path / "mine.py").write_text("loss = 1\nwork.wait()\n")
    for line, found in ((1, None), (2, "wait at mine.py:2 in finish")):
        assert collective_of(f'  File "{tmp_path}/mine.py", line {line} in finish\n') == found
    assert collective_of("\x00\xff nonsense") is None


def test_a_stopped_process_is_named_among_those_that_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sleeping ranks, as processes."""
    monkeypatch.setattr(hang, "LEAST_S", 0.7)
    (tmp_path / "flight").mkdir()
    with beacons(2) as seen:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SLEEPING, str(tmp_path)],
                env={
                    **os.environ,
                    BEACONS: str(seen.file),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "PYTHONPATH": str(ROOT),
                },
            )
            for rank in range(2)
        ]
        try:
            watch = HangWatch(seen, {0: 0, 1: 1}, tmp_path, start_s=PATIENCE_S)
            end = time.monotonic() + PATIENCE_S
            while not all((tmp_path / f"far-{rank}").exists() for rank in range(2)):
                assert watch.look() == []
                assert time.monotonic() < end
                time.sleep(0.05)
            os.kill(ranks[1].pid, signal.SIGSTOP)
            while not (found := watch.look()):
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    assert found[0].rank == 1
    assert not found[0].answered
    assert "in <module>" in (tmp_path / "flight" / "rank-00000.stack").read_text()


def test_code_of_a_users_own_between_steps_is_no_hang(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 4 evaluates or writes for a while, and rank 5 waits for it in the next step."""
    monkeypatch.setattr(hang, "ANSWER_S", 0.0)
    with beacons(2) as seen:
        watch, ranks = watch_of(seen, clock, tmp_path, own_code=True), told(seen, monkeypatch)
        assert steps(ranks, clock, watch, [0.5] * 10) == []
        ranks[0].begin_part(11, "batch")
        ranks[1].begin_part(11, "step")
        clock[0] += START_S - 1
        assert watch.look() == []
        ranks[0].begin_part(11, "step")
        clock[0] += LEAST_S + 1

        assert watch.look() != []
