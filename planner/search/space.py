"""The space that a search looks at: families of layouts, and the layouts of a family.

A family has its degrees and its micro-batch, which is what computation depends on; its layouts
differ in what is shared and sent: ZeRO level, over how many ranks, in which order the axes lie on
the links, the schedule with its stages per rank, what states are on the host and how gradients
travel (meshwright.planner.search.offload_choices).  Degrees are divisors: tensor x context x data
x pipeline = devices; micro-batches divide each data-parallel rank's share of the global batch.

Stages per rank are 2 to 8 for the schedules that take several, as
planner.search.partition.stage_counts shares layers among them; a number that leaves the largest
stage as large as a smaller one does is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple, get_args

from meshwright.planner.costs.collectives import fastest_relay
from meshwright.planner.costs.layer_seconds import ENDS
from meshwright.planner.costs.slowdown import paced_framework
from meshwright.planner.documents.axes import computed_by
from meshwright.planner.documents.framework_space import EVERYTHING, Facts, Space, conflicts
from meshwright.planner.documents.plan import (
    INSIDE_OUT,
    Axis,
    Compile,
    Dispatch,
    GradientCompression,
    Graphs,
    Layout,
    Offload,
    Prefetch,
    Scales,
    TensorOverlap,
    WeightGatherDtype,
)
from meshwright.planner.documents.profile import CHUNK_ROWS, ChunkedLoss, LossGradients
from meshwright.planner.operators.expert_routing import routing_of
from meshwright.planner.schedules import (
    PLAIN,
    SCHEDULES,
    Schedule,
    family_of,
    name_with_ahead,
    schedule_of,
)
from meshwright.planner.schedules.schedule import obstacle, too_long
from meshwright.planner.schedules.schedule_record import MOST_AHEAD
from meshwright.planner.search import axis_orders
from meshwright.planner.search.micro_batch_size import largest_micro_batch
from meshwright.planner.search.offload_choices import Saving
from meshwright.planner.search.partition.stage_counts import (
    MOST_COMBINED,
    LongestRun,
    run_of,
    virtual_stages,
)
from meshwright.planner.search.spaces.forwards_ahead import ahead_choices, may_run_ahead

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.requests.pins import Pins
    from meshwright.planner.requests.request import Request

LARGEST_CONTEXT = 64


class Timetable(NamedTuple):
    """A schedule, and how many stages it runs on each rank."""

    schedule: str = PLAIN
    virtual_stages: int = 1


LOGITS_SHARE = 1 / 40
"""Share of a device's memory that the logits of a chunk of the loss may take in 32 bits."""
MOST_CHUNK_ROWS = 8192
"""Largest number of rows in a chunk of the loss; larger ones gain less than 0.1 % of a step."""
ROWS_OF_TILE = 128
"""Rows of a tile of matrix products on GPUs: other numbers of rows leave a part of one empty."""
COMPILED_KERNELS = 13
"""Kernels of a block's compiled forward: those of Llama's (docs/results/runtime-speed.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Number of ranks on each axis; replicate and shard are distinguished later."""

    tensor: int
    context: int
    expert: int
    pipeline: int
    data: int


@dataclass(frozen=True, slots=True)
class ShardingChoice:
    """ZeRO level, how the data axis is divided, and where the axes lie."""

    zero: int
    shard: int
    replicate: int
    order: tuple[Axis, ...]
    prefetch: Prefetch = 0
    reshard_after_forward: int | None = None


