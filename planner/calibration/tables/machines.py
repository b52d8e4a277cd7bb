"""The cluster of a row: an accelerator by any of its names, its memory, its node and network."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from meshwright.planner.calibration.tables.cells import word
from meshwright.planner.catalog import AcceleratorEntry, accelerators
from meshwright.planner.catalog.expressions import cluster_of
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import nearest
from meshwright.planner.errors import DocumentError

SAME_MEMORY = 0.15
"""A label and the catalogue's bytes mean the same memory within this: a label counts 1e9 or 2^30,
and the driver keeps some."""
USABLE = 0.99
"""Share of 2^30 times a label that the driver shows."""

USUAL_NETWORK_BYTES_PER_S = {"a100-sxm-40gb": 12.5e9, "a100-sxm-80gb": 12.5e9}
"""Bytes per second of one device in rows without a rate whose published clusters differ: those of
A100 have 25 GB/s (DGX, Azure), 12.5 GB/s, or 6.25 GB/s (AWS P4d, Jean Zay); this is the middle."""

_MAKERS = r"^(nvidia|amd|intel|google|aws|huawei|geforce|tesla|quadro|instinct|cloud)-"
_LINKS = {"nvswitch": "nvlink", "nvl": "nvlink", "infinity-fabric": "xgmi", "pcie-4": "pcie"}


def accelerator_of(text: str, memory_gb: float | None = None) -> str:
    """Return the catalogue's name of an accelerator; DocumentError with the nearest if none.

    Names lose their maker and everything after the model; where cards differ in memory alone,
    `memory_gb` distinguishes them.

    >>> accelerator_of("NVIDIA H100 80GB HBM3"), accelerator_of("A100", 40)
    ('h100-sxm-80gb', 'a100-sxm-40gb')
    """
    accelerator = _entry_by_name(text)
    if accelerator is None:
        hint = nearest(text, list(accelerators())) if text else "the cell is empty"
        raise DocumentError("", f"there is no accelerator '{text:.60}' in the catalogue; {hint}")
    if not memory_gb or _same_memory(accelerators()[accelerator], memory_gb):
        return accelerator
    siblings = [
        name
        for name, entry in accelerators().items()
        if _same_memory(entry, memory_gb) and _same_board(name, accelerator)
    ]
    return siblings[0] if siblings else accelerator


def _same_board(name: str, other: str) -> bool:
    """Return True if two names are of one chip, and not of boards that are linked differently."""
    words, others = name.split("-"), other.split("-")
    boards = [set(parts) & {"sxm", "pcie", "nvl"} for parts in (words, others)]
    return words[0] == others[0] != "rtx" and (boards[0] == boards[1] or not all(boards))


@lru_cache(maxsize=512)
def cluster_of_row(
    accelerator: str,
    devices: int,
    per_node: int,
    *,
    memory_gb: float | None,
    intra_link: str,
    network_bytes_per_s: float | None,
) -> tuple[ClusterSpec, tuple[str, ...]]:
    """Return the cluster that a row names, and what had to be assumed of it."""
    name = accelerator_of(accelerator, memory_gb)
    entry = accelerators()[name]
    assumed: list[str] = []
    reach = max((tier.devices for tier in entry.tiers), default=1)
    if per_node == entry.host_devices and reach > per_node:
        # A tray of a rack whose links join all trays: jobs take equally many devices of each rack.
        per_node = max(n for n in range(1, reach + 1) if devices % n == 0 and n <= devices)
        assumed.append(f"racks of which {per_node} devices are used")
    per_node = min(per_node, devices)
    if devices % per_node:
        per_node = next(n for n in range(per_node, 0, -1) if devices % n == 0)
        assumed.append(f"{per_node} devices on each node")
    if per_node > max(reach, 1):
        assumed.append(f"links that usually join {reach} {name} join {per_node}")
    unsaid = network_bytes_per_s is None and per_node < devices
    if unsaid and name in USUAL_NETWORK_BYTES_PER_S:
        network_bytes_per_s = USUAL_NETWORK_BYTES_PER_S[name]
        assumed.append(f"network of {network_bytes_per_s / 1e9:g} GB/s for each device")
    link = word(intra_link)
    cluster = cluster_of(
        name,
        nodes=devices // per_node,
        devices_per_node=per_node,
        intra_link=_LINKS.get(link, link) or None,
        network_bytes_per_s=network_bytes_per_s,
        widened=True,
    )
    if memory_gb and not _same_memory(entry, memory_gb):
        usable = int(USABLE * memory_gb * 2**30)
        assumed.append(f"{name} with {memory_gb:g} GB")
        (group,) = cluster.groups
        device = group.accelerator.model_copy(update={"memory_bytes": usable})
        group = group.model_copy(update={"accelerator": device})
        cluster = cluster.model_copy(update={"groups": (group,)})
    return cluster, tuple(assumed)


def _same_memory(entry: AcceleratorEntry, memory_gb: float) -> bool:
    return abs(entry.memory_bytes / (memory_gb * 2**30) - 1) <= SAME_MEMORY


def _entry_by_name(text: str) -> str | None:
    """Return the entry whose name is the text, or what is left of it piece by piece."""
    names = _names()
    label = _bare(text)
    while label:
        for tried in (label, label.replace("-", "")):
            if tried in names:
                return names[tried]
        label = label.rpartition("-")[0]
    return None


def _bare(text: str) -> str:
    """Return a name without its maker, the parts of a card's number apart."""
    label = word(text)
    while (bare := re.sub(_MAKERS, "", label)) != label:
        label = bare
    return re.sub(r"^(?:rtx-?)?([2-5]0[5-9]0)-?(ti|super)?\b", _card, label)


def _card(match: re.Match[str]) -> str:
    return "-".join(part for part in ("rtx", match[1], match[2]) if part)


@cache
def _names() -> dict[str, str]:
    names: dict[str, str] = {}
    for name, entry in accelerators().items():
        for alias in (name, *entry.aliases, *entry.driver_names):
            label = _bare(alias)
            names.setdefault(label, name)
            names.setdefault(label.replace("-", ""), name)
    return names
