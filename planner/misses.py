"""Why no plan fits: the configuration that misses by least, where the bytes are, and a way out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from planner.candidates import Candidates
from planner.cluster import ClusterSpec
from planner.formulation import instance_of, plan_of
from planner.instance import Solution
from planner.model import ModelGraph
from planner.plan import Job, Layout
from planner.predict import placement_prediction, placements_of
from planner.prediction import Prediction
from planner.units import bytes_text

MISSES_LOOKED_AT = 8
"""Of the configurations with the least bytes, so many are looked at in full."""


def nothing_runs(model: ModelGraph, cluster: ClusterSpec, job: Job, refused: dict[str, int]) -> str:
    """Say why not even one layout is left to try."""
    divides = (
        f"uses all {cluster.devices} devices and divides a global batch of {job.global_batch}; "
        "ask for a global batch that the devices divide, or fix less"
    )
    if not refused:
        return f"no layout of {model.name} {divides}"
    reasons = sorted(refused.items(), key=lambda item: -item[1])[:3]
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons)
    return (
        f"the native backend can run none of {sum(refused.values())} layouts: {listed}. "
        f"Nothing else {divides}"
    )


def closest_miss(candidates: Candidates) -> str:
    """Name the layout that misses by least, its fullest stage and where the bytes are."""
    model, cluster, job = candidates.model, candidates.cluster, candidates.job

    def least_bytes(layout: Layout) -> float:
        table = candidates.costs(layout).kinds
        held = sum(
            layer.repeat * min(c.resident_bytes + c.stored_bytes for c in table[layer.kind])
            for layer in model.layers
        )
        peak = max(min(c.transient_bytes for c in options) for options in table.values())
        return held / layout.pipeline + peak

    device = cluster.groups[0].accelerator
    misses = []
    for layout in heapq.nsmallest(MISSES_LOOKED_AT, _leanest_layouts(candidates), key=least_bytes):
        leanest = _leanest(candidates, layout)
        index, stage = max(enumerate(leanest.stages), key=lambda s: s[1].peak_memory_bytes)
        misses.append((stage.peak_memory_bytes, index, stage, layout))
    needs, index, stage, layout = min(misses, key=lambda miss: miss[0])
    parts = sorted(stage.memory_parts.items(), key=lambda part: -part[1])[:4]
    return (
        f"no plan of {model.name} fits {cluster.devices} x {device.name} "
        f"({bytes_text(device.memory_bytes)} each) at sequence {job.seq_len} and global batch "
        f"{job.global_batch}. The closest, {layout.text()} with full recompute, needs "
        f"{bytes_text(needs)} on stage {index}: "
        + ", ".join(f"{name} {bytes_text(size)}" for name, size in parts)
        + f". {_way_out(layout, stage.memory_parts, device.memory_bytes)}"
    )


def _leanest_layouts(candidates: Candidates) -> Iterator[Layout]:
    """Yield layouts of which one needs least: small micro-batches, states divided all the way."""
    smallest: dict[object, int] = {}
    for family in candidates.families:
        least = smallest.get(family.degrees, family.micro_batch)
        smallest[family.degrees] = min(least, family.micro_batch)
    for family in candidates.families:
        if family.micro_batch == smallest[family.degrees]:
            yield from family.corners()


def _leanest(candidates: Candidates, layout: Layout) -> Prediction:
    """Return the prediction of a layout with full recompute and the most even split of memory."""
    model, costs = candidates.model, candidates.costs(layout)
    instance = instance_of(model, candidates.cluster, layout, costs, "full")
    need = [
        min(o.resident_bytes + o.stored_bytes for o in instance.options_of(layer))
        for layer in range(len(instance.layers))
    ]
    cuts = _even_cuts(need, len(instance.stages))
    options = [0] * len(instance.layers)
    solution = Solution(
        cuts=cuts,
        options=tuple(options),
        stage_s=(),
        stage_bytes=(),
        stage_sync_s=(),
        objective_s=0.0,
        lower_bound_s=0.0,
    )
    plan = plan_of(model, candidates.cluster.name, candidates.job, layout, costs, solution, "full")
    return placement_prediction(candidates.tables, layout, placements_of(plan, model))


def _even_cuts(need: list[float], stages: int) -> tuple[int, ...]:
    """Cut a chain into stages of about equal need, each with at least one layer."""
    cuts, used, total = [0], 0.0, sum(need)
    for layer, size in enumerate(need):
        left = stages - len(cuts)
        enough = used + size / 2 >= total * len(cuts) / stages
        if left and layer > cuts[-1] and (enough or len(need) - layer == left):
            cuts.append(layer)
        used += size
    return (*cuts, len(need))


def _way_out(layout: Layout, parts: dict[str, float], capacity: float) -> str:
    """Suggest the change that would help, by what fills the memory."""
    states = sum(parts.get(name, 0.0) for name in ("parameters", "gradients", "optimizer"))
    if states > capacity:
        more = states / capacity
        return (
            f"Parameters, gradients and optimizer state alone are {more:.1f} times the device: "
            f"use at least {int(-(-layout.devices * more // 1))} such devices."
        )
    return "Ask for a shorter sequence, or use more devices."
