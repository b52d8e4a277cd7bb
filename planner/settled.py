"""The cheapest path over step costs that start as bounds and become exact when they are wanted.

While a step of the cheapest path is only bounded it is settled, and the search repeated.  All
costs being exact or below, a path whose steps are exact costs no more than any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.instance import ROUNDING, Solution
from planner.paths import Path, Paths, cheapest, priced_path

Floats = NDArray[np.float64]

# Above the rounding that `cuts.meets` forgives, below anything that matters.
_HAIR = 1e-11


class Costs(Protocol):
    """[step] What steps cost, exactly or at least; inf where a step is impossible."""

    @property
    def sync_depends(self) -> bool:
        """Whether options of one kind differ in `sync_s`, which are then lower bounds."""

    @property
    def stage_s(self) -> Floats:
        """Seconds of the stage."""

    @property
    def sync_s(self) -> Floats | None:
        """Seconds of synchronisation, None if there are none."""

    def fill_s(self) -> Floats:
        """What a step adds to the sum over stages."""

    def settle(self, steps: Sequence[int]) -> bool:
        """Make exact what the steps take; False if everything was."""

    def limit_sync(self, limit_s: float) -> None:
        """Allow only options with which no stage synchronises longer."""


class HasSplit(Protocol):
    """An answer made of a path."""

    @property
    def split(self) -> Solution:
        """The split, evaluated from raw numbers."""


Answer = TypeVar("Answer", bound=HasSplit)


def best_split(
    paths: Paths,
    costs: Costs,
    assemble: Callable[[Path], Answer],
    *,
    steady: float,
    cutoff_s: float,
) -> Answer | None:
    """Best split along a path, None if there is none below `cutoff_s`.

    Where sync depends on the options, a falling limit on that of every stage enters the steps, as
    the ceiling does in `paths.cheapest`.
    """
    if not costs.sync_depends:
        found = settled_path(paths, costs, costs.sync_s, steady=steady, cutoff_s=cutoff_s)
        return None if found is None else assemble(found)
    least_s = np.zeros(len(paths)) if costs.sync_s is None else costs.sync_s
    least_sync_s = paths.smallest_maximum(np.where(np.isfinite(costs.stage_s), least_s, np.inf))
    best: Answer | None = None
    while least_sync_s < math.inf:
        found = settled_path(paths, costs, None, steady=steady, cutoff_s=cutoff_s - least_sync_s)
        if found is None:
            break
        answer = assemble(found)
        if answer.split.objective_s < cutoff_s:
            best, cutoff_s = answer, answer.split.objective_s
        largest_s = max(answer.split.stage_sync_s)
        if largest_s <= least_sync_s * (1 + ROUNDING):
            break
        costs.limit_sync(largest_s * (1 - ROUNDING))
    return best


def settled_path(
    paths: Paths, costs: Costs, sync_s: Floats | None, *, steady: float, cutoff_s: float
) -> Path | None:
    """Cheapest path below the cutoff, with all of its steps exact."""
    known_s = cutoff_s
    while True:
        fill_s = costs.fill_s()
        found = cheapest(paths, costs.stage_s, fill_s, sync_s, steady=steady, cutoff_s=known_s)
        if found is None or not costs.settle(found.steps):
            return found
        # What the path really takes bounds the search; a hair more, so that it is found again.
        actual = priced_path(costs.stage_s, costs.fill_s(), sync_s, found.steps, steady=steady)
        hair_s = _HAIR * (steady * actual.largest_s + abs(actual.fill_s) + actual.sync_s)
        known_s = min(known_s, math.nextafter(actual.value_s + hair_s, math.inf))
