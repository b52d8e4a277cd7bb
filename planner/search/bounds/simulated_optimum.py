"""The least simulated step of one layout: a program whose rows are paths.

A *column* is what one rank may hold on a device type: what lies between two places of the chain
(planner.search.partition.rank_partition) or the graph (`CutPoints`), with one option each, within
its memory, no other choice of which is as fast layer by layer.  With z one or zero for each, and
t_z the seconds of its stages,

    min θ + ω
    Σ z of a rank = 1                         ranks follow each other: layers are used once
    Σ z of a type = its ranks
    θ >= Σ_s K_s t_s + hops c + σ_end         for paths K of the step's actions
    ω >= the optimizer of every rank
    Σ z of a rank that keep row k >= y_k      Σ y = 1, where a rule has rows of sizes to choose from

Every path is a bound at all stage times (`planner.schedules.steady_state`), so every optimum of
the program is one of all plans of the layout.  Its solution is a plan, which is simulated: is it as
fast as the program says, it is the layout's optimum; else its longest paths become rows.  First the
relaxation is solved that way, where columns may be mixed, then the program with whole ones; or all
ways of whole columns are listed (`ColumnProgram.whole_s`).

Columns that alone take as long as the plan to beat are left out, and what is found is the least of
that plan's step and the program's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SETTLED, SLACK
from meshwright.planner.schedules.schedule import rank_of_stage
from meshwright.planner.schedules.steady_state import KINDS, Graph, Path, graph_of
from meshwright.planner.search.bounds.simulated_cuts import (
    Placed,
    cuts_bound_s,
    rank_ways,
    shorter_s,
)
from meshwright.planner.search.bounds.simulated_step import hidden_s
from meshwright.planner.search.bounds.whole_ways import WayLabels
from meshwright.planner.search.partition.rank_partition import RankProblem
from meshwright.planner.solver.bounds.downsets import Downsets, Prefixes
from meshwright.planner.solver.chain import with_allowed_options
from meshwright.planner.solver.highs import highspy, silent_highs
from meshwright.planner.solver.partition_problem import Instance, Option, Solution, evaluate_split

if TYPE_CHECKING:
    from meshwright.planner.costs.layer_strategy import Recomputes
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.frameworks.stage_rules import Rows
    from meshwright.planner.search.bounds.layout_bounds import Candidates
    from meshwright.planner.search.bounds.layout_groups import StatedProblem

MOST_COLUMNS = 6_000
PRESOLVED_COLUMNS = 1_000
"""Most columns of a program that is presolved: 10 of 49 s of one with 1,262 columns went there, and
17 into presolved parts of it; without, it takes 4.  One with 257 takes 1.7 in place of 1.1."""
MOST_EXACT = 20_000
"""Most ways to choose options on a rank of which the fastest within its bytes is looked for."""
FIRST_WAYS = (1, 16, 64, 256)
"""Number of the fastest of them that are looked at first, then those up to the next number."""
COMPARED = 32
"""Choices of all but the main kind that are compared at once."""
MOST_ROUNDS = 60
MOST_ITERATIONS = 1 << 30
ROUND = 4
"""Multiple of the iterations of all rounds that a single round may take."""
MOST_PATHS = 24
"""Means and paths of a timetable that ways are listed by."""
TRIES = 6
"""Limits by which the ways of a layout are listed, where they are many."""
TOGETHER, NODES, ROUNDS = 256, 2_000_000, 20
"""Ways that are simulated at once, fewer if they have more actions together, and how often."""
RELAXED_COLUMNS, RELAXED = 2, 4
"""Multiples of a program's columns, and of its iterations, that a relaxation may have."""
STALLED, LITTLE = 6, 0.1
"""Rounds of mixed columns that raise the bound by less of what is missing are the last ones."""
CLOSE = 1e-6
"""Relative gap at which a program counts as solved; HiGHS keeps to rows within 1e-7."""

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class RankColumn:
    """Content of a rank, wherever its entries begin, and its seconds but for transfers."""

    rank: int
    options: tuple[int, ...]
    seconds: Floats
    """[kind, stage] Seconds of one micro-batch; 0 for the stages of other ranks.

    Those of the gradients of inputs are what they take beside the backward less the weights: no
    more than 0, where these are the least of several choices.
    """
    sync_s: float
    update_s: float
    more_s: float = 0.0
    """Seconds of a micro-batch beside, where these are the least of several choices."""
    more_in: NDArray[np.bool_] | None = None
    """[forward, inputs, weights; stage] Where those may be; None where there are none."""


