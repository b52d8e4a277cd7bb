"""What is proven of simulated time where device groups differ, and the plans that it comes across.

The layouts of the spaces that were searched in the closed form go through a queue of their own, by
bounds of the simulated step (`planner.search.spaces.simulated_mixed`).  Before, the fastest plan
known has its degrees simulated under other schedules, with other micro-batches and splits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from planner.documents.plan import Layout
from planner.documents.tolerances import EQUAL
from planner.search.certificate import Account
from planner.search.layout_queue import Bound, Found, Lost, Queue
from planner.search.ranked import Ranked
from planner.search.simulated_proof import NEAR, Effort
from planner.search.space import Degrees, compiles, micro_batches, timetables
from planner.search.spaces.graph import GraphSpace
from planner.search.spaces.shares import ShareSpace
from planner.search.spaces.simulated import BySimulation, SimulatedSplit, Tried
from planner.search.spaces.simulated_graph import SimulatedGraph
from planner.search.spaces.simulated_mixed import SimulatedMixed, SimulatedMixedGraph


class SimulatedShares(BySimulation, ShareSpace):
    """Layouts without a pipeline, with bounds of the simulated step.

    There groups end one by one, each with what it does once: what the closed form adds is that of
    the group which does most.
    """

    def __init__(self, own: ShareSpace, tried: Tried) -> None:
        super().__init__(own.request, own.whole, known=own)
        self._own, self.tried = own, tried

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        return [("", lambda _: 0.0), ("", self.bound_s)]

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, memory ignored."""
        return super().bound_s(layout) - self._spread_s(layout)

    def _spread_s(self, layout: Layout) -> float:
        each = [
            costs.step_s + sum(min(o.sync_s for o in chain.kinds[kind]) for kind in chain.layers)
            for costs, chain in zip(
                self.costs_of(layout), self._chains(layout).values(), strict=True
            )
        ]
        return max(each) - min(each)

    def solve(self, layout: Layout, cutoff_s: float) -> Found[Any] | Lost:
        """Return the best shares of a layout by the closed form, simulated."""
        answer = self._own.solve(layout, cutoff_s)
        if isinstance(answer, Lost):
            return answer
        plan = self._own.ranked(answer)
        step_s = self.tried.keep(plan)
        low_s = min(step_s, answer.lower_bound_s - self._spread_s(layout))
        split = SimulatedSplit(plan, low_s >= step_s * (1 - EQUAL))
        return Found(step_s, low_s, answer.layout, split)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedProof:
    """What no plan simulates below, and what was simulated on the way."""

    lower_bound_s: float
    found: tuple[Ranked, ...]
    looked_at: dict[str, int]


def prove_spaces(
    spaces: Sequence[Any], known: Ranked, effort: Effort, closed_form_s: float
) -> MixedProof:
    """Return what is proven of all layouts of some spaces, beginning with a plan.

    None of them takes less than `closed_form_s` in the closed form.
    """
    every: list[Any] = []
    for space in spaces:
        tried = Tried(effort)
        if isinstance(space, ShareSpace):
            every.append(SimulatedShares(space, tried))
        elif isinstance(space, GraphSpace):
            every.append(SimulatedGraph(space, tried, closed_form_s))
        else:
            along = SimulatedMixedGraph if space.model.edges else SimulatedMixed
            every.append(along(space, tried))
    account = Account()
    best = _likely(every, known, effort)
    queue = Queue(account, below_s=best.prediction.step_time_s * (1 - EQUAL))
    for one in every:
        queue.run(one)
    found = [plan for one in every for plan in one.tried.found]
    least_s = min(one.prediction.step_time_s for one in [known, *found])
    looked_at: dict[str, int] = {}
    for one in every:
        for name, count in one.tried.looked_at.items():
            looked_at[name] = looked_at.get(name, 0) + count
    return MixedProof(
        lower_bound_s=min([least_s, *account.unfinished_s]),
        found=tuple(found),
        looked_at=looked_at,
    )


def _likely(every: Sequence[Any], known: Ranked, effort: Effort) -> Ranked:
    """Return the fastest of a plan and of what is like it: other schedules and micro-batches.

    Layouts are told by the least seconds of cuts, which are cheap; the least of them are solved,
    first those with the fewest stages a rank, then the fastest's schedule with others: what many
    stages of unequal ranks wait for each other is not seen in what ranks take by themselves.  Of
    the fastest the program chooses stages and recomputation.
    """
    best, layout = known, known.plan.layout
    groups = {stage.group for stage in known.plan.stages}
    space = next(
        (
            one
            for one in every
            if isinstance(one, SimulatedMixed)
            and {group.name for group in one.cluster.groups} == groups
        ),
        None,
    )
    if space is None or layout.pipeline == 1:
        return best
    limit_s = best.prediction.step_time_s * (1 + NEAR)
    every_alike = list(_alike(space, layout))
    fewest: dict[tuple[str, int], Layout] = {}
    for one in every_alike:
        few = fewest.setdefault((one.schedule, one.micro_batch), one)
        if one.virtual_stages < few.virtual_stages:
            fewest[one.schedule, one.micro_batch] = one
    for count in (effort.tried, effort.tried // 4):
        estimated = [
            (least_s, one)
            for one in itertools.islice(fewest.values(), effort.likely)
            if (least_s := space.estimate_s(one, limit_s)) < limit_s
        ]
        for _, one in heapq.nsmallest(count, estimated, key=itemgetter(0)):
            plan = space.quick(one, best.prediction.step_time_s)
            if plan is not None and plan.prediction.step_time_s < best.prediction.step_time_s:
                best = plan
        chosen = best.plan.layout
        fewest = {
            (one.schedule, one.virtual_stages): one
            for one in every_alike
            if (one.schedule, one.micro_batch) == (chosen.schedule, chosen.micro_batch)
            and one.virtual_stages != chosen.virtual_stages
        }
    space.solve(best.plan.layout, best.prediction.step_time_s)
    return min([best, *space.tried.found], key=lambda one: one.prediction.step_time_s)


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
            one = replace(
                layout,
                micro_batch=size,
                micro_batches=count,
                schedule=name,
                virtual_stages=virtual,
                compile=compiles(space.request, data, name),
            )
            if not one.executed.stale and space.refusal(one) is None:
                yield one
