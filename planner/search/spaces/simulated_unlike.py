"""Unlike pipelines by what they simulate: bounds of a step, and plans.

With T seconds a group of d_g pipelines does no more than d_g max {m : L_g(m) <= T} micro-batches,
L_g(m) being any bound of the simulated step of its own layouts of m micro-batches (the module
`planner.search.spaces.unlike_pipelines`).  By computation L_g are the paces of
`planner.search.bounds.simulated_step`; then those with what is sent; then the least step of the
group's own pipelines, which is found with its plan (`planner.search.spaces.simulated_mixed`), at
the most micro-batches that are left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    Floats,
    KindSpace,
    UnlikeLayout,
    UnlikeSpace,
)
from meshwright.planner.solver.heterogeneous.micro_batch_shares import (
    MonotonePace,
    trimmed_counts,
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

    @property
    def limit_s(self) -> float:
        """Seconds from which on layouts are of no interest."""
        return self.tried.goal.limit_s

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
        """Return seconds that no plan simulates below, or the limit; plans are tried.

        Groups begin with a micro-batch less than shares by the bounds give them, which is too few
        together, and the one that takes the least with another gets it, until all are done.  None
        of them does more in less seconds than the last one took, whatever the first ones have; one
        that takes longer with those has too many.
        """
        assert isinstance(layout, UnlikeLayout)
        self.tried.looked_at[SOLVED] += 1
        kinds, count = self.kinds_of(layout), self.job.global_batch // layout.micro_batch
        shares = self._bounded_shares(layout)
        if shares is None:
            return self.limit_s
        most = [of_group[0].micro_batches - 1 for of_group in shares]

        def least_s(at: int, micro_batches: int) -> float:
            if micro_batches > -(-count // layout.numbers[at]):
                return math.inf
            return self._optimum(kinds[at], layout.of_group(at, micro_batches)).least_s

        step_s = 0.0
        for _ in range(MOST_KINDS):
            if sum(n * m for n, m in zip(layout.numbers, most, strict=True)) >= count:
                slower = [at for at, m in enumerate(most) if m and least_s(at, m) > step_s]
                if slower:
                    most[slower[0]] -= 1
                    continue
                if min(most):
                    self._try_plan(layout, kinds, most, least_s)
                break
            next_s, at = min((least_s(at, number + 1), at) for at, number in enumerate(most))
            step_s = max(step_s, min(next_s, self.limit_s))
            if step_s >= self.limit_s:
                break
            most[at] += 1
        return step_s

    def _try_plan(
        self,
        layout: UnlikeLayout,
        kinds: Sequence[KindSpace],
        most: Sequence[int],
        least_s: Callable[[int, int], float],
    ) -> None:
        """Simulate the best stages of groups that do this many micro-batches at most."""
        count = self.job.global_batch // layout.micro_batch
        paces = [
            (number, MonotonePace(partial(least_s, at), -(-count // number)))
            for at, number in enumerate(layout.numbers)
        ]
        shares = trimmed_counts(paces, most, count)
        best = [
            self._optimum(kind, layout.of_group(at, of_group[0].micro_batches)).best
            for at, (kind, of_group) in enumerate(zip(kinds, shares, strict=True))
        ]
        plans = [plan for plan in best if plan is not None]
        if len(plans) == len(best):
            step_s = max(plan.prediction.step_time_s for plan in plans)
            plan = self.plan_of(layout, [of_kind.plan.stages for of_kind in plans], shares, step_s)
            self.tried.offer(self.predict_plan(plan, max(of_kind.objective_s for of_kind in plans)))

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


def _forward_fills(ranks: int, counts: Floats, share: float) -> Floats:
    """[micro-batches] `forward_fill` of some numbers of them."""
    behind = np.zeros(len(counts))
    for rank in reversed(range(ranks)):
        before = share * behind if rank else 0.0
        behind = behind + np.maximum(0.0, 1.0 - before) / counts
    fills: Floats = 1.0 / behind
    return fills
