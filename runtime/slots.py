"""Slots: memory of a launcher that its ranks write their state into, and that outlives them.

Each rank has two, so that one is whole while the other is written.  A slot has a label, a JSON
object, and bytes, with checksums of both in a header that is written last:

    MAGIC (8)  bytes of the label (8)  of the rest (8)  CRC-32 of both (4 each)  label  bytes

Nothing here imports torch.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

SLOTS = "MESHWRIGHT_SLOTS"
"""Names, to each rank, the files of its node's slots: two of each local rank."""
GENERATIONS = 2
MAGIC = b"mw-slot1"
_HEADER = struct.Struct("=8sQQII")


class Slots:
    """Those of a node, in memory without a name: gone with this process, however it ends."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def __enter__(self) -> Slots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def environment(self, ranks: int) -> dict[str, str]:
        """Return what tells this node's ranks, by their number, where their slots are."""
        while len(self._descriptors) < GENERATIONS * ranks:
            self._descriptors.append(os.memfd_create("meshwright-slot"))
        own = f"/proc/{os.getpid()}/fd"
        return {SLOTS: os.pathsep.join(f"{own}/{one}" for one in self._descriptors)}


class StateSlot:
    """One slot, as a rank writes and reads it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, label: Mapping[str, Any], pieces: Sequence[memoryview]) -> None:
        """Put in a label and bytes; until all of them are there the slot has nothing."""
        text = json.dumps(label).encode()
        size = sum(piece.nbytes for piece in pieces)
        with self._file.open("r+b") as opened:
            opened.truncate(max(_HEADER.size + len(text) + size, os.fstat(opened.fileno()).st_size))
            with mmap.mmap(opened.fileno(), 0) as memory:
                memory[: _HEADER.size] = bytes(_HEADER.size)
                at, code = _HEADER.size + len(text), 0
                memory[_HEADER.size : at] = text
                for piece in pieces:
                    memory[at : at + piece.nbytes] = piece
                    code = zlib.crc32(piece, code)
                    at += piece.nbytes
                header = _HEADER.pack(MAGIC, len(text), size, zlib.crc32(text), code)
                memory[: _HEADER.size] = header

    def read(self) -> tuple[dict[str, Any], memoryview] | None:
        """Return what is in it; None where nothing is, or what is there is not what was written."""
        with self._file.open("r+b") as opened:
            if os.fstat(opened.fileno()).st_size < _HEADER.size:
                return None
            memory = memoryview(mmap.mmap(opened.fileno(), 0))
        magic, label, size, label_code, code = _HEADER.unpack_from(memory)
        begin = _HEADER.size + label
        if magic != MAGIC or begin + size > len(memory):
            return None
        text, content = memory[_HEADER.size : begin], memory[begin : begin + size]
        if zlib.crc32(text) != label_code or zlib.crc32(content) != code:
            return None
        found = json.loads(bytes(text))
        return (found, content) if isinstance(found, dict) else None


def slots_of_node(environment: Mapping[str, str]) -> list[list[StateSlot]]:
    """Return the slots of each local rank, as the launcher names them; none without a launcher."""
    files = [Path(name) for name in environment.get(SLOTS, "").split(os.pathsep) if name]
    return [
        [StateSlot(file) for file in files[at : at + GENERATIONS]]
        for at in range(0, len(files), GENERATIONS)
    ]
