"""Two faults within one recovery: a run on three nodes and a spare ends as if there were none.

Launchers are nodes on one machine, each with a rank; steps sleep.  The second fault comes some time
after the first: while it is found, decided about, while ranks start or load.  Launchers are forked
(`tests.runtime.forked`), and the book of plans is solved once for all cases: a case takes a few
seconds of processor time.  `test_fault_pairs` plays the same pairs without processes.

Losses must be, bit for bit, those of a fresh start of each plan from the state that the one before
it had reached.  Those are trained once for each plan and step, with a checkpoint of every step.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.recovery import BATCH, NODES, Job, planned
from meshwright.launch.fallback_plans import FallbackPlans
from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.planner.documents import document
from meshwright.planner.documents.events import Attempt, Decision, Incident, StepDone
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.resilience.hang_detector import is_stopped
from meshwright.runtime.run.run_folder import metrics_file, read_records
from tests.limits import PATIENCE_S
from tests.runtime.forked import ForkedLauncher, common_environment, nursery
from tests.runtime.rooms import Room

STEPS, STEP_S = 32, 0.2
BEGIN = 6
"""The step that the first fault comes behind."""
EVERY = 5
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


def ask(what: str) -> Callable[[Job], None]:
    """Return what has rank 1 do something within its next step."""
    return lambda job: (job.room.folder / what).touch()


SAID: dict[str, Callable[[Job], None]] = {
    "rank 1 leaves with 0": ask("leave 0"),
    "rank 1 cannot read": ask("EIO"),
    "rank 1 has a stale handle": ask("ESTALE"),
    "rank 1 fails to launch": ask("launch failure"),
}
"""Faults of which a rank says something, or nothing with status 0."""
EVERY_FAULT = FAULTS | SAID
PAIRS = [
    (one, other, after_s) for one in EVERY_FAULT for other in EVERY_FAULT for after_s in AFTER_S
]


@dataclass
class Course:
    """What all cases have in common: launchers' forks, plans, and runs that nobody disturbs."""

    folder: Path
    forks: Zygote
    environment: Mapping[str, str]
    plan: Path
    references: dict[tuple[tuple[str, int], ...], Path] = field(default_factory=dict)

    def job(self, folder: Path) -> Job:
        """Start a run on three nodes and a spare."""
        shutil.copytree(self.folder / "saved", folder / "saved")
        return Job(
            folder,
            None,
            self.forks,
            nodes=NODES + 1,
            step_s=STEP_S,
            ranks=1,
            steps=STEPS,
            every=EVERY,
            plan=self.plan,
            environment=self.environment,
            begins_with=ASKED.replace("FOLDER", str(folder)),
        )

    def plans(self, solved: Path) -> dict[str, Path]:
        """Return the files of all plans, by digest; some a run has `solved` itself."""
        book = self.folder / "saved" / "book"
        files = [self.plan, *book.glob("plan-for-*.yaml"), *solved.glob("plan-for-*.yaml")]
        return {document.read(Plan, file).digest: file for file in files}

    def reference(self, parts: tuple[tuple[str, int], ...], solved: Path) -> list[float]:
        """Return losses where each plan goes on behind a step, trained without faults."""
        *before, (plan, step) = parts
        earlier = self.reference(tuple(before), solved) if before else []
        if parts not in self.references:
            folder = self.folder / f"reference-{len(self.references)}"
            (folder / "saved").mkdir(parents=True)
            if before:
                name = f"step-{step:06}"
                found = self.references[tuple(before)] / "saved" / name
                shutil.copytree(found, folder / "saved" / name)
            arguments = [
                *("launch", str(self.plans(solved)[plan]), "--data", str(self.folder / "text.txt")),
                *("--steps", str(STEPS), "--checkpoint", str(folder / "saved"), "--resume"),
                *("--or-start", "--checkpoint-every", "1", "--keep-checkpoints", "1000"),
                *("--output", str(folder / "out")),
            ]
            log = folder / "logs" / "launcher.log"
            log.parent.mkdir()
            launcher = ForkedLauncher(self.forks, arguments, self.environment, log=log)
            assert launcher.wait(PATIENCE_S) == 0, log.read_text()
            self.references[parts] = folder
        records = read_records(metrics_file(self.references[parts] / "out"))
        return [*earlier[:step], *(record.loss for record in records)]


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("course")
    room = Room(folder)
    room.text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    plan = planned(room, ranks=1)
    fit = LaunchablePlan.read(str(plan), None)
    for left in range(NODES - 1, 0, -1):
        FallbackPlans(folder / "saved").solve(fit, left)
    own = {"MESHWRIGHT_SECRET": "of these tests alone", "MESHWRIGHT_CACHE": str(folder / "cache")}
    environment = {**common_environment(), **own}
    with nursery(folder) as forks:
        yield Course(folder, forks, environment, plan)


ASKED = """
import errno, os
from pathlib import Path
from meshwright.runtime.launch import training_loop as train

take_step = train.Loop._take_step
def step_with_faults(self, batch):
    import torch
    def is_asked(what):
        file = Path("FOLDER") / what
        if self.rank != 1 or not file.exists():
            return False
        file.unlink()
        return True
    if is_asked("flip"):
        with torch.no_grad():
            weight = next(one for name, one in self.engine.state().items() if "weight" in name)
            weight.view(-1)[3] += 1.0
    if is_asked("full"):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    if is_asked("leave 0"):
        os._exit(0)
    for name in ("EIO", "ESTALE"):
        if is_asked(name):
            raise OSError(getattr(errno, name), name)
    if is_asked("launch failure"):
        raise RuntimeError("CUDA error: unspecified launch failure")
    return take_step(self, batch)
train.Loop._take_step = step_with_faults
train._Peak.watch = lambda self, step, held: step()  # no memory is counted
"""
"""Rank 1 has a weight changed, runs out of memory, leaves or fails, where a file asks for it."""


