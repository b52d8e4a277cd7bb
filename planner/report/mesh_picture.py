"""The ranks of a mesh on the nodes of a machine, as a picture (SVG), and the links of each axis.

Ranks are numbered along the machine: rank 0 is the first device of the first node.  Machines whose
device groups differ are not drawn, since their stages may be in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from meshwright.planner.documents.cluster import ClusterSpec, LinkTier
from meshwright.planner.documents.plan import Layout

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
"""Colours of pipeline ranks, readable on light and on dark."""
SHORT = {
    "tensor": "tp",
    "context": "cp",
    "data_shard": "dp",
    "data_replicate": "copy",
    "pipeline": "pp",
}
ACROSS, CELL, HIGH, LEFT = 8, 82, 38, 62
MOST_ROWS = 9
"""Rows of devices in the picture; of more nodes, the last follows the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a mesh that has several ranks."""

    name: str
    ranks: int
    stride: int
    """Distance in ranks between neighbours on the axis."""
    link: str
    """The slowest link that the axis crosses."""


def axes_of(layout: Layout, cluster: ClusterSpec | None = None) -> list[Axis]:
    """Return the axes of a mesh that have several ranks, innermost first.

    >>> [(a.name, a.ranks, a.stride) for a in axes_of(Layout(tensor=4, data_shard=2, pipeline=2))]
    [('tensor', 4, 1), ('data_shard', 2, 4), ('pipeline', 2, 8)]
    """
    rows: list[Axis] = []
    stride = 1
    for name in layout.order:
        ranks = getattr(layout, name)
        if ranks > 1:
            link = "" if cluster is None else _link_text(cluster, stride * (ranks - 1) + 1, stride)
            rows.append(Axis(name=name, ranks=ranks, stride=stride, link=link))
        stride *= ranks
    return rows


def _link_text(cluster: ClusterSpec, reach: int, stride: int) -> str:
    """Return the tier that joins the first and the last rank of an axis."""
    tiers: list[LinkTier] = [tier for tier in cluster.tiers if tier.devices >= reach]
    if not tiers or len(cluster.groups) > 1:
        return ""
    return f"{tiers[0].name}, {tiers[0].bytes_per_s / 1e9:.3g} GB/s"


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Return a rank's coordinate on each axis with several ranks.

    >>> coordinates(Layout(tensor=4, data_shard=2, pipeline=2), 13)
    {'tensor': 1, 'data_shard': 1, 'pipeline': 1}
    """
    return {axis.name: rank // axis.stride % axis.ranks for axis in axes_of(layout)}


def mesh_picture(layout: Layout, cluster: ClusterSpec) -> str:
    """Return nodes with their devices, each with its place on every axis; empty if not drawn."""
    if len(cluster.groups) > 1 or cluster.devices == 1:
        return ""
    each = cluster.groups[0].devices_per_node
    rows = -(-each // ACROSS)
    nodes = list(range(cluster.groups[0].nodes))
    most = max(1, MOST_ROWS // rows)
    shown = nodes if len(nodes) <= most else [*nodes[: max(1, most - 1)], nodes[-1]]
    body, top = [], 4
    for before, node in zip([None, *shown], shown, strict=False):
        if before is not None and node > before + 1:
            hidden = f"{node - before - 1} more nodes" if node > before + 2 else "1 more node"
            body.append(f'<text x="{LEFT}" y="{top + 13}">… {hidden} …</text>')
            top += 22
        body.append(
            f'<text x="0" y="{top + HIGH // 2 + 5}">node {node}</text>'
            f'<rect x="{LEFT - 4}" y="{top - 2}" width="{CELL * min(each, ACROSS) + 4}" '
            f'height="{HIGH * rows + 4}" rx="6" fill="none" stroke="currentColor" '
            'stroke-opacity="0.4"/>'
        )
        for place in range(each):
            x, y = LEFT + CELL * (place % ACROSS), top + HIGH * (place // ACROSS)
            body.append(_cell(layout, node * each + place, node, x, y))
        top += HIGH * rows + 10
    width = LEFT + CELL * min(each, ACROSS) + 4
    key, high = _key(layout, top)
    title = f"{layout.devices} ranks on {len(nodes)} nodes of {each} devices"
    return (
        f'<svg viewBox="0 0 {width} {top + high}" width="{width}" role="img" '
        f'aria-label="{escape(title)}" font-size="12" fill="currentColor">'
        f"{''.join(body)}{key}</svg>"
    )


def _cell(layout: Layout, rank: int, node: int, x: int, y: int) -> str:
    if rank >= layout.devices:
        return (
            f'<rect x="{x}" y="{y + 1}" width="{CELL - 4}" height="{HIGH - 2}" rx="4" '
            'fill="none" stroke="currentColor" stroke-opacity="0.3" stroke-dasharray="3 3"/>'
            f'<text x="{x + CELL // 2 - 2}" y="{y + 24}" text-anchor="middle">idle</text>'
        )
    at = coordinates(layout, rank)
    colour = COLOURS[at.get("pipeline", 0) % len(COLOURS)]
    words = " ".join(f"{SHORT[name]}{place}" for name, place in at.items() if name != "pipeline")
    place_text = ", ".join(f"{name} {place}" for name, place in at.items()) or "alone"
    return (
        f"<g><title>rank {rank} on node {node}: {place_text}</title>"
        f'<rect x="{x}" y="{y + 1}" width="{CELL - 4}" height="{HIGH - 2}" rx="4" '
        f'fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>'
        f'<text x="{x + CELL // 2 - 2}" y="{y + 16}" text-anchor="middle">{rank}</text>'
        f'<text x="{x + CELL // 2 - 2}" y="{y + 31}" text-anchor="middle" font-size="11">{words}'
        "</text></g>"
    )


def _key(layout: Layout, top: int) -> tuple[str, int]:
    """Return whose colour is whose, and its height."""
    if layout.pipeline == 1:
        return "", 0
    shown = range(min(layout.pipeline, len(COLOURS)))
    again = " and every eighth after it" if layout.pipeline > len(COLOURS) else ""
    body = "".join(
        f'<rect x="{LEFT + 60 * place}" y="{top + 4}" width="12" height="12" '
        f'fill="{COLOURS[place]}"/>'
        f'<text x="{LEFT + 60 * place + 17}" y="{top + 15}">pp{place}</text>'
        for place in shown
    )
    rest = f'<text x="{LEFT + 60 * len(shown)}" y="{top + 15}">{again}</text>' if again else ""
    return body + rest, 24
