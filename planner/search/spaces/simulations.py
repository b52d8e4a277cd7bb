"""Layouts of graphs, and where device groups differ, by what they simulate.

The layouts of the spaces that were searched in the closed form are bounded by the simulated step
(`planner.search.spaces.simulations`, `planner.search.spaces.simulated_mixed`).  Before, the
fastest plan known has its degrees simulated under other schedules, with other micro-batches and
splits.

Layouts of graphs of layers by what they simulate.

A bound of `planner.search.bounds.simulated_step` that is valid for stages of any seconds is so
whatever layers stages have:

    T >= m max_r t_r + σ_r        T >= K Σ_r t_r + 2 n Σ_b c_b

with c_b the seconds of a transfer over boundary b that computation may hide, of which `n` follow
one another on a path through all ranks (`transfers`).  Those that computation does not hide are
seconds of their senders, so they are in t_r.  Both are objectives of the partition problem of a
graph: steady m and fill 0, and steady 0 and fill K with seconds of a cut

    w x + (1 - w) (n / K) x

charged to both of its stages, x being the seconds of all outputs that cross it and w the share of
them that senders wait for.  The solver's optimum over all downsets, or its bound where there are
too many, is a bound of the simulated step.

Every rank has what one downset has and another lacks.  Where there are few downsets, these are
the columns of a program (`planner.search.bounds.simulated_optimum`), whose optimum is that of the
layout. Where a rank's layers have too many choices to list, one column stands for all: each layer
at its fastest, whether or not that fits, which no choice is below.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.costs.cut_tensors import colocated_places, readers_of
from meshwright.planner.search.bounds.simulated_mixed_devices import fill_of
from meshwright.planner.search.bounds.simulated_optimum import (
    Columns,
    CutPoints,
    Links,
    RankColumn,
    no_slower,
)
from meshwright.planner.search.bounds.simulated_step import transfers
from meshwright.planner.search.proof_account import BOUNDS, COMMUNICATION, COMPUTATION
from meshwright.planner.search.proof_account import SOLVED as BY_OPTIMUM
from meshwright.planner.search.proof_budget import NEAR
from meshwright.planner.search.queue import Bound, Pruned
from meshwright.planner.search.space import Degrees, compiles, micro_batches, timetables
from meshwright.planner.search.spaces.group_stages import graph_problem
from meshwright.planner.search.spaces.mixed import GraphSpace
from meshwright.planner.search.spaces.shares import ShareSpace
from meshwright.planner.search.spaces.simulated import BySimulation, Tried, bound_of
from meshwright.planner.search.spaces.simulated_mixed import SimulatedMixed
from meshwright.planner.search.spaces.simulated_unlike import SimulatedUnlike
from meshwright.planner.search.spaces.unlike_pipelines import UnlikeSpace
from meshwright.planner.solver.graphs.ideals import ideals

if TYPE_CHECKING:
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout, Plan
    from meshwright.planner.search.goals import SimulatedStepGoal
    from meshwright.planner.search.plan_candidate import Ranked
    from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
    from meshwright.planner.solver.partition_problem import Instance

MOST_PLACES = 600
"""Downsets of graphs whose columns are listed."""


class GraphColumns(Columns):
    """The columns of a graph's layout on one type of devices; see the head."""

    def _contents(
        self, rank: int, first: int, end: int, options: tuple[int, ...]
    ) -> dict[int, list[tuple[int, int]]]:
        return {rank: list(zip(self.places.between(first, end), options, strict=True))}

    def _new(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...]
    ) -> list[RankColumn] | None:
        fastest = self._fastest(rank, kinds)
        if self._sure(kinds, fastest) and self._fits(rank, (first, end), fastest):
            return [self._column(rank, first, end, fastest)]
        if self._too_many(kinds):
            may_fit = self._fits_leanest(rank, (first, end))
            return self._quickest(rank, first, end, kinds) if may_fit else []
        return super()._new(rank, first, end, kinds)

    def _quickest(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...], *, exact: bool = False
    ) -> list[RankColumn]:
        if self._too_many(kinds):
            return [self._column(rank, first, end, self._fastest(rank, kinds))]
        return super()._quickest(rank, first, end, kinds, exact=exact)

    def _sure(self, kinds: tuple[int, ...], options: tuple[int, ...]) -> bool:
        """Return whether each layer's option is the fastest in every part of its seconds."""
        tables = self.instance.kinds
        return all(
            no_slower([tables[kind][at]], [other])
            for kind, at in zip(kinds, options, strict=True)
            for other in tables[kind]
        )


