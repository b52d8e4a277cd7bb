"""Plain data between the ranks of a process group: JSON in tensors of bytes.

torch's own object collectives (`all_gather_object`, `broadcast_object_list`) unpickle what other
ranks sent, which runs code that a message names.  JSON is data alone.  A message has a limit, so
that no rank makes another allocate without bound.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.planner.errors import LaunchError, MeshwrightError
from meshwright.runtime.core.dtypes import ITEM_BYTES

MAX_BYTES = 2**28
"""Largest size in bytes of one rank's message."""


_host_groups: list[tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = []
"""The group of gloo beside the group of all ranks that takes no CPU tensors."""


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return a group whose collectives take CPU tensors, in place of that of all ranks.

    Where a script has joined its ranks by NCCL alone that is one of gloo, which is made once; all
    ranks call it together.
    """
    if group is not None or dist.get_backend() != "nccl":
        return group
    if not _host_groups or _host_groups[0][0] is not dist.group.WORLD:
        _host_groups[:] = [(dist.group.WORLD, dist.new_group(backend="gloo"))]
    return _host_groups[0][1]


def own_rank() -> int:
    """Return the number of this rank, 0 where it is joined to nobody."""
    return dist.get_rank() if dist.is_initialized() else 0


def number_of_ranks() -> int:
    """Return how many ranks are joined, 1 where this one is joined to nobody."""
    return dist.get_world_size() if dist.is_initialized() else 1


def reduce_max(numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number among all ranks; all of them call it."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=host_group())
    return largest.tolist()


def all_gather_json(data: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what each rank of the group gave, by rank; all of them call it."""
    if group is None and not dist.is_initialized():
        return [_decode(_encode(data), 0)]
    message, group = _encode(data), host_group(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([message.numel()]), group=group)
    counts = [_checked_size(size, rank) for rank, size in enumerate(sizes)]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: message.numel()] = message
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    return [
        _decode(text[:count], rank)
        for rank, (text, count) in enumerate(zip(received, counts, strict=True))
    ]


@contextlib.contextmanager
def raise_on_all(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Do something on each rank of a group, and raise on all where it fails on any.

    All of them call it, and nothing inside may wait for others.  What comes behind may: no rank
    waits for one that has failed.  A rank that did not fail raises LaunchError with the error of
    the first that did.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # of the user's own code, too
        failed = error
    if dist.is_initialized():
        every = all_gather_json(None if failed is None else _error_text(failed), group=group)
        problem = next(
            ((rank, message) for rank, message in enumerate(every) if message is not None), None
        )
        if problem is not None and failed is None:
            raise LaunchError(f"rank {problem[0]}: {problem[1]}")
    if failed is not None:
        raise failed


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"


def broadcast_json(data: Any, *, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return what rank `source` (of all ranks) gave; all ranks of the group call it."""
    sends, group = dist.get_rank() == source, host_group(group)
    message = _encode(data) if sends else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([message.numel()])
    dist.broadcast(size, src=source, group=group)
    count = _checked_size(size, source)
    if not sends:
        message = torch.empty(count, dtype=torch.uint8)
    dist.broadcast(message, src=source, group=group)
    return _decode(message, source)


def broadcast_tensors(tensors: Sequence[Tensor] | None, *, source: int, group: Any) -> list[Tensor]:
    """Return the tensors of the rank at place `source` of a group, on the CPU; all of it call it.

    A tensor has at most MAX_BYTES.
    """
    first = dist.get_global_rank(group, source)
    header = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors or ()]
    result = []
    headers = broadcast_json(header, source=first, group=group)
    for at, (name, shape) in enumerate(headers):
        if name not in ITEM_BYTES or math.prod(shape) * ITEM_BYTES[name] > MAX_BYTES:
            raise LaunchError(
                f"rank {first}: sends {name} {shape}, which is no tensor of a batch; "
                "give smaller ones, of a plain dtype"
            )
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        if tensors is not None:
            tensor.copy_(tensors[at])
        dist.broadcast(tensor, src=first, group=group)
        result.append(tensor)
    return result


def _encode(data: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)


def _checked_size(size: Tensor, rank: int) -> int:
    """Return a message's size; every rank sees the same, so all refuse it together."""
    count = int(size)
    if not 0 < count <= MAX_BYTES:
        raise LaunchError(
            f"rank {rank}: its message has {count} bytes; a message has 1 to {MAX_BYTES}"
        )
    return count


def _decode(message: Tensor, rank: int) -> Any:
    try:
        return json.loads(message.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"rank {rank}: its message is not JSON: {error}") from None
