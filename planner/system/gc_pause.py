"""Python's collector of cycles, off where millions of objects are made and few are in a cycle.

Memory that a process frees while it repeats the same work stays with it.

glibc gives the top of its heap back to the system whenever more of it is free than some threshold,
and the next allocation takes a page fault for each 4 KiB, of 2 µs on a virtual machine.  A training
step does so or not, by the blocks that happen to be at the top: of ranks with equal work some took
none and others up to 3,800 a step, forked or started afresh.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Keep the collector from looking for cycles: objects without one are freed as ever.

    It would go through all objects again and again, a sixth of a large search's seconds and a fifth
    of a large table's.  Objects that remain at the end count as old, or the collector would go
    through all of them at once; unless objects were frozen before, which would count as old too.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_BYTES = 2**31 - 1
"""Largest size of the free top of the heap that stays, the limit of mallopt."""
LARGE_BYTES = 2**25
"""Size of a block that is returned at once; glibc accepts no larger one."""


def keep_freed() -> bool:
    """Give free memory back to the system now, and keep all memory that is freed from here on.

    Return True if the C library can do so; only glibc can.

    >>> keep_freed() == (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"))
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return False
    library.malloc_trim(0)
    return all(
        library.mallopt(option, size)
        for option, size in ((M_MMAP_THRESHOLD, LARGE_BYTES), (M_TRIM_THRESHOLD, MOST_BYTES))
    )
