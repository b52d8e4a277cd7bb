"""The cheapest way through stages where the dearest one counts many times.

Ways are those of a chain (`planner.solver.cuts`) or of a lattice of states
(`planner.solver.paths`); tables say what each stage would cost.  `cheapest` minimises exactly

    steady · max_s stage_s + Σ_s fill_s + max_s once_s + ...

by threshold descent: the smallest Σ fill under a ceiling on stage_s is one dynamic program.  With
its solution (maximum τ, sum S) known, every other way below the ceiling and not below τ costs at
least as much, so the next ceiling lies strictly below τ; S only grows as the ceiling falls, so
steady · τ_min + S bounds all that is left.  A ceiling on each table whose largest entry counts once
descends around it the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.tolerances import ROUNDING

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Tables of what is minimised, one entry per stage and what it may hold; inf where it cannot.

    `once_s` are tables whose largest entry counts once (they need not be inf anywhere).
    """

    stage_s: Floats
    fill_s: Floats
    once_s: tuple[Floats, ...]
    steady: float


class PricedSplit(Protocol):
    """A way and the parts of what it costs."""

    @property
    def way(self) -> tuple[int, ...]:
        """What tells it from others."""

    @property
    def largest_s(self) -> float:
        """Seconds of its slowest stage."""

    @property
    def fill_s(self) -> float:
        """Sum over its stages."""

    @property
    def value_s(self) -> float:
        """All that it costs."""


P_co = TypeVar("P_co", bound=PricedSplit, covariant=True)


class Ways(Protocol[P_co]):
    """All ways, and the dynamic programs over them."""

    def smallest_maximum(self, cost: Floats) -> float:
        """Least possible maximum of `cost` along a way; inf if there is none."""

    def smallest_sum(self, cost: Floats) -> tuple[int, ...] | None:
        """Earliest way with the least sum of `cost`, None if there is none."""

    def along(self, table: Floats, way: tuple[int, ...]) -> Floats:
        """[stage] Entries of a table that a way uses."""

    def price(self, costs: Costs, way: tuple[int, ...]) -> P_co:
        """Evaluate a way."""


def meets(bound_s: float, incumbent_s: float) -> bool:
    """Whether nothing above `bound_s` can improve on the incumbent."""
    return bound_s >= incumbent_s - ROUNDING * abs(incumbent_s)


def cheapest(ways: Ways[P_co], costs: Costs, *, cutoff_s: float = np.inf) -> P_co | None:
    """Cheapest way, or None if there is none below `cutoff_s`."""
    if not costs.once_s:
        return _descend(ways, costs, cutoff_s)
    first_s, *others_s = costs.once_s
    least_s = ways.smallest_maximum(np.where(np.isfinite(costs.stage_s), first_s, np.inf))
    best: P_co | None = None
    ceiling_s = np.inf
    while ceiling_s >= least_s:
        allowed = first_s <= ceiling_s
        below = replace(
            costs,
            stage_s=np.where(allowed, costs.stage_s, np.inf),
            fill_s=np.where(allowed, costs.fill_s, np.inf),
            once_s=tuple(others_s),
        )
        found = cheapest(ways, below, cutoff_s=cutoff_s - least_s)
        if found is None:
            break
        whole = ways.price(costs, found.way)
        if whole.value_s < cutoff_s:
            best, cutoff_s = whole, whole.value_s
        ceiling_s = float(np.nextafter(ways.along(first_s, found.way).max(), -np.inf))
    return best


def _descend(ways: Ways[P_co], costs: Costs, cutoff_s: float) -> P_co | None:
    """Minimise steady · max + Σ fill by a falling ceiling on the maximum."""
    stage_s, fill_s, steady = costs.stage_s, costs.fill_s, costs.steady
    least_max_s = ways.smallest_maximum(stage_s)
    freest = ways.smallest_sum(fill_s)
    if freest is None or not np.isfinite(least_max_s):
        return None
    least_sum_s = ways.price(costs, freest).fill_s
    if meets(steady * least_max_s + least_sum_s, cutoff_s):
        return None
    best: P_co | None = None

    def under(ceiling_s: float) -> P_co:
        way = ways.smallest_sum(np.where(stage_s <= ceiling_s, fill_s, np.inf))
        assert way is not None, "the ceiling is never below the least maximum"
        return ways.price(costs, way)

    tightest = under(least_max_s)
    if tightest.value_s < cutoff_s:
        best, cutoff_s = tightest, tightest.value_s
    ceiling_s = (cutoff_s - least_sum_s) / steady if steady > 0 else np.inf
    while ceiling_s >= least_max_s:
        found = under(ceiling_s)
        if found.value_s < cutoff_s:
            best, cutoff_s = found, found.value_s
        if meets(steady * least_max_s + found.fill_s, cutoff_s):
            break
        ceiling_s = float(np.nextafter(found.largest_s, -np.inf))
        if steady > 0:
            ceiling_s = min(ceiling_s, (cutoff_s - found.fill_s) / steady)
    return best
