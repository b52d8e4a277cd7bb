"""Memory of hosts: which pipeline ranks have devices on one node, and what they may fill there.

Ranks are numbered with the innermost axis of a layout first, and nodes take them in that order, so
a node has devices of one pipeline rank or of several.  Nodes with the same devices are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.planner.costs.collectives import group_steps
from meshwright.planner.documents.prediction import Assumption
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.solver.side_constraints import HostMemory

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.plan import Layout, Offload

PINNED_BY_TORCH = 0.5
"""Of a host's memory, where parameters are there: FSDP has torch pin them, in powers of two."""


def usable_share(framework: Framework, offload: Offload) -> float:
    """Return how much of a host's memory may be filled."""
    share = framework.offload.host_share
    return min(share, PINNED_BY_TORCH) if offload == "parameters" else share


def hosts(cluster: ClusterSpec, layout: Layout, share: float) -> tuple[HostMemory, ...]:
    """Return one host for each kind of node, of whose memory a `share` may be filled.

    None if the cluster does not say its memory.
    """
    memory = cluster.groups[0].host_memory_bytes
    if memory is None or len(cluster.groups) > 1:
        return ()
    return tuple(
        HostMemory(capacity_bytes=share * memory, ranks=ranks)
        for ranks in ranks_on_nodes(cluster, layout)
    )


def host_room_bytes(group: DeviceGroup, share: float) -> float | None:
    """Return an even part of what may be filled of a host's memory, None if nobody says.

    Where groups differ a stage's devices keep it: then hosts have room for any stages.
    """
    memory = group.host_memory_bytes
    return None if memory is None else share * memory / group.devices_per_node


def ranks_on_nodes(cluster: ClusterSpec, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return for each kind of node how many devices of each pipeline rank it has."""
    size = min(cluster.groups[0].devices_per_node, layout.devices)
    steps = group_steps(layout, ("pipeline",))
    return _kinds(size, layout.devices, *(steps[0] if steps else (1, layout.devices)))


@lru_cache(maxsize=1 << 12)
def _kinds(size: int, devices: int, ranks: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Return the kinds of nodes of `size` devices; neighbours on the axis are `stride` apart."""
    if stride % size == 0:
        return tuple(tuple(size * (r == rank) for r in range(ranks)) for rank in range(ranks))
    # What stands on nodes repeats with ranks x stride.
    period = min(math.lcm(size, ranks * stride), devices)
    shapes: dict[tuple[int, ...], None] = {}
    for first in range(0, period, size):
        numbers = Counter(
            device // stride % ranks for device in range(first, min(first + size, devices))
        )
        shapes[tuple(numbers[rank] for rank in range(ranks))] = None
    return tuple(shapes)


def overfull(
    cluster: ClusterSpec, layout: Layout, rank_bytes: Sequence[float], share: float
) -> tuple[float, float] | None:
    """Return bytes and room of the fullest host if it has too little; `rank_bytes` by rank."""
    used = [
        (sum(n * size for n, size in zip(host.ranks, rank_bytes, strict=True)), host.capacity_bytes)
        for host in hosts(cluster, layout, share)
    ]
    most = max(used, default=(0.0, 0.0))
    return most if most[0] > most[1] * (1 + ROUNDING) else None


def unknown(
    cluster: ClusterSpec, layout: Layout, rank_bytes: Sequence[float]
) -> Iterator[Assumption]:
    """Yield that hosts are taken to have memory enough, where it matters and nobody says."""
    if not any(rank_bytes) or cluster.groups[0].host_memory_bytes is not None:
        return
    most = max(
        sum(n * size for n, size in zip(ranks, rank_bytes, strict=True))
        for ranks in ranks_on_nodes(cluster, layout)
    )
    yield Assumption(
        what=f"each host has room for the {bytes_text(most)} that its devices put there",
        provenance="assumed",
        source="the cluster does not say groups[0].host_memory_bytes",
    )
