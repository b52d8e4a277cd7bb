"""Layouts where device groups differ, by what they simulate: bounds, splits, and a proof.

The bounds of `planner.search.simulated_bounds` hold for stages of any seconds, so also where they
run on devices of different types:

    T >= m max_r t_r + what it does once       T >= K Σ_r t_r

Of both any mean is a bound too.  With weights w_g = α K + (1 - α) m y_g of a stage on group g,
Σ_g P_g y_g = 1, which even out w_g T_g as far as y_g >= 0 allows,

    T >= Σ_l min_g w_g t_gl

A layout that these leave has its ranks' columns (`planner.search.simulated_program`), one for each
group that a rank may be on.  A way through them that gives every group as many ranks as it has is
a split; the least of all by paths is a bound, and so is the program with a row for each group.
Transfers take what the fastest link between two neighbours takes at least.

Every split that is met on the way is simulated.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.layout_costs import LayoutCosts
from planner.costs.recomputes import Recomputes
from planner.model import ModelGraph
from planner.plan import Layout
from planner.search.certificate import DOMINATED, NO_FASTER, OUT_OF_MEMORY, UNFINISHED
from planner.search.dominance import dominates, twins
from planner.search.layout_queue import Bound, Found, Lost
from planner.search.ranked import Ranked
from planner.search.simulated_bounds import pace
from planner.search.simulated_cuts import Cuts, Placed, least_of
from planner.search.simulated_program import (
    MOST_COLUMNS,
    Column,
    Columns,
    LayoutPrices,
    Program,
    placed,
)
from planner.search.simulated_proof import Effort
from planner.search.spaces.group_stages import computing_problem
from planner.search.spaces.mixed import MixedSpace
from planner.solver.graph_instance import GraphInstance, GraphSolution
from planner.solver.instance import Infeasible, Instance, priced
from planner.solver.solve import least_s, solve
from planner.tolerances import EQUAL, ROUNDING

MOST_MOVES = 120
"""Splits near the best of a layout that are simulated."""
FEW_COLUMNS = 300
"""Of programs that are tried where only one may be: larger ones may take seconds."""

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SimulatedSplit:
    """A split with its plan; `optimal` where no other of its layout simulates faster."""

    plan: Ranked
    optimal: bool


class SimulatedMixed(MixedSpace):
    """The layouts of some groups, with bounds of the simulated step and splits by it."""

    keeps_ties = False

    def __init__(self, own: MixedSpace, effort: Effort) -> None:
        """`own` has the same layouts by the closed form."""
        super().__init__(own.request, own.whole, known=own)
        self._families, self._known_s = own._families, own._known_s
        self.own = own
        self._effort = effort
        self._spent = dict.fromkeys(("bounded", "cut", "solved", "programs"), 0)
        self._started = time.process_time()
        self.found: list[Ranked] = []
        """Plans that were simulated."""

    def _may(self, what: str, most: int) -> bool:
        """Whether another layout may be looked at that closely; it is counted."""
        late = time.process_time() - self._started > self._effort.seconds
        if late or self._spent[what] >= most:
            return False
        self._spent[what] += 1
        return True

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        first, shared, _ = super().bounds
        return [first, shared, ("within memory", self._memory_s)]

    def _dominated(self, layout: Layout) -> bool:
        """Whether another layout of the space is no slower whatever the split, on every group.

        It has the same schedule, and all actions take no longer.
        """
        return any(
            twin.schedule == layout.schedule
            and self.pins.allow(twin)
            and self.refusal(twin) is None
            and all(
                dominates(twin, tables.of(twin), layout, tables.of(layout))
                and _no_slower(tables.of(twin), tables.of(layout))
                for tables in self.costs.tables.values()
            )
            for twin in twins(layout)
        )

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by layers alone, memory ignored."""
        fastest_s, _ = self.passes_s(layout)
        return self._weighed_s(layout, fastest_s, np.zeros_like(fastest_s))

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step with what is shared; inf if layers cannot fit."""
        each = list(self.costs.costs(layout).values())
        if not self.has_room(layout, each):
            return math.inf
        fastest_s = self.least_of_kinds(each, "time_s")
        return self._weighed_s(layout, fastest_s, self.least_of_kinds(each, "sync_s"))

    def _weighed_s(self, layout: Layout, time_s: Floats, once_s: Floats) -> float:
        """[group, kind] Least seconds of a step from those of layers; see the head."""
        counts, m = np.array(self.counts), layout.micro_batches
        stages = np.array(list(self.costs.stages_of(layout).values()))
        found_s = 0.0
        for share, seconds in ((0.0, time_s + once_s / m), (None, time_s)):
            weights = self._weights(layout, stages, seconds @ counts, share)
            found_s = max(found_s, float(counts @ (weights[:, None] * seconds).min(axis=0)))
        return (1 - ROUNDING) * found_s + self.step_s(layout)

    def step_s(self, layout: Layout) -> float:
        """What every plan of a layout takes once, besides what ranks do."""
        return min(tables.layout_step_s(layout) for tables in self.costs.tables.values())

    def _weights(
        self, layout: Layout, stages: Floats, whole_s: Floats, share: float | None
    ) -> Floats:
        """[group] Weights w of stages; `share` is α, as large as it can be if there is none."""
        m, fill = float(layout.micro_batches), self._fill(layout)
        if not whole_s.all():
            return np.zeros(len(stages))
        rate = float((stages / whole_s).sum())
        if share is None:
            share = self._share(layout, stages, whole_s)
        level_s = ((1 - share) * m + share * fill * float(stages.sum())) / rate
        return level_s / whole_s

    def _share(self, layout: Layout, stages: Floats, whole_s: Floats) -> float:
        """The largest α with w_g >= α K for all groups: (m + α (K P - m)) / rate >= α K T_max."""
        m, fill = float(layout.micro_batches), self._fill(layout)
        rate, ranks = float((stages / whole_s).sum()), float(stages.sum())
        if fill * ranks <= m:
            return 0.0
        needed = fill * float(whole_s.max()) * rate - (fill * ranks - m)
        return min(1.0, m / needed) if needed > 0 else 1.0

    @staticmethod
    def _fill(layout: Layout) -> float:
        """K of T >= K Σ t; 0 where W is no part of it."""
        if layout.pipeline == 1 or layout.executed.splits_backward:
            return 0.0
        return pace(layout.schedule, layout.pipeline, layout.micro_batches, layout.virtual_stages)[
            1
        ]

    def _memory_s(self, layout: Layout) -> float | Lost:
        """Least seconds of a step with what stages can hold; inf if the layout does not fit.

        What another layout can do as well need not be known.
        """
        if not self._may("bounded", self._effort.layouts):
            return 0.0
        if self._dominated(layout):
            return Lost(DOMINATED)
        each = (least_s(one, frontiers=self.frontiers) for one in self.problems(layout))
        return max(each) + self.step_s(layout)

    def problems(self, layout: Layout) -> tuple[GraphInstance, ...]:
        """Return problems none of whose optima is above the least simulated step."""
        if layout not in self._known_instances:
            self._known_instances[layout] = self._problems(layout)
        found: tuple[GraphInstance, ...] = self._known_instances[layout]
        return found

    def _problems(self, layout: Layout) -> tuple[GraphInstance, ...]:
        m, chains = layout.micro_batches, self._own_chains(layout)
        stages = np.array(list(self.costs.stages_of(layout).values()))
        whole_s = np.array(
            [
                sum(min(o.time_s for o in chain.kinds[kind]) for kind in chain.layers)
                for chain in chains.values()
            ]
        )
        share = self._share(layout, stages, whole_s) if whole_s.all() else 0.0
        found = []
        for alpha in (0.0, share) if share else (0.0,):
            once = 0.0 if alpha else 1.0 / m
            priced_chains = {
                name: replace(
                    chain,
                    steady=(1 - alpha) * m,
                    fill=alpha * self._fill(layout),
                    kinds=tuple(
                        tuple(
                            replace(one, backward_s=one.backward_s + once * one.sync_s, sync_s=0.0)
                            for one in table
                        )
                        for table in chain.kinds
                    ),
                )
                for name, chain in chains.items()
            }
            problem = computing_problem(self.costs, layout, priced_chains)
            # Sums of bytes are no more than what ranks hold, and quicker.
            types = tuple(
                replace(one, chain=replace(one.chain, used_bytes=None)) for one in problem.types
            )
            found.append(replace(problem, types=types))
        return tuple(found)

    def _own_chains(self, layout: Layout) -> dict[str, Instance]:
        return {
            name: replace(chain, credits_s=(), forward_apart=False)
            for name, chain in self.chains(layout).items()
        }

    # Splits.

    def solve(self, layout: Layout, cutoff_s: float) -> Found[Any] | Lost:
        """Return the best split that is found, and what none of the layout simulates below."""
        if not self._may("solved", self._effort.solved):
            return Lost(UNFINISHED, bound_s=0.0)
        search = _Layout(self, layout, cutoff_s)
        low_s = search.bounded_s()
        if low_s >= cutoff_s * (1 - EQUAL):
            outcome = OUT_OF_MEMORY if low_s == math.inf else NO_FASTER
            return Lost(outcome, bound_s=None if low_s == math.inf else low_s)
        best = search.best
        if best is None or best.prediction.step_time_s >= cutoff_s:
            return Lost(UNFINISHED, bound_s=low_s)
        step_s = best.prediction.step_time_s
        low_s = min(low_s, step_s)
        return Found(step_s, low_s, layout, SimulatedSplit(best, low_s >= step_s * (1 - EQUAL)))

    def estimate_s(self, layout: Layout, limit_s: float) -> float:
        """Return seconds that no split simulates below, of cuts with the least each rank takes."""
        each = self.columns(layout, limit_s)
        if each is None:
            return 0.0
        loose = choices_of(self, layout, each, limit_s, least=True)
        return 0.0 if loose is None else loose.cut_s(limit_s)

    def quick(self, layout: Layout, cutoff_s: float) -> Ranked | None:
        """Return the fastest plan of some splits of a layout, if any is below the cutoff."""
        search = _Layout(self, layout, cutoff_s)
        search.near_s()
        each = self.columns(layout, cutoff_s)
        if each is not None:
            search.improve(each, MOST_MOVES)
        return search.best

    def simulated(self, layout: Layout, split: GraphSolution) -> Ranked:
        """Return the plan of a split; those that fit are kept."""
        closed_s = split.split.objective_s + max(
            costs.step_s for costs in self.costs.costs(layout).values()
        )
        plan = self.own.ranked(Found(closed_s, closed_s, layout, split))
        if plan.prediction.fits:
            self.found.append(plan)
        return plan

    def columns(self, layout: Layout, limit_s: float) -> list[OnGroup] | None:
        """Return what finds columns on every group; None where ranks cannot be told by themselves.

        They are for plans below a limit.
        """
        chains = self._own_chains(layout)
        if layout.pipeline == 1 or any(
            chain.sides or chain.hosts or chain.sizes or chain.used_bytes is None
            for chain in chains.values()
        ):
            return None
        sent_s, step_s = _least_sent_s(self, layout), self.step_s(layout)
        found = []
        for name, chain in chains.items():
            costs = replace(self.costs.tables[name].of(layout), transfer_s=sent_s, step_s=step_s)
            group = GroupPrices(self.model, self.pins.recompute, costs)
            columns = Columns(group, layout, chain, limit_s, self._effort.ways)
            found.append(OnGroup(group, chain, columns))
        return found

    def ranked(self, found: Found[Any]) -> Ranked:
        """Return the plan of a split and its prediction."""
        one: SimulatedSplit = found.split
        return one.plan

    @property
    def effort(self) -> Effort:
        """How far it is looked."""
        return self._effort

    def may_program(self, columns: int) -> bool:
        """Whether the program of another layout, with so many columns, may be tried."""
        few = columns <= FEW_COLUMNS or self._effort.programs > 1
        return few and self._may("programs", self._effort.programs)

    @property
    def looked_at(self) -> dict[str, int]:
        """How many layouts got which bound."""
        return {
            "layouts within memory": self._spent["bounded"],
            "layouts solved": self._spent["solved"],
            "layouts by their programs": self._spent["programs"],
        }


def _no_slower(one: LayoutCosts, other: LayoutCosts) -> bool:
    """Whether no action of any option takes longer, nor what comes once."""
    return all(
        a.forward_s <= b.forward_s
        and a.backward_s <= b.backward_s
        and a.figures.weight_s == b.figures.weight_s
        and a.sync_s <= b.sync_s
        and a.optimizer_s + a.stream_s <= b.optimizer_s + b.stream_s
        for kind, parts in other.parts.items()
        for a, b in zip(one.parts[kind], parts, strict=True)
    )


class _Layout:
    """One layout: its least simulated step, as far as effort goes, and its best plan."""

    def __init__(self, space: SimulatedMixed, layout: Layout, cutoff_s: float) -> None:
        self._space, self._layout = space, layout
        self._limit_s = cutoff_s * (1 - EQUAL)
        self.best: Ranked | None = None
        self._split: GraphSolution | None = None
        """That of the best plan."""

    def _try(self, split: GraphSolution) -> float:
        """Simulate a split and return its step; inf if it does not fit."""
        plan = self._space.simulated(self._layout, split)
        step_s = plan.prediction.step_time_s
        if not plan.prediction.fits:
            return math.inf
        if self.best is None or step_s < self.best.prediction.step_time_s:
            self.best, self._split = plan, split
            self._limit_s = min(self._limit_s, step_s * (1 - EQUAL))
        return step_s

    def near_s(self) -> float:
        """Return seconds that no split simulates below by the optima of the bounds; they are tried.

        So is the closed form's.
        """
        space, layout = self._space, self._layout
        step_s = space.step_s(layout)
        low_s = 0.0
        for problem in space.problems(layout):
            answer = solve(problem, cutoff_s=self._limit_s - step_s, frontiers=space.frontiers)
            if isinstance(answer, Infeasible):
                return math.inf
            if isinstance(answer, GraphSolution):
                low_s = max(low_s, answer.split.lower_bound_s + step_s)
                self._try(self._closed(answer))
            else:
                low_s = max(low_s, answer.lower_bound_s + step_s)
            if low_s >= self._limit_s:
                return low_s
        closed_form = solve(space.own.instance(layout), frontiers=space.frontiers)
        if isinstance(closed_form, GraphSolution):
            self._try(closed_form)
        return low_s

    def bounded_s(self) -> float:
        """Return seconds that no split simulates below, or the limit; splits are tried."""
        space, layout = self._space, self._layout
        each = space.columns(layout, self._limit_s)
        if each is None:
            return self.near_s()
        loose = choices_of(space, layout, each, self._limit_s, least=True)
        low_s = 0.0 if loose is None else loose.cut_s(self._limit_s)
        if low_s >= self._limit_s:
            return low_s
        choices = choices_of(space, layout, each, self._limit_s, least=False)
        if choices is None:
            low_s = max(low_s, self.near_s())
            self.improve(each, MOST_MOVES)
            return low_s
        low_s = max(low_s, choices.cut_s(self._limit_s))
        if low_s >= self._limit_s:
            return low_s
        low_s = max(low_s, self.near_s())
        self.improve(each, MOST_MOVES)
        if low_s >= self._limit_s or not space.may_program(choices.size):
            return low_s
        effort = space.effort
        return max(
            low_s,
            choices.optimum(
                self._limit_s,
                self._try,
                actions=effort.actions,
                nodes=effort.nodes,
                until=time.process_time() + effort.program_s,
            ),
        )

    def improve(self, each: Sequence[OnGroup], most: int) -> None:
        """Let single entries move while the best split simulates faster, for so many trials."""
        while self._split is not None:
            split = self._split
            sizes = [b - a for a, b in itertools.pairwise(split.split.cuts)]
            for order, numbers in moves(split.types, sizes):
                moved = self._fastest(each, order, numbers)
                if moved is None:
                    continue
                if most <= 0:
                    return
                most -= 1
                self._try(moved)
                if self._split is not split:
                    break
            else:
                return

    def _fastest(
        self, each: Sequence[OnGroup], order: Sequence[int], sizes: Sequence[int]
    ) -> GraphSolution | None:
        """Return the split into ranks of these types and sizes, each at its fastest that fits."""
        cuts = [0, *itertools.accumulate(sizes)]
        options: list[int] = []
        for rank, (number, span) in enumerate(zip(order, itertools.pairwise(cuts), strict=True)):
            if sizes[rank] < each[number].chain.stages[rank].least_layers:
                return None
            columns = each[number].of(rank, *span, least=False)
            if not columns:
                return None
            options += min(columns, key=lambda one: float(one.seconds[:2].sum())).options
        return closed(self._space, self._layout, order, cuts, options)

    def _closed(self, found: GraphSolution) -> GraphSolution:
        """Return a split with its seconds in the closed form."""
        return closed(self._space, self._layout, found.types, found.split.cuts, found.split.options)


def moves(order: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield types and sizes of ranks one step away.

    First each as it is; an entry goes from a rank to another; two ranks of different types change
    places.

    >>> list(moves([0, 1], [2, 1]))
    [([0, 1], [2, 1]), ([0, 1], [1, 2]), ([1, 0], [1, 2]), ([1, 0], [2, 1])]
    """
    yield list(order), list(sizes)
    for giver, taker in itertools.permutations(range(len(sizes)), 2):
        if sizes[giver] > 1:
            yield (
                list(order),
                [n - (r == giver) + (r == taker) for r, n in enumerate(sizes)],
            )
    for one, two in itertools.combinations(range(len(sizes)), 2):
        if order[one] != order[two]:
            places = list(range(len(sizes)))
            places[one], places[two] = two, one
            yield [order[r] for r in places], [sizes[r] for r in places]
            yield [order[r] for r in places], list(sizes)


