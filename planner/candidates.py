"""The configurations that one search looks at, and what each can be held against.

Bounds come in steps, each dearer and at least as high as the one before.  For a whole family:

    computation     layers and actions at their fastest, nothing shared or sent, under the best of
                    its schedules
    rooms           the same for each schedule, with room for the commonest layers alone
    room            the same for one schedule, with what each stage can hold if states are shared as
                    far as they go

and three for a single layout:

    shared          with the sharding of the commonest layers
    communication   with its sharding and pipeline transfers
    memory          with what each stage can hold (planner.bounds.counted_s)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner import bounds
from planner.cluster import ClusterSpec
from planner.costs import CostTables, LayoutCosts, StrategyCost
from planner.dominance import dominates, twins
from planner.formulation import (
    boundaries_s,
    instance_of,
    layout_pace,
    planned_bytes,
    unkept,
)
from planner.instance import ROUNDING, Instance
from planner.layer_options import allowed, option_of
from planner.model import ModelGraph
from planner.native import Rules, refusal
from planner.pins import Pins
from planner.pipeline_model import held
from planner.plan import Job, Layout
from planner.rates import rates
from planner.savings import Saving, least_s, savings
from planner.schedule import FOLDED, splits_backward
from planner.space import (
    Degrees,
    Family,
    Sharing,
    Timetable,
    canonical,
    every_degrees,
    families,
    micro_batches,
    sharings,
    timetables,
)
from planner.strategy import StrategyParts

_WAITING = Timetable("gpipe")
"""Stands for the timetables of a pipeline that count memory by stage."""
_BY_RANK = Timetable("zb-h1")
"""Stands for those that count it by rank."""


class Candidates:
    """All families of a space that the backend runs, and the refusals by reason."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        job: Job,
        tables: CostTables,
        pins: Pins,
        rules: Rules = refusal,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.tables = tables
        self.pins = pins
        self.rules = rules
        self.refused: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        for layer in model.layers:
            self._counts[layer.kind] = self._counts.get(layer.kind, 0) + layer.repeat
        self._commonest = max(self._counts.items(), key=lambda item: item[1])
        self._known_paces: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._known_held: dict[
            tuple[object, ...], tuple[list[int], bounds.Floats, list[NDArray[np.intp]]]
        ] = {}
        self._rates = rates(cluster, job, tables.profile)
        self._parameters = float(sum(layer.parameters * layer.repeat for layer in model.layers))
        self.families = list(self._families())

    def _families(self) -> Iterator[Family]:
        """Yield what the backend runs.  Of refused degrees no axis orders are told apart."""
        for degrees in every_degrees(self.model, self.cluster, self.job, self.pins):
            plainest = _plainest(self.job, degrees)
            reason = self.refusal(plainest)
            if reason is None:
                saved = self._savings(plainest)
                yield from families(self.model, self.cluster, self.job, degrees, self.pins, saved)
                continue
            count = len(sharings(degrees, self.pins)) * sum(
                len(timetables(self.model, degrees.pipeline, number, self.pins))
                for _, number in micro_batches(self.job, degrees, self.pins)
            )
            if count:
                self.refused[reason] = self.refused.get(reason, 0) + count

    def _savings(self, plainest: Layout) -> tuple[Saving, ...]:
        """Return what layouts with these degrees may save."""

        def runs(saving: Saving) -> bool:
            changed = replace(plainest, offload=saving.offload, gradient_wire=saving.wire)
            return self.refusal(changed) is None

        return savings(self.model, self.cluster, self.pins, runs)

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        lacking = unkept(self.model, layout, self.pins.require) if self.pins.require else None
        if lacking is not None:
            return f"it lacks stages that are asked for: {list(lacking.stages or ())}"
        if self.pins.require and layout.virtual_stages > 1:
            return "what is required of layers and stages needs one stage on each rank"
        return self.rules(self.model, self.cluster, self.job, layout)

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that the backend runs."""
        for family in self.families:
            for layout in family.layouts():
                if self.refusal(layout) is None:
                    yield layout

    def computation_s(self) -> bounds.Floats:
        """[family] Least seconds of a step by layers and pipeline actions, nothing shared or sent.

        A family of several timetables has the least of theirs.
        """
        numbers: dict[tuple[object, ...], int] = {}
        number = [numbers.setdefault(f.divided, len(numbers)) for f in self.families]
        some = dict(zip(number, self.families, strict=True))
        firsts = [some[n].first for n in range(len(numbers))]
        self._divided = numbers
        self._fastest_s, credits_s = self.tables.passes_s(firsts, self.pins.recompute)
        self._credits_s = np.array(list(self._counts.values())) @ credits_s
        every_s = self._timetables_s(self.families)
        firsts_at = np.cumsum([0, *(len(family.timetables) for family in self.families[:-1])])
        least_s: bounds.Floats = np.minimum.reduceat(every_s, firsts_at)
        return least_s

    def timetables_s(self, family: Family) -> list[float]:
        """[timetable] `computation_s` of each timetable of a family."""
        return [float(seconds) for seconds in self._timetables_s([family])]

    def savings_s(self, family: Family) -> list[float]:
        """[saving] Least seconds by computation alone and what offloaded states add."""
        computing_s = min(self.timetables_s(family))
        return [computing_s + self._added_s(saving) for saving in family.savings]

    def _added_s(self, saving: Saving) -> float:
        added_s = least_s(saving, self._parameters, self.cluster.devices, self._rates)
        return (1 - 1e-9) * added_s

    def _timetables_s(self, families: Sequence[Family]) -> bounds.Floats:
        """[timetable of the families in turn] Least seconds by computation alone."""
        number, stages, paces = [], [], []
        for family in families:
            found = self._paces(family.degrees.pipeline, family.micro_batches, family.timetables)
            paces.append(found)
            number += [self._divided[family.divided]] * len(found)
            stages += [float(family.degrees.pipeline)] * len(found)
        steady, fill, credited, actions, least = np.concatenate(paces).T
        return self.tables.step_s + bounds.balanced_each_s(
            list(self._counts.values()),
            self._fastest_s[:, number],
            stages=np.array(stages),
            steady=steady,
            fill=fill,
            exposed_s=actions * self.tables.action_s,
            each_exposed_s=least * self.tables.action_s,
            credits_s=credited * self._credits_s[number],
        )

    def _paces(
        self, pipeline: int, count: int, found: tuple[Timetable, ...]
    ) -> NDArray[np.float64]:
        """[timetable, 5] Steady, fill, what a credit counts for; actions of all, of the least rank.

        Those at the ends of the model are left out (planner.formulation.boundaries_s).
        """
        key = (pipeline, count, found)
        if key not in self._known_paces:
            rows = []
            for name, virtual in found:
                steady, fill = layout_pace(
                    self.model,
                    Layout(
                        pipeline=pipeline,
                        micro_batches=count,
                        schedule=name,
                        virtual_stages=virtual,
                    ),
                )
                splits = splits_backward(name)
                actions = (3 if splits else 2) * virtual if pipeline > 1 else 0
                rows.append(
                    (
                        steady,
                        fill,
                        fill if splits else 0.0,
                        max(0, pipeline * actions - 2),
                        max(0, actions - (2 if name in FOLDED else 1)),
                    )
                )
            self._known_paces[key] = np.array(rows)
        return self._known_paces[key]

    def rooms_s(self, family: Family) -> list[float]:
        """[timetable] Least seconds with what ranks can hold of the commonest layers alone.

        One count of what a rank can hold serves all timetables that count memory alike.  Bytes are
        the least of them all: states are shared as far as they go, and where memory is not counted
        by rank, what is left of them if all forwards come first is least for every layer but the
        last (planner.strategy).  Of a stage's own buffers those of what it sends and of what is on
        the way are counted.  The other layers take their fewest seconds anywhere, and no room.
        """
        kind, layers = self._commonest
        if layers == 1:
            return self.timetables_s(family)
        number = self._divided[family.divided]
        paces = self._paces(family.degrees.pipeline, family.micro_batches, family.timetables)
        credits_s = float(self._credits_s[number])
        others = [
            (self._counts[other], float(self._fastest_s[at, number]))
            for at, other in enumerate(self._counts)
            if other != kind
        ]
        once_s = self.tables.step_s + self._added_s(family.savings[0])
        result = [math.inf] * len(family.timetables)
        for waiting in (_WAITING, _BY_RANK) if family.degrees.pipeline > 1 else (Timetable(),):
            by_rank = waiting is _BY_RANK
            places, held_by, ranks = self._held(family, by_rank=by_rank)
            if not places:
                continue
            corners = [family.layout(sharing, waiting) for sharing in self._leanest(family)]
            each = zip(*(self.tables.held_alone(corner, kind) for corner in corners), strict=True)
            leanest = tuple(_leanest(list(costs)) for costs in each)
            options = [
                option_of(cost) for cost in allowed(leanest, corners[0], self.pins.recompute)
            ]
            capacity_bytes = max(map(self._capacity_bytes, corners))
            in_flight, buffers = held_by
            free_bytes = capacity_bytes * (1 + ROUNDING) - buffers * (
                self.tables.boundary_bytes(corners[0])
            )
            most = np.minimum(bounds.most_layers(options, in_flight, free_bytes), layers)
            fitting = [
                (place, of_rank)
                for place, of_rank in zip(places, ranks, strict=True)
                if most[of_rank].min() >= 0 and most[of_rank].sum() >= layers
            ]
            if not fitting:
                continue
            needed = np.unique(np.concatenate([of_rank for _, of_rank in fitting]))
            alike = bounds.Alike.of(
                options,
                layers=layers,
                in_flight=in_flight[needed],
                free_bytes=free_bytes[needed],
                others=others,
            )
            for place, of_rank in fitting:
                steady, fill, credited, actions, least = paces[place].tolist()
                result[place] = once_s + alike.least_s(
                    np.searchsorted(needed, of_rank),
                    steady=steady,
                    fill=fill,
                    credits_s=credited * credits_s,
                    exposed_s=(actions * self.tables.action_s, least * self.tables.action_s),
                )
        return result

    def _leanest(self, family: Family) -> list[Sharing]:
        """Return the widest sharings, but those that hold no less than another of them.

        Over as many ranks ZeRO-2 holds in a pipeline what ZeRO-1 does.  ZeRO-0 holds more, unless
        what is divided is padded, as that of experts (planner.memory).
        """
        widest = list(family.widest())
        if all(sharing.zero != 1 for sharing in widest):
            return widest
        a = self.model.architecture
        more = {0} if a is None or a.experts is None else set()
        if family.degrees.pipeline > 1:
            more.add(2)
        return [sharing for sharing in widest if sharing.zero not in more]

    def _capacity_bytes(self, layout: Layout) -> float:
        """Bytes that a rank has for its layers and the pipeline's buffers."""
        device = self.cluster.groups[0].accelerator
        return self.tables.room_bytes(layout, planned_bytes(device, device.memory_bytes))

    def _held(
        self, family: Family, *, by_rank: bool
    ) -> tuple[list[int], bounds.Floats, list[NDArray[np.intp]]]:
        """Return which timetables count memory by rank or do not, and what their ranks hold.

        That is [2, :] micro-batches in flight and buffers, and [timetable, rank] which of them.  Of
        a rank's stages all are taken to be full ones, which hold the most layers of it.
        """
        key = (family.degrees.pipeline, family.micro_batches, family.timetables, by_rank)
        if key not in self._known_held:
            ranks = family.degrees.pipeline
            places, of_rank = [], []
            for place, (name, virtual) in enumerate(family.timetables):
                if by_rank != (ranks > 1 and (virtual > 1 or splits_backward(name))):
                    continue
                places.append(place)
                alive = [
                    held(
                        name,
                        rank,
                        ranks=ranks,
                        micro_batches=family.micro_batches,
                        virtual_stages=virtual,
                    ).alive
                    for rank in range(ranks)
                ]
                sent = [count * (by_rank or s < ranks - 1) for s, count in enumerate(alive)]
                on_way = 2 * virtual if ranks > 1 else 0
                of_rank.append(
                    [(a / virtual, b + on_way) for a, b in zip(alive, sent, strict=True)]
                )
            every = sorted({pair for each in of_rank for pair in each})
            at = {pair: index for index, pair in enumerate(every)}
            ranks_at = [np.array([at[pair] for pair in each]) for each in of_rank]
            self._known_held[key] = places, np.array(every).T, ranks_at
        return self._known_held[key]

    def room_s(self, family: Family) -> float:
        """Least seconds with what each stage can hold under any sharing; inf if none fits.

        Every figure is the least of the family, which has one timetable: seconds are those of
        computation, states are divided among as many ranks as there are under each ZeRO level (they
        only grow with fewer, see planner.memory).
        """
        offloaded = family.first.offload != "none"
        if offloaded:
            corners = [self.tables.of(layout) for layout in family.corners()]
        else:
            timetable = family.timetables[0]
            corners = [
                self.tables.unlinked(family.layout(sharing, timetable))
                for sharing in self._leanest(family)
            ]
        some = corners[0]
        least = replace(
            some,
            kinds={
                kind: tuple(
                    _least(
                        [corner.kinds[kind][choice] for corner in corners],
                        part,
                        min(_on_host_s(corner.parts[kind][choice]) for corner in corners)
                        if offloaded
                        else 0.0,
                    )
                    for choice, part in enumerate(parts)
                )
                for kind, parts in some.parts.items()
            },
            boundary_s=some.action_s,
            transfer_s=0.0,
            fixed_bytes=min(corner.fixed_bytes for corner in corners),
            slack=min(corner.slack for corner in corners),
        )
        instance = instance_of(self.model, self.cluster, family.first, least, self.pins.recompute)
        return bounds.counted_s(instance) + some.step_s

    def shared_s(self, family: Family, layout: Layout) -> float:
        """Least seconds with what sharding the commonest layers adds, memory ignored.

        `layout` is one of the family.  The other layers take their fewest seconds anywhere, and
        what crosses a boundary of the pipeline takes no time.
        """
        number = self._divided[family.divided]
        commonest, _ = self._commonest
        parts = [
            part
            for part in self.tables.parts(commonest, layout, linked=True)
            if self.pins.recompute in (None, part.recompute)
        ]
        rows = [
            (self._counts[kind], float(self._fastest_s[at, number]), 0.0)
            for at, kind in enumerate(self._counts)
            if kind != commonest
        ]
        fastest_s = min(part.forward_s + part.backward_s for part in parts)
        rows.append((self._counts[commonest], fastest_s, min(part.once_s for part in parts)))
        ((steady, fill, credited, actions, least),) = self._paces(
            layout.pipeline, layout.micro_batches, family.timetables
        ).tolist()
        bound_s = bounds.balanced_s(
            rows,
            stages=layout.pipeline,
            exposed_s=actions * self.tables.action_s,
            each_exposed_s=least * self.tables.action_s,
            steady=steady,
            fill=fill,
            credits_s=credited * float(self._credits_s[number]),
        )
        return bound_s * (1 - 1e-12) + self.tables.step_s

    def communication_s(self, layout: Layout) -> float:
        """Least seconds with what sharding and the pipeline add, memory ignored."""
        costs = self.tables.of(layout)
        allowed = self.pins.recompute
        rows = []
        for kind, table in costs.kinds.items():
            choices = [cost for cost in table if allowed in (None, cost.recompute)]
            fastest_s = min(cost.forward_s + cost.backward_s for cost in choices)
            rows.append((self._counts[kind], fastest_s, min(cost.sync_s for cost in choices)))
        steady, fill = layout_pace(self.model, layout)
        credits_s = 0.0
        if layout.pipeline > 1 and splits_backward(layout.schedule):
            credits_s = fill * sum(
                self._counts[kind] * min(part.figures.credit_s for part in parts)
                for kind, parts in costs.parts.items()
            )
        exposed_s = boundaries_s(costs, layout)
        bound_s = bounds.balanced_s(
            rows,
            stages=layout.pipeline,
            exposed_s=sum(exposed_s),
            each_exposed_s=min(exposed_s),
            steady=steady,
            fill=fill,
            credits_s=credits_s,
        )
        return bound_s + costs.step_s

    def memory_s(self, layout: Layout) -> float:
        """Least seconds with what each stage can hold; inf if the layout does not fit."""
        return bounds.counted_s(self.instance(layout)) + self.tables.of(layout).step_s

    def costs(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout."""
        return self.tables.of(layout)

    def instance(self, layout: Layout) -> Instance:
        """Return the partition problem of a layout."""
        costs = self.tables.of(layout)
        pins = self.pins
        return instance_of(self.model, self.cluster, layout, costs, pins.recompute, pins.require)

    def dominator(self, layout: Layout) -> Layout | None:
        """Return a candidate that can do all that this layout can, if one is known."""
        costs = self.tables.of(layout)
        for changed in twins(layout):
            twin = canonical(self.cluster, changed)
            if twin == layout or not self.pins.allow(twin) or self.refusal(twin) is not None:
                continue
            if dominates(twin, self.tables.of(twin), layout, costs):
                return twin
        return None


def _plainest(job: Job, degrees: Degrees) -> Layout:
    """Return a layout of these degrees that shares nothing."""
    return Layout(
        tensor=degrees.tensor,
        context=degrees.context,
        expert=degrees.expert,
        pipeline=degrees.pipeline,
        data_replicate=degrees.data,
        micro_batches=job.global_batch // degrees.data,
    )


def _least(costs: list[StrategyCost], part: StrategyParts, sync_s: float) -> StrategyCost:
    """Return the least of every figure, and the seconds without sharding."""
    return replace(
        _leanest(costs),
        forward_s=part.unshared_forward_s,
        backward_s=part.unshared_backward_s,
        sync_s=sync_s,
    )


def _leanest(costs: list[StrategyCost]) -> StrategyCost:
    """Return the least bytes, nothing synchronised."""
    return replace(
        costs[0],
        stored_bytes=min(cost.stored_bytes for cost in costs),
        transient_bytes=min(cost.transient_bytes for cost in costs),
        resident_bytes=min(cost.resident_bytes for cost in costs),
        sync_s=0.0,
    )


def _on_host_s(part: StrategyParts) -> float:
    """Seconds once per step that fall with the ranks that share states: moments and their update.

    Copies of parameters and gradients are seen more or less beside their collectives, and not here.
    """
    if part.states.bucket_bytes:
        return part.stream_s + part.optimizer_s
    return part.optimizer_s