class SimulatedGraph(SimulatedMixed, GraphSpace):
    """The layouts of a graph, with bounds of the simulated step and splits by it.

    Bounds hold for whatever layers ranks have, so also for downsets of a graph, and where there are
    few of these, they are the places between which ranks have columns.
    """

    columns_of = GraphColumns

    def places(self, layout: Layout) -> CutPoints | None:
        """Return the downsets, if they are few."""
        return self._places

    def links(self, layout: Layout) -> Links:
        """[group before][group after][place] Seconds of a transfer of all that crosses it."""
        problem: GraphInstance = self.closed_form.instance(layout)
        places, readers = self._places, problem.readers()
        assert places is not None
        return [
            [places.downsets.crossing(readers, np.array(output_s)) for output_s in row]
            for row in problem.output_s
        ]

    @cached_property
    def _places(self) -> CutPoints | None:
        return places_of(self.ordered)

    def read(
        self, layout: Layout, order: Sequence[int], ends: Sequence[int], options: Sequence[int]
    ) -> GraphSolution:
        """Return the split of types [rank], downsets [rank + 1] and options."""
        assert self._places is not None
        layers, cuts = self._places.laid(ends)
        return self.closed_form.evaluated_split(layout, order, cuts, options, layers)

    def computing(
        self, layout: Layout, chains: dict[str, Instance], *, flat: bool
    ) -> GraphInstance:
        """Return the problem of ranks that nothing but computation takes time on.

        What computation does not hide of a transfer its sender waits for; see the head.
        """
        problem = graph_problem(self.costs, layout, self.ordered, chains)
        times = next(iter(self.costs.costs(layout).values())).waits
        if flat:
            hidden = transfers(layout) / (2 * (layout.pipeline - 1) * fill_of(layout))
            times += (1 - times) * hidden
        output_s = tuple(
            tuple(tuple(times * each_s for each_s in seconds) for seconds in row)
            for row in problem.output_s
        )
        return replace(problem, output_s=output_s)


def places_of(model: ModelGraph) -> CutPoints | None:
    """Return where a graph of layers one by one can be cut, if its places are few."""
    every = ideals(readers_of(model), most=MOST_PLACES, colocated=colocated_places(model))
    return None if every is None else CutPoints(every)


