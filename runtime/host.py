"""Host memory beside a device: room to put tensors in, and the way there and back.

On CUDA host memory is pinned and copies run on side streams, beside computation: one for each
direction, which a link carries at the same time.  Where the
device is the CPU itself, the same copies are made between two places of the same memory, so that
whatever uses this file does the same everywhere; room on the "host" is then made behind torch's
back, and `on_host` tells it from what a device would hold.

Memory of a copy under way is guarded without `record_stream`: whoever frees a tensor that was read
or written by the side stream lets the computing stream wait for that copy first (`Copied.wait`).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

_rooms: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


_making: list[None] = []
"""Not empty while room is made."""


def makes_room() -> bool:
    """Tell whether the memory that torch makes now stands for the host's.

    In a fake mode even a tensor of other programs' memory goes through torch.
    """
    return bool(_making)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return unfilled host memory for a tensor of a device.

    >>> on_host(room((2, 3), torch.float32, torch.device("cpu"))), on_host(torch.empty(2, 3))
    (True, False)
    """
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")
    size_bytes = math.prod(shape) * dtype.itemsize
    _making.append(None)
    try:
        plain = torch.from_numpy(np.empty(max(1, size_bytes), dtype=np.uint8))
    finally:
        _making.pop()
    settle(plain)
    return plain[:size_bytes].view(dtype).view(tuple(shape))


def settle(tensor: Tensor) -> None:
    """Count a tensor as one on the host: other programs put it there."""
    storage = tensor.untyped_storage()
    _rooms[storage._cdata] = storage


def on_host(tensor: Tensor) -> bool:
    """Tell whether a tensor lies in host memory, or in what stands for it on a CPU."""
    storage = tensor.untyped_storage()
    return storage._cdata in _rooms


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was started: where its result is, and when it will be there."""

    tensor: Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Let the current stream go on only behind the copy; return its result."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return self.tensor


def to_host(tensor: Tensor) -> Copied:
    """Start to copy a contiguous tensor into new host memory."""
    home = room(tensor.shape, tensor.dtype, tensor.device)
    return _copied(tensor, home, tensor.device, "to host")


def to_device(tensor: Tensor, device: torch.device) -> Copied:
    """Start to copy a tensor from host memory into new memory of the device."""
    return _copied(tensor, torch.empty_like(tensor, device=device), device, "to device")


def back_to_host(tensor: Tensor, home: Tensor) -> Copied:
    """Start to copy a tensor of the device over its copy on the host."""
    return _copied(tensor, home, tensor.device, "to host")


Way = Literal["to host", "to device"]


def _copied(source: Tensor, target: Tensor, device: torch.device, way: Way) -> Copied:
    """Start a copy behind all that the current stream was asked for.

    A copy to the device therefore waits for one to the host only if the current stream has waited
    for it (`Copied.wait`): whoever fetches what it sent away does so.
    """
    if device.type != "cuda":
        return Copied(target.copy_(source))
    side = _side_stream(device, way)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    return Copied(target, side.record_event())


@functools.cache
def _side_stream(device: torch.device, way: Way) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
