"""Tensor files: what torch.distributed.checkpoint writes and reads through.

Each rank writes one file, the raw elements of its chunks, and its checksum on the way, and then a
record of it (shard_manifest.py); rank 0 writes the index (tensor_index.py).  Reading takes
elements, never objects: nothing in a file can name code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.planner.errors import LaunchError
from meshwright.runtime.checkpoint import shard_manifest as parts
from meshwright.runtime.checkpoint import tensor_index
from meshwright.runtime.checkpoint.shard_manifest import WrittenChunk, WrittenPart
from meshwright.runtime.checkpoint.tensor_index import INDEX, Chunk, TensorIndex
from meshwright.runtime.core import checksums
from meshwright.runtime.core.dtypes import ITEM_BYTES

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _OneFolder:
    """The methods that torch expects of a reader or writer of one folder, fixed at construction."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse another folder than the one that was named."""
        assert checkpoint_id is None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Leave folders that are named to torch alone."""
        return False


class TensorWriter(_OneFolder, StorageWriter):
    """One rank's part in writing the tensors of a checkpoint; used once."""

    def __init__(
        self, folder: Path, *, rank: int, ranks: int, beside: Callable[[], Sequence[str]]
    ) -> None:
        """`beside` writes the rank's other files into the folder, and returns their names."""
        super().__init__()
        self.written: list[WrittenPart] = []
        """The parts of all ranks, known on the rank that writes the index."""
        self.own: tuple[str, ...] = ()
        """This rank's files, once they are on the disk."""
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._beside = beside

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, and wait for the disk."""
        sizes: dict[str, int] = {}
        sums: dict[str, str] = {}
        for name in self._beside():
            parts.to_disk(self._folder / name)
            sizes[name] = (self._folder / name).stat().st_size
            sums[name] = checksums.of_file(self._folder / name)
        chunks: list[WrittenChunk] = []
        if plan.items:
            file_name = parts.file_of(self._rank)
            sizes[file_name], sums[file_name], chunks = self._write_tensors(plan, planner)
        part = WrittenPart(
            rank=self._rank, ranks=self._ranks, files=sizes, checksums=sums, chunks=tuple(chunks)
        )
        parts.to_disk(self._folder)
        parts.write(part, parts.folder_of(self._folder))
        self.own = tuple(sizes)
        done: Future[list[WriteResult]] = Future()
        # What torch asks for of each tensor; ours is the part, for all of them.
        done.set_result([WriteResult(MetadataIndex(""), sum(sizes.values()), part)])
        return done

    def _write_tensors(
        self, plan: SavePlan, planner: SavePlanner
    ) -> tuple[int, str, list[WrittenChunk]]:
        """Write the rank's own file; return its bytes, its checksum and what lies where."""
        digest, start = hashlib.sha256(), 0
        chunks: list[WrittenChunk] = []
        path = self._folder / parts.file_of(self._rank)
        # The checksum is taken of what is in memory, while the file is written.
        with path.open("xb") as file, ThreadPoolExecutor(1) as hashing:
            for item in plan.items:
                data = planner.resolve_data(item)
                if not isinstance(data, Tensor):
                    raise LaunchError(
                        f"{item.index.fqn}: is no tensor; checkpoints have only those"
                    )
                elements = _bytes_of(data)
                hashed = hashing.submit(digest.update, elements)
                file.write(elements)
                hashed.result()
                about = item.tensor_data
                assert about is not None
                chunks.append(
                    (
                        item.index.fqn,
                        _NAMES[about.properties.dtype],
                        tuple(about.size),
                        start,
                        tuple(about.chunk.offsets),
                        tuple(about.chunk.sizes),
                    )
                )
                start += len(elements)
            file.flush()
            os.fsync(file.fileno())
        return start, f"sha256:{digest.hexdigest()}", chunks

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of what all ranks have written."""
        self.written = [result.storage_data for of_rank in results for result in of_rank]
        tensor_index.write(parts.index_of(self.written), self._folder / INDEX)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folders; every rank does, since nobody says when another has."""
        for folder in (self._folder, parts.folder_of(self._folder)):
            folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the plans as they are."""
        return plans

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""


class TensorReader(_OneFolder, StorageReader):
    """Reads the tensors of a checkpoint.

    `verify` has checksums of files: the ranks that read together share the files, and none of them
    takes a tensor before all have looked.
    """

    def __init__(self, folder: Path, index: TensorIndex, *, verify: Mapping[str, str]) -> None:
        super().__init__()
        self._folder, self._index, self._verify = folder, index, verify
        self._chunks = {
            (name, chunk.offsets): chunk
            for name, tensor in index.tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=_DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._index.tensors.items()
            }
        )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify this rank's share of the files."""
        joined = dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        share = sorted(self._verify)[rank::ranks]
        problem = checksums.differing(self._folder, self._verify, share)
        if problem is not None:
            raise LaunchError(problem)
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for into its place, one chunk after the other."""
        by_file: dict[str, list[tuple[Chunk, Any]]] = {}
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise LaunchError(
                    f"{item.storage_index.fqn}: is no tensor; resume from an earlier checkpoint"
                )
            at = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            chunk = self._chunks[at]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, wanted in by_file.items():
            with checksums.open_regular(self._folder / name) as file:
                for chunk, item in sorted(wanted, key=lambda pair: pair[0].start):
                    stored = self._index.tensors[item.storage_index.fqn]
                    tensor = self._read(file, chunk, _DTYPES[stored.dtype])
                    for dim, (start, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        tensor = tensor.narrow(dim, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: BufferedReader, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        file.seek(chunk.start)
        if chunk.length == 0:
            return torch.empty(chunk.shape, dtype=dtype)
        data = bytearray(chunk.length)
        if file.readinto(data) != chunk.length:
            raise LaunchError(
                f"{self._folder / chunk.file}: is cut short; resume from an earlier checkpoint"
            )
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(chunk.shape)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is to be set up."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Take the plans as they are."""
        return plans


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor, in their order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
