"""Check of devices and links before the first step of a run: which is slower than its like.

All ranks time the same products and copies at once, then how much of a processor each gets, then
messages by pairs.  Single products do not show a processor that a neighbour, a limit or a priority
takes away between them.  What is slow is judged as in a profile (`profiler.diagnostics`).  The
check ends after MOST_S, whatever it has seen then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from meshwright.planner.documents.profile import (
    Finding,
    MeasuredDevice,
    MeasuredNode,
    NodePair,
)
from meshwright.planner.documents.units import seconds_text
from meshwright.profiler.diagnostics import DEGRADED, slow_devices, slow_links
from meshwright.profiler.start_ranks import Tell, result_of
from meshwright.runtime.run.rendezvous import Rendezvous
from meshwright.runtime.run.run_folder import Device

MOST_S = 120.0
"""Wall clock of the whole check."""
LINKS_S = 20.0
"""Seconds of the check for messages between ranks; it ends earlier where these are even."""
PROCESSOR_S = 1.5
"""Seconds in which each rank wants a processor all the time."""
MOST_RANKS = 32
"""Up to so many ranks all pairs are timed, and one rank of each node else."""
COPIES = ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """Result of the check."""

    devices: int
    links: int
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def text(self) -> str:
        """One line for the user."""
        slow = len(self.findings)
        verdict = "none is slow" if not slow else f"{slow} {'is' if slow == 1 else 'are'} slow"
        return (
            f"preflight: {self.devices} devices and {self.links} links in "
            f"{seconds_text(self.seconds)}: {verdict}"
        )


def check_devices(
    *, ranks: int, device: Device, rendezvous: Rendezvous, quiet: bool
) -> DeviceCheck:
    """Check the devices of `ranks` processes here and of those of all other nodes.

    Raises LaunchError where it takes longer than MOST_S, or a device does not compute.
    """
    begin_s = time.monotonic()
    counts = [int(count) for count in rendezvous.all_gather(ranks)]
    hosts = [str(host) for host in rendezvous.all_gather(os.uname().nodename)]
    measured = result_of(
        f"{__name__}:measure",
        {"first_ranks": [sum(counts[:node]) for node in range(len(counts))]},
        ranks=ranks,
        device=device,
        title="preflight",
        quiet=quiet,
        timeout_s=MOST_S,
        rendezvous=rendezvous,
        most_s=MOST_S,
    )
    names = [f"{host}, rank {sum(counts[:node]) + i}"
             for node, host in enumerate(hosts) for i in range(counts[node])]  # fmt: skip
    devices = [MeasuredDevice.model_validate(data) for data in measured["devices"]]
    pairs = [NodePair.model_validate(data) for data in measured["pairs"]]
    ends = [int(rank) for rank in measured["ranks"]]
    return DeviceCheck(
        devices=len(devices),
        links=len(pairs) // 2,
        seconds=time.monotonic() - begin_s,
        findings=(
            *findings(devices, pairs, names, [names[rank] for rank in ends]),
            *slow_processors([float(share) for share in measured["processors"]], names),
        ),
    )


def findings(
    devices: Sequence[MeasuredDevice],
    pairs: Sequence[NodePair],
    names: Sequence[str],
    ends: Sequence[str],
) -> Iterator[Finding]:
    """Yield devices, by rank, and links that are slow; `ends` are the ends of pairs by number."""
    nodes = [
        MeasuredNode(
            name=names[device.rank].partition(",")[0],
            processor="not looked at",
            cores=1,
            memory_bytes=0,
            devices=(device,),
        )
        for device in devices
    ]
    yield from slow_devices(nodes)
    yield from _slow_copies(devices, names)
    yield from slow_links(pairs, ends)


def _slow_copies(devices: Sequence[MeasuredDevice], names: Sequence[str]) -> Iterator[Finding]:
    """Yield devices whose copies to or from the host are slower than those of their like."""
    for field in COPIES:
        rates = {
            device.rank: rate for device in devices if (rate := getattr(device, field)) is not None
        }
        for rank, rate in rates.items():
            others = [other for at, other in rates.items() if at != rank]
            if others and rate < DEGRADED * median(others):
                share = rate / median(others)
                where = "from" if field.startswith("host") else "to"
                yield Finding(
                    what="device",
                    subject=names[rank],
                    share=share,
                    text=f"{names[rank]} copies {where} its host at {share:.0%} of its peers",
                )


def slow_processors(shares: Sequence[float], names: Sequence[str]) -> Iterator[Finding]:
    """Yield ranks that get less of a processor than the others, by the share that each gets."""
    for rank, share in enumerate(shares):
        others = [other for at, other in enumerate(shares) if at != rank]
        if others and share < DEGRADED * median(others):
            yield Finding(
                what="device",
                subject=names[rank],
                share=share / median(others),
                text=f"{names[rank]} gets {share:.0%} of a processor, and its peers "
                f"{median(others):.0%}: look at its node for other programs, a limit of its "
                "control group, or a lower priority",
            )


def processor_share(seconds: float = PROCESSOR_S) -> float:
    """Return the share of some seconds in which this thread ran, though it always wanted to."""
    begin_s, begin_own_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin_s < seconds:
        pass
    return min(1.0, (time.thread_time() - begin_own_s) / (time.perf_counter() - begin_s))


def measure(arguments: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Time devices and links as one of the ranks; plain data in and out."""
    import torch  # noqa: PLC0415 - takes seconds
    import torch.distributed as dist  # noqa: PLC0415

    from meshwright.profiler.devices import devices  # noqa: PLC0415
    from meshwright.profiler.links import pairs  # noqa: PLC0415
    from meshwright.profiler.measure import device_name  # noqa: PLC0415
    from meshwright.runtime.core.object_collectives import all_gather_json  # noqa: PLC0415

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = list(range(world)) if world <= MOST_RANKS else list(arguments["first_ranks"])
    tell("devices", 0.0)
    measured = devices(device, name=device_name(device))
    if world > 1:
        dist.barrier()
    shares = [processor_share()]
    shares = all_gather_json(shares[0]) if world > 1 else shares
    tell("links", 0.2)
    between = []
    if len(ranks) > 1:
        between = pairs(
            ranks, device=device, budget_s=LINKS_S, progress=lambda share: tell("links", share)
        )
    return {
        "devices": [device.model_dump(mode="json") for device in measured],
        "pairs": [pair.model_dump(mode="json") for pair in between],
        "processors": shares,
        "ranks": ranks,
    }
