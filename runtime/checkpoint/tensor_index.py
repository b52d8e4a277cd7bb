"""Tensor index: where each tensor of a checkpoint lies in its files.

    {"format": 1, "files": ["rank-00000.bin", ...],
     "tensors": {NAME: {"dtype": "float32", "shape": [258, 32],
                        "chunks": [[FILE, START, OFFSETS, SHAPE], ...]}}}

A chunk is a box of the tensor; its elements lie in their order, little end first, from byte START
of file number FILE on.  An index that was read is valid: chunks are inside their tensor and fill
it, and inside their files without sharing bytes, so that no index claims more than there is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.planner.documents.document import json_data, write_text
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError
from meshwright.runtime.core import checksums
from meshwright.runtime.core.dtypes import ITEM_BYTES

INDEX = "tensors.json"
SMALL_BYTES = 2**22
"""An index may have as many, whatever it describes."""
SHARE = 16
"""Bytes of tensors for which an index may have one more; a chunk of 16,384 ranks has thousands."""
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48
_FILE = re.compile(r"rank-\d{5,9}\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that have its elements."""

    file: str
    start: int
    length: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in chunks, which fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"has the dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        # A dimension of 0 must not hide what the others multiply to.
        claimed = math.prod(float(max(size, 1)) for size in self.shape)
        if len(self.shape) > MAX_DIMENSIONS or claimed > MAX_ELEMENTS:
            raise ValueError(
                f"has {len(self.shape)} dimensions and {claimed:.3g} elements; a tensor has at "
                f"most {MAX_DIMENSIONS} and {MAX_ELEMENTS:.3g}"
            )
        for chunk in self.chunks:
            if len(chunk.offsets) != len(self.shape) or len(chunk.shape) != len(self.shape):
                raise ValueError(f"has a chunk of other dimensions than {self.shape}")
            boxes = zip(chunk.offsets, chunk.shape, self.shape, strict=True)
            if any(offset + size > whole for offset, size, whole in boxes):
                raise ValueError(f"has a chunk that is not inside {self.shape}")
        if len({chunk.offsets for chunk in self.chunks if 0 not in chunk.shape}) != sum(
            0 not in chunk.shape for chunk in self.chunks
        ) or self.elements != sum(math.prod(chunk.shape) for chunk in self.chunks):
            raise ValueError(f"has chunks that do not fill {self.shape}")

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """All tensors of a checkpoint, by name."""

    tensors: Mapping[str, StoredTensor]

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if not _FILE.fullmatch(chunk.file):
                    raise ValueError(f"{_short(name)}: lies in the file {_short(chunk.file)}")
                need = math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
                if chunk.length != need:
                    raise ValueError(f"{_short(name)}: has {chunk.length} bytes and needs {need}")

    @property
    def files(self) -> list[str]:
        """The files that have tensors."""
        return sorted({chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})

    def check_inside(self, sizes: Mapping[str, int]) -> None:
        """Refuse chunks outside the files, or on top of each other there."""
        places: dict[str, list[tuple[int, int, str]]] = {}
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                place = (chunk.start, chunk.start + chunk.length, name)
                places.setdefault(chunk.file, []).append(place)
        for file, chunks in places.items():
            end = 0
            for start, stop, name in sorted(chunks):
                if start < end and start < stop:
                    raise ValueError(f"{_short(name)}: shares bytes of {file} with another tensor")
                end = max(end, stop)
            if end > sizes.get(file, 0):
                raise ValueError(
                    f"{file}: has {sizes.get(file, 0)} bytes, and tensors end at {end}"
                )


def list_bytes(path: Path, described: Path) -> bytes:
    """Return the bytes of a list of the tensors of a folder, no more than those can need.

    What a list of tensors takes in memory stays below what the tensors take.  ValueError for more.
    """
    most = SMALL_BYTES + sum(checksums.sizes(described).values()) // SHARE
    with checksums.open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(
            f"has more than {bytes_text(most)}, which is too much for the tensors beside it"
        )
    return data


def read(folder: Path, *, sizes: Mapping[str, int], checksum: str) -> TensorIndex:
    """Read the index of a checkpoint whose files have these sizes, and which has this checksum."""
    path = folder / INDEX
    try:
        data = list_bytes(path, folder)
        if checksums.of_bytes(data) != checksum:
            raise ValueError("is damaged: its checksum is not that of what was written")
        index = _from_json(json_data(data, most_values=None))
        index.check_inside(sizes)
    except OSError as error:
        raise DocumentError(
            "", f"cannot be read: {error.strerror or error}", file=str(path)
        ) from error
    except DocumentError as error:
        raise DocumentError(
            "", f"is no index of tensors: {_short(error.message, 300)}", file=str(path)
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise DocumentError(
            "", f"is no index of tensors: {_short(reason, 300)}", file=str(path)
        ) from error
    return index


def write(index: TensorIndex, path: Path) -> None:
    """Write an index."""
    files = index.files
    number = {name: position for position, name in enumerate(files)}
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": [[number[c.file], c.start, c.offsets, c.shape] for c in tensor.chunks],
        }
        for name, tensor in index.tensors.items()
    }
    data = {"format": 1, "files": files, "tensors": tensors}
    write_text(json.dumps(data, separators=(",", ":")) + "\n", path)


def _from_json(data: Any) -> TensorIndex:
    if _fields(data, "format", "files", "tensors")[0] != 1:
        raise ValueError(f"has the format {_short(data['format'])}; this version reads 1")
    files = _list(data["files"])
    tensors = {}
    for name, stored in _dict(data["tensors"]).items():
        dtype, shape, chunks = _fields(stored, "dtype", "shape", "chunks")
        if _text(dtype) not in ITEM_BYTES:
            raise ValueError(f"{_short(name)}: has the dtype {_short(dtype)}")
        read = []
        for chunk in _list(chunks):
            file, start, offsets, box = _list(chunk)
            sizes = _counts(box)
            read.append(
                Chunk(
                    file=_text(files[_count(file)]),
                    start=_count(start),
                    length=math.prod(sizes) * ITEM_BYTES[dtype],
                    offsets=_counts(offsets),
                    shape=sizes,
                )
            )
        tensors[name] = _stored_tensor(name, dtype, _counts(shape), read)
    return TensorIndex(tensors=tensors)


def _stored_tensor(
    name: str, dtype: str, shape: tuple[int, ...], chunks: Sequence[Chunk]
) -> StoredTensor:
    try:
        return StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))
    except ValueError as error:
        raise ValueError(f"{_short(name)}: {error}") from error


def _fields(value: object, *names: str) -> list[Any]:
    fields = _dict(value)
    if set(fields) != set(names):
        raise ValueError(
            f"has the keys {_short(', '.join(sorted(fields)))} instead of {', '.join(names)}"
        )
    return [fields[name] for name in names]


def _dict(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"has {_short(value)} where a mapping belongs")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"has {_short(value)} where a list belongs")
    return value


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"has {_short(value)} where sizes belong")
    return tuple(map(_count, value))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"has {_short(value)} where a count belongs")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has {_short(value)} where a name belongs")
    return value


def _short(value: object, most: int = 80) -> str:
    """Return a value that somebody else wrote as part of a message: short, on one line.

    Of what may hold others only the type is shown: shared parts make a text without an end.
    """
    if isinstance(value, str):
        return ascii(value[:most])[1:-1]
    return str(value) if isinstance(value, int | float | None) else type(value).__name__
