"""Clusters as they could be: one figure of a cluster changed, everything else unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from meshwright.planner.documents.cluster import Accelerator, ClusterSpec, DeviceGroup, LinkTier
from meshwright.planner.documents.document import first_error
from meshwright.planner.errors import DocumentError

if TYPE_CHECKING:
    from meshwright.planner.whatif.study import ChangeName

WORDS: dict[ChangeName, str] = {
    "memory": "device memory",
    "memory_bandwidth": "memory bandwidth",
    "compute": "compute",
    "node_links": "links inside a node",
    "network": "network between nodes",
    "domain": "scale-up domain",
    "host_memory": "host memory",
    "devices": "devices",
}


def changed_cluster(cluster: ClusterSpec, change: ChangeName, factor: float) -> ClusterSpec | None:
    """Return the cluster with one figure multiplied; None if it has nothing of the kind.

    `domain` joins that number of nodes by the links inside a node; `devices` changes the number of
    nodes, rounded, or of the devices where there is one node.
    """
    if change == "devices":
        return _resize(cluster, factor)
    if change == "domain":
        return _wider_domain(cluster, factor)
    if change in ("node_links", "network"):
        return _with_links(cluster, factor, inside=change == "node_links")
    if change == "host_memory":
        if any(group.host_memory_bytes is None for group in cluster.groups):
            return None
        return _with_groups(
            cluster,
            [
                group.model_copy(
                    update={
                        "host_memory_bytes": round((group.host_memory_bytes or 0) * factor),
                        "host_memory_range_bytes": None,
                    }
                )
                for group in cluster.groups
            ],
        )
    return _with_groups(
        cluster,
        [
            group.model_copy(
                update={"accelerator": _accelerator(group.accelerator, change, factor)}
            )
            for group in cluster.groups
        ],
    )


def _accelerator(device: Accelerator, change: ChangeName, factor: float) -> Accelerator:
    if change == "memory":
        return device.model_copy(update={"memory_bytes": round(device.memory_bytes * factor)})
    if change == "memory_bandwidth":
        return device.model_copy(update={"memory_bytes_per_s": device.memory_bytes_per_s * factor})
    peaks = {precision: peak * factor for precision, peak in device.peak_flops.items()}
    return device.model_copy(update={"peak_flops": peaks})


def _with_groups(cluster: ClusterSpec, groups: list[DeviceGroup]) -> ClusterSpec:
    return cluster.model_copy(update={"groups": tuple(groups)})


def _with_links(cluster: ClusterSpec, factor: float, *, inside: bool) -> ClusterSpec | None:
    """Return the cluster with the tiers inside or between nodes faster."""
    per_node = max(group.devices_per_node for group in cluster.groups)
    chosen = [tier for tier in cluster.tiers if (tier.devices <= per_node) == inside]
    if not chosen:
        return None
    return cluster.model_copy(
        update={
            "tiers": tuple(
                _faster(tier, factor) if tier in chosen else tier for tier in cluster.tiers
            )
        }
    )


def _faster(tier: LinkTier, factor: float) -> LinkTier:
    peer = tier.peer_bytes_per_s
    return tier.model_copy(
        update={
            "bytes_per_s": tier.bytes_per_s * factor,
            "peer_bytes_per_s": None if peer is None else peer * factor,
        }
    )


def _wider_domain(cluster: ClusterSpec, factor: float) -> ClusterSpec | None:
    if len(cluster.groups) > 1:
        return None
    [group] = cluster.groups
    joined = round(group.devices_per_node * factor)
    if joined < 1 or joined == group.devices_per_node or group.devices % joined:
        return None
    tiers = []
    for tier in cluster.tiers:
        inside = tier.devices <= group.devices_per_node
        devices = round(tier.devices * factor) if inside else tier.devices
        if inside or devices > joined:
            tiers.append(tier.model_copy(update={"devices": devices}))
    host = group.host_memory_bytes
    return cluster.model_copy(
        update={
            "groups": (
                group.model_copy(
                    update={
                        "devices_per_node": joined,
                        "nodes": group.devices // joined,
                        "host_memory_bytes": None if host is None else round(host * factor),
                        "host_memory_range_bytes": None,
                    }
                ),
            ),
            "tiers": tuple(tiers),
        }
    )


def _resize(cluster: ClusterSpec, factor: float) -> ClusterSpec | None:
    if len(cluster.groups) > 1:
        return None
    [group] = cluster.groups
    if group.nodes > 1:
        nodes = round(group.nodes * factor)
        size = {"nodes": nodes}
        was, devices = group.nodes, nodes * group.devices_per_node
        now = nodes
    else:
        now = round(group.devices_per_node * factor)
        size = {"devices_per_node": now}
        was, devices = group.devices_per_node, now
    if now < 1 or now == was:
        return None
    tiers = [
        tier.model_copy(update={"devices": devices}) if tier.devices == group.devices else tier
        for tier in cluster.tiers
        if tier.devices <= group.devices
    ]
    kept = [tier for tier in tiers if tier.devices <= devices]
    try:
        return ClusterSpec(
            name=cluster.name,
            groups=(group.model_copy(update=size),),
            tiers=tuple(kept if devices > 1 else ()),
            price=cluster.price,
        )
    except ValidationError as error:
        raise DocumentError("change", f"devices x {factor:g}: {first_error(error)}") from error
