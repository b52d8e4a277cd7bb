"""Why no plan fits: the configuration that misses by least, where the bytes are, and a way out."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from planner.cluster import ClusterSpec
from planner.costs.layout_costs import CostTables
from planner.model import ModelGraph
from planner.plan import Job, Layout
from planner.predict import placement_prediction, placements_of
from planner.prediction import Prediction
from planner.profile import Recompute
from planner.search.candidates import Candidates
from planner.search.formulation import capacity_bytes, plan_of
from planner.search.pins import SHORT_NAMES, Pins
from planner.search.savings import activations
from planner.search.space import Family
from planner.solver.inner import solve
from planner.solver.instance import Instance, Solution
from planner.solver.memory_reach import why_infeasible
from planner.units import bytes_text

MISSES_LOOKED_AT = 8
"""Of the configurations with the least bytes, so many are looked at in full."""
FACTORS = (2, 4, 8, 16)
"""Of more devices or a shorter sequence: how far a way out is looked for."""


def nothing_runs(model: ModelGraph, cluster: ClusterSpec, job: Job, refused: dict[str, int]) -> str:
    """Say why not even one layout is left to try."""
    divides = (
        f"uses all {cluster.devices} devices and divides a global batch of {job.global_batch}; "
        "ask for a global batch that the devices divide, or fix less"
    )
    if not refused:
        return f"no layout of {model.name} {divides}"
    return (
        f"the native backend can run none of {sum(refused.values())} layouts: {_listed(refused)}. "
        f"Nothing else {divides}"
    )


def nothing_keeps(candidates: Candidates) -> str:
    """Say that no plan keeps what is required, and what was not tried."""
    asked = "; ".join(map(str, candidates.pins.require))
    refused = {**candidates.refused, **_refused(candidates)}
    left_out = f". Not tried: {_listed(refused)}" if refused else ""
    return f"no plan that fits the devices keeps all of this: {asked}{left_out}"


def _listed(refused: dict[str, int]) -> str:
    """Return the commonest reasons, each with the number of layouts."""
    reasons = sorted(refused.items(), key=lambda item: -item[1])[:3]
    return "; ".join(f"{reason} ({count})" for reason, count in reasons)


def closest_miss(candidates: Candidates) -> str:
    """Name the layout that misses by least, its fullest stage, where the bytes are, a way out."""
    model, cluster, job = candidates.model, candidates.cluster, candidates.job
    device = cluster.groups[0].accelerator
    lean = _leanest(candidates)
    if not lean:
        return nothing_runs(model, cluster, job, {**candidates.refused, **_refused(candidates)})
    needs, layout = min(
        ((_least_bytes(candidates, layout), layout) for layout in lean),
        key=lambda miss: miss[0],
    )
    leanest = _within(candidates, layout, needs)
    index, stage = max(enumerate(leanest.stages), key=lambda s: s[1].peak_memory_bytes)
    parts = sorted(stage.memory_parts.items(), key=lambda part: -part[1])[:4]
    return (
        f"no plan of {model.name} fits {cluster.devices} x {device.name} "
        f"({bytes_text(device.memory_bytes)} each) at sequence {job.seq_len} and global batch "
        f"{job.global_batch}. The closest, {layout.text()}, needs at least "
        f"{bytes_text(needs)} on each; stage {index} holds "
        + ", ".join(f"{name} {bytes_text(size)}" for name, size in parts)
        + f". {_ways_out(candidates)}"
    )


def _refused(candidates: Candidates) -> dict[str, int]:
    """Count the refusals of layouts in families that could run otherwise, by reason."""
    counts: dict[str, int] = {}
    for family in candidates.families:
        for layout in family.layouts():
            reason = candidates.refusal(layout)
            if reason is not None:
                counts[reason] = counts.get(reason, 0) + 1
    return counts


def _ways_out(candidates: Candidates) -> str:
    """Say which single changes would let a plan fit: each is tried before it is named."""
    found = [
        *_other_choices(candidates),
        *_fewest_devices(candidates),
        *_longest_sequence(candidates),
    ]
    if not found:
        return (
            f"No change of devices or sequence alone, up to {FACTORS[-1]} times, would make it fit."
        )
    return f"It would fit {', or '.join(found)}."


def _other_choices(candidates: Candidates) -> Iterator[str]:
    """Yield each pin that stands in the way alone, with what would fit; all, if it takes several.

    A pinned `recompute` is the layers' own; of other pins the leanest layout that fits says how.
    """
    pins, alone = candidates.pins, False
    for name, field in SHORT_NAMES.items():
        if getattr(pins, field) is None:
            continue
        if field in ("recompute", "activations"):
            for value in reversed(get_args(Recompute)) if field == "recompute" else ():
                if _fitting(_changed(candidates, pins=replace(pins, recompute=value))):
                    alone = True
                    yield f"with recompute={value}"
                    break
            continue
        open_ = replace(pins, **{field: None})  # type: ignore[arg-type]
        layout = _fitting(_changed(candidates, pins=open_))
        if layout is not None:
            alone = True
            yield f"with {name}={_written(layout, field)}"
    free = Pins(allowed=pins.allowed)
    if not alone and pins != free and _fitting(_changed(candidates, pins=free)):
        yield "with nothing fixed"


def _written(layout: Layout, field: str) -> str:
    """Return a layout's value as `--fix` takes it."""
    value = getattr(layout, field)
    if field != "order":
        return str(value)
    names = {"tensor": "tp", "context": "cp", "data_shard": "shard", "pipeline": "pp"}
    return "-".join(names.get(axis, "replicate") for axis in value)


