"""Two faults within one recovery: a run on three nodes and a spare ends as if there were none.

Launchers are nodes on one machine, each with a rank; steps sleep.  The second fault comes some time
after the first: while it is found, decided about, while ranks start or load.  All pairs are in
`make matrix`; of single faults some are in every run of the suite that has time for them.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.recovery import BATCH, NODES, Job
from runtime import checkpoint
from runtime.run import metrics_file, read_records
from runtime.sample_digest import SampleDigest
from tests.limits import PATIENCE_S
from tests.runtime.rooms import Room, plan_of

STEPS, STEP_S = 60, 0.2
BEGIN = 12
"""The step that the first fault comes behind."""
AFTER_S = (0.0, 0.3, 1.0, 2.0, 4.0)


def kill_rank(rank: int) -> Callable[[Job], None]:
    def kill(job: Job) -> None:
        for number, process in job.room.ranks().items():
            if number == rank:
                os.kill(process, signal.SIGKILL)

    return kill


def stop_rank(job: Job) -> None:
    for number, process in job.room.ranks().items():
        if number == 1:
            os.kill(process, signal.SIGSTOP)


def kill_node(node: int) -> Callable[[Job], None]:
    return lambda job: job.launchers[node].kill()


def start_again(job: Job) -> None:
    """Node 2 ends, and comes back."""
    job.launchers[2].kill()
    job.launchers[2].wait()
    job.launchers[2] = job.start(2)


FAULTS: dict[str, Callable[[Job], None]] = {
    "rank 0 killed": kill_rank(0),
    "rank 1 killed": kill_rank(1),
    "rank 1 stands still": stop_rank,
    "lead killed": kill_node(0),
    "node 1 killed": kill_node(1),
    "node 1 stands still": lambda job: job.stop_node(1),
    "node 2 comes back": start_again,
    "spare killed": kill_node(NODES),
}
PAIRS = [(one, other, after_s) for one in FAULTS for other in FAULTS for after_s in AFTER_S]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Job(tmp_path, None, nodes=NODES + 1, step_s=STEP_S, ranks=1, steps=STEPS)
    yield made
    for launcher in made.room.started:
        launcher.kill()
        launcher.wait()
    made.room.wait_until_empty()


@functools.cache
def expected() -> list[float]:
    """Losses of one rank that nobody disturbs."""
    with tempfile.TemporaryDirectory() as name:
        room = Room(Path(name))
        room.text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        one = {"global_batch": BATCH, "micro_batches": BATCH // 2}
        report = room.run(plan_of().model_copy(update=one), steps=STEPS)
    return [report.losses[step] for step in range(STEPS)]


def check(job: Job) -> None:
    """Let the run come to its end, and look at what it has done."""
    for launcher in job.room.started:
        if launcher.poll() is None:
            try:
                launcher.wait(timeout=PATIENCE_S / 10)
            except subprocess.TimeoutExpired:  # one that stands still
                launcher.kill()
    codes = [launcher.returncode for launcher in job.room.started]
    logs = {log.name: log.read_text()[-3000:] for log in job.room.folder.glob("launcher-*.log")}
    assert 0 in codes, (codes, logs)
    records = list(read_records(metrics_file(job.room.folder / "out")))
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert [record.loss for record in records] == pytest.approx(expected(), abs=1e-4)
    done = checkpoint.progress(job.room.folder / "saved" / f"step-{STEPS:06}")
    assert (done.sample, done.used) == (STEPS * BATCH, SampleDigest.of_first(STEPS * BATCH))


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault(job: Job, fault: str) -> None:
    pytest.importorskip("torch")
    job.room.wait_for_step(BEGIN, while_running=None)
    FAULTS[fault](job)

    check(job)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(("first", "second", "after_s"), PAIRS)
def test_two_faults(job: Job, first: str, second: str, after_s: float) -> None:
    pytest.importorskip("torch")
    job.room.wait_for_step(BEGIN, while_running=None)
    FAULTS[first](job)
    time.sleep(after_s)
    FAULTS[second](job)

    check(job)
