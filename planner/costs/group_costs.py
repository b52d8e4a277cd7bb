"""Costs where device groups differ: each pipeline stage on one group, priced with its figures.

A stage's ranks are of one group, so tensor and data parallelism stay inside it and the links that
they use are the group's own.  Only the pipeline crosses from one group to another, over the tier
that joins them; between stages of one group it takes the slowest link that two of them have.

Pipelines of unlike kinds (`Plan.other_pipelines`) sum gradients over the ranks that hold a layer,
one of each pipeline.  What joins groups or nodes is a level of this sum, and inside a node there
are as many of these ranks as there are of the stage that has the fewest on one (`replicas_of`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.costs.collectives import Level, group_levels, levels
from meshwright.planner.costs.cut_tensors import crossings
from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts
from meshwright.planner.costs.sharding import PipelineReplicas
from meshwright.planner.costs.stage_placement import StagePlacement, StagePlacements, passed_on

if TYPE_CHECKING:
    from meshwright.planner.costs.memory.rank_memory import StageTraffic
    from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup
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

    def among(self, replicas: PipelineReplicas) -> GroupCosts:
        """Return the costs on pipelines that may be unlike; a layout describes one kind of them."""
        costs = copy(self)
        costs.tables = {name: tables.among(replicas) for name, tables in self.tables.items()}
        costs._known = {}
        return costs

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


def replicas_of(
    cluster: ClusterSpec, kinds: Iterable[tuple[Layout, Iterable[DeviceGroup]]]
) -> PipelineReplicas:
    """Return the pipelines of some kinds, each with its layout and the groups of its stages.

    >>> from meshwright.planner.catalog.expressions import resolve_cluster
    >>> from meshwright.planner.documents.plan import Layout
    >>> mixed = resolve_cluster("8xh100-sxm-80gb+8xa100-sxm-80gb")
    >>> kinds = zip((Layout(data_replicate=8), Layout(pipeline=2, data_replicate=4)), mixed.groups)
    >>> replicas = replicas_of(mixed, ((layout, [group]) for layout, group in kinds))
    >>> replicas.number, [(level.tier.name, level.members) for level in replicas.levels]
    (12, [('nvlink', 4), ('network', 3)])
    """
    number, near, joined = 0, list[Level](), cluster.tiers[-1]
    for layout, groups in kinds:
        number += layout.data
        for group in groups:
            tiers = cluster.part((group,)).tiers
            inside = levels(tiers, [(layout.data, layout.tensor)], devices=group.devices)
            beside = inside and inside[0].tier.name != joined.name
            near.append(inside[0] if beside else Level(joined, 1))
    members = min(level.members for level in near)
    if members == 1:
        return PipelineReplicas(number=number, levels=(Level(joined, number),))
    slowest = min((level.tier for level in near), key=lambda tier: tier.bytes_per_s)
    rest = -(-number // members)
    return PipelineReplicas(number=number, levels=(Level(slowest, members), Level(joined, rest)))
