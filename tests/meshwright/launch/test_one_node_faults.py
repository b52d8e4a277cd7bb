"""Faults of a run on one node with two ranks, as the command line meets them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.checkpoint.checkpoint import TrainingIdentity
from meshwright.runtime.data.corpus import files, prepare
from meshwright.runtime.launch import rank_config
from meshwright.runtime.run.recovery_policy import ATTEMPTS
from tests.limits import PATIENCE_S
from tests.meshwright.launch.test_multi_node import (
    ForkingRoom,
    Nodes,
    forks,
    losses,
    room,
    two_ranks,
)

__all__ = ["forks", "room"]

STEPS = 40


def options(room: ForkingRoom) -> str:
    """Return options by which a run is saved after its last step alone."""
    folder = room.folder
    every = f"--checkpoint {folder}/saved --checkpoint-every {STEPS}"
    return f"--elastic --steps {STEPS} -o {folder}/out {every}"


@pytest.mark.parametrize("text", ["the quick brown fox\n", "pack my box\n"])
def test_other_data_are_refused_by_the_orders_before_and_by_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """As the test below, without its processes."""
    is_same = text.startswith("the")
    file, cache = tmp_path / "text.txt", tmp_path / "cache"
    file.write_text("the quick brown fox\n")
    before = prepare(files(file), cache=cache)
    file.write_text(text)
    now = prepare(files(file), cache=cache)
    (tmp_path / "orders.yaml").touch()
    orders: Any = SimpleNamespace(corpus=before.folder)
    monkeypatch.setattr(rank_config, "read", lambda *_: orders)
    ready: Any = SimpleNamespace(output=tmp_path)
    same: dict[str, Any] = {"model": "m", "model_digest": "d", "seq_len": 8, "seed": 0}
    copied, wanted = (
        TrainingIdentity(**same, corpus=corpus.source, corpus_digest=corpus.digest)
        for corpus in (before, now)
    )

    with contextlib.nullcontext() if is_same else pytest.raises(LaunchError, match="changed"):
        rank_config._refuse_other_data(ready, now)
    with contextlib.nullcontext() if is_same else pytest.raises(DocumentError, match="corpus"):
        copied.check(wanted, source="the copy in memory of step 7")


@pytest.mark.ranks
@pytest.mark.matrix
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
    assert f"{room.text} has changed since the run began: it had 8.8K tokens" in said
    assert len(losses(room)) < STEPS
    # Nothing was saved by then: the newest copy is on the disk before the last process leaves.
    step = saved_step(room)
    assert 1 <= step < STEPS
    assert f"step-{step:06} is complete; its state was in memory" in said


WITHOUT_FALLBACK_PLANS = """
from meshwright.launch.fallback_plans import FallbackSolver
FallbackSolver.begin = lambda self: None
"""
KILLED_AT_ITS_END = """
import os
import signal
from pathlib import Path
from meshwright.runtime.launch import training_loop as train

run = train.Loop.run
def run_and_be_killed(self):
    record = run(self)
    mark = Path("FOLDER/killed")
    if self.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return record
train.Loop.run = run_and_be_killed
"""


LEAVES = """
import hashlib
import os
from pathlib import Path
from meshwright.runtime.launch import training_loop as train

take_step = train.Loop._take_step
def step(self, batch):
    mark = Path("FOLDER/left")
    if self.rank == 0 and self.steps_done == 3 and not mark.exists():
        mark.touch()
        os._exit(CODE)
    return take_step(self, batch)
