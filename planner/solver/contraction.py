"""Groups of layers that stay on one stage, each taken as one node of the graph.

Edges between layers of one group vanish.  What is left must have no cycle: a layer that reads from
a group and is read by it would have to run before the group's stage, and behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Block = tuple[int, ...]


def blocks(readers: Sequence[Sequence[int]], colocated: Sequence[Block] = ()) -> list[Block]:
    """Return groups and layers of none, in an order in which they can run; the lowest first.

    Raises ValueError where groups and layers wait for each other.

    >>> blocks([[1], [2], []], [(0, 1)])
    [(0, 1), (2,)]
    """
    home = block_of(len(readers), colocated)
    reads: dict[Block, set[Block]] = {block: set() for block in home}
    read_by: dict[Block, set[Block]] = {block: set() for block in home}
    for before, outside in enumerate(readers):
        for after in outside:
            if home[before] != home[after]:
                reads[home[after]].add(home[before])
                read_by[home[before]].add(home[after])
    missing = {block: len(inside) for block, inside in reads.items()}
    ready = [block for block, count in missing.items() if not count]
    heapq.heapify(ready)
    blocks: list[Block] = []
    while ready:
        block = heapq.heappop(ready)
        blocks.append(block)
        for reader in read_by[block]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(blocks) < len(missing):
        waiting = sorted(block for block, count in missing.items() if count)
        raise ValueError(f"colocated: layers {waiting} wait for each other")
    return blocks


def block_of(layers: int, colocated: Sequence[Block]) -> list[Block]:
    """[layer] Its group, rising; itself alone where it has none."""
    home = [(layer,) for layer in range(layers)]  # type: list[Block]
    for group in colocated:
        for layer in group:
            home[layer] = tuple(sorted(group))
    return home
