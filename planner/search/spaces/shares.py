"""Data-parallel ranks on devices that differ: how many micro-batches of a step each should take.

Without a pipeline, every rank (or tensor-parallel group of one kind of devices) runs the whole
model and may take a share of the step's micro-batches of its own; what ranks have in common comes
once per step (ZeRO-0 and 1, parameters on hosts only with ZeRO-0).  With t_g the seconds of a
micro-batch on group g, m_r >= 1 the shares and M = Σ m_r,

    T = max_r m_r t_{g(r)} + max_g sync_g + step,    memory on the smallest device held

For one choice of recomputation the best shares are exact
(`planner.solver.heterogeneous.micro_batch_shares`).  The choice is that of the whole model at its
fastest within memory on one of the groups, whichever gives the least T; the shares of each group at
its own fastest bound every common choice from below.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from meshwright.planner.costs.memory.host_memory import host_room_bytes
from meshwright.planner.costs.memory.rank_memory import room_bytes
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Layout, Share
from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.frameworks.native_limits import refusal
from meshwright.planner.schedules import PLAIN
from meshwright.planner.search.goals import SplitSolution
from meshwright.planner.search.micro_batch_size import largest_micro_batch
from meshwright.planner.search.offload_choices import savings_of
from meshwright.planner.search.partition.layer_options import allowed_options
from meshwright.planner.search.partition.layout_partition import layout_pace, plan_with, stage_of
from meshwright.planner.search.partition.rank_partition import RankProblem
from meshwright.planner.search.plan_candidate import Ranked
from meshwright.planner.search.proof_account import (
    BOUNDS,
    COMMUNICATION,
    COMPUTATION,
    OUT_OF_MEMORY,
    UNFINISHED,
)
from meshwright.planner.search.queue import Bound, LayoutBatch, Pruned
from meshwright.planner.search.space import (
    Degrees,
    compiles,
    divisors,
    losses,
    plainest,
    tensor_overlaps,
    waits_for_host,
    weighs_compilation,
)
from meshwright.planner.search.spaces.groups import GroupSpace
from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.heterogeneous.micro_batch_shares import Replica, fastest_shares
from meshwright.planner.solver.partition_problem import (
    Infeasible,
    Instance,
    Solution,
    evaluate_split,
    fits,
)
from meshwright.planner.solver.side_constraints import HostMemory

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates


@dataclass(frozen=True, slots=True)
class Shared:
    """A choice of recomputation for one whole model, and the share of each rank."""

    groups: tuple[str, ...]
    """[rank]"""
    micro_batches: tuple[int, ...]
    """[rank]"""
    split: Solution

    @property
    def optimal(self) -> bool:
        """True if no other shares and choice take less time."""
        return self.split.optimal


class ShareSpace(GroupSpace):
    """The layouts without a pipeline that use each of some groups whole."""

    candidates: GroupCandidates

    @cached_property
    def _alike(self) -> tuple[ClusterSpec, ...]:
        """[group] As many devices of its kind, in nodes of all: what a framework is asked about."""
        nodes = math.gcd(*(group.devices_per_node for group in self.cluster.groups))
        as_many = {"nodes": self.cluster.devices // nodes, "devices_per_node": nodes, "tiers": None}
        return tuple(
            self.cluster.model_copy(update={"groups": (group.model_copy(update=as_many),)})
            for group in self.cluster.groups
        )

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [(BOUNDS[COMPUTATION], lambda _: 0.0), (BOUNDS[COMMUNICATION], self.bound_s)]

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        refusals = (refusal(self.model, alike, self.job, layout) for alike in self._alike)
        return next(filter(None, refusals), None)

    def bundles(self, _: Counter[str]) -> Iterator[tuple[float, LayoutBatch]]:
        """Yield every layout that keeps what the user fixed, each by itself, with computation."""
        layouts = list(filter(self.pins.allow, self._every_layout()))
        self.candidates.know_passes(layouts)
        for layout in layouts:
            yield self.computation_s(layout), LayoutBatch((layout,))

    def _every_layout(self) -> Iterator[Layout]:
        """`micro_batches` is the mean share, rounded up."""
        ways, request = losses(self.request, PLAIN), self.request
        common = math.gcd(*(group.devices for group in self.cluster.groups))
        for tensor in divisors(common):
            data = self.cluster.devices // tensor
            most = largest_micro_batch(request, tensor)
            degrees = Degrees(tensor=tensor, context=1, expert=1, pipeline=1, data=data)
            blocks = compiles(request, degrees, PLAIN)
            for size in divisors(self.job.global_batch):
                count = self.job.global_batch // size
                if count < data or (size > most and self.pins.micro_batch is None):
                    continue
                compiled = [blocks]
                if weighs_compilation(request, blocks) and waits_for_host(request, degrees, size):
                    compiled.append("none")
                for zero in (0, 1):
                    if zero and data < count < 2 * data:
                        continue
                    plain = replace(
                        plainest(request, degrees),
                        data_replicate=1 if zero else data,
                        data_shard=data if zero else 1,
                        zero=zero,
                        micro_batch=size,
                        micro_batches=-(-count // data),
                        compile=blocks,
                    )
                    every = itertools.product(
                        savings_of(plain, request, self._saving_obstacle),
                        tensor_overlaps(plain, request, self.refusal),
                        compiled,
                        ways,
                    )
                    for saving, overlapped, blocks_are, loss in every:
                        if not overlapped.overlaps_tensors or blocks_are == "block":
                            layout_ = replace(overlapped, compile=blocks_are, loss=loss)
                            yield saving.applied_to(layout_)

    def _saving_obstacle(self, layout: Layout) -> str | None:
        """Return why a layout cannot save what it does, or None if it can."""
        if layout.zero and layout.offload == "parameters":
            return "ranks that divide parameters gather those of hosts in every micro-batch"
        return self.refusal(layout)

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by layers alone, with the best shares, memory ignored."""
        groups_s, _ = self.candidates.passes_s(layout)
        names = [group.name for group in self.cluster.groups]
        fastest_s = dict(zip(names, (groups_s @ self.candidates.counts).tolist(), strict=True))
        rank_s = [fastest_s[group] for group in self.groups_of_ranks(layout)]
        return _end_s(self._shares(layout, rank_s), rank_s) * (1 - SLACK)

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, memory ignored."""
        chains = self._chains(layout)
        fastest_s = {
            name: sum(min(o.time_s for o in chain.kinds[kind]) for kind in chain.layers)
            for name, chain in chains.items()
        }
        sync_s = max(
            sum(min(o.sync_s for o in chain.kinds[kind]) for kind in chain.layers)
            for chain in chains.values()
        )
        ranks = self.groups_of_ranks(layout)
        shares = self._shares(layout, [fastest_s[group] for group in ranks])
        step_s = max(costs.step_s for costs in self.costs.costs(layout).values())
        return _end_s(shares, [fastest_s[group] for group in ranks]) + sync_s + step_s

    def groups_of_ranks(self, layout: Layout) -> tuple[str, ...]:
        """[data-parallel rank] The group on whose devices it lies."""
        return tuple(
            group.name
            for group in self.cluster.groups
            for _ in range(group.devices // layout.tensor)
        )

    def solve(self, layout: Layout, _: float) -> SplitSolution[Shared] | Pruned:
        """Return the best shares of a layout."""
        chains = self._chains(layout)
        ranks = self.groups_of_ranks(layout)
        best: tuple[float, tuple[int, ...], Solution] | None = None
        least_s: dict[str, float] = {}
        for name, chain in chains.items():
            fastest = solve(chain, frontiers=self.frontiers)
            if not isinstance(fastest, Solution):
                reason = fastest.reason if isinstance(fastest, Infeasible) else ""
                return Pruned(OUT_OF_MEMORY, reason=reason)
            unproven_s = fastest.objective_s - fastest.lower_bound_s
            least_s[name] = fastest.stage_s[0] - unproven_s / (chain.steady + chain.fill)
            taken = {
                other: evaluate_split(chains[other], fastest.cuts, fastest.options)
                for other in chains
            }
            if not all(fits(chains[other], solution) for other, solution in taken.items()):
                continue
            rank_s = [taken[group].stage_s[0] for group in ranks]
            shares = self._shares(layout, rank_s)
            once_s = max(solution.stage_sync_s[0] for solution in taken.values())
            total_s = _end_s(shares, rank_s) + once_s
            if best is None or total_s < best[0]:
                best = total_s, shares, fastest
        if best is None:
            # Measured bytes differ between the groups, and what is best on one is too much for all.
            return Pruned(UNFINISHED, bound_s=self.bound_s(layout))
        total_s, shares, split = best
        step_s = max(costs.step_s for costs in self.costs.costs(layout).values())
        rank_s = [least_s[group] for group in ranks]
        shortest_sync_s = max(
            sum(min(o.sync_s for o in chain.kinds[kind]) for kind in chain.layers)
            for chain in chains.values()
        )
        bound_s = min(total_s, _end_s(self._shares(layout, rank_s), rank_s) + shortest_sync_s)
        split = replace(split, objective_s=total_s, lower_bound_s=bound_s)
        return SplitSolution(
            total_s + step_s,
            bound_s + step_s,
            replace(layout, micro_batches=max(shares)),
            Shared(ranks, shares, split),
        )

    def _shares(self, layout: Layout, rank_s: Sequence[float]) -> tuple[int, ...]:
        """[rank] Shares with which the slowest ends first; every rank takes one at least.

        With ZeRO-1 it is two, unless all take one (meshwright.planner.documents.plan says why).
        """
        count = self.job.global_batch // layout.micro_batch
        fewest = 2 if layout.zero and count > len(rank_s) else 1
        further = [
            Replica(fill_s=(fewest + 1) * rank_steady_s, steady_s=rank_steady_s)
            for rank_steady_s in rank_s
        ]
        more = fastest_shares(further, count - fewest * len(rank_s))
        return tuple(fewest + extra for extra in more)

    def _chains(self, layout: Layout) -> dict[str, Instance]:
        """Return each group's problem of one stage, with room for what the smallest device has.

        All have the same options in one order.
        """
        costs = self.costs.costs(layout)
        steady, fill = layout_pace(self.model, layout)
        room = min(
            room_bytes(group.accelerator.memory_bytes, costs[group.name])
            for group in self.cluster.groups
        )
        on_host = [
            host_room_bytes(group, costs[group.name].host_share) for group in self.cluster.groups
        ]
        limits = [limit for limit in on_host if limit is not None]
        offloads = layout.offload != "none" or "offload" in self.candidates.activations
        return {
            name: replace(
                RankProblem(
                    self.ordered, layout, of_group, self.pins.recompute, every=True
                ).instance(room, steady=steady, fill=fill, exposed_s=[0.0]),
                hosts=(HostMemory(capacity_bytes=min(limits), ranks=(1,)),)
                if limits and offloads
                else (),
            )
            for name, of_group in costs.items()
        }

    def candidate_of(self, split: SplitSolution[Shared]) -> Ranked:
        """Return the plan of some shares and its prediction."""
        shared, layout = split.split, split.layout
        choices = {
            kind: allowed_options(table, layout, self.pins.recompute, every=True)
            for kind, table in self.costs.tables[shared.groups[0]].costs_of(layout).kinds.items()
        }
        stage = stage_of(
            (name, choices[layer.kind][option])
            for (name, layer), option in zip(self.ordered.chain, shared.split.options, strict=True)
        )
        plan = plan_with(
            self.request,
            layout,
            (stage,),
            step_s=split.objective_s,
            groups=self.planned_groups,
            shares=tuple(
                Share(group=group, micro_batches=count)
                for group, count in zip(shared.groups, shared.micro_batches, strict=True)
            ),
        )
        return Ranked(
            plan=plan,
            objective_s=split.objective_s,
            prediction=predict(plan, self.model, self.whole, self.request.profile),
        )


def _end_s(shares: Sequence[int], rank_s: Sequence[float]) -> float:
    return max(count * seconds for count, seconds in zip(shares, rank_s, strict=True))
