"""Parts: what each rank has written of a checkpoint that does not count yet.

    DIR/.step-000030.RUN/            the files of the checkpoint
    DIR/.step-000030.RUN.parts/      beside it, until it counts:
    ├── .lock locked by rank 0 while it lives
    ├── meta.json                    progress, from rank 0
    └── part-00000.json ...          from each rank, when its files are on the disk

A part names the rank's files with sizes and checksums, and where tensors lie in its own.  Those of
all ranks make the index, so a checkpoint whose files are whole counts although ranks died before
they could say so to each other (meshwright.runtime.checkpoint.commit_recovery).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, ValidationError

from meshwright.planner.documents.document import Document, first_error, json_data, write_text
from meshwright.planner.documents.units import Count, Positive, Text
from meshwright.planner.errors import DocumentError
from meshwright.runtime.checkpoint.tensor_index import Chunk, StoredTensor, TensorIndex, list_bytes
from meshwright.runtime.core import checksums
from meshwright.runtime.core.dtypes import ITEM_BYTES

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$", strict=True)]
Checksum = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", strict=True)]
Sizes = tuple[Count, ...]
WrittenChunk = tuple[str, str, Sizes, Count, Sizes, Sizes]
SUFFIX = ".parts"


class WrittenPart(Document):
    """The files that one of several ranks has on the disk."""

    kind_of_document: ClassVar[str] = "part of a checkpoint"

    rank: Count
    ranks: Positive
    files: Mapping[FileName, Count]
    """Bytes of the rank's files."""
    checksums: Mapping[FileName, Checksum]
    chunks: tuple[WrittenChunk, ...]
    """In the rank's own file: name, dtype and shape of a tensor; first byte, offsets and shape of
    the box that lies there."""
    checksum: Text | None = None
    """Checksum of this file up to this field."""

    @property
    def file(self) -> str:
        """The file that has the rank's tensors."""
        return file_of(self.rank)


def file_of(rank: int) -> str:
    """Return the name of the file that has a rank's tensors."""
    return f"rank-{rank:05}.bin"


def folder_of(temporary: Path) -> Path:
    """Return where the parts of a checkpoint are recorded, until it counts."""
    return temporary.with_name(temporary.name + SUFFIX)


def record_of(folder: Path, rank: int) -> Path:
    """Return where a rank's part is recorded."""
    return folder / f"part-{rank:05}.json"


def write(part: WrittenPart, folder: Path) -> None:
    """Record a part of which all files are on the disk; the record is there too afterwards."""
    path = record_of(folder, part.rank)
    write_text(checksums.with_seal(part.model_dump_json(exclude_none=True)), path)
    to_disk(path)


def read(folder: Path) -> list[WrittenPart] | None:
    """Return the parts of all ranks, or None where some are missing.

    Raises DocumentError for a part that is not as it was written.
    """
    if not record_of(folder, 0).exists():
        return None
    parts = [read_one(folder, 0)]
    for rank in range(1, parts[0].ranks):
        if not record_of(folder, rank).exists():
            return None
        parts.append(read_one(folder, rank))
    return parts


def index_of(parts: Iterable[WrittenPart]) -> TensorIndex:
    """Return where the tensors of a checkpoint lie; ValueError if parts do not make them whole."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, dict[object, Chunk]] = {}
    for part in parts:
        for name, dtype, shape, start, offsets, box in part.chunks:
            if kinds.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ValueError(f"{name}: has two types or shapes")
            # Parts without elements may be written by several ranks.
            chunks.setdefault(name, {})[offsets, box] = Chunk(
                file=part.file,
                start=start,
                length=math.prod(box) * ITEM_BYTES[dtype],
                offsets=offsets,
                shape=box,
            )
    tensors = {
        name: StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks[name].values()))
        for name, (dtype, shape) in kinds.items()
    }
    return TensorIndex(tensors=tensors)


def to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_one(folder: Path, rank: int) -> WrittenPart:
    """Return a rank's part; DocumentError where it is not as it was written."""
    path = record_of(folder, rank)
    try:
        text = list_bytes(path, folder.with_name(folder.name.removesuffix(SUFFIX))).decode()
        if not checksums.seal_holds(text):
            raise DocumentError(
                "",
                "is damaged: its checksum is not that of what was written",
            )
        part = WrittenPart.model_validate(json_data(text, most_values=None))
    except DocumentError as error:
        raise error.in_file(str(path)) from error
    except ValidationError as error:
        raise first_error(error).in_file(str(path)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DocumentError("", f"cannot be read: {error}", file=str(path)) from error
    if part.rank != rank or any(chunk[1] not in ITEM_BYTES for chunk in part.chunks):
        raise DocumentError("", f"is no part of rank {rank}", file=str(path))
    return part
