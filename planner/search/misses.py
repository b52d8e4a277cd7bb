"""Why no plan fits: the configuration that misses by least, where the bytes are, and a way out."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

from planner.costs.hosts import USABLE
from planner.costs.layout_costs import LayoutCosts
from planner.model import ModelGraph
from planner.plan import Layout
from planner.predict import placement_prediction, placements_of
from planner.prediction import Prediction
from planner.request import Request
from planner.search.candidates import Candidates
from planner.search.formulation import capacity_bytes, plan_of
from planner.search.layer_options import recomputes_of
from planner.search.space import Family
from planner.search.ways_out import dividing, ways_out
from planner.solver import sided
from planner.solver.inner import solve
from planner.solver.instance import Instance, Solution
from planner.solver.memory_reach import why_infeasible
from planner.units import bytes_text

MISSES_LOOKED_AT = 8
"""Of the configurations with the least bytes, so many are looked at in full."""
TRIED_FOR_S = 5.0
"""Seconds of the integer program, where hosts tie stages together."""


def nothing_runs(request: Request, refused: dict[str, int]) -> str:
    """Say why not even one layout is left to try."""
    model, cluster, job = request.model, request.cluster, request.job
    in_the_way = "; ".join(dividing(request))
    if in_the_way and not refused:
        return (
            f"no layout of {model.name} uses all {cluster.devices} devices and divides a global "
            f"batch of {job.global_batch}. {in_the_way}"
        )
    divides = (
        f"uses all {cluster.devices} devices and divides a global batch of {job.global_batch}; "
        "ask for a global batch that the devices divide, or fix less"
    )
    if not refused:
        return f"no layout of {model.name} {divides}"
    return (
        f"the {request.stack.name} backend can run none of {sum(refused.values())} layouts: "
        f"{_listed(refused)}. Nothing else {divides}"
    )


def nothing_keeps(request: Request, refused: dict[str, int]) -> str:
    """Say that no plan keeps what is required, and what was not tried."""
    asked = "; ".join(map(str, request.pins.require))
    left_out = f". Not tried: {_listed(refused)}" if refused else ""
    return f"no plan that fits the devices keeps all of this: {asked}{left_out}"


def all_refused(candidates: Candidates) -> dict[str, int]:
    """Count the refusals of all layouts, by reason."""
    return {**candidates.refused, **_refused(candidates)}


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
        return nothing_runs(candidates.request, all_refused(candidates))
    needs, layout = min(
        ((_least_bytes(candidates, layout), layout) for layout in lean),
        key=lambda miss: miss[0],
    )
    leanest = _within(candidates, layout, max(needs, float(device.memory_bytes)))
    if needs <= device.memory_bytes:
        return _host_miss(candidates, layout, leanest)
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


def _host_miss(candidates: Candidates, layout: Layout, leanest: Prediction) -> str:
    """Say what hosts would have to hold of a layout that fits its devices."""
    model, cluster, job = candidates.model, candidates.cluster, candidates.job
    group = cluster.groups[0]
    needs = group.devices_per_node * max(stage.host_bytes for stage in leanest.stages)
    host = group.host_memory_bytes or 0
    return (
        f"no plan of {model.name} fits {cluster.devices} x {group.accelerator.name} and their "
        f"hosts at sequence {job.seq_len} and global batch {job.global_batch}. The closest, "
        f"{layout.text()}, fits the devices with {bytes_text(needs)} in each node's host memory, "
        f"of which {bytes_text(USABLE * host)} of {bytes_text(host)} may be so filled. "
        f"{_ways_out(candidates)}"
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
    """Say what would fit with one thing changed."""

    def fitting(changed: Request) -> Layout | None:
        each = recomputes_of(changed.model, changed.space, changed.pins.recompute)
        tried = (_fitting(Candidates(changed, candidates.rules, one)) for one in each)
        return next((layout for layout in tried if layout is not None), None)

    return ways_out(candidates.request, fitting)


def _fitting(candidates: Candidates) -> Layout | None:
    """Return the leanest layout that fits, None if none of the leanest does."""
    return next(
        (
            layout
            for layout in _leanest(candidates, 4 * MISSES_LOOKED_AT)
            if _fits(candidates.instance(layout))
        ),
        None,
    )


def _fits(instance: Instance) -> bool:
    """Whether a layout fits its devices, and what it puts on hosts fits them."""
    if why_infeasible(instance):
        return False
    return isinstance(sided.solve(instance, time_limit_s=TRIED_FOR_S), Solution)


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
        return mean_least_bytes(candidates.model, candidates.costs(layout), layout)

    lean = (
        layout
        for family in smallest.values()
        for part in itertools.islice(family.by_timetable(), 1)
        for layout in part.corners()
        if candidates.refusal(layout) is None
    )
    return heapq.nsmallest(count, lean, key=least_bytes)


def mean_least_bytes(model: ModelGraph, costs: LayoutCosts, layout: Layout) -> float:
    """Bytes of a mean stage with the choices that hold least, one micro-batch in flight."""
    held = {kind: [cost.layer_bytes for cost in table] for kind, table in costs.kinds.items()}
    layers = sum(
        layer.repeat * min(one.states + one.stored for one in held[layer.kind])
        for layer in model.layers
    )
    working = max(min(max(one.forward, one.backward) for one in table) for table in held.values())
    return layers / layout.pipeline + working


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
    instance = _with_memory(candidates, layout, memory_bytes)
    return not why_infeasible(instance) and isinstance(solve(instance), Solution)


def _with_memory(candidates: Candidates, layout: Layout, memory_bytes: float) -> Instance:
    """Return the partition problem of a layout on devices with so much memory and any host."""
    costs, instance = candidates.costs(layout), candidates.instance(layout)
    capacity = capacity_bytes(candidates.cluster, costs, memory_bytes)
    stages = tuple(replace(stage, capacity_bytes=capacity) for stage in instance.stages)
    return replace(instance, stages=stages, hosts=())


def _within(candidates: Candidates, layout: Layout, memory_bytes: float) -> Prediction:
    """Return the prediction of the best plan of a layout that fits in so much memory."""
    solution = solve(_with_memory(candidates, layout, memory_bytes))
    assert isinstance(solution, Solution), "it was seen to fit"
    costs = candidates.costs(layout)
    plan = plan_of(candidates.request, layout, costs, solution, candidates.recompute)
    return placement_prediction(candidates.tables, layout, placements_of(plan, candidates.model))
