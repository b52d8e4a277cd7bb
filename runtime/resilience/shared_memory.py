"""Slots: memory of a launcher that its ranks write their state into, and that outlives them.

Each rank has two, so that one is whole while the other is written.  As many are there for each rank
of another node, the ward, whose launcher sends what its ranks have written
(`runtime.resilience.replication`).  A slot has a label, a JSON object, and bytes, with checksums of
both in a header that is written last:

    MAGIC (8)  bytes of the label (8)  of the rest (8)  CRC-32 of both (4 each)  label  bytes

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

SLOTS = "MESHWRIGHT_SLOTS"
"""Tells each rank, as JSON, where its node's slots are."""
GENERATIONS = 2
MAGIC = b"mw-slot1"
_HEADER = struct.Struct("=8sQQII")
_KEPT = struct.Struct("=QQQ")
"""Run, step, nanoseconds of processors."""
_ROOM_BYTES = 2**16
"""Slots grow by multiples of it: labels grow by a digit now and then, and each time that a slot
is mapped anew every page of it faults."""


class Slots:
    """Those of a node, in memory without a name: gone with this process, however it ends."""

    def __init__(self) -> None:
        self._own: list[int] = []
        self._wards: list[int] = []
        self._kept: int | None = None
        self._epoch = 0
        self._has_partner = False
        self.ranks = 0
        """That this node has now."""
        self._seen: tuple[dict[str, Any], NodeSlots] | None = None

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in (*self._own, *self._wards, *([self._kept] if self._kept else [])):
            os.close(descriptor)
        self._own, self._wards, self._kept, self._seen = [], [], None, None

    def begin(self, *, epoch: int, wards: int, has_partner: bool) -> None:
        """Take notice of an epoch in which a ward has this number of ranks."""
        self._epoch, self._has_partner = epoch, has_partner
        _grown(self._wards, wards)

    def environment(self, ranks: int) -> dict[str, str]:
        """Return what tells this node's ranks, by their number, where slots are."""
        self.ranks = ranks
        _grown(self._own, ranks)
        return {SLOTS: json.dumps(self._description())}

    def _description(self) -> dict[str, Any]:
        if self._has_partner and self._kept is None:
            self._kept = os.memfd_create("meshwright-kept")
            os.truncate(self._kept, _KEPT.size)
        return {
            "own": [_file(slot) for slot in self._own],
            "wards": [_file(slot) for slot in self._wards],
            "kept": _file(self._kept) if self._has_partner and self._kept else None,
            "epoch": self._epoch,
        }

    @property
    def node(self) -> NodeSlots:
        """All of them, as the launcher itself sees them."""
        state = self._description()
        if self._seen is None or self._seen[0] != state:
            self._seen = state, _slots_of(state)
        return self._seen[1]


def _grown(descriptors: list[int], ranks: int) -> None:
    while len(descriptors) < GENERATIONS * ranks:
        descriptors.append(os.memfd_create("meshwright-slot"))


