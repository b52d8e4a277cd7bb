"""Memory that ranks write and others read: all of it, or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.runtime.resilience import shared_memory
from meshwright.runtime.resilience.shared_memory import (
    NodeSlots,
    Slots,
    StateSlot,
    left_copies,
    slots_of_node,
)
from tests.runtime.rooms import ROOT

LABEL = {"step": 7, "parts": [["a", "float32"]]}
PIECES = [memoryview(b"some"), memoryview(b"bytes")]


def seen(environment: dict[str, str]) -> NodeSlots:
    found = slots_of_node(environment)
    assert found is not None
    return found


@pytest.fixture
def slots() -> Iterator[tuple[tuple[StateSlot, ...], ...]]:
    with Slots() as made:
        yield seen(made.environment(2)).own


def test_each_rank_has_two_and_keeps_them() -> None:
    with Slots() as made:
        first = made.environment(1)
        made.begin(epoch=3, wards=2, has_partner=True)
        more = seen(made.environment(3))

        assert [len(pair) for pair in (*more.own, *more.wards)] == [2] * 5
        assert (more.epoch, made.ranks) == (3, 3)
        seen(first).own[0][1].write(LABEL, PIECES)
        read = more.own[0][1].read()
        assert read is not None
        assert read[0] == LABEL == made.node.own[0][1].label()
        assert bytes(read[1]) == b"somebytes"
        assert more.own[0][0].read() is more.own[0][0].label() is None
    assert not more.own[0][0]._file.exists()
    assert slots_of_node({}) is None


def test_ranks_are_told_which_copies_the_partner_has() -> None:
    with Slots() as made:
        made.begin(epoch=1, wards=1, has_partner=False)
        assert seen(made.environment(1)).kept is None
        made.begin(epoch=2, wards=1, has_partner=True)
        rank, launcher = seen(made.environment(1)).kept, made.node.kept
        assert rank is not None
        assert launcher is not None

        assert not rank.has_copy("ab12", 7)
        launcher.write_step("ab12", 7, processor_s=0.25, stored_s=1.5)

        assert rank.has_copy("ab12", 7)
        assert not rank.has_copy("ab12", 6)
        assert not rank.has_copy("ab13", 7)
        assert (rank.processor_s, rank.stored_s) == (0.25, 1.5)


def test_what_a_rank_wrote_outlives_it(slots: tuple[tuple[StateSlot, ...], ...]) -> None:
    file = str(slots[1][0]._file)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from meshwright.runtime.resilience.shared_memory import StateSlot\n"
        "StateSlot(Path(sys.argv[1])).write({'step': 9}, [memoryview(b'x' * 100_000)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, file], env=environment, check=False)

    read = slots[1][0].read()

    assert read is not None
    assert (read[0], len(read[1])) == ({"step": 9}, 100_000)


@pytest.mark.parametrize("place", ["header", "label", "bytes", "end"])
def test_a_slot_that_is_not_whole_has_nothing(
    slots: tuple[tuple[StateSlot, ...], ...], place: str
) -> None:
    slot = slots[0][0]
    slot.write(LABEL, PIECES)
    header = 32
    size = header + len(json.dumps(LABEL)) + 9
    with slot._file.open("r+b") as opened:
        if place == "end":
            opened.truncate(size - 1)
        else:
            at = {"header": 3, "label": header + 2, "bytes": size - 2}[place]
            opened.seek(at)
            old = opened.read(1)
            opened.seek(at)
            opened.write(bytes([old[0] ^ 1]))

    assert slot.read() is None


def test_what_grows_is_seen_by_who_mapped_less(
    slots: tuple[tuple[StateSlot, ...], ...],
) -> None:
    slot = slots[0][0]
    other = StateSlot(slot._file)
    assert other.label() is None
    slot.write(LABEL, PIECES)
    before = other.contents()
    assert before is not None
    slot.write({"step": 8}, [memoryview(b"x" * 100_000)])

    read = other.read()

    assert read is not None
    assert (read[0], bytes(read[1])) == ({"step": 8}, b"x" * 100_000)
    assert other.label() == {"step": 8}
    assert len(before[1]) == len(b"somebytes"), "a view that somebody has is gone"


def test_less_may_follow_more(slots: tuple[tuple[StateSlot, ...], ...]) -> None:
    slot = slots[0][0]
    slot.write(LABEL, [memoryview(b"x" * 10_000)])
    slot.write({"step": 8}, [])

    read = slot.read()

    assert read is not None
    assert (read[0], bytes(read[1])) == ({"step": 8}, b"")


def test_a_label_that_grows_by_some_digits_does_not_map_a_slot_anew(
    slots: tuple[tuple[StateSlot, ...], ...],
) -> None:
    slot = slots[0][0]
    slot.write({"used": 0}, PIECES)
    mapped = slot._memory

    for digits in range(1, 100):
        slot.write({"used": 10**digits}, PIECES)

    assert slot._memory is mapped


@pytest.mark.parametrize("newer", [True, False])
def test_what_is_left_of_another_run_goes_once_that_run_has_come_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, newer: bool
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    with Slots(theirs) as made:
        seen(made.environment(1)).own[0][0].write(LABEL, PIECES)
        made.stays = True  # as one that is killed
    asked: list[tuple[int, Path]] = []

    def is_newer(node: NodeSlots, folder: Path) -> bool:
        label = node.own[0][0].label()
        assert label is not None
        asked.append((label["step"], folder))
        return newer

    with left_copies(ours, is_newer) as found:
        assert found == []

    assert asked == [(7, theirs)]
    assert bool(list(tmp_path.glob("meshwright-*"))) == newer


REMOVED: dict[str, Callable[[Path], None]] = {
    "the folder": shutil.rmtree,
    "a slot": lambda folder: (folder / "own-001").unlink(),
    "the lock": lambda folder: (folder / ".lock").unlink(),
    "whose they are": lambda folder: (folder / "about.json").unlink(),
}


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Slots, Path]]:
    """Slots with names, and the folder of checkpoints that they are of."""
    monkeypatch.setattr(shared_memory, "SHARED", tmp_path)
    saves = tmp_path / "saves"
    saves.mkdir()
    with Slots(saves) as made:
        yield made, saves


def left_steps(slots: Slots, saves: Path) -> list[int]:
    """Return the steps that the next launcher finds where this one is killed now."""
    assert slots._lock is not None
    os.dup2(os.open(os.devnull, os.O_RDONLY), slots._lock)  # the lock of a killed one is open
    with left_copies(saves, lambda node, folder: True) as leftovers:
        read = [slot.read() for left in leftovers for pair in left.node.own for slot in pair]
    return [found[0]["step"] for found in read if found is not None]


@pytest.mark.parametrize("what", REMOVED)
def test_copies_that_were_removed_have_names_again(named: tuple[Slots, Path], what: str) -> None:
    slots, saves = named
    first, second = seen(slots.environment(1)).own[0]
    first.write({"step": 6}, PIECES)
    second.write({"step": 7}, PIECES)
    assert slots.renew_names() is None

    REMOVED[what](next(saves.parent.glob("meshwright-*")))
    text = slots.renew_names()

    assert text is not None
    assert "were removed; they are there again" in text
    assert slots.renew_names() is None
    first.write({"step": 8}, PIECES)  # by a rank that had mapped what is gone
    assert [slot.label() for slot in slots.node.own[0]] == [{"step": 8}, {"step": 7}]
    assert left_steps(slots, saves) == [8, 7]


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_a_copy_that_is_written_while_its_file_is_replaced_is_not_lost(
    named: tuple[Slots, Path], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    slots, saves = named
    slot = seen(slots.environment(1)).own[0][0]
    slot.write({"step": 6}, PIECES)
    shutil.rmtree(next(saves.parent.glob("meshwright-*")))
    replace, writing = os.dup2, slot.fill(json.dumps({"step": 7}), 9)
    filling = writing.__enter__()
    filling[0:9] = b"somebytes"
    filling.commit(zlib.crc32(b"somebytes"))

    def dup2(*words: int, **rest: bool) -> int:
        if moment == "before":
            writing.__exit__(None, None, None)
        return replace(*words, **rest)

    monkeypatch.setattr(os, "dup2", dup2)
    slots.renew_names()
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "SHARED", saves.parent)
    if moment == "behind":
        writing.__exit__(None, None, None)
        assert slot.is_replaced, "its writer does not know that it has to write again"
        slot.write({"step": 7}, PIECES)

    assert not StateSlot(slot._file).is_replaced
    assert left_steps(slots, saves) == [7]


def test_copies_that_find_no_room_stay_where_they_are(
    named: tuple[Slots, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, saves = named
    slot = seen(slots.environment(1)).own[0][0]
    slot.write({"step": 6}, PIECES)
    shutil.rmtree(next(saves.parent.glob("meshwright-*")))

    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(shared_memory, "_take_room", refuse)
        text = slots.renew_names()
        assert text is not None
        assert "cannot be written there again (No space left on device)" in text
        assert slots.renew_names() is None, "it is said again and again"
        assert slot.label() == slots.node.own[0][0].label() == {"step": 6}
    assert "are there again" in (slots.renew_names() or "")
    assert left_steps(slots, saves) == [6]
