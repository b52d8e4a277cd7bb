"""Python's collector of cycles, off where millions of objects are made and few are in a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Keep the collector from looking for cycles: objects without one are freed as ever.

    It would go through all objects again and again, a sixth of a large search's seconds and a
    fifth of a large table's.  What is left in the end counts as old, or the collector would go
    through all of it at once; unless somebody has frozen objects, which would count as old too.
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
