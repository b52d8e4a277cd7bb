"""`launch --elastic`: ranks that hang or are killed cost steps that are done again, no more."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from meshwright.api import commands
from meshwright.api.inputs import machine_of
from meshwright.launch.launch import launch
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import write
from meshwright.planner.documents.events import (
    Attempt,
    Decision,
    Event,
    Incident,
    PhaseDone,
    StepDone,
    events_of,
)
from meshwright.planner.documents.plan import Plan, PlannedModel
from meshwright.planner.errors import DocumentError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.launch.fork_client import Zygote
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.run_folder import account_of, events_file, metrics_file, read_records
from tests.limits import PATIENCE_S
from tests.runtime.forked import ForkedLauncher, common_environment, nursery
from tests.runtime.ports import free_port
from tests.runtime.rooms import MODEL, Room, plan_of, slow

EVERY, STEPS = 20, 400
NOTES_COPIES = """
import os
from pathlib import Path
from meshwright.runtime.resilience.in_memory_checkpoint import Mirror

copy = Mirror.copy
def noted(self, snapshot, **told):
    copy(self, snapshot, **told)
    with (Path("FOLDER") / f"copied-{os.environ['RANK']}-{self._run}").open("a") as file:
        file.write(f"{snapshot.step}\\n")
Mirror.copy = noted
"""
"""Each rank notes the steps that it has copied, in a file of each attempt."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    pytest.importorskip("torch")
    with nursery(tmp_path_factory.mktemp("forks")) as made:
        yield made


class ForkingRoom(Room):
    """A room whose launches are forked."""

    forks: Zygote
    begins_with = ""

    def let_steps_sleep(self, step_s: float) -> None:
        self.begins_with += slow(step_s)

    def note_copies(self) -> None:
        self.begins_with += NOTES_COPIES.replace("FOLDER", str(self.folder))

    def copied(self) -> list[list[int]]:
        """Return the steps that were copied by rank 0, of each attempt in turn."""
        files = sorted(self.folder.glob("copied-0-*"), key=lambda file: file.stat().st_mtime_ns)
        return [[int(line) for line in file.read_text().split()] for file in files]

    def launched(self, plan: Path | str, options: str, name: str = "launcher") -> ForkedLauncher:
        """Launch a plan with the text."""
        (self.folder / "logs").mkdir(exist_ok=True)
        launcher = ForkedLauncher(
            self.forks,
            ["launch", str(plan), "--data", str(self.text), *options.split()],
            common_environment(),
            log=self.folder / "logs" / f"{name}.log",
            begins_with=self.begins_with,
        )
        self.started.append(launcher)
        return launcher


@pytest.fixture
def room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ForkingRoom]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = ForkingRoom(tmp_path)
    if request.node.get_closest_marker("ranks") is not None:
        made.forks = request.getfixturevalue("forks")
    made.text.write_text("the quick brown fox jumps over the lazy dog\n" * 200, encoding="utf-8")
    yield made
    for launcher in made.started:
        launcher.kill()
        launcher.communicate()


def two_ranks(room: ForkingRoom) -> Plan:
    write(MODEL, room.folder / "model.yaml")
    source = str(room.folder / "model.yaml")
    planned = PlannedModel(name="tiny", source=source, digest=MODEL.digest)
    return plan_of(data=2).model_copy(update={"model": planned, "cluster": "local:2"})


