"""What layers may recompute: anything, one choice of all, or choices by kind of layer."""

from __future__ import annotations

from collections.abc import Mapping

from planner.documents.profile import Recompute
from planner.layers.operator_table import RECOMPUTES

Recomputes = Recompute | Mapping[str, tuple[Recompute, ...]] | None
"""One choice of all layers, those of each kind of layer, or (None) any."""


def choices_of(asked: Recomputes, kind: str) -> tuple[Recompute, ...]:
    """Return what layers of a kind may recompute.

    >>> choices_of(None, "block"), choices_of("full", "block"), choices_of({"a": ("none",)}, "a")
    (('none', 'selective', 'full'), ('full',), ('none',))
    """
    if asked is None:
        return RECOMPUTES
    return (asked,) if isinstance(asked, str) else asked[kind]
