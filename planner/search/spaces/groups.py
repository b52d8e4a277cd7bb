"""What searches over the layouts of some device groups have in common."""

from __future__ import annotations

from planner.costs.crossings import in_order
from planner.costs.group_costs import GroupCosts
from planner.costs.layout_costs import LayoutCosts
from planner.documents.cluster import ClusterSpec
from planner.documents.plan import Layout, PlannedGroup
from planner.requests.request import Request
from planner.search.formulation import instance_of
from planner.search.queue import Layouts
from planner.search.savings import activations
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Instance


class GroupSpace(Layouts):
    """Some groups of a cluster, each to be used whole, and what a model costs on them."""

    def __init__(
        self,
        request: Request,
        whole: ClusterSpec | None = None,
        *,
        known: GroupSpace | None = None,
    ) -> None:
        """`whole` is the cluster whose groups these are, if it has others too.

        `known` is a space of the same request, whose costs are known.
        """
        self.request = request
        self.model = model = request.model
        self.cluster = cluster = request.cluster
        self.job = request.job
        self.pins = request.pins
        self.whole = whole or cluster
        self.ordered = in_order(model) if model.edges else model
        """The layers one by one in an order in which they can run."""
        self.activations = activations(cluster, request.pins)
        self.costs: GroupCosts = known.costs if known else GroupCosts(request, self.activations)
        self.frontiers: FrontierStore = known.frontiers if known else FrontierStore()

    def costs_of(self, layout: Layout) -> tuple[LayoutCosts, ...]:
        """Return the costs of a layout on each group."""
        return tuple(self.costs.costs(layout).values())

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
                self.ordered,
                self.cluster.part((group,)),
                layout,
                self.costs.tables[group.name].of(layout),
                self.pins.recompute,
                self.pins.require,
                self.model,
            )
            for group in self.cluster.groups
        }