def closed(
    space: SimulatedMixed,
    layout: Layout,
    order: Sequence[int],
    cuts: Sequence[int],
    options: Sequence[int],
) -> GraphSolution:
    """Return a split of a chain with what it takes in the closed form."""
    problem: GraphInstance = space.own.instance(layout)
    layers = tuple(range(len(problem.chain.layers)))
    split = priced(problem.laid(layers, cuts, order), tuple(cuts), tuple(options))
    return GraphSolution(
        problem=problem, order=layers, types=tuple(order), split=split, method="chain"
    )


@dataclass(frozen=True)
class GroupPrices:
    """A model on one group, as `Columns` asks for it."""

    model: ModelGraph
    recompute: Recomputes
    own: LayoutCosts

    def costs(self, _: Layout) -> LayoutCosts:
        """Return the group's costs of the layout."""
        return self.own


@dataclass(frozen=True, slots=True)
class OnGroup:
    """A layout's ranks on one group: the problem that they would have alone, and their columns."""

    group: GroupPrices
    chain: Instance
    columns: Columns

    def of(self, rank: int, first: int, end: int, *, least: bool) -> list[Column] | None:
        """Return the columns of a rank with these entries; None where there are too many."""
        kinds = self.chain.layers[first:end]
        if not least:
            return self.columns.of(rank, first, kinds)
        column = self.columns.least(rank, first, kinds)
        return [] if column is None else [column]


