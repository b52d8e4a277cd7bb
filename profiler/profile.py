"""`meshwright profile`: a model's layers and this machine's links, measured by its ranks.

This side starts the ranks and writes the birth certificate; profiler.measure is what they do.
Nothing here imports torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Sequence

from planner.cluster import ClusterSpec
from planner.costs import refusal
from planner.errors import DocumentError, LaunchError
from planner.expressions import resolve_cluster
from planner.model import ModelGraph
from planner.plan import Job, Layout
from planner.profile import Birth, Profile
from planner.space import LARGEST_MICRO_BATCH, divisors
from profiler.ranks import result_of, versions
from runtime.preflight import cores, cuda_devices
from runtime.run import Device

LINKS_S = 12.0
LAYERS_S = 60.0
"""Seconds that are spent on layers if the least number of repetitions takes less."""


def profile(
    model: ModelGraph,
    cluster: str,
    job: Job,
    *,
    layers_s: float = LAYERS_S,
    links_s: float = LINKS_S,
    quiet: bool = False,
) -> Profile:
    """Measure what the search of `job` on `cluster`, which must be this machine, will ask for."""
    if model.edges:
        raise DocumentError(
            "model.edges", "a graph of layers cannot be measured; plan it without a profile"
        )
    machine = resolve_cluster(cluster)
    device = _device_here(machine, cluster)
    wanted = {
        "model": model.model_dump(mode="json", exclude_none=True),
        "seq_len": job.seq_len,
        "precision": job.precision,
        "micro_batches": micro_batches(job),
        "tensor_degrees": tensor_degrees(model, machine, job),
        "groups": group_tiers(machine),
        "links_s": links_s,
        "layers_s": layers_s,
    }
    load = os.getloadavg()[0]
    found = result_of(
        "profiler.measure:measure",
        wanted,
        ranks=machine.devices,
        device=device,
        title=f"profile of {model.name}",
        quiet=quiet,
    )
    return Profile.of(
        {
            "model": model.name,
            "model_digest": model.digest,
            "birth": Birth(
                command=shlex.join(["meshwright", "profile", model.name, "--cluster", cluster]),
                date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                host=platform.node() or "unknown",
                device=found["device"],
                ranks=machine.devices,
                threads_per_rank=found["threads_per_rank"],
                load=load,
                software={
                    **versions(["meshwright"]),
                    "python": platform.python_version(),
                    **found["software"],
                },
            ).model_dump(),
            "layers": found["layers"],
            "collectives": found["collectives"],
            "overheads": found["overheads"],
        }
    )


def micro_batches(job: Job) -> list[int]:
    """Return the powers of two that a micro-batch of the job can have.

    >>> micro_batches(Job(seq_len=128, global_batch=12))
    [1, 2, 4, 8]
    """
    largest = min(job.global_batch, LARGEST_MICRO_BATCH)
    return [2**power for power in range(largest.bit_length())]


def tensor_degrees(model: ModelGraph, machine: ClusterSpec, job: Job) -> list[int]:
    """Return the degrees of tensor parallelism that the model and the machine allow."""
    return [
        degree
        for degree in divisors(machine.devices)
        if refusal(model, machine, job, Layout(tensor=degree)) is None
    ]


def group_tiers(machine: ClusterSpec) -> dict[int, str]:
    """Return the link tier of the groups to measure: pairs and all ranks.

    Seconds among other numbers of ranks follow from the nearest of these.
    """
    sizes: Sequence[int] = (
        sorted({2, machine.devices}) if machine.devices % 2 == 0 else [machine.devices]
    )
    return {
        size: next(tier.name for tier in machine.tiers if tier.devices >= size)
        for size in sizes
        if 1 < size <= machine.devices
    }


def _device_here(machine: ClusterSpec, text: str) -> Device:
    """Return the kind of device to measure; refuse machines that this is not."""
    group = machine.groups[0]
    device: Device = "cpu" if group.accelerator.kind == "cpu" else "cuda"
    have = cores() if device == "cpu" else cuda_devices()
    if len(machine.groups) > 1 or group.nodes > 1 or (device == "cuda" and have < machine.devices):
        raise LaunchError(
            f"{text}: has {machine.devices} x {group.accelerator.name} on {group.nodes} nodes, and "
            f"a profile is measured where it runs, which is here, with {have} devices; "
            "profile with --cluster local on one of its nodes"
        )
    return device
