"""The search where device groups differ: which groups, which layout, what runs where.

Every non-empty set of the cluster's groups may be used, each group of it whole: as stages of a
pipeline, or, without one, as data-parallel ranks with their own shares (`planner.spaces.shares`).
For each layout of a pipeline the order of the groups along it, the cuts and every layer's
recomputation are chosen together, exactly (`planner.unequal`).  Layouts wait in
`planner.layout_queue` by

    T >= steady · τ + Σ_l min_g t_gl + 2 (P - 1) least crossing + least sync + step

where no split has a slowest stage below τ: with P_g stages of group g, seconds t_gl of layer l on
it and T_g = Σ_l t_gl, weighing the stages by 1 / T_g gives

    τ Σ_g P_g / T_g  >=  Σ_g (seconds of g's stages) / T_g  >=  Σ_l min_g t_gl / T_g
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from planner.certificate import BOUNDS, COMMUNICATION, OUT_OF_MEMORY
from planner.cluster import ClusterSpec
from planner.costs import refusal
from planner.errors import DocumentError
from planner.formulation import plan_of
from planner.group_costs import SEVERAL_KINDS
from planner.instance import Infeasible
from planner.layout_queue import Bound, Found, Lost
from planner.misses import nothing_runs
from planner.model import ModelGraph
from planner.native import GROUP_SCHEDULES
from planner.pins import Pins
from planner.plan import Job, Layout, Plan, Stage
from planner.predict import placement_prediction, placements_of
from planner.profile import Profile
from planner.ranked import Ranked
from planner.search import Answer
from planner.space import every_degrees, micro_batches, sharings, timetables
from planner.spaces.groups import GroupSpace
from planner.spaces.search import Misses, Progress, Refusals, Space, search_spaces
from planner.spaces.shares import ShareSpace
from planner.unequal import solve_unequal
from planner.unequal_instance import DeviceType, UnequalInstance, UnequalSolution


def search_mixed(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    *,
    cluster_name: str,
    profile: Profile | None,
    pins: Pins,
    solver: str,
    top: int = 1,
    progress: Progress | None = None,
) -> Answer:
    """Return the fastest plan that fits, with its proof."""
    if solver != "exact":
        raise DocumentError("solver", f"is '{solver}'; devices that differ need 'exact'")
    if profile is not None:
        raise DocumentError("profile", SEVERAL_KINDS)

    def why_nothing(refused: Refusals, misses: Misses) -> str:
        if misses:
            return _closest_miss(model, cluster, job, misses)
        return nothing_runs(model, cluster, job, refused)

    return search_spaces(
        _spaces(model, cluster, job, pins),
        cluster_name=cluster_name,
        refused={},
        why_nothing=why_nothing,
        top=top,
        progress=progress,
    )


class MixedSpace(GroupSpace):
    """The layouts of some groups that use each of them whole, a stage on each."""

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [(BOUNDS[COMMUNICATION], self.bound_s)]

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        return refusal(self.model, self.cluster, self.job, layout)

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout that keeps what the user fixed."""
        for degrees in every_degrees(self.model, self.cluster, self.job, self.pins):
            for zero, shard in sharings(degrees, self.pins):
                for size, count in micro_batches(self.job, degrees, self.pins):
                    for name, _ in timetables(self.model, degrees.pipeline, count, self.pins):
                        if name not in GROUP_SCHEDULES:
                            continue
                        yield Layout(
                            tensor=degrees.tensor,
                            context=degrees.context,
                            expert=degrees.expert,
                            pipeline=degrees.pipeline,
                            data_replicate=degrees.data // shard,
                            data_shard=shard,
                            zero=zero,
                            schedule=name,
                            micro_batch=size,
                            micro_batches=count,
                        )

    def instance(self, layout: Layout) -> UnequalInstance:
        """Return the partition problem of a layout."""
        chains = self.chains(layout)
        stages = self.costs.stages_of(layout)
        some = next(iter(chains.values()))
        return UnequalInstance(
            layers=some.layers,
            types=tuple(
                DeviceType(
                    name=name,
                    stages=stages[name],
                    kinds=chain.kinds,
                    capacity_bytes=chain.stages[0].capacity_bytes,
                )
                for name, chain in chains.items()
            ),
            in_flight=tuple(stage.in_flight for stage in some.stages),
            buffer_bytes=tuple(stage.fixed_bytes for stage in some.stages),
            steady=some.steady,
            forward_apart=all(chain.forward_apart for chain in chains.values()),
            cut_s=tuple(
                tuple((cut_s,) * (len(some.layers) + 1) for cut_s in row)
                for row in self._crossings_s(layout)
            ),
        )

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, memory ignored; see the head of this module."""
        chains = list(self.chains(layout).values())
        stages = list(self.costs.stages_of(layout).values())
        layers, steady = chains[0].layers, chains[0].steady
        time_s = [[min(o.time_s for o in table) for table in chain.kinds] for chain in chains]
        sync_s = [[min(o.sync_s for o in table) for table in chain.kinds] for chain in chains]
        kinds = {kind: layers.count(kind) for kind in set(layers)}
        whole_s = [sum(n * times[kind] for kind, n in kinds.items()) for times in time_s]
        if not all(whole_s):
            return 0.0
        weighed = sum(
            n * min(times[kind] / whole for times, whole in zip(time_s, whole_s, strict=True))
            for kind, n in kinds.items()
        )
        slowest_s = weighed / sum(n / whole for n, whole in zip(stages, whole_s, strict=True))
        slowest_s = max(slowest_s, *(min(times[kind] for times in time_s) for kind in kinds))
        fill_s = sum(n * min(times[kind] for times in time_s) for kind, n in kinds.items())
        least_sync_s = {kind: min(table[kind] for table in sync_s) for kind in kinds}
        once_s = max(
            *least_sync_s.values(),
            sum(n * least_sync_s[kind] for kind, n in kinds.items()) / layout.pipeline,
        )
        crossing_s = min(min(row) for row in self._crossings_s(layout))
        crossings_s = 2 * (layout.pipeline - 1) * crossing_s
        return steady * slowest_s + fill_s + crossings_s + once_s + self._step_s(layout)

    def solve(self, layout: Layout, _: float) -> Found[UnequalSolution] | Lost:
        """Return the best order of groups, cuts and options of a layout."""
        answer = solve_unequal(self.instance(layout), frontiers=self.frontiers)
        if isinstance(answer, Infeasible):
            return Lost(OUT_OF_MEMORY, reason=answer.reason)
        step_s = self._step_s(layout)
        return Found(
            answer.split.objective_s + step_s, answer.split.lower_bound_s + step_s, layout, answer
        )

    def ranked(self, found: Found[UnequalSolution], cluster_name: str) -> Ranked:
        """Return the plan of a split and its prediction."""
        layout, groups = found.layout, found.split.stage_types
        tables = self.costs.tables[groups[0]]
        plain = plan_of(
            self.model,
            cluster_name,
            self.job,
            layout,
            tables.of(layout),
            found.split.split,
            self.pins.recompute,
        )
        plan = Plan(
            **{
                **dict(plain),
                "groups": self.planned_groups,
                "stages": tuple(
                    Stage(layers=stage.layers, group=group)
                    for stage, group in zip(plain.stages, groups, strict=True)
                ),
            }
        )
        prediction = placement_prediction(
            tables,
            layout,
            placements_of(plan, self.model),
            self.costs.seats(layout, groups),
        )
        return Ranked(
            plan=plan,
            objective_s=found.objective_s,
            prediction=prediction.model_copy(update={"plan_digest": plan.digest}),
        )

    def _step_s(self, layout: Layout) -> float:
        return max(costs.step_s for costs in self.costs.costs(layout).values())

    def _crossings_s(self, layout: Layout) -> list[list[float]]:
        """[group before][group after] Seconds that each of two neighbours spends on a boundary."""
        costs = self.costs.costs(layout)
        if layout.pipeline == 1:
            return [[0.0]]
        return [
            [
                self.costs.crossing_s(layout, before, after)
                + max(costs[before].action_s, costs[after].action_s)
                for after in costs
            ]
            for before in costs
        ]


def _spaces(model: ModelGraph, cluster: ClusterSpec, job: Job, pins: Pins) -> Iterator[Space[Any]]:
    """Yield the layouts of every set of groups, the largest first.

    Shares are soon solved, and what they reach need not be looked for along a pipeline.
    """
    for count in range(len(cluster.groups), 0, -1):
        for groups in itertools.combinations(cluster.groups, count):
            part = cluster.part(groups)
            if part.mixed:
                yield ShareSpace(model, part, job, pins, cluster)
            yield MixedSpace(model, part, job, pins, cluster)


def _closest_miss(
    model: ModelGraph, cluster: ClusterSpec, job: Job, misses: list[tuple[Layout, str]]
) -> str:
    """Say what the layout that divides its states the most lacks."""
    layout, reason = min(
        misses, key=lambda miss: (miss[0].micro_batch, -miss[0].zero, -miss[0].devices)
    )
    devices = " and ".join(f"{group.devices} x {group.name}" for group in cluster.groups)
    return (
        f"no plan of {model.name} fits {devices} at sequence {job.seq_len} and global batch "
        f"{job.global_batch}. Of {len(misses)} layouts, {layout.text()}: {reason}"
    )
