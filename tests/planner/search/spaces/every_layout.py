"""All layouts of a space, for oracles that go through them one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from planner.search.layout_queue import Space, runnable

from planner.documents.plan import Layout


def layouts_of(space: Space[Any]) -> list[Layout]:
    """Return every layout of a space that can run."""
    return list(runnable(space))


def bounded(space: Space[Any]) -> Iterator[tuple[Layout, float]]:
    """Yield every layout of bundles that can run, with what bounds its bundle."""
    for bound_s, bundle in space.bundles(Counter()):
        dearer = getattr(bundle, "better_s", None)
        better_s = bound_s if dearer is None else dearer()
        for layout in bundle.layouts():
            if space.refusal(layout) is None:
                yield layout, max(bound_s, better_s)
