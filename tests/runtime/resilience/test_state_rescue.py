"""Copies become a checkpoint, also where another has written parts of it on a full disk."""

from __future__ import annotations

import copy
import errno
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.planner.errors import DocumentError
from meshwright.runtime.checkpoint import checkpoint
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.launch.failure_report import RunEnded, name_copies, saved_text
from meshwright.runtime.resilience import shared_memory, state_rescue
from meshwright.runtime.resilience.shared_memory import CopyContext, NodeSlots, Slots, slots_of_node
from meshwright.runtime.resilience.state_rescue import save_newest
from tests.runtime.rooms import MODEL, plan_of

PLAN = plan_of(data=2)


def fill(node: NodeSlots, rank: int, step: int = 7, *, generation: int = 0) -> None:
    """Have a rank's half of a tensor in its slot."""
    values = np.full(4, float(rank), dtype="float32")
    label = {
        "step": step,
        "sample": step * 8,
        "used": SampleDigest.of_first(step * 8).model_dump(),
        "identity": {
            "model": MODEL.name,
            "model_digest": MODEL.digest,
            "corpus": "none",
            "corpus_digest": "none",
            "seq_len": 16,
            "seed": 0,
        },
        "run": "ab12",
        "epoch": 0,
        "plan": PLAN.digest,
        "loss": 1.0,
        "epoch_of_data": 0,
        "config": None,
        "files": {f"own-{rank}.bin": "YWJj"},
        "rank": rank,
        "world": 2,
        "behind": None,
        "parts": [["model.a", "float32", [8], [4 * rank], [4], 0, 16]],
    }
    node.own[rank][generation].write(label, [memoryview(values).cast("B")])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: cut(next(saved.glob(".step-*/plan.yaml"))),
        lambda saved: cut(next(saved.glob(".step-*/own-0.bin"))),
        lambda saved: next(saved.glob(".step-*/rank-00000.bin")).unlink(),
        lambda saved: cut(next(saved.glob(".step-*.parts/meta.json"))),
        lambda saved: cut(next(saved.glob(".step-*.parts/part-00000.json"))),
    ],
)
def test_parts_that_another_left_damaged_are_written_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    saved = tmp_path / "saved"
    contexts = {PLAN.digest: CopyContext(plan=PLAN, model=MODEL)}
    with Slots() as slots:
        node = slots_of_node(slots.environment(2))
        assert node is not None
        fill(node, 0)
        assert save_newest(node, contexts, saved, say=print) == (None, None)
        damage(saved)
        fill(node, 1)

        done, problem = save_newest(node, contexts, saved, say=print)

    assert problem is None
    assert done == saved / "step-000007"
    assert checkpoint.verify(done) is None


def test_an_error_of_a_document_goes_to_other_processes_as_it_is() -> None:
    error = DocumentError("a.b", "is wrong", file="plan.yaml")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert str(other) == "plan.yaml: a.b: is wrong"
        assert (other.path, other.message, other.file) == ("a.b", "is wrong", "plan.yaml")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder of checkpoints; copies in memory lie beside it."""
    folder = tmp_path / "saved"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path)
    return folder


def test_the_newest_copies_wait_for_room_on_a_full_disk_and_older_ones_are_deleted(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = CopyContext(plan=PLAN, model=MODEL)

    def leave(step: int) -> None:
        """Leave copies behind as a launcher that was killed."""
        with Slots(saved) as slots:
            slots.stays = True
            node = slots_of_node(slots.environment(2, context))
            assert node is not None
            for rank in range(2):
                fill(node, rank, step - 1, generation=1)
                fill(node, rank, step)

    leave(7)
    full = [OSError(errno.ENOSPC, "No space left on device")]
    write = state_rescue._write_file

    def write_with_room(*arguments: Any) -> str:
        if full:
            raise full.pop()
        return write(*arguments)

    monkeypatch.setattr(state_rescue, "_write_file", write_with_room)
    monkeypatch.setattr(state_rescue.time, "sleep", lambda seconds: None)

    assert state_rescue.adopt(saved, say=print) == saved / "step-000007"

    leave(7)
    state_rescue.delete_older_copies(saved)
    assert not list(tmp_path.glob("meshwright-*"))
    leave(8)
    state_rescue.delete_older_copies(saved)
    assert list(tmp_path.glob("meshwright-*"))


def test_an_older_state_that_is_saved_leaves_the_newest_in_memory(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = state_rescue._write_all

    def write_older(key: state_rescue.Key, *rest: Any) -> Path | None:
        if key[0] == 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_all(key, *rest)

    with Slots(saved) as slots:
        node = slots_of_node(slots.environment(2, CopyContext(plan=PLAN, model=MODEL)))
        assert node is not None
        for rank in range(2):
            fill(node, rank, 6, generation=1)
            fill(node, rank, 7)
        assert state_rescue.newest_copy_step(slots) == 7
        error = RunEnded("rank 1 left", saved=saved_text(saved))
        name_copies(error, slots)
        assert str(error) == (
            "rank 1 left; the state of step 7 is in memory, and is written to a checkpoint when "
            "the run ends"
        )
        with Slots() as empty:
            other = RunEnded("rank 1 left", saved=saved_text(saved))
            name_copies(other, empty)
            assert str(other) == "rank 1 left; nothing was saved"
        monkeypatch.setattr(state_rescue, "_write_all", write_older)
        assert state_rescue.rescue(slots, saved, say=print) == saved / "step-000006"
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path)

    assert state_rescue.adopt(saved, say=print) == saved / "step-000007"


def test_copies_that_cannot_be_read_are_named_and_stay(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a file of another user; here a folder has its name, which no user can read."""
    with Slots(saved) as slots:
        slots.environment(1, CopyContext(plan=PLAN, model=MODEL))
        slots.stays = True  # as one that is killed
    (left,) = tmp_path.glob("meshwright-*")
    (left / "own-000").unlink()
    (left / "own-000").mkdir()

    assert state_rescue.adopt(saved, say=print) is None

    assert f"cannot be read ({left}/own-000: Is a directory)" in capsys.readouterr().out
    assert (left / "own-000").exists()
