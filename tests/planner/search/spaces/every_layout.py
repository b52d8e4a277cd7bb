"""All layouts of a space, for oracles that go through them one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.planner.documents.plan import Layout
from meshwright.planner.search.queue import SearchSpace


def layouts_of(space: SearchSpace) -> list[Layout]:
    """Return every layout of a space that can run."""
    every = (layout for _, group in space.bundles(Counter()) for layout in group.layouts())
    return [layout for layout in every if space.refusal(layout) is None]


def bounded(space: SearchSpace) -> Iterator[tuple[Layout, float]]:
    """Yield every layout of bundles that can run, with what bounds its bundle."""
    for bound_s, bundle in space.bundles(Counter()):
        for layout in bundle.layouts():
            if space.refusal(layout) is None:
                yield layout, bound_s