def _fewest_devices(candidates: Candidates) -> Iterator[str]:
    """Yield the number of devices, doubled as often as needed, with which a plan fits."""
    group = candidates.cluster.groups[0]
    for factor in FACTORS:
        devices = factor * group.devices
        tiers = candidates.cluster.tiers
        if not tiers:
            return
        widest = tiers[-1].model_copy(update={"devices": max(tiers[-1].devices, devices)})
        larger = candidates.cluster.model_copy(
            update={
                "groups": (group.model_copy(update={"nodes": factor * group.nodes}),),
                "tiers": (*tiers[:-1], widest),
            }
        )
        if _fitting(_changed(candidates, cluster=larger)):
            yield f"on {devices} such devices"
            return


def _longest_sequence(candidates: Candidates) -> Iterator[str]:
    """Yield the sequence, halved as often as needed, with which a plan fits."""
    for factor in FACTORS:
        if candidates.job.seq_len % factor:
            return
        shorter = replace(candidates.job, seq_len=candidates.job.seq_len // factor)
        if _fitting(_changed(candidates, job=shorter)):
            yield f"at sequence {shorter.seq_len}"
            return


def _changed(
    candidates: Candidates,
    *,
    cluster: ClusterSpec | None = None,
    job: Job | None = None,
    pins: Pins | None = None,
) -> Candidates:
    """Return the candidates of the same search with one thing changed."""
    cluster, job = cluster or candidates.cluster, job or candidates.job
    tables = CostTables(
        candidates.model,
        cluster,
        job,
        candidates.tables.profile,
        activations(cluster, pins or candidates.pins),
    )
    pins = pins or candidates.pins
    return Candidates(candidates.model, cluster, job, tables, pins, candidates.rules)


def _fitting(candidates: Candidates) -> Layout | None:
    """Return the leanest layout that fits, None if none of the leanest does."""
    return next(
        (
            layout
            for layout in _leanest(candidates, 4 * MISSES_LOOKED_AT)
            if not why_infeasible(candidates.instance(layout))
        ),
        None,
    )


def _leanest(candidates: Candidates, count: int = MISSES_LOOKED_AT) -> list[Layout]:
    """Return the layouts that hold least on a stage, if layers could be divided evenly.

    One of them needs least: micro-batches are small and states divided all the way.  Of a family's
    timetables the simplest that can run stands for all; 1F1B, where it is asked for, holds least.
    """
    smallest: dict[object, Family] = {}
    for family in candidates.families:
        least = smallest.setdefault(family.degrees, family)
        if family.micro_batch < least.micro_batch:
            smallest[family.degrees] = family

    def least_bytes(layout: Layout) -> float:
        table = candidates.costs(layout).kinds
        held = sum(
            layer.repeat * min(c.resident_bytes + c.stored_bytes for c in table[layer.kind])
            for layer in candidates.model.layers
        )
        peak = max(min(c.transient_bytes for c in options) for options in table.values())
        return held / layout.pipeline + peak

    lean = (
        layout
        for family in smallest.values()
        for part in itertools.islice(family.by_timetable(), 1)
        for layout in part.corners()
        if candidates.refusal(layout) is None
    )
    return heapq.nsmallest(count, lean, key=least_bytes)


def _least_bytes(candidates: Candidates, layout: Layout) -> float:
    """Return the least device memory in which a layout fits, to a thousandth."""
    high = low = float(candidates.cluster.groups[0].accelerator.memory_bytes)
    while not _fits_in(candidates, layout, high):
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits_in(candidates, layout, middle) else (middle, high)
    return high


def _fits_in(candidates: Candidates, layout: Layout, memory_bytes: float) -> bool:
    return not why_infeasible(_with_memory(candidates, layout, memory_bytes))


def _with_memory(candidates: Candidates, layout: Layout, memory_bytes: float) -> Instance:
    """Return the partition problem of a layout on devices with so much memory."""
    costs, instance = candidates.costs(layout), candidates.instance(layout)
    capacity = capacity_bytes(candidates.cluster, costs, memory_bytes)
    stages = tuple(replace(stage, capacity_bytes=capacity) for stage in instance.stages)
    return replace(instance, stages=stages)


def _within(candidates: Candidates, layout: Layout, memory_bytes: float) -> Prediction:
    """Return the prediction of the best plan of a layout that fits in so much memory."""
    solution = solve(_with_memory(candidates, layout, memory_bytes))
    assert isinstance(solution, Solution), "it was seen to fit"
    plan = plan_of(
        candidates.model,
        candidates.cluster.name,
        candidates.job,
        layout,
        candidates.costs(layout),
        solution,
        candidates.pins.recompute,
    )
    return placement_prediction(candidates.tables, layout, placements_of(plan, candidates.model))
