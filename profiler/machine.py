"""Description of a node by its system: processor, memory, interfaces, devices, their links.

Read from /proc, /sys, ioctls and `nvidia-smi`; what is not there is left out.  The disk is the one
thing that is tried: a file of what a checkpoint's shard may be, written and read back.  Nothing
here imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup, LinkTier
from meshwright.planner.documents.profile import (
    CollectiveCurve,
    DeviceLink,
    Interface,
    MeasuredDevice,
    MeasuredNode,
    NodePair,
    NumaNode,
)
from meshwright.runtime.launch.preflight import cores

MIB = 2**20
DISK_S = 0.4
MOST_DISK_BYTES = 256 * MIB
GUESSED_NETWORK_BYTES_PER_S = 1.25e9
NETWORK_LATENCY_S = 50e-6
NETWORK = "network"
QUERY = "name,memory.total,pci.bus_id,pcie.link.gen.max,pcie.link.width.max"


def node_here() -> MeasuredNode:
    """Return this node without any measured figures."""
    matrix = _nvidia_smi("topo", "-m")
    return MeasuredNode(
        name=socket.gethostname() or "node",
        processor=processor(),
        cores=cores(),
        memory_bytes=_memory_bytes(Path("/proc/meminfo").read_text("ascii")),
        numa=tuple(_numa(Path("/sys/devices/system/node"))),
        interfaces=tuple(_interfaces()),
        devices=devices_listed(
            _nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
        ),
        device_links=device_links(matrix),
    )


def processor() -> str:
    """Return the processor's name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return "cpu"
    return next((n.partition(":")[2].strip() for n in lines if "model name" in n), "cpu") or "cpu"


def devices_listed(listing: str) -> tuple[MeasuredDevice, ...]:
    """Read `nvidia-smi --query-gpu`: name, MiB, bus, PCIe generation and width.

    >>> found = devices_listed("NVIDIA H100 80GB HBM3, 81559, 00000000:19:00.0, 5, 16")
    >>> found[0].pcie, found[0].bus
    ('gen5 x16', '00000000:19:00.0')
    """
    result = []
    for rank, line in enumerate(listing.splitlines()):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) < 5 or not parts[-4].isdigit():
            continue
        bus, generation, width = parts[-3:]
        result.append(
            MeasuredDevice(
                name=", ".join(parts[:-4]),
                rank=rank,
                memory_bytes=int(parts[-4]) * MIB,
                bus=bus or None,
                pcie=f"gen{generation} x{width}" if generation.isdigit() else None,
                numa=_numa_of_bus(bus),
            )
        )
    return tuple(result)


def device_links(matrix: str) -> tuple[DeviceLink, ...]:
    """Read the matrix of `nvidia-smi topo -m`.

    >>> device_links("      GPU0 GPU1 CPU Affinity\\nGPU0  X    NV18 0-31\\nGPU1  NV18 X    0-31")
    (DeviceLink(first=0, second=1, kind='NV18'),)
    """
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    head = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [name for name in head if re.fullmatch(r"GPU\d+", name)]
    result = []
    for row in rows[rows.index(head) + 1 if head else 0 :]:
        if not row or row[0] not in columns:
            continue
        for column, kind in zip(columns, row[1:], strict=False):
            first, second = int(row[0][3:]), int(column[3:])
            if first < second:
                result.append(DeviceLink(first=first, second=second, kind=kind))
    return tuple(result)


def _nvidia_smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _numa_of_bus(bus: str) -> int | None:
    file = Path("/sys/bus/pci/devices", bus.lower()[-12:], "numa_node")
    try:
        node = int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _memory_bytes(meminfo: str) -> int:
    return next(
        int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal")
    )


