"""Common parts of spaces by the simulated step, whose layouts are bounded one by one.

A space of the closed form (`space`) has the layouts; its counterpart here has lower bounds of their
simulated steps, and simulates the splits that it meets.  How far it looks is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from meshwright.planner.search.proof_account import UNFINISHED
from meshwright.planner.search.queue import Pruned, SearchSpace

if TYPE_CHECKING:
    from meshwright.planner.search.goals import SimulatedStepGoal
    from meshwright.planner.search.plan_candidate import Ranked
    from meshwright.planner.search.proof_budget import Effort

FAMILIES, BOUNDED, SOLVED = "timetables of families", "layouts within memory", "layouts solved"


FEW, PART = 20, 10
"""Layouts within memory, and part of all, that are looked at although the lowest bound stays."""


class Tried:
    """Numbers of layouts of a space that got each bound; its plans are offered to a goal."""

    def __init__(self, goal: SimulatedStepGoal, *, further: bool = False) -> None:
        """`further` says whether more may be taken while the gap is large."""
        self.goal = goal
        self.looked_at: Counter[str] = Counter()
        self._first, self._further = goal.effort, further

    @property
    def effort(self) -> Effort:
        """Effort that may be taken now."""
        return self.goal.effort if self._further else self._first

    def has_left(self, what: str, most: int) -> bool:
        """Return whether another layout may be looked at that closely."""
        return not self.goal.closed and self.looked_at[what] < most

    def try_one(self, what: str, most: int) -> bool:
        """Return whether another layout may be looked at that closely; if so, count it."""
        if not self.has_left(what, most):
            return False
        self.looked_at[what] += 1
        return True

    def offer(self, plan: Ranked) -> float:
        """Offer a plan if it fits; return its step, inf if it does not."""
        return self.goal.offer(self, plan)


class BySimulation(SearchSpace):
    """The last bound of a layout is what its splits, which are tried, leave unproven."""

    keeps_ties = False
    unlike = 0
    """Number of layouts whose pipelines differ from one group of devices to another."""
    tried: Tried

    def may_refine(self, level: int) -> bool:
        """Return whether an entry of a level may get another bound; `Effort.solved` are solved.

        Where the lowest bound stays, those of others matter for their plans alone, and a few of
        them are looked at.
        """
        settled = self.groups + len(self.bounds) - 1
        if level == settled - 1:
            return self.tried.has_left(SOLVED, self.tried.effort.solved)
        most = self.tried.effort.layouts
        few = min(most, max(FEW, most // PART))
        return level < settled and (
            not self.tried.goal.blocked or self.tried.has_left(BOUNDED, few)
        )


def bound_of(lost: Pruned) -> float | Pruned:
    """Return the bound of a layout that was not solved to the end; others are lost."""
    return lost.bound_s or 0.0 if lost.outcome == UNFINISHED else lost
