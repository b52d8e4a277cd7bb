"""Chains of layers on devices that are alike, by what they simulate.

Every configuration has a lower bound of its simulated step
(`planner.search.bounds.simulated_step`): families by their computation, parts of one ZeRO level and
schedule within memory, layouts with what sharding takes and what each rank has, then all cuts by
paths that stay with a rank (`planner.search.bounds.simulated_cuts`), the exact optimum of the
bound, and the program of the layout (`planner.search.bounds.simulated_optimum`).  Where the plan of
such an optimum, or that of the closed form, simulates faster than the answer, it takes the answer's
place.

How far that is followed is counted, for all candidates of a request together.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.search.bounds.dominance import Covering
from meshwright.planner.search.bounds.simulated_optimum import (
    MOST_COLUMNS,
    ColumnProgram,
    PathWeights,
    is_long,
    of_chain,
)
from meshwright.planner.search.bounds.simulated_step import SimulatedCandidates
from meshwright.planner.search.goals import SimulatedStepGoal, action_key, timetable
from meshwright.planner.search.plan_candidate import Ranked, candidate_of
from meshwright.planner.search.proof_account import (
    BOUNDS,
    CUTS,
    DOMINATED,
    MEMORY,
    PROGRAM,
    SHARED_ROOM,
    SOLVED,
)
from meshwright.planner.search.proof_budget import NEAR, Effort
from meshwright.planner.search.queue import Bound, Item, Next, Pruned, QueueEntry
from meshwright.planner.search.space import LayoutFamily, canonical, kind, timetables
from meshwright.planner.search.spaces.chain import LAYOUT, ChainSpace, Families
from meshwright.planner.search.spaces.forwards_ahead import may_run_ahead
from meshwright.planner.solver.bounds import path_bounds as bounds
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Solution,
    evaluate_split,
)

if TYPE_CHECKING:
    from meshwright.planner.search.bounds.layout_groups import StatedProblem

WITHIN_MEMORY, CUT, OPTIMUM, SETTLED = range(LAYOUT + 1, LAYOUT + 5)
"""Levels of a layout, by what is known: all of its memory; the least of all cuts by paths that stay
with a rank; the exact optimum of the bound; that of the simulated step."""
LEAST_RAISE = 1e-4
"""Relative raise of a bound by programs of others that is worth another look."""
NAMES = (
    "configuration groups within memory",
    "parts with sharing",
    "parts within memory and with sharing",
    "layouts within memory",
    "layouts by their cuts",
    "layouts solved",
    "layouts by their programs",
)
"""[level] What an entry of it gets next."""


@dataclass(slots=True)
class Spent:
    """Numbers of entries of each level that got their next bound, and of the layouts' stages."""

    entries: Counter[int] = field(default_factory=Counter)
    stages: Counter[int] = field(default_factory=Counter)

    def may_refine(self, level: int, effort: Effort) -> bool:
        """Return whether another entry of a level may get a bound."""
        if level < LAYOUT:
            return sum(self.entries[level] for level in range(LAYOUT)) < effort.families
        if level in (LAYOUT, WITHIN_MEMORY):
            most = effort.memory_stages if level == LAYOUT else effort.cut_stages
            return self.stages[level] < most
        return self.entries[level] < {CUT: effort.solved, OPTIMUM: effort.programs}.get(level, 0)

    def looked_at(self) -> dict[str, int]:
        """Return how many entries got which bound."""
        return {name: self.entries[level] for level, name in enumerate(NAMES)}


@dataclass(slots=True)
class _AnyLoss:
    """Layouts that differ in how they compute the loss alone, with the bounds that hold for all."""

    stated: StatedProblem
    memory_s: float | None = None
    cut_s: float | None = None