@dataclass(frozen=True, slots=True)
class Typed(Placed):
    """[column] The same with the device type that it is for."""

    number: Indices


def choices_of(
    space: SimulatedMixed,
    layout: Layout,
    each: Sequence[OnGroup],
    limit_s: float,
    *,
    least: bool,
) -> TypedChoices | None:
    """Return what ranks may hold on every type; None where that is too much.

    With `least` there is one column for all that begin and end alike, no slower than any.
    """
    found = _every(layout, each, limit_s - space.step_s(layout), least=least)
    return None if found is None else TypedChoices(space, layout, each, *found)


def _least_sent_s(space: SimulatedMixed, layout: Layout) -> float:
    """Least seconds of a crossing between any two neighbours that there may be."""
    stages = space.costs.stages_of(layout)
    return min(
        space.costs.crossing_s(layout, a, b)
        for a, b in itertools.product(stages, stages)
        if a != b or stages[a] > 1
    )


def _every(
    layout: Layout, each: Sequence[OnGroup], room_s: float, *, least: bool
) -> tuple[list[Column], Typed] | None:
    """Return all columns and where they may begin; None where there are too many.

    On its type a rank's entries take at most as long as the limit leaves, at their fastest; those
    behind it do on whichever is the fastest.
    """
    layers, stages = each[0].chain.layers, each[0].chain.stages
    count, ranks = len(layers), layout.pipeline
    most_s = room_s / layout.micro_batches * (1 + ROUNDING)
    own_s = [
        [min(option.time_s for option in one.chain.kinds[kind]) for kind in layers] for one in each
    ]
    totals_s = [np.concatenate([[0.0], np.cumsum(one)]) for one in own_s]
    total_s = np.concatenate([[0.0], np.cumsum(np.min(own_s, axis=0))])
    earliest = [count]
    for _ in range(ranks):
        least_s = total_s[earliest[-1]] - most_s
        earliest.append(int(np.searchsorted(total_s, least_s, "left")))
    earliest.reverse()
    columns: list[Column] = []
    places: list[tuple[int, int, int]] = []
    numbers: list[int] = []
    starts = {0} if earliest[0] == 0 else set[int]()
    for rank in range(ranks):
        following: set[int] = set()
        behind = sum(stage.least_layers for stage in stages[rank + 1 :])
        for number, first in itertools.product(range(len(each)), sorted(starts)):
            until_s = totals_s[number]
            furthest = int(np.searchsorted(until_s, until_s[first] + most_s, "right")) - 1
            begin = max(first + stages[rank].least_layers, earliest[rank + 1])
            for end in range(begin, min(furthest, count - behind) + 1):
                own = each[number].of(rank, first, end, least=least)
                if own is None or len(columns) + len(own) > MOST_COLUMNS:
                    return None
                following.add(end)
                columns += own
                places += [(rank, first, end)] * len(own)
                numbers += [number] * len(own)
        starts = following
    one = placed(columns, places, layout.stages)
    return columns, Typed(
        one.rank,
        one.first,
        one.end,
        one.seconds,
        one.sync_s,
        one.update_s,
        np.array(numbers, dtype=np.intp),
    )


