"""All layouts of a space, for oracles that go through them one by one."""

from __future__ import annotations

from typing import Any

from planner.plan import Layout
from planner.search.spaces.search import LayoutSpace, runnable


def layouts_of(space: LayoutSpace[Any]) -> list[Layout]:
    """Return every layout of a space that can run."""
    return [layout for bundle in runnable(space, {}) for layout in bundle.layouts()]
