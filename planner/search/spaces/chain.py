"""Chains of layers on devices that are alike: families of layouts, bounded many at once.

A family of several savings makes place for one of each, then for its part of each ZeRO level and
timetable, a part for one of each way to compute the loss, and that for its layouts;
meshwright.planner.search.bounds.layout_bounds has the bounds of each step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.planner.search.answer import TIES_NODES
from meshwright.planner.search.goals import SplitSolution, split_or_pruned
from meshwright.planner.search.plan_candidate import Ranked, candidate_of
from meshwright.planner.search.proof_account import (
    BOUNDS,
    COMMUNICATION,
    DOMINATED,
    MEMORY,
    NO_FASTER,
    OUT_OF_MEMORY,
    SHARED_ROOM,
    UNKEPT,
)
from meshwright.planner.search.queue import Bound, Next, Pruned, QueueEntry, SearchSpace
from meshwright.planner.solver.bounds.memory_feasibility import why_infeasible
from meshwright.planner.solver.chain import solve_chain
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Solution,
    Unfinished,
)

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.bounds.layout_bounds import Candidates
    from meshwright.planner.search.space import LayoutFamily
    from meshwright.planner.solver.frontier import FrontierStore

FAMILY, PART, SHARED, LAYOUT = range(4)
"""Levels of an entry, by what is known: computation; within memory; with sharing; as a layout."""
BATCH = {FAMILY: 96, PART: 24, SHARED: 12}
"""Entries that are bounded together."""

TRIED_NODES = 500
"""Most nodes of the integer program's tree where it is only asked whether a layout fits."""

Outcome = Solution | Infeasible | CutOff | Unfinished
Solve = Callable[[Instance, float], Outcome]
B = TypeVar("B")


