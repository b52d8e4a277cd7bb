"""Why no plan of a graph, or on unequal devices, fits: what misses by least, and a way out.

The layouts that hold least are solved on the same devices with more memory, until they fit: the one
that needs the least is the closest miss, and its prediction there says which stage holds what.  A
way out is named after it was tried: a single pin let go, an allowance, more devices of each kind, a
shorter sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from planner.cluster import ClusterSpec
from planner.model import ModelGraph
from planner.plan import Job, Layout
from planner.profile import Recompute
from planner.search.layout_queue import Bundle, Found
from planner.search.misses import FACTORS, nothing_runs
from planner.search.pins import SHORT_NAMES, Allowance, Pins
from planner.search.ranked import Ranked
from planner.search.spaces.search import Misses, Refusals, Space, runnable
from planner.units import bytes_text

LOOKED_AT = 6
"""Of the layouts with the least bytes, so many are solved."""
MOST_MEMORY = 1024.0
"""How many times the devices' memory is tried."""
MORE: tuple[Allowance, ...] = ("offload", "compress")
"""What may be allowed, so that layers hold less."""
HAIR = 0.01
"""The least memory is found to this share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for; `build` makes the spaces of a request that is changed in one thing."""

    model: ModelGraph
    cluster: ClusterSpec
    job: Job
    pins: Pins
    build: Callable[[ClusterSpec, Job, Pins], Sequence[Space[Any]]]

    def leanest(self) -> list[tuple[Space[Any], Layout]]:
        """Return the layouts that hold least on a stage if layers could be divided evenly."""
        every: list[tuple[float, int, Space[Any], Layout]] = []
        for space in self.build(self.cluster, self.job, self.pins):
            for layout in _lean_layouts(space):
                every.append((self._least_bytes(space, layout), len(every), space, layout))
        return [(space, layout) for _, _, space, layout in heapq.nsmallest(LOOKED_AT, every)]

    def _least_bytes(self, space: Space[Any], layout: Layout) -> float:
        """Mean bytes of a stage in the leanest options."""
        kinds = space.costs_of(layout)[0].kinds
        held = sum(
            layer.repeat * min(c.resident_bytes + c.stored_bytes for c in kinds[layer.kind])
            for layer in self.model.layers
        )
        peak = max(min(c.transient_bytes for c in table) for table in kinds.values())
        return held / layout.pipeline + peak

    def fitting(self) -> Layout | None:
        """Return a layout that fits, of those that hold least."""
        for space, layout in self.leanest():
            if isinstance(space.solve(layout, float("inf")), Found):
                return layout
        return None

    def with_memory(self, factor: float, like: Space[Any], layout: Layout) -> Ranked | None:
        """Return the best plan of a layout on devices with so many times the memory."""
        groups = []
        for group in self.cluster.groups:
            size = int(factor * group.accelerator.memory_bytes)
            roomy = group.accelerator.model_copy(update={"memory_bytes": size})
            groups.append(group.model_copy(update={"accelerator": roomy}))
        cluster = self.cluster.model_copy(update={"groups": tuple(groups)})
        for space in self.build(cluster, self.job, self.pins):
            if type(space) is type(like) and list(space.groups) == list(like.groups):
                found = space.solve(layout, float("inf"))
                if isinstance(found, Found):
                    return space.ranked(found, cluster.name)
        return None


def closest_miss(request: Request, refused: Refusals, misses: Misses) -> str:
    """Name the layout that misses by least, its fullest stage, where the bytes are, a way out."""
    lean = request.leanest()
    if not lean:
        return nothing_runs(request.model, request.cluster, request.job, refused)
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
        found = _least_memory(request, space, layout, MOST_MEMORY if best is None else best[0])
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return f"{start} Not with {MOST_MEMORY:g} times the memory either. {_ways_out(request)}"
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
        f"{_ways_out(request)}"
    )


def _lean_layouts(space: Space[Any]) -> Iterator[Layout]:
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
    request: Request, space: Space[Any], layout: Layout, most: float
) -> tuple[float, Ranked] | None:
    """Return how many times the memory a layout needs, and its plan there; None if over `most`."""
    low, high = 1.0, 2.0
    found = request.with_memory(high, space, layout)
    while found is None:
        if high >= most:
            return None
        low, high = high, 2 * high
        found = request.with_memory(high, space, layout)
    while high - low > HAIR * low:
        middle = (low + high) / 2
        better = request.with_memory(middle, space, layout)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return high, found


def _ways_out(request: Request) -> str:
    found = [*_pins_let_go(request), *_more_devices(request), *_shorter_sequence(request)]
    if not found:
        return (
            f"No change of devices or sequence alone, up to {FACTORS[-1]} times, would make it fit."
        )
    return f"It would fit {', or '.join(found)}."


def _pins_let_go(request: Request) -> Iterator[str]:
    """Yield each pin that stands in the way alone, and what may be allowed."""
    pins = request.pins
    for name, field in SHORT_NAMES.items():
        if getattr(pins, field) is None or field == "activations":
            continue
        if field == "recompute":
            for value in reversed(get_args(Recompute)):
                if replace(request, pins=replace(pins, recompute=value)).fitting():
                    yield f"with recompute={value}"
                    break
            continue
        open_ = replace(pins, **{field: None})  # type: ignore[arg-type]
        layout = replace(request, pins=open_).fitting()
        if layout is not None:
            yield f"with {name}={getattr(layout, field)}"
    if pins.activations is None:
        for word in MORE:
            if word not in pins.allowed:
                more = replace(pins, allowed=pins.allowed | {word})
                if replace(request, pins=more).fitting():
                    yield f"with --allow {word}"


def _more_devices(request: Request) -> Iterator[str]:
    """Yield how often each kind of device must be there twice, if that helps."""
    cluster = request.cluster
    for factor in FACTORS:
        if not cluster.tiers:
            return
        widest = cluster.tiers[-1]
        devices = factor * cluster.devices
        larger = cluster.model_copy(
            update={
                "groups": tuple(
                    group.model_copy(update={"nodes": factor * group.nodes})
                    for group in cluster.groups
                ),
                "tiers": (
                    *cluster.tiers[:-1],
                    widest.model_copy(update={"devices": max(widest.devices, devices)}),
                ),
            }
        )
        if replace(request, cluster=larger).fitting():
            listed = " and ".join(f"{group.devices} x {group.name}" for group in larger.groups)
            yield f"on {listed}"
            return


def _shorter_sequence(request: Request) -> Iterator[str]:
    """Yield the sequence that fits; what was traced has the length that it was traced at."""
    for factor in FACTORS if request.model.architecture is not None else ():
        if request.job.seq_len % factor:
            return
        shorter = replace(request.job, seq_len=request.job.seq_len // factor)
        if replace(request, job=shorter).fitting():
            yield f"at sequence {shorter.seq_len}"
            return