class TypedChoices:
    """What the ranks of a layout may hold, on every type of devices."""

    def __init__(
        self,
        space: SimulatedMixed,
        layout: Layout,
        each: Sequence[OnGroup],
        columns: Sequence[Column],
        typed: Typed,
    ) -> None:
        self._space, self._layout, self._each = space, layout, each
        self._columns, self._typed = columns, typed
        self._numbers = list(space.costs.stages_of(layout).values())
        costs = each[0].group.own
        self._step_s = costs.step_s
        self._transfer_s = (1 - costs.waits) * costs.transfer_s

    @property
    def size(self) -> int:
        """How many columns there are."""
        return len(self._columns)

    def cut_s(self, limit_s: float) -> float:
        """Return seconds that no cut simulates below, or `limit_s` if that is less."""
        cuts_of = partial(TypedCuts, self._layout, self._typed, self._transfer_s, self._numbers)
        low_s = least_of(cuts_of, self._layout, self._typed, limit_s - self._step_s)
        return min(limit_s, low_s + self._step_s)

    def optimum(
        self,
        limit_s: float,
        tried: Callable[[GraphSolution], float],
        *,
        actions: int,
        nodes: int,
        until: float,
    ) -> float:
        """Return seconds that no split simulates below, or `limit_s` if that is less."""
        if 2 * self._layout.micro_batches * self._layout.stages > actions:
            return 0.0
        some = self._each[0]
        program = TypedProgram(
            some.group,
            self._layout,
            some.chain,
            self._columns,
            self._typed,
            numbers=self._numbers,
            closed=partial(closed, self._space, self._layout),
        )
        return program.solve(limit_s, tried, nodes, until)


