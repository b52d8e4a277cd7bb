"""How far through a graph stages get under a ceiling, when the order of their types is open.

A stage of type g at position s can hold what one downset adds to another if that takes no longer
than the ceiling by the Lagrangian bound of its layers, and their leanest options fit
(`planner.solver.step_bounds`).  Behind stages with n_g of type g can lie

    D(n) = { J : I in D(n - e_g), and J - I is for type g at position Σ n - 1 }

and of these only what leads on to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.solver.graphs.ideals import Ideals
from planner.solver.knapsack import Knapsacks
from planner.solver.step_bounds import StepBounds
from planner.solver.unequal.reach import Counts, Runs, Spans, changed, least_ceiling_s
from planner.tolerances import SLACK

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]

_CHUNK = 1 << 20  # pairs of downsets compared at a time


class IdealReach:
    """Downsets between stages under any ceiling; `knapsacks[type]` have all stages of one type.

    `pairs` are all downsets that lie in others (`nested`).
    """

    def __init__(
        self, knapsacks: Sequence[Knapsacks], numbers: Sequence[int], every: Ideals, pairs: Runs
    ) -> None:
        self._full = tuple(numbers)
        self._count = len(every)
        self._order = sorted(product(*(range(n + 1) for n in numbers)), key=sum)
        stages, layers = sum(numbers), every.layers
        members = np.arange(len(every))
        sizes = every.totals(np.ones((layers, 1)))[:, 0]
        smaller, larger = pairs
        self._pairs: list[Runs] = []
        for position in range(stages):
            # Every stage before and behind has a layer at least; the first and last have the ends.
            begins = (sizes >= position) & ((sizes == 0) == (position == 0))
            stops = layers - sizes >= stages - position - 1
            stops &= (sizes == layers) == (position == stages - 1)
            some = begins[smaller] & stops[larger]
            self._pairs.append((smaller[some], larger[some]))
        free = np.zeros(len(every))
        self._seconds: list[list[Floats]] = []
        for one in knapsacks:
            bounds = StepBounds(one, every, members, free)
            self._seconds.append([bounds.stage_s(s, *run) for s, run in enumerate(self._pairs)])

    def least_s(self, whole_s: float) -> float:
        """Ceiling, to a share of it, below which the stages do not get to the end; inf if none."""
        return least_ceiling_s(
            lambda ceiling_s: self._between(self._holds(ceiling_s)) is not None,
            whole_s,
            sum(self._full),
        )

    def spans(self, ceiling_s: float) -> Spans | None:
        """Return what stages may hold; None if they do not get to the end."""
        holds = self._holds(ceiling_s)
        between = self._between(holds)
        if between is None:
            return None
        runs, kept = [], [[] for _ in holds]  # type: tuple[list[Runs], list[list[Booleans]]]
        for position, (smaller, larger) in enumerate(self._pairs):
            begins, stops = (
                np.logical_or.reduce([own for n, own in between.items() if sum(n) == at])
                for at in (position, position + 1)
            )
            some = np.logical_or.reduce([own[position] for own in holds])
            some &= begins[smaller] & stops[larger]
            runs.append((smaller[some], larger[some]))
            for own, mine in zip(holds, kept, strict=True):
                mine.append(own[position][some])
        return Spans(runs=runs, holds=kept, between=between)

    def _holds(self, ceiling_s: float) -> list[list[Booleans]]:
        """[type][position][pair] Whether a stage can hold it under the ceiling."""
        highest_s = ceiling_s * (1 + SLACK)
        return [[seconds <= highest_s for seconds in own] for own in self._seconds]

    def _between(self, holds: list[list[Booleans]]) -> dict[Counts, Booleans] | None:
        """Downsets behind stages of all counts on a way from nothing to all layers, if there is."""
        first, *others = self._order
        reached = {first: self._only(0)}
        for counts in others:
            found = np.zeros(self._count, dtype=bool)
            position = sum(counts) - 1
            smaller, larger = self._pairs[position]
            for g, own in enumerate(holds):
                start = reached.get(changed(counts, g, -1))
                if start is not None:
                    found[larger[own[position] & start[smaller]]] = True
            if found.any():
                reached[counts] = found
        if self._full not in reached:
            return None
        leads = {self._full: self._only(-1)}
        for counts in reversed(self._order[:-1]):
            if counts not in reached:
                continue
            found = np.zeros(self._count, dtype=bool)
            position = sum(counts)
            smaller, larger = self._pairs[position]
            for g, own in enumerate(holds):
                stop = leads.get(changed(counts, g, +1))
                if stop is not None:
                    found[smaller[own[position] & stop[larger]]] = True
            found &= reached[counts]
            if found.any():
                leads[counts] = found
        return leads if first in leads else None

    def _only(self, downset: int) -> Booleans:
        found = np.zeros(self._count, dtype=bool)
        found[downset] = True
        return found


def nested(every: Ideals, most: int) -> Runs | None:
    """Pairs of downsets of which the first lies in the second, rising; None if over `most`."""
    words, count = every.words, len(every)
    rows = max(1, _CHUNK // count)
    smaller: list[Indices] = []
    larger: list[Indices] = []
    found = 0
    for start in range(0, count, rows):
        some = words[start : start + rows, None]
        inside = ~np.any(some & ~words[None], axis=2)
        first, second = np.nonzero(inside)
        apart = first + start != second
        smaller.append(first[apart] + start)
        larger.append(second[apart])
        found += len(smaller[-1])
        if found > most:
            return None
    return np.concatenate(smaller), np.concatenate(larger)
