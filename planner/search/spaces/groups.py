"""What searches over the layouts of some device groups have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cluster import ClusterSpec
from planner.costs.crossings import in_order
from planner.costs.group_costs import GroupCosts
from planner.costs.layout_costs import LayoutCosts
from planner.costs.memory import States
from planner.costs.strategy import StrategyParts
from planner.plan import Layout, PlannedGroup
from planner.request import Request
from planner.search.formulation import instance_of
from planner.search.layout_queue import Bundles
from planner.search.savings import activations
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Instance


class GroupSpace(Bundles):
    """Some groups of a cluster, each to be used whole, and what a model costs on them."""

    def __init__(self, request: Request, whole: ClusterSpec | None = None) -> None:
        """`whole` is the cluster whose groups these are, if it has others too."""
        self.request = request
        self.model = model = request.model
        self.cluster = cluster = request.cluster
        self.job = request.job
        self.pins = request.pins
        self.whole = whole or cluster
        self.ordered = in_order(model) if model.edges else model
        """The layers one by one in an order in which they can run."""
        self.activations = activations(cluster, request.pins)
        self.costs = GroupCosts(request, self.activations)
        self.frontiers = FrontierStore()

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
            )
            for group in self.cluster.groups
        }


def leanest(corners: Sequence[LayoutCosts]) -> LayoutCosts:
    """Return the least bytes of some layouts' costs, and the seconds of computation alone.

    The layouts differ in nothing but how states are shared.
    """
    some = corners[0]
    parts = {
        kind: tuple(
            _leanest_part([one.parts[kind][at] for one in corners]) for at in range(len(table))
        )
        for kind, table in some.parts.items()
    }
    return replace(
        some,
        kinds={
            kind: tuple(
                replace(
                    cost,
                    forward_s=part.unshared_forward_s,
                    backward_s=part.unshared_backward_s,
                    sync_s=0.0,
                )
                for cost, part in zip(table, parts[kind], strict=True)
            )
            for kind, table in some.kinds.items()
        },
        parts=parts,
        boundary_s=some.action_s,
        transfer_s=0.0,
        fixed_bytes=min(one.fixed_bytes for one in corners),
    )


def _leanest_part(corners: Sequence[StrategyParts]) -> StrategyParts:
    """Return one choice with the least bytes of each cause."""
    every = [part.states for part in corners]
    backward_bytes = min(one.backward_transient_bytes for one in every)
    return replace(
        corners[0],
        treated=min((part.treated for part in corners), key=lambda one: one.stored_bytes),
        states=States(
            parameters_bytes=min(one.parameters_bytes for one in every),
            gathered_bytes=min(one.gathered_bytes for one in every),
            gradients_bytes=min(one.gradients_bytes for one in every),
            optimizer_bytes=min(one.optimizer_bytes for one in every),
            forward_transient_bytes=min(one.forward_transient_bytes for one in every),
            backward_transient_bytes=backward_bytes,
            host_bytes=min(one.host_bytes for one in every),
            bucket_bytes=min(one.bucket_bytes for one in every),
            waiting_gradients=min(one.waiting_gradients for one in every),
            after_backward_bytes=min(one.after_backward_bytes for one in every),
        ),
    )
