"""Unlike pipelines by what they simulate: bounds of a step, and plans.

With T seconds a group of d_g pipelines does no more than d_g max {m : L_g(m) <= T} micro-batches,
L_g(m) being any bound of the simulated step of its own layouts of m micro-batches (the module
`planner.search.spaces.unlike_pipelines`).  By computation L_g are the paces of
`planner.search.bounds.simulated_step`; then those with what is sent; then the least step of the
group's own pipelines, which is found with its plan (`planner.search.spaces.simulated_mixed`), at
the most micro-batches that are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.schedules import PLAIN, schedule_of
from meshwright.planner.search.bounds.simulated_step import flat, forward_share
from meshwright.planner.search.goals import SimulatedStepGoal
from meshwright.planner.search.plan_candidate import Ranked
from meshwright.planner.search.proof_account import BOUNDS, MEMORY, ROOM
from meshwright.planner.search.proof_account import SOLVED as BY_OPTIMUM
from meshwright.planner.search.queue import Bound
from meshwright.planner.search.spaces.simulated import SOLVED, BySimulation, Tried
from meshwright.planner.search.spaces.simulated_mixed import SimulatedMixed
from meshwright.planner.search.spaces.unlike_pipelines import (
    ROUNDS,
    Floats,
    KindSpace,
    UnlikeLayout,
    UnlikeSpace,
)
from meshwright.planner.solver.heterogeneous.micro_batch_shares import (
    Replica,
    fastest_counts,
)

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout

MOST_KINDS = 12
"""Pipelines of single groups that are solved for the proof of one layout."""


@dataclass(frozen=True, slots=True)
class KindOptimum:
    """Least simulated step of the pipelines of one group, and the best plan below a limit."""

    least_s: float
    best: Ranked | None


class SimulatedUnlike(BySimulation, UnlikeSpace):
    """Layouts of unlike pipelines, with bounds of the simulated step."""

    def __init__(self, space: UnlikeSpace, tried: Tried) -> None:
        super().__init__(space.candidates)
        self.tried = tried
        self._simulated: dict[int, SimulatedMixed] = {}
        """By the identity of a group's space."""
        self._optima: dict[tuple[int, Layout], KindOptimum] = {}
        self._shares: dict[tuple[Layout, int], float] = {}

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        return [
            (BOUNDS[ROOM], lambda _: 0.0),
            (BOUNDS[MEMORY], self.least_s),
            (BOUNDS[BY_OPTIMUM], self.solved_s),
        ]

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, Any]]:
        """Yield every layout that keeps what the user fixed, and count them."""
        for bound_s, batch in super().bundles(refused):
            self.unlike += batch.size
            yield bound_s, batch

    def _credit_s(self, base: Layout, at: int, depth: int) -> float:
        return 0.0

    def _paces(
        self, base: Layout, at: int, depth: int, most: int
    ) -> Sequence[tuple[Floats | float, Floats | float]]:
        counts, timetable = np.arange(1.0, most + 1), schedule_of(base.schedule)
        if depth > 1 and timetable.splits_backward:
            share = min(self._forward_share(base, at), 1 / 3)
            return [(counts, 0.0), (0.0, _forward_fills(depth, counts, share))]
        if not flat(base.schedule, depth):
            return [(counts, 0.0)]
        fill = (counts + depth - 1) / depth
        if not timetable.forwards_first:
            few = counts <= depth
            fill[few] = 1 / (1 - (1 - 1 / counts[few]) ** depth)
        return [(counts, 0.0), (0.0, fill)]

    def _forward_share(self, base: Layout, at: int) -> float:
        """Return the least share of forward in the seconds of a layer, ends of the model aside."""
        key = replace(base, loss=None, schedule=PLAIN), at
        if key not in self._shares:
            tables = self.costs.tables[self.cluster.groups[at].name]
            costs = tables.costs_of(key[0])
            among = self.candidates.recompute
            self._shares[key] = forward_share(costs, among, tables.end_kinds)
        return self._shares[key]

    def _alike(self, kind: KindSpace) -> SimulatedMixed:
        """Return the space of a group's own pipelines by what they simulate."""
        if id(kind) not in self._simulated:
            self._simulated[id(kind)] = SimulatedMixed(kind, Tried(self.tried.goal), 0.0)
        return self._simulated[id(kind)]

    def solved_s(self, layout: Layout) -> float:
        """Return seconds that no plan simulates below, or the limit; plans are tried."""
        assert isinstance(layout, UnlikeLayout)
        self.tried.looked_at[SOLVED] += 1
        kinds, count = self.kinds_of(layout), self.job.global_batch // layout.micro_batch
        self._try_plans(layout, kinds)
        most = [
            int(np.searchsorted(ends_s, self.tried.goal.limit_s, side="left"))
            for _, ends_s in self.bounded_ends_s(layout)
        ]
        solved = 0
        settled: set[int] = set()
        while min(most) and sum(n * m for n, m in zip(layout.numbers, most, strict=True)) >= count:
            rest = [at for at in range(len(most)) if at not in settled]
            if not rest or solved >= MOST_KINDS:
                return 0.0
            at, solved = rest[0], solved + 1
            optimum = self._optimum(kinds[at], layout.of_group(at, most[at]))
            if optimum.least_s < self.tried.goal.limit_s:
                settled.add(at)
            else:
                most[at] -= 1
        return self.tried.goal.limit_s

    def _try_plans(self, layout: UnlikeLayout, kinds: Sequence[KindSpace]) -> None:
        """Simulate the best stages of groups, with shares by bounds, then by what these take."""
        shares, count = self._bounded_shares(layout), self.job.global_batch // layout.micro_batch
        asked: list[tuple[int, ...]] = []
        while shares is not None and len(asked) < ROUNDS:
            tops = tuple(of_group[0].micro_batches for of_group in shares)
            if tops in asked:
                return
            asked.append(tops)
            best = [
                self._optimum(kind, layout.of_group(at, top)).best
                for at, (kind, top) in enumerate(zip(kinds, tops, strict=True))
            ]
            plans = [plan for plan in best if plan is not None]
            if len(plans) < len(best):
                return
            step_s = max(plan.prediction.step_time_s for plan in plans)
            plan = self.plan_of(layout, [of_kind.plan.stages for of_kind in plans], shares, step_s)
            self.tried.offer(self.predict_plan(plan, max(of_kind.objective_s for of_kind in plans)))
            paces = [
                (number, _pace_of(plan, top))
                for number, plan, top in zip(layout.numbers, plans, tops, strict=True)
            ]
            shares = fastest_counts(paces, count)

    def _optimum(self, kind: KindSpace, alone: Layout) -> KindOptimum:
        """Return the least step of a group's pipelines; what the answer takes is enough."""
        key = id(kind), alone
        if key not in self._optima:
            space, answer = self._alike(kind), self.tried.goal.best
            goal = SimulatedStepGoal(answer, self.tried.goal.effort)
            space.tried = Tried(goal)
            least_s = float(space.solved_s(alone))
            best = None if goal.best is answer else goal.best
            self._optima[key] = KindOptimum(least_s, best)
        return self._optima[key]


def _pace_of(plan: Ranked, micro_batches: int) -> Replica:
    """Return the pace of pipelines whose step with some micro-batches is known."""
    slowest_s = max(stage.forward_s + stage.backward_s for stage in plan.prediction.stages)
    fill_s = plan.prediction.step_time_s - (micro_batches - 1) * slowest_s
    return Replica(fill_s=max(0.0, fill_s), steady_s=slowest_s)


def _forward_fills(ranks: int, counts: Floats, share: float) -> Floats:
    """[micro-batches] `forward_fill` of some numbers of them."""
    behind = np.zeros(len(counts))
    for rank in reversed(range(ranks)):
        before = share * behind if rank else 0.0
        behind = behind + np.maximum(0.0, 1.0 - before) / counts
    fills: Floats = 1.0 / behind
    return fills
