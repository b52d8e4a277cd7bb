"""Some of the ideals of a graph that has too many: along a few orders, and around cuts.

The best split through these ideals is a split of the graph.  The ideals around the cuts of a split
differ from them by a few layers and have cheap cuts; a search through them moves all cuts at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.graphs.ideals import Ideals
from meshwright.planner.solver.graphs.orders import orders

_WORD = 64


def of_bits(sets: Iterable[int], layers: int) -> Ideals:
    """Return sets of layers, each the bits of a number, as ideals: each behind its subsets."""
    rising = sorted(set(sets), key=lambda downset: (downset.bit_count(), downset))
    count = (layers + _WORD - 1) // _WORD
    full = (1 << _WORD) - 1
    words = [[downset >> (_WORD * at) & full for at in range(count)] for downset in rising]
    return Ideals(np.array(words, dtype=np.uint64), layers)


def along_orders(problem: GraphInstance) -> set[int]:
    """Return what the orders worth trying have first, as bits of numbers."""
    blocks = problem.blocks()
    block_bits = [_bits(block) for block in blocks]
    ideals = {0}
    for order in orders(problem, blocks).values():
        ideals.update(accumulate((block_bits[at] for at in order), int.__or__))
    return ideals


class Neighbourhood:
    """The ideals around those where a split is cut."""

    def __init__(self, problem: GraphInstance) -> None:
        self._blocks = problem.blocks()
        count = len(self._blocks)
        place = {layer: at for at, block in enumerate(self._blocks) for layer in block}
        self._bits_of = [_bits(block) for block in self._blocks]
        self._output_s = problem.sent_s(0, -1)
        self._readers = problem.readers()
        self._read_by = [_bits(outside) for outside in self._readers]
        self._reads: list[list[int]] = [[] for _ in self._readers]
        for before, outside in enumerate(self._readers):
            for after in outside:
                self._reads[after].append(before)
        self._needs, self._needed = [0] * count, [0] * count
        for before, outside in enumerate(self._readers):
            for after in outside:
                if place[before] != place[after]:
                    self._needs[place[after]] |= self._bits_of[place[before]]
                    self._needed[place[before]] |= self._bits_of[place[after]]

    def cuts(self, cuts: Sequence[int], number: int) -> set[int]:
        """Return up to `number` ideals around every cut, those with the cheapest cuts first."""
        return {downset for cut in cuts for downset in self._neighbours(cut, number)}

    def _neighbours(self, cut: int, number: int) -> Iterator[int]:
        waiting, seen = [(0.0, 0, cut)], {cut}
        for _ in range(number):
            if not waiting:
                return
            more_s, moves, downset = heapq.heappop(waiting)
            yield downset
            for at, block in enumerate(self._bits_of):
                if downset & block:
                    if downset & self._needed[at]:
                        continue
                    other = downset & ~block
                    step_s = -self._added_s(at, other)
                else:
                    if self._needs[at] & ~downset:
                        continue
                    other = downset | block
                    step_s = self._added_s(at, downset)
                if other not in seen:
                    seen.add(other)
                    heapq.heappush(waiting, (more_s + step_s, moves + 1, other))

    def _added_s(self, at: int, downset: int) -> float:
        """Seconds by which a cut is dearer with a block more, all of whose inputs it has."""
        after = downset | self._bits_of[at]
        added_s = 0.0
        read: set[int] = set()
        for layer in self._blocks[at]:
            if self._read_by[layer] & ~after:
                added_s += self._output_s[layer]
            read.update(self._reads[layer])
        for before in read - set(self._blocks[at]):
            if not self._read_by[before] & ~after:
                added_s -= self._output_s[before]
        return added_s


def cuts_of(solution: GraphSolution) -> list[int]:
    """Return the layers before every cut of a split, its ends included, as bits of numbers."""
    done = [0, *accumulate((1 << layer for layer in solution.order), int.__or__)]
    return [done[cut] for cut in solution.split.cuts]


def _bits(layers: Iterable[int]) -> int:
    return sum(1 << layer for layer in layers)
