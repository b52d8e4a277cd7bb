"""Reasons why no plan fits: the nearest miss, its largest parts, and a way out.

The layouts that hold least are solved on the same devices with more memory, until they fit: the one
that needs the least is the closest miss, and its prediction there says which stage has what.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.planner.catalog import frameworks
from meshwright.planner.costs.memory.host_memory import filled_host, usable_share
from meshwright.planner.documents.framework_space import job_obstacles
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors.shown import sentence
from meshwright.planner.requests.pins import SHORT_NAMES, Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.queue import Pruned, SearchSpace
from meshwright.planner.search.remedies import dividing, ways_out

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.search.plan_candidate import Ranked

LOOKED_AT = 8
"""Number of the layouts with the least bytes that are solved."""
TRIED = 16
"""The same of a changed request; `LOOKED_AT` of graphs and of devices that differ,
which take longer."""
MOST_MEMORY = 1024.0
"""Largest multiple of the devices' memory that is tried."""
HAIR = 1e-3
"""The least memory is found to this share of it."""

Build = Callable[[Request], Iterable[SearchSpace]]
"""The spaces of a request."""


def why_nothing(request: Request, reasons: Iterable[str], build: Build) -> str:
    """Say why a search found no plan; `reasons` are those of layouts that do not fit."""
    if request.pins.require:
        asked = "; ".join(map(str, request.pins.require))
        refused = _all_refused(build(request))
        left_out = f". Not tried: {_commonest_reasons(refused)}" if refused else ""
        return f"no plan that fits the devices keeps all of this: {asked}{left_out}"
    return closest_miss(request, reasons, build)


def nothing_runs(request: Request, refused: Counter[str]) -> str:
    """Say why not even one layout is left to try."""
    model, cluster, job = request.model, request.cluster, request.job
    unfit = list(job_obstacles(request.space, job))
    if unfit:
        trains = [
            name
            for name, other in frameworks().items()
            if other.space is not None and not list(job_obstacles(other.space, job))
        ]
        named = f"name another --framework: {', '.join(trains)}" if trains else "leave it out"
        return f"{request.framework.name} has no {'; no '.join(unfit)}. Change that, or {named}"
    in_the_way = "; ".join(dividing(request))
    if in_the_way and not refused:
        return (
            f"no layout of {model.name} uses all {cluster.devices} devices and divides a global "
            f"batch of {job.global_batch}. {in_the_way}"
        )
    below, left = divmod(job.global_batch, cluster.devices)
    near = [str(count * cluster.devices) for count in (below, below + 1) if count]
    such = f", such as {' or '.join(near)}" if left else ""
    fixed = [
        name for name, field in SHORT_NAMES.items() if getattr(request.pins, field) is not None
    ]
    if left or not fixed:
        divides = (
            f"uses all {cluster.devices} devices and divides a global batch of {job.global_batch}; "
            f"ask for a global batch that the devices divide{such}, or fix less"
        )
    else:
        divides = f"keeps all that is fixed ({', '.join(fixed)}); fix less"
    if not refused:
        return f"no layout of {model.name} {divides}"
    return (
        f"{request.framework.name} can run none of {sum(refused.values()):,} layouts. "
        f"{_commonest_reasons(refused)}. No other layout {divides}"
    )


def _all_refused(spaces: Iterable[SearchSpace]) -> Counter[str]:
    """Count the refusals of all layouts, by reason."""
    refused: Counter[str] = Counter()
    for space in spaces:
        for _, group in space.bundles(refused):
            refused.update(filter(None, map(space.refusal, group.layouts())))
    return refused


def _commonest_reasons(refused: Counter[str]) -> str:
    """Return the commonest reasons, each with the number of layouts where there are several."""
    if len(refused) == 1:
        return sentence(next(iter(refused)))
    return "; ".join(f"{reason} ({count:,})" for reason, count in refused.most_common(3))


def closest_miss(request: Request, reasons: Iterable[str], build: Build) -> str:
    """Name the layout that misses by least, its fullest stage, where the bytes are, a way out.

    `reasons` are those of layouts that do not fit.
    """
    lean = _leanest(request, build, LOOKED_AT)
    if not lean:
        return nothing_runs(request, _all_refused(build(request)))
    groups, job = request.cluster.groups, request.job
    needed = [
        f"{group.devices} x {group.accelerator.name} "
        f"({bytes_text(group.accelerator.memory_bytes)} each)"
        for group in groups
    ]
    start = f"no plan of {request.model.name} fits {' and '.join(needed)}"
    at = f"at sequence {job.seq_len} and global batch {job.global_batch}."
    would_fit = ways_out(request, partial(_fitting, build))
    alone = next((f" For one, {reason}." for reason in reasons if reason.startswith("layer ")), "")
    best: tuple[float, Ranked] | None = None
    for number, _, layout in lean:
        below = None if best is None else best[0]
        best = _memory_needed(request, build, number, layout, below) or best
    if best is None:
        return f"{start} {at}{alone} Not with {MOST_MEMORY:g} times the memory either. {would_fit}"
    factor, closest = best
    if factor == 1.0:
        return f"{start} and their hosts {at}{alone} {_host_miss(request, closest)} {would_fit}"
    stages = closest.prediction.stages
    index, stage = max(
        enumerate(stages), key=lambda s: s[1].peak_memory_bytes / s[1].memory_capacity_bytes
    )
    parts = sorted(stage.memory_parts.items(), key=lambda part: -part[1])[:4]
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts)
    name, group = closest.prediction.layout_text, closest.plan.stages[index].group
    if group is None:
        needs = factor * groups[0].accelerator.memory_bytes
        where = f"needs at least {bytes_text(needs)} on each; stage {index} needs {listed}"
    else:
        where = (
            f"needs {factor:.2f} times their memory: stage {index} on {group} needs "
            f"{bytes_text(stage.peak_memory_bytes)} where "
            f"{bytes_text(stage.memory_capacity_bytes / factor)} are there, most of it {listed}"
        )
    return f"{start} {at}{alone} The closest, {name}, {where}. {would_fit}"


