"""Memory that ranks write and others read: all of it, or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.slots import Slots, StateSlot, slots_of_node
from tests.runtime.rooms import ROOT

LABEL = {"step": 7, "parts": [["a", "float32"]]}
PIECES = [memoryview(b"some"), memoryview(b"bytes")]


@pytest.fixture
def slots() -> Iterator[list[list[StateSlot]]]:
    with Slots() as made:
        yield slots_of_node(made.environment(2))


def test_each_rank_has_two_and_keeps_them() -> None:
    with Slots() as made:
        first = made.environment(1)
        more = made.environment(3)

        assert [len(own) for own in slots_of_node(more)] == [2, 2, 2]
        slots_of_node(first)[0][1].write(LABEL, PIECES)
        read = slots_of_node(more)[0][1].read()
        assert read is not None
        assert read[0] == LABEL
        assert bytes(read[1]) == b"somebytes"
        assert slots_of_node(more)[0][0].read() is None
    assert not Path(next(iter(more.values())).split(":")[0]).exists()
    assert slots_of_node({}) == []


def test_what_a_rank_wrote_outlives_it(slots: list[list[StateSlot]]) -> None:
    file = str(slots[1][0]._file)
    program = (
        "import os, sys; from pathlib import Path; from runtime.slots import StateSlot\n"
        "StateSlot(Path(sys.argv[1])).write({'step': 9}, [memoryview(b'x' * 100_000)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, file], env=environment, check=False)

    read = slots[1][0].read()

    assert read is not None
    assert (read[0], len(read[1])) == ({"step": 9}, 100_000)


@pytest.mark.parametrize("place", ["header", "label", "bytes", "end"])
def test_a_slot_that_is_not_whole_has_nothing(slots: list[list[StateSlot]], place: str) -> None:
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


def test_less_may_follow_more(slots: list[list[StateSlot]]) -> None:
    slot = slots[0][0]
    slot.write(LABEL, [memoryview(b"x" * 10_000)])
    slot.write({"step": 8}, [])

    read = slot.read()

    assert read is not None
    assert (read[0], bytes(read[1])) == ({"step": 8}, b"")