class SimulatedChain(Families):
    """The families of a chain with bounds of the simulated step."""

    def __init__(
        self, space: ChainSpace, goal: SimulatedStepGoal, spent: Spent, closed_form_s: float
    ) -> None:
        """`space` has the same layouts by the closed form, where none takes `closed_form_s`."""
        self.candidates: SimulatedCandidates
        super().__init__(SimulatedCandidates.from_candidates(space.candidates))
        self.closed_form, self.goal, self.spent = space, goal, spent
        self._unpiped_s = closed_form_s * (1 - ROUNDING)
        self._any_loss: dict[Layout, _AnyLoss] = {}
        """By a layout of those that differ in how they compute the loss alone."""
        self._means: dict[tuple[object, ...], list[PathWeights]] = {}
        """Means of paths that bounded a layout of a timetable."""
        self._solved: dict[tuple[object, ...], list[tuple[ColumnProgram, float]]] = {}
        """Programs of layouts of a timetable, with what none of their plans takes less than."""
        self._beside: dict[Layout, int] = {}
        """How many of them a layout was bounded by."""
        self._bounded = Covering()
        """Layouts that were bounded within memory."""

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        named: list[tuple[int, Bound]] = [
            (SHARED_ROOM, lambda _: 0.0),
            (MEMORY, self._memory_s),
            (CUTS, self._cut_s),
            (SOLVED, self._optimum_s),
            (PROGRAM, self._program_s),
        ]
        return [(BOUNDS[at], bound) for at, bound in named]

    def may_refine(self, level: int) -> bool:
        """Return whether an entry of a level may get another bound.

        Where the lowest of all may not, the proof ends there, and others are only looked at for
        faster plans.
        """
        goal = self.goal
        if level == SETTLED or goal.closed:
            return False
        if goal.blocked and level != OPTIMUM and not self.spent.may_refine(CUT, goal.effort):
            return False
        return self.spent.may_refine(level, goal.effort)

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield the families with their seconds by computation alone."""
        for bound_s, family in super().bundles(refused):
            yield self._raise_bound(bound_s, family), family

    def advance(self, level: int, some: Sequence[QueueEntry]) -> list[Next | Pruned | None]:
        """Return what takes the place of entries."""
        self.spent.entries[level] += len(some)
        if level >= LAYOUT:
            self.spent.stages[level] += some[0].layout.stages
        self.candidates.limit_s = self.goal.limit_s
        if level in (CUT, OPTIMUM):
            [entry] = some
            beside_s = self._beside_s(entry.layout)
            if beside_s > entry.bound_s * (1 + LEAST_RAISE):
                self._unspend(level, entry.layout)
                return [(beside_s, level, entry.item)]
        nodes: list[Next | Pruned | None] = []
        for node in super().advance(level, some):
            if level < LAYOUT and isinstance(node, tuple):
                nodes.append((self._raise_bound(node[0], node[2]), node[1], node[2]))
            else:
                nodes.append(node)
        return nodes

    def _raise_bound(self, bound_s: float, item: Item) -> float:
        """Return a bound; without a pipeline the closed form is the simulated step."""
        pipeline = item.pipeline if isinstance(item, Layout) else item.degrees.pipeline
        return max(bound_s, self._unpiped_s) if pipeline == 1 else bound_s

    # Bounds of a layout.

    def _memory_s(self, layout: Layout) -> float | Pruned:
        """Return the least of a layout with what each rank has."""
        costs_of = self.closed_form.costs_of
        if self._bounded.cover(layout, costs_of):
            self._unspend(LAYOUT, layout)
            return Pruned(DOMINATED)
        self._bounded.add(layout, costs_of(layout))
        least_s, limit_s = self.candidates.communication_s(layout), self.goal.limit_s
        if least_s < limit_s:
            together = self._together(layout)
            if together.memory_s is None:
                together.memory_s = self.candidates.within_memory_s(
                    layout, together.stated, limit_s
                )
            else:
                self._unspend(LAYOUT, layout)
            least_s = together.memory_s
        return least_s

    def _together(self, layout: Layout) -> _AnyLoss:
        """Return what is known of the layouts that differ in how they compute the loss alone."""
        key = replace(layout, loss=None)
        if key not in self._any_loss:
            stated = self.closed_form.candidates.stated_of_any_loss(layout)
            self._any_loss[key] = _AnyLoss(stated)
        return self._any_loss[key]

    def _cut_s(self, layout: Layout) -> float:
        """Return the least of a layout's cuts by paths; 0 if that is not known."""
        together = self._together(layout)
        if together.cut_s is None:
            together.cut_s = self._cuts_s(layout, together.stated)
        else:
            self._unspend(WITHIN_MEMORY, layout)
        return together.cut_s

    def _cuts_s(self, layout: Layout, stated: StatedProblem) -> float:
        """Return the least of all cuts of a problem, with the least that options have first.

        Whole ranks with that least make a small program, whose rows are all paths.
        """
        limit_s, effort, found_s = self.goal.limit_s, self.goal.effort, 0.0
        for fastest_only in (True, False):
            choices = self._choices(layout, stated, fastest_only=fastest_only)
            if choices is None:
                break
            found_s = max(found_s, choices.cut_s(limit_s) if choices.size else limit_s)
            if found_s < limit_s and effort.programs:
                found_s = max(found_s, self._whole_s(layout, choices))
            if found_s >= limit_s:
                return limit_s
        return found_s

    def _whole_s(
        self,
        layout: Layout,
        choices: ColumnProgram,
        tried: Callable[[Solution], float] | None = None,
    ) -> float:
        """Return seconds that no way of whole columns simulates below."""
        effort = self.goal.effort
        return choices.whole_s(
            self.goal.limit_s,
            self._means.setdefault(action_key(layout), []),
            tried,
            actions=effort.actions,
            most_columns=effort.columns,
            iterations=effort.iterations,
        )

    def _optimum_s(self, layout: Layout) -> float:
        """Return the least of a layout by its bounds, solved exactly; plans may be found by it."""
        step_s = self.closed_form.candidates.costs(layout).step_s
        most_s = -math.inf
        stated = self.closed_form.candidates.problem_of(layout)
        for instance, waited_s in self.candidates.instances(layout, stated):
            # Sums of bytes are no more than what ranks hold, and quicker.
            relaxed = replace(instance, used_bytes=None)
            below_s = self.goal.limit_s - step_s - waited_s
            solution = self.closed_form.solver(relaxed, below_s)
            if isinstance(solution, Infeasible):
                return math.inf
            if isinstance(solution, Solution | CutOff):
                most_s = max(most_s, solution.lower_bound_s + step_s + waited_s)
            if isinstance(solution, Solution) and self._try(layout, solution) == math.inf:
                fitting = self.closed_form.solver(instance, below_s)
                if isinstance(fitting, Solution):
                    self._try(layout, fitting)
        if most_s < self.goal.limit_s:
            self.try_likeliest(layout)
        return most_s

    def _program_s(self, layout: Layout) -> float:
        """Return the least of a layout by its program; 0 if that is not known."""
        effort = self.goal.effort
        choices = None
        if not is_long(layout, effort.actions):
            stated = self.closed_form.candidates.problem_of(layout)
            choices = self._choices(layout, stated, most_columns=effort.columns)
        if choices is None:
            self._unspend(OPTIMUM, layout)
            return 0.0
        tried = partial(self._try, layout)
        low_s = self._whole_s(layout, choices, tried) if choices.size else self.goal.limit_s
        if not choices.is_solved and not self.goal.exceeds(low_s):
            least_s = choices.optimum(
                self.goal.limit_s,
                tried,
                nodes=effort.nodes,
                iterations=effort.iterations,
            )
            low_s = max(low_s, least_s)
        self._solved.setdefault(action_key(layout), []).append((choices, low_s))
        return low_s

    def _beside_s(self, layout: Layout) -> float:
        """Return the least of a layout by programs of others that were solved since the last time.

        Layouts that differ in sharding, order or loss have about the same program.
        """
        solved = self._solved.get(action_key(layout), [])
        new = solved[self._beside.get(layout, 0) :]
        self._beside[layout] = len(solved)
        choices = None
        if new:
            choices = self._choices(layout, self.closed_form.candidates.problem_of(layout))
        if choices is None:
            return 0.0
        return max((choices.beside_s(program, least_s) for program, least_s in new), default=0.0)

    def _choices(
        self,
        layout: Layout,
        stated: StatedProblem,
        *,
        fastest_only: bool = False,
        most_columns: int = MOST_COLUMNS,
    ) -> ColumnProgram | None:
        """Return what the ranks of a layout may hold, if that is known."""
        return of_chain(
            self.closed_form.candidates,
            layout,
            stated,
            self.goal.limit_s,
            ways=self.goal.effort.ways,
            fastest_only=fastest_only,
            most_columns=min(most_columns, MOST_COLUMNS),
        )

    def _unspend(self, level: int, layout: Layout) -> None:
        self.spent.entries[level] -= 1
        self.spent.stages[level] -= layout.stages

    # Plans.

    def _try(self, layout: Layout, solution: Solution) -> float:
        """Simulate the plan of a solution, return its step; it may be the best that is known."""
        candidates = self.closed_form.candidates
        closed = evaluate_split(candidates.instance(layout), solution.cuts, solution.options)
        return self.goal.offer(self, candidate_of(candidates, layout, closed))

    def try_likeliest(self, layout: Layout) -> float:
        """Simulate the plan of a layout that is likely to be the fastest, if it may be."""
        instance, more_s = self.candidates.likely(layout)
        solution = self.closed_form.solver(instance, self.goal.limit_s * (1 + NEAR) - more_s)
        if not isinstance(solution, Solution):
            return math.inf
        return self._try(layout, solution)

    def estimate_s(self, layout: Layout) -> float:
        """Return about what the plan of a layout simulates that is likely to be the fastest."""
        instance, more_s = self.candidates.likely(layout)
        return bounds.counted_s(instance) + more_s

    def opened_layouts(self) -> Iterator[tuple[float, SimulatedChain, Layout]]:
        """Yield the layouts of pipelines that the closed form has bounded below the fastest."""
        for part, each_s in self.closed_form.candidates.opened.items():
            if part.degrees.pipeline > 1:
                for sharing, bound_s in zip(part.sharings, each_s, strict=True):
                    if bound_s < self.goal.limit_s:
                        yield bound_s, self, part.layout(sharing, part.timetables[0])

    def other_schedules(self, best: Layout) -> list[tuple[float, SimulatedChain, Layout]]:
        """Return a layout under its other schedules."""
        candidates = self.closed_form.candidates
        solutions = []
        for name, virtual in timetables(candidates.request, best, best.micro_batches):
            layout = replace(best, schedule=name, virtual_stages=virtual)
            if not candidates.pins.order:
                layout = canonical(candidates.cluster, layout)
            ahead = layout.executed_schedule.ahead
            if layout != best and (not ahead or may_run_ahead(candidates.request, layout)):
                solutions.append((self.candidates.communication_s(layout), self, layout))
        return solutions


