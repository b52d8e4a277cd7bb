"""Peak memory of a rank: the one function by which search and prediction count bytes.

A rank of one stage with whole backwards peaks in a forward or a backward of one of its layers, with
as many micro-batches in flight as its schedule ever has.  A rank of several stages, or of split
backwards, peaks at one of the fullest moments of its order (planner.schedules.memory_peaks): a
micro-batch occupies a stage's stored bytes from its forward to its B or I, and from I to W what
`kept_bytes` of planner.costs.calibration says.  While an action runs, its stage has what the
layers so far have stored, what those behind have left for W, and the working memory of one of them.
There gradients and gathered parameters count whole at any time, since a pipeline's step keeps both
from a stage's first backward to the end of the step.

Bytes of layers are numbers, or arrays that hold them for many ways to run the same layers at once;
then so is what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike

from meshwright.planner.costs.layer_strategy import LayerBytes, StrategyParts
from meshwright.planner.costs.layout_costs import counted_by_rank
from meshwright.planner.costs.memory.gradient_buckets import allocated_gradient_bytes
from meshwright.planner.costs.memory.state_bytes import BUCKETS
from meshwright.planner.documents.tolerances import SETTLED
from meshwright.planner.operators.operator_table import either, larger, smaller
from meshwright.planner.schedules import Shape
from meshwright.planner.schedules.memory_peaks import Moments, moments

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.schedules.schedule import Order

Layers = Sequence[LayerBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """Bytes of one micro-batch that cross the ends of a stage."""

    received_bytes: float
    made_bytes: float
    """Bytes sent that this stage made; it received the rest and passes that on as it is."""
    sent_bytes: float

    def kept_bytes(self, *, sent: bool) -> float:
        """Bytes of a micro-batch in flight, of what is sent too if `sent` stays.

        A tensor that is passed on counts once.
        """
        return self.received_bytes + (self.made_bytes if sent else 0.0)

    @property
    def widest_bytes(self) -> float:
        """Bytes under way at once at the end where more crosses."""
        return max(self.received_bytes, self.sent_bytes)


class RankCosts(Protocol):
    """Costs that a rank's bytes depend on beside its layers: part of `LayoutCosts`."""

    @property
    def boundary_bytes(self) -> float:
        """Activation that crosses a stage boundary."""

    @property
    def keeps_sent(self) -> bool:
        """True if sent activations stay until their backward."""

    @property
    def context_bytes(self) -> float:
        """Bytes of the process, and of the buffers that `reduce_bytes` counts."""

    @property
    def reduce_bytes(self) -> float:
        """Bytes in which gradients are gathered for their reduction, there from the start."""

    @property
    def slack(self) -> float:
        """Reserved over allocated bytes."""

    @property
    def tight(self) -> float:
        """The same where memory is short."""

    @property
    def room_share(self) -> float:
        """Share of the room that predicted needs may take."""

    @property
    def flat_bytes_at_most(self) -> float:
        """Bytes of a shard's gradients that the optimizer's step copies together, at most."""

    @property
    def has_gradient_buckets(self) -> bool:
        """True if the gradients of neighbouring parameters are allocated together."""

    @property
    def recorded_bytes(self) -> float:
        """Bytes freed, and not reusable until a collective ends."""

    @property
    def workspace_bytes(self) -> float:
        """Bytes of libraries' workspaces, in the allocator."""


def whole_room_bytes(memory_bytes: float, costs: RankCosts) -> float:
    """Return how many bytes tensors find of so much device memory.

        (memory - context) / tight

    On CPUs `tight` is 1: there is no caching allocator.
    """
    return (memory_bytes - costs.context_bytes) / costs.tight


def room_bytes(memory_bytes: float, costs: RankCosts) -> float:
    """Return how many bytes tensors may take, by their prediction, to fit as surely as asked.

    The whole room times `uncertainty.room_share`.  The search and `planner.costs.predict` both ask
    this function what fits, for every framework.
    """
    return costs.room_share * whole_room_bytes(memory_bytes, costs)


NOT_TENSORS = ("context", "reduce buckets", "allocator overhead", "recorded buffers", "workspaces")
"""Parts of a rank's memory that the process and its allocator take.  An allocator that runs short
waits for the collectives of blocks not freed yet, so that `recorded buffers` cost no room;
`workspaces` are too small to (one in a thousand of a device)."""


