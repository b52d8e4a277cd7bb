"""What searches by the simulated step have in common, whatever their layouts are made of.

A space of the closed form (`own`) has the layouts; its counterpart here has lower bounds of their
simulated steps, and simulates the splits that it meets.  How far it looks is counted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from planner.documents.plan import Layout
from planner.documents.tolerances import EQUAL
from planner.search.certificate import NO_FASTER, OUT_OF_MEMORY, UNFINISHED
from planner.search.layout_queue import Found, Lost
from planner.search.ranked import Ranked
from planner.search.simulated_proof import Effort

BOUNDED, SOLVED, PROGRAMS = (
    "layouts within memory",
    "layouts solved",
    "layouts by their programs",
)


@dataclass(frozen=True, slots=True)
class SimulatedSplit:
    """A split with its plan; `optimal` where no other of its layout simulates faster."""

    plan: Ranked
    optimal: bool


class BySimulation:
    """What a space of such splits says of them."""

    keeps_ties = False

    def ranked(self, found: Found[Any]) -> Ranked:
        """Return the plan of a split and its prediction."""
        one: SimulatedSplit = found.split
        return one.plan


class Tried:
    """Plans that a space has simulated, and how many of its layouts got which bound."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.looked_at = dict.fromkeys((BOUNDED, SOLVED, PROGRAMS), 0)
        self.found: list[Ranked] = []
        self._started = time.process_time()

    def may(self, what: str, most: int) -> bool:
        """Whether another layout may be looked at that closely; it is counted."""
        late = time.process_time() - self._started > self.effort.seconds
        if late or self.looked_at[what] >= most:
            return False
        self.looked_at[what] += 1
        return True

    def keep(self, plan: Ranked) -> float:
        """Keep a plan if it fits; return its step, inf if it does not."""
        if not plan.prediction.fits:
            return math.inf
        self.found.append(plan)
        return plan.prediction.step_time_s


def settled(
    layout: Layout, best: Ranked | None, low_s: float, cutoff_s: float
) -> Found[SimulatedSplit] | Lost:
    """Return what is known of a layout none of whose splits simulates below `low_s`."""
    if low_s >= cutoff_s * (1 - EQUAL):
        outcome = OUT_OF_MEMORY if low_s == math.inf else NO_FASTER
        return Lost(outcome, bound_s=None if low_s == math.inf else low_s)
    if best is None or best.prediction.step_time_s >= cutoff_s:
        return Lost(UNFINISHED, bound_s=low_s)
    step_s = best.prediction.step_time_s
    low_s = min(low_s, step_s)
    return Found(step_s, low_s, layout, SimulatedSplit(best, low_s >= step_s * (1 - EQUAL)))