class SimulatedShares(BySimulation, ShareSpace):
    """Layouts without a pipeline, with bounds of the simulated step.

    There groups end one by one, each with what it does once: what the closed form adds is that of
    the group which does most.
    """

    def __init__(self, space: ShareSpace, tried: Tried) -> None:
        super().__init__(space.candidates)
        self._closed_form, self.tried = space, tried

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        return [
            (BOUNDS[COMPUTATION], lambda _: 0.0),
            (BOUNDS[COMMUNICATION], self.bound_s),
            (BOUNDS[BY_OPTIMUM], self.solved_s),
        ]

    def may_refine(self, level: int) -> bool:
        """Return whether an entry of a level may get another bound: all are soon solved."""
        return level < self.groups + len(self.bounds) - 1

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, memory ignored."""
        return super().bound_s(layout) - self._spread_s(layout)

    def _spread_s(self, layout: Layout) -> float:
        replicas = [
            costs.step_s + sum(min(o.sync_s for o in chain.kinds[kind]) for kind in chain.layers)
            for costs, chain in zip(
                self.costs_of(layout), self._chains(layout).values(), strict=True
            )
        ]
        return max(replicas) - min(replicas)

    def solved_s(self, layout: Layout) -> float | Pruned:
        """Return what no shares of a layout simulate below; those of the closed form are tried."""
        answer = self._closed_form.solve(layout, self.tried.goal.step_s)
        if isinstance(answer, Pruned):
            return bound_of(answer)
        self.tried.offer(self._closed_form.candidate_of(answer))
        return answer.lower_bound_s - self._spread_s(layout)


def simulated_spaces(
    spaces: Sequence[Any], goal: SimulatedStepGoal, closed_form_s: float
) -> list[SimulatedShares | SimulatedUnlike | SimulatedMixed]:
    """Return the layouts of some spaces by what they simulate.

    None of them takes less than `closed_form_s` in the closed form.
    """
    every: list[SimulatedShares | SimulatedUnlike | SimulatedMixed] = []
    for space in spaces:
        if isinstance(space, GraphSpace):
            # Many downsets have no program, and each of their problems takes seconds.
            tried = Tried(goal, further=places_of(space.ordered) is not None)
            every.append(SimulatedGraph(space, tried, closed_form_s))
        elif isinstance(space, UnlikeSpace):
            every.append(SimulatedUnlike(space, Tried(goal, further=True)))
        elif isinstance(space, ShareSpace):
            every.append(SimulatedShares(space, Tried(goal)))
        else:
            every.append(SimulatedMixed(space, Tried(goal, further=True), closed_form_s))
    return every


def look_near(every: Sequence[Any], goal: SimulatedStepGoal, plans: Sequence[Ranked]) -> None:
    """Simulate what is like the best plan along a pipeline: other schedules and micro-batches.

    It is one of some `plans`, and near the best of all; one of a part of the cluster, or of more
    than a part, has other numbers of devices and is no neighbour.

    Layouts are judged by the least seconds of cuts, which are cheap; the least of them are solved,
    first those with the fewest stages a rank, then the fastest's schedule with others: what many
    stages of unequal ranks wait for each other is not seen in what ranks take by themselves.  Of
    the fastest the program chooses stages and recomputation.
    """
    most_s = goal.step_s * (1 + NEAR)
    along = [
        (plan, space)
        for plan in (goal.best, *plans)
        if plan.plan.layout.pipeline > 1 and plan.prediction.step_time_s <= most_s
        for space in every
        if isinstance(space, SimulatedMixed) and _is_of(space, plan.plan)
    ]
    if not along:
        return
    best, space = min(along, key=lambda of_space: of_space[0].prediction.step_time_s)
    layout, effort = best.plan.layout, goal.effort
    limit_s = best.prediction.step_time_s * (1 + NEAR)
    every_alike = list(_alike(space, layout))
    fewest: dict[tuple[str, int], Layout] = {}
    for candidate in every_alike:
        few = fewest.setdefault((candidate.schedule, candidate.micro_batch), candidate)
        if candidate.virtual_stages < few.virtual_stages:
            fewest[candidate.schedule, candidate.micro_batch] = candidate
    for count in (effort.tried, effort.tried // 4):
        estimated = [
            (least_s, candidate)
            for candidate in itertools.islice(fewest.values(), effort.likely)
            if (least_s := space.estimate_s(candidate, limit_s)) < limit_s
        ]
        for _, split in heapq.nsmallest(count, estimated, key=itemgetter(0)):
            plan = space.quick(split, best.prediction.step_time_s)
            if plan is not None and plan.prediction.step_time_s < best.prediction.step_time_s:
                best = plan
        chosen = best.plan.layout
        fewest = {
            (candidate.schedule, candidate.virtual_stages): candidate
            for candidate in every_alike
            if (candidate.schedule, candidate.micro_batch) == (chosen.schedule, chosen.micro_batch)
            and candidate.virtual_stages != chosen.virtual_stages
        }
    space.solved_s(best.plan.layout)


def _is_of(space: SimulatedMixed, plan: Plan) -> bool:
    """Tell whether a plan is on the cluster of a space, uses all of its groups, and its pipelines
    are alike."""
    groups = {stage.group for stage in plan.stages}
    return (
        plan.other_pipelines is None
        and plan.groups == space.closed_form.planned_groups
        and {group.name for group in space.cluster.groups} == groups
    )


def _alike(space: SimulatedMixed, layout: Layout) -> Iterator[Layout]:
    """Yield layouts with the same degrees that can run, once for each schedule and micro-batch."""
    data = Degrees(
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        data=layout.data,
        expert=layout.expert,
    )
    for size, count in micro_batches(space.request, data):
        for name, virtual in timetables(space.request, layout, count):
            instance = replace(
                layout,
                micro_batch=size,
                micro_batches=count,
                schedule=name,
                virtual_stages=virtual,
                compile=compiles(space.request, data, name),
            )
            if not instance.executed_schedule.stale and space.refusal(instance) is None:
                yield instance