@pytest.fixture
def job(tmp_path: Path, course: Course) -> Iterator[Job]:
    made = course.job(tmp_path)
    yield made
    for launcher in made.room.started:
        launcher.kill()
        launcher.wait()
    made.room.wait_until_empty()


def check(job: Job, course: Course) -> None:
    """Let the run come to its end, and look at what it has done."""
    started = job.room.started
    end_s = time.monotonic() + PATIENCE_S / 4
    while any(one.poll() is None and not is_stopped(one.pid) for one in started):
        assert time.monotonic() < end_s, said(job)
        time.sleep(0.05)
    for launcher in started:
        launcher.kill()
        launcher.wait()
    codes = [launcher.returncode for launcher in started]
    assert 0 in codes, (codes, said(job))
    job.room.wait_until_empty()
    records = list(read_records(metrics_file(job.room.folder / "out")))
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert [record.loss for record in records] == course.reference(
        parts_of(job), job.room.folder / "saved"
    )
    saved = job.room.folder / "saved"
    done = checkpoint.progress(saved / f"step-{STEPS:06}")
    assert (done.sample, done.used) == (STEPS * BATCH, SampleDigest.of_first(STEPS * BATCH))
    assert list(saved.glob(".*")) == [saved / ".lock"] * (saved / ".lock").exists()


def parts_of(job: Job) -> tuple[tuple[str, int], ...]:
    """Return the plans that steps were done by which count, each with the step that it began at."""
    done: list[tuple[int, str]] = []
    plan = ""
    for event in job.events():
        if isinstance(event, Attempt):
            plan = event.plan
        elif isinstance(event, StepDone):
            step = event.record.step
            done = [*(one for one in done if one[0] < step), (step, plan)]
    begun: list[tuple[str, int]] = []
    for step, by in done:
        if not begun or begun[-1][0] != by:
            begun.append((by, step - 1))
    return tuple(begun)


def said(job: Job) -> dict[str, str]:
    """Return what launchers have said last."""
    logs = (job.room.folder / "logs").glob("launcher-*.log")
    return {log.name: log.read_text()[-3000:] for log in logs}


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_one_fault(job: Job, course: Course, fault: str) -> None:
    job.room.wait_for_step(BEGIN, while_running=None)
    EVERY_FAULT[fault](job)

    check(job, course)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(("first", "second", "after_s"), PAIRS)
def test_two_faults(job: Job, course: Course, first: str, second: str, after_s: float) -> None:
    job.room.wait_for_step(BEGIN, while_running=None)
    EVERY_FAULT[first](job)
    time.sleep(after_s)
    EVERY_FAULT[second](job)

    check(job, course)


def reactions(job: Job) -> list[tuple[str, str]]:
    """Return causes and what was done about them, in turn."""
    causes = [one.cause for one in job.events() if isinstance(one, Incident)]
    return list(zip(causes, [one.reaction for one in decisions(job)], strict=True))


def decisions(job: Job) -> list[Decision]:
    found = [one for one in job.events() if isinstance(one, Decision)]
    return [one for one in found if one.reaction != "interval"]


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_replica_that_is_damaged_is_named_and_a_spare_takes_its_nodes_place(
    job: Job, course: Course
) -> None:
    job.room.wait_for_step(BEGIN, while_running=None)
    (job.room.folder / "flip").touch()

    check(job, course)

    assert reactions(job) == [("corruption", "spare")]
    (incident,) = [one for one in job.events() if isinstance(one, Incident)]
    assert incident.rank == 1
    assert "rank 1 has another value than ranks 0 and 2" in incident.evidence


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_plan_that_runs_out_of_memory_on_several_nodes_is_replaced(
    job: Job, course: Course
) -> None:
    job.room.wait_for_step(BEGIN, while_running=None)
    (job.room.folder / "full").touch()

    check(job, course)

    assert reactions(job) == [("out_of_memory", "replan")]
    assert decisions(job)[0].devices == NODES


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_run_all_of_whose_nodes_are_lost_goes_on_from_its_checkpoint(
    job: Job, course: Course
) -> None:
    """The spare ends, since no member is left, and all nodes are started again by hand."""
    job.room.wait_for_step(BEGIN, while_running=None)
    for node in range(NODES):
        job.launchers[node].kill()
    spare = job.launchers[NODES]
    assert spare.wait(PATIENCE_S / 10) == 1
    assert "no member of the run is left" in job.log(NODES).read_text()
    assert f" is saved of {STEPS} steps; start the run again" in job.log(NODES).read_text()
    job.room.wait_until_empty()
    saved = checkpoint.newest(job.room.folder / "saved")
    assert saved is not None
    step = checkpoint.progress(saved).step

    job.more = ("--resume", "--or-start")
    job.launchers = [job.start(node) for node in range(NODES + 1)]

    check(job, course)
    *_, last = [one for one in job.events() if isinstance(one, Attempt)]
    assert last.after_step == step