def tensors_bytes(parts: Mapping[str, float]) -> float:
    """Return what of a rank's peak its tensors take; parts are those of `rank_memory_parts`."""
    return sum(size for name, size in parts.items() if name not in NOT_TENSORS)


def has_room(memory_bytes: float, parts: Mapping[str, float], costs: RankCosts) -> bool:
    """Return whether a rank's peak fits so much device memory, up to the rounding of its sum.

    The parts of the peak are those of `rank_memory_parts`.
    """
    return tensors_bytes(parts) <= room_bytes(memory_bytes, costs) * (1 + SETTLED)


def widest(passings: Sequence[StageTraffic]) -> StageTraffic | None:
    """Return what crosses the stage of a rank where most does; None where there is but one kind."""
    return max(passings, key=lambda passing: passing.widest_bytes, default=None)


def rank_memory_parts(
    costs: RankCosts,
    layout: Layout,
    stages: Mapping[int, Layers],
    *,
    rank: int,
    passing: StageTraffic | None = None,
) -> dict[str, float]:
    """Return peak bytes of a rank by cause; `stages` are its stages' layers in order.

    `passing` says what crosses the ends of its one stage where that is not one activation of the
    stream; of several stages, what crosses those where most does.
    """
    dynamic = dynamic_parts(costs, layout, stages, rank=rank, passing=passing)
    joined = sum(layer.joined for layers in stages.values() for layer in layers)
    parts = {
        **dynamic,
        "context": costs.context_bytes - costs.reduce_bytes,
        "allocator overhead": (costs.slack - 1.0) * sum(dynamic.values()) + joined,
    }
    beside = {
        "reduce buckets": costs.reduce_bytes,
        "recorded buffers": costs.recorded_bytes,
        "workspaces": costs.workspace_bytes,
    }
    parts |= {name: size for name, size in beside.items() if size}
    return parts


def dynamic_parts(
    costs: RankCosts,
    layout: Layout,
    stages: Mapping[int, Layers],
    *,
    rank: int,
    passing: StageTraffic | None = None,
) -> dict[str, float]:
    """Return the same without what the process and its allocator take."""
    if counted_by_rank(layout):
        boundary_bytes = costs.boundary_bytes if passing is None else passing.widest_bytes
        held = [
            stage_bytes(
                layers,
                boundary_bytes,
                first=stage == 0,
                last=stage == layout.stages - 1,
                keeps_sent=costs.keeps_sent,
            )
            for stage, layers in sorted(stages.items())
        ]
        return parts_of_several(layout, held, rank, boundary_bytes=boundary_bytes)
    ((stage, layers),) = stages.items()
    return _of_one(costs, layout, layers, stage, passing)


def _of_one(
    costs: RankCosts, layout: Layout, layers: Layers, stage: int, passing: StageTraffic | None
) -> dict[str, float]:
    """Return the peak of a rank of one stage with whole backwards.

    Every micro-batch in flight also keeps the tensors that the pipeline received and, of frameworks
    that keep them, sent (one that the first layer stores counts once); one more is received ahead,
    and a gradient is on its way.
    """
    alive = in_flight_at_most(layout, stage)
    first, last = stage == 0, stage == layout.stages - 1
    buffers = 0.0
    if passing is not None:
        buffers = passing.kept_bytes(sent=costs.keeps_sent) * alive + passing.widest_bytes * 2
    elif not (first and last):
        ends = _ends(layers, first=first, last=last, keeps_sent=costs.keeps_sent)
        buffers = (ends * alive + 2) * costs.boundary_bytes
    # Those of captured graphs have their memory from step to step.
    replacing = alive == layout.micro_batches and layout.graphs == "none"
    peaks = [*_moments(layers, alive, replacing=replacing, buckets=costs.has_gradient_buckets)]
    # The optimizer's moment.
    flat = smaller(sum(layer.flat for layer in layers), costs.flat_bytes_at_most)
    written = sum(layer.gradients for layer in layers)
    nothing = 0.0 * written
    peaks.append((nothing, written, nothing, streamed_bytes(layers) + larger(0.0, flat)))
    gathered, gradients, activations, transient = _fullest(peaks)
    return {
        "parameters": sum(layer.parameters for layer in layers) + gathered,
        "gradients": gradients + sum(layer.gradient_buffers for layer in layers),
        "optimizer": sum(layer.optimizer for layer in layers),
        "activations": activations,
        "transient": transient,
        "pipeline buffers": buffers,
    }


