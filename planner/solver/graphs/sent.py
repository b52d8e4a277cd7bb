"""What stages pay for outputs that go straight to their readers, without relays.

A step from ideal I to J sends the outputs of J - I that a layer outside J reads, and receives those
of I that a layer of J - I reads: each output once, whatever lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solver.graphs.ideals import Ideals

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_ROWS = 1 << 16  # steps looked at together


@dataclass(frozen=True, slots=True)
class Sent:
    """`readers` [layer] of each output, and its seconds at either end."""

    readers: Sequence[Sequence[int]]
    output_s: Sequence[float]

    def between(self, every: Ideals, members: Indices) -> Callable[[Indices, Indices], Floats]:
        """Return what steps between these members pay, by positions among them."""
        layers = [at for at, s in enumerate(self.output_s) if s and self.readers[at]]
        output_s = np.array([self.output_s[at] for at in layers])
        most = np.array([len(self.readers[at]) for at in layers], dtype=np.int16)
        counted = np.zeros((len(members), len(layers)), dtype=np.int16)
        inside = np.zeros((len(members), len(layers)), dtype=bool)
        for column, layer in enumerate(layers):
            inside[:, column] = every.holds(layer)[members]
            for reader in self.readers[layer]:
                counted[:, column] += every.holds(reader)[members]

        def seconds(smaller: Indices, larger: Indices) -> Floats:
            found = np.empty(len(smaller))
            for start in range(0, len(smaller), _ROWS):
                a, b = smaller[start : start + _ROWS], larger[start : start + _ROWS]
                received = inside[a] & (counted[b] > counted[a])
                sends = inside[b] & ~inside[a] & (counted[b] < most)
                found[start : start + _ROWS] = (received | sends) @ output_s
            return found

        return seconds
