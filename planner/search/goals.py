"""Goals of a queue of layouts: least closed form, its neighbours, least simulated step.

The closed form

    T = steady max_r t_r + sum_r (fill t_r - credit_r) + max_r sync_r + step_s,   mem_r <= capacity

with t_r the seconds of rank r on one micro-batch (planner.search.partition.layout_partition), is
where a search
begins: its exact optimum is cheap to find and close to the fastest plan.  It bounds the simulated
step of layouts without a pipeline alone, where both are the same.  The simulated step is what users
see, and what is proven.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.search.proof_account import NO_FASTER, OUT_OF_MEMORY, UNFINISHED
from meshwright.planner.search.proof_budget import GOAL, Effort, GapProgress
from meshwright.planner.search.queue import Pruned, QueueEntry, SearchGoal, SearchSpace
from meshwright.planner.search.space import complexity, kind
from meshwright.planner.solver.partition_problem import CutOff, Infeasible, Unfinished

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.plan_candidate import Ranked

ALIKE = 2
"""Layouts near the optimum of one schedule and one number of stages a rank."""


class Proven(Protocol):
    """A split of a layout's stages."""

    @property
    def optimal(self) -> bool:
        """True if no other split of its layout takes less time."""


S = TypeVar("S", bound=Proven)


@dataclass(frozen=True, slots=True)
class SplitSolution(Generic[S]):
    """A layout's best split in the closed form; it may be as fast as `lower_bound_s` says."""

    objective_s: float
    lower_bound_s: float
    layout: Layout
    split: S

    @property
    def rank(self) -> tuple[float, tuple[int, ...]]:
        """Faster first; of equally fast ones the simpler."""
        return self.objective_s, complexity(self.layout)


class ClosedFormGoal(SearchGoal):
    """The best split of each of the `top` kinds of layouts, below some seconds."""

    def __init__(self, *, top: int = 1, below_s: float = math.inf) -> None:
        self.solved = 0
        self.found: list[tuple[SearchSpace, SplitSolution[Any]]] = []
        """Solved splits, each with its space."""
        self._top, self._below_s = top, below_s
        self._best: dict[tuple[int, ...], SplitSolution[Any]] = {}
        self._open_s = math.inf
        """Lower bound in seconds of layouts that were not solved to the end."""
        self._last: SplitSolution[Any] | None = None
        """The last of the `top` best, if there are as many."""

    def exceeds(self, bound_s: float) -> bool:
        """Return whether no layout with at least this bound can be among the best."""
        last = self._last
        if bound_s >= self._below_s or bound_s == math.inf:
            return True
        return last is not None and bound_s > last.objective_s * (1 + EQUAL)

    def drops(self, bound_s: float, space: SearchSpace) -> bool:
        """Return whether what has a bound can go, even where plans near the optimum are kept."""
        if space.keeps_ties:
            return bound_s >= self._below_s or bound_s == math.inf
        return self.exceeds(bound_s)

    def accepts(self, entry: QueueEntry) -> bool:
        """Return whether an entry can beat what it has to beat, or tie with it and be simpler."""
        layout = entry.layout
        rival = self._rival(entry.space, layout)
        if rival is None or entry.bound_s < rival.objective_s * (1 - EQUAL):
            return True
        tied = entry.bound_s <= rival.objective_s * (1 + EQUAL)
        return tied and complexity(layout) < complexity(rival.layout)

    def complete(self, entry: QueueEntry) -> Pruned | None:
        """Solve the problem of a layout whose bounds do not decide; it has to beat its rival."""
        space, layout, cutoff_s = entry.space, entry.layout, self._below_s
        rival = self._rival(space, layout)
        if rival is not None:
            ties = space.keeps_ties or complexity(layout) < complexity(rival.layout)
            hair = EQUAL if ties else -EQUAL
            cutoff_s = min(cutoff_s, rival.objective_s * (1 + hair))
        self.solved += 1
        answer = space.solve(layout, cutoff_s)
        if isinstance(answer, Pruned):
            if answer.outcome == UNFINISHED:
                self._open_s = min(self._open_s, max(answer.bound_s or 0.0, entry.bound_s))
            return answer
        if not answer.split.optimal:
            self._open_s = min(self._open_s, max(answer.lower_bound_s, entry.bound_s))
        self.offer(space, answer)
        return None

    def offer(self, space: SearchSpace, solution: SplitSolution[Any]) -> None:
        """Take a split that was solved."""
        self.found.append((space, solution))
        self._enter(solution)

    def _enter(self, new: SplitSolution[Any]) -> None:
        """Let a split stand for its kind of layout if it is the best of it."""
        old = self._best.get(kind(new.layout))
        if new.objective_s < self._below_s and (old is None or wins(new, old)):
            self._best[kind(new.layout)] = new
            ranking = sorted(self._best.values(), key=lambda found: found.rank)
            self._last = ranking[self._top - 1] if len(ranking) >= self._top else None

    def _rival(self, space: SearchSpace, layout: Layout) -> SplitSolution[Any] | None:
        """Return the best that a layout has to beat to be among the `top`, if any."""
        best, last = self._best.get(kind(layout)), self._last
        if best is None or last is None or space.keeps_ties:
            return best or last
        return best if wins(best, last) else last

    def home(self, solution: SplitSolution[Any]) -> SearchSpace:
        """Return the space that a layout was found in."""
        return next(space for space, split in self.found if split is solution)

    def best_of_meshes(self) -> list[tuple[SearchSpace, SplitSolution[Any]]]:
        """Return the best of each kind with its space, fastest first."""
        order = sorted(self._best.values(), key=lambda found: found.rank)
        return [(self.home(solution), solution) for solution in order]

    def ranking(self) -> list[SplitSolution[Any]]:
        """Return the best of each kind, fastest first; of equally fast ones the simplest leads."""
        order = sorted(self._best.values(), key=lambda found: found.rank)
        if order:
            order.remove(first := fastest(order))
            order.insert(0, first)
        return order[: self._top]

    def bound_s(self) -> float:
        """Return what no layout takes less than in the closed form."""
        return min([self._open_s, *(solution.objective_s for solution in self.ranking()[:1])])