def _host_miss(request: Request, closest: Ranked) -> str:
    """Say what hosts would have to hold of a layout that fits its devices."""
    stages = closest.prediction.stages
    index, stage = max(enumerate(stages), key=lambda s: s[1].host_bytes)
    named = closest.plan.stages[index].group
    group = next(group for group in request.cluster.groups if named in (None, group.name))
    needs = group.devices_per_node * stage.host_bytes
    use = filled_host(group, needs, usable_share(request.framework, closest.plan.offload))
    return f"The closest, {closest.prediction.layout_text}, fits the devices, with {use}."


Lean = list[tuple[int, SearchSpace, Layout]]
"""The number of a space among those of its request, the space, and one of its layouts."""


def _leanest(request: Request, build: Build, count: int) -> Lean:
    """Return the layouts that hold least on a stage, if layers could be divided evenly."""
    every = (
        (number, space, layout)
        for number, space in enumerate(build(request))
        for layout in _lean_layouts(space)
    )

    def mean_bytes(miss: tuple[int, SearchSpace, Layout]) -> float:
        _, space, layout = miss
        return mean_stage_bytes(request.model, space.costs_of(layout)[0], layout)

    return heapq.nsmallest(count, every, key=mean_bytes)


def _lean_layouts(space: SearchSpace) -> Iterator[Layout]:
    """Yield layouts of the smallest micro-batch, states divided all the way, for all degrees and
    ways to compute the loss that a group has.

    Of a group's schedules the simplest that can run stands for all; 1F1B, where it is asked for,
    has least.
    """
    smallest: dict[tuple[int, ...], Any] = {}
    for _, group in space.bundles(Counter()):
        first = group.first
        degrees = (first.tensor, first.context, first.expert, first.pipeline, first.data)
        smallest_group = smallest.setdefault(degrees, group)
        if first.micro_batch < smallest_group.first.micro_batch:
            smallest[degrees] = group
    for group in smallest.values():
        yield from (layout for layout in group.corners() if space.refusal(layout) is None)


def mean_stage_bytes(model: ModelGraph, costs: LayoutCosts, layout: Layout) -> float:
    """Bytes of a mean stage with the choices that hold least, one micro-batch in flight."""
    layer_bytes = {
        kind: [cost.layer_bytes for cost in table] for kind, table in costs.kinds.items()
    }
    layers = sum(
        layer.repeat * min(option.states + option.stored for option in layer_bytes[layer.kind])
        for layer in model.layers
    )
    working = max(
        min(max(option.forward, option.backward) for option in table)
        for table in layer_bytes.values()
    )
    return layers / layout.pipeline + working


def _fitting(build: Build, request: Request) -> Layout | None:
    """Return a layout that fits, of those that hold least."""
    slow = request.cluster.is_mixed or request.model.edges
    lean = _leanest(request, build, LOOKED_AT if slow else TRIED)
    return next((layout for _, space, layout in lean if space.fits(layout)), None)


def _memory_needed(
    request: Request, build: Build, number: int, layout: Layout, below: float | None
) -> tuple[float, Ranked] | None:
    """Return how many times the memory a layout needs, and its plan there.

    None if that is not `below` what another needs, or over MOST_MEMORY.  Hosts have room for
    anything; `number` is that of its space.
    """
    names = [field.name for field in fields(Pins) if hasattr(layout, field.name)]
    pinned = {name: getattr(layout, name) for name in names}
    pins = replace(request.pins, **(pinned | {"loss": layout.loss or "full"}))

    def solution_with(factor: float) -> tuple[SearchSpace, Any] | None:
        groups = []
        for group in request.cluster.groups:
            size = int(factor * group.accelerator.memory_bytes)
            roomy = group.accelerator.model_copy(update={"memory_bytes": size})
            update = {
                "accelerator": roomy,
                "host_memory_bytes": None,
                "host_memory_range_bytes": None,
            }
            groups.append(group.model_copy(update=update))
        cluster = request.cluster.model_copy(update={"groups": tuple(groups)})
        space = list(build(replace(request, cluster=cluster, pins=pins)))[number]
        answer = space.solve(layout, float("inf"))
        return None if isinstance(answer, Pruned) else (space, answer)

    lower, upper = 1.0, 1.0 if below is None else max(1.0, below * (1 - HAIR))
    if below is not None and upper == below:
        return None
    while (solution := solution_with(upper)) is None:
        if below is not None or upper >= MOST_MEMORY:
            return None
        lower, upper = upper, 2 * upper
    if below is not None and lower < upper and (enough := solution_with(lower)) is not None:
        upper, solution = lower, enough
    while upper - lower > HAIR * lower:
        middle = (lower + upper) / 2
        better = solution_with(middle)
        lower, upper, solution = (
            (middle, upper, solution) if better is None else (lower, middle, better)
        )
    space, answer = solution
    return upper, space.candidate_of(answer)
