"""The fastest options of the layers of one rank's two stages, within its memory.

Bytes of a layer are resident + a_c stored + w_c kept, c being its stage, at every moment of the
schedule (`planner.rounds.problem`).  Options of a kind differ in stored bytes, seconds and the
transient alone, so each stage has a Pareto set of (stored, seconds), and a point of the first set
leaves the second a budget: the least that any moment leaves.  Tried for each level that the largest
transient may have, that is exact.

Where bytes are no sums (`RoundsProblem.used_bytes`), the fastest options by sums are checked, and
if they do not fit, all that take longer are gone through (planner.solver.checked).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.rounds.problem import RoundsProblem, Spans
from planner.solver.checked import fastest_checked
from planner.solver.frontier import FrontierStore, Runs, fastest_choice, unbeaten
from planner.solver.instance import Instance, Stage
from planner.solver.knapsack import Knapsacks
from planner.tolerances import ROUNDING

Floats = NDArray[np.float64]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Unscaled seconds, and the options of the layers of both stages in order."""

    time_s: float
    options: tuple[list[int], list[int]]
    at_least_s: float | None = None
    """Seconds that no options that fit stay below, where that is less than `time_s`."""


class RankOptions:
    """One rank of a problem."""

    def __init__(self, problem: RoundsProblem, rank: int, store: FrontierStore) -> None:
        self._problem = problem
        self._rank = rank
        self._store = store

    def fastest(self, front: Span, behind: Span) -> RankChoice | None:
        """Return the fastest options of the layers of both stages, None if they do not fit."""
        lowest = self._by_sums(front, behind)
        if lowest is None or self._problem.used_bytes is None:
            return lowest
        first, second = lowest.options
        if self._problem.fits(self._rank, (front, behind), [*first, *second]):
            return lowest
        return self._checked((front, behind), lowest.time_s)

    def _checked(self, spans: Spans, least_s: float) -> RankChoice | None:
        """Return the fastest options that fit, which take no less than `least_s`."""
        problem, rank = self._problem, self._rank
        kinds, count = problem.kinds, len(problem.kinds)
        # By the moment with most alive; a stage's layers have kinds of their own.
        a_0, a_1, w_0, w_1 = max(problem.moments[rank], key=sum)
        tables = [
            tuple(
                replace(o, stored_bytes=a * o.stored_bytes + w * o.kept_bytes, kept_bytes=0.0)
                for o in table
            )
            for a, w in ((a_0, w_0), (a_1, w_1))
            for table in kinds
        ]
        passed = sum(a * b for a, b in zip((a_0, a_1), problem.passed_by(rank), strict=True))
        held = [
            place * count + problem.layers[at]
            for place, span in enumerate(spans)
            for at in range(*span)
        ]
        room = Stage(
            capacity_bytes=problem.capacity_bytes, fixed_bytes=problem.fixed_bytes[rank] + passed
        )
        one = Instance(layers=tuple(held), kinds=tuple(tables), stages=(room,), steady=0.0)
        used = problem.used_bytes
        assert used is not None, "sums are exact without"
        found = fastest_checked(
            Knapsacks(one, self._store), 0, held, partial(used, rank, spans), least_s=least_s
        )
        if found is None:
            return None
        width = spans[0][1] - spans[0][0]
        taken = list(found.options)
        at_least_s = found.at_least_s if found.at_least_s < found.time_s else None
        return RankChoice(found.time_s, (taken[:width], taken[width:]), at_least_s)

    def _by_sums(self, front: Span, behind: Span) -> RankChoice | None:
        problem = self._problem
        spans = (front, behind)
        held = [[problem.layers[layer] for layer in range(*span)] for span in spans]
        tables = [problem.kinds[kind] for kinds in held for kind in kinds]
        floor = max(min(o.transient_bytes for o in table) for table in tables)
        levels = sorted({o.transient_bytes for table in tables for o in table})
        best: RankChoice | None = None
        for level in (level for level in levels if level >= floor):
            found = self._within(held, level, best)
            if found is not None and (best is None or found.time_s < best.time_s):
                best = found
        return best

    def _within(
        self, held: list[list[int]], level: float, best: RankChoice | None
    ) -> RankChoice | None:
        """Fastest options whose transients do not exceed a level."""
        problem, rank = self._problem, self._rank
        resident = [sum(problem.kinds[k][0].resident_bytes for k in kinds) for kinds in held]
        kept = [sum(problem.kinds[k][0].kept_bytes for k in kinds) for kinds in held]
        free = problem.capacity_bytes * (1 + ROUNDING / 2) - problem.fixed_bytes[rank] - level
        free -= sum(resident)
        (load_0, time_0), (load_1, time_1) = (self._frontier(kinds, level) for kinds in held)
        room = np.full(len(load_0), np.inf)
        budget_0 = np.inf
        b_0, b_1 = problem.passed_by(rank)
        for a_0, a_1, w_0, w_1 in problem.moments[rank]:
            left = free - w_0 * kept[0] - w_1 * kept[1] - a_0 * (load_0 + b_0) - a_1 * b_1
            room = np.minimum(room, left / a_1 if a_1 else np.where(left >= 0, np.inf, -np.inf))
        at = np.searchsorted(load_1, room, side="right") - 1
        total = np.where(at >= 0, time_1[at], np.inf) + time_0
        pick = int(total.argmin())
        if total[pick] == np.inf or (best is not None and total[pick] >= best.time_s):
            return None
        budget_0, budget_1 = float(load_0[pick]), float(load_1[at[pick]])
        options = (self._taken(held[0], level, budget_0), self._taken(held[1], level, budget_1))
        return RankChoice(float(total[pick]), options)

    def _frontier(self, kinds: list[int], level: float) -> tuple[Floats, Floats]:
        """Stored bytes, rising, and seconds of all unbeaten choices of a stage."""
        load, time = np.zeros(1), np.zeros(1)
        for kind in sorted(set(kinds)):
            runs, _ = self._runs(kind, level)
            more = runs.frontier(kinds.count(kind))
            load = np.add.outer(load, more.load_bytes).ravel()
            time = np.add.outer(time, more.time_s).ravel()
            keep = unbeaten(load, time)
            load, time = load[keep], time[keep]
        return load, time

    def _runs(self, kind: int, level: float) -> tuple[Runs, list[int]]:
        table = self._problem.kinds[kind]
        within = [k for k, o in enumerate(table) if o.transient_bytes <= level]
        load = np.array([table[k].stored_bytes for k in within])
        time = np.array([table[k].time_s for k in within])
        return self._store.runs(load, time), within

    def _taken(self, kinds: list[int], level: float, budget_bytes: float) -> list[int]:
        """Options of a stage's layers; of alike ones the first take the later options."""
        each = sorted(set(kinds))
        groups = [(self._runs(kind, level)[0], kinds.count(kind)) for kind in each]
        found = fastest_choice(groups, budget_bytes * (1 + ROUNDING))
        assert found is not None, "a point of the frontier fits"
        left = {}
        for kind, (runs, count), point in zip(each, groups, found[1], strict=True):
            within = self._runs(kind, level)[1]
            left[kind] = [within[option] for option in runs.options(count, point)]
        return [left[kind].pop() for kind in kinds]
