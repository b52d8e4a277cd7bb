"""How the devices of one host are joined, as `nvidia-smi topo -m` prints it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
Links = Mapping[tuple[int, int], str]
"""What joins two devices, by their numbers: `NV18` (18 NVLinks), or what of the host lies between
them: `PIX`, `PXB`, `PHB`, `NODE`, `SYS`."""


def links(text: str) -> Links:
    """Read the matrix; network cards and affinities are left out.

    >>> links("        GPU0    GPU1    CPU Affinity\\nGPU0     X      NV12    0-31\\n"
    ...       "GPU1    NV12     X      32-63")
    {(0, 1): 'NV12', (1, 0): 'NV12'}
    """
    links: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in _ESCAPES.sub("", text).splitlines():
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        if not columns:
            columns = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
            continue
        row = int(words[0][3:])
        for column, word in zip(columns, words[1:], strict=False):
            if column != row:
                links[row, column] = word
    return links


def joined_by_nvlink(links: Links, devices: Sequence[int]) -> int | None:
    """Return how many neighbours in the order of `devices` NVLink joins; None if unknown.

    1 where none are joined.  Joined are devices that NVLink leads between, through others too: the
    mesh of older machines leaves some pairs without a link of their own.  Islands of several sizes,
    or whose devices are no neighbours in this order, count as none: ranks that are neighbours could
    not all use them.
    """
    pairs = [(a, b) for a in devices for b in devices if a != b]
    if not devices or not all(pair in links for pair in pairs):
        return None
    import networkx as nx  # noqa: PLC0415 - loads slowly, and most commands need none of it

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(devices)
    graph.add_edges_from(pair for pair in pairs if links[pair].startswith("NV"))
    size = len(nx.node_connected_component(graph, devices[0]))
    rows = [devices[at : at + size] for at in range(0, len(devices), size)]
    islands = all(nx.node_connected_component(graph, row[0]) == set(row) for row in rows)
    return size if islands else 1