train.Loop._take_step = step
"""


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(("code", "name"), [(1, "out"), (0, "out/events.jsonl")])
def test_a_rank_leaves_without_a_word_records_are_removed_and_a_rank_is_killed(
    room: ForkingRoom, code: int, name: str
) -> None:
    """Rank 1 says that its peer has closed the connection, which is an echo of rank 0.

    What a restart needs is written again where records were removed.
    """
    pytest.importorskip("torch")
    room.let_steps_sleep(0.1)
    room.begins_with += LEAVES.replace("FOLDER", str(room.folder)).replace("CODE", str(code))
    launcher = room.launched(room.plan(two_ranks(room)), options(room))
    room.wait_for_step(6, while_running=launcher)
    path = room.folder / name
    if path.is_dir():
        # The run writes while its folder goes: it is taken away at once, then emptied.
        shutil.rmtree(path.rename(path.with_name("removed")), ignore_errors=True)
    else:
        path.unlink()
    room.wait_for_step(3, while_running=launcher)
    os.kill(room.ranks()[1], signal.SIGKILL)

    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 0, said
    left, _, killed = said.partition("rank 1 was killed by SIGKILL")
    assert f"rank 0 exited with code {code}" in left
    assert "rank 1" not in left
    assert killed
    assert saved_step(room) == STEPS
    assert losses(room)


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_restart_takes_the_newest_whole_checkpoint(room: ForkingRoom) -> None:
    """An empty folder has the name of a later step when a rank is killed."""
    pytest.importorskip("torch")
    room.let_steps_sleep(0.05)
    launcher = room.launched(room.plan(two_ranks(room)), f"{options(room)} --checkpoint-every 4")
    room.wait_for_step(9, while_running=launcher)
    (room.folder / "saved" / "step-000030").mkdir()
    os.kill(room.ranks()[1], signal.SIGKILL)

    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 0, said
    assert said.count("it is kept as damaged-step-000030") == 1
    assert len(losses(room)) == STEPS


RAISES = """
import hashlib
import os
from pathlib import Path
from meshwright.runtime.launch import training_loop as train

take_step = train.Loop._take_step
def step(self, batch):
    mark = Path("FOLDER/raised")
    if self.rank == 1 and self.steps_done == AT and not (MOST and mark.exists()):
        mark.touch()
        ERROR
    return take_step(self, batch)