class Sharings(tuple[ShardingChoice, ...]):
    """Sharings that families have in common; their hash is worked out once."""

    _hash: int | None = None

    def __hash__(self) -> int:
        """Return the hash of the tuple."""
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutFamily:
    """Layouts of equal degrees and micro-batch whose tensor and context groups use equal links.

    `sharings` begin with the simplest, and at each ZeRO level with the most ranks.  Two families
    are never equal: a search has each once, and tells it from the others as an object.
    """

    degrees: Degrees
    micro_batch: int
    micro_batches: int
    sharings: Sharings
    timetables: tuple[Timetable, ...]
    savings: tuple[Saving, ...] = (Saving(),)
    place: axis_orders.Spans = ()
    """Reach of tensor and context groups within each tier."""
    ahead: Sharings | None = None
    """Sharings under which ranks may run forwards ahead of links, some of all; None: every one."""
    sequence_parallel: bool = True
    losses: tuple[ChunkedLoss | None, ...] = (None,)
    compile: Compile = "none"
    tensor_overlap: TensorOverlap = "none"
    graphs: Graphs = "none"
    scales: Scales = "tensorwise"
    weight_gather_dtype: WeightGatherDtype = "full"
    """Number format of gathered weights, of layouts that gather them in each pass."""
    dispatch: Dispatch = "alltoall"
    hierarchical_all_to_all: int | None = None

    @property
    def computation_key(self) -> tuple[object, ...]:
        """Choices that computation inside layers depends on, the ways to compute the loss last."""
        degrees = self.degrees
        return (
            degrees.tensor,
            degrees.context,
            degrees.expert,
            self.micro_batch,
            self.place,
            *computed_by(self),
            self.weight_gather_dtype,
            self.losses,
        )

    @property
    def size(self) -> int:
        """Number of layouts."""
        sharings = sum(len(self.sharings_of(timetable)) for timetable in self.timetables)
        return sharings * len(self.savings) * len(self.losses)

    def sharings_of(self, timetable: Timetable, some: Sharings | None = None) -> Sharings:
        """Return the sharings of a timetable, of all or of some."""
        some = self.sharings if some is None else some
        if self.ahead is None or not schedule_of(timetable.schedule).ahead:
            return some
        return _common(some, self.ahead)

    def part(self, **changes: object) -> LayoutFamily:
        """Return a part of the family, as `dataclasses.replace` does and ten times as fast."""
        family = object.__new__(LayoutFamily)
        family.__dict__.update(self.__dict__, **changes)
        return family

    def by_timetable(self) -> Iterator[LayoutFamily]:
        """Yield the part of the family that each timetable makes up."""
        for timetable in self.timetables:
            yield self.part(timetables=(timetable,))

    def by_saving(self) -> Iterator[LayoutFamily]:
        """Yield the part of the family that each saving makes up."""
        for saving in self.savings:
            yield self.part(savings=(saving,))

    def by_loss(self) -> Iterator[LayoutFamily]:
        """Yield the part of the family that each way to compute the loss makes up."""
        if len(self.losses) == 1:
            yield self
            return
        for loss in self.losses:
            yield self.part(losses=(loss,))

    def layout(
        self,
        sharing: ShardingChoice,
        timetable: Timetable,
        saving: Saving | None = None,
        *,
        place: int = 0,
    ) -> Layout:
        """Return one layout; without `saving`, of the first.  `place` is that of its loss."""
        saving = saving or self.savings[0]
        here = saving.offload != "parameters"
        return Layout(
            tensor=self.degrees.tensor,
            context=self.degrees.context,
            expert=self.degrees.expert,
            pipeline=self.degrees.pipeline,
            data_replicate=sharing.replicate,
            data_shard=sharing.shard,
            zero=sharing.zero,
            schedule=timetable.schedule,
            virtual_stages=timetable.virtual_stages,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            order=sharing.order,
            prefetch=sharing.prefetch,
            reshard_after_forward=sharing.reshard_after_forward,
            **saving._asdict(),
            scales=self.scales,
            dispatch=self.dispatch,
            hierarchical_all_to_all=self.hierarchical_all_to_all,
            weight_gather_dtype=self.weight_gather_dtype if sharing.zero == 3 and here else "full",
            sequence_parallel=self.sequence_parallel,
            loss=self.losses[place],
            compile=self.compile,
            tensor_overlap=self.tensor_overlap,
            graphs=self.graphs,
        )

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout."""
        able = {timetable: set(self.sharings_of(timetable)) for timetable in self.timetables}
        for sharing in self.sharings:
            for timetable in self.timetables:
                if sharing not in able[timetable]:
                    continue
                for saving in self.savings:
                    for place in range(len(self.losses)):
                        yield self.layout(sharing, timetable, saving, place=place)

    def corners(self) -> Iterator[Layout]:
        """Yield layouts of the simplest timetable, states divided the most at each ZeRO level."""
        for level in {sharing.zero: None for sharing in self.sharings}:
            widest = next(sharing for sharing in self.sharings if sharing.zero == level)
            for saving in self.savings:
                for place in range(len(self.losses)):
                    yield self.layout(widest, self.timetables[0], saving, place=place)

    @property
    def first(self) -> Layout:
        """The least complex layout."""
        return self.layout(self.sharings[0], self.timetables[0], self.savings[0])


@lru_cache(maxsize=1 << 12)
def _common(some: Sharings, others: Sharings) -> Sharings:
    both = set(others)
    return Sharings(sharing for sharing in some if sharing in both)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    divisors, left, factor = [1], number, 2
    while factor * factor <= left:
        powers = [1]
        while left % factor == 0:
            left //= factor
            powers.append(powers[-1] * factor)
        divisors = [d * power for d in divisors for power in powers]
        factor += 1
    return sorted(divisors if left == 1 else [*divisors, *(d * left for d in divisors)])


def layouts(request: Request) -> Iterator[Layout]:
    """Yield every layout of the framework's space that uses all devices and divides the batch.

    What a framework cannot execute is not left out here: the search asks it and counts that.
    """
    for degrees in every_degrees(request):
        for family in families(request, degrees):
            yield from family.layouts()


def every_degrees(request: Request) -> Iterator[Degrees]:
    """Yield the degrees that use all devices and divide the batch, simplest first."""
    model, job, pins, space = request.model, request.job, request.pins, request.space
    devices, in_node = request.cluster.devices, request.cluster.groups[0].devices_per_node

    def degrees_within(axis: Axis, degrees: list[int]) -> list[int]:
        most, fewest = space.most_ranks(axis, in_node), 2 if axis in pins.divided else 1
        return [n for n in degrees if fewest <= n and (most is None or n <= most)]

    for tensor in _allowed_values(degrees_within("tensor", divisors(devices)), pins.tensor):
        if tensor > most_tensor_parallel(model):
            continue
        length = model.positions or job.seq_len
        contexts = degrees_within("context", _context_degrees(length, devices // tensor, pins))
        for context in _allowed_values(contexts, pins.context):
            pipelines = degrees_within("pipeline", divisors(devices // tensor // context))
            for pipeline in _allowed_values(pipelines, pins.pipeline):
                data = devices // tensor // context // pipeline
                if pipeline > len(model.chain) or (pins.data or data) != data:
                    continue
                if job.global_batch % data:
                    continue
                experts = _expert_degrees(model, devices // pipeline, space.expert)
                for expert in _allowed_values(experts, pins.expert):
                    yield Degrees(
                        tensor=tensor,
                        context=context,
                        expert=expert,
                        pipeline=pipeline,
                        data=data,
                    )


def micro_batches(request: Request, degrees: Degrees) -> list[tuple[int, int]]:
    """Return the sizes of a micro-batch that divide a rank's share, each with their number.

    Sizes that no device has the memory for are left out, unless they are pinned, and those whose
    schedule would be too long to list.
    """
    pins, share = request.pins, request.job.global_batch // degrees.data
    most = largest_micro_batch(request, degrees.tensor * degrees.context)
    return [
        (size, share // size)
        for size in _allowed_values(divisors(share), pins.micro_batch)
        if (size <= most or pins.micro_batch is not None)
        and too_long(stages=degrees.pipeline, micro_batches=share // size) is None
    ]


def timetables(
    request: Request,
    degrees: Degrees | Layout,
    count: int,
    ahead: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[Timetable, ...]:
    """Return the timetables that differ and can run `count` micro-batches, simplest first.

    Without a pipeline there is only one.  A graph of layers has one stage a rank.  `ahead` are the
    degrees' `ahead_choices`, where they are known.
    """
    model, pins, space, pipeline = request.model, request.pins, request.space, degrees.pipeline
    ahead = ahead_choices(request, degrees) if ahead is None else ahead
    ahead = ahead if count > pipeline else ahead[:1]
    every = _timetables(run_of(model), pipeline, count, pins, space.virtual_stages, ahead)
    if model.edges:
        return tuple(timetable for timetable in every if timetable.virtual_stages == 1)
    if space.schedules is None or pipeline == 1:
        return every
    return tuple(
        timetable for timetable in every if family_of(timetable.schedule) in space.schedules
    )


@lru_cache(maxsize=1 << 14)
def _timetables(
    run: LongestRun | None,
    pipeline: int,
    count: int,
    pins: Pins,
    most: int,
    ahead: tuple[tuple[int, ...], ...],
) -> tuple[Timetable, ...]:
    every: list[Timetable] = []
    names = [
        name_with_ahead(name, numbers)
        for name, schedule in SCHEDULES.items()
        for numbers in ahead
        if not numbers or schedule.with_ahead
    ]
    for name in names if pipeline > 1 else (PLAIN,):
        schedule = schedule_of(name)
        if pins.schedule not in (None, family_of(name)):
            continue
        if schedule.stale and "stale" not in pins.allowed:
            continue
        for virtual in _stages_per_rank(schedule, run, pipeline, pins.virtual_stages, most):
            shape = {"stages": pipeline * virtual, "micro_batches": count}
            if pipeline == 1 or obstacle(name, virtual_stages=virtual, **shape) is None:
                every.append(Timetable(name, virtual))
    return tuple(every)


def _stages_per_rank(
    schedule: Schedule, run: LongestRun | None, pipeline: int, pinned: int | None, most: int
) -> list[int]:
    """Return the numbers of stages per rank, at most `most`, that a schedule takes."""
    if not schedule.several_stages:
        return _allowed_values([1], pinned)
    if run is None or most == 1:
        return []
    if schedule.placement == "v":
        combined = run.before + run.behind <= MOST_COMBINED
        return _allowed_values([2] if combined and run.most_stages >= 2 * pipeline else [], pinned)
    if pinned is not None:
        return [pinned] if 1 < pinned <= run.most_stages // pipeline else []
    return virtual_stages(run, pipeline, most=most)


def sharings(degrees: Degrees, pins: Pins, *, space: Space = EVERYTHING) -> list[tuple[int, int]]:
    """Return ZeRO levels with the number of ranks that divide the states, simplest first.

    Level 0 replicates; the others shard over the whole data axis or part of it, which leaves the
    rest to replicate (hybrid sharding), with the context axis, which may be all that there is.
    Where there is one rank there is nothing to divide.
    """
    result = []
    group = degrees.context * degrees.tensor
    beside = degrees.context if space.shards_context else 1
    for zero in _allowed_values(list(space.zero) if degrees.data * beside > 1 else [0], pins.zero):
        for shard in reversed(divisors(degrees.data)) if zero else [1]:
            if zero and (shard * beside == 1 or (shard < degrees.data and not space.hybrid)):
                continue
            if (shard * group) % degrees.expert or pins.data_shard not in (None, shard):
                continue
            result.append((zero, shard))
    return result


def families(
    request: Request,
    degrees: Degrees,
    saved: tuple[Saving, ...] = (Saving(),),
    overlaps: Sequence[Layout] = (),
) -> Iterator[LayoutFamily]:
    """Yield the families with these degrees: one per micro-batch and place of the inner axes."""
    pins, space = request.pins, request.space
    tiers = tiers_of(request.cluster)
    divided = request.framework.tensor.sequence_parallel or degrees.tensor == 1
    by_place: dict[axis_orders.Spans, list[ShardingChoice]] = {}
    if space.axis_order == "fixed":
        pins = replace(pins, order=pins.order or INSIDE_OUT)
    for zero, shard in sharings(degrees, pins, space=space):
        replicate = degrees.data // shard
        ways_to_gather = tuple(gathers(request, degrees, zero, shard, saved))
        orders = _orders(tiers, degrees, shard, replicate, pins) if ways_to_gather else {}
        for spans, order in orders.items():
            inner = by_place.setdefault(spans[:2], [])  # of tensor and context
            for prefetch, reshard_after_forward in ways_to_gather:
                inner.append(
                    ShardingChoice(zero, shard, replicate, order, prefetch, reshard_after_forward)
                )
    shared = {place: Sharings(sharings) for place, sharings in by_place.items()}
    copy_ranks = degrees.tensor * degrees.context * degrees.expert * degrees.pipeline
    whole = ((at, Sharings(s for s in every if not s.zero)) for at, every in shared.items())
    undivided = {place: every for place, every in whole if every} if not pins.graphs else shared
    """Sharings of layouts whose micro-batches may be captured; of pinned ones a refusal says so."""
    ways: dict[str, tuple[Compile, tuple[ChunkedLoss | None, ...]]] = {}
    hierarchical_all_to_all = relay_of(request, degrees)
    words = tuple(choice.tensor_overlap for choice in overlaps) or ("none",)
    ahead_of = ahead_choices(request, degrees)
    slow = _on_slow_links(request, degrees, shared) if any(ahead_of) else {}
    for size, count in micro_batches(request, degrees):
        every: dict[tuple[Compile, tuple[ChunkedLoss | None, ...]], list[Timetable]] = {}
        waits = waits_for_host(request, degrees, size)
        for timetable in timetables(request, degrees, count, ahead_of):
            way = ways.get(timetable.schedule)
            if way is None:
                blocks = compiles(request, degrees, timetable.schedule)
                way = ways[timetable.schedule] = blocks, losses(request, timetable.schedule)
            every.setdefault(way, []).append(timetable)
            if waits and weighs_compilation(request, way[0]):
                every.setdefault(("none", way[1]), []).append(timetable)
        for (blocks, chosen), alike in every.items():
            for place, choices, overlap, graphs in (
                (*shared_place, overlap, captured)
                for captured in captures(request, copy_ranks)
                for shared_place in (undivided if captured == "micro_batch" else shared).items()
                for overlap in words
            ):
                if overlap != "none" and blocks == "none" and request.pins.compile is None:
                    continue
                tables, ahead = _by_links(alike, choices, slow.get(place))
                if not tables:
                    continue
                yield LayoutFamily(
                    degrees=degrees,
                    micro_batch=size,
                    micro_batches=count,
                    sharings=choices,
                    timetables=tables,
                    savings=saved,
                    place=place,
                    ahead=ahead,
                    sequence_parallel=divided,
                    losses=chosen,
                    compile=blocks,
                    tensor_overlap=overlap,
                    graphs=graphs,
                    scales=request.scales,
                    weight_gather_dtype=weight_gather_dtype(request),
                    dispatch=(pins.dispatch if degrees.expert > 1 else None) or "alltoall",
                    hierarchical_all_to_all=hierarchical_all_to_all,
                )


def _by_links(
    some: Sequence[Timetable], sharings: Sharings, slow: Sharings | None
) -> tuple[tuple[Timetable, ...], Sharings | None]:
    """Return the timetables that some of the sharings have, and sharings on `slow` links.

    Where all are on slow links, or no timetable runs ahead of any, there is nothing to tell apart.
    """
    plain = tuple(timetable for timetable in some if not schedule_of(timetable.schedule).ahead)
    ahead = _common(sharings, slow) if slow else Sharings()
    if not ahead:
        return plain, None
    return tuple(some), None if ahead == sharings or len(plain) == len(some) else ahead


def _on_slow_links(
    request: Request, degrees: Degrees, shared: dict[axis_orders.Spans, Sharings]
) -> dict[axis_orders.Spans, Sharings]:
    """Return the sharings of a place whose pipelines may run forwards ahead of their links."""
    able = {
        place: Sharings(
            sharing
            for sharing in every
            if may_run_ahead(
                request,
                Layout(
                    tensor=degrees.tensor,
                    context=degrees.context,
                    pipeline=degrees.pipeline,
                    data_replicate=sharing.replicate,
                    data_shard=sharing.shard,
                    order=sharing.order,
                ),
            )
        )
        for place, every in shared.items()
    }
    return {place: every for place, every in able.items() if every}


def relay_of(request: Request, degrees: Degrees | Layout) -> int | None:
    """Return how many ranks of an expert group hand on tokens that are sent to them once.

    Unless it is pinned, the fastest by the links' own rates, of a sequence's tokens; None, to send
    each token to each of its experts, where that is no slower, as inside a node.
    """
    pins, a = request.pins, request.model.architecture
    if degrees.expert == 1 or not request.model.expert_count:
        return None
    pinned = pins.hierarchical_all_to_all is not None or pins.dispatch is not None
    if pinned or not request.space.hierarchical_all_to_all or a is None or a.experts is None:
        return pins.hierarchical_all_to_all
    tokens = request.job.seq_len / (degrees.tensor * degrees.context)
    return fastest_relay(
        request.cluster.tiers,
        routing_of(a.experts),
        ranks=degrees.expert,
        copy_bytes=tokens * a.hidden_size * 2,
        devices=request.cluster.devices,
    )


def plainest(request: Request, degrees: Degrees) -> Layout:
    """Return a layout of these degrees that shares nothing."""
    job, pins = request.job, request.pins
    whole = (1, job.global_batch // degrees.data)
    size, count = (micro_batches(request, degrees) or [whole])[-1]
    overlap = (pins.tensor_overlap if degrees.tensor > 1 else None) or "none"
    return Layout(
        tensor=degrees.tensor,
        context=degrees.context,
        expert=degrees.expert,
        pipeline=degrees.pipeline,
        data_replicate=degrees.data,
        micro_batch=size,
        micro_batches=count,
        loss=pins.chunks,
        scales=request.scales,
        compile=pins.compile or ("none" if overlap == "none" else "block"),
        tensor_overlap=overlap,
        graphs=pins.graphs or "none",
        sequence_parallel=request.framework.tensor.sequence_parallel or degrees.tensor == 1,
    )


def gathers(
    request: Request, degrees: Degrees, zero: int, shard: int, saved: Sequence[Saving]
) -> Iterator[tuple[Prefetch, int | None]]:
    """Yield depths of prefetching and ranks that keep parameters between passes, plainest first.

    On GPUs ZeRO-3 may ask for one unit ahead; where its ranks are of several nodes, those of one
    may keep parameters divided among themselves.  Other depths, and whole parameters, are there for
    who pins them: the first take memory and hide no more of units that are alike, the second take
    what ZeRO-2 takes, and longer.
    """
    pins, space, group = request.pins, request.space, request.cluster.groups[0]
    moved = any(saving.offload == "parameters" for saving in saved)
    asks = zero == 3 and degrees.pipeline == degrees.expert == 1 and not moved
    depths: list[Prefetch] = [0]
    within: list[int | None] = [None]
    if asks and group.accelerator.kind in ("cuda", "rocm"):
        depths += [1] if 1 in space.prefetch else []
        node = group.devices_per_node // degrees.tensor
        wide = weight_gather_dtype(request) == "full"
        if (
            space.reshard_after_forward
            and wide
            and degrees.context == 1
            and 1 < node < shard
            and shard % node == 0
        ):
            within.append(node)
    if pins.prefetch is not None:
        depths = [pins.prefetch] if asks or not pins.prefetch else []
    if pins.reshard_after_forward is not None:
        fits = asks and degrees.context == 1 and pins.reshard_after_forward < shard
        within = (
            [pins.reshard_after_forward] if fits and shard % pins.reshard_after_forward == 0 else []
        )
    yield from itertools.product(depths, within)


def compiles(request: Request, degrees: Degrees, schedule: str) -> Compile:
    """Return what of a layout is compiled.

    Where the user has not said: blocks on GPUs, if nothing hinders, since each of their operators
    takes fewer kernels and keeps no more bytes.  On CPUs products rule and nothing is gained.
    """
    pinned = request.pins.compile
    if pinned is not None:
        return pinned
    space, has_architecture = request.space, request.model.architecture is not None
    if not (gpus(request) and "block" in space.compile and has_architecture):
        return "none"
    layout = Layout(
        pipeline=degrees.pipeline, expert=degrees.expert, schedule=schedule, compile="block"
    )
    conflicts_here = conflicts(space, Facts(request.model, request.cluster, request.job, layout))
    hindered = any(conflict.place == "compile" for conflict in conflicts_here)
    return "none" if hindered else "block"


def weighs_compilation(request: Request, blocks: Compile) -> bool:
    """Return whether blocks that can be compiled may also be left as they are."""
    return blocks == "block" and request.pins.compile is None and "none" in request.space.compile


def captures(request: Request, copy_ranks: int) -> tuple[Graphs, ...]:
    """Return whether micro-batches run as they are, or as captured graphs too.

    Where the user allows it and has not said: on GPUs with a copy of the model each, whose passes
    send nothing, of a model whose operators are known; `copy_ranks` are those of a copy.  A
    profile's seconds are those of passes that run as they are.
    """
    if request.pins.graphs is not None:
        return (request.pins.graphs,)
    allowed = "graphs" in request.pins.allowed and "micro_batch" in request.space.graphs
    from_operators = request.model.architecture is not None and request.profile is None
    if allowed and from_operators and copy_ranks == 1 and gpus(request):
        return ("none", "micro_batch")
    return ("none",)


def waits_for_host(request: Request, degrees: Degrees, micro_batch: int) -> bool:
    """Return whether the host may take longer for a compiled block than the device.

    Else compiled blocks are never the slower ones: their kernels are fewer.  The device takes at
    least what the products of a block's weights take at its peak; the host guards in Python and
    some launches.
    """
    job, host = request.job, paced_framework(request.framework, request.cluster).host
    tokens = micro_batch * job.seq_len / (degrees.tensor * degrees.context)
    blocks = (layer for layer in request.model.layers if layer.kind not in ENDS)
    parameters = max((layer.parameters for layer in blocks), default=0.0)
    peak = max(request.cluster.groups[0].accelerator.peak_flops.values())
    launches_s = COMPILED_KERNELS * host.kernel_s.forward
    return 2 * parameters * tokens / peak < host.compiled_s.forward + launches_s


def losses(request: Request, schedule: str) -> tuple[ChunkedLoss | None, ...]:
    """Return the ways to compute the loss: of all logits, or in chunks of `chunk_rows`.

    Gradients are made in forward, or anew in backward, which takes longer and has less.  Of a
    frozen output projection they are made in backward alone: its chunks then hold nothing in
    between.  On CPUs products rule and nothing is gained by chunks, unless the user asks for them.
    The way with less machinery comes first.
    """
    if request.pins.loss is not None:
        return (request.pins.chunks,)
    model, a = request.model, request.model.architecture
    makes = any(layer.logits for layer in model.layers) if a is None else not a.classes
    if not makes or model.edges or not (request.space.chunked_loss and gpus(request)):
        return (None,)
    if schedule_of(schedule).stale:
        return (None,)
    least_bytes = min(group.accelerator.memory_bytes for group in request.cluster.groups)
    ways = chunked_losses(chunk_rows(model, least_bytes))
    return (None, ways[-1]) if request.job.lora else ways


@cache
def chunked_losses(rows: int) -> tuple[ChunkedLoss | None, ...]:
    """Return the ways to compute the loss with chunks of `rows`; None is of all logits."""
    return (None, *(ChunkedLoss(rows=rows, gradients=name) for name in get_args(LossGradients)))


def chunk_rows(model: ModelGraph, memory_bytes: float) -> int:
    """Rows in a chunk of the loss on devices of `memory_bytes`, in proportion to it.

    Chunks that are too small read the output projection, and add to its gradient, too often; large
    ones take memory.  The logits of a chunk take at most `LOGITS_SHARE` of the memory in 32 bits,
    within `CHUNK_ROWS` and `MOST_CHUNK_ROWS`.  Rows are whole tiles of a product (`ROWS_OF_TILE`).
    A chunk grows by less than the memory does where that grows by the logits of 342 rows or more:
    then what fits also fits there.
    """
    a = model.architecture
    outputs = [layer.logits.outputs for layer in model.layers if layer.logits is not None]
    widest = max([*outputs, *([a.vocab_size] if a is not None else []), 1])
    rows = int(memory_bytes * LOGITS_SHARE / (4 * widest))
    return min(MOST_CHUNK_ROWS, max(CHUNK_ROWS, rows // ROWS_OF_TILE * ROWS_OF_TILE))


def gpus(request: Request) -> bool:
    """Return whether all devices are GPUs."""
    return all(group.accelerator.kind in ("cuda", "rocm") for group in request.cluster.groups)


def tensor_overlaps(
    plain: Layout, request: Request, refusal: Callable[[Layout], str | None]
) -> tuple[Layout, ...]:
    """Return a layout with collectives of tensor parallelism one at a time, and beside products.

    The second only if it is asked for; `refusal` tells why a layout like the `plain` one does not
    run.
    """
    if plain.tensor == 1 or request.pins.tensor_overlap is not None:
        return (plain,)
    if "async-tensor" not in request.pins.allowed or "async" not in request.space.tensor_overlaps:
        return (plain,)
    overlapped = replace(plain, compile="block", tensor_overlap="async")
    return (plain,) if refusal(overlapped) else (plain, overlapped)


def weight_gather_dtype(request: Request) -> WeightGatherDtype:
    """Return how weights travel that ranks gather in each pass."""
    return request.pins.weight_gather_dtype or request.space.usual_gather_dtype(
        request.job.precision, request.scales
    )


def _orders(
    tiers: tuple[int, ...], degrees: Degrees, shard: int, replicate: int, pins: Pins
) -> dict[axis_orders.Spans, tuple[Axis, ...]]:
    """Return the orders of axes that differ; experts take neighbouring ranks, so there is one."""
    sizes = (degrees.tensor, degrees.context, shard, replicate, degrees.pipeline)
    if degrees.expert > 1 and pins.order not in (None, INSIDE_OUT):
        return {}
    if degrees.expert > 1 or pins.order is not None:
        order = pins.order or INSIDE_OUT
        return {axis_orders.spans(tiers, sizes, order): order}
    return axis_orders.distinct_orders(tiers, sizes)


def canonical(cluster: ClusterSpec, layout: Layout) -> Layout:
    """Return the layout of the space whose axes lie on the same links."""
    tiers, sizes = tiers_of(cluster), axis_orders.degrees_of(layout)
    order = axis_orders.distinct_orders(tiers, sizes)[axis_orders.spans(tiers, sizes, layout.order)]
    return layout if order == layout.order else replace(layout, order=order)


def tiers_of(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return how many devices each link tier reaches."""
    return tuple(tier.devices for tier in cluster.tiers)


