"""What a process frees while it does the same again and again stays with it.

glibc gives the top of its heap back to the system whenever more of it is free than some threshold,
and the next allocation takes a page fault for each 4 KiB, of 2 µs on a virtual machine.  Whether a
training step does so depends on what happens to lie at the top: of ranks with equal work some took
none and others up to 3,800 a step, forked or started afresh.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_BYTES = 2**31 - 1
"""Of the top that stay, as many as mallopt takes."""
LARGE_BYTES = 2**25
"""Of a block that goes back at once; glibc takes no more."""


def keep_freed() -> bool:
    """Keep what is freed from here on, after what is free now was given back.

    Says whether the C library can do so: glibc alone does.

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
