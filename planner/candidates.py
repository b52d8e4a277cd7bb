"""The configurations that one search looks at, and what each can be held against.

Bounds come in steps, each dearer and at least as high as the one before.  Two for a whole family:

    computation     layers at their fastest, nothing shared or sent
    room            the same, with what each stage can hold if states are shared as far as they go

and two for a single layout:

    communication   with its sharding and pipeline transfers
    memory          with what each stage can hold (planner.bounds.counted_s)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner import bounds
from planner.cluster import ClusterSpec
from planner.costs import CostTables, LayoutCosts, StrategyCost
from planner.dominance import dominates, twins
from planner.formulation import instance_of
from planner.instance import ROUNDING, Instance
from planner.model import ModelGraph
from planner.native import Rules, refusal
from planner.pins import Pins
from planner.plan import Job, Layout
from planner.space import (
    Degrees,
    Family,
    canonical,
    every_degrees,
    families,
    micro_batches,
    schedules,
    sharings,
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
        self.families = list(self._families())

    def _families(self) -> Iterator[Family]:
        """Yield what the backend runs.  Of refused degrees no axis orders are told apart."""
        for degrees in every_degrees(self.model, self.cluster, self.job, self.pins):
            reason = self.refusal(_plainest(self.job, degrees))
            if reason is None:
                yield from families(self.cluster, self.job, degrees, self.pins)
                continue
            count = len(sharings(degrees, self.pins)) * len(schedules(degrees, self.pins))
            count *= len(micro_batches(self.job, degrees, self.pins))
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
        """[family] Least seconds of a step by computation and communication inside layers alone."""
        numbers: dict[tuple[object, ...], int] = {}
        number = [numbers.setdefault(f.divided, len(numbers)) for f in self.families]
        some = dict(zip(number, self.families, strict=True))
        fastest_s = self.tables.fastest_s(
            [some[n].first for n in range(len(numbers))], self.pins.recompute
        )
        return self.tables.step_s + bounds.balanced_each_s(
            list(self._counts.values()),
            fastest_s[:, number],
            stages=np.array([float(f.degrees.pipeline) for f in self.families]),
            steady=np.array([f.micro_batches - 1.0 for f in self.families]),
        )

    def room_s(self, family: Family) -> float:
        """Least seconds with what each stage can hold under any sharing; inf if none fits.

        Every figure is the least of the family: seconds are those of computation, states are
        divided among as many ranks as there are under each ZeRO level (they only grow with fewer,
        see planner.memory), and 1F1B holds the fewest micro-batches.
        """
        if not any(self._may_hold(layout) for layout in family.corners()):
            return math.inf
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
            fixed_bytes=min(corner.fixed_bytes for corner in corners),
            slack=min(corner.slack for corner in corners),
        )
        layout = family.layout(family.sharings[0], "1f1b")
        instance = instance_of(self.model, self.cluster, layout, least, self.pins.recompute)
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
        bound_s = bounds.balanced_s(
            rows,
            stages=layout.pipeline,
            exposed_s=2 * (layout.pipeline - 1) * costs.boundary_s,
            steady=layout.micro_batches - 1,
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
