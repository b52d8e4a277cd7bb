"""The search where device groups differ: which groups, which layout, what runs where.

Every non-empty set of the cluster's groups may be used, each group of it whole: as stages of a
pipeline, or, without one, as data-parallel ranks with their own shares
(`planner.search.spaces.shares`).  For each layout of a pipeline the order of the groups along it,
the cuts and every layer's treatment are chosen together, exactly
(`planner.solver.unequal.unequal`); where ranks have several stages, what is cut is the chain in
the order of ranks (`planner.search.ranks`).  Layouts wait in `planner.search.queue` by

    T >= what layers take at their fastest, memory ignored, + fill · least exposed + sync + step

(`planner.solver.unequal.fastest`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.crossings import narrowest_bytes
from planner.costs.layout_costs import LayoutCosts, counted_by_rank, refusal
from planner.costs.predict import branches_of
from planner.costs.rank_memory import in_flight_at_most, room_bytes
from planner.costs.strategy import least_resident
from planner.documents.plan import INSIDE_OUT, Layout
from planner.documents.tolerances import ROUNDING
from planner.requests.request import Request
from planner.schedules import schedule_of
from planner.schedules.fullest import fullest
from planner.search.answer import TIES_LIMIT_S
from planner.search.certificate import (
    BOUNDS,
    COMMUNICATION,
    COMPUTATION,
    DOMINATED,
    MEMORY,
    UNKEPT,
)
from planner.search.dominance import dominates, twins
from planner.search.formulation import layout_pace, unkept
from planner.search.goals import SplitSolution, judged
from planner.search.queue import Bound, Lost, SolvedLayout
from planner.search.ranked import Ranked, predicted
from planner.search.savings import savings_of
from planner.search.space import (
    LayoutFamily,
    every_degrees,
    families,
    micro_batches,
    plainest,
    sharings,
    tensor_overlaps,
    timetables,
)
from planner.search.spaces.group_stages import graph_problem, planned, stages_problem
from planner.search.spaces.groups import GroupSpace
from planner.search.spaces.shares import ShareSpace
from planner.search.stage_rows import not_required, required_rows, within
from planner.solver import ilp
from planner.solver.graph_instance import GraphInstance, GraphSolution
from planner.solver.instance import Fathomed, Infeasible, Instance, Unfinished
from planner.solver.solve import least_s, solve
from planner.solver.unequal.fastest import FastestOnTypes
from planner.stacks.stage_rules import Rows

Floats = NDArray[np.float64]
Split = GraphSolution | Infeasible | Fathomed | Unfinished
MOST_ROWS = 20
"""Of numbers of layers that keep what is required of ranks with several stages, as boxes; each is
an integer program."""


class MixedSpace(GroupSpace):
    """The layouts of some groups that use each of them whole, as ranks of a pipeline."""

    @cached_property
    def _known_s(self) -> dict[tuple[object, ...], tuple[Floats, Floats]]:
        return {}

    @cached_property
    def _known_instances(self) -> dict[Layout, Any]:
        return {}

    by_program = False
    """Whether the integer program decides."""

    def problem(self, layout: Layout, chains: dict[str, Instance]) -> Any:
        """Return the partition problem of a layout from those of the groups."""
        return stages_problem(self.costs, layout, chains)

    def least_split_s(self, problem: Any) -> float:
        """Least seconds of a split within memory; inf if none fits."""
        return least_s(problem, frontiers=self.frontiers)

    def best_split(self, problem: Any, cutoff_s: float) -> Split:
        """Return the best order of groups, of branches, cuts and options of a layout."""
        if self.by_program:
            return ilp.solve_graph(problem, time_limit_s=TIES_LIMIT_S)
        return solve(
            problem, cutoff_s=cutoff_s, frontiers=self.frontiers, time_limit_s=TIES_LIMIT_S
        )

    def least_crossing_s(self, layout: Layout) -> float:
        """Least seconds of what crosses a boundary."""
        names = list(self.costs.tables)
        return min(self.costs.crossing_s(layout, a, b) for a, b in itertools.product(names, names))

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [
            (BOUNDS[COMPUTATION], self.computation_s),
            (BOUNDS[COMMUNICATION], self.bound_s),
            (BOUNDS[MEMORY], self._memory_s),
        ]

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        asked = self.pins.require
        if asked and unkept(self.model, layout, asked) is not None:
            return "it lacks stages that are asked for"
        if asked and layout.virtual_stages > 1:
            lacking = not_required(self.model, layout, asked, most=MOST_ROWS)
            if lacking is not None:
                return lacking
        return refusal(self.model, self.cluster, self.job, layout)

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield every layout that keeps what the user fixed, those alike but for sharing in one."""
        families, why = self._families
        refused.update(why)
        for family in families:
            yield self.computation_s(family.first), family

    @cached_property
    def _families(self) -> tuple[list[LayoutFamily], Counter[str]]:
        """Groups of layouts with one schedule and loss each, and why others do not run.

        Axes lie in one order, the pipeline last.
        """
        pins = replace(self.pins, order=self.pins.order or INSIDE_OUT)
        request, refused = replace(self.request, pins=pins), Counter[str]()
        found: list[LayoutFamily] = []
        for degrees in every_degrees(request):
            first = plainest(request, degrees)
            sizes = micro_batches(self.job, degrees, pins)
            why = refusal(self.model, self.cluster, self.job, first) if sizes else None
            if why is not None:
                each = sum(
                    len(timetables(self.model, degrees.pipeline, number, pins))
                    for _, number in sizes
                )
                refused[why] += each * len(sharings(degrees, pins))
                continue
            saved = savings_of(first, request, self.refusal) if sizes else ()
            overlaps = tensor_overlaps(first, request, self.refusal)
            for family in families(request, degrees, saved, overlaps):
                for part in family.by_timetable():
                    if not schedule_of(part.timetables[0].schedule).stale:
                        found += part.by_loss()
        return found, refused

    def instance(self, layout: Layout) -> Any:
        """Return the partition problem of a layout."""
        if layout not in self._known_instances:
            self._known_instances[layout] = self.problem(layout, self.chains(layout))
        return self._known_instances[layout]

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by layers and actions alone, memory ignored."""
        fastest_s, credits_s = self.passes_s(layout)
        action_s = min(tables.action_s for tables in self.costs.tables.values())
        actions = 2 * layout.virtual_stages * layout.pipeline - 2 if layout.pipeline > 1 else 0
        action_s *= next(iter(self.costs.tables.values())).action_share(layout.virtual_stages)
        return self._least_s(layout, fastest_s, credits_s, exposed_s=actions * action_s)

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step with what is shared and sent; inf if layers cannot fit.

        Of memory it is only asked whether the commonest layers alone find room.
        """
        each = list(self.costs.costs(layout).values())
        if not self.has_room(layout, each):
            return math.inf
        fastest_s = self.least_of_kinds(each, "time_s")
        _, credits_s = self.passes_s(layout)
        counts = np.array(self.counts)
        sync_s = self.least_of_kinds(each, "sync_s").min(axis=0)
        once_s = max(float(sync_s.max()), float(counts @ sync_s) / layout.pipeline)
        exposed_s = 0.0
        if layout.pipeline > 1:
            crossing_s = self.least_crossing_s(layout)
            action_s = min(costs.action_s for costs in each)
            exposed_s = 2 * layout.virtual_stages * (layout.pipeline - 1) * (crossing_s + action_s)
        return self._least_s(layout, fastest_s, credits_s, exposed_s=exposed_s) + once_s

    def _memory_s(self, layout: Layout) -> float | Lost:
        """Return the bound within memory, where no other layout can do all that this one can."""
        return Lost(DOMINATED) if self._dominated(layout) else self.memory_s(layout)

    def memory_s(self, layout: Layout) -> float:
        """Least seconds of a step with what stages can hold; inf if the layout does not fit."""
        step_s = max(costs.step_s for costs in self.costs.costs(layout).values())
        return self.least_split_s(self.instance(layout)) + step_s

    def has_room(self, layout: Layout, each: Sequence[LayoutCosts]) -> bool:
        """Whether the commonest layers may fit, each rank on whichever group holds the most.

        A rank holds no more of them than its minimum-memory option allows, at the moment by which
        planner.search.least_bytes bounds its bytes, on the stage that has least in flight then.
        """
        alive = _alive(layout)
        kind = list(each[0].parts)[int(np.argmax(self.counts))]
        most = np.zeros(layout.pipeline)
        for group, costs in zip(self.cluster.groups, each, strict=True):
            room = room_bytes(group.accelerator.memory_bytes, costs)
            free = max(0.0, room * (1 + ROUNDING))
            for part in costs.parts[kind]:
                resident = least_resident(
                    part.states,
                    whole=counted_by_rank(layout),
                    forwards_first=layout.executed.forwards_first,
                    once=layout.micro_batches == 1,
                )
                each_bytes = np.maximum(1.0, resident + alive * part.stored_bytes)
                most = np.maximum(most, np.floor(free / each_bytes))
        return bool(most.sum() >= max(self.counts))

    @cached_property
    def counts(self) -> list[int]:
        """[kind] Layers of the model."""
        counts: dict[str, int] = {}
        for layer in self.model.layers:
            counts[layer.kind] = counts.get(layer.kind, 0) + layer.repeat
        return list(counts.values())

    def least_of_kinds(self, each: Sequence[LayoutCosts], figure: str) -> Floats:
        """[group, kind] Least of a figure that the choices of a kind have."""
        pinned = self.pins.recompute
        return np.array(
            [
                [
                    min(
                        cost.sync_s if figure == "sync_s" else cost.forward_s + cost.backward_s
                        for cost in table
                        if pinned in (None, cost.recompute)
                    )
                    for table in costs.kinds.values()
                ]
                for costs in each
            ]
        )

    def _least_s(
        self, layout: Layout, time_s: Floats, credits_s: Floats, *, exposed_s: float
    ) -> float:
        """Least seconds from those of each group and kind; see the head of this module."""
        steady, fill = self.pace_of(layout)
        fastest = FastestOnTypes(
            counts=np.array(self.counts),
            time_s=time_s,
            credits_s=fill * layout.executed.splits_backward * credits_s,
            stages=np.array(list(self.costs.stages_of(layout).values())),
            steady=steady,
            fill=fill,
        )
        passes_s = fastest.passes_s(divided=layout.virtual_stages > 1)
        step_s = max(tables.step_s for tables in self.costs.tables.values())
        # Sums taken in two orders differ in the last bits.
        return (1 - ROUNDING) * (passes_s + fill * exposed_s) + step_s

    def pace_of(self, layout: Layout) -> tuple[float, float]:
        """Return how often the slowest rank's seconds count, and those of all."""
        return layout_pace(self.model, layout)

    def passes_s(self, layout: Layout) -> tuple[Floats, Floats]:
        """[group, kind] Least seconds of a micro-batch with nothing shared, and least credits."""
        if not self._known_s:
            self._work_out([family.first for family in self._families[0]] or [layout])
        if _divided(layout) not in self._known_s:
            self._work_out([layout])
        return self._known_s[_divided(layout)]

    def _work_out(self, layouts: Sequence[Layout]) -> None:
        """Work `passes_s` of many layouts out together."""
        some = {_divided(layout): layout for layout in reversed(layouts)}
        each = [
            tables.passes_s(list(some.values()), self.pins.recompute)
            for tables in self.costs.tables.values()
        ]
        times_s, credits_s = (np.array(found) for found in zip(*each, strict=True))
        for at, key in enumerate(some):
            self._known_s[key] = times_s[:, :, at], credits_s[:, :, at]

    def solve(self, layout: Layout, cutoff_s: float) -> SplitSolution[GraphSolution] | Lost:
        """Return the best order of groups, cuts and options of a layout."""
        step_s = max(costs.step_s for costs in self.costs.costs(layout).values())
        problem = self.instance(layout)
        answer = self.best_split(problem, cutoff_s - step_s)
        if self.rows(layout) is not None:
            answer = self._in_rows(layout, problem, answer, cutoff_s - step_s)
        if isinstance(answer, Infeasible) and self.pins.require:
            return Lost(UNKEPT)
        known_s = self.bound_s(layout) if isinstance(answer, Unfinished) else 0.0
        return judged(answer, layout, cutoff_s, step_s, known_s)

    def rows(self, layout: Layout) -> Rows | None:
        """Return how many entries ranks of several stages may hold by what is required of them.

        None where nothing is.
        """
        if not self.pins.require or layout.virtual_stages == 1:
            return None
        return required_rows(self.model, layout, self.pins.require)

    def _in_rows(
        self, layout: Layout, problem: GraphInstance, free: Split, cutoff_s: float
    ) -> Split:
        """Return the best split whose numbers of layers keep what is required.

        That is the `free` one if its numbers do, and no split takes less than it.
        """
        rows = self.rows(layout)
        if rows is None or not isinstance(free, GraphSolution):
            return free
        sizes = [end - first for first, end in itertools.pairwise(free.split.cuts)]
        if any(within(sizes, row) for row in rows):
            return free
        found: list[Split] = []
        for row in rows:
            one = ilp.solve_graph(
                problem.limited(row),
                time_limit_s=TIES_LIMIT_S,
                at_least_s=free.lower_bound_s,
                cutoff_s=cutoff_s,
            )
            found.append(one)
            if isinstance(one, GraphSolution):
                cutoff_s = min(cutoff_s, one.objective_s)
        left = [one for one in found if not isinstance(one, Infeasible)]
        if not left:
            return found[0]
        best = [one for one in left if isinstance(one, GraphSolution)]
        bound_s = min(one.lower_bound_s for one in left)
        if not best:
            return Unfinished(bound_s) if Unfinished in map(type, left) else Fathomed(bound_s)
        split = replace(best[-1].split, lower_bound_s=bound_s)
        return replace(best[-1], split=split)

    def _dominated(self, layout: Layout) -> bool:
        """Whether another layout of the space can do all that this one can, on every group."""
        return any(
            self.pins.allow(twin)
            and self.refusal(twin) is None
            and all(
                dominates(twin, tables.of(twin), layout, tables.of(layout))
                for tables in self.costs.tables.values()
            )
            for twin in twins(layout)
        )

    def ranked(self, found: SplitSolution[GraphSolution]) -> Ranked:
        """Return the plan of a split and its prediction."""
        plan = planned(self, found)
        groups = [stage.group or "" for stage in plan.stages]
        seats = self.costs.seats(plan.layout, groups, branches_of(plan, self.model))
        tables = self.costs.tables[groups[0]]
        return predicted(plan, found.objective_s, self.model, tables, seats)


