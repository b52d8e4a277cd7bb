"""Memory of hosts: what the nodes of an accelerator have, with the range that they span.

A node type states its own.  Where an accelerator is named alone, the catalogue's nodes with it
represent its node; where there are none, a share of the devices' memory does.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.catalog import AcceleratorEntry, nodes_of

USUAL_SHARE = 2.0
"""Memory of a host over that of its devices, where no node of the catalogue has the accelerator."""
LEAST_SHARE, MOST_SHARE = 0.5, 5.3
"""The range of the same: a workstation with 128 GB beside four cards of 48 GB has 0.7, and the
nodes of the catalogue have 1.3 to 5.3."""


class HostCapacity(NamedTuple):
    """Bytes of a node's host memory, and what such nodes have at least and at most."""

    usual_bytes: int
    least_bytes: int
    most_bytes: int


def host_capacity(accelerator: str, entry: AcceleratorEntry, devices: int) -> HostCapacity:
    """Return the usual host capacity of a node with this number of an accelerator's devices.

    >>> from meshwright.planner.catalog import accelerators
    >>> entry = accelerators()["h100-sxm-80gb"]
    >>> [round(size / 2**30) for size in host_capacity("h100-sxm-80gb", entry, 8)]
    [2048, 1872, 2048]
    """
    each = [
        (node.host_memory_bytes / node.devices_per_node, node.devices_per_node)
        for node in nodes_of(accelerator)
        if node.host_memory_bytes
    ]
    shares = [size for size, _ in each]
    if not shares:
        usual, least, most = (
            share * entry.memory_bytes for share in (USUAL_SHARE, LEAST_SHARE, MOST_SHARE)
        )
    else:
        whole = (size for size, count in each if count == entry.devices_per_node)
        usual, least, most = next(whole, shares[0]), min(shares), max(shares)
    return HostCapacity(round(devices * usual), round(devices * least), round(devices * most))
