"""Names that a chain of layers and what divides it share: its ends, styles of modules, regions."""

from __future__ import annotations

from typing import Literal

TensorStyle = Literal[
    "gather", "columns", "rows", "vocabulary", "logits", "mixture", "experts", "part"
]
"""Treatment of a layer's module by tensor parallelism; tensor_parallel.py explains each style."""

EMBEDDING = "embedding"
HEAD = "head"

Region = tuple[int, int, int]
"""Some of a part: (dim, from, to before)."""
