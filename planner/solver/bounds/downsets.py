"""The downsets of a chain of layers; `meshwright.planner.solver.graphs.ideals` has those of graphs.

Downset n has the first n layers, so sums over downsets are prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
# A run of layers is what the second of two downsets adds to the first.
Runs = tuple[Indices, Indices]


class Downsets(Protocol):
    """Sets of layers that have, with a layer, all that it reads; none first, all layers last.

    A downset comes after each of its subsets.
    """

    layers: int

    def __len__(self) -> int: ...

    def totals(self, values: Floats, of: Indices | slice = slice(None)) -> Floats:
        """[downset, column] Sums of `values` [layer, column] over the layers of each."""

    def codes(self, values: NDArray[np.int64], of: Indices) -> NDArray[np.int64]:
        """[downset] Sums of the integers `values` [layer], exact."""

    def crossing(self, readers: Sequence[Sequence[int]], values: Floats) -> Floats:
        """[downset] Sum of `values` [layer] over its layers that have a reader outside."""

    def nested_pairs(self, most: int) -> Runs | None:
        """Pairs of downsets of which the first lies in the second, rising; None if over `most`."""

    def difference(self, smaller: int, larger: int) -> Sequence[int]:
        """Layers that the larger downset has and the smaller has not, rising."""


class Prefixes:
    """Downsets of a chain: its prefixes, in order of length."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return self.layers + 1

    def totals(self, values: Floats, of: Indices | slice = slice(None)) -> Floats:
        """[downset, column] Sums of `values` [layer, column] over the layers of each."""
        until = np.zeros((len(self), values.shape[1]))
        np.cumsum(values, axis=0, out=until[1:])
        values_of: Floats = until[of]
        return values_of

    def codes(self, values: NDArray[np.int64], of: Indices) -> NDArray[np.int64]:
        """[downset] Sums of the integers `values` [layer], exact."""
        until = np.zeros(len(self), dtype=np.int64)
        np.cumsum(values, out=until[1:])
        values_of: NDArray[np.int64] = until[of]
        return values_of

    def crossing(self, readers: Sequence[Sequence[int]], values: Floats) -> Floats:
        """[downset] Sum of `values` [layer] over its layers that have a reader outside."""
        total = np.zeros(len(self))
        total[1:-1] = values[:-1]  # the next layer reads each
        for layer, outside in enumerate(readers):
            if len(outside) > 1:
                total[layer + 2 : outside[-1] + 1] += values[layer]
        return total

    def nested_pairs(self, _: int) -> Runs:
        """Pairs of downsets of which the first lies in the second, rising, however many."""
        smaller, larger = np.triu_indices(len(self), 1)
        return smaller, larger

    def difference(self, smaller: int, larger: int) -> range:
        """Layers that the larger downset has and the smaller has not, rising."""
        return range(smaller, larger)
