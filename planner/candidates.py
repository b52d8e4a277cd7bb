"""The configurations that one search looks at, and what each can be held against.

Bounds come in three steps, each dearer and at least as high as the one before:

    computation     layers at their fastest, nothing shared or sent: the same for many layouts
    communication   with sharding and pipeline transfers
    memory          with what each stage can hold (planner.bounds.counted_s)
"""

from __future__ import annotations

from collections.abc import Sequence

from planner import bounds
from planner.cluster import ClusterSpec
from planner.costs import CostTables, LayoutCosts, refusal
from planner.dominance import dominates, twins
from planner.formulation import instance_of
from planner.instance import Instance
from planner.model import ModelGraph
from planner.plan import INSIDE_OUT, Job, Layout
from planner.space import Pins, layouts


class Candidates:
    """All layouts of a space that the backend runs, and the refusals by reason."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        job: Job,
        tables: CostTables,
        pins: Pins,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.tables = tables
        self.pins = pins
        self.refused: dict[str, int] = {}
        self.layouts: list[Layout] = []
        for layout in layouts(model, cluster, job, pins):
            reason = refusal(model, cluster, job, layout)
            if reason is None:
                self.layouts.append(layout)
            else:
                self.refused[reason] = self.refused.get(reason, 0) + 1
        self._known = set(self.layouts)
        self._counts: dict[str, int] = {}
        for layer in model.layers:
            self._counts[layer.kind] = self._counts.get(layer.kind, 0) + layer.repeat
        self._fastest: dict[object, list[tuple[int, float, float]]] = {}

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by computation and communication inside layers alone."""
        return bounds.balanced_s(
            self._fastest_layers(layout),
            stages=layout.pipeline,
            exposed_s=0.0,
            steady=layout.micro_batches - 1,
        )

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
        for twin in twins(layout):
            if twin in self._known and dominates(twin, self.tables.of(twin), layout, costs):
                return twin
        return None

    def _fastest_layers(self, layout: Layout) -> Sequence[tuple[int, float, float]]:
        """Return count, fewest seconds and no sync of each kind; shared by many layouts."""
        key: object = (layout.tensor, layout.context, layout.expert, layout.micro_batch)
        if layout.order != INSIDE_OUT:
            key = (key, layout)
        found = self._fastest.get(key)
        if found is None:
            fastest = self.tables.fastest_s(layout, self.pins.recompute)
            found = [(self._counts[kind], s, 0.0) for kind, s in fastest.items()]
            self._fastest[key] = found
        return found
