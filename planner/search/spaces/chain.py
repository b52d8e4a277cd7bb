"""Chains of layers on devices that are alike: families of layouts, bounded many at once.

A family of several savings makes place for one of each, then for its part of each ZeRO level and
timetable, a part for one of each way to compute the loss, and that for its layouts;
planner.search.candidates has the bounds of each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from planner.costs.layout_costs import LayoutCosts
from planner.documents.plan import Layout
from planner.search.answer import TIES_LIMIT_S
from planner.search.candidates import Candidates
from planner.search.certificate import (
    BOUNDS,
    COMMUNICATION,
    COMPUTATION,
    DOMINATED,
    MEMORY,
    OUT_OF_MEMORY,
    ROOM,
    SHARED,
    UNKEPT,
)
from planner.search.layout_queue import Ahead, Bound, Found, Lost, Opened, judged
from planner.search.ranked import Ranked, ranked
from planner.search.space import Family
from planner.solver.frontier import FrontierStore
from planner.solver.instance import Fathomed, Infeasible, Instance, Solution, Unfinished
from planner.solver.memory_reach import why_infeasible
from planner.solver.solve import solve_chain

_FAMILIES, _PARTS = 96, 12
"""Families that are bounded at once, and parts of families whose layouts are."""

TRIED_FOR_S = 5.0
"""Seconds of the integer program where it is only asked whether a layout fits."""

Outcome = Solution | Infeasible | Fathomed | Unfinished
Solve = Callable[[Instance, float], Outcome]
B = TypeVar("B")


class ChainSpace:
    """The families of some candidates, and the partition problems of their layouts."""

    keeps_ties = False  # a proof in simulated time finds the finalists

    def __init__(self, candidates: Candidates, *, by_program: bool = False) -> None:
        """The integer program decides where it is asked to, or else the exact solver."""
        self.candidates = candidates
        self.refusal = candidates.refusal
        self.repeats = candidates.repeats
        # A method here would be a cycle, which keeps all candidates until the collector comes.
        self.solver: Solve = _by_program if by_program else partial(_exactly, candidates.frontiers)

    def costs_of(self, layout: Layout) -> tuple[LayoutCosts]:
        """Return the costs of a layout."""
        return (self.candidates.costs(layout),)

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, Family]]:
        """Yield the families with their seconds by computation alone."""
        refused.update(self.candidates.refused)
        bounds_s = self.candidates.computation_s().tolist()
        yield from zip(bounds_s, self.candidates.families, strict=True)

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds; those of groups are known when it comes up."""
        each: dict[int, Bound] = {
            COMMUNICATION: self.candidates.communication_s,
            MEMORY: self._memory_s,
        }
        return [(name, each.get(at, lambda _: 0.0)) for at, name in enumerate(BOUNDS)]

    def _memory_s(self, layout: Layout) -> float | Lost:
        if self.candidates.dominator(layout) is not None:
            return Lost(DOMINATED)
        return self.candidates.memory_s(layout)

    def opened(self, group: Family, known: int, ahead: Ahead) -> Opened:
        """Yield the parts of a family, or the layouts of a part.

        Of what comes next, as much is bounded with it as is quickly bounded together.
        """
        own = self.candidates
        if known == COMPUTATION and len(group.savings) > 1:
            for part_s, part in zip(own.savings_s(group), group.by_saving(), strict=True):
                yield part_s, COMPUTATION, part
        elif known == COMPUTATION:
            coming = partial(ahead, COMPUTATION, _FAMILIES)
            levels = _together(own.looked_at, group, coming, own.rooms_s)
            for part, room_s in own.parts(group, levels):
                yield room_s, ROOM, part
        elif known == ROOM:
            for part in group.by_loss():
                yield float(own.shared_s(part).min()), SHARED, part
        else:
            coming = partial(ahead, SHARED, _PARTS)
            for layout, better_s in _together(own.opened, group, coming, own.shared_rooms_s):
                yield better_s, SHARED, layout

    def solve(self, layout: Layout, cutoff_s: float) -> Found[Solution] | Lost:
        """Return the best split of a layout."""
        step_s = self.candidates.costs(layout).step_s
        found = self.solver(self.candidates.instance(layout), cutoff_s - step_s)
        if isinstance(found, Infeasible):
            return Lost(UNKEPT if self.candidates.pins.require else OUT_OF_MEMORY)
        return judged(found, layout, cutoff_s, step_s)

    def fits(self, layout: Layout) -> bool:
        """Whether a layout fits its devices, and what it puts on hosts fits them."""
        instance = self.candidates.instance(layout)
        if why_infeasible(instance):
            return False
        return isinstance(solve_chain(instance, time_limit_s=TRIED_FOR_S), Solution)

    def ranked(self, found: Found[Solution]) -> Ranked:
        """Return the plan of a split and its prediction."""
        return ranked(self.candidates, found.layout, found.split)


def _together(
    known: dict[int, tuple[Family, B]],
    group: Family,
    coming: Callable[[], list[Family]],
    bounds_of: Callable[[list[Family]], list[B]],
) -> B:
    """Return the bounds of a group; unless they are `known` those of `coming` are worked out too.

    What comes is asked for once, since it is taken then.
    """
    if id(group) not in known:
        some = [group]
        for one in coming():
            if one is not group and id(one) not in known and len(one.savings) == 1:
                some.append(one)
        for one, bounds in zip(some, bounds_of(some), strict=True):
            known[id(one)] = one, bounds
    return known[id(group)][1]


def _exactly(frontiers: FrontierStore, instance: Instance, cutoff_s: float) -> Outcome:
    return solve_chain(instance, cutoff_s=cutoff_s, frontiers=frontiers, time_limit_s=TIES_LIMIT_S)


def _by_program(instance: Instance, _: float) -> Any:
    from planner.solver import ilp  # noqa: PLC0415 - loads HiGHS

    return ilp.solve(instance)