def _context_degrees(length: int, ranks: int, pins: Pins) -> list[int]:
    """Return degrees that divide a sequence, up to the largest worth a look."""
    return [
        degree
        for degree in divisors(ranks)
        if length % degree == 0 and (degree <= LARGEST_CONTEXT or pins.context is not None)
    ]


def _expert_degrees(model: ModelGraph, ranks: int, most: int | None) -> list[int]:
    if not model.expert_count:
        return [1]
    every = [degree for degree in divisors(model.expert_count) if ranks % degree == 0]
    return every if most is None else [degree for degree in every if degree <= most]


def _allowed_values(values: list[int], pinned: int | None) -> list[int]:
    return values if pinned is None else [value for value in values if value == pinned]


def most_tensor_parallel(model: ModelGraph) -> int:
    """Return the most ranks that layers can be divided among by tensor parallelism."""
    if model.architecture:
        return model.architecture.heads
    return max((1, *model.tensor_degrees))


def complexity(layout: Layout) -> tuple[int, ...]:
    """Order layouts by how much machinery they need; among equals the simplest wins.

    No two layouts of a space have the same complexity.
    """
    return (
        layout.pipeline,
        layout.tensor,
        layout.context,
        layout.expert,
        layout.zero,
        layout.data_replicate if layout.zero else 0,
        *_place(layout.schedule),
        layout.virtual_stages,
        *(_PLACES[choice] for choice in Saving.of_layout(layout)),
        layout.prefetch,
        layout.reshard_after_forward or 0,
        _loss_rank(layout.loss),
        layout.compile != "none",
        layout.tensor_overlap != "none",
        layout.graphs != "none",
        *_axes(layout.order),
        -layout.micro_batch,
    )


def _loss_rank(loss: ChunkedLoss | None) -> int:
    """Return how much machinery a way to compute the loss needs."""
    return 0 if loss is None else 1 + get_args(LossGradients).index(loss.gradients)


@lru_cache(maxsize=1 << 10)
def _axes(order: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(INSIDE_OUT.index(axis) for axis in order)


@lru_cache(maxsize=64)
def _place(schedule: str) -> tuple[int, int]:
    """Return a schedule's place among all, and a number that grows with its forwards ahead."""
    ahead = 0
    for number in schedule_of(schedule).ahead:
        ahead = ahead * (MOST_AHEAD + 1) + number
    return list(SCHEDULES).index(family_of(schedule)), ahead


_PLACES = {
    name: place
    for names in (get_args(Offload), get_args(GradientCompression))
    for place, name in enumerate(names)
}
"""Position of each choice among its like."""


def kind(layout: Layout) -> tuple[int, ...]:
    """Return what makes plans differ in kind: the degrees of their mesh."""
    return (
        layout.pipeline,
        layout.tensor,
        layout.context,
        layout.expert,
        layout.data,
    )
