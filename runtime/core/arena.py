"""Arena: host memory for tensors that come and go, taken from the system once.

torch's allocator of pinned memory rounds each block up to a power of two, so that tensors take up
to twice their bytes.  Here blocks have their own bytes: they are cut one behind the other
from large segments, and one that is given back serves the next tensor of its size.  Sizes repeat
from micro-batch to micro-batch, so after the first step nothing is taken any more.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]
SEGMENT_BYTES = 64 * 2**20
"""Of memory that is taken at once: pinning costs a call of the driver each time."""
LINE_BYTES = 256
"""Blocks begin at multiples of it."""


class Arena:
    """Blocks of host memory, each as large as what it is for."""

    def __init__(self, prepared: Callable[[Memory], None]) -> None:
        """`prepared` is called with each segment before it is used: to pin it."""
        self.resident_bytes = 0
        """Of all blocks in use."""
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
        found = (at for at, rest in enumerate(self._open) if rest.nbytes >= size_bytes)
        at = next(found, len(self._open))
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
