"""Layouts that use each of some device groups whole, with lower bounds of their closed form.

What `planner.search.bounds.layout_bounds` is where all devices are alike, this is where they
differ: every group has whole stages of a pipeline.  A layout is bounded by

    T >= what layers take at their fastest, memory ignored, + fill · least exposed + sync + step

with layers on whichever group takes least of them (`planner.solver.heterogeneous.fastest_bound`).
A rank has whole layers, as many as it has room for: where one takes t_g on group g, and a rank no
more than τ, all N layers have a place only if

    Σ_g Σ_{r on g} min(⌊τ / t_g⌋, what r has room for) >= N
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.cut_tensors import narrowest_bytes
from meshwright.planner.costs.group_costs import GroupCosts
from meshwright.planner.costs.layer_strategy import least_resident
from meshwright.planner.costs.layout_costs import LayoutCosts, counted_by_rank, refusal
from meshwright.planner.costs.memory.rank_memory import in_flight_at_most, room_bytes
from meshwright.planner.documents.axes import computed_by
from meshwright.planner.documents.plan import INSIDE_OUT, Layout
from meshwright.planner.documents.tolerances import ROUNDING, SLACK
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.memory_peaks import fullest
from meshwright.planner.search.bounds.dominance import dominates, twins
from meshwright.planner.search.bounds.layout_groups import executable_families, repeats_zero_1
from meshwright.planner.search.offload_choices import activations
from meshwright.planner.search.partition.layout_partition import layout_pace, unkept
from meshwright.planner.search.partition.stage_size_rows import not_required, required_rows
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.heterogeneous.fastest_bound import FastestOnTypes

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.frameworks.stage_rules import Rows
    from meshwright.planner.requests.request import Request
    from meshwright.planner.search.space import LayoutFamily

Floats = NDArray[np.float64]
MOST_ROWS = 20
"""Most boxes of numbers of layers that keep what is required of ranks with several stages; each is
an integer program."""


class GroupCandidates:
    """The layouts of a request that use each of its groups whole, and what they cost."""

    def __init__(
        self, request: Request, whole: ClusterSpec | None = None, costs: GroupCosts | None = None
    ) -> None:
        """`whole` is the cluster whose groups these are, if it has others too; `costs` are those of
        the request, if they are known."""
        self.request = request
        self.model = request.model
        self.cluster = request.cluster
        self.job = request.job
        self.pins = request.pins
        self.whole_cluster = whole or request.cluster
        self.recompute = request.pins.recompute
        self.activations = activations(request.cluster, request.pins)
        self.group_costs = costs or GroupCosts(request, self.activations)
        self.frontiers = FrontierStore()
        self._known_s: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        """Seconds of passes, by what they depend on (`_divided`)."""
        self._known_refusals: dict[Layout, str | None] = {}

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        asked = self.pins.require
        if asked and unkept(self.model, layout, asked) is not None:
            return "it lacks stages that are asked for"
        if asked and layout.virtual_stages > 1:
            lacking = not_required(self.model, layout, asked, most=MOST_ROWS)
            if lacking is not None:
                return lacking
        return self._executes(layout)

    def repeats(self, layout: Layout) -> bool:
        """Return whether another layout does the same."""
        return repeats_zero_1(layout, self.pins, self.refusal)

    def rows(self, layout: Layout) -> Rows | None:
        """Return how many entries ranks of several stages may hold by what is required of them.

        None where nothing is.
        """
        if not self.pins.require or layout.virtual_stages == 1:
            return None
        return required_rows(self.model, layout, self.pins.require)

    def by_timetable(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield layouts that are alike but for sharing, with their seconds by computation alone.

        Why others do not run is counted.
        """
        families, why = self._families
        refused.update(why)
        self.know_passes(family.first for family in families)
        for family in families:
            yield self.computation_s(family.first), family

    @cached_property
    def _families(self) -> tuple[list[LayoutFamily], Counter[str]]:
        """Groups of layouts with one schedule and loss each, and why others do not run.

        Axes lie in one order, the pipeline last.
        """
        pins = replace(self.pins, order=self.pins.order or INSIDE_OUT)
        request, refused = replace(self.request, pins=pins), Counter[str]()
        families: list[LayoutFamily] = []
        for family in executable_families(request, self._executes, self.refusal, refused):
            for part in family.by_timetable():
                if not schedule_of(part.timetables[0].schedule).stale:
                    families += part.by_loss()
        return families, refused

    def _executes(self, layout: Layout) -> str | None:
        """Return why the framework does not run a layout."""
        if layout not in self._known_refusals:
            reason = refusal(self.model, self.cluster, self.job, layout)
            self._known_refusals[layout] = reason
        return self._known_refusals[layout]

    def costs_of(self, layout: Layout) -> list[LayoutCosts]:
        """[group] Costs of a layout."""
        return list(self.group_costs.costs(layout).values())

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by layers and actions alone, memory ignored."""
        every = list(self.group_costs.tables.values())
        action_s = min(tables.action_s for tables in every)
        action_s *= every[0].action_share(layout.virtual_stages)
        actions = 2 * layout.virtual_stages * layout.pipeline - 2 if layout.pipeline > 1 else 0
        return self._bound_s(layout, *self.passes_s(layout), exposed_s=actions * action_s)

    def communication_s(self, layout: Layout) -> float:
        """Least seconds of a step with what is shared and sent; inf if layers cannot fit.

        Of memory it is only asked whether the commonest layers alone find room.
        """
        of_groups = self.costs_of(layout)
        most = self.most_layers(layout, of_groups)
        if most.max(axis=0).sum() < max(self.counts):
            return math.inf
        fastest_s = self.fewest_of_kinds(of_groups, "time_s")
        _, credits_s = self.passes_s(layout)
        sync_s = self.fewest_of_kinds(of_groups, "sync_s").min(axis=0)
        once_s = max(float(sync_s.max()), float(self.counts @ sync_s) / layout.pipeline)
        exposed_s = 0.0
        if layout.pipeline > 1:
            passed_s = self._shortest_crossing_s(layout) + min(
                costs.action_s for costs in of_groups
            )
            exposed_s = 2 * layout.virtual_stages * (layout.pipeline - 1) * passed_s
        slowest_s = self.slowest_s(layout, most, fastest_s)
        passes_s = self._bound_s(
            layout, fastest_s, credits_s, exposed_s=exposed_s, slowest_s=slowest_s
        )
        return passes_s + once_s

    def _shortest_crossing_s(self, layout: Layout) -> float:
        """Least seconds of what crosses a boundary."""
        names, size_bytes = list(self.group_costs.tables), None
        if self.model.edges:
            output_bytes = self.group_costs.tables[names[0]].output_bytes(layout)
            size_bytes = narrowest_bytes(self.model, output_bytes)
            if not size_bytes:
                return 0.0
        pairs = itertools.product(names, names)
        return min(self.group_costs.crossing_s(layout, a, b, size_bytes) for a, b in pairs)

    def most_layers(self, layout: Layout, of_groups: Sequence[LayoutCosts]) -> Floats:
        """[group, rank] How many of the commonest layers a rank may have on a group.

        No more than its minimum-memory option allows, at the moment by which
        planner.search.bounds.memory_bounds bounds its bytes, on the stage that has least in flight
        then.
        """
        alive = _alive(layout)
        kind = list(of_groups[0].parts)[int(np.argmax(self.counts))]
        most = np.zeros((len(of_groups), layout.pipeline))
        for row, group, costs in zip(most, self.cluster.groups, of_groups, strict=True):
            room = room_bytes(group.accelerator.memory_bytes, costs)
            free = max(0.0, room * (1 + ROUNDING))
            for part in costs.parts[kind]:
                resident = least_resident(
                    part.states,
                    whole=counted_by_rank(layout),
                    forwards_first=layout.executed_schedule.forwards_first,
                    once=layout.micro_batches == 1,
                )
                each_bytes = np.maximum(1.0, resident + alive * part.stored_bytes)
                np.maximum(row, np.floor(free / each_bytes), out=row)
        return most

    def like_and_longest_s(self, seconds: Floats) -> tuple[Floats, Floats]:
        """[group] Seconds of one of the commonest layers, and of the longest other one."""
        commonest = int(np.argmax(self.counts))
        others_s = np.delete(seconds, commonest, axis=1)
        beside_s = np.zeros(len(seconds))
        if others_s.size:
            beside_s = others_s[:, int(np.argmax(others_s.min(axis=0)))]
        return seconds[:, commonest], beside_s

    def slowest_s(self, layout: Layout, most: Floats, seconds: Floats) -> float:
        """Seconds that the slowest rank takes at least, with whole layers; see the head.

        `seconds` [group, kind] are those of layers, `most` is what ranks have room for.  One rank
        has the longest of the other layers.
        """
        layer_s, beside_s = self.like_and_longest_s(seconds)
        if not layer_s.all():
            return 0.0
        number = max(self.counts)
        whole_s = np.arange(1, number + 1)[:, None] * layer_s
        ceilings = np.unique(np.concatenate([whole_s, whole_s - layer_s + beside_s]))
        # Of each group as many ranks as it has, those with the most room.
        room = np.sort(most, axis=1)[:, ::-1]
        room = np.where(np.arange(layout.pipeline) < self.stages(layout)[:, None], room, 0.0)
        free = np.floor(ceilings[:, None] / layer_s * (1 + SLACK))
        beside = np.floor((ceilings[:, None] - beside_s) / layer_s * (1 + SLACK))
        fitting = np.minimum(free[:, :, None], room).sum(axis=(1, 2))
        fewer = np.minimum(free, room[:, 0]) - np.minimum(np.maximum(beside, 0.0), room[:, 0])
        fewer[beside < 0] = np.inf
        enough = fitting - fewer.min(axis=1) >= number
        return float(ceilings[int(np.argmax(enough))]) if enough.any() else math.inf

    @cached_property
    def counts(self) -> NDArray[np.intp]:
        """[kind] Layers of the model."""
        counts: Counter[str] = Counter()
        for layer in self.model.layers:
            counts[layer.kind] += layer.repeat
        return np.array(list(counts.values()))

    def stages(self, layout: Layout) -> NDArray[np.intp]:
        """[group] Stages of a layout on it."""
        return np.array(list(self.group_costs.stages_of(layout).values()))

    def fewest_of_kinds(self, of_groups: Sequence[LayoutCosts], figure: str) -> Floats:
        """[group, kind] Least of a figure that the choices of a kind have."""
        pinned = self.pins.recompute
        return np.array(
            [
                [
                    min(
                        cost.forward_s + cost.backward_s
                        if figure == "time_s"
                        else getattr(cost, figure)
                        for cost in table
                        if pinned in (None, cost.recompute)
                    )
                    for table in costs.kinds.values()
                ]
                for costs in of_groups
            ]
        )

    def _bound_s(
        self,
        layout: Layout,
        time_s: Floats,
        credits_s: Floats,
        *,
        exposed_s: float,
        slowest_s: float = 0.0,
    ) -> float:
        """Least seconds from those of each group and kind; see the head of this module."""
        steady, fill = layout_pace(self.model, layout)
        fastest = FastestOnTypes(
            counts=self.counts,
            time_s=time_s,
            credits_s=fill * layout.executed_schedule.splits_backward * credits_s,
            stages=self.stages(layout),
            steady=steady,
            fill=fill,
        )
        passes_s = fastest.passes_s(divided=layout.virtual_stages > 1)
        passes_s = max(passes_s, steady * slowest_s + fastest.weighed_s(fill))
        step_s = max(tables.step_s for tables in self.group_costs.tables.values())
        # Sums taken in two orders differ in the last bits.
        return (1 - ROUNDING) * (passes_s + fill * exposed_s) + step_s

    def passes_s(self, layout: Layout) -> tuple[Floats, Floats]:
        """[group, kind] Least seconds of a micro-batch with nothing shared, and least credits."""
        self.know_passes([layout])
        return self._known_s[_computation_key(layout)]

    def know_passes(self, layouts: Iterable[Layout]) -> None:
        """Work `passes_s` of layouts out together."""
        new = [layout for layout in layouts if _computation_key(layout) not in self._known_s]
        if new:
            self._work_out(new)

    def keep_passes(self, layout: Layout, times_s: Floats, credits_s: Floats) -> None:
        """Let `passes_s` of a layout be these [group, kind], which are known."""
        self._known_s[_computation_key(layout)] = times_s, credits_s

    def _work_out(self, layouts: Sequence[Layout]) -> None:
        """Work `passes_s` of many layouts out together."""
        some = {_computation_key(layout): layout for layout in reversed(layouts)}
        of_groups = [
            tables.passes_s(list(some.values()), self.pins.recompute)
            for tables in self.group_costs.tables.values()
        ]
        times_s, credits_s = (np.array(figures) for figures in zip(*of_groups, strict=True))
        for at, key in enumerate(some):
            self._known_s[key] = times_s[:, :, at], credits_s[:, :, at]

    def dominator(self, layout: Layout) -> Layout | None:
        """Return another layout that can do all that this one can, on every group."""
        for twin in twins(layout):
            if self.pins.allow(twin) and self.refusal(twin) is None and self._better(twin, layout):
                return twin
        return None

    def _better(self, twin: Layout, layout: Layout) -> bool:
        """Return whether a twin that can run dominates a layout."""
        return all(
            dominates(twin, by, layout, costs)
            for by, costs in zip(self.costs_of(twin), self.costs_of(layout), strict=True)
        )


def _alive(layout: Layout) -> Floats:
    """[rank] Micro-batches in flight at the moment that counts, of the stage that has least."""
    ranks = layout.pipeline
    if counted_by_rank(layout):
        peaks = fullest(
            layout.schedule,
            ranks=ranks,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
        fewest: Floats = peaks.holding.min(axis=0)
        return fewest
    most = np.array([in_flight_at_most(layout, rank) for rank in range(ranks)], dtype=float)
    alive: Floats = most - ((most == layout.micro_batches) & (most > 1))
    return alive


def _computation_key(layout: Layout) -> tuple[object, ...]:
    """Return what the computation inside layers depends on; axes lie in one order."""
    degrees = layout.tensor, layout.context, layout.expert
    return *degrees, layout.micro_batch, layout.loss, *computed_by(layout)
