"""Common parts of searches over the layouts of several device groups."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.costs.cut_tensors import in_order
from meshwright.planner.costs.memory.host_memory import host_room_bytes
from meshwright.planner.documents.plan import Layout, PlannedGroup
from meshwright.planner.search.partition.layout_partition import instance_of
from meshwright.planner.search.queue import SearchSpace
from meshwright.planner.search.space import losses
from meshwright.planner.solver.side_constraints import HostMemory

if TYPE_CHECKING:
    from meshwright.planner.costs.group_costs import GroupCosts
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.search.bounds.layout_bounds import Candidates
    from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
    from meshwright.planner.solver.partition_problem import Instance


class GroupSpace(SearchSpace):
    """Some groups of a cluster, each to be used whole, and what a model costs on them."""

    def __init__(self, candidates: GroupCandidates | Candidates) -> None:
        """Search these candidates; in `Candidates` all devices are alike."""
        self.candidates = candidates
        self.request = candidates.request
        self.model = model = candidates.model
        self.cluster = candidates.cluster
        self.job = candidates.job
        self.whole = candidates.whole_cluster
        """The cluster whose groups these are."""
        self.pins = candidates.pins
        self.ordered = in_order(model) if model.edges else model
        """The layers one by one in an order in which they can run."""
        self.costs: GroupCosts = candidates.group_costs
        self.frontiers = candidates.frontiers

    def costs_of(self, layout: Layout) -> tuple[LayoutCosts, ...]:
        """Return the costs of a layout on each group."""
        return tuple(self.costs.costs(layout).values())

    @property
    def planned_groups(self) -> tuple[PlannedGroup, ...] | None:
        """The groups of the whole cluster as a plan names them; None where all are alike."""
        if not self.whole.is_mixed:
            return None
        return tuple(
            PlannedGroup(name=group.name, devices=group.devices) for group in self.whole.groups
        )

    def chains(self, layout: Layout, *, any_loss: bool = False) -> dict[str, Instance]:
        """Return each group's partition problem of a layout, as if it ran all stages.

        With `any_loss` it is one of all layouts that differ in how they compute the loss alone.
        """
        ways = losses(self.candidates.request, layout.schedule) if any_loss else (layout.loss,)
        instances = {
            group.name: instance_of(
                self.ordered,
                self.cluster.part((group,)),
                layout,
                self.costs.tables[group.name].of_any_loss(layout, ways),
                self.candidates.recompute,
                self.pins.require,
                self.model,
            )
            for group in self.cluster.groups
        }
        if not self.whole.is_mixed:
            return instances
        return {
            name: replace(chain, hosts=self._hosts(layout, name, chain))
            for name, chain in instances.items()
        }

    def _hosts(self, layout: Layout, name: str, chain: Instance) -> tuple[HostMemory, ...]:
        """Return the part of a host that each rank on a group has."""
        group = next(group for group in self.cluster.groups if group.name == name)
        room_bytes = host_room_bytes(group, self.costs.costs(layout)[name].host_share)
        if not chain.hosts or room_bytes is None:
            return ()
        ranks = range(layout.pipeline)
        return tuple(
            HostMemory(capacity_bytes=room_bytes, ranks=tuple(int(r == of_host) for r in ranks))
            for of_host in ranks
        )