class NearOptimumGoal(SearchGoal):
    """Splits within a limit of the closed form, of up to `most` layouts of each space.

    Of a schedule with one number of stages a rank there are `ALIKE`, those with the least bounds:
    where the closed form is too low for some layouts of it, it is so for the others.
    """

    def __init__(self, closed_form: ClosedFormGoal, limit_s: float, most: int) -> None:
        self._limit_s, self._most = limit_s, most
        self.found = [entry for entry in closed_form.found if entry[1].objective_s <= limit_s]
        self._alike = Counter((space, timetable(solution.layout)) for space, solution in self.found)
        self._tried: Counter[SearchSpace] = Counter()

    def exceeds(self, bound_s: float) -> bool:
        """Return whether nothing with at least this bound is of interest."""
        return bound_s > self._limit_s

    def accepts(self, entry: QueueEntry) -> bool:
        """Return whether another layout of the entry's space may be solved."""
        return self._tried[entry.space] < self._most

    def complete(self, entry: QueueEntry) -> Pruned | None:
        """Solve the problem of a layout, unless there are enough like it."""
        space, layout = entry.space, entry.layout
        key = space, timetable(layout)
        if self._alike[key] >= ALIKE or not self.accepts(entry):
            return None
        self._alike[key] += 1
        self._tried[space] += 1
        answer = space.solve(layout, self._limit_s)
        if isinstance(answer, SplitSolution) and answer.objective_s <= self._limit_s:
            self.found.append((space, answer))
        return None


