"""Chains of layers on devices that are alike: families of layouts, bounded many at once.

A family of several savings makes place for one of each, then for its part of each ZeRO level and
timetable, a part for one of each way to compute the loss, and that for its layouts;
planner.search.candidates has the bounds of each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from planner.costs.layout_costs import LayoutCosts
from planner.plan import Layout
from planner.search.answer import TIES_LIMIT_S
from planner.search.candidates import Bounded, Candidates, Levels
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

_AHEAD = 96
"""Families that are bounded at once."""
_OPENED = 12
"""Parts of families whose layouts are bounded at once."""

TRIED_FOR_S = 5.0
"""Seconds of the integer program where it is only asked whether a layout fits."""

Outcome = Solution | Infeasible | Fathomed | Unfinished
Solve = Callable[[Instance, float], Outcome]


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
        """Yield the parts of a family, or the layouts of a part."""
        if known == COMPUTATION and len(group.savings) > 1:
            for part_s, part in zip(
                self.candidates.savings_s(group), group.by_saving(), strict=True
            ):
                yield part_s, COMPUTATION, part
        elif known == COMPUTATION:
            for part, room_s in self.candidates.parts(group, self._levels(group, ahead)):
                yield room_s, ROOM, part
        elif known == ROOM:
            for part in group.by_loss():
                yield float(self.candidates.shared_s(part).min()), SHARED, part
        else:
            for layout, better_s in self._layouts(group, ahead):
                yield better_s, SHARED, layout

    def _levels(self, family: Family, ahead: Ahead) -> Levels:
        """Return a family's bounds within memory; those that come next are worked out with it."""
        known = self.candidates.looked_at
        if id(family) not in known:
            some = [family]
            for one in ahead(COMPUTATION, _AHEAD):
                if len(one.savings) == 1 and one is not family and id(one) not in known:
                    some.append(one)
            some = some[:_AHEAD]
            for one, levels in zip(some, self.candidates.rooms_s(some), strict=True):
                known[id(one)] = one, levels
        return known[id(family)][1]

    def _layouts(self, part: Family, ahead: Ahead) -> Bounded:
        """Return a part's layouts with their bounds; those of the next parts are worked out too."""
        known = self.candidates.opened
        if id(part) not in known:
            coming = ahead(SHARED, _OPENED)
            some = [part, *(one for one in coming if one is not part and id(one) not in known)]
            for one, bounded in zip(some, self.candidates.shared_rooms_s(some), strict=True):
                known[id(one)] = one, bounded
        return known[id(part)][1]

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


def _exactly(frontiers: FrontierStore, instance: Instance, cutoff_s: float) -> Outcome:
    return solve_chain(instance, cutoff_s=cutoff_s, frontiers=frontiers, time_limit_s=TIES_LIMIT_S)


def _by_program(instance: Instance, _: float) -> Any:
    from planner.solver import ilp  # noqa: PLC0415 - loads HiGHS

    return ilp.solve(instance)