def in_flight_at_most(layout: Layout, stage: int) -> int:
    """Return how many micro-batches a rank of one stage has in flight at most."""
    return layout.executed_schedule.counts(
        stage, Shape(layout.pipeline, layout.micro_batches)
    ).whole


def _moments(
    layers: Layers, alive: int, *, replacing: bool, buckets: bool
) -> Iterator[tuple[float, float, float, float]]:
    """Yield bytes of (gathered copies, gradients, activations, working memory) where a peak may be.

    These are each layer's forward and backward with the most micro-batches in flight.  Activations
    of layers behind are not yet or no longer there; copies that a backward gathers are there only
    behind, as is what backwards leave.  So are gradients of a step's first backward if all forwards
    come first (`replacing`), in `buckets` or each for itself; with more micro-batches than are in
    flight, gradients are whole from then on.
    """
    stored = sum(layer.stored for layer in layers)
    copies = behind_copies = sum(layer.gathered for layer in layers)
    gradients = behind = sum(layer.gradients for layer in layers)
    left = sum(layer.left for layer in layers)
    nothing = 0.0 * stored
    before = (alive - 1) * stored
    for layer, beside in zip(layers, moving_beside(layers), strict=True):
        before = before + layer.stored
        # Sums taken in two orders differ in the last bits.
        behind = larger(0.0, behind - layer.gradients)
        behind_copies = larger(0.0, behind_copies - layer.gathered)
        left = larger(0.0, left - layer.left)
        forward = layer.forward + beside
        backward = layer.backward + beside
        if not replacing:
            yield behind_copies, gradients, before + left, larger(forward, backward)
            continue
        yield nothing, nothing, before, forward
        allocated = allocated_gradient_bytes(behind, gradients) if buckets else behind
        yield behind_copies, allocated, before + left, backward
        if alive > 1:
            yield copies, gradients, before - stored, backward


def _fullest(moments: ArrayLike) -> list[float]:
    """[part] Bytes of the moment with most of them, the first of several; of [moment, part]."""
    each = np.asarray(moments, dtype=float)
    at = each.sum(axis=1).argmax(axis=0)
    if each.ndim == 2:
        return cast(list[float], each[at].tolist())
    return list(each[at, :, np.arange(each.shape[2])].T)


def _fuller(moments: list[tuple[float, float]]) -> list[float]:
    """Return the same of (stored, working), which is quick where these are numbers."""
    if any(isinstance(size, np.ndarray) for pair in moments for size in pair):
        return _fullest(moments)
    return [float(size) for size in max(moments, key=lambda pair: pair[0] + pair[1])]


def _ends(layers: Layers, *, first: bool, last: bool, keeps_sent: bool) -> float:
    """Return how many tensors that cross its ends a micro-batch in flight keeps on a stage."""
    received = layers[0].receives * (not first) if layers else 0
    return received + (0 if last else int(keeps_sent))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of one stage, and of one micro-batch on it.

    Moments are (stored, working) at the fullest.
    """

    parameters: float
    """With gathered copies."""
    gradients: float
    optimizer: float
    bucket: float
    """Largest of the optimizer's buckets on the host."""
    host: float
    stored: float
    kept: float
    forward: list[float]
    backward: list[float]
    input_backward: list[float]
    buffers: float


