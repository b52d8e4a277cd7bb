"""The cheapest way over costs that start as bounds and become exact when they are wanted.

A step is a stage with what it has.  While one of the cheapest way is only bounded it is settled,
and the search repeated.  All costs being exact or below, a way whose steps are exact costs no more
than any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SETTLED
from meshwright.planner.solver.bottleneck_path import Costs, Way, cheapest, evaluate_way
from meshwright.planner.solver.paths import Paths

Floats = NDArray[np.float64]


class SettledSteps(Protocol):
    """The steps that ways are made of."""

    @property
    def ways(self) -> Paths:
        """All ways along them."""

    @property
    def sync_depends(self) -> bool:
        """True if options of one kind differ in `sync_s`; `costs` then leave it out."""

    def costs(self) -> Costs:
        """[step] What they cost, exactly or at least; inf where a step is impossible."""

    def bounding_costs(self) -> Costs | None:
        """[step] Costs that are no more than exact ones; None if those of `costs` are exact."""

    def settle(self, way: tuple[int, ...]) -> bool:
        """Make exact what a way costs; False if everything was."""

    def shortest_sync_s(self) -> Floats:
        """[step] Least seconds of synchronisation."""

    def limit_sync(self, limit_s: float) -> None:
        """Allow only options with which no stage synchronises longer."""


class Evaluated(Protocol):
    """A split made of a way, evaluated from raw numbers."""

    @property
    def objective_s(self) -> float:
        """Seconds of a step."""

    @property
    def stage_sync_s(self) -> tuple[float, ...]:
        """[stage] Seconds of synchronisation."""


Answer = TypeVar("Answer", bound=Evaluated)


@dataclass(slots=True)
class WaysLeft:
    """Number of ways that may still be settled, and a lower bound in seconds of those left open."""

    number: float = math.inf
    open_s: float = math.inf


def best_split(
    steps: SettledSteps,
    assemble: Callable[[Way], Answer],
    *,
    cutoff_s: float,
    left: WaysLeft | None = None,
) -> Answer | None:
    """Best split along a way, None if there is none below `cutoff_s`.

    Where no more ways are `left` it is the best of those that were settled.

    Where sync depends on the options, a falling limit on that of every stage enters the steps, as
    the ceilings do in `descent.cheapest`.
    """
    if not steps.sync_depends:
        path = settled_way(steps, cutoff_s=cutoff_s, left=left)
        return None if path is None else assemble(path)
    possible = np.isfinite(steps.costs().stage_s)
    most_sync_s = steps.ways.smallest_maximum(np.where(possible, steps.shortest_sync_s(), np.inf))
    best: Answer | None = None
    while most_sync_s < math.inf:
        path = settled_way(steps, cutoff_s=cutoff_s - most_sync_s, left=left)
        if path is None:
            break
        answer = assemble(path)
        if answer.objective_s < cutoff_s:
            best, cutoff_s = answer, answer.objective_s
        largest_s = max(answer.stage_sync_s)
        if largest_s <= most_sync_s * (1 + ROUNDING):
            break
        steps.limit_sync(largest_s * (1 - ROUNDING))
    return best


def loose_s(steps: SettledSteps, *, cutoff_s: float) -> float:
    """Return what ways below the cutoff take at least, whose steps are not all known exactly.

    inf if there is none.
    """
    costs = steps.bounding_costs()
    path = None if costs is None else cheapest(steps.ways, costs, cutoff_s=cutoff_s)
    if path is None:
        return math.inf
    return path.value_s + (steps.shortest_sync_s().min() if steps.sync_depends else 0.0)


def settled_way(
    steps: SettledSteps, *, cutoff_s: float, left: WaysLeft | None = None
) -> Way | None:
    """Cheapest way below the cutoff, with all of its steps exact."""
    known_s, left = cutoff_s, left or WaysLeft()
    best: Way | None = None
    while True:
        path = cheapest(steps.ways, steps.costs(), cutoff_s=known_s)
        if path is not None and left.number <= 0:
            once_s = steps.shortest_sync_s().min() if steps.sync_depends else 0.0
            left.open_s = min(left.open_s, path.value_s + once_s)
            return best
        if path is None or not steps.settle(path.way):
            return path
        left.number -= 1
        # What the way really takes bounds the search; a hair more, so that it is found again.
        costs = steps.costs()
        actual = evaluate_way(steps.ways, costs, path.way)
        if not math.isfinite(actual.value_s):
            continue  # a step's options do not fit, whatever the sums of their bytes say
        if actual.value_s < known_s:
            best = actual
        hair_s = SETTLED * (costs.steady * actual.largest_s + abs(actual.fill_s) + actual.once_s)
        known_s = min(known_s, math.nextafter(actual.value_s + hair_s, math.inf))