class TypedCuts(Cuts):
    """Cuts with as many ranks of each type as there are."""

    def __init__(
        self, layout: Layout, typed: Typed, transfer_s: float, numbers: Sequence[int]
    ) -> None:
        self._typed, self._numbers = typed, numbers
        super().__init__(layout, typed, transfer_s)

    def _sums_s(self, limit_s: float, ceilings_s: Floats) -> Floats:
        """As there, by how many ranks of each type are used."""
        ceiling_s = ceilings_s[:, None] * (1 + ROUNDING)
        none = np.full((len(ceilings_s), self._entries + 1), np.inf)
        start = none.copy()
        start[:, 0] = 0.0
        best_s = {(0,) * len(self._numbers): start}
        for rank, (own, firsts, _, _) in enumerate(self._by_rank):
            after: dict[tuple[int, ...], Floats] = {}
            ended_s = self._sync_s if rank else 0.0
            fits = self._alone_s[own] <= limit_s
            fits = fits & (self._passes_s[own] <= ceiling_s)
            for used, before in best_s.items():
                for number, most in enumerate(self._numbers):
                    if used[number] == most:
                        continue
                    at = np.flatnonzero(self._typed.number[own] == number)
                    if len(at) == 0:
                        continue
                    picked = own[at]
                    before_s = before[:, firsts[at]]
                    able = fits[:, at] & (before_s + self._own_s[picked] + ended_s <= limit_s)
                    after_s = np.where(able, before_s + self._straight_s[picked], np.inf)
                    key = (*used[:number], used[number] + 1, *used[number + 1 :])
                    ends, starts = np.unique(self._typed.end[picked], return_index=True)
                    row = after.setdefault(key, none.copy())
                    row[:, ends] = np.minimum(
                        row[:, ends], np.minimum.reduceat(after_s, starts, axis=1)
                    )
            best_s = after
        last = best_s.get(tuple(self._numbers))
        return none[:, -1] if last is None else last[:, -1]


class TypedProgram(Program):
    """The program with a row for each type; its splits say which rank is of which."""

    def __init__(
        self,
        candidates: LayoutPrices,
        layout: Layout,
        instance: Instance,
        columns: Sequence[Column],
        placed: Typed,
        *,
        numbers: Sequence[int],
        closed: Callable[[Sequence[int], Sequence[int], Sequence[int]], GraphSolution],
    ) -> None:
        """`numbers` [type] are its ranks; `closed` is a split by types, cuts and options."""
        super().__init__(candidates, layout, instance, columns, placed)
        self._closed, self._typed = closed, placed
        for number, most in enumerate(numbers):
            own = np.flatnonzero(placed.number == number)
            self.row(float(most), float(most), own.tolist(), [1.0] * len(own))

    def solution(self, values: Floats) -> Any:
        """Return the split that whole columns make."""
        chosen = np.flatnonzero(values[:-2] > 0.5)
        chosen = chosen[np.argsort(self._rank[chosen])]
        cuts = (0, *self._typed.end[chosen].tolist())
        options = [option for at in chosen.tolist() for option in self._columns[at].options]
        return self._closed(self._typed.number[chosen].tolist(), cuts, options)
