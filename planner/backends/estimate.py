"""A run's step time by cause and its memory by stage, by the stack of its framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.backends.held_bytes import StageEstimate, fits, stages_of
from planner.backends.placed import priced
from planner.backends.ranges import bounds_s, outside, spreads
from planner.backends.runs import run_of
from planner.backends.step import step_parts
from planner.catalog import accelerators
from planner.cluster import ClusterSpec
from planner.errors import DocumentError
from planner.setup import Setup

USUAL_LINK_BYTES_PER_S = 3.2e10
"""PCIe 4, of a host link that the catalogue does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run should take."""

    step_time_s: float
    low_s: float
    high_s: float
    step_parts: dict[str, float]
    stages: tuple[StageEstimate, ...]
    fits: bool
    beyond: tuple[str, ...] = ()
    """What of the run is outside those that its stack was fitted to: its range is wider."""
    assumptions: tuple[str, ...] = ()

    def memory_bytes(self, kind: str, rank: str) -> float:
        """Return the peak of a kind of memory (allocated, reserved, device) on a rank."""
        values = [_memory(stage, kind) for stage in self.stages]
        if rank == "first":
            return values[0]
        return values[-1] if rank == "last" else max(values)


def _memory(stage: StageEstimate, kind: str) -> float:
    if kind == "allocated":
        return stage.allocated_bytes
    return stage.device_bytes if kind == "device" else stage.reserved_bytes


def estimate(setup: Setup) -> Estimate:
    """Return step time and memory of a run by the stack that trains it."""
    setup = linked(setup)
    run = run_of(setup)
    assumptions = list(setup.assumed)
    recompute = run.recompute
    layers = priced(setup, run)
    if recompute is None:
        recompute = "none"
        if not fits(layers, stages_of(layers, "none")):
            recompute = "full"
        assumptions.append(f"recompute {recompute}")
    stages = stages_of(layers, recompute)
    parts = step_parts(layers, recompute)
    step_s = sum(parts.values())
    beyond = outside(setup)
    widths = spreads(setup, beyond=beyond, open_points=len(assumptions))
    low_s, high_s = bounds_s(step_s, widths)
    if not 0 < step_s < math.inf:
        raise DocumentError("", "figures are out of all proportion: no step time follows from them")
    return Estimate(
        step_time_s=step_s,
        low_s=low_s,
        high_s=high_s,
        step_parts=parts,
        stages=stages,
        fits=fits(layers, stages),
        beyond=beyond,
        assumptions=tuple(assumptions),
    )


def linked(setup: Setup) -> Setup:
    """Return a run whose devices have the links that its stack uses, and one to their host."""
    cluster = setup.request.cluster
    if not setup.request.stack.sharding.bridged:
        cluster = _without_bridge(cluster)
    group = cluster.groups[0]
    if group.host_link_bytes_per_s is None:
        group = group.model_copy(update={"host_link_bytes_per_s": USUAL_LINK_BYTES_PER_S})
        cluster = cluster.model_copy(update={"groups": (group, *cluster.groups[1:])})
    if cluster is setup.request.cluster:
        return setup
    return replace(setup, request=replace(setup.request, cluster=cluster))


def _without_bridge(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster whose cards reach each other over PCIe alone."""
    group, tiers = cluster.groups[0], cluster.tiers
    entry = accelerators().get(group.accelerator.name)
    if entry is None or entry.bridge is None or not tiers or tiers[0].name != entry.bridge.name:
        return cluster
    [pcie] = [tier for tier in entry.tiers if tier.name == "pcie"]
    others = tuple(tier for tier in tiers[1:] if tier.name != "pcie")
    in_node = pcie.model_copy(update={"devices": group.devices_per_node})
    return cluster.model_copy(update={"tiers": (in_node, *others)})
