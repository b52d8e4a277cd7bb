"""Layouts along a pipeline whose stages may differ, by what they simulate: splits, and a proof.

Lower bounds of a layout's simulated step are those of its candidates
(`planner.search.bounds.simulated_step`, `planner.search.bounds.simulated_mixed_devices`).  Each of
these is the objective of a partition problem too: steady m and fill 0, and, with α the largest
share of K that all groups can have, steady (1 - α) m and fill α K.  The optima of both within
memory are bounds.

A layout that these leave has its ranks' columns (`planner.search.bounds.simulated_optimum`), one
for each group that a rank may be on.  A way through them that gives every group as many ranks as it
has is a split; the least of all by paths is a bound.  First there is one column for all that a rank
may hold between two places, of whatever loss, over the fastest link; then those of the places that
are left, and the least of their ways is the layout's optimum (`ColumnProgram.whole_s`).

Every split that is met on the way is simulated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import EQUAL, ROUNDING
from meshwright.planner.search.bounds.dominance import Covering
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.simulated_mixed_devices import (
    SimulatedGroupCandidates,
    fill_of,
    share_of,
)
from meshwright.planner.search.bounds.simulated_optimum import (
    ColumnProgram,
    Columns,
    CutPoints,
    Links,
    PathWeights,
    RankColumn,
    Spans,
    choices_of,
)
from meshwright.planner.search.bounds.simulated_step import SimulatedCandidates
from meshwright.planner.search.bounds.split_paths import SplitPaths
from meshwright.planner.search.goals import SplitSolution, action_key
from meshwright.planner.search.partition.stage_size_rows import is_within
from meshwright.planner.search.proof_account import BOUNDS, CUTS, DOMINATED
from meshwright.planner.search.proof_account import SOLVED as BY_OPTIMUM
from meshwright.planner.search.queue import Bound, Next, Pruned, QueueEntry
from meshwright.planner.search.space import losses
from meshwright.planner.search.spaces.group_stages import computing_problem
from meshwright.planner.search.spaces.mixed import MixedSpace
from meshwright.planner.search.spaces.simulated import (
    BOUNDED,
    FAMILIES,
    SOLVED,
    BySimulation,
    Tried,
)
from meshwright.planner.solver.bounds.downsets import Prefixes
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    broken,
)

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
    from meshwright.planner.search.plan_candidate import Ranked
    from meshwright.planner.search.space import LayoutFamily

MOST_MOVES = 120
"""Splits near the best of a layout that are simulated."""
ABOVE = 1.2
"""Largest ratio of the closed form to the simulated step (meshwright.planner.costs.predict)."""

Floats = NDArray[np.float64]


class SimulatedMixed(BySimulation, MixedSpace):
    """The layouts of some groups, with bounds of the simulated step and splits by it."""

    def __init__(self, space: MixedSpace, tried: Tried, closed_form_s: float) -> None:
        """`space` has the same layouts by the closed form, where none takes `closed_form_s`."""
        super().__init__(_with_simulated_bounds(space.candidates), effort=space.effort)
        self.families = space.families
        self._bounded = Covering()
        self._any_loss_s: dict[Layout, float] = {}
        """By a layout of those that differ in how they compute the loss alone, which have the same
        bounds within memory."""
        self._means: dict[tuple[object, ...], list[PathWeights]] = {}
        """Means of paths that bounded a layout of a timetable."""
        self._spans: dict[Layout, tuple[float, Spans | None]] = {}
        """Of what ranks may hold within a limit, by a layout of those that differ in the loss."""
        self.closed_form, self.tried, self._unpiped_s = space, tried, closed_form_s * (1 - ROUNDING)

    groups = 3

    @property
    def levels(self) -> Sequence[str]:
        """Names of the bounds that exclude entries at each level."""
        first, *names = [name for name, _ in self.bounds]
        return (first, *[BOUNDS[CUTS]] * self.groups, *names)

    def expand(self, level: int, some: Sequence[QueueEntry]) -> Iterable[Next]:
        """Bound all cuts of some families, then of their parts of one sharing each.

        The layouts of a graph are not bounded together.
        """
        for entry in some:
            families, family = self.families, entry.item
            if families is None:
                yield from super().expand(level, [entry])
            elif level == 0:
                yield max(entry.bound_s, self._kin_bound_s(family)), 1, family
            elif level == 1:
                for sharing, saving in itertools.product(family.sharings, family.savings):
                    part = family.part(sharings=(sharing,), savings=(saving,))
                    yield entry.bound_s, 2, part
            else:
                part_s = families.part_bound_s(family, self.tried.goal.limit_s)
                yield from super().expand(
                    level, [entry._replace(bound_s=max(entry.bound_s, part_s))]
                )

    def _kin_bound_s(self, family: LayoutFamily) -> float:
        """Return seconds that no layout with a family's timetable simulates below, or the limit.

        0 where nothing is known, or enough families were looked at.
        """
        families, most = self.families, self.tried.effort.families
        if families is None:
            return 0.0
        if not families.has_bound(family) and not self.tried.try_one(FAMILIES, most):
            return 0.0
        return families.kin_bound_s(family, self.tried.goal.limit_s)

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        first, (name, _), (_, cuts_s) = super().bounds
        settled = (BOUNDS[BY_OPTIMUM], self.solved_s)
        return [first, (name, self.bound_s), (BOUNDS[CUTS], cuts_s), settled]

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, splits within memory ignored.

        Without a pipeline the closed form is the simulated step.
        """
        least_s = self.candidates.communication_s(layout)
        return max(least_s, self._unpiped_s) if layout.pipeline == 1 else least_s

    def step_s(self, layout: Layout) -> float:
        """Return the seconds that every plan of a layout takes once, besides what ranks do."""
        return min(tables.layout_step_s(layout) for tables in self.costs.tables.values())

    def _memory_s(self, layout: Layout) -> float | Pruned:
        """Least seconds of a step with what stages can hold; inf if the layout does not fit.

        What another layout can do as well need not be known.
        """
        ordered_s = self._ordered_s(layout)
        if self.tried.goal.exceeds(ordered_s):
            return ordered_s
        alike = replace(layout, loss=None)
        if alike not in self._any_loss_s:
            if self._bounded.cover(layout, self.costs_of):
                return Pruned(DOMINATED)
            if not self.tried.try_one(BOUNDED, self.tried.effort.layouts):
                return ordered_s
            self._bounded.add(layout, self.costs_of(layout))
            self._any_loss_s[alike] = self._any_cut_s(layout)
        return max(ordered_s, self._any_loss_s[alike])

    def _any_cut_s(self, layout: Layout) -> float:
        """Least seconds of all cuts of the layouts that differ in how they compute the loss alone.

        Ranks have the least that options have: with sums of bytes, then with the bytes that ranks
        hold; by paths that stay with a rank, then by all paths.
        Where ranks are not known by themselves the partition problem bounds the splits.
        """
        limit_s = self.tried.goal.limit_s
        columns, spans, low_s = self.columns(layout, limit_s, any_loss=True), None, 0.0
        for _ in range(2):
            choices = None
            if columns is not None:
                choices = self.choices(layout, columns, limit_s, fastest_only=True, within=spans)
            if choices is None:
                least_s = max(map(self.split_bound_s, self._problems(layout, any_loss=True)))
                return least_s + self.step_s(layout)
            if not choices.size:
                return limit_s
            low_s = max(low_s, low_s or choices.cut_s(limit_s))
            if low_s < limit_s:
                low_s = max(low_s, self.whole_s(layout, choices, limit_s))
            if low_s >= limit_s:
                return limit_s
            spans = choices.feasible_spans(limit_s)
        self._spans[replace(layout, loss=None)] = limit_s, spans
        return low_s

    def whole_s(
        self,
        layout: Layout,
        choices: ColumnProgram,
        limit_s: float,
        tried: Callable[[GraphSolution], float] | None = None,
    ) -> float:
        """Return seconds that no way of whole columns simulates below."""
        effort = self.tried.effort
        return choices.whole_s(
            limit_s,
            self._means.setdefault(action_key(layout), []),
            tried,
            actions=effort.actions,
            most_columns=effort.columns,
            iterations=effort.mixed_iterations,
        )

    def _ordered_s(self, layout: Layout) -> float:
        """Least seconds of a step with whole layers in the best order of groups that differ."""
        if isinstance(self.candidates, SimulatedGroupCandidates):
            return self.candidates.ordered_s(layout, self.tried.goal.step_s)
        return 0.0

    def problems(self, layout: Layout) -> tuple[GraphInstance, ...]:
        """Return problems none of whose optima is above the least simulated step."""
        if layout not in self._known_instances:
            self._known_instances[layout] = tuple(self._problems(layout))
        instances: tuple[GraphInstance, ...] = self._known_instances[layout]
        return instances

    def _problems(self, layout: Layout, *, any_loss: bool = False) -> Iterator[GraphInstance]:
        m, chains = layout.micro_batches, self._bare_chains(layout, any_loss=any_loss)
        whole_s = np.array(
            [
                sum(min(o.time_s for o in chain.kinds[kind]) for kind in chain.layers)
                for chain in chains.values()
            ]
        )
        stages, fill = np.array(list(self.costs.stages_of(layout).values())), self._fill_of(layout)
        share = share_of(layout, stages, whole_s, fill)
        for alpha in (0.0, share) if share else (0.0,):
            once = 0.0 if alpha else 1.0 / m
            priced_chains = {
                name: replace(
                    chain,
                    steady=(1 - alpha) * m,
                    fill=alpha * fill,
                    sides=(),
                    # Sums of bytes are no more than what ranks hold, and quicker.
                    used_bytes=None,
                    kinds=tuple(
                        tuple(
                            replace(row, backward_s=row.backward_s + once * row.sync_s, sync_s=0.0)
                            for row in table
                        )
                        for table in chain.kinds
                    ),
                )
                for name, chain in chains.items()
            }
            yield self.computing(layout, priced_chains, flat=alpha == 1.0)

    def _fill_of(self, layout: Layout) -> float:
        """K of T >= K Σ t; of graphs on one type the one that stages of any layers have."""
        if isinstance(self.candidates, SimulatedGroupCandidates):
            return self.candidates.fill_of(layout)
        return fill_of(layout)

    def computing(
        self, layout: Layout, chains: dict[str, Instance], *, flat: bool
    ) -> GraphInstance:
        """Return the problem of ranks that nothing but computation takes time on.

        It is `flat` if it weighs the seconds of all ranks alike.
        """
        return computing_problem(self.costs, layout, chains)

    def _bare_chains(self, layout: Layout, *, any_loss: bool = False) -> dict[str, Instance]:
        return {
            name: replace(chain, credits_s=(), forward_apart=False)
            for name, chain in self.chains(layout, any_loss=any_loss).items()
        }

    # Splits.

    def meets_requirements(self, layout: Layout, split: GraphSolution) -> bool:
        """Return whether a split keeps what is required of it and the memory of hosts."""
        cuts = split.split.cuts
        if broken(split.problem.laid(split.order, cuts, split.types), split.split) is not None:
            return False
        rows, sizes = self.candidates.rows(layout), [b - a for a, b in itertools.pairwise(cuts)]
        return not rows or any(is_within(sizes, row) for row in rows)

    def solved_s(self, layout: Layout) -> float:
        """Return seconds that no split of a layout simulates below, or the limit."""
        self.tried.looked_at[SOLVED] += 1
        alike = replace(layout, loss=None)
        if alike not in self._any_loss_s:
            self._any_loss_s[alike] = self._any_cut_s(layout)
        if self.tried.goal.exceeds(self._any_loss_s[alike]):
            return self._any_loss_s[alike]
        return _LayoutSearch(self, layout, self.tried.goal.step_s).bounded_s()

    def estimate_s(self, layout: Layout, limit_s: float) -> float:
        """Return seconds that no split simulates below, of cuts with the least each rank takes."""
        columns = self.columns(layout, limit_s)
        if columns is None:
            return self.bound_s(layout)
        loose = self.choices(layout, columns, limit_s, fastest_only=True)
        return 0.0 if loose is None else loose.cut_s(limit_s)

    def quick(self, layout: Layout, cutoff_s: float) -> Ranked | None:
        """Return the fastest plan of some splits of a layout, if any is below the cutoff."""
        search = _LayoutSearch(self, layout, cutoff_s)
        search.near_s()
        columns = self.columns(layout, cutoff_s)
        if columns is not None:
            search.improve(columns, MOST_MOVES)
        return search.best

    def simulate(self, layout: Layout, split: GraphSolution) -> Ranked:
        """Return the plan of a split; those that fit are kept."""
        closed_s = split.split.objective_s + self._step_s(layout)
        plan = self.closed_form.candidate_of(SplitSolution(closed_s, closed_s, layout, split))
        self.tried.offer(plan)
        return plan

    columns_of = Columns
    """Class of the columns, that is, of what ranks may hold on one group."""

    def columns(
        self, layout: Layout, limit_s: float, *, any_loss: bool = False
    ) -> list[Columns] | None:
        """Return what finds columns on every group; None where ranks are not known by themselves.

        They are for plans below a limit.  With `any_loss` they are those of all layouts that differ
        in how they compute the loss alone.
        """
        chains, places = self._bare_chains(layout, any_loss=any_loss), self.places(layout)
        if (
            layout.pipeline == 1
            or places is None
            or any(chain.used_bytes is None for chain in chains.values())
        ):
            return None
        step_s = self.step_s(layout)
        sent_s = min(float(link_s.min()) for row in self.links(layout) for link_s in row)
        limits = []
        rows = self.candidates.rows(layout) or ()
        ways = losses(self.request, layout.schedule) if any_loss else (layout.loss,)
        for name, chain in chains.items():
            costs = replace(
                self.costs.tables[name].of_any_loss(layout, ways),
                transfer_s=sent_s,
                step_s=step_s,
            )
            prices = self.ordered, self.candidates.recompute, costs
            most = limit_s, self.tried.effort.ways
            limits.append(
                self.columns_of(*prices, layout, replace(chain, sizes=rows), *most, places)
            )
        return limits

    def places(self, layout: Layout) -> CutPoints | None:
        """Return where the layers can be cut; None where downsets are many."""
        return CutPoints(Prefixes(len(self.closed_form.instance(layout).chain.layers)))

    def links(self, layout: Layout) -> Links:
        """[group before][group after][place] Seconds of a transfer; inf where they never meet.

        Several stages of two ranks meet in either order.
        """
        stages, places = (
            self.costs.stages_of(layout),
            len(self.closed_form.instance(layout).chain.layers) + 1,
        )
        sent_s = {(a, b): self.costs.crossing_s(layout, a, b) for a in stages for b in stages}
        if layout.virtual_stages > 1:
            sent_s = {(a, b): min(each_s, sent_s[b, a]) for (a, b), each_s in sent_s.items()}
        return [
            [np.full(places, sent_s[a, b] if a != b or stages[a] > 1 else np.inf) for b in stages]
            for a in stages
        ]

    def choices(
        self,
        layout: Layout,
        columns: Sequence[Columns],
        limit_s: float,
        *,
        fastest_only: bool,
        within: Spans | None = None,
    ) -> ColumnProgram | None:
        """Return what ranks may hold on every type; None where that is too much.

        The fastest are within sums of bytes; `within` known spans, within the bytes of ranks.
        """
        numbers = list(self.costs.stages_of(layout).values())
        read = partial(self.read, layout)
        links = self.links(layout)
        if fastest_only:  # whatever meets, over the fastest link: a place is one for all types
            least_s = np.min([link_s for row in links for link_s in row], axis=0)
            links = [[least_s] * len(links)] * len(links)
        return choices_of(
            layout,
            columns,
            numbers,
            links,
            limit_s,
            read,
            fastest_only=fastest_only,
            within=within,
        )

    def known_choices(
        self, layout: Layout, columns: Sequence[Columns], limit_s: float
    ) -> ColumnProgram | None:
        """Return what ranks may hold in the spans that are known, and None where it is too much."""
        within_s, spans = self._spans.get(replace(layout, loss=None), (0.0, None))
        spans = spans if limit_s <= within_s else None
        return self.choices(layout, columns, limit_s, fastest_only=False, within=spans)

    def read(
        self, layout: Layout, order: Sequence[int], ends: Sequence[int], options: Sequence[int]
    ) -> GraphSolution:
        """Return the split of types [rank], places [rank + 1] and options."""
        return self.closed_form.evaluated_split(layout, order, ends, options)


