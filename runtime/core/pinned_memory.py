"""Host memory beside a device: room to put tensors in, and the way there and back.

On CUDA host memory is pinned and copies run on side streams, beside computation: one for each
direction, which a link carries at the same time.  Where the device is the CPU itself, the same
copies are made between two places of the same memory, so that whatever uses this file does the same
everywhere.  On both the memory is of one arena, behind torch's back, and `on_host` tells it from
what a device would hold.

Device memory of a copy under way is guarded without `record_stream`: whoever frees a tensor that
was read or written by a side stream lets the computing stream wait for that copy first
(`Copied.wait`).  Host memory that is used anew waits here for the last copy from or into it.

An arena takes host memory from the system once, for tensors that come and go.  torch's allocator of
pinned memory rounds each block up to a power of two, so that tensors take up to twice their bytes.
Here blocks have their own bytes: they are cut one behind the other from large segments, and one
that is given back serves the next tensor of its size.  Sizes repeat from micro-batch to
micro-batch, so after the first step nothing is taken any more.
"""

from __future__ import annotations

import functools
import math
import mmap
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.planner.errors import LaunchError

_blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, Memory] = weakref.WeakKeyDictionary()
"""The memory of each room, which it keeps."""
_latest: dict[int, torch.cuda.Event] = {}
"""Behind the last copy from or into a block, by its address."""
_rooms: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


_making: list[None] = []
"""Not empty while room is made."""


def makes_room() -> bool:
    """Tell whether the memory that torch makes now stands for the host's.

    In a fake mode even a tensor of other programs' memory goes through torch.
    """
    return bool(_making)


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return unfilled host memory for a tensor of a device; the host may write it at once.

    >>> on_host(room((2, 3), torch.float32, torch.device("cpu"))), on_host(torch.empty(2, 3))
    (True, False)
    """
    tensor = _room(shape, dtype, device)
    busy = _latest.pop(_address(tensor), None)
    if busy is not None:
        busy.synchronize()
    return tensor


def _room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory from which or into which a copy may still be under way."""
    size_bytes = math.prod(shape) * dtype.itemsize
    block = arena(device.type).block(max(1, size_bytes))
    _making.append(None)
    try:
        plain = torch.from_numpy(block)
    finally:
        _making.pop()
    settle(plain)
    _blocks[plain.untyped_storage()] = block
    return plain[:size_bytes].view(dtype).view(tuple(shape))


@functools.cache
def arena(kind: str) -> Arena:
    """Return where host memory beside devices of a kind is taken from."""
    return Arena(pin if kind == "cuda" else lambda segment: None)


def pin(segment: Memory) -> None:
    """Let a device copy from and to memory by itself."""
    error = torch.cuda.cudart().cudaHostRegister(segment.ctypes.data, segment.nbytes, 0)
    if int(error):
        raise LaunchError(
            f"the host cannot pin {segment.nbytes:,} bytes for offload (CUDA error {int(error)}); "
            "free memory, raise the limit of locked memory (ulimit -l), or plan without offload"
        )


def _address(tensor: Tensor) -> int:
    """Return where the block of a room lies; 0 of memory that is not of the arena."""
    block = _blocks.get(tensor.untyped_storage())
    return 0 if block is None else int(block.ctypes.data)


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
    home = _room(tensor.shape, tensor.dtype, tensor.device)
    return _start_copy(tensor, home, tensor.device, "to host")


def to_device(tensor: Tensor, device: torch.device) -> Copied:
    """Start to copy a tensor from host memory into new memory of the device."""
    return _start_copy(tensor, torch.empty_like(tensor, device=device), device, "to device")


def back_to_host(tensor: Tensor, home: Tensor) -> Copied:
    """Start to copy a tensor of the device over its copy on the host."""
    return _start_copy(tensor, home, tensor.device, "to host")


# --- gradients that arrive ------------------------------------------------------------------------

_sums: dict[int, tuple[Tensor, DTensor]] = {}
"""Each parameter, by id, and its gradients over the micro-batches that have arrived."""
_arriving: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()
"""(behind its copy, the sum that it belongs to, a gradient), in the order of their copies."""


def sum_at_home(parameter: Tensor) -> None:
    """Sum a parameter's gradients on the host, behind copies that nothing waits for.

    FSDP2 copies a gradient into pinned memory beside computation only where there is none yet, and
    else into pageable memory while the host waits: 2.0 instead of 51 GB/s on an H100.  So a
    gradient is set aside as soon as it is on its way, and `sum_gradients` gives the sums back.
    """
    parameter.register_post_accumulate_grad_hook(_set_aside)