def _file(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Kept:
    """What a node's launcher tells its ranks: which of their copies the partner has, too."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _KEPT.size)

    def write_step(self, run: str, step: int, *, processor_s: float) -> None:
        """Say that copies of a step are there, and what sending the last ones took."""
        self._memory[:] = bytes(_KEPT.size)
        self._memory[:] = _KEPT.pack(int(run, 16), step, round(processor_s * 1e9))

    def has_copy(self, run: str, step: int) -> bool:
        """Whether a copy is there."""
        # Read twice: a reader may see half of what is being written.
        return all(_KEPT.unpack(self._memory[:])[:2] == (int(run, 16), step) for _ in range(2))

    @property
    def processor_s(self) -> float:
        """Seconds of processors that copies of all ranks of the node took, the last time."""
        return float(_KEPT.unpack(self._memory[:])[2]) / 1e9


class StateSlot:
    """One slot, as a rank writes and reads it.

    Its memory is mapped once and kept: to map it for each copy takes longer than the copy.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._memory: mmap.mmap | None = None
        self._seen: tuple[bytes, dict[str, Any] | None] = b"", None

    def _map_memory(self, least: int = 0) -> mmap.mmap | None:
        """Return its memory, of this many bytes at least; None where it has none."""
        if (
            self._memory is None
            or self._memory.size() != len(self._memory)
            or (len(self._memory) < least)
        ):
            with self._file.open("r+b") as opened:
                size = os.fstat(opened.fileno()).st_size
                if size < least:
                    opened.truncate(-(-least // _ROOM_BYTES) * _ROOM_BYTES)
                # Views of a shorter one keep it as long as they are there.
                self._memory = mmap.mmap(opened.fileno(), 0) if max(size, least) else None
        return self._memory

    def write(self, label: Mapping[str, Any], pieces: Sequence[memoryview]) -> None:
        """Put in a label and bytes; until all of them are there the slot has nothing."""
        code = at = 0
        with self.fill(json.dumps(label), sum(piece.nbytes for piece in pieces)) as content:
            for piece in pieces:
                content[at : at + piece.nbytes] = piece
                code = zlib.crc32(piece, code)
                at += piece.nbytes
            content.commit(code)

    @contextlib.contextmanager
    def fill(self, label: str, size: int) -> Iterator[Filling]:
        """Let bytes be put in behind a label; what is not said to be done leaves nothing."""
        text = label.encode()
        begin = _HEADER.size + len(text)
        memory = self._map_memory(begin + size)
        assert memory is not None
        memory[: _HEADER.size] = bytes(_HEADER.size)
        memory[_HEADER.size : begin] = text
        filling = Filling(memory, begin, size)
        yield filling
        if filling.code is not None:
            codes = zlib.crc32(text), filling.code
            memory[: _HEADER.size] = _HEADER.pack(MAGIC, len(text), size, *codes)

    def label(self) -> dict[str, Any] | None:
        """Return the label of what is in it, whose bytes are not looked at; soon if it was seen."""
        memory = self._map_memory()
        head = b"" if memory is None else memory[: _HEADER.size]
        if head != self._seen[0]:
            contents = self.contents()
            self._seen = head, None if contents is None else json.loads(contents[0])
        return self._seen[1]

    def read(self) -> tuple[dict[str, Any], memoryview] | None:
        """Return what is in it; None where nothing is, or what is there is not what was written."""
        contents = self.contents()
        if contents is None or zlib.crc32(contents[1]) != contents[2]:
            return None
        return json.loads(contents[0]), contents[1]

    def contents(self) -> tuple[str, memoryview, int] | None:
        """Return label, bytes and the checksum that was written for them, which is not checked."""
        mapped = self._map_memory()
        if mapped is None or len(mapped) < _HEADER.size:
            return None
        memory = memoryview(mapped)
        magic, length, size, label_code, code = _HEADER.unpack_from(memory)
        begin = _HEADER.size + length
        if magic != MAGIC or begin + size > len(memory):
            return None
        text = bytes(memory[_HEADER.size : begin])
        if zlib.crc32(text) != label_code:
            return None
        return text.decode(), memory[begin : begin + size], code


class Filling:
    """The bytes of a slot while they are written."""

    def __init__(self, memory: mmap.mmap, begin: int, size: int) -> None:
        self._memory, self._begin = memory, begin
        self.size = size
        self.code: int | None = None

    def __setitem__(self, place: slice, piece: memoryview | bytes) -> None:
        self._memory[self._begin + place.start : self._begin + place.stop] = piece

    def commit(self, code: int) -> None:
        """Say that all bytes are there, and their CRC-32."""
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlots:
    """Where the slots of a node are, two of each rank."""

    own: tuple[tuple[StateSlot, ...], ...]
    """By local rank."""
    wards: tuple[tuple[StateSlot, ...], ...] = ()
    """By the local rank of another node."""
    kept: Kept | None = None
    """None where no partner is."""
    epoch: int = 0


def slots_of_node(environment: Mapping[str, str]) -> NodeSlots | None:
    """Return the slots that a launcher names; None without a launcher that has some."""
    if SLOTS not in environment:
        return None
    return _slots_of(json.loads(environment[SLOTS]))


def _slots_of(state: Mapping[str, Any]) -> NodeSlots:
    return NodeSlots(
        own=_by_rank(state["own"]),
        wards=_by_rank(state["wards"]),
        kept=None if state["kept"] is None else Kept(Path(state["kept"])),
        epoch=state["epoch"],
    )


def _by_rank(names: Sequence[str]) -> tuple[tuple[StateSlot, ...], ...]:
    files = [StateSlot(Path(name)) for name in names]
    starts = range(0, len(files), GENERATIONS)
    return tuple(tuple(files[at : at + GENERATIONS]) for at in starts)
