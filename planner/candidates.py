"""The configurations that one search looks at, and what each can be held against.

Bounds come in steps, each dearer and at least as high as the one before.  Two for a whole family:

    computation     layers at their fastest, nothing shared or sent, under the best of its schedules
    room            the same for one schedule, with what each stage can hold if states are shared as
                    far as they go

and two for a single layout:

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
from planner.formulation import boundaries_s, instance_of, layout_pace
from planner.instance import ROUNDING, Instance
from planner.model import ModelGraph
from planner.native import Rules, refusal
from planner.pins import Pins
from planner.plan import Job, Layout
from planner.schedule import FOLDED, splits_backward
from planner.space import (
    Degrees,
    Family,
    Timetable,
    canonical,
    every_degrees,
    families,
    micro_batches,
    sharings,
    timetables,
)
from planner.strategy import StrategyParts


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
        self._may_hold_plain: dict[object, bool] = {}
        self._room_plain_s: dict[object, float] = {}
        self._known_paces: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self.families = list(self._families())

    def _families(self) -> Iterator[Family]:
        """Yield what the backend runs.  Of refused degrees no axis orders are told apart."""
        for degrees in every_degrees(self.model, self.cluster, self.job, self.pins):
            reason = self.refusal(_plainest(self.job, degrees))
            if reason is None:
                yield from families(self.model, self.cluster, self.job, degrees, self.pins)
                continue
            count = len(sharings(degrees, self.pins)) * sum(
                len(timetables(self.model, degrees.pipeline, number, self.pins))
                for _, number in micro_batches(self.job, degrees, self.pins)
            )
            if count:
                self.refused[reason] = self.refused.get(reason, 0) + count

    def refusal(self, layout: Layout) -> str | None:
        """Return why the backend cannot run a layout, or None if it can."""
        return self.rules(self.model, self.cluster, self.job, layout)

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that the backend runs."""
        for family in self.families:
            for layout in family.layouts():
                if self.refusal(layout) is None:
                    yield layout

    def computation_s(self) -> bounds.Floats:
        """[family] Least seconds of a step by computation and communication inside layers alone.

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
        """[timetable] `computation_s` of each part of a family."""
        return [float(seconds) for seconds in self._timetables_s([family])]

    def _timetables_s(self, families: Sequence[Family]) -> bounds.Floats:
        """[timetable of the families in turn] Least seconds by computation alone."""
        number, stages, paces = [], [], []
        for family in families:
            found = self._paces(family.degrees.pipeline, family.micro_batches, family.timetables)
            paces.append(found)
            number += [self._divided[family.divided]] * len(found)
            stages += [float(family.degrees.pipeline)] * len(found)
        steady, fill, credited = np.concatenate(paces).T
        return self.tables.step_s + bounds.balanced_each_s(
            list(self._counts.values()),
            self._fastest_s[:, number],
            stages=np.array(stages),
            steady=steady,
            fill=fill,
            credits_s=credited * self._credits_s[number],
        )

    def _paces(
        self, pipeline: int, count: int, found: tuple[Timetable, ...]
    ) -> NDArray[np.float64]:
        """[timetable, 3] Steady, fill, and what a credit counts for."""
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
                rows.append((steady, fill, fill if splits_backward(name) else 0.0))
            self._known_paces[key] = np.array(rows)
        return self._known_paces[key]

    def room_s(self, family: Family) -> float:
        """Least seconds with what each stage can hold under any sharing; inf if none fits.

        Every figure is the least of the family, which has one timetable: seconds are those of
        computation, states are divided among as many ranks as there are under each ZeRO level (they
        only grow with fewer, see planner.memory).

        What does not fit under 1F1B fits under no other timetable but GPipe, which may hold
        gradients where activations were, and those that are folded, whose ends lie on one rank:
        each rank holds as many micro-batches or more, and more beside them.
        """
        schedule = family.timetables[0].schedule
        if schedule in ("1f1b", "gpipe"):
            may_hold = self._plain_may_hold if schedule == "1f1b" else self._any_may_hold
            return self._counted_s(family) if may_hold(family) else math.inf
        if not self._plain_may_hold(family):
            return math.inf
        if schedule not in FOLDED and math.isinf(self._plain_room_s(family)):
            return math.inf
        return self._counted_s(family)

    def _plain_may_hold(self, family: Family) -> bool:
        """`_any_may_hold` under 1F1B."""
        key = _beside_timetable(family)
        if key not in self._may_hold_plain:
            plain = replace(family, timetables=(Timetable(),))
            self._may_hold_plain[key] = self._any_may_hold(plain)
        return self._may_hold_plain[key]

    def _plain_room_s(self, family: Family) -> float:
        """`room_s` under 1F1B."""
        key = _beside_timetable(family)
        if key not in self._room_plain_s:
            plain = replace(family, timetables=(Timetable(),))
            self._room_plain_s[key] = self._counted_s(plain)
        return self._room_plain_s[key]

    def _any_may_hold(self, family: Family) -> bool:
        return any(self._may_hold(layout) for layout in family.corners())

    def _counted_s(self, family: Family) -> float:
        corners = [self.tables.of(layout) for layout in family.corners()]
        some = corners[0]
        least = replace(
            some,
            kinds={
                kind: tuple(
                    _least([corner.kinds[kind][choice] for corner in corners], part)
                    for choice, part in enumerate(parts)
                )
                for kind, parts in some.parts.items()
            },
            boundary_s=0.0,
            transfer_s=0.0,
            action_s=0.0,
            fixed_bytes=min(corner.fixed_bytes for corner in corners),
            slack=min(corner.slack for corner in corners),
        )
        instance = instance_of(self.model, self.cluster, family.first, least, self.pins.recompute)
        return bounds.counted_s(instance) + some.step_s

    def _may_hold(self, layout: Layout) -> bool:
        """Whether stages may hold all layers of the commonest kind; no is certain, yes is not.

        Before its first backward a rank has stored a micro-batch in every layer it has.  With u the
        largest transient on it, n layers need n (w + a) + u bytes or more, w and a the resident and
        stored bytes of the leanest choice whose transient is at most u.
        """
        kind, count = max(self._counts.items(), key=lambda item: item[1])
        options = self.tables.held_alone(layout, kind)
        room = self.tables.most_bytes(layout) * (1 + ROUNDING)
        most = 0.0
        for option in options:
            left = room - option.transient_bytes
            leanest = min(
                other.resident_bytes + other.stored_bytes
                for other in options
                if other.transient_bytes <= option.transient_bytes
            )
            if left >= 0:
                most = max(most, left // leanest if leanest else math.inf)
        return layout.pipeline * most >= count

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
        bound_s = bounds.balanced_s(
            rows,
            stages=layout.pipeline,
            exposed_s=sum(boundaries_s(costs, layout)),
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
        return instance_of(self.model, self.cluster, layout, costs, self.pins.recompute)

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


def _beside_timetable(family: Family) -> tuple[object, ...]:
    """What tells a family from others, but for its timetables."""
    return family.degrees, family.micro_batch, family.place


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


def _least(costs: list[StrategyCost], part: StrategyParts) -> StrategyCost:
    """Return the least of every figure, and the seconds without sharding."""
    return replace(
        costs[0],
        forward_s=part.unshared_forward_s,
        backward_s=part.unshared_backward_s,
        stored_bytes=min(cost.stored_bytes for cost in costs),
        transient_bytes=min(cost.transient_bytes for cost in costs),
        resident_bytes=min(cost.resident_bytes for cost in costs),
        sync_s=0.0,
    )
