"""Layouts of graphs, and where device groups differ, by what they simulate.

The layouts of the spaces that were searched in the closed form are bounded by the simulated step
(`planner.search.spaces.simulated_graph`, `planner.search.spaces.simulated_mixed`).  Before, the
fastest plan known has its degrees simulated under other schedules, with other micro-batches and
splits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from meshwright.planner.documents.plan import Layout
from meshwright.planner.search.goals import SimulatedStepGoal
from meshwright.planner.search.proof_account import BOUNDS, COMMUNICATION, COMPUTATION
from meshwright.planner.search.proof_account import SOLVED as BY_OPTIMUM
from meshwright.planner.search.proof_budget import NEAR
from meshwright.planner.search.queue import Bound, Pruned
from meshwright.planner.search.space import Degrees, compiles, micro_batches, timetables
from meshwright.planner.search.spaces.mixed import GraphSpace
from meshwright.planner.search.spaces.shares import ShareSpace
from meshwright.planner.search.spaces.simulated import BySimulation, Tried, bound_of
from meshwright.planner.search.spaces.simulated_graph import SimulatedGraph, places_of
from meshwright.planner.search.spaces.simulated_mixed import SimulatedMixed


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
        """Whether an entry of a level may get another bound: all are soon solved."""
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
) -> list[SimulatedShares | SimulatedMixed]:
    """Return the layouts of some spaces by what they simulate.

    None of them takes less than `closed_form_s` in the closed form.
    """
    every: list[SimulatedShares | SimulatedMixed] = []
    for space in spaces:
        if isinstance(space, GraphSpace):
            # Many downsets have no program, and each of their problems takes seconds.
            tried = Tried(goal, further=places_of(space.ordered) is not None)
            every.append(SimulatedGraph(space, tried, closed_form_s))
        elif isinstance(space, ShareSpace):
            every.append(SimulatedShares(space, Tried(goal)))
        else:
            every.append(SimulatedMixed(space, Tried(goal), closed_form_s))
    return every


def look_near(every: Sequence[Any], goal: SimulatedStepGoal) -> None:
    """Simulate what is like the best plan: other schedules and micro-batches.

    Layouts are judged by the least seconds of cuts, which are cheap; the least of them are solved,
    first those with the fewest stages a rank, then the fastest's schedule with others: what many
    stages of unequal ranks wait for each other is not seen in what ranks take by themselves.  Of
    the fastest the program chooses stages and recomputation.
    """
    best, layout, effort = goal.best, goal.best.plan.layout, goal.effort
    groups = {stage.group for stage in best.plan.stages}
    space = next(
        (
            candidate
            for candidate in every
            if isinstance(candidate, SimulatedMixed)
            and {group.name for group in candidate.cluster.groups} == groups
        ),
        None,
    )
    if space is None or layout.pipeline == 1:
        return
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


def _alike(space: SimulatedMixed, layout: Layout) -> Iterator[Layout]:
    """Yield layouts with the same degrees that can run, once for each schedule and micro-batch."""
    data = Degrees(
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        data=layout.data,
        expert=layout.expert,
    )
    for size, count in micro_batches(space.job, data, space.pins):
        for name, virtual in timetables(
            space.model, layout.pipeline, count, space.pins, space=space.request.space
        ):
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
