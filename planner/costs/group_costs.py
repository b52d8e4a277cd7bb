"""Costs where device groups differ: each pipeline stage on one group, priced with its figures.

A stage's ranks are of one group, so tensor and data parallelism stay inside it and the links that
they use are the group's own.  Only the pipeline crosses from one group to another, over the tier
that joins them; between stages of one group it takes the slowest link that two of them have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.costs.collectives import Level, group_levels
from meshwright.planner.costs.cut_tensors import crossings
from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts
from meshwright.planner.costs.stage_placement import StagePlacement, StagePlacements, passed_on

if TYPE_CHECKING:
    from meshwright.planner.costs.memory.rank_memory import StageTraffic
    from meshwright.planner.documents.plan import Activations, Layout
    from meshwright.planner.requests.request import Request


MOST_KNOWN = 4_000
"""Layouts whose costs are kept."""


class GroupCosts:
    """Costs of a model on every group of a cluster, for any layout."""

    def __init__(
        self,
        request: Request,
        activations: tuple[Activations, ...] = ("keep",),
        tables: dict[str, CostTables] | None = None,
    ) -> None:
        """`tables` are those of each group, if they are known."""
        self.model = request.model
        self.cluster = request.cluster
        self.tables = tables or {
            group.name: CostTables(request.on_groups((group,)), activations)
            for group in request.cluster.groups
        }
        self._known: dict[Layout, dict[str, LayoutCosts]] = {}

    def stage_devices(self, layout: Layout) -> int:
        """Devices of one pipeline stage."""
        return layout.devices // layout.pipeline

    def stages_of(self, layout: Layout) -> dict[str, int]:
        """Return the number of stages of each group if it is used up."""
        each = self.stage_devices(layout)
        return {group.name: group.devices // each for group in self.cluster.groups}

    def costs(self, layout: Layout) -> dict[str, LayoutCosts]:
        """Return each group's costs of a layout, in the order of the groups."""
        costs = self._known.get(layout)
        if costs is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            costs = {name: tables.costs_of(layout) for name, tables in self.tables.items()}
            self._known[layout] = costs
        return costs

    def crossing_s(
        self, layout: Layout, before: str, after: str, size_bytes: float | None = None
    ) -> float:
        """Seconds of one micro-batch's activation from a stage on one group to one on another.

        It has `size_bytes`, or what crosses every boundary of a chain.
        """
        if size_bytes is None:
            size_bytes = self.costs(layout)[before].boundary_bytes
        if before != after:
            joined = Level(self.cluster.tiers[-1], 2)
            return self.tables[before].rates.link_s("send_recv", size_bytes, (joined,))
        inside = replace(layout, pipeline=max(1, self.stages_of(layout)[before]))
        levels = group_levels(self.tables[before].cluster.tiers, inside, ("pipeline",))
        return self.tables[before].rates.link_s("send_recv", size_bytes, levels)

    def seats(
        self, layout: Layout, groups: Sequence[str], stages: Sequence[Sequence[str]] | None = None
    ) -> StagePlacements:
        """Return the seats of stages that run on these groups.

        `stages` are their layers' names, where layers form a graph.
        """
        costs = self.costs(layout)
        held = {group.name: group for group in self.cluster.groups}
        passings: Sequence[StageTraffic | None] = [None] * len(groups)
        crossing: Sequence[Sequence[float | None]] = [[None]] * (len(groups) - 1)
        if stages is not None:
            sizes = self.tables[groups[0]].output_sizes(layout)
            passings = passed_on(self.model, sizes, stages)
            crossing = [[sizes[name] for name in names] for names in crossings(self.model, stages)]
        return StagePlacements(
            stages=tuple(
                StagePlacement(
                    costs=costs[g],
                    accelerator=held[g].accelerator,
                    passing=passing,
                    group=held[g],
                )
                for g, passing in zip(groups, passings, strict=True)
            ),
            transfer_s=tuple(
                sum(self.crossing_s(layout, before, after, size) for size in sizes_bytes)
                for (before, after), sizes_bytes in zip(
                    itertools.pairwise(groups), crossing, strict=True
                )
            ),
        )
