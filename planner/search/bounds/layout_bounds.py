"""The candidates of one search: configurations with the bounds of families and of single layouts.

The families and their bounds are those of planner.search.bounds.layout_groups.  For a single
layout:

    communication   with its sharding and pipeline transfers, memory ignored
    memory          with all of them and what each stage can hold
    (planner.solver.bounds.path_bounds.counted_s)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.costs.group_costs import GroupCosts
from meshwright.planner.costs.layer_strategy import Recomputes, choices_of
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.search.bounds.dominance import dominates, twins
from meshwright.planner.search.bounds.layout_groups import FamilyBounds
from meshwright.planner.search.offload_choices import activations
from meshwright.planner.search.partition.layout_partition import boundaries_s, layout_pace
from meshwright.planner.search.space import Degrees, LayoutFamily, canonical
from meshwright.planner.solver.bounds import path_bounds as bounds

if TYPE_CHECKING:
    from meshwright.planner.costs.cost_cache import FigureStore
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.frameworks.native_limits import Rules
    from meshwright.planner.requests.request import Request

DEGREES = ("tensor", "context", "expert", "pipeline")
"""Pins that leave whole families out."""


class Candidates(FamilyBounds):
    """Configurations that a search looks at; parts of it answer other pins of the same request."""

    @property
    def whole_cluster(self) -> ClusterSpec:
        """The cluster, all of whose devices are alike."""
        return self.cluster

    @property
    def group_costs(self) -> GroupCosts:
        """Costs on the one group of the cluster."""
        return GroupCosts(self.request, tables={self.cluster.groups[0].name: self.tables})

    def by_timetable(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield families by their schedules, with their seconds by computation alone.

        Why others do not run is counted.
        """
        refused.update(self.refused)
        self.computation_s()
        for family in self.families:
            yield from zip(self.timetables_s(family), family.by_timetable(), strict=True)

    def part(self, request: Request) -> Candidates | None:
        """Return those that a request of the same under other pins has, with what is known of them.

        None unless the pins differ only in degrees and recomputation, pinned where they were not.
        """
        new, old = request.pins, self.pins
        asked = {name: getattr(new, name) for name in (*DEGREES, "recompute")}
        kept = all(getattr(old, name) in (None, value) for name, value in asked.items())
        alike = replace(old, **asked, divided=new.divided) == new and old.divided <= new.divided
        if not (kept and alike and replace(request, pins=old) == self.request):
            return None
        if not self._divided:
            self.computation_s()
        candidates = copy(self)
        candidates.request, candidates.pins, candidates.refused = request, new, Counter()
        candidates.families = [
            family
            for family in self.families
            if all(getattr(new, name) in (None, getattr(family.degrees, name)) for name in DEGREES)
            and all(getattr(family.degrees, axis) > 1 for axis in new.divided)
        ]
        if new.recompute != old.recompute and candidates.families:
            if self.recompute != old.recompute:
                return None
            candidates._recompute(new.recompute)
        return candidates

    def recomputing(self, recompute: Recomputes) -> Candidates:
        """Return the same layouts, whose layers may recompute something else."""
        if not self._divided:
            self.computation_s()
        candidates = copy(self)
        candidates.refused = self.refused.copy()
        candidates._recompute(recompute)
        return candidates

    def _recompute(self, recompute: Recomputes) -> None:
        """Let layers recompute something else, of figures that are known."""
        self.recompute = recompute
        self._sharding = self._sharding_table()
        self._forget()
        if self.families:
            self._bound_by_figures(self._chain.figures, self._chain.members)

    def _forget(self) -> None:
        """Begin without the bounds of anything."""
        super()._forget()
        self._known_communication_s: dict[Layout, float] = {}
        self._known_memory_s: dict[Layout, float] = {}
        self._known_instances, self._known_of_any_loss = {}, {}

    def communication_s(self, layout: Layout) -> float:
        """Least seconds with what sharding and the pipeline add, memory ignored."""
        if layout not in self._known_communication_s:
            self._known_communication_s[layout] = self._communication_s(layout)
        return self._known_communication_s[layout]

    def _communication_s(self, layout: Layout) -> float:
        costs = self.tables.costs_of(layout)
        rows = []
        for kind, table in costs.kinds.items():
            among = choices_of(self.recompute, kind)
            choices = [cost for cost in table if cost.recompute in among]
            fastest_s = min(cost.forward_s + cost.backward_s for cost in choices)
            rows.append((self._counts[kind], fastest_s, min(cost.sync_s for cost in choices)))
        steady, fill = layout_pace(self.model, layout)
        credits_s = 0.0
        if layout.executed_schedule.splits_backward:
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
        if layout not in self._known_memory_s:
            seconds = bounds.counted_s(self.instance(layout)) + self.tables.costs_of(layout).step_s
            self._known_memory_s[layout] = seconds
        return self._known_memory_s[layout]

    def dominator(self, layout: Layout) -> Layout | None:
        """Return a candidate that can do all that this layout can, if one is known."""
        costs = self.tables.costs_of(layout)
        for changed in twins(layout):
            twin = canonical(self.cluster, changed)
            if twin == layout or not self.pins.allow(twin) or self.refusal(twin) is not None:
                continue
            if dominates(twin, self.tables.costs_of(twin), layout, costs):
                return twin
        return None


def candidates_of(
    request: Request,
    rules: Rules | None,
    recompute: Recomputes,
    earlier: Sequence[Candidates],
    store: FigureStore | None = None,
    degrees: Iterable[Degrees] | None = None,
) -> Candidates:
    """Return the candidates of a request; `earlier` are of the same under other pins.

    `store` has figures of layers on other clusters; `degrees` are those that are of interest, by
    default all.
    """
    for candidates in earlier:
        if candidates.rules is not rules:
            continue
        if candidates.request is request:
            same = candidates.recompute == recompute
            return candidates if same else candidates.recomputing(recompute)
        part = candidates.part(request)
        if part is not None and part.recompute == recompute:
            return part
    treated = activations(request.cluster, request.pins, space=request.space)
    shared = next(
        (candidates for candidates in earlier if candidates.tables.activations == treated), None
    )
    if shared is None:
        tables = CostTables(request, treated, store=store)
        return Candidates(request, rules, recompute, tables, degrees=degrees)
    return Candidates(request, rules, recompute, shared.tables, shared.frontiers)