class CutPoints:
    """Places where the entries of a chain, or layers of a graph, can be cut: their downsets."""

    def __init__(self, downsets: Downsets) -> None:
        self.downsets = downsets
        self.alike = isinstance(downsets, Prefixes)
        """True if entries of the same kinds make the same columns wherever they lie."""
        self.sizes = self.totals([1.0] * downsets.layers).astype(np.intp)
        """[place] Entries before it."""
        self._between: dict[tuple[int, int], Sequence[int]] = {}

    @cached_property
    def is_nested(self) -> NDArray[np.bool_]:
        """[place, place] Whether the second has all that the first has."""
        count = len(self.downsets)
        pairs = self.downsets.nested_pairs(count**2)
        assert pairs is not None, "there are no more"
        reachable = np.eye(count, dtype=bool)
        reachable[pairs] = True
        return reachable

    def totals(self, values: Sequence[float]) -> Floats:
        """[place] Sums of `values` [entry] before it."""
        return self.downsets.totals(np.array(values)[:, None])[:, 0]

    def places_before(self, place: int) -> Sequence[int]:
        """Return what lies before a place."""
        return self.between(0, place)

    def between(self, first: int, end: int) -> Sequence[int]:
        """Return what lies between two places, in an order that runs."""
        if (first, end) not in self._between:
            self._between[first, end] = self.downsets.difference(first, end)
        return self._between[first, end]

    def laid(self, ends: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return all entries in the order of the ranks between some places, and the cuts of it."""
        stages = [self.between(a, b) for a, b in itertools.pairwise(ends)]
        order = tuple(at for layers in stages for at in layers)
        return order, (0, *itertools.accumulate(map(len, stages)))


Spans = set[tuple[int, int, int, int]]
"""Rank, first place, end and type of columns."""
Links = Sequence[Sequence[Floats]]
"""[type before][type after][place] Seconds of a transfer there; none is below that of the costs."""
Read = Callable[[Sequence[int], Sequence[int], Sequence[int]], Any]
"""Return the split of device types [rank], places [rank + 1] and options, rank after rank."""


@dataclass(frozen=True, slots=True, eq=False)
class PathWeights:
    """A mean of paths: no step takes less than it does at any stage times.

    The mean whose least over all cuts is the greatest for one layout is near that for others with
    the same timetable, whose stages have other seconds.
    """

    visits: Floats
    """[kind, stage]"""
    hops: Floats
    """[boundary]"""
    ends: Floats
    """[rank] Share of the paths that end there."""


class ColumnProgram:
    """Integer program of what the ranks of a layout may hold in plans that beat a limit."""

    def __init__(
        self,
        layout: Layout,
        listed: Sequence[Columns],
        columns: Sequence[RankColumn],
        placed: Placed,
        read: Read,
    ) -> None:
        """`columns` are those of `placed`, one for each of its rows."""
        self._layout, self._columns, self.placed, self._read = layout, columns, placed, read
        self._rows = listed[0].instance.sizes
        self._sizes = np.repeat(listed[0].places.sizes, placed.joints)
        self._step_s, self._transfer_s = listed[0].costs.step_s, hidden_s(listed[0].costs)
        self._spans: Spans | None = None
        """Of the columns of all ways within a limit, where those were listed."""
        self.is_solved = False

    @property
    def size(self) -> int:
        """Number of columns."""
        return len(self._columns)

    def feasible_spans(self, limit_s: float) -> Spans:
        """Return the spans of columns on a way of ranks within a limit.

        Those of all ways, where they were listed (`whole_s`), by a limit no lower.  Else a rank
        takes no longer than a step: T >= m t_r + σ_r.
        """
        if self._spans is not None:
            return self._spans
        placed, count = self.placed, self._layout.micro_batches
        alone_s = count * placed.passes_s() + placed.sync_s
        is_within = alone_s <= (limit_s - self._step_s) * (1 + ROUNDING)
        firsts, ends = placed.first // placed.joints, placed.end // placed.joints
        for rank in range(1, self._layout.pipeline):
            begun = ends[is_within & (placed.rank == rank - 1)]
            is_within &= (placed.rank != rank) | np.isin(firsts, begun)
        for rank in range(self._layout.pipeline - 2, -1, -1):
            following = firsts[is_within & (placed.rank == rank + 1)]
            is_within &= (placed.rank != rank) | np.isin(ends, following)
        return self._spans_of(np.flatnonzero(is_within))

    def _spans_of(self, columns: Indices) -> Spans:
        """Return rank, first place, end and type of columns."""
        placed = self.placed
        places = placed.first // placed.joints, placed.end // placed.joints
        every = np.stack([placed.rank, *places, placed.number], axis=1)[columns]
        return set(map(tuple, every.tolist()))

    def cut_s(self, limit_s: float) -> float:
        """Return seconds that no cut simulates below, or `limit_s` if that is less."""
        columns = rank_ways(self._layout, self.placed)
        low_s = cuts_bound_s(self._layout, columns, self._transfer_s, limit_s - self._step_s)
        return min(limit_s, low_s + self._step_s)

    def beside_s(self, like: ColumnProgram, like_s: float) -> float:
        """Return what no plan takes less than where none of a like program takes `like_s`.

        0 where the other program has other rows or quicker links (`shorter_s`).
        """
        quicker = self._step_s < like._step_s or self._transfer_s < like._transfer_s
        if quicker or self._rows != like._rows:
            return 0.0
        less_s = shorter_s(self.placed, like.placed, self._layout)
        return max(0.0, (like_s - less_s) * (1 - ROUNDING))

    def _path_s(self, weights: PathWeights) -> Floats:
        """[column] Its seconds in a mean of paths, without what transfers take at least."""
        placed = self.placed
        each_s = placed.visited_s(weights.visits)
        each_s += weights.ends[placed.rank] * placed.sync_s
        each_s += (self._rank_hops @ weights.hops)[placed.rank] * placed.hop_s
        return each_s

    @cached_property
    def _rank_hops(self) -> Floats:
        """`hops_behind` the ranks."""
        return hops_behind(self._layout)

    @cached_property
    def _least_update_s(self) -> float:
        """Least seconds of the slowest optimizer of all ranks."""
        placed = self.placed
        return max(
            float(placed.update_s[placed.rank == rank].min(initial=np.inf))
            for rank in range(self._layout.pipeline)
        )

    def whole_s(
        self,
        limit_s: float,
        means: list[PathWeights],
        tried: Callable[[Any], float] | None = None,
        *,
        actions: int,
        most_columns: int,
        iterations: int,
    ) -> float:
        """Return seconds that no way of whole columns simulates below, or `limit_s` if less.

        By the means of paths that are known, of mixed columns if none is, all ways within the
        limit are listed and simulated (`planner.search.bounds.whole_ways`); the paths of the least
        are added.  It is a plan that is `tried`, where columns are what ranks hold; `is_solved` if
        it takes that, or there is none.  Where ways are too many those within a lower limit are
        listed.  The relaxation takes a multiple of `most_columns` and of simplex `iterations` at
        most, and none of a step with more `actions`.
        """
        if not means:
            too_many = len(self._columns) > RELAXED_COLUMNS * most_columns
            if too_many or is_long(self._layout, actions):
                return 0.0
            program = self._program()
            mixed_s = program.solve(limit_s, None, 0, RELAXED * iterations)
            means += program.weights()
            if mixed_s >= limit_s or not means:
                return mixed_s
        once_s = self._least_update_s + self._step_s
        low_s, upper_s = 0.0, limit_s
        labels, waiting_s = self._labels(means)
        for _ in range(TRIES):
            listed = labels.within(upper_s * (1 + SLACK) - once_s - waiting_s)
            if listed is None:
                least_s = (labels.least_s() + waiting_s).max() * (1 - SLACK) + once_s
                low_s = max(low_s, float(least_s))
                upper_s = (low_s + upper_s) / 2
                continue
            ways, sums_s = listed
            if upper_s == limit_s:
                self._spans = self._spans_of(np.unique(ways))
            paths_s = (sums_s + waiting_s[:, None]).max(axis=0, initial=0.0) + once_s
            least_s, way = self._least_way(ways, paths_s, upper_s, means)
            low_s = max(low_s, least_s * (1 - SETTLED))
            self.is_solved = way is None and least_s == limit_s
            if way is not None and tried is not None:
                split = split_of_columns(way, self._columns, self.placed, self._read)
                self.is_solved = tried(split) <= least_s * (1 + CLOSE)
            if way is not None or upper_s == limit_s:
                break
            upper_s = limit_s
            labels, waiting_s = self._labels(means)  # simulated ways have added paths
        return min(limit_s, low_s)

    def _labels(self, means: Sequence[PathWeights]) -> tuple[WayLabels, Floats]:
        """Return the columns by means of paths; [mean] what transfers take at least."""
        each_s = np.array([self._path_s(weights) for weights in means])
        waiting_s = self._transfer_s * np.array([weights.hops.sum() for weights in means])
        return WayLabels(self.placed, self._layout.pipeline, each_s), waiting_s

    def _is_in_rows(self, ways: Indices) -> NDArray[np.bool_]:
        """[way] Whether the numbers of layers of its ranks are as some row says."""
        if not self._rows:
            return np.ones(len(ways), dtype=bool)
        sizes = self._sizes[self.placed.end[ways]] - self._sizes[self.placed.first[ways]]
        within = np.zeros(len(ways), dtype=bool)
        for row in self._rows:
            fewest, most = np.array(row).T
            within |= ((sizes >= fewest) & (sizes <= most)).all(axis=1)
        return within

    def _least_way(
        self, ways: Indices, least_s: Floats, limit_s: float, means: list[PathWeights]
    ) -> tuple[float, Indices | None]:
        """Return what no way simulates below, or a limit, and the fastest way that is below it.

        `least_s` [way] is what they take at least.
        """
        is_in_rows = self._is_in_rows(ways)
        ways, least_s = ways[is_in_rows], least_s[is_in_rows]
        placed, layout = self.placed, self._layout
        graph = graph_of_layout(layout)
        best_s, best = limit_s, None
        together = max(1, min(TOGETHER, NODES // len(graph.nodes)))
        for _ in range(ROUNDS):
            order = np.argsort(least_s, kind="stable")
            order = order[least_s[order] < best_s]
            ways, least_s = ways[order], least_s[order]
            if not len(ways):
                break
            some, ways = ways[:together], ways[together:]
            seconds = placed.seconds[some].sum(axis=1).reshape(len(some), -1).T
            transfer_s = self._transfer_s + self._rank_hops.T @ placed.hop_s[some].T
            ends_s = graph.longest_of_many(np.ascontiguousarray(seconds), transfer_s)
            lasts_s = ends_s[list(graph.ends)] + placed.sync_s[some].T
            simulated_s = lasts_s.max(axis=0) + placed.update_s[some].max(axis=1) + self._step_s
            simulated_s = np.maximum(simulated_s, least_s[:together])
            at = int(simulated_s.argmin())
            if simulated_s[at] < best_s:
                best_s, best = float(simulated_s[at]), some[at]
            path = graph.path(
                int(lasts_s[:, at].argmax()), ends_s[:, at].tolist(), transfer_s[:, at].tolist()
            )
            weights = weights_of(path, layout.pipeline)
            if len(means) < MOST_PATHS:
                means.append(weights)
            path_s = self._path_s(weights)[ways].sum(axis=1) + placed.update_s[ways].max(axis=1)
            path_s += weights.hops.sum() * self._transfer_s + self._step_s
            least_s = np.maximum(least_s[together:], path_s)
        return min(best_s, float(least_s.min(initial=np.inf))), best

    def _program(self) -> Program:
        program = Program(
            self._layout, self._columns, self.placed, self._read, self._step_s, self._transfer_s
        )
        if self._rows:
            program.keep_one(self._rows, self._sizes)
        return program

    def optimum(
        self,
        limit_s: float,
        tried: Callable[[Any], float],
        *,
        nodes: int,
        iterations: int = MOST_ITERATIONS,
    ) -> float:
        """Return seconds that no plan simulates below, or `limit_s` if that is less.

        `tried` simulates a solution and returns its step.  It stops at `nodes` of a tree, or after
        the round with which all have taken more simplex `iterations`.
        """
        low_s = self.cut_s(limit_s)
        if low_s >= limit_s:
            return limit_s
        return max(low_s, self._program().solve(limit_s, tried, nodes, iterations))


def is_long(layout: Layout, actions: int) -> bool:
    """Return whether a step has more actions than that."""
    return 2 * layout.micro_batches * layout.stages > actions


def of_chain(
    candidates: Candidates,
    layout: Layout,
    stated: StatedProblem,
    limit_s: float,
    *,
    ways: int,
    fastest_only: bool = False,
    most_columns: int = MOST_COLUMNS,
) -> ColumnProgram | None:
    """Return what ranks may hold; None where that is too much, or the layout has what is not known.

    Too much are more than `ways` to choose options on a rank, or more columns.  With `fastest_only`
    no choice is below what there is (`choices_of`).
    """
    costs, instance = stated
    if layout.pipeline == 1 or instance.used_bytes is None:
        return None
    prices = candidates.model, candidates.recompute, costs
    columns = Columns(*prices, layout, instance, limit_s, ways)

    def read(_: Sequence[int], cuts: Sequence[int], options: Sequence[int]) -> Solution:
        return evaluate_split(instance, cuts, options)

    links = [[np.full(len(columns.places.sizes), costs.transfer_s)]]
    return choices_of(
        layout,
        [columns],
        [layout.pipeline],
        links,
        limit_s,
        read,
        fastest_only=fastest_only,
        most_columns=most_columns,
    )


def choices_of(
    layout: Layout,
    of_types: Sequence[Columns],
    numbers: Sequence[int],
    links: Links,
    limit_s: float,
    read: Read,
    *,
    fastest_only: bool = False,
    within: Spans | None = None,
    most_columns: int = MOST_COLUMNS,
) -> ColumnProgram | None:
    """Return what ranks may hold on every type; None where that is too much.

    `of_types` and `numbers` [type] are its columns and how many ranks it has.  With `fastest_only`
    there is one column for all that begin and end alike, no slower than any: within memory by sums
    of bytes, or, `within` spans that are known, by the bytes that a rank holds.
    On its type a rank's layers take at most as long as the limit leaves, at their fastest; those
    behind it do on whichever type is the fastest.  Of a graph, whose places are many, what ranks
    may hold is between places of such columns (`feasible_spans`).
    """
    some, exact = of_types[0], within is not None
    if not fastest_only and not some.places.alike and within is None:
        loose = choices_of(layout, of_types, numbers, links, limit_s, read, fastest_only=True)
        within = None if loose is None else loose.feasible_spans(limit_s)
    stages, places, ranks = some.instance.stages, some.places, layout.pipeline
    most_s = (limit_s - some.costs.step_s) / layout.micro_batches * (1 + ROUNDING)
    own_s = [table.fastest_s for table in of_types]
    totals_s = [places.totals(own_times) for own_times in own_s]
    total_s = places.totals(np.min(own_s, axis=0).tolist())
    sizes, count = places.sizes, len(some.instance.layers)
    able = [np.arange(len(sizes)) == len(sizes) - 1]
    """[rank, place] True if the ranks from it on can hold what lies behind."""
    for _ in range(ranks):
        reached = total_s[able[-1]] <= total_s[:, None] + most_s
        able.append((reached & places.is_nested[:, able[-1]]).any(axis=1))
    able.reverse()
    columns: list[RankColumn] = []
    where: list[tuple[int, int, int, int]] = []
    starts = {0} if able[0][0] else set[int]()
    rows = some.instance.sizes
    for rank in range(ranks):
        following: set[int] = set()
        behind = sum(stage.least_layers for stage in stages[rank + 1 :])
        least_layers, most_layers = stages[rank].least_layers, count
        if rows:
            least_layers = max(least_layers, min(row[rank][0] for row in rows))
            most_layers = max(row[rank][1] for row in rows)
        for number, first in itertools.product(range(len(of_types)), sorted(starts)):
            layers = sizes - sizes[first]
            ends = places.is_nested[first] & able[rank + 1] & (sizes <= count - behind)
            ends &= (layers >= least_layers) & (layers <= most_layers)
            ends &= totals_s[number] <= totals_s[number][first] + most_s
            for end in np.flatnonzero(ends).tolist():
                if within is not None and (rank, first, end, number) not in within:
                    continue
                options = of_types[number].columns_between(
                    rank, first, end, fastest_only=fastest_only, exact=exact
                )
                if options is None or len(columns) + len(options) > most_columns:
                    return None
                if options:
                    following.add(end)
                columns += options
                where += [(rank, first, end, number)] * len(options)
        starts = following
    return ColumnProgram(
        layout, of_types, *join_columns(layout, columns, where, numbers, links, some.costs), read
    )


class LeastFigures(NamedTuple):
    """The fastest option of a kind of layer with its figures, and the least bytes of any."""

    fastest: int
    time_s: float
    summed_bytes: float
    transient_bytes: float
    leanest_bytes: float
    """Least that adds up of any option."""


class Columns:
    """The columns of a layout on one type that are not as slow as the limit by themselves."""

    def __init__(
        self,
        model: ModelGraph,
        recompute: Recomputes,
        costs: LayoutCosts,
        layout: Layout,
        instance: Instance,
        limit_s: float,
        ways: int,
        places: CutPoints | None = None,
    ) -> None:
        self.costs = costs
        self._ties = [tie for tie in instance.sides if not tie.options]
        self._kept: list[list[int]] = []
        """[kind][option] Its number before, where options of some layers are required."""
        self.instance = instance
        if len(self._ties) < len(instance.sides):
            narrow, self._kept = with_allowed_options(instance)
            self.instance = narrow or instance
        instance = self.instance
        self.places = places or CutPoints(Prefixes(len(instance.layers)))
        self.fastest_s = [
            min(option.time_s for option in instance.kinds[kind]) for kind in instance.layers
        ]
        self._layout = layout
        self._splits = layout.executed_schedule.splits_backward
        self._ways = ways
        self._problem = RankProblem(model, layout, costs, recompute)
        self._home = rank_of_stage(
            layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
        )
        self._room_s = limit_s - costs.step_s
        self._layer_s: dict[tuple[int, int], tuple[float, ...]] = {}
        self._known: dict[tuple[object, ...], list[RankColumn] | None] = {}
        self._spans: dict[tuple[int, int], tuple[int, ...]] = {}
        """Kinds of the entries between two places."""
        self._worth: dict[tuple[int, int], list[int]] = {}
        """[rank, kind] Options that no other is as fast as with as few bytes."""
        self._best_of: dict[int, list[int]] = {}
        """[kind] Options that no other is as fast as with as few bytes of every sort."""
        self._least_of: dict[tuple[int, int], LeastFigures] = {}
        """By rank and kind."""
        self._figures: dict[str, Floats] = {}
        """By kind of layer."""
        self._sums: dict[tuple[object, ...], tuple[list[int], Indices, Floats]] = {}
        """Choices of the main kind that are within memory by sums of bytes."""
        self._ways_alone: dict[tuple[object, ...], _KnownWays] = {}
        """All of them, with their seconds, summed and largest transient bytes."""
        self._least_s: dict[tuple[object, ...], float] = {}
        """By rank and the number of entries of each kind: least seconds within memory by sums."""

    def columns_between(
        self, rank: int, first: int, end: int, *, fastest_only: bool = False, exact: bool = False
    ) -> list[RankColumn] | None:
        """Return the columns of a rank between two places; None where there are too many.

        With `fastest_only` one that no column is below, or none; it is `exact` if the bytes that a
        rank holds count, and not sums.
        """
        if self._ties:
            layers = set(self.places.between(first, end))
            if not all(tie.allows(rank, layers) for tie in self._ties):
                return []
        kinds = self._kinds_between(first, end)
        key = fastest_only, exact, rank, kinds if self.places.alike else (first, end)
        if key not in self._known:
            which = partial(self._quickest, exact=exact) if fastest_only else self._new
            self._known[key] = which(rank, first, end, kinds)
        return self._known[key]

    def _kinds_between(self, first: int, end: int) -> tuple[int, ...]:
        """Return the kinds of the entries between two places."""
        kinds = self._spans.get((first, end))
        if kinds is None:
            layers = self.places.between(first, end)
            kinds = self._spans[first, end] = tuple(self.instance.layers[at] for at in layers)
        return kinds

    def _too_many(self, kinds: tuple[int, ...]) -> bool:
        return self._ways_to_choose(kinds) > self._ways

    def _ways_to_choose(self, kinds: tuple[int, ...]) -> int:
        counts = {kind: kinds.count(kind) for kind in kinds}
        options = self.instance.kinds
        return math.prod(math.comb(n + len(options[kind]) - 1, n) for kind, n in counts.items())

    def _new(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...]
    ) -> list[RankColumn] | None:
        if self._too_many(kinds):
            return None
        if not self._fits_leanest(rank, (first, end)):
            return []
        most, others, numbers = self._main_kind_and_rest(kinds)
        tables = self.instance.kinds
        columns = []
        earlier: list[tuple[list[Option], list[tuple[int, ...]]]] = []
        """Options of the others that were gone through, and how many of the main kind are slower
        beside them at least."""
        compares = not any(map(self._trades_passes, others))
        for beside in sorted(numbers, key=self._seconds_of(others)):
            given = dict(zip(others, beside, strict=True))
            taken = [tables[kind][at] for kind in others for at in given[kind]]
            slower = [
                entry
                for faster, falling in earlier
                if falling and compares and no_slower(faster, taken)
                for entry in falling
            ]
            before = len(slower)
            for options in self._minimal(rank, (first, end), kinds, most, given, slower):
                columns.append(self._column(rank, first, end, options))
            earlier.append((taken, slower[before:]))
        return columns

    def _trades_passes(self, kind: int) -> bool:
        """Return whether options of a kind take less forward and more backward than others."""
        table = self.instance.kinds[kind]
        least_s = min(option.forward_s for option in table), min(o.backward_s for o in table)
        return all((option.forward_s, option.backward_s) != least_s for option in table)

    def _seconds_of(self, kinds: Sequence[int]) -> Callable[[Sequence[Sequence[int]]], float]:
        """Return what tells the seconds of options [kind][layer]."""
        tables = self.instance.kinds

        def seconds(beside: Sequence[Sequence[int]]) -> float:
            return sum(
                tables[kind][at].time_s
                for kind, options in zip(kinds, beside, strict=True)
                for at in options
            )

        return seconds

    def _minimal(
        self,
        rank: int,
        span: tuple[int, int],
        kinds: tuple[int, ...],
        most: tuple[int, int],
        given: dict[int, tuple[int, ...]],
        entries: list[tuple[int, ...]],
    ) -> Iterator[tuple[int, ...]]:
        """Yield the options of entries that fit, where no layer's can be a faster one.

        `most` is the kind that most of them have and how many; the others' options are `given`.
        How many layers have at least the n-th slower option is added to `entries`, which has those
        that fit with others' options no slower than these.
        Of several stages those with layers that store less come first: their seconds compare layer
        by layer if what stores less takes longer.
        """
        (main, _), tables = most, self.instance.kinds
        order, numbers, _ = self._within_sums(rank, most, given)
        stored = [tables[main][at].stored_bytes for at in order]
        compares = self._layout.virtual_stages == 1 or stored == sorted(stored, reverse=True)
        compares &= not self._trades_passes(main)
        for number in numbers.tolist():
            slower = tuple(itertools.accumulate(reversed(number[1:])))[::-1]
            if compares and any(
                all(a <= b for a, b in zip(entry, slower, strict=True)) for entry in entries
            ):
                continue
            picked = tuple(at for at, n in zip(order, number, strict=True) for _ in range(n))
            options = _along(kinds, {**given, main: picked})
            if self._fits(rank, span, options):
                entries.append(slower)
                yield options

    def _within_sums(
        self,
        rank: int,
        most: tuple[int, int],
        given: dict[int, tuple[int, ...]],
        among: Sequence[int] | None = None,
    ) -> tuple[list[int], Indices, Floats]:
        """Return options of the main kind, the fastest first, and how many layers may have each.

        [way, option], and [way] seconds of all entries.  Ways are within the limit alone, and
        within memory by sums of bytes, which are no more than what ranks hold, and quicker.
        Options are those `among` the main kind's where given.
        """
        key = rank, most, tuple(sorted(given.items())), among is None
        if key not in self._sums:
            others = [
                self.instance.kinds[kind][at] for kind, options in given.items() for at in options
            ]
            order, numbers, passes_s, able = self._ways_beside(
                rank, most, self._sums_of(rank, others), among
            )
            self._sums[key] = order, numbers[able], passes_s[able]
        return self._sums[key]

    def _ways_beside(
        self,
        rank: int,
        most: tuple[int, int],
        others: Sequence[float] | Floats,
        among: Sequence[int] | None = None,
    ) -> tuple[list[int], Indices, Floats, NDArray[np.bool_]]:
        """Return the same of all ways; [way] which of them are within the limit and memory.

        The `others` are given by their `_sums_of`.
        """
        key = rank, most, among is None
        (main, number), tables, stage = most, self.instance.kinds, self.instance.stages[rank]
        if key not in self._ways_alone:
            table = tables[main]
            order = sorted(among or range(len(table)), key=lambda at: table[at].time_s)
            numbers = option_counts(number, len(order))
            transient = np.array([table[at].transient_bytes for at in order])
            self._ways_alone[key] = (
                order,
                numbers,
                numbers @ np.array([table[at].time_s for at in order]),
                numbers @ np.array([stage.summed_bytes(table[at]) for at in order]),
                np.where(numbers > 0, transient, 0.0).max(axis=1, initial=0.0),
            )
        order, numbers, alone_s, summed_bytes, widest = self._ways_alone[key]
        others_s, others_bytes, transient_bytes = others
        passes_s = others_s + alone_s
        able = self._layout.micro_batches * passes_s <= self._room_s * (1 + ROUNDING)
        summed_bytes = summed_bytes + others_bytes
        widest = np.maximum(widest, transient_bytes)
        able &= summed_bytes + widest <= stage.room_bytes + ROUNDING * np.abs(summed_bytes)
        return order, numbers, passes_s, able

    def _sums_of(self, rank: int, options: Sequence[Option]) -> tuple[float, float, float]:
        """Return the seconds of some options, their bytes that add up, the largest of the rest."""
        stage = self.instance.stages[rank]
        return (
            sum(option.time_s for option in options),
            sum(map(stage.summed_bytes, options)),
            max((option.transient_bytes for option in options), default=0.0),
        )

    def _quickest(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...], *, exact: bool = False
    ) -> list[RankColumn]:
        """Return a column that no other between two places is below; none if there is none.

        It has the seconds of the fastest options, and what memory takes more by sums of bytes, or
        by `exact` ones, which does not go to the rank's first stage if it has others.
        """
        stage, counts = self.instance.stages[rank], Counter(kinds)
        least = [(self._least(rank, kind), number) for kind, number in counts.items()]
        least_s = fastest_s = sum(number * of_kind.time_s for of_kind, number in least)
        if self._layout.micro_batches * least_s > self._room_s * (1 + ROUNDING):
            return []
        leanest = sum(number * of_kind.leanest_bytes for of_kind, number in least)
        if leanest > stage.room_bytes + ROUNDING * abs(leanest):
            return []
        summed_bytes = sum(number * of_kind.summed_bytes for of_kind, number in least)
        summed_bytes += max((of_kind.transient_bytes for of_kind, _ in least), default=0.0)
        if exact and self._ways_to_choose(kinds) <= MOST_EXACT:
            least_s = max(least_s, self._fitting_s(rank, (first, end), kinds))
        elif summed_bytes > stage.free_bytes:
            key = rank, *sorted(counts.items())
            if key not in self._least_s:
                self._least_s[key] = self._knapsack_s(rank, kinds)
            least_s = self._least_s[key]
        if least_s == math.inf:
            return []
        fastest = self._fastest(rank, kinds)
        column, of_fastest = (
            self._column(rank, first, end, fastest, least=least) for least in (True, False)
        )
        # Options have seconds beside those of layers, the same for all of a kind.
        more_s = least_s * (1 - ROUNDING) - fastest_s
        more_s += float((of_fastest.seconds[:2] - column.seconds[:2]).sum())
        if more_s <= 0.0:
            return [column]
        return [replace(column, more_s=more_s, more_in=self._varying(rank, first, end, kinds))]

    def _varying(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...]
    ) -> NDArray[np.bool_]:
        """[forward, inputs, weights; stage] Where choices of the layers between two places differ.

        All of it does where backwards are whole, and inputs have what weights have.
        """
        varying = np.zeros((3, self._layout.stages), dtype=bool)
        options = self._numbers((first, end), self._fastest(rank, kinds))
        for stage, layers in self._contents(rank, first, end, options).items():
            for position in {position for position, _ in layers}:
                figures = self._pass_seconds(position)[:, [0, 2, 3]]
                varying[:, stage] |= figures.max(axis=0) > figures.min(axis=0) * (1 + ROUNDING)
        if not self._splits:
            varying[1] |= varying[2]
            varying[2] = False
        return varying

    def _pass_seconds(self, position: int) -> Floats:
        """[choice, kind of action] Seconds of a layer: forward, backward, its inputs, weights."""
        kind = self._problem.model.chain_kinds[position]
        if kind not in self._figures:
            self._figures[kind] = np.array(
                [
                    (
                        part.forward_s,
                        part.backward_s,
                        part.backward_s - part.figures.weight_s,
                        part.figures.weight_s,
                    )
                    for part in self.costs.parts[kind]
                ]
            )
        return self._figures[kind]

    def _knapsack_s(self, rank: int, kinds: tuple[int, ...]) -> float:
        """Return the least seconds of entries of some kinds within memory by sums of bytes."""
        worth = {kind: self._worthwhile(rank, kind) for kind in set(kinds)}
        most, others, numbers = self._main_kind_and_rest(kinds, worth)
        tables, least_s = self.instance.kinds, math.inf
        sums = [
            self._sums_of(
                rank,
                [
                    tables[kind][at]
                    for kind, options in zip(others, beside, strict=True)
                    for at in options
                ],
            )
            for beside in numbers
        ]
        every = np.array(sums).T[:, :, None]
        for first in range(0, len(sums), COMPARED):
            some = every[:, first : first + COMPARED]
            _, _, passes_s, able = self._ways_beside(rank, most, some, worth[most[0]])
            least_s = min(least_s, float(passes_s.min(initial=math.inf, where=able)))
        return least_s

    def _fitting_s(self, rank: int, span: tuple[int, int], kinds: tuple[int, ...]) -> float:
        """Return the least seconds of entries within the bytes that a rank holds, or less.

        That is what the next way takes where none of the fastest fits.
        """
        used = self.instance.used_bytes
        assert used is not None, "asked for where it is"
        if used.of_many is None:
            return 0.0
        options, seconds = self._every_way(rank, span, kinds)
        layers, before = self.places.between(*span), self.places.places_before(span[0])
        capacity = self.instance.stages[rank].capacity_bytes
        order = np.argsort(seconds, kind="stable")
        for first, end in itertools.pairwise((0, *FIRST_WAYS)):
            if first >= len(order):
                return math.inf
            some = order[first:end]
            sizes = used.of_many(rank, before, layers, options[some])
            fits = sizes <= capacity + ROUNDING * abs(capacity)
            if fits.any():
                return float(seconds[some[int(np.argmax(fits))]])
        return float(seconds[order[end:]].min(initial=math.inf))

    def _every_way(
        self, rank: int, span: tuple[int, int], kinds: tuple[int, ...]
    ) -> tuple[Indices, Floats]:
        """[way, entry] Options of entries that are within memory by sums of bytes; [way] seconds.

        Of like entries those that recompute more come first, as in `_along`.
        """
        among = {
            kind: self._best_options(kind) if number == 1 else range(len(self.instance.kinds[kind]))
            for kind, number in Counter(kinds).items()
        }
        (main, count), others, numbers = self._main_kind_and_rest(kinds, among)
        is_main = np.array([kind == main for kind in kinds])
        rows, seconds = list[Indices](), list[Floats]()
        for beside in numbers:
            given = dict(zip(others, beside, strict=True))
            order, ways, passes_s = self._within_sums(rank, (main, count), given)
            falling = np.argsort(order)[::-1]
            each = np.tile(np.array(order)[falling], len(ways))
            options = np.zeros((len(ways), len(kinds)), dtype=np.intp)
            options[:, is_main] = np.repeat(each, ways[:, falling].ravel()).reshape(-1, count)
            options[:, ~is_main] = _along(tuple(kind for kind in kinds if kind != main), given)
            rows.append(options)
            seconds.append(passes_s)
        every = np.concatenate(rows)
        if self._kept:
            numbered = [self._numbers(span, tuple(row)) for row in every.tolist()]
            every = np.array(numbered, dtype=np.intp).reshape(every.shape)
        return every, np.concatenate(seconds)

    def _best_options(self, kind: int) -> list[int]:
        """Return options of a kind that none other is as fast as with as few bytes of every sort.

        Of a single entry any of these does for the others: its place does not depend on them.
        """
        if kind not in self._best_of:
            entry = self.instance.layers.index(kind)
            figures = []
            for at, option in enumerate(self.instance.kinds[kind]):
                layer_bytes = self._problem.layer_bytes(entry, self._kept_number(kind, at))
                figures.append((option.time_s, *layer_bytes))
            self._best_of[kind] = minimal_rows(figures)
        return self._best_of[kind]

    def _kept_number(self, kind: int, option: int) -> int:
        return self._kept[kind][option] if self._kept else option

    def _worthwhile(self, rank: int, kind: int) -> list[int]:
        """Return the options of a kind that may make the fastest choice of a rank within sums."""
        if (rank, kind) not in self._worth:
            stage, table = self.instance.stages[rank], self.instance.kinds[kind]
            figures = [
                (option.time_s, stage.summed_bytes(option), option.transient_bytes)
                for option in table
            ]
            self._worth[rank, kind] = minimal_rows(figures)
        return self._worth[rank, kind]

    def _fastest(self, rank: int, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the fastest option of each layer."""
        return tuple(self._least(rank, kind).fastest for kind in kinds)

    def _least(self, rank: int, kind: int) -> LeastFigures:
        """Return the fastest option of a kind with its figures on a rank, and the least bytes."""
        if (rank, kind) not in self._least_of:
            stage, table = self.instance.stages[rank], self.instance.kinds[kind]
            fastest = min(range(len(table)), key=lambda at: table[at].time_s)
            option = table[fastest]
            self._least_of[rank, kind] = LeastFigures(
                fastest,
                option.time_s,
                stage.summed_bytes(option),
                option.transient_bytes,
                min(map(stage.summed_bytes, table)),
            )
        return self._least_of[rank, kind]

    def _main_kind_and_rest(
        self, kinds: tuple[int, ...], among: Mapping[int, Sequence[int]] | None = None
    ) -> tuple[tuple[int, int], list[int], Iterator[tuple[tuple[int, ...], ...]]]:
        """Return the kind that most entries have and how many, and the others with their options.

        [way][other kind] One for each entry of the kind, `among` some of each kind where given.
        """
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        main = max(counts, key=lambda kind: counts[kind])
        others = [kind for kind in counts if kind != main]
        combinations = (
            itertools.combinations_with_replacement(
                among[kind] if among else range(len(self.instance.kinds[kind])), counts[kind]
            )
            for kind in others
        )
        return (main, counts[main]), others, itertools.product(*combinations)

    def _fits_leanest(self, rank: int, span: tuple[int, int]) -> bool:
        """Return whether the least bytes of any options are within memory."""
        used = self.instance.used_bytes
        if used is None or used.fewest is None:
            return True
        layers, before = self.places.between(*span), self.places.places_before(span[0])
        capacity = self.instance.stages[rank].capacity_bytes
        return used.fewest(rank, before, layers) <= capacity + ROUNDING * abs(capacity)

    def _fits(self, rank: int, span: tuple[int, int], options: tuple[int, ...]) -> bool:
        instance = self.instance
        assert instance.used_bytes is not None
        layers, before = self.places.between(*span), self.places.places_before(span[0])
        used = instance.used_bytes.of(rank, before, layers, self._numbers(span, options))
        capacity = instance.stages[rank].capacity_bytes
        return used <= capacity + ROUNDING * abs(capacity)

    def _numbers(self, span: tuple[int, int], options: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of options among all that their layers have."""
        if not self._kept:
            return options
        kinds = [self.instance.layers[at] for at in self.places.between(*span)]
        return tuple(self._kept[kind][at] for kind, at in zip(kinds, options, strict=True))

    def _contents(
        self, rank: int, first: int, end: int, options: tuple[int, ...]
    ) -> dict[int, list[tuple[int, int]]]:
        """[stage] Position and choice of its layers."""
        return self._problem.contents(rank, first, options)

    def _column(
        self,
        rank: int,
        first: int,
        end: int,
        options: tuple[int, ...],
        *,
        least: bool = False,
    ) -> RankColumn:
        """Return the column of some options, or of the `least` that each layer's choices take.

        One choice may take less forward and another less backward: the loss in chunks.
        """
        action_s, splits = self.costs.action_s, self._splits
        seconds = np.zeros((len(KINDS), self._layout.stages))
        sync_s = update_s = 0.0
        options = self._numbers((first, end), options)
        for stage, layers in self._contents(rank, first, end, options).items():
            figures = np.sum([self._layer(at, choice) for at, choice in layers], axis=0)
            forward_s, backward_s, weight_s, synced_s, updated_s = figures
            if least:
                every = sum(self._pass_seconds(at).min(axis=0) for at, _ in layers)
                forward_s, backward_s, input_s, weight_s = np.asarray(every).tolist()
                # Of choices that differ the least is no more than the difference of the others.
                seconds[2, stage] = splits * min(0.0, input_s - (backward_s - weight_s))
            seconds[0, stage] = forward_s + action_s
            seconds[1, stage] = backward_s + (1 + splits) * action_s
            if splits:
                seconds[3, stage] = weight_s + action_s
            sync_s, update_s = sync_s + synced_s, update_s + updated_s
        return RankColumn(rank, options, seconds, sync_s, update_s)

    def _layer(self, position: int, choice: int) -> tuple[float, ...]:
        """Return forward, backward, weights, and the least of any choice once per step."""
        key = position, choice
        if key not in self._layer_s:
            part = self._problem.part(position, choice)
            kind = self._problem.model.chain_kinds[position]
            every = self.costs.parts[kind]
            self._layer_s[key] = (
                part.forward_s,
                part.backward_s,
                part.figures.weight_s,
                min(option.sync_s for option in every),
                min(option.optimizer_s + option.stream_s for option in every),
            )
        return self._layer_s[key]


def no_slower(faster: Sequence[Option], slower: Sequence[Option]) -> bool:
    """Return whether options of some layers take no longer than others, each way and once."""
    return all(
        a.forward_s <= b.forward_s and a.backward_s <= b.backward_s and a.sync_s <= b.sync_s
        for a, b in zip(faster, slower, strict=True)
    )


def minimal_rows(rows: Sequence[tuple[float, ...]]) -> list[int]:
    """Return rows than which none other is as low in every figure, of equal ones the first.

    >>> minimal_rows([(2, 1), (1, 2), (2, 2), (1, 2)])
    [1, 0]
    """
    kept: list[int] = []
    for at in sorted(range(len(rows)), key=rows.__getitem__):
        if not any(
            all(a <= b for a, b in zip(rows[other], rows[at], strict=True)) for other in kept
        ):
            kept.append(at)
    return kept


def join_columns(
    layout: Layout,
    columns: Sequence[RankColumn],
    where: Sequence[tuple[int, int, int, int]],
    numbers: Sequence[int],
    links: Links,
    costs: LayoutCosts,
) -> tuple[list[RankColumn], Placed]:
    """Return columns by rank, first place, end and type, with what their transfers take.

    Where links differ, a place is one for each pair of types that may meet there, so that a column
    is distinguished by the types of the ranks beside it.
    """
    count, last = len(numbers), layout.pipeline - 1
    types = range(count)
    able = [(a, b) for a in types for b in types if a != b or numbers[a] > 1]
    link = links[able[0][0]][able[0][1]] if able else links[0][0]
    if all(np.array_equal(link, links[a][b]) for a, b in able):
        able = [(0, 0)]  # whatever meets
        links = [[link] * len(numbers)] * len(numbers)
    joints = len(numbers) ** 2 if len(able) > 1 else 1
    at = np.array(where, dtype=np.intp).reshape(-1, 4)
    places, pair_before, pair_after = np.zeros((3, len(at)), dtype=np.intp)
    places += np.arange(len(at))
    if joints > 1:
        # [column] Once for each pair of types that may meet at its ends.
        pairs = [
            (column, a, b)
            for column, (rank, _, _, number) in enumerate(where)
            for a in ([x * count + y for x, y in able if y == number] if rank else [0])
            for b in ([x * count + y for x, y in able if x == number] if rank < last else [0])
        ]
        places, pair_before, pair_after = np.array(pairs, dtype=np.intp).reshape(-1, 3).T
    rank_of, first_of, end_of, number_of = at[places].T
    every_s = np.array([links[a][b] for a in types for b in types])
    back = np.where(rank_of > 0, every_s[pair_before, first_of], 0.0)
    ahead = np.where(rank_of < last, every_s[pair_after, end_of], 0.0)
    first_of, end_of = first_of * joints + pair_before, end_of * joints + pair_after
    shape = len(columns), len(KINDS), layout.stages
    seconds = np.array([column.seconds for column in columns]).reshape(shape)[places]
    home = rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    for (kind, step), (stage, rank) in itertools.product(((0, 1), (1, -1)), enumerate(home)):
        if not 0 <= stage + step < layout.stages or home[stage + step] == rank:
            continue
        to = home[stage + step] - rank
        each_s = {1: ahead, -1: back}.get(to, np.full(len(places), costs.transfer_s))
        mine = rank_of == rank
        seconds[mine, kind, stage] += costs.waits * each_s[mine]
    if layout.executed_schedule.splits_backward:
        seconds[:, 2] += seconds[:, 1] - seconds[:, 3]
    chosen = [columns[at] for at in places.tolist()]
    nowhere = np.zeros((3, layout.stages), dtype=bool)
    return chosen, Placed(
        rank=rank_of,
        first=first_of,
        end=end_of,
        seconds=seconds,
        sync_s=np.array([column.sync_s for column in chosen]),
        update_s=np.array([column.update_s for column in chosen]),
        number=number_of,
        hop_s=(1 - costs.waits) * (rank_of < last) * (ahead - costs.transfer_s),
        numbers=tuple(numbers),
        more_s=np.array([column.more_s for column in chosen]),
        more_in=np.array(
            [nowhere if column.more_in is None else column.more_in for column in chosen]
        ).reshape(-1, 3, layout.stages),
        joints=joints,
    )


def _along(kinds: tuple[int, ...], picked: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the option of each entry; of like ones those that recompute more come first."""
    left = {kind: sorted(options, reverse=True) for kind, options in picked.items()}
    return tuple(left[kind].pop(0) for kind in kinds)


_KnownWays = tuple[list[int], Indices, Floats, Floats, Floats]


@lru_cache(maxsize=512)
def option_counts(number: int, options: int) -> Indices:
    """[way, option] How many of the layers have each, those with the fewest slow ones first.

    >>> option_counts(2, 3).tolist(), option_counts(2, 1).tolist()
    ([[2, 0, 0], [1, 1, 0], [1, 0, 1], [0, 2, 0], [0, 1, 1], [0, 0, 2]], [[2]])
    """
    every = list(_falling(number, options - 1))
    slower = np.array(every, dtype=np.intp).reshape(len(every), options - 1)
    most, none = np.full((len(slower), 1), number), np.zeros((len(slower), 1), dtype=np.intp)
    differences: Indices = np.hstack([most, slower]) - np.hstack([slower, none])
    return differences


def _falling(most: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield falling rows of `count` numbers up to `most`, the smallest first."""
    if not count:
        yield ()
        return
    for first in range(most + 1):
        for rest in _falling(first, count - 1):
            yield (first, *rest)


def graph_of_layout(layout: Layout) -> Graph:
    """Return the graph of a layout's step."""
    return graph_of(
        layout.executed_schedule.name,
        stages=layout.stages,
        micro_batches=layout.micro_batches,
        virtual_stages=layout.virtual_stages,
    )


def hops_behind(layout: Layout) -> Floats:
    """[rank, boundary] 1 if the boundary lies between the rank and the next."""
    home = rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    behind = np.zeros((layout.pipeline, layout.stages - 1))
    for boundary, pair in enumerate(itertools.pairwise(home)):
        if abs(pair[0] - pair[1]) == 1:
            behind[min(pair), boundary] = 1.0
    return behind


def _stage_mask(layout: Layout) -> NDArray[np.bool_]:
    """[rank, stage] Whether the rank has it."""
    home = rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    stages: NDArray[np.bool_] = np.arange(layout.pipeline)[:, None] == np.array(home)
    return stages


class Program:
    """The program in HiGHS: columns, then ω and θ."""

    def __init__(
        self,
        layout: Layout,
        columns: Sequence[RankColumn],
        placed: Placed,
        read: Read,
        step_s: float,
        transfer_s: float,
    ) -> None:
        self._layout, self._columns, self._read = layout, columns, read
        self._step_s = step_s
        self._transfer_s = np.full(layout.stages - 1, transfer_s)
        self._hops = bool(placed.hop_s.any())
        self._behind = hops_behind(layout)
        self._paths: list[tuple[int, Path]] = []
        """Paths with their rows."""
        self._graph = graph_of_layout(layout)
        self._placed = placed
        self._rank, self._seconds = placed.rank, placed.seconds
        if placed.more_s.any():  # where paths are looked for, it is a part of all backwards
            share = placed.more_s / layout.virtual_stages
            self._seconds = self._seconds.copy()
            self._seconds[:, 1:3] += share[:, None, None] * _stage_mask(layout)[self._rank][:, None]
        self._sync_s, self._update_s = placed.sync_s, placed.update_s
        self._unit_s = layout.micro_batches * float(self._seconds[:, :2].sum(axis=(1, 2)).max())
        self._highs = silent_highs()
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("mip_rel_gap", CLOSE / 4)
        if len(columns) > PRESOLVED_COLUMNS:
            self._highs.setOptionValue("presolve", "off")
        infinite = highspy.kHighsInf
        self._infinite = infinite
        number = len(columns)
        self._whole = list(range(number))
        """Variables that are whole in the end."""
        self._highs.addVars(
            number + 2, np.zeros(number + 2), np.array([1.0] * number + [infinite] * 2)
        )
        for at in (number, number + 1):
            self._highs.changeColCost(at, 1.0)
        self._integer = highspy.HighsVarType.kInteger
        self._optimal = highspy.HighsModelStatus.kOptimal
        self._infeasible = highspy.HighsModelStatus.kInfeasible
        self._links()
        for rank in range(layout.pipeline):
            of_rank = np.flatnonzero(self._rank == rank)
            self.row(
                0.0, infinite, [*of_rank, number], [*(-self._update_s[of_rank] / self._unit_s), 1.0]
            )
            self._add(self._rank_path(rank))
        for number, most in enumerate(placed.numbers) if len(placed.numbers) > 1 else ():
            of_rank = np.flatnonzero(placed.number == number)
            self.row(float(most), float(most), *_ones(of_rank))

    def keep_one(self, rows: Rows, sizes: Indices) -> None:
        """Let ranks hold numbers of layers as one of some rows says; `sizes` [place] lie before it.

        With y_k one for the row that is kept, Σ y = 1, and every rank's column is one of its.
        """
        first = len(self._columns) + 2
        self._highs.addVars(len(rows), np.zeros(len(rows)), np.ones(len(rows)))
        self._whole += range(first, first + len(rows))
        self.row(1.0, 1.0, list(range(first, first + len(rows))), [1.0] * len(rows))
        layers = sizes[self._placed.end] - sizes[self._placed.first]
        for row, kept in enumerate(rows, first):
            for rank, (fewest, most) in enumerate(kept):
                columns = np.flatnonzero(
                    (self._rank == rank) & (layers >= fewest) & (layers <= most)
                )
                self.row(0.0, self._infinite, [*columns, row], [1.0] * len(columns) + [-1.0])

    def _links(self) -> None:
        """Each rank has one column, and begins where the one before it ends."""
        ranks = self._layout.pipeline
        firsts, ends = self._placed.first.tolist(), self._placed.end.tolist()
        self.row(1.0, 1.0, *_ones(np.flatnonzero(self._rank == 0)))
        for rank in range(1, ranks):
            before = np.flatnonzero(self._rank == rank - 1).tolist()
            columns = np.flatnonzero(self._rank == rank).tolist()
            for place in {*(ends[at] for at in before), *(firsts[at] for at in columns)}:
                ending = [at for at in before if ends[at] == place]
                starting = [at for at in columns if firsts[at] == place]
                signs = [1.0] * len(ending) + [-1.0] * len(starting)
                self.row(0.0, 0.0, [*ending, *starting], signs)

    def row(self, lower: float, upper: float, at: Sequence[int], values: Sequence[float]) -> None:
        """Add a row with these values of some variables."""
        places = np.array(at, dtype=np.int32)
        self._highs.addRow(lower, upper, len(places), places, np.array(values, dtype=float))

    def _rank_path(self, rank: int) -> Path:
        """Return the path of all that a rank does."""
        layout = self._layout
        visits = np.zeros((len(KINDS), layout.stages))
        at = self._graph.ends[rank]
        while at >= 0:
            cost, at, _, _ = self._graph.nodes[at]
            visits[cost // layout.stages, cost % layout.stages] += 1
        return Path(rank, visits, np.zeros(layout.stages - 1))

    def _add(self, path: Path) -> None:
        """θ is at least the path, at all stage times."""
        worth = self._placed.visited_s(path.visits)
        worth += np.where(self._rank == path.rank, self._sync_s, 0.0)
        waiting_s = float(path.hops @ self._transfer_s) if len(path.hops) else 0.0
        if self._hops:
            worth += (self._behind @ path.hops)[self._rank] * self._placed.hop_s
        at = np.flatnonzero(worth)
        number = len(self._columns)
        self._paths.append((self._highs.getNumRow(), path))
        self.row(
            waiting_s / self._unit_s,
            self._infinite,
            [*at, number + 1],
            [*(-worth[at] / self._unit_s), 1.0],
        )

    def solve(
        self,
        limit_s: float,
        tried: Callable[[Any], float] | None,
        nodes: int,
        iterations: int,
    ) -> float:
        """Return the least step, or `limit_s` if that is less; without `tried` of mixed columns.

        Of whole columns a row θ + ω <= limit keeps out those that do not beat it.
        """
        self._highs.setOptionValue("mip_max_nodes", nodes)
        number, below = len(self._columns), 0
        # Work, not seconds: a machine that is busy finds the same.
        most = min((ROUND if tried else 1) * iterations, MOST_ITERATIONS)
        self._highs.setOptionValue("simplex_iteration_limit", most)
        low_s, before_s = 0.0, [0.0] * STALLED
        for whole in (False, True) if tried else (False,):
            if whole:
                for at in self._whole:
                    self._highs.changeColIntegrality(at, self._integer)
                below = self._highs.getNumRow()
                self.row(-self._infinite, self._units(limit_s), [number, number + 1], [1.0, 1.0])
            for _ in range(MOST_ROUNDS):
                self._highs.run()
                iterations -= self._highs.getInfo().simplex_iteration_count
                status = self._highs.getModelStatus()
                if status == self._infeasible:
                    return limit_s
                if status != self._optimal:
                    if whole:
                        info = self._highs.getInfo()
                        low_s = max(low_s, self._proven_s(info.mip_dual_bound))
                    return low_s
                # An exhausted tree leaves the last bound of its root in `mip_dual_bound`.
                value = self._highs.getInfo().objective_function_value
                low_s = max(low_s, self._proven_s(value))
                if low_s >= limit_s:
                    return limit_s
                before_s.append(low_s)
                if not tried and low_s - before_s[-STALLED] < LITTLE * (limit_s - low_s):
                    return low_s
                values = np.array(self._highs.getSolution().col_value)
                if whole and tried:
                    values[: len(self._columns)] = values[: len(self._columns)].round()
                    limit_s = min(limit_s, tried(self.solution(values)))
                    self._highs.changeRowBounds(below, -self._infinite, self._units(limit_s))
                if not self._cut_off(values, every=whole):
                    break
                if iterations < 0:
                    return low_s
        return low_s

    def weights(self) -> list[PathWeights]:
        """Return the mean of paths that bounds mixed columns, by the weights of the last round.

        And those of the paths in it.
        """
        duals = np.array(self._highs.getSolution().row_dual)
        weighed = [(duals[row], path) for row, path in self._paths if row < len(duals)]
        every = [
            (share, weights_of(path, self._layout.pipeline)) for share, path in weighed if share > 0
        ]
        total = sum(share for share, _ in every)
        visits, hops, ends = (
            sum(share / total * getattr(weights, figures) for share, weights in every)
            for figures in ("visits", "hops", "ends")
        )
        return (
            [PathWeights(visits, hops, ends), *(weights for _, weights in every)] if every else []
        )

    def _units(self, limit_s: float) -> float:
        """Return what θ + ω is of a step of some seconds, at most."""
        return (limit_s - self._step_s) / self._unit_s * (1 + CLOSE)

    def _proven_s(self, value: float) -> float:
        return value * self._unit_s * (1 - CLOSE) + self._step_s

    def _cut_off(self, values: Floats, *, every: bool) -> bool:
        """Add the longest path at the stage times of a solution; whether θ is below it.

        Or those to `every` rank that θ is below: a relaxation rises as fast with one row a round,
        and its rounds are solved in a third of the time; a program with whole columns is solved
        in fewer rounds.
        """
        chosen, theta = values[: len(self._columns)], values[len(self._columns) + 1]
        seconds = np.einsum("c,cks->ks", chosen, self._seconds)
        synced, transfer_s = self._of_ranks(chosen * self._sync_s), self._transfer_s
        if self._hops:
            transfer_s = transfer_s + self._of_ranks(chosen * self._placed.hop_s) @ self._behind
        delays_s = transfer_s.tolist()
        ends_s = self._graph.longest(seconds.ravel().tolist(), delays_s)
        lasts_s = np.array([ends_s[end] for end in self._graph.ends]) + synced
        longer = np.flatnonzero(lasts_s > theta * self._unit_s * (1 + CLOSE / 2))
        if not every:
            longer = longer[np.argsort(-lasts_s[longer], kind="stable")][:1]
        for rank in longer.tolist():
            self._add(self._graph.path(rank, ends_s, delays_s))
        return len(longer) > 0

    def _of_ranks(self, values: Floats) -> Floats:
        """[rank] Sums of `values` [column]."""
        ranks = range(self._layout.pipeline)
        return np.array([float(values[self._rank == rank].sum()) for rank in ranks])

    def solution(self, values: Floats) -> Any:
        """Return the split that whole columns make."""
        chosen = np.flatnonzero(values[: len(self._columns)] > 0.5)
        chosen = chosen[np.argsort(self._rank[chosen])]
        return split_of_columns(chosen, self._columns, self._placed, self._read)


def split_of_columns(
    chosen: Indices, columns: Sequence[RankColumn], placed: Placed, read: Read
) -> Any:
    """Return the split of the columns that are chosen, one for each rank."""
    options = [option for at in chosen.tolist() for option in columns[at].options]
    ends = (placed.end[chosen] // placed.joints).tolist()
    return read(placed.number[chosen].tolist(), (0, *ends), options)


def weights_of(path: Path, ranks: int) -> PathWeights:
    """Return a path as a mean of one."""
    return PathWeights(path.visits, path.hops, np.arange(ranks) == path.rank)


def _ones(at: NDArray[np.intp]) -> tuple[list[int], list[float]]:
    return at.tolist(), [1.0] * len(at)