class Families(SearchSpace):
    """The families of some candidates, whose bounds are those of a step as they measure it."""

    groups = LAYOUT

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        return self.candidates.refusal(layout)

    def repeats(self, layout: Layout) -> bool:
        """Return whether another layout of the space does the same."""
        return self.candidates.repeats(layout)

    def batch(self, level: int) -> int:
        """Return how many entries of a level are bounded together."""
        return BATCH.get(level, 1)

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield the families with their seconds by computation alone."""
        refused.update(self.candidates.refused)
        bounds_s = self.candidates.computation_s().tolist()
        yield from zip(bounds_s, self.candidates.families, strict=True)

    @property
    def levels(self) -> Sequence[str]:
        """Names of the bounds that exclude entries at each level."""
        return (*BOUNDS[:LAYOUT], *(name for name, _ in self.bounds))

    def expand(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next]:
        """Yield the parts of families, or the layouts of parts."""
        if level == FAMILY:
            yield from self._parts_of(some)
        elif level == PART:
            of_loss = [(entry.bound_s, part) for entry in some for part in entry.item.by_loss()]
            shared_s = self.candidates.shared_s([part for _, part in of_loss])
            for (bound_s, part), each_s in zip(of_loss, shared_s, strict=True):
                yield max(bound_s, float(each_s.min())), SHARED, part
        else:
            parts = [entry.item for entry in some]
            bounds, bounds_of = self.candidates.opened, self.candidates.shared_rooms_s
            for entry, rooms_s in zip(some, _together(bounds, parts, bounds_of), strict=True):
                for sharing, least_s in zip(entry.item.sharings, rooms_s, strict=True):
                    yield max(entry.bound_s, least_s), LAYOUT, entry.item.part(sharings=(sharing,))

    def _parts_of(self, some: Sequence[QueueEntry]) -> Iterable[Next]:
        """Yield the parts of families: savings first, then levels and timetables."""
        candidates = self.candidates
        single = []
        for entry in some:
            family = entry.item
            if len(family.savings) == 1:
                single.append(entry)
                continue
            for saved_s, part in zip(candidates.savings_s(family), family.by_saving(), strict=True):
                yield max(entry.bound_s, saved_s), FAMILY, part
        families = [entry.item for entry in single]
        bounded = _together(candidates.looked_at, families, candidates.rooms_s)
        for entry, levels in zip(single, bounded, strict=True):
            for part, room_s in candidates.parts(entry.item, levels):
                yield max(entry.bound_s, room_s), PART, part


class ChainSpace(Families):
    """The same by the closed form, and the partition problems of layouts."""

    keeps_ties = False  # the proof in simulated time finds what is as fast

    def __init__(self, candidates: Candidates, *, by_program: bool = False) -> None:
        """The integer program decides where it is asked to, or else the exact solver."""
        super().__init__(candidates)
        # A method here would be a cycle, which keeps all candidates until the collector comes.
        self.solver: Solve = _by_program if by_program else partial(_exactly, candidates.frontiers)
        self._is_exact = not by_program
        self._of_any_loss_s: dict[Layout, float] = {}
        """Least seconds of layouts that differ in how they compute the loss alone, inf where none
        fits, by one of them."""

    def costs_of(self, layout: Layout) -> tuple[LayoutCosts]:
        """Return the costs of a layout."""
        return (self.candidates.costs(layout),)

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [
            (BOUNDS[SHARED_ROOM], lambda _: 0.0),
            (BOUNDS[COMMUNICATION], self.candidates.communication_s),
            (BOUNDS[MEMORY], self._memory_s),
        ]

    def _memory_s(self, layout: Layout) -> float | Pruned:
        if self.candidates.dominator(layout) is not None:
            return Pruned(DOMINATED)
        return self.candidates.memory_s(layout)

    def solve(self, layout: Layout, cutoff_s: float) -> SplitSolution[Solution] | Pruned:
        """Return the best split of a layout."""
        least_s = self._least_of_any_loss_s(layout, cutoff_s)
        if cutoff_s <= least_s < math.inf:
            return Pruned(NO_FASTER, bound_s=least_s)
        step_s = self.candidates.costs(layout).step_s
        solution: Outcome = Infeasible("none of any loss fits")
        if least_s < math.inf:
            solution = self.solver(self.candidates.instance(layout), cutoff_s - step_s)
        if isinstance(solution, Infeasible):
            return Pruned(UNKEPT if self.candidates.pins.require else OUT_OF_MEMORY)
        return split_or_pruned(solution, layout, cutoff_s, step_s)

    def _least_of_any_loss_s(self, layout: Layout, cutoff_s: float) -> float:
        """Return what no layout takes less than that differs in how it computes the loss alone."""
        if cutoff_s == math.inf or not self._is_exact or not self.candidates.has_losses(layout):
            return 0.0
        key = replace(layout, loss=None)
        if key not in self._of_any_loss_s:
            costs, instance = self.candidates.stated_of_any_loss(layout)
            solution, least_s = self.solver(instance, cutoff_s - costs.step_s), 0.0
            if isinstance(solution, Infeasible):
                least_s = math.inf
            elif isinstance(solution, Solution | CutOff):
                least_s = solution.lower_bound_s + costs.step_s
            self._of_any_loss_s[key] = least_s
        return self._of_any_loss_s[key]

    def fits(self, layout: Layout) -> bool:
        """Return whether a layout fits its devices, and what it puts on hosts fits the hosts."""
        instance = self.candidates.instance(layout)
        if why_infeasible(instance):
            return False
        return isinstance(solve_chain(instance, most_nodes=TRIED_NODES), Solution)

    def candidate_of(self, solution: SplitSolution[Solution]) -> Ranked:
        """Return the plan of a split and its prediction."""
        return candidate_of(self.candidates, solution.layout, solution.split)


def _together(
    bounds: dict[LayoutFamily, B],
    groups: list[LayoutFamily],
    bounds_of: Callable[[list[LayoutFamily]], list[B]],
) -> list[B]:
    """Return the bounds of groups; those without one in `bounds` are worked out at once."""
    new = [group for group in groups if group not in bounds]
    if new:
        bounds |= zip(new, bounds_of(new), strict=True)
    return [bounds[group] for group in groups]


def _exactly(frontiers: FrontierStore, instance: Instance, cutoff_s: float) -> Outcome:
    return solve_chain(instance, cutoff_s=cutoff_s, frontiers=frontiers, most_nodes=TIES_NODES)


def _by_program(instance: Instance, _: float) -> Any:
    from meshwright.planner.solver import ilp  # noqa: PLC0415 - loads HiGHS

    return ilp.solve(instance)
