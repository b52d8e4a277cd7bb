"""What searches over the layouts of some device groups have in common."""

from __future__ import annotations

from planner.cluster import ClusterSpec
from planner.formulation import instance_of
from planner.frontier import FrontierStore
from planner.group_costs import GroupCosts
from planner.instance import Instance
from planner.model import ModelGraph
from planner.pins import Pins
from planner.plan import Job, Layout, PlannedGroup


class GroupSpace:
    """Some groups of a cluster, each to be used whole, and what a model costs on them."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        job: Job,
        pins: Pins,
        whole: ClusterSpec | None = None,
    ) -> None:
        """`whole` is the cluster whose groups these are, if it has others too."""
        self.model = model
        self.cluster = cluster
        self.job = job
        self.pins = pins
        self.whole = whole or cluster
        self.costs = GroupCosts(model, cluster, job)
        self.frontiers = FrontierStore()

    @property
    def planned_groups(self) -> tuple[PlannedGroup, ...]:
        """The groups of the whole cluster as a plan names them."""
        return tuple(
            PlannedGroup(name=group.name, devices=group.devices) for group in self.whole.groups
        )

    def chains(self, layout: Layout) -> dict[str, Instance]:
        """Return each group's partition problem of a layout, as if it ran all stages."""
        return {
            group.name: instance_of(
                self.model,
                self.cluster.part((group,)),
                layout,
                self.costs.tables[group.name].of(layout),
                self.pins.recompute,
            )
            for group in self.cluster.groups
        }