train.Loop._take_step = step
"""


def saved_step(room: ForkingRoom) -> int:
    """Return the step of the newest checkpoint, which is whole to the byte."""
    saved = checkpoint.newest(room.folder / "saved")
    if saved is None:
        return 0
    assert checkpoint.verify(saved) is None
    return checkpoint.progress(saved).step


def raising(room: ForkingRoom, error: str, *, once: bool) -> str:
    """Return what lets rank 1 raise an error behind step 12."""
    words = {"AT": "12", "ERROR": f"raise {error}", "MOST": str(once), "FOLDER": str(room.folder)}
    text = RAISES
    for name, word in words.items():
        text = text.replace(name, word)
    return text


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("resumed", [False, True])
def test_what_is_not_understood_leaves_the_newest_copy_on_disk(
    room: ForkingRoom, *, resumed: bool
) -> None:
    """Nothing was saved by then; what is trained from it is what is trained without an end."""
    pytest.importorskip("torch")
    room.let_steps_sleep(0.05)
    before = room.begins_with
    room.begins_with += raising(room, "RuntimeError('of no known kind')", once=False)
    plan = room.plan(two_ranks(room))
    launcher = room.launched(plan, options(room))
    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 1
    step = saved_step(room)
    assert 3 <= step <= 12
    assert f"step-{step:06} is complete and can be resumed" in said
    assert "nothing was saved" not in said
    if not resumed:
        return
    room.begins_with = before
    launcher = room.launched(plan, f"{options(room)} --resume")
    _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, said
    assert len(losses(room)) == STEPS
    interrupted = losses(room)
    room.run(two_ranks(room), steps=STEPS)
    assert losses(room) == interrupted


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize(
    "error",
    [
        "OSError(5, 'Input/output error', '/data')",
        "OSError(116, 'Stale file handle')",
        "RuntimeError('CUDA error: an illegal memory access was encountered')",
        "RuntimeError('CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling')",
        "RuntimeError('NCCL error: unhandled system error, ncclSystemError')",
    ],
)
@pytest.mark.parametrize("once", [True, False])
def test_errors_that_may_pass_are_tried_again_and_end_with_a_checkpoint(
    room: ForkingRoom, error: str, *, once: bool
) -> None:
    pytest.importorskip("torch")
    room.let_steps_sleep(0.05)
    room.begins_with += raising(room, error, once=once)
    launcher = room.launched(room.plan(two_ranks(room)), options(room))
    _, said = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == (0 if once else 1), said
    assert said.count("restart, because such errors may pass") == (1 if once else ATTEMPTS - 1)
    assert saved_step(room) == STEPS if once else 3 <= saved_step(room) <= 12
    if once:
        interrupted = losses(room)
        room.run(two_ranks(room), steps=STEPS)
        assert losses(room) == interrupted


@pytest.mark.ranks
def test_copies_outlive_a_killed_launcher_and_a_finished_run_ends_well_however_often_it_is_started(
    room: ForkingRoom,
) -> None:
    """The next launch makes a checkpoint of them before it looks for one.

    Before, rank 0 left without a word, and rank 1 said that its peer had closed the connection.
    Of the next launch a rank is killed behind the last save; then the command is started again.
    """
    pytest.importorskip("torch")
    room.let_steps_sleep(0.05)
    room.begins_with += WITHOUT_FALLBACK_PLANS
    room.begins_with += LEAVES.replace("FOLDER", str(room.folder)).replace("CODE", "1")
    room.begins_with += KILLED_AT_ITS_END.replace("FOLDER", str(room.folder))
    nothing_left = f"has done {STEPS} steps and {STEPS} are asked for: nothing left to do"
    plan = room.plan(two_ranks(room))
    launcher = room.launched(plan, options(room))
    room.wait_for_step(12, while_running=launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    _, said = launcher.communicate(timeout=PATIENCE_S)
    room.wait_until_empty()
    assert "rank 0 exited with code 1" in said
    assert "rank 1" not in said
    assert saved_step(room) == 0
    done = len(losses(room))

    for is_again in (False, True):
        launcher = room.launched(plan, f"{options(room)} --resume --or-start")
        _, said = launcher.communicate(timeout=PATIENCE_S)

        assert launcher.returncode == 0, said
        assert said.count(nothing_left) == 1
        assert ("rank 1 was killed by SIGKILL" in said) != is_again
        assert ("a launcher that was killed left copies in /dev/shm/" in said) != is_again
        if not is_again:
            went_on = int(said.split("going on from ")[1].split("step-")[1][:6])
            assert done - 10 <= went_on <= done + 1
        assert len(losses(room)) == STEPS
        assert not list(Path("/dev/shm").glob(f"meshwright-{os.getuid()}-{key(room)}-*"))
    (room.folder / "text.txt").write_text("another text " * 1000)
    launcher = room.launched(plan, f"{options(room)} --resume --or-start")
    _, said = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 1
    assert "corpus_digest" in said


def key(room: ForkingRoom) -> str:
    """Return what folders of copies of a room's run have in their names."""
    return hashlib.sha256(os.fsencode((room.folder / "saved").resolve())).hexdigest()[:16]


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_two_nodes_make_one_checkpoint_of_their_copies(room: ForkingRoom, how: str) -> None:
    """Each launcher writes its parts as it ends, or as the next one on its node begins."""
    pytest.importorskip("torch")
    if how == "raises":
        room.begins_with += raising(room, "RuntimeError('of no known kind')", once=False)
    nodes = Nodes(room, options=f"--checkpoint-every {STEPS * 100}", step_s=0.05)
    if how == "killed":
        nodes.wait_for_step(12)
        for launcher in nodes.launchers:
            os.kill(launcher.pid, signal.SIGKILL)
    said = nodes.end()
    room.wait_until_empty()

    if how == "raises":
        assert [launcher.returncode for launcher in nodes.launchers] == [1, 1], said
        assert 3 <= saved_step(room) <= 12, said
        assert "nothing was saved" not in "".join(said)
        return
    assert saved_step(room) == 0
    again = Nodes(room, options="--resume --or-start --checkpoint-every 4000 --steps 30")
    said = again.end()
    assert [launcher.returncode for launcher in again.launchers] == [0, 0], said
    assert "a launcher that was killed left copies in /dev/shm/" in "".join(said)
    assert saved_step(room) == 30
    assert int("".join(said).split("going on from ")[1].split("step-")[1][:6]) >= 3


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("code", [0, 3])
def test_the_only_rank_of_a_node_leaves_without_a_word(room: ForkingRoom, code: int) -> None:
    """Its node has no other rank that would complain."""
    pytest.importorskip("torch")
    room.begins_with += LEAVES.replace("FOLDER", str(room.folder)).replace("CODE", str(code))
    nodes = Nodes(room, options="--checkpoint-every 4000 --steps 30", step_s=0.05)

    said = nodes.end()

    room.wait_until_empty()
    assert [launcher.returncode for launcher in nodes.launchers] == [0, 0], said
    assert f"rank 0 exited with code {code}" in "".join(said)
    assert saved_step(room) == 30
