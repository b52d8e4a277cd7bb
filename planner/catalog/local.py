"""This machine as a cluster: its NVIDIA devices, or its processor cores as ranks.

Devices are looked up in the catalogue by the name that their driver gives.  Cores have the figures
that were measured of one thread and cached (planner.catalog.machine_figures), so that all commands
and all ranks plan for the same cluster.

Links between the devices of one host, as `nvidia-smi topo -m` prints them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from meshwright.planner.catalog import AcceleratorEntry, accelerators, pcie
from meshwright.planner.catalog.machine_figures import MachineFigures, machine_figures
from meshwright.planner.documents.cluster import (
    Accelerator,
    ClusterSpec,
    DeviceCurve,
    DeviceGroup,
    HostSpeed,
    LinkTier,
)
from meshwright.planner.errors import DocumentError

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
Links = Mapping[tuple[int, int], str]
"""Link between two devices, by their numbers: `NV18` (18 NVLinks), or the part of the host between
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
    """Return the number of neighbours in the order of `devices` that NVLink joins; None if unknown.

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


MIB = 2**20
CUDA_SHARE, LEAST_CUDA_SHARE = 0.993, 0.98
"""Share of the driver's memory that CUDA reports as total: the median of nine boards (`CUDA_SHARE`
in sources.yaml), and a value below the least of them."""
MOST_CORES = 8
"""Number of processor ranks that are used by default."""
ATTENTION_FRACTION = 0.5
"""Rate of attention over that of the measured matrix product; attention on a processor is not
measured here."""
SPREAD = 0.3
"""Relative spread of measurements of a tenth of a second on a machine that runs other programs
too."""


class LocalDevice(NamedTuple):
    """One line of `nvidia-smi`."""

    name: str
    memory_bytes: int
    identifier: str = ""
    """Identifier by which CUDA_VISIBLE_DEVICES may name the device."""
    number: int | None = None
    """Number in the listings of `nvidia-smi`; None for a part of a device."""

    @property
    def kind(self) -> tuple[str, int]:
        """Name and memory in bytes, which are equal for devices that are alike."""
        return self.name, self.memory_bytes


def cluster(ranks: int | None = None) -> ClusterSpec:
    """Return this machine as a cluster of `ranks` devices: all there are, or up to 8 cores."""
    devices = [usable(device) for device in nvidia_devices()]
    if devices:
        if ranks is not None and ranks > len(devices):
            raise DocumentError(
                "", f"local:{ranks} asks for {ranks} devices; nvidia-smi shows {len(devices)} here"
            )
        return of_devices(devices[:ranks], links=nvidia_links())
    cores = len(os.sched_getaffinity(0))
    return of_cores(machine_figures(), cores=cores, ranks=ranks or min(cores, MOST_CORES))


def of_cores(core: MachineFigures, *, cores: int, ranks: int) -> ClusterSpec:
    """Return `ranks` equal shares of a processor with `cores` cores.

    Ranks share the memory, and the cores too where there are more ranks than cores.
    """
    share = min(1.0, cores / ranks)
    measured = f"measured {core.date}"
    source = f"one thread of this machine, a tenth of a second: numpy product and copy, {measured}"
    curve = DeviceCurve(
        launch_s=2e-6,
        matmul=1.0,
        attention_forward=ATTENTION_FRACTION,
        attention_backward=ATTENTION_FRACTION,
        memory=1.0,
        spread=SPREAD,
        provenance="measured",
        source=f"{source}; attention is a default",
    )
    accelerator = Accelerator(
        name="cpu",
        kind="cpu",
        memory_bytes=core.memory_bytes // ranks,
        peak_flops={"fp32": core.flops * share},
        memory_bytes_per_s=core.bytes_per_s * share,
        curve=curve,
        sources={
            "memory_bytes": f"memory that this machine had free, divided by the ranks, {measured}",
            "peak_flops": source,
            "memory_bytes_per_s": source,
        },
    )
    tier = LinkTier(
        name="memory",
        devices=ranks,
        latency_s=core.link_latency_s,
        bytes_per_s=core.link_bytes_per_s * share,
        provenance="measured",
        source=f"loopback socket between two threads of this machine, {measured}",
    )
    return ClusterSpec(
        name=f"local:{ranks}",
        groups=(
            DeviceGroup(
                name="cpu",
                accelerator=accelerator,
                nodes=1,
                devices_per_node=ranks,
                host_memory_bytes=core.memory_bytes,
                host_speed=host_speed(core),
            ),
        ),
        tiers=(tier,) if ranks > 1 else (),
    )


def host_speed(core: MachineFigures) -> HostSpeed:
    """Return how fast a thread of this machine runs Python and starts operations."""
    return HostSpeed(
        call_s=core.call_s,
        launch_s=core.launch_s,
        provenance="measured",
        source=f"one thread of this machine, calls of a module and of numpy, measured {core.date}",
    )


def usable(device: LocalDevice) -> LocalDevice:
    """Return a device with the memory that CUDA reports, of which the driver shows more.

    >>> round(usable(LocalDevice("NVIDIA H100 80GB HBM3", 85520809984)).memory_bytes / 2**30, 2)
    79.11
    >>> usable(LocalDevice("a new board", 1000)).memory_bytes
    993
    """
    _, entry, is_catalogued = _entry_of(device)
    total = round(CUDA_SHARE * device.memory_bytes)
    if is_catalogued and LEAST_CUDA_SHARE <= entry.memory_bytes / device.memory_bytes <= 1:
        total = entry.memory_bytes
    return device._replace(memory_bytes=total)


def nvidia_devices(environment: Mapping[str, str] = os.environ) -> tuple[LocalDevice, ...]:
    """Return the devices that `nvidia-smi` shows and CUDA_VISIBLE_DEVICES lets through."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, "--query-gpu=name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        rows, names = (
            subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
            for asked in (query, [command, "-L"])
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(parse_devices(rows), environment.get("CUDA_VISIBLE_DEVICES"), instances(names))


def parse_devices(text: str) -> tuple[LocalDevice, ...]:
    """Read the lines of `nvidia-smi --query-gpu=name,memory.total,uuid` (in MiB).

    >>> parse_devices("NVIDIA H100 80GB HBM3, 81559, GPU-5c8")
    (LocalDevice(name='NVIDIA H100 80GB HBM3', memory_bytes=85520809984, identifier='GPU-5c8', \
number=0),)
    """
    devices: list[LocalDevice] = []
    for number, line in enumerate(text.splitlines()):
        name, memory, identifier = (part.strip() for part in f",,{line}".rsplit(",", 2))
        name = name.removeprefix(",,")
        if name and memory.isdigit():
            devices.append(LocalDevice(name, int(memory) * MIB, identifier, number))
    return tuple(devices)


def instances(text: str) -> tuple[LocalDevice, ...]:
    """Read the parts of devices in the listing of `nvidia-smi -L`.

    >>> (part,) = instances(
    ...     "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5c8)\\n"
    ...     "  MIG 1g.10gb     Device  0: (UUID: MIG-9f1)"
    ... )
    >>> part.name, part.memory_bytes, part.identifier
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', 10737418240, 'MIG-9f1')
    """
    groups = []
    name = ""
    for line in text.splitlines():
        if whole := re.match(r"GPU \d+: (.*) \(UUID", line):
            name = whole[1]
        elif part := re.match(r"\s+MIG (\S+\.(\d+)gb\S*)\s.*UUID: (MIG-[^)]+)", line):
            groups.append(LocalDevice(f"{name} MIG {part[1]}", int(part[2]) * 2**30, part[3]))
    return tuple(groups)


def visible(
    devices: Sequence[LocalDevice], chosen: str | None, parts: Sequence[LocalDevice] = ()
) -> tuple[LocalDevice, ...]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names, in its order.

    An entry is an index in the order of the bus, or the beginning of one device's identifier
    (GPU-..., MIG-...).  As in CUDA, the first entry that is neither ends the list.
    """
    if chosen is None:
        return tuple(devices)
    result: list[LocalDevice] = []
    for entry in (part.strip() for part in chosen.split(",")):
        named = [
            device
            for device in (*devices, *parts)
            if entry.startswith(("GPU-", "MIG-")) and device.identifier.startswith(entry)
        ]
        if entry.isdigit():
            named = list(devices[int(entry) : int(entry) + 1])
        if len(named) != 1:
            break
        result += named
    return tuple(result)


def nvidia_links() -> Links:
    """Return the links between this machine's devices by `nvidia-smi topo -m`; {} if none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    try:
        asked = [command, "topo", "-m"]
        return links(
            subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
        )
    except (OSError, subprocess.SubprocessError):
        return {}


def of_devices(devices: Sequence[LocalDevice], *, links: Links | None = None) -> ClusterSpec:
    """Return NVIDIA devices of one host as a cluster, a group for each run of equal ones.

    Without `links` they are joined as the catalogue's usual node is.
    """
    core = machine_figures()
    groups: list[DeviceGroup] = []
    entries: list[AcceleratorEntry] = []
    for _, run in groupby(devices, key=lambda device: device.kind):
        device, *others = run
        count = 1 + len(others)
        name, entry, catalogued = _entry_of(device)
        entries.append(entry)
        accelerator = entry.accelerator(name if catalogued else device.name)
        if not catalogued:
            source = f"figures of {name}, the nearest in memory: {device.name} is not catalogued"
            curve = entry.curve.model_copy(
                update={"provenance": "quoted", "spread": 1.0, "source": source}
            )
            accelerator = accelerator.model_copy(
                update={"curve": curve, "tdp_w": None, "sources": {"peak_flops": source}}
            )
        groups.append(
            DeviceGroup(
                name=f"{accelerator.name}-{len(groups)}" if groups else accelerator.name,
                accelerator=accelerator.model_copy(update={"memory_bytes": device.memory_bytes}),
                nodes=1,
                devices_per_node=count,
                host_memory_bytes=core.memory_bytes,
                host_speed=host_speed(core),
                host_link_bytes_per_s=entry.host_link_bytes_per_s,
            )
        )
    return ClusterSpec(
        name=f"local:{len(devices)}",
        groups=tuple(groups),
        tiers=_tiers(entries, devices, links or {}),
    )


def _tiers(
    entries: Sequence[AcceleratorEntry], devices: Sequence[LocalDevice], links: Links
) -> tuple[LinkTier, ...]:
    """Return the links of the host, each as the slowest of its kind among the devices.

    Where the driver reports their links: NVLink for as many neighbours as it joins, and the host's
    link for the others.  Where it does not: the widest link of the catalogue's entries.
    """
    count = len(devices)
    if count == 1:
        return ()
    numbers = [device.number for device in devices if device.number is not None]
    joined = joined_by_nvlink(links, numbers) if len(numbers) == count else None
    fast = [
        tier
        for entry in entries
        for tier in (*entry.tiers, entry.bridge)
        if tier is not None and tier.name.startswith("nvl")
    ]
    slow = [tier for entry in entries for tier in pcie(entry)]
    widest = [entry.tiers[-1] for entry in entries if entry.tiers]
    if joined is None or (joined > 1 and not fast) or (joined < count and not slow):
        return (_slowest(widest or [accelerators()["rtx-4090"].tiers[-1]], count),)
    return (
        *((_slowest(fast, joined),) if joined > 1 else ()),
        *((_slowest(slow, count),) if joined < count else ()),
    )


def _slowest(tiers: Sequence[LinkTier], devices: int) -> LinkTier:
    return min(tiers, key=lambda tier: tier.bytes_per_s).model_copy(update={"devices": devices})


def _entry_of(device: LocalDevice) -> tuple[str, AcceleratorEntry, bool]:
    """Return the catalogue's name and entry for a device, and whether it is that device."""
    entries = [(name, e) for name, e in accelerators().items() if e.vendor == "NVIDIA"]
    for name, entry in entries:
        if device.name in entry.driver_names:
            return name, entry, True
    name, entry = min(entries, key=lambda item: abs(item[1].memory_bytes - device.memory_bytes))
    return name, entry, False