class SimulatedStepGoal(SearchGoal):
    """The fastest plan in the simulator, and how close a bound of all comes to it."""

    def __init__(
        self, best: Ranked, effort: Effort, gap_progress: GapProgress | None = None
    ) -> None:
        self.best = best
        self.effort: Effort
        """Effort that may be taken now."""
        self.found: list[tuple[Any, Ranked]] = []
        """Plans that fit, each with the space that simulated it."""
        self.blocked = False
        """True if the lowest entry may not be bounded further."""
        self.closed = False
        """True if the gap is as small as it is asked to be."""
        self._gap_progress = gap_progress
        self.set_effort(effort)

    def set_effort(self, effort: Effort) -> None:
        """Search with an effort from now on, of which what was spent is a part."""
        self.effort = effort
        self._efforts = effort.further or effort, effort

    @property
    def step_s(self) -> float:
        """The least step that is known."""
        return self.best.prediction.step_time_s

    @property
    def limit_s(self) -> float:
        """Seconds of a step from which on a plan does not beat the best one."""
        return self.step_s * (1 - EQUAL)

    def exceeds(self, bound_s: float) -> bool:
        """Return whether nothing with at least this bound is of interest."""
        return bound_s >= self.limit_s

    def accepts(self, entry: QueueEntry) -> bool:
        """Return whether an entry may be faster than the best."""
        return entry.bound_s < self.limit_s

    def lowest(self, entry: QueueEntry) -> None:
        """Hear which entry has the lowest bound: it decides how much more may be done."""
        gap = max(0.0, 1 - entry.bound_s / self.step_s)
        self.blocked, self.closed = False, gap <= self.effort.gap
        for effort in self._efforts if gap > GOAL else self._efforts[1:]:
            self.effort = effort
            self.blocked = not entry.space.may_refine(entry.level)
            if not self.blocked:
                break
        if self._gap_progress is not None:
            self._gap_progress(gap)

    def offer(self, space: Any, plan: Ranked) -> float:
        """Take a plan that was simulated; return its step, inf if it does not fit."""
        if not plan.prediction.fits:
            return math.inf
        self.found.append((space, plan))
        if plan.prediction.step_time_s < self.limit_s:
            self.best = plan
        return plan.prediction.step_time_s


def timetable(layout: Layout) -> tuple[str, int, bool]:
    """Return what layouts have in common whose closed form is alike far off."""
    return layout.schedule, layout.virtual_stages, layout.pipeline > 1


def action_key(layout: Layout) -> tuple[object, ...]:
    """Return what layouts whose ranks do the same actions have in common."""
    return timetable(layout), layout.micro_batches, kind(layout)


def split_or_pruned(
    answer: Any, layout: Layout, cutoff_s: float, step_s: float, known_s: float = 0.0
) -> SplitSolution[Any] | Pruned:
    """Return what a solver's answer to a layout's problem below a cutoff says of the layout.

    `step_s` of its seconds are not in the problem; `known_s` is a bound that is known before.
    """
    if isinstance(answer, Infeasible):
        return Pruned(OUT_OF_MEMORY, reason=answer.reason)
    if isinstance(answer, CutOff | Unfinished):
        beaten = answer.lower_bound_s >= cutoff_s - step_s or known_s >= cutoff_s
        beaten = beaten and isinstance(answer, CutOff)
        bound_s = max(known_s, answer.lower_bound_s + step_s)
        return Pruned(NO_FASTER if beaten else UNFINISHED, bound_s=bound_s)
    split = getattr(answer, "split", answer)
    return SplitSolution(split.objective_s + step_s, split.lower_bound_s + step_s, layout, answer)


def fastest(solutions: Sequence[SplitSolution[Any]]) -> SplitSolution[Any]:
    """Return the simplest of those that are as fast as the fastest."""
    least_s = min(solution.objective_s for solution in solutions) * (1 + EQUAL)
    ties = [solution for solution in solutions if solution.objective_s <= least_s]
    return min(ties, key=lambda one: complexity(one.layout))


def wins(new: SplitSolution[Any], old: SplitSolution[Any]) -> bool:
    """Faster wins; of equally fast ones the simpler, whatever the order they came in."""
    if abs(new.objective_s - old.objective_s) <= EQUAL * old.objective_s:
        return complexity(new.layout) < complexity(old.layout)
    return new.objective_s < old.objective_s
