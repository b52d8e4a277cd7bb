"""The process group of all ranks: how a rank joins it, bound to the cores near its device.

Near cores are those of the device's NUMA node, as Linux lists them.  A rank that runs on another
node's cores sends every launch and every pinned copy over the link between the sockets.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

PCI_DEVICES = Path("/sys/bus/pci/devices")


def join(device: Literal["cpu", "cuda"], *, rank: int, world_size: int, timeout_s: float) -> None:
    """Join the process group: over the launcher's socket, or as torchrun's environment says."""
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    device_of_rank = None
    if device == "cuda":
        # Communicators form now, on this device, rather than inside the first step.
        device_of_rank = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device_of_rank)
        bind(device_of_rank)
    listening = os.environ.get("MESHWRIGHT_STORE_FD")
    if listening is None:
        dist.init_process_group(backend, timeout=timeout, device_id=device_of_rank)
        return
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(listening) if rank == 0 else None,
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device_of_rank,
    )


def bind(device: torch.device) -> frozenset[int] | None:
    """Keep this process to the cores near a CUDA device; return them, or None where none are known.

    Cores that the job was not given stay outside.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return None
    properties = torch.cuda.get_device_properties(device)
    address = address_of(
        getattr(properties, "pci_domain_id", None),
        getattr(properties, "pci_bus_id", None),
        getattr(properties, "pci_device_id", None),
    )
    allowed = frozenset(os.sched_getaffinity(0))
    near = cores_of(address) & allowed if address else frozenset()
    if not near or near == allowed:
        return None
    os.sched_setaffinity(0, near)
    return near


def address_of(domain: int | None, bus: int | None, device: int | None) -> str | None:
    """Return the name that the kernel gives a device of the PCI bus.

    >>> address_of(0, 0x9d, 0)
    '0000:9d:00.0'
    """
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cores_of(address: str, *, devices: Path = PCI_DEVICES) -> frozenset[int]:
    """Return the cores near a device; none where the kernel does not say."""
    try:
        return cores_in((devices / address / "local_cpulist").read_text("ascii"))
    except (OSError, ValueError):
        return frozenset()


def cores_in(text: str) -> frozenset[int]:
    """Read a list of cores.

    >>> sorted(cores_in("0-2,8,10-11"))
    [0, 1, 2, 8, 10, 11]
    """
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