def _numa(folder: Path) -> list[NumaNode]:
    result = []
    for node in sorted(folder.glob("node[0-9]*")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            cpus = (node / "cpulist").read_text("ascii").strip()
            memory = re.search(r"MemTotal:\s+(\d+)", (node / "meminfo").read_text("ascii"))
            size_bytes = int(memory[1]) * 1024 if memory else 0
            result.append(NumaNode(cores=cpu_count(cpus), memory_bytes=size_bytes))
    return result


def cpu_count(cpus: str) -> int:
    """Count the members of a list as the kernel writes it.

    >>> cpu_count("0-3,8,10-11"), cpu_count("")
    (7, 0)
    """
    total = 0
    for part in filter(None, cpus.split(",")):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def _interfaces() -> list[Interface]:
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            if name == "lo":
                continue
            address = hardware = None
            request = struct.pack("256s", name[:15].encode())
            with contextlib.suppress(OSError):
                address = socket.inet_ntoa(fcntl.ioctl(asking, 0x8915, request)[20:24])
            with contextlib.suppress(OSError):
                hardware = fcntl.ioctl(asking, 0x8927, request)[18:24].hex(":")
            speed = None
            folder = Path("/sys/class/net", name)
            # In a container /sys may show another network's interface of the same name.
            with contextlib.suppress(OSError, ValueError):
                if (folder / "address").read_text("ascii").strip() == hardware:
                    speed = float((folder / "speed").read_text("ascii")) * 1e6
            result.append(
                Interface(
                    name=name, address=address, bits_per_s=speed if speed and speed > 0 else None
                )
            )
    return result


def disk_bytes_per_s(folder: Path) -> tuple[float | None, float | None]:
    """Return bytes per second of writing to a folder, until it is on the disk, and of reading."""
    piece = os.urandom(4 * MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".meshwright-disk-") as file:
            begin = time.perf_counter()
            written = 0
            while written < MOST_DISK_BYTES and time.perf_counter() - begin < DISK_S:
                written += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - begin
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.read(4 * MIB):
                pass
            read_s = time.perf_counter() - begin
    except OSError:
        return None, None
    return written / write_s, written / max(read_s, 1e-9)


def joint_cluster(clusters: Sequence[ClusterSpec]) -> ClusterSpec:
    """Return the cluster that several nodes are, each described as a cluster of its own.

    Neighbours with the same devices are one group, with the least of what its nodes have.
    """
    groups: list[DeviceGroup] = []
    for cluster in clusters:
        (local_group,) = cluster.groups
        last = groups[-1] if groups else None
        if last is None or not _alike(last, local_group):
            groups.append(
                local_group.model_copy(update={"name": f"{local_group.name}-{len(groups)}"})
            )
            continue
        least = min(last, local_group, key=lambda g: min(g.accelerator.peak_flops.values()))
        accelerator = least.accelerator.model_copy(
            update={
                "memory_bytes": min(
                    last.accelerator.memory_bytes, local_group.accelerator.memory_bytes
                )
            }
        )
        groups[-1] = last.model_copy(
            update={
                "accelerator": accelerator,
                "nodes": last.nodes + 1,
                "host_memory_bytes": min(
                    last.host_memory_bytes or 0, local_group.host_memory_bytes or 0
                )
                or None,
            }
        )
    if len(groups) == 1:
        groups = [groups[0].model_copy(update={"name": clusters[0].groups[0].name})]
    devices = sum(group.devices for group in groups)
    network = LinkTier(
        name=NETWORK,
        devices=devices,
        latency_s=NETWORK_LATENCY_S,
        bytes_per_s=GUESSED_NETWORK_BYTES_PER_S,
        source="not measured yet",
    )
    if len(groups) > 1:
        groups = [
            group.model_copy(update={"tiers": _tiers_of(clusters, group)}) for group in groups
        ]
    return ClusterSpec(
        name=" + ".join(f"{g.nodes}x{g.devices_per_node}x{g.accelerator.name}" for g in groups),
        groups=tuple(groups),
        tiers=(*(clusters[0].tiers if len(groups) == 1 else ()), network),
    )


def _tiers_of(clusters: Sequence[ClusterSpec], group: DeviceGroup) -> tuple[LinkTier, ...]:
    like = next(cluster for cluster in clusters if _alike(cluster.groups[0], group))
    return like.tiers


def _alike(group: DeviceGroup, other: DeviceGroup) -> bool:
    return (
        group.accelerator.name == other.accelerator.name
        and group.devices_per_node == other.devices_per_node
    )


def with_measured_links(
    cluster: ClusterSpec, curves: Sequence[CollectiveCurve], pairs: Sequence[NodePair]
) -> ClusterSpec:
    """Return a cluster with latency and rate of each measured tier.

    Between nodes the slowest pair counts, since every ring has it.
    """
    tiers = []
    for tier in cluster.tiers:
        messages = [
            c for c in curves if (c.tier, c.operation, c.inner) == (tier.name, "send_recv", 1)
        ]
        change: dict[str, object] = {}
        if messages:
            points, fit = messages[0].points, messages[0].fit
            change = {
                "latency_s": fit.pieces[0].latency_s if fit else points[0].seconds,
                "bytes_per_s": (fit.pieces[-1].bytes_per_s if fit else None)
                or max(p.size_bytes / p.seconds for p in points if p.seconds > 0),
            }
        if tier.name == NETWORK and pairs:
            change = {
                "latency_s": median(pair.latency_s for pair in pairs),
                "bytes_per_s": min(pair.bytes_per_s for pair in pairs),
            }
        if change:
            change |= {"provenance": "measured", "source": "messages between ranks"}
        tiers.append(tier.model_copy(update=change))
    return cluster.model_copy(update={"tiers": tuple(tiers)})
