"""Why no plan of a graph, or on unequal devices, fits: what misses by least, and a way out.

The layouts that hold least are solved on the same devices with more memory, until they fit: the one
that needs the least is the closest miss, and its prediction there says which stage holds what.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planner.plan import Layout
from planner.request import Request
from planner.search.layout_queue import Bundle, Found
from planner.search.misses import mean_least_bytes, nothing_runs
from planner.search.ranked import Ranked
from planner.search.spaces.search import LayoutSpace, Misses, Refusals, runnable
from planner.search.ways_out import ways_out
from planner.units import bytes_text

LOOKED_AT = 6
"""Of the layouts with the least bytes, so many are solved."""
MOST_MEMORY = 1024.0
"""How many times the devices' memory is tried."""
HAIR = 0.01
"""The least memory is found to this share of it."""


Build = Callable[[Request], Sequence[LayoutSpace[Any]]]
"""The spaces of a request."""


def _leanest(request: Request, build: Build) -> list[tuple[LayoutSpace[Any], Layout]]:
    """Return the layouts that hold least on a stage if layers could be divided evenly."""
    every: list[tuple[float, int, LayoutSpace[Any], Layout]] = []
    for space in build(request):
        for layout in _lean_layouts(space):
            least = mean_least_bytes(request.model, space.costs_of(layout)[0], layout)
            every.append((least, len(every), space, layout))
    return [(space, layout) for _, _, space, layout in heapq.nsmallest(LOOKED_AT, every)]


def _fitting(build: Build, request: Request) -> Layout | None:
    """Return a layout that fits, of those that hold least."""
    for space, layout in _leanest(request, build):
        if isinstance(space.solve(layout, float("inf")), Found):
            return layout
    return None


def _with_memory(
    request: Request, build: Build, factor: float, like: LayoutSpace[Any], layout: Layout
) -> Ranked | None:
    """Return the best plan of a layout on devices with so many times the memory."""
    groups = []
    for group in request.cluster.groups:
        size = int(factor * group.accelerator.memory_bytes)
        roomy = group.accelerator.model_copy(update={"memory_bytes": size})
        groups.append(group.model_copy(update={"accelerator": roomy}))
    cluster = request.cluster.model_copy(update={"groups": tuple(groups)})
    for space in build(replace(request, cluster=cluster)):
        if type(space) is type(like) and list(space.groups) == list(like.groups):
            found = space.solve(layout, float("inf"))
            if isinstance(found, Found):
                return space.ranked(found)
    return None


def closest_miss(request: Request, build: Build, refused: Refusals, misses: Misses) -> str:
    """Name the layout that misses by least, its fullest stage, where the bytes are, a way out."""
    lean = _leanest(request, build)
    if not lean:
        return nothing_runs(request, refused)
    would_fit = ways_out(request, partial(_fitting, build))
    devices = " and ".join(f"{group.devices} x {group.name}" for group in request.cluster.groups)
    start = (
        f"no plan of {request.model.name} fits {devices} at sequence {request.job.seq_len} and "
        f"global batch {request.job.global_batch}."
    )
    for _, reason in misses:
        if reason.startswith("layer "):
            start += f" For one, {reason}."
            break
    best: tuple[float, Ranked] | None = None
    for space, layout in lean:
        found = _least_memory(
            request, build, space, layout, MOST_MEMORY if best is None else best[0]
        )
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return f"{start} Not with {MOST_MEMORY:g} times the memory either. {would_fit}"
    factor, ranked = best
    stages = ranked.prediction.stages
    index = max(
        range(len(stages)),
        key=lambda s: stages[s].peak_memory_bytes / stages[s].memory_capacity_bytes,
    )
    stage, group = stages[index], ranked.plan.stages[index].group
    parts = sorted(stage.memory_parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts[:4])
    where = f"stage {index}" + (f" on {group}" if group else "")
    return (
        f"{start} The closest, {ranked.prediction.layout}, needs {factor:.2f} times their memory: "
        f"{where} holds {bytes_text(stage.peak_memory_bytes)} where "
        f"{bytes_text(stage.memory_capacity_bytes / factor)} are, most of it {listed}. "
        f"{would_fit}"
    )


def _lean_layouts(space: LayoutSpace[Any]) -> Iterator[Layout]:
    """Yield layouts of the smallest micro-batch, states divided all the way, for all degrees."""
    smallest: dict[tuple[int, ...], Bundle] = {}
    for bundle in runnable(space, {}):
        first = bundle.first
        key = (first.tensor, first.context, first.expert, first.pipeline, first.data)
        known = smallest.setdefault(key, bundle)
        if first.micro_batch < known.first.micro_batch:
            smallest[key] = bundle
    for bundle in smallest.values():
        widest: dict[int, Layout] = {}
        for layout in bundle.layouts():
            known_layout = widest.setdefault(layout.zero, layout)
            if layout.data_shard > known_layout.data_shard:
                widest[layout.zero] = layout
        yield from widest.values()


def _least_memory(
    request: Request, build: Build, space: LayoutSpace[Any], layout: Layout, most: float
) -> tuple[float, Ranked] | None:
    """Return how many times the memory a layout needs, and its plan there; None if over `most`."""
    low, high = 1.0, 2.0
    found = _with_memory(request, build, high, space, layout)
    while found is None:
        if high >= most:
            return None
        low, high = high, 2 * high
        found = _with_memory(request, build, high, space, layout)
    while high - low > HAIR * low:
        middle = (low + high) / 2
        better = _with_memory(request, build, middle, space, layout)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return high, found