def _set_aside(parameter: Tensor) -> None:
    grad = parameter.grad
    assert isinstance(grad, DTensor)
    parameter.grad = None
    if id(parameter) not in _sums:
        _sums[id(parameter)] = parameter, grad  # FSDP waits for its copy when backward ends
        return
    _, total = _sums[id(parameter)]
    behind = torch.cuda.current_stream().record_event()
    _arriving.append((behind, total.to_local(), grad.to_local()))
    while _arriving and _arriving[0][0].query():
        _add_first()


def _add_first() -> None:
    behind, total, added = _arriving.popleft()
    behind.synchronize()
    total.add_(added)


@torch.no_grad()
def sum_gradients() -> None:
    """Wait for all gradients that arrive, and give each parameter the sum of its own."""
    while _arriving:
        _add_first()
    for parameter, total in _sums.values():
        parameter.grad = total
    _sums.clear()


def forget_sums() -> None:
    """Drop what a step that failed has left."""
    _arriving.clear()
    _sums.clear()


Way = Literal["to host", "to device"]


def _start_copy(source: Tensor, target: Tensor, device: torch.device, way: Way) -> Copied:
    """Start a copy behind all that the current stream was asked for.

    It waits for the last copy from or into its host memory too, whatever that was for.
    """
    if device.type != "cuda":
        return Copied(target.copy_(source))
    side = _side_stream(device, way)
    side.wait_stream(torch.cuda.current_stream(device))
    home = _address(target if way == "to host" else source)
    if home in _latest:
        side.wait_event(_latest[home])
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    done = side.record_event()
    if home:
        _latest[home] = done
    return Copied(target, done)


@functools.cache
def _side_stream(device: torch.device, way: Way) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


Memory = npt.NDArray[np.uint8]


SEGMENT_BYTES = 64 * 2**20


"""Bytes of memory allocated at once: pinning costs a driver call each time."""


LINE_BYTES = 256


"""Blocks begin at multiples of it."""


class Arena:
    """Blocks of host memory, each as large as what it is for."""

    def __init__(self, prepared: Callable[[Memory], None]) -> None:
        """`prepared` is called with each segment before it is used: to pin it."""
        self.resident_bytes = 0
        """Bytes of all blocks in use."""
        self.peak_bytes = 0
        """The most that they ever were."""
        self.reserved_bytes = 0
        """Taken from the system, and kept."""
        self._prepared = prepared
        self._free: defaultdict[int, list[Memory]] = defaultdict(list)
        self._open: list[Memory] = []
        """Ends of segments that nothing was cut from yet."""
        self._lock = threading.RLock()  # tensors end on any thread, also while one is being made

    def block(self, size_bytes: int) -> Memory:
        """Return unfilled memory, which is given back once nothing refers to it.

        >>> arena = Arena(lambda segment: None)
        >>> first, second = arena.block(1000), arena.block(1000)
        >>> arena.resident_bytes, arena.reserved_bytes == SEGMENT_BYTES
        (2048, True)
        >>> del first
        >>> arena.resident_bytes, arena.peak_bytes
        (1024, 2048)
        """
        whole_bytes = max(1, -(-size_bytes // LINE_BYTES)) * LINE_BYTES
        with self._lock:
            free = self._free[whole_bytes]
            memory = free.pop() if free else self._cut(whole_bytes)
            self.resident_bytes += whole_bytes
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        block = memory[:size_bytes]
        weakref.finalize(block, self._back, memory).atexit = False
        return block

    def _cut(self, size_bytes: int) -> Memory:
        """Return memory that was never used: the first that is large enough."""
        fitting = (at for at, rest in enumerate(self._open) if rest.nbytes >= size_bytes)
        at = next(fitting, len(self._open))
        if at == len(self._open):
            self._open.append(self._segment(max(size_bytes, SEGMENT_BYTES)))
        rest = self._open[at]
        if rest.nbytes == size_bytes:
            del self._open[at]
        else:
            self._open[at] = rest[size_bytes:]
        return rest[:size_bytes]

    def _segment(self, size_bytes: int) -> Memory:
        pages = -(-size_bytes // mmap.PAGESIZE)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # ranks that are forked have their own
        taken = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=private)
        memory: Memory = np.frombuffer(taken, np.uint8)
        self._prepared(memory)
        self.reserved_bytes += memory.nbytes
        return memory

    def _back(self, memory: Memory) -> None:
        with self._lock:
            self.resident_bytes -= memory.nbytes
            self._free[memory.nbytes].append(memory)