def survived(
    room: ForkingRoom, faults: Sequence[signal.Signals], *, step_s: float = 0.0
) -> tuple[list[Event], float, str]:
    """Train while rank 1 gets a signal after another; return events, the first signal's time."""
    output = room.folder / "out"
    if step_s:
        room.let_steps_sleep(step_s)
    options = f"--elastic --steps {STEPS} --checkpoint-every {EVERY} -o {output}"
    plan = room.plan(two_ranks(room))
    launcher = room.launched(plan, f"{options} --checkpoint {room.folder}/saved")
    begin_s = 0.0
    for number, fault in enumerate(faults, start=1):
        room.wait_for_step(number * (EVERY + 10), while_running=launcher)
        end = time.monotonic() + PATIENCE_S
        book = room.folder / "saved" / "book" / "with-1.json"
        while (
            account_of(output).attempts < number
            or 1 not in room.ranks()
            or (number > 1 and not book.exists())
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        begin_s = begin_s or time.time()
        os.kill(room.ranks()[1], fault)
    _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, said
    with events_file(output).open("rb") as lines:
        return list(events_of(lines)), begin_s, said


def saved_step(event: Event) -> int:
    """Return the step of the checkpoint that an attempt found."""
    assert isinstance(event, Attempt)
    return event.after_step


def check_what_was_gone_on_from(room: ForkingRoom, events: Sequence[Event]) -> None:
    """Check that attempts after a loss went on from the newest copy, or the one before it.

    The newest may have been on its way to the partner, and a state is copied once the one before
    is kept everywhere.  How many steps that are depends on how long copies take here and now.
    """
    begun = [number for number, event in enumerate(events) if isinstance(event, Attempt)]
    for copied, number in zip(room.copied(), begun[1:], strict=False):
        steps = (event.record.step for event in events[number:] if isinstance(event, StepDone))
        went_on, (before, *_) = next(steps) - 1, copied[-2:]
        assert went_on in copied[-2:] or went_on == saved_step(events[number]) > before


def losses(room: ForkingRoom) -> list[float]:
    return [record.loss for record in read_records(metrics_file(room.folder / "out"))]


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_rank_that_hangs_is_named_and_restarted_and_losses_are_those_of_no_hang(
    room: ForkingRoom,
) -> None:
    pytest.importorskip("torch")
    events, begin_s, said = survived(room, [signal.SIGSTOP])

    assert "rank 1 does not answer" in said
    assert "rank 0 waits for others: wait at replicas.py:" in said
    (incident,) = [event for event in events if isinstance(event, Incident)]
    (decision,) = [event for event in events if isinstance(event, Decision)]
    assert (incident.cause, incident.rank) == ("hang", 1)
    assert incident.at_unix_s - begin_s < 15.0
    first, second = [event for event in events if isinstance(event, PhaseDone)]
    assert decision.reaction == "restart"
    assert decision.predicted_s == first.measured_s == second.predicted_s
    assert account_of(room.folder / "out").steps_lost <= EVERY + 1
    with_hang = losses(room)
    room.run(plan_of(data=2), steps=STEPS)
    assert losses(room) == with_hang


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_rank_that_is_killed_twice_is_restarted_once_and_then_done_without(
    room: ForkingRoom,
) -> None:
    pytest.importorskip("torch")
    room.note_copies()
    events, begin_s, said = survived(room, [signal.SIGKILL, signal.SIGKILL], step_s=0.05)

    assert said.count("rank 1 was killed by SIGKILL") == 2
    restarted, shrunk = [event for event in events if isinstance(event, Decision)]
    assert (restarted.reaction, restarted.devices, restarted.plan_source) == ("restart", 2, "given")
    assert (shrunk.reaction, shrunk.devices, shrunk.plan_source) == ("shrink", 1, "book")
    check_what_was_gone_on_from(room, events)
    steps = [record.step for record in read_records(metrics_file(room.folder / "out"))]
    assert steps == list(range(1, STEPS + 1))
    first, _ = [event for event in events if isinstance(event, Incident)]
    assert first.at_unix_s - begin_s < 5.0
    assert len(losses(room)) == STEPS


FULL = """
import os
import torch
from torch import nn

class Middle(nn.Module):
    \"\"\"Runs out of memory where a rank has more than so many samples at once.\"\"\"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if x.device.type != "meta" and len(x) > int(os.environ["MESHWRIGHT_TEST_ROOM"]):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return self.linear(x)

def factory():
    return nn.Sequential(nn.Embedding(257, 16), Middle(), nn.Linear(16, 257))
"""


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(("samples", "ends"), [(4, 0), (2, 1)])
def test_a_plan_that_runs_out_of_memory_is_replaced_once(
    room: ForkingRoom, monkeypatch: pytest.MonkeyPatch, samples: int, ends: int
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MESHWRIGHT_TEST_ROOM", "99")
    (room.folder / "mine.py").write_text(FULL)
    planned = room.folder / "plan.yaml"
    commands.plan(
        f"{room.folder}/mine.py:factory",
        "local:1",
        seq_len=16,
        global_batch=8,
        output=str(planned),
    )
    first = document.read(Plan, planned).micro_batch
    assert first > 4
    monkeypatch.setenv("MESHWRIGHT_TEST_ROOM", str(samples))
    options = f"--trust-code --elastic --steps 20 -o {room.folder}/out"
    launcher = room.launched(planned, f"{options} --checkpoint {room.folder}/saved")
    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == ends, said
    assert "held: parameters 34.2 KiB" in said
    assert "predicted: parameters" in said
    with events_file(room.folder / "out").open("rb") as lines:
        events = list(events_of(lines))
    causes = [event.cause for event in events if isinstance(event, Incident)]
    reactions = [event.reaction for event in events if isinstance(event, Decision)]
    assert causes == ["out_of_memory"] * (1 + ends)
    assert reactions[:1] == ["replan"]
    if not ends:
        assert len(losses(room)) == 20


HUNGRY = """
import os
from pathlib import Path
from meshwright.runtime.launch import training_loop as train

Path("GROUP/cgroup.procs").write_text(str(os.getpid()))
take_step = train.Loop._take_step
def step(self, batch):
    asked = Path("FOLDER/eat")
    if self.rank == 1 and asked.exists():
        asked.unlink()
        bytearray(BYTES)
    return take_step(self, batch)
train.Loop._take_step = step
"""
MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 2**29


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of processes that have little memory together."""
    group = MEMORY / f"meshwright-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and control groups of version 1")
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield group
    end_s = time.monotonic() + PATIENCE_S
    while (group / "cgroup.procs").read_text() and time.monotonic() < end_s:
        time.sleep(0.05)
    group.rmdir()


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_rank_that_the_system_kills_for_memory_is_planned_again(
    room: ForkingRoom, memory_group: Path
) -> None:
    room.begins_with = (
        HUNGRY.replace("GROUP", str(memory_group))
        .replace("FOLDER", str(room.folder))
        .replace("BYTES", str(2 * LIMIT_BYTES))
    )
    options = f"--elastic --steps {STEPS} --checkpoint-every {EVERY} -o {room.folder}/out"
    plan = room.plan(two_ranks(room))
    launcher = room.launched(plan, f"{options} --checkpoint {room.folder}/saved")
    room.wait_for_step(EVERY + 10, while_running=launcher)
    (room.folder / "eat").touch()
    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 0, said
    assert "rank 1 was killed by SIGKILL" in said
    with events_file(room.folder / "out").open("rb") as lines:
        events = list(events_of(lines))
    assert [one.cause for one in events if isinstance(one, Incident)] == ["out_of_memory"]
    assert [one.reaction for one in events if isinstance(one, Decision)] == ["replan"]
    assert len(losses(room)) == STEPS


FLIPPED = """
import os
from pathlib import Path
import torch
from torch import nn

class Middle(nn.Module):
    \"\"\"A weight changes on rank 1 alone, when it is asked for.\"\"\"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        asked = Path(os.environ["MESHWRIGHT_TEST_FLIPPED"])
        if os.environ.get("RANK") == "1" and asked.exists():
            asked.unlink()
            with torch.no_grad():
                self.linear.weight.view(-1)[3] += 1.0
        return self.linear(x)

def factory():
    return nn.Sequential(nn.Embedding(257, 16), Middle(), nn.Linear(16, 257))
"""


@pytest.mark.ranks
@pytest.mark.matrix
def test_replicas_that_drift_go_on_from_what_was_compared(
    room: ForkingRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MESHWRIGHT_TEST_FLIPPED", str(room.folder / "flipped"))
    (room.folder / "mine.py").write_text(FLIPPED)
    planned = room.folder / "plan.yaml"
    commands.plan(
        f"{room.folder}/mine.py:factory",
        "local:2",
        seq_len=16,
        global_batch=8,
        fix=["dp=2", "zero=0", "micro_batch=4"],
        output=str(planned),
    )
    options = f"--elastic --steps {STEPS} --checkpoint-every {EVERY} -o {room.folder}/out"
    launcher = room.launched(planned, f"--trust-code {options} --checkpoint {room.folder}/s")
    room.wait_for_step(EVERY + 10, while_running=launcher)
    (room.folder / "flipped").touch()
    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 0, said
    assert not (room.folder / "flipped").exists()
    assert "ranks 0 and 1 have different values of this parameter" in said
    with events_file(room.folder / "out").open("rb") as lines:
        events = list(events_of(lines))
    assert [one.cause for one in events if isinstance(one, Incident)] == ["corruption"]
    assert [one.reaction for one in events if isinstance(one, Decision)] == ["restart"]
    # What was copied into memory since the checkpoint is not gone on from.
    (_, again) = [one for one in events if isinstance(one, Attempt)]
    (first, *_) = [
        one.record.step for one in events[events.index(again) :] if isinstance(one, StepDone)
    ]
    assert first == again.after_step + 1 > EVERY
    assert len(losses(room)) == STEPS


NOT_A_NUMBER = """
import os
from pathlib import Path
import torch
from torch import nn

class Middle(nn.Module):
    \"\"\"A gradient is no number on rank 1 alone, when it is asked for.\"\"\"

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        output = self.linear(x)
        asked = Path(os.environ["MESHWRIGHT_TEST_NAN"])
        if os.environ.get("RANK") == "1" and output.requires_grad and asked.exists():
            asked.unlink()
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output

def factory():
    return nn.Sequential(nn.Embedding(257, 16), Middle(), nn.Linear(16, 257))
"""


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_gradient_that_is_no_number_once_costs_the_steps_since_the_newest_copy(
    room: ForkingRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MESHWRIGHT_TEST_NAN", str(room.folder / "asked"))
    room.note_copies()
    (room.folder / "mine.py").write_text(NOT_A_NUMBER)
    planned = room.folder / "plan.yaml"
    commands.plan(
        f"{room.folder}/mine.py:factory",
        "local:2",
        seq_len=16,
        global_batch=8,
        fix=["dp=2", "zero=0", "micro_batch=4"],
        output=str(planned),
    )
    options = f"--elastic --steps {STEPS} --checkpoint-every {STEPS} -o {room.folder}/out"
    launcher = room.launched(planned, f"--trust-code {options} --checkpoint {room.folder}/s")
    room.wait_for_step(EVERY + 10, while_running=launcher)
    (room.folder / "asked").touch()
    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 0, said
    assert not (room.folder / "asked").exists()
    assert "gradient norm nan, and" in said
    with events_file(room.folder / "out").open("rb") as lines:
        events = list(events_of(lines))
    assert [(one.cause, one.rank) for one in events if isinstance(one, Incident)] == [
        ("corruption", 1)
    ]
    _, again = [number for number, one in enumerate(events) if isinstance(one, Attempt)]
    steps = [one.record.step for one in events[again:] if isinstance(one, StepDone)]
    assert steps[0] - 1 == room.copied()[0][-1] > EVERY
    assert len(losses(room)) == STEPS


def two_nodes(room: ForkingRoom) -> Path:
    """Write a plan for one rank on each of two nodes, of devices that are predicted slow."""
    (group,) = machine_of("local:2", None).groups
    data = group.model_dump(mode="json", exclude_none=True)
    peaks = data["accelerator"]["peak_flops"]
    data["accelerator"]["peak_flops"] = {name: peak * 1e-3 for name, peak in peaks.items()}
    path = room.folder / "two.yaml"
    nodes = [{**data, "nodes": 2, "devices_per_node": 1}]
    tiers = machine_of("local:2", None).model_dump(mode="json", exclude_none=True)
    write(ClusterSpec.of({**tiers, "name": "two", "groups": nodes}), path)
    return room.plan(two_ranks(room).model_copy(update={"cluster": str(path)}))


class Nodes:
    """Launchers of one run, each a node."""

    def __init__(
        self, room: ForkingRoom, *, nodes: int = 2, options: str = "", step_s: float = 0.0
    ) -> None:
        self.room, self.nodes, self.options = room, nodes, options
        if step_s:
            room.let_steps_sleep(step_s)
        self.path, self.port = two_nodes(room), free_port()
        self.launchers = [self.start(node) for node in range(nodes)]

    def start(self, node: int) -> ForkedLauncher:
        room = self.room
        options = f"--elastic --steps {STEPS} --checkpoint-every {EVERY} -o {room.folder}/out"
        where = f"--nodes {self.nodes} --node {node} --rendezvous 127.0.0.1:{self.port}"
        options = f"{options} {self.options} {where} --checkpoint {self.saved}"
        return room.launched(self.path, options, f"launcher-{node}")

    @property
    def saved(self) -> str:
        return f"{self.room.folder}/saved"

    def wait_for_step(self, step: int, *, lead: int = 0) -> None:
        self.room.wait_for_step(step, while_running=self.launchers[lead])

    def end(self) -> list[str]:
        """Return what each has said, when all have ended."""
        return [launcher.communicate(timeout=PATIENCE_S)[1] for launcher in self.launchers]

    def events(self) -> list[Event]:
        with events_file(self.room.folder / "out").open("rb") as lines:
            return list(events_of(lines))


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1 does not answer"),
    ],
)
def test_two_nodes_meet_again_without_a_scheduler(
    room: ForkingRoom, fault: signal.Signals, said: str
) -> None:
    """Node 1 has the rank; node 0 is told, and neither launcher ends."""
    pytest.importorskip("torch")
    nodes = Nodes(room)
    nodes.wait_for_step(EVERY + 10)
    begin_s = time.time()
    os.kill(room.ranks()[1], fault)
    told = nodes.end()

    assert [launcher.returncode for launcher in nodes.launchers] == [0, 0], told
    assert said in told[1]
    events = nodes.events()
    (incident,) = [event for event in events if isinstance(event, Incident)]
    assert (incident.rank, incident.at_unix_s - begin_s < 20.0) == (1, True)
    assert incident.after_step > EVERY, "of a node that does not lead"
    assert [one.reaction for one in events if isinstance(one, Decision)] == ["restart"]
    assert len(losses(room)) == STEPS


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("lost", "spares"), [(0, 0), (1, 0), (0, 1)])
def test_a_node_that_is_lost_is_done_without_or_replaced(
    room: ForkingRoom, lost: int, spares: int, fault: signal.Signals
) -> None:
    """Its launcher ends, or stands still, and so do its ranks; the lead is a node as any other."""
    pytest.importorskip("torch")
    nodes = Nodes(room, nodes=2 + spares)
    nodes.wait_for_step(EVERY + 10)
    ranks, begin_s = room.ranks(), time.time()
    nodes.launchers[lost].send_signal(fault)
    if fault == signal.SIGSTOP:
        os.kill(ranks[lost], fault)
    others = [one for node, one in enumerate(nodes.launchers) if node != lost]
    told = [launcher.communicate(timeout=PATIENCE_S)[1] for launcher in others]
    nodes.launchers[lost].kill()
    room.wait_until_empty()

    assert [launcher.returncode for launcher in others] == [0] * len(others), told
    events = nodes.events()
    (incident,) = [event for event in events if isinstance(event, Incident)]
    (decision,) = [event for event in events if isinstance(event, Decision)]
    assert incident.cause == "node"
    assert incident.at_unix_s - begin_s < 10.0  # 5 on an idle machine: docs/results/survival.md
    assert (decision.reaction, decision.devices) == (("spare", 2) if spares else ("shrink", 1))
    assert len(losses(room)) == STEPS


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_run_that_lost_a_node_grows_when_it_is_back(room: ForkingRoom) -> None:
    """Losses are those of the larger plan from the same checkpoint; each sample is used once."""
    pytest.importorskip("torch")
    room.note_copies()
    nodes = Nodes(room, options="--scale-up-after 0 --keep-checkpoints 1000", step_s=0.2)
    nodes.wait_for_step(EVERY + 10)
    nodes.launchers[1].kill()
    nodes.launchers[1].wait()
    nodes.wait_for_step(EVERY + 30)
    nodes.launchers[1] = nodes.start(1)
    said = nodes.end()

    assert [launcher.returncode for launcher in nodes.launchers] == [0, 0], said
    events = nodes.events()
    shrunk, grown = [event for event in events if isinstance(event, Decision)]
    assert (shrunk.reaction, shrunk.devices) == ("shrink", 1)
    assert (grown.reaction, grown.devices, grown.plan_source) == ("grow", 2, "given")
    check_what_was_gone_on_from(room, events)
    with_changes = losses(room)
    assert len(with_changes) == STEPS
    *_, last = [event for event in events if isinstance(event, Attempt)]
    saved = room.folder / "saved" / f"step-{last.after_step:06}"
    newest = checkpoint.progress(room.folder / "saved" / f"step-{STEPS:06}")
    assert newest.used == SampleDigest.of_first(newest.sample)

    alone = Room(room.folder / "alone")
    (alone.folder / "saved").mkdir(parents=True)
    shutil.copytree(saved, alone.folder / "saved" / saved.name)
    options = {"checkpoint": alone.folder / "saved", "resume": True}
    alone.run(plan_of(data=2), data=room.text, steps=STEPS, **options)
    assert losses(alone) == with_changes[last.after_step :]


def test_surviving_needs_checkpoints(room: ForkingRoom) -> None:
    path = room.plan(two_ranks(room))

    with pytest.raises(DocumentError, match="elastic: continues from checkpoints"):
        launch(str(path), LaunchRun(), elastic=True)
