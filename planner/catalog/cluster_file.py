"""A cluster of the catalogue as a file to change: each figure under a comment that names it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from meshwright.planner.catalog import accelerators
from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup
from meshwright.planner.documents.document import schema_line
from meshwright.planner.documents.units import bytes_text

HEAD = """\
# The cluster '{name}' as the catalogue has it.  Change what is different on yours, then
#   meshwright plan MODEL --cluster THIS-FILE
# Rates count one device and one direction: a sheet's 400 Gb/s are 50e9, 900 GB/s of NVLink 450e9.
"""
COMMENTS = {
    "accelerator": "a name of 'meshwright catalog accelerators', or all of its figures",
    "host_memory_bytes": "of one node",
    "host_memory_range_bytes": "what such nodes have; delete this line where you know yours",
    "host_link_bytes_per_s": "between a device and its host: {rate}",
    "host_memory_bytes_per_s": "of one node: {rate}",
    "tiers": "links, the fastest first; each joins so many devices",
    "latency_s": "of one round of a ring",
    "bytes_per_s": "{rate}",
    "peer_bytes_per_s": "to one peer, where there is no switch: {rate}",
    "fractions": "share of the rate that each collective reaches",
    "narrow": "the same among few of its devices",
    "oversubscription": "rate of all devices' own links over that of what joins them",
    "price": "of one device and hour, with its date",
}
LINE = re.compile(r"(?P<indent>\s*)(?P<item>- )?(?P<key>\w+):(?: (?P<value>\S+))?.*")


def cluster_text(cluster: ClusterSpec) -> str:
    """Return a cluster as YAML with comments, which is read back as the same cluster."""
    data: dict[str, Any] = {"format": cluster.format, **_figures(cluster)}
    data["groups"] = [_group(group) for group in cluster.groups]
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=False, width=100)
    lines = [schema_line("cluster.json").rstrip("\n"), HEAD.format(name=cluster.name).rstrip("\n")]
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        comment = COMMENTS.get(match["key"]) if match and not match["item"] else None
        if match and comment:
            rate = match["value"] if "{rate}" in comment else None
            shown = comment.format(rate=f"{float(rate) / 1e9:g} GB/s") if rate else comment
            if match["key"] == "host_memory_bytes" and match["value"]:
                shown = f"{shown}: {bytes_text(float(match['value']))}"
            lines.append(f"{match['indent']}# {shown}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _figures(part: ClusterSpec) -> dict[str, Any]:
    return part.model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def _group(group: DeviceGroup) -> dict[str, Any]:
    figures = group.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    entry = accelerators().get(group.accelerator.name)
    if entry is not None and entry.accelerator(group.accelerator.name) == group.accelerator:
        figures["accelerator"] = group.accelerator.name
    return figures