def look_near(spaces: Sequence[SimulatedChain], home: SimulatedChain, best: Ranked) -> None:
    """Solve and simulate the layouts that are likely to be the fastest.

    They come from parts of the space that the closed form has bounded, transfers left out, below
    its own optimum `best`, and from its layout's other schedules.  Of those that differ in sharing
    and order alone the one with the least bound stands for all.
    """
    goal = home.goal
    bounded: list[tuple[float, SimulatedChain, Layout]] = []
    for space in spaces:
        bounded += space.opened_layouts()
        bounded += space.other_schedules(best.plan.layout) if space is home else []
    _look_among(goal, bounded, goal.effort)


def look_among(goal: SimulatedStepGoal, waiting: Iterable[QueueEntry], effort: Effort) -> None:
    """Solve and simulate the layouts that wait and are likely to be faster than the best."""
    layouts = [
        (entry.bound_s, entry.space, entry.item)
        for entry in waiting
        if isinstance(entry.item, Layout) and isinstance(entry.space, SimulatedChain)
    ]
    _look_among(goal, layouts, effort)


def _look_among(
    goal: SimulatedStepGoal,
    bounded: Iterable[tuple[float, SimulatedChain, Layout]],
    effort: Effort,
) -> None:
    """Do so for some layouts with their bounds."""
    alike: dict[tuple[object, ...], tuple[float, SimulatedChain, Layout]] = {}
    for bound_s, space, layout in bounded:
        if layout.pipeline == 1 or bound_s >= goal.limit_s:
            continue
        sizes = layout.micro_batch, layout.loss, layout.zero > 2
        key = space, timetable(layout), kind(layout), *sizes
        worse = key in alike and alike[key][0] <= bound_s
        if worse:
            continue
        if space.candidates.pins.allow(layout) and space.refusal(layout) is None:
            alike[key] = bound_s, space, layout
    likely = heapq.nsmallest(effort.likely, alike.values(), key=itemgetter(0))
    estimates = [(space.estimate_s(layout), space, layout) for _, space, layout in likely]
    _try_in_turn(goal, estimates, effort.tried)


def _try_in_turn(
    goal: SimulatedStepGoal, estimates: list[tuple[float, SimulatedChain, Layout]], most: int
) -> None:
    """Simulate layouts by their estimates, each as far off as the last one of its schedule."""
    off: dict[str, float] = {}

    def expected_s(entry: tuple[float, SimulatedChain, Layout]) -> float:
        return entry[0] * off.get(entry[2].schedule, 1 - NEAR / 2)

    for _ in range(min(most, len(estimates))):
        first = min(estimates, key=expected_s)
        if expected_s(first) >= goal.limit_s:
            return
        estimates.remove(first)
        estimate_s, space, layout = first
        step_s = space.try_likeliest(layout)
        if step_s < math.inf:
            off[layout.schedule] = step_s / estimate_s
