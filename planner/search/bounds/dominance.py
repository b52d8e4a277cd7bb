"""Layouts that need not be solved, because another can do all that they can.

A layout's *twin* differs from it in one choice: 1F1B instead of GPipe (`Schedule.no_slower`),
ZeRO-1 instead of the other levels, states divided among all data-parallel ranks, the loss of all
logits, the usual order of axes.  Where the twin's costs are no higher in any figure, every split of
the layout is a split of the twin that takes no longer and needs no more memory, so the twin's
optimum is at least as good.  Whether they are no higher is looked up in the costs each time;
nothing is taken for granted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.planner.costs.layout_costs import LayoutCosts, counted_by_rank
from meshwright.planner.documents.plan import INSIDE_OUT, Layout
from meshwright.planner.schedules import Shape, schedule_of
from meshwright.planner.search.offload_choices import Saving, in_bf16
from meshwright.planner.search.space import complexity


def twins(layout: Layout) -> Iterator[Layout]:
    """Yield the layouts that may dominate this one."""
    if layout.executed_schedule.no_slower is not None:
        yield replace(layout, schedule=layout.executed_schedule.no_slower)
    if layout.zero > 1:
        yield replace(layout, zero=1)
    if layout.data_replicate > 1:
        yield replace(layout, zero=max(1, layout.zero), data_shard=layout.data, data_replicate=1)
    other_bits = in_bf16(layout)
    if other_bits is not None:
        yield other_bits
    if layout.prefetch:
        yield replace(layout, prefetch=0)
    if layout.reshard_after_forward is not None:
        yield replace(layout, reshard_after_forward=None)
    if layout.loss is not None:
        yield replace(layout, loss=None)
    if layout.order != INSIDE_OUT:
        yield replace(layout, order=INSIDE_OUT)


def dominates(twin: Layout, by: LayoutCosts, layout: Layout, costs: LayoutCosts) -> bool:
    """Return whether `twin` has every split of `layout`, and wins or is the simpler in a tie.

    Seconds add up over layers, and bytes (planner.costs.memory.rank_memory) grow with what any
    layer has, so it is enough that no option takes longer or has more of anything.  Where all
    forwards come first there are no gradients beside them, so under another schedule forwards may
    need no more than backwards.  The twin wins outright if it synchronises less on every layer.
    """
    other_schedule = twin.schedule != layout.schedule
    if _beside_layers(by, costs) or (other_schedule and not _holds_less(twin, layout)):
        return False
    faster = True
    for kind, table in costs.kinds.items():
        for mine, other in zip(by.kinds[kind], table, strict=True):
            if mine.forward_s + mine.backward_s > other.forward_s + other.backward_s:
                return False
            if mine.sync_s > other.sync_s or mine.host_bytes > other.host_bytes:
                return False
            faster = faster and mine.sync_s < other.sync_s
        for part, others in zip(by.parts[kind], costs.parts[kind], strict=True):
            layer_bytes = part.layer_bytes
            if not layer_bytes.no_more_than(others.layer_bytes):
                return False
            if other_schedule and layer_bytes.forward > layer_bytes.backward:
                return False
    return faster or complexity(twin) < complexity(layout)


def no_slower(faster: LayoutCosts, other: LayoutCosts) -> bool:
    """Return whether no action of any option takes longer, nor anything that comes once a step."""
    return all(
        a.forward_s <= b.forward_s
        and a.backward_s <= b.backward_s
        and a.figures.weight_s == b.figures.weight_s
        and a.sync_s <= b.sync_s
        and a.optimizer_s + a.stream_s <= b.optimizer_s + b.stream_s
        for kind, parts in other.parts.items()
        for a, b in zip(faster.parts[kind], parts, strict=True)
    )


def covers(faster: LayoutCosts, other: LayoutCosts) -> bool:
    """Return whether a layout of the same schedule has each plan of another, and runs it no slower.

    Both have the same degrees and micro-batches, and cost what is given.  A simulated step is no
    shorter where no action is.
    """
    if _beside_layers(faster, other):
        return False
    if any(len(faster.parts[kind]) != len(parts) for kind, parts in other.parts.items()):
        return False
    return no_slower(faster, other) and all(
        a.layer_bytes.no_more_than(b.layer_bytes)
        for kind, parts in other.parts.items()
        for a, b in zip(faster.parts[kind], parts, strict=True)
    )


MOST_KEPT = 24
"""Layouts of one shape that are listed to see whether others can do no more."""


class Covering:
    """Layouts that were looked at, by what those have in common whose costs can be compared."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], deque[Sequence[LayoutCosts]]] = {}

    def add(self, layout: Layout, costs: Sequence[LayoutCosts]) -> None:
        """Keep a layout with its costs on each type of devices."""
        self._known.setdefault(_shape(layout), deque(maxlen=MOST_KEPT)).append(costs)

    def cover(self, layout: Layout, costs: Callable[[Layout], Sequence[LayoutCosts]]) -> bool:
        """Return whether a layout that was kept has each plan of this one, and runs it no slower.

        `costs` are asked for where there is any to compare with.
        """
        candidates = self._known.get(_shape(layout))
        if not candidates:
            return False
        mine = costs(layout)
        return any(all(map(covers, earlier, mine)) for earlier in reversed(candidates))


def _shape(layout: Layout) -> tuple[object, ...]:
    """Return what layouts have in common whose costs can be compared."""
    degrees = layout.tensor, layout.context, layout.expert, layout.pipeline, layout.data
    chosen = layout.schedule, layout.virtual_stages, layout.micro_batch
    return *degrees, *chosen, Saving.of_layout(layout), layout.compile, layout.graphs


def _beside_layers(by: LayoutCosts, costs: LayoutCosts) -> bool:
    """Return whether the twin costs more in anything that no layer causes."""
    names = (
        "fixed_bytes",
        "boundary_bytes",
        "slack",
        "boundary_s",
        "transfer_s",
        "action_s",
        "step_s",
    )
    return any(getattr(by, name) > getattr(costs, name) for name in names)


def _holds_less(twin: Layout, layout: Layout) -> bool:
    """Return whether ranks of one stage have no more micro-batches in flight under the twin."""
    if counted_by_rank(twin) or counted_by_rank(layout):
        return False
    shape = Shape(layout.pipeline, layout.micro_batches)
    pairs = _in_flight(twin.schedule, layout.schedule, shape)
    return all(mine <= other for mine, other in pairs)


@lru_cache(maxsize=1 << 12)
def _in_flight(twin: str, schedule: str, shape: Shape) -> frozenset[tuple[int, int]]:
    """Return how many micro-batches stages hold, under the twin's schedule and the layout's."""
    both = schedule_of(twin), schedule_of(schedule)
    counts = [[costs.counts(s, shape).whole for s in range(shape.ranks)] for costs in both]
    return frozenset(zip(*counts, strict=True))