def parts_of_several(
    layout: Layout, held: Sequence[StageBytes], rank: int, *, boundary_bytes: float
) -> dict[str, float]:
    """Return the peak of a rank of several stages in their order, or of split backwards."""
    schedule_moments = _distinct(
        moments(
            layout.schedule,
            rank,
            ranks=layout.pipeline,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
    )
    bucket = _largest(stage.bucket for stage in held)
    streamed = _streamed_bytes(bucket, sum(stage.host for stage in held))
    nothing = 0.0 * streamed
    peaks = [_at_most(schedule_moments, held), (nothing, streamed, nothing)]
    activations, transient, buffers = _fullest(peaks)
    return {
        "parameters": sum(stage.parameters for stage in held),
        "gradients": sum(stage.gradients for stage in held),
        "optimizer": sum(stage.optimizer for stage in held),
        "activations": activations,
        "transient": transient,
        "pipeline buffers": buffers + 2 * len(held) * boundary_bytes,
    }


@lru_cache(maxsize=1 << 12)
def _distinct(moments: Moments) -> Moments:
    """Return the moments that differ from one another."""
    rows = np.column_stack(
        [moments.place, moments.kind, moments.beside, moments.waiting, moments.holding]
    )
    _, at = np.unique(rows, axis=0, return_index=True)
    at.sort()
    return Moments(
        moments.place[at],
        moments.kind[at],
        moments.beside[at],
        moments.waiting[at],
        moments.holding[at],
    )


def _at_most(moments: Moments, held: Sequence[StageBytes]) -> list[float]:
    """[part] Activations, working memory and buffers of micro-batches in flight at the peak."""
    nothing = np.zeros_like(held[0].forward)
    acting = np.array(
        [[stage.forward, stage.backward, stage.input_backward, nothing] for stage in held]
    )[moments.place, moments.kind]
    activations = moments.beside @ np.array([stage.stored for stage in held])
    activations += moments.waiting @ np.array([stage.kept for stage in held])
    activations += acting[:, 0]
    buffers = moments.holding @ np.array([stage.buffers for stage in held])
    if activations.ndim == 1:
        working = acting[:, 1]
        at = (activations + working + buffers).argmax()
        return [float(activations[at]), float(working[at]), float(buffers[at])]
    return _fullest(np.stack([activations, acting[:, 1], buffers], axis=1))


def stage_bytes(
    layers: Layers, boundary_bytes: float, *, first: bool, last: bool, keeps_sent: bool
) -> StageBytes:
    """Return the bytes of a stage; it may be the first or the last of the model."""
    # [field of `LayerBytes`][layer]
    every: Any = LayerBytes._make(zip(*layers, strict=True)) if layers else _NO_LAYERS
    kept = behind = sum(every.kept)
    so_far = nothing = 0.0 * kept
    forward, backward, input_backward = ([(nothing, nothing)] for _ in range(3))
    for layer, beside in zip(layers, moving_beside(layers), strict=True):
        so_far = so_far + layer.stored
        behind = behind - layer.kept
        forward.append((so_far, layer.forward + beside))
        backward.append((so_far, layer.backward + beside))
        input_backward.append((so_far + behind, layer.input + beside))
    return StageBytes(
        parameters=sum(map(add, every.parameters, every.gathered)),
        gradients=sum(map(add, every.gradients, every.gradient_buffers)),
        optimizer=sum(every.optimizer),
        bucket=_largest(every.bucket),
        host=sum(every.host),
        stored=so_far,
        kept=kept,
        forward=_fuller(forward),
        backward=_fuller(backward),
        input_backward=_fuller(input_backward),
        buffers=_ends(layers, first=first, last=last, keeps_sent=keeps_sent) * boundary_bytes,
    )


_NO_LAYERS: Any = LayerBytes._make([()] * len(LayerBytes._fields))


def moving_beside(layers: Layers) -> list[float]:
    """Return for each layer of a stage the bytes that the layer before has on the way beside it.

    Only offloaded layers leave or fetch anything while another one runs.
    """
    before = [0.0, *(layer.moving for layer in layers)][: len(layers)]
    return [either(layer.offloaded, size, 0.0) for layer, size in zip(layers, before, strict=True)]


def host_bytes(stages: Mapping[int, Sequence[StrategyParts]], order: Order) -> float:
    """Return the most bytes that a rank has on the host."""
    resident = sum(layer.states.host_bytes for layers in stages.values() for layer in layers)
    each = {
        stage: sum(layer.treated.host_bytes for layer in layers) for stage, layers in stages.items()
    }
    if not any(each.values()):
        return resident
    alive = most = 0.0
    for stage, kind, _ in order:
        if kind == "F":
            alive += each[stage]
            most = max(most, alive)
        elif kind != "W":
            alive -= each[stage]
    return resident + most


def streamed_bytes(layers: Layers) -> float:
    """Return the most bytes of moments from the host that the optimizer's step has at a time."""
    bucket = _largest(layer.bucket for layer in layers)
    return _streamed_bytes(bucket, sum(layer.host for layer in layers))


def _largest(sizes: Iterable[float]) -> float:
    return reduce(larger, sizes, 0.0)


def _streamed_bytes(bucket: float, host: float) -> float:
    return smaller(BUCKETS * bucket, host)
