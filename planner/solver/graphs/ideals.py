"""The downsets of a graph of layers: what the first few stages of a pipeline can hold together.

Layers are numbered in a topological order, and an ideal is a row of 64-bit words in which bit l
says that layer l belongs to it.  A graph that is nearly a chain has hardly more ideals than
layers; parallel branches multiply: towers of 24 and 12 layers have 25 · 13.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.bounds.downsets import Runs
from meshwright.planner.solver.contraction import Block, blocks

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_ROWS = 1 << 16  # ideals unpacked to one byte per layer at a time
_CHUNK = 1 << 20  # pairs of ideals compared at a time


class Ideals:
    """All ideals of a graph; `words` [ideal, word], the empty one first, all layers last.

    An ideal comes after each of its subsets.
    """

    def __init__(self, words: Words, layers: int) -> None:
        self.words = words
        self.layers = layers

    def __len__(self) -> int:
        return len(self.words)

    def contains(self, layer: int) -> NDArray[np.bool_]:
        """[ideal] Whether the layer belongs to it."""
        contained: NDArray[np.bool_] = (self.words[:, layer >> 6] >> np.uint64(layer & 63)) & 1 == 1
        return contained

    def holds_all(self, layers: Sequence[int]) -> NDArray[np.bool_]:
        """[ideal] Whether all these layers belong to it."""
        return _cover(self.words, mask(layers, self.layers))

    def totals(self, values: Floats, of: Indices | slice = slice(None)) -> Floats:
        """[ideal, column] Sums of `values` [layer, column] over the layers of each ideal."""
        words = self.words[of]
        products = np.empty((len(words), values.shape[1]))
        for start in range(0, len(words), _ROWS):
            members = self._members(words[start : start + _ROWS])
            products[start : start + _ROWS] = members.astype(np.float64) @ values
        return products

    def codes(self, values: NDArray[np.int64], of: Indices) -> NDArray[np.int64]:
        """[ideal] Sums of the integers `values` [layer], exact."""
        products: NDArray[np.int64] = self._members(self.words[of]) @ values
        return products

    def crossing(self, readers: Sequence[Sequence[int]], values: Floats) -> Floats:
        """[ideal] Sum of `values` [layer] over its layers that have a reader outside."""
        sums = np.zeros(len(self))
        for layer, outside in enumerate(readers):
            if outside and values[layer]:
                sums += values[layer] * (self.contains(layer) & ~self.holds_all(outside))
        return sums

    def nested_pairs(self, most: int) -> Runs | None:
        """Pairs of ideals of which the first lies in the second, rising; None if over `most`."""
        words, count = self.words, len(self)
        rows = max(1, _CHUNK // count)
        smaller: list[Indices] = []
        larger: list[Indices] = []
        offset = 0
        for start in range(0, count, rows):
            some = words[start : start + rows, None]
            inside = ~np.any(some & ~words[None], axis=2)
            first, second = np.nonzero(inside)
            apart = first + start != second
            smaller.append(first[apart] + start)
            larger.append(second[apart])
            offset += len(smaller[-1])
            if offset > most:
                return None
        return np.concatenate(smaller), np.concatenate(larger)

    def difference(self, smaller: int, larger: int) -> list[int]:
        """Layers that the larger ideal has and the smaller has not, rising."""
        words = self.words[larger] & ~self.words[smaller]
        return [int(layer) for layer in np.flatnonzero(self._members(words[None])[0])]

    def _members(self, words: Words) -> NDArray[np.uint8]:
        """[ideal, layer] 1 where the layer belongs to the ideal."""
        octets = np.ascontiguousarray(words.astype("<u8", copy=False)).view(np.uint8)
        return np.unpackbits(octets, axis=1, count=self.layers, bitorder="little")


def mask(layers: Sequence[int], count: int) -> Words:
    """[word] A set of layers out of `count`."""
    words = np.zeros((count + 63) // 64, dtype=np.uint64)
    for layer in layers:
        words[layer >> 6] |= np.uint64(1) << np.uint64(layer & 63)
    return words


def _cover(words: Words, wanted: Words) -> NDArray[np.bool_]:
    """[ideal] Whether the ideal contains `wanted`."""
    contained = np.ones(len(words), dtype=bool)
    for column in np.flatnonzero(wanted):
        contained &= (words[:, column] & wanted[column]) == wanted[column]
    return contained


def ideals(
    readers: Sequence[Sequence[int]], *, most: int, colocated: Sequence[Block] = ()
) -> Ideals | None:
    """All ideals of the graph in which `readers[l]` (all > l) read layer l; None if over `most`.

    Of every group of `colocated` an ideal has all layers or none.

    The first n blocks (groups, layers of none) of a topological order are an ideal themselves.  So
    an ideal of the first n + 1 blocks is an ideal of the first n, or one of those with the block
    added that has all that the block reads.  Each ideal is made once, and the count never falls on
    the way.
    """
    count = len(readers)
    reads: list[list[int]] = [[] for _ in readers]
    for layer, outside in enumerate(readers):
        for reader in outside:
            reads[reader].append(layer)
    words = np.zeros((1, (count + 63) // 64), dtype=np.uint64)
    for block in blocks(readers, colocated):
        outer = {before for layer in block for before in reads[layer]} - set(block)
        added = words[_cover(words, mask(sorted(outer), count))] | mask(block, count)
        words = np.concatenate([words, added])
        if len(words) > most:
            return None
    return Ideals(words, count)
