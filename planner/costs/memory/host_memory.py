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
from meshwright.planner.documents.prediction import Assumption, HostUse
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.solver.side_constraints import HostMemory

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.plan import Layout, Offload

PINNED_BY_TORCH = 0.5
"""Share of a host's memory that can be filled where parameters are there: FSDP has torch pin them,
in powers of two."""


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


def filled_host(group: DeviceGroup, used_bytes: float, share: float) -> HostUse:
    """Return what a node of a group holds beside what it has, of which a `share` may be filled."""
    memory, span = group.host_memory_bytes, group.host_memory_range_bytes
    is_assumed = memory is not None and span is not None and span[0] <= memory <= span[1]
    return HostUse(
        used_bytes=used_bytes,
        room_bytes=None if memory is None else share * memory,
        memory_bytes=memory,
        range_bytes=span if is_assumed else None,
    )


def fullest_host(
    cluster: ClusterSpec, layout: Layout, rank_bytes: Sequence[float], share: float
) -> HostUse:
    """Return what the fullest of hosts that are alike holds; `rank_bytes` by pipeline rank."""
    most = max(
        sum(n * size for n, size in zip(ranks, rank_bytes, strict=True))
        for ranks in ranks_on_nodes(cluster, layout)
    )
    return filled_host(cluster.groups[0], most, share)


def room_odds(host: HostUse) -> float:
    """Return the probability that a node has room: nodes lie evenly on a logarithmic scale.

    Where its memory is known, and where the usual memory has room, that is certain or excluded.

    >>> used, usual = {"used_bytes": 64e9}, {"room_bytes": 32e9, "memory_bytes": 64e9}
    >>> room_odds(HostUse(**used, **usual)), room_odds(HostUse(**used))
    (0.0, 1.0)
    >>> round(room_odds(HostUse(**used, **usual, range_bytes=(32e9, 256e9))), 2)
    0.33
    """
    if host.fits:
        return 1.0
    if host.range_bytes is None or not host.room_bytes or not host.memory_bytes:
        return 0.0
    needs = host.used_bytes / host.room_bytes * host.memory_bytes
    least, most = (max(1.0, end) for end in host.range_bytes)
    if needs >= most:
        return 0.0
    return min(1.0, math.log(most / needs) / math.log(most / least))


def assumed_room(host: HostUse | None) -> Iterator[Assumption]:
    """Yield that a host is taken to have so much memory, where it matters and nobody says."""
    if host is None:
        return
    if host.memory_bytes is None:
        yield Assumption(
            what=f"each host has room for the {bytes_text(host.used_bytes)} that its devices put "
            "there",
            provenance="assumed",
            source="the cluster does not say groups[0].host_memory_bytes",
        )
    elif host.range_bytes is not None:
        low, high = map(bytes_text, host.range_bytes)
        yield Assumption(
            what=f"each host has {bytes_text(host.memory_bytes)} of memory ({low} to {high})",
            provenance="assumed",
            source="nodes of the catalogue; host_memory=SIZE after the cluster says what it has",
        )
