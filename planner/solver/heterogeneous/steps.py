"""The steps of a pipeline whose stages may be of any type.

States between stages are (downset so far, stages used of each type, type before, type after); a
step is one stage of one type.  Of a chain the downsets are the numbers of its first layers.  The
last two matter only if cuts between some types cost anything.  Steps of one type with the same
layers at the same position share an entry of that type's table of bounds and exact seconds
(`meshwright.planner.solver.stage_table`); what the cuts cost comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.bottleneck_path import Costs
from meshwright.planner.solver.bounds.downsets import Runs
from meshwright.planner.solver.bounds.lagrangian_bounds import StepBounds
from meshwright.planner.solver.heterogeneous.reach import Counts, Spans, shift_count
from meshwright.planner.solver.paths import Paths
from meshwright.planner.solver.stage_table import Known, StepTable, bounding_costs

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
# [type before][type after] Seconds of a cut behind each downset.
CutSeconds = Sequence[Sequence[Floats]]
# (stages used of each type, type before, type after); -1 where there is none or it does not matter.
Meeting = tuple[Counts, int, int]


class UnequalSteps:
    """[step] All steps under one ceiling, as `meshwright.planner.solver.lazy_path` wants them.

    A step is of type `type_of[step]` and has the layers of entry `entry[step]` of its table.
    `spans` are those of the ceiling.  `cut_s[g][h]` [downset] is charged to both stages that meet
    behind it, of types g and h; empty where no cut costs anything.
    """

    def __init__(
        self,
        bounds: Sequence[StepBounds],
        *,
        cached_costs: Sequence[Known],
        spans: Spans,
        cut_s: CutSeconds,
        quantum_s: float,
        limit_s: float,
    ) -> None:
        """Seconds are multiples of `quantum_s`, and `limit_s` is as of tables."""
        self._quantum_s = quantum_s
        self._instance = bounds[0].knapsacks.instance
        self._spans = spans
        self._width = len(bounds[0].members)
        self._cuts_s = cut_s
        self._places: list[list[Counts]] = [[] for _ in range(len(self._instance.stages) + 1)]
        for counts in spans.between:
            self._places[sum(counts)].append(counts)
        self.tables = [
            StepTable(
                bound,
                spans.runs,
                of_type,
                np.concatenate(least_s),
                quantum_s=quantum_s,
                limit_s=limit_s,
            )
            for bound, of_type, least_s in zip(bounds, cached_costs, spans.least_s, strict=True)
        ]
        self._link(spans.runs)
        self.sync_depends = any(table.sync_depends for table in self.tables)
        self.sync_limit_s = np.inf
        self._sync_s = self._of_steps([table.shortest_sync_s() for table in self.tables])

    def bounding_costs(self) -> Costs | None:
        """[step] Costs that are no more than exact ones; None if those of `costs` are exact."""
        return bounding_costs(self, self.tables)

    def costs(self) -> Costs:
        """[step] What the objective counts."""
        instance = self._instance
        stage_s = self._of_steps([table.stage_s for table in self.tables]) + self._cut_s
        fill_s = self._of_steps([table.fill_s() for table in self.tables])
        once_s = []
        if instance.forward_apart:
            forward_s = self._of_steps([table.forward_s for table in self.tables])
            forward_s = forward_s + self._round_down(self._cut_s / 2)
            stage_s = stage_s - forward_s
            once_s.append(instance.steady * forward_s)
        if self._sync_s.any() and not self.sync_depends:
            once_s.append(self._sync_s)
        fill_s = fill_s + self._round_down(instance.fill * self._cut_s)
        return Costs(stage_s, fill_s, tuple(once_s), instance.steady)

    def shortest_sync_s(self) -> Floats:
        """[step] Least seconds of synchronisation."""
        return self._sync_s

    def settle(self, steps: Sequence[int]) -> bool:
        """Make exact what the steps take; False if everything was."""
        changes = [
            table.settle([int(self.entry[step]) for step in steps if self.type_of[step] == number])
            for number, table in enumerate(self.tables)
        ]
        return any(changes)

    def limit_sync(self, limit_s: float) -> None:
        """Allow only options with which no stage synchronises longer."""
        self.sync_limit_s = limit_s
        for table in self.tables:
            table.limit_sync(limit_s)

    def _of_steps(self, of_tables: Sequence[Floats]) -> Floats:
        """[step] The entry of each step in the array of its type."""
        values: Floats = np.concatenate(of_tables)[self._flat]
        return values

    def _round_down(self, values: Floats) -> Floats:
        """Return values as tables have them."""
        rounded: Floats = np.round(values / self._quantum_s) * self._quantum_s
        return rounded

    def laid(self, way: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Return a way's layers in order, its cuts, and the options of the layers."""
        layers, cuts, options = list[int](), [0], list[int]()
        for step in way:
            table, entry = self.tables[self.type_of[step]], int(self.entry[step])
            layers += table.layers(entry)
            options += table.options(entry)
            cuts.append(len(layers))
        return tuple(layers), tuple(cuts), options

    def _meetings(self, position: int) -> list[Meeting]:
        """States before a position, the layers so far aside."""
        meetings: list[Meeting] = []
        for counts in self._places[position]:
            if not self._cuts_s:
                meetings.append((counts, -1, -1))
                continue
            types = range(len(counts))
            before = [g for g in types if shift_count(counts, g, -1) in self._spans.between] or [-1]
            after = [g for g in types if shift_count(counts, g, +1) in self._spans.between] or [-1]
            meetings += [(counts, g, h) for g in before for h in after]
        return meetings

    def _link(self, runs: list[Runs]) -> None:
        """Lay out the steps of every position, sorted by where they start."""
        width = self._width
        meetings = [self._meetings(position) for position in range(len(runs) + 1)]
        offset = 0
        hops, types, entries, cuts = [], [], [], []
        for position, (first, end) in enumerate(runs):
            before, after = meetings[position], meetings[position + 1]
            moves = list(self._moves(position, before, after, runs[position]))
            starts = np.concatenate([m.start * width + first[m.runs] for m in moves])
            order = np.argsort(starts, kind="stable")
            stops = np.concatenate([m.stop * width + end[m.runs] for m in moves])
            hops.append((starts[order], stops[order]))
            types.append(np.concatenate([np.full(len(m.runs), m.number) for m in moves])[order])
            entries.append(offset + np.concatenate([m.runs for m in moves])[order])
            charges = [
                self._cut_of(before[m.start], first[m.runs])
                + self._cut_of(after[m.stop], end[m.runs])
                for m in moves
            ]
            cuts.append(np.concatenate(charges)[order])
            offset += len(first)
        self.ways = Paths([len(pairs) * width for pairs in meetings], hops)
        self.type_of, self.entry = np.concatenate(types), np.concatenate(entries)
        self._flat = self.type_of * offset + self.entry
        self._cut_s = self._round_down(np.concatenate(cuts))

    def _moves(
        self, position: int, before: list[Meeting], after: list[Meeting], runs: Runs
    ) -> Iterator[_Move]:
        """All pairs of meetings that a stage can lie between, with the runs that it can hold."""
        first, end = runs
        between = self._spans.between
        stops: dict[tuple[Counts, int], list[int]] = {}
        for stop, (counts, number, _) in enumerate(after):
            stops.setdefault((counts, number), []).append(stop)
        runs_of: dict[tuple[Counts, int], Indices] = {}
        for start, (counts, _, expected) in enumerate(before):
            for number in range(len(self.tables)) if expected < 0 else (expected,):
                more = shift_count(counts, number, +1)
                if more not in between:
                    continue
                if (counts, number) not in runs_of:
                    inside = between[counts][first] & between[more][end]
                    inside &= np.isfinite(self._spans.least_s[number][position])
                    runs_of[counts, number] = np.flatnonzero(inside)
                for stop in stops.get((more, expected), ()):
                    yield _Move(start, stop, number, runs_of[counts, number])

    def _cut_of(self, meeting: Meeting, position: Indices) -> Floats:
        """Seconds that each of the two stages spends on a cut at these positions."""
        _, before, after = meeting
        if before < 0 or after < 0:
            return np.zeros(len(position))
        return self._cuts_s[before][after][position]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """Steps of one type between two meetings: `runs` index what the stage can hold."""

    start: int
    stop: int
    number: int
    runs: Indices