class _LayoutSearch:
    """One layout: its least simulated step, as far as effort goes, and its best plan."""

    def __init__(self, space: SimulatedMixed, layout: Layout, cutoff_s: float) -> None:
        self._space, self._layout = space, layout
        self._limit_s = cutoff_s * (1 - EQUAL)
        self.best: Ranked | None = None
        self._split: GraphSolution | None = None
        """Split of the best plan."""

    def _try(self, split: GraphSolution) -> float:
        """Simulate a split and return its step; inf if it does not fit or keep what is required."""
        if not self._space.meets_requirements(self._layout, split):
            return math.inf
        plan = self._space.simulate(self._layout, split)
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
            answer = space.best_split(problem, self._limit_s - step_s)
            if isinstance(answer, Infeasible):
                return math.inf
            if isinstance(answer, GraphSolution):
                low_s = max(low_s, answer.split.lower_bound_s + step_s)
                self._try(self._in_closed_form(answer))
            elif isinstance(answer, CutOff):
                low_s = max(low_s, answer.lower_bound_s + step_s)
            if low_s >= self._limit_s:
                return low_s
        whole: GraphInstance = space.closed_form.instance(layout)
        if not whole.chain.sides:  # which takes a program in the closed form
            closed_form = space.best_split(whole, self._limit_s * ABOVE - step_s)
            if isinstance(closed_form, GraphSolution):
                self._try(self._in_closed_form(closed_form))
        return low_s

    def bounded_s(self) -> float:
        """Return seconds that no split simulates below, or the limit; splits are tried."""
        space, layout = self._space, self._layout
        columns = space.columns(layout, self._limit_s)
        if columns is None:
            return self.near_s()
        low_s, choices = 0.0, space.known_choices(layout, columns, self._limit_s)
        if choices is not None:
            if not choices.size:
                return self._limit_s
            low_s = space.whole_s(layout, choices, self._limit_s, self._try)
            if choices.is_solved or low_s >= self._limit_s:
                return low_s
        low_s = max(low_s, self.near_s())
        self.improve(columns, MOST_MOVES)
        return low_s

    def improve(self, columns: Sequence[Columns], most: int) -> None:
        """Let single entries move while the best split simulates faster, for `most` trials.

        The orders of a graph's branches are left as they are, so there nothing moves.
        """
        costs, names = self._space.costs, list(self._space.costs.tables)
        crossing_s = [[costs.crossing_s(self._layout, a, b) for b in names] for a in names]
        paths = SplitPaths(self._layout, columns[0].costs, crossing_s)
        while self._split is not None and columns[0].places.alike:
            split = self._split
            sizes = [b - a for a, b in itertools.pairwise(split.split.cuts)]
            for order, numbers in moves(split.types, sizes):
                moved = self._fastest(columns, order, numbers)
                if moved is None:
                    continue
                if most <= 0:
                    return
                most -= 1
                if paths.exceeds(moved, order, self._limit_s):
                    continue
                options = [option for column in moved for option in column.options]
                cuts = [0, *itertools.accumulate(numbers)]
                self._try(self._space.read(self._layout, order, cuts, options))
                if self._split is not split:
                    break
            else:
                return

    def _fastest(
        self, of_types: Sequence[Columns], order: Sequence[int], sizes: Sequence[int]
    ) -> list[RankColumn] | None:
        """Return the fastest column of each rank of these types and sizes that fits, if all do."""
        cuts, fastest = [0, *itertools.accumulate(sizes)], list[RankColumn]()
        for rank, (number, span) in enumerate(zip(order, itertools.pairwise(cuts), strict=True)):
            if sizes[rank] < of_types[number].instance.stages[rank].least_layers:
                return None
            columns = of_types[number].columns_between(rank, *span)
            if not columns:
                return None
            fastest.append(min(columns, key=lambda one: float(one.seconds[:2].sum())))
        return fastest

    def _in_closed_form(self, solution: GraphSolution) -> GraphSolution:
        """Return a split with its seconds in the closed form."""
        split = solution.split
        return self._space.closed_form.evaluated_split(
            self._layout, solution.types, split.cuts, split.options, solution.order
        )


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
    for first, two in itertools.combinations(range(len(sizes)), 2):
        if order[first] != order[two]:
            places = list(range(len(sizes)))
            places[first], places[two] = two, first
            yield [order[r] for r in places], [sizes[r] for r in places]
            yield [order[r] for r in places], list(sizes)


def _with_simulated_bounds(
    candidates: GroupCandidates | Candidates,
) -> GroupCandidates | Candidates:
    """Return the same layouts with bounds of the simulated step."""
    if isinstance(candidates, Candidates):
        return SimulatedCandidates.from_candidates(candidates)
    return SimulatedGroupCandidates.from_candidates(candidates)