class MixedGraphSpace(MixedSpace):
    """The same of layers that form a graph: branches too are taken in the best order."""

    def problem(self, layout: Layout, chains: dict[str, Instance]) -> GraphInstance:
        """Return the partition problem of a layout from those of the groups."""
        return graph_problem(self.costs, layout, self.ordered, chains)

    def least_crossing_s(self, layout: Layout) -> float:
        """Least seconds of what crosses a boundary."""
        names = list(self.costs.tables)
        output_bytes = self.costs.tables[names[0]].output_bytes(layout)
        least_bytes = narrowest_bytes(self.model, output_bytes)
        return min(
            self.costs.crossing_s(layout, a, b, least_bytes) if least_bytes else 0.0
            for a, b in itertools.product(names, names)
        )


def _alive(layout: Layout) -> Floats:
    """[rank] Micro-batches in flight at the moment that counts, of the stage that has least."""
    ranks = layout.pipeline
    if counted_by_rank(layout):
        found = fullest(
            layout.schedule,
            ranks=ranks,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
        least: Floats = found.holding.min(axis=0)
        return least
    most = np.array([in_flight_at_most(layout, rank) for rank in range(ranks)], dtype=float)
    alive: Floats = most - ((most == layout.micro_batches) & (most > 1))
    return alive


def _divided(layout: Layout) -> tuple[object, ...]:
    """What the computation inside layers depends on; axes lie in one order."""
    degrees = layout.tensor, layout.context, layout.expert
    return *degrees, layout.micro_batch, layout.loss, layout.compile, layout.tensor_overlap


def spaces_of(request: Request, *, by_program: bool = False) -> Iterator[SolvedLayout]:
    """Yield the layouts of every set of groups, the largest first.

    Shares are soon solved, and what they reach need not be looked for along a pipeline.
    """
    cluster = request.cluster
    for count in range(len(cluster.groups), 0, -1):
        for groups in itertools.combinations(cluster.groups, count):
            part = request.on(groups)
            # A requirement speaks of the stages of a pipeline.
            if part.cluster.mixed and not request.pins.require:
                yield ShareSpace(part, cluster)
            along = (MixedGraphSpace if request.model.edges else MixedSpace)(part, cluster)
            along.by_program = by_program
            yield along
