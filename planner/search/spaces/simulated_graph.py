"""Layouts of graphs of layers by what they simulate, on devices that are alike.

A bound of `planner.search.simulated_bounds` that holds for stages of any seconds holds for whatever
layers stages have:

    T >= m max_r t_r + σ_r        T >= K Σ_r t_r + 2 n Σ_b c_b

with c_b the seconds of a transfer over boundary b that computation may hide, of which `n` follow
one another on a path through all ranks (`transfers`).  Those that computation does not hide are
seconds of their senders, so they are in t_r.  Both are objectives of the partition problem of a
graph: steady m and fill 0, and steady 0 and fill K with seconds of a cut

    w x + (1 - w) (n / K) x

charged to both of its stages, x being the seconds of all outputs that cross it and w the share of
them that senders wait for.  The solver's optimum over all downsets, or its bound where there are
too many, is a bound of the simulated step.  Without a pipeline what is simulated is the closed
form.

Every rank holds what one downset has and another lacks.  Where there are few downsets, these are
the columns of a program (`planner.search.simulated_program`), whose optimum is that of the layout.
Where a rank's layers have too many choices to list, one column stands for all: each layer at its
fastest, whether or not that fits, which no choice is below.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from planner.costs.crossings import colocated, readers_of
from planner.documents.model import ModelGraph
from planner.documents.plan import Layout
from planner.search.certificate import BOUNDS
from planner.search.certificate import SOLVED as BY_OPTIMUM
from planner.search.goals import SplitSolution
from planner.search.queue import Bound, Lost
from planner.search.simulated_bounds import SimulatedCandidates, paces, transfers
from planner.search.simulated_program import (
    Choices,
    Column,
    Columns,
    GraphPlaces,
    choices_of,
    no_slower,
)
from planner.search.spaces.graph import GraphSpace
from planner.search.spaces.simulated import PROGRAMS, SOLVED, BySimulation, Tried, bound_of
from planner.solver.graph_instance import GraphInstance, GraphSolution
from planner.solver.graphs.ideals import ideals
from planner.solver.instance import Fathomed, Infeasible, Instance, broken, priced
from planner.solver.solve import solve

ABOVE = 1.2
"""How many times the simulated step the closed form may be (planner.costs.predict)."""
MOST_PLACES = 600
"""Downsets of graphs whose columns are listed."""

Way = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Types [rank], places [rank + 1], and options rank after rank."""


class SimulatedGraph(BySimulation, GraphSpace):
    """The layouts of a graph, with bounds of the simulated step and splits by it."""

    def __init__(self, own: GraphSpace, tried: Tried, closed_form_s: float) -> None:
        """`own` has the same layouts by the closed form, where none takes `closed_form_s`."""
        super().__init__(SimulatedCandidates.of(own.candidates))
        self.own, self.tried = own, tried
        self._closed_form_s = closed_form_s

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's simulated step, and what falls to each."""
        first, (name, _) = super().bounds
        return [first, (name, self.bound_s), (BOUNDS[BY_OPTIMUM], self.solved_s)]

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step, memory and cuts ignored."""
        if layout.pipeline == 1:
            return max(self._closed_form_s, self.own.candidates.communication_s(layout))
        return self.candidates.communication_s(layout)

    def repeats(self, layout: Layout) -> bool:
        """Whether another layout of the space does the same."""
        return self.own.candidates.repeats(layout)

    def problems(self, layout: Layout) -> Iterator[GraphInstance]:
        """Yield problems none of whose optima is above the least simulated step; see the head."""
        count, ranks = layout.micro_batches, layout.pipeline
        waits = self._tables.of(layout).waits
        problem = self.own.instance(layout)
        [sent_s], [own] = problem.output_s[0], problem.types
        # Sums of bytes are no more than what ranks hold, and quicker.
        chain = replace(own.chain, credits_s=(), forward_apart=False, used_bytes=None, sides=())

        def with_pace(chain: Instance, times: float) -> GraphInstance:
            return replace(
                problem,
                types=(replace(own, chain=chain),),
                output_s=((tuple(times * each_s for each_s in sent_s),),),
            )

        steady = tuple(
            tuple(
                replace(one, backward_s=one.backward_s + one.sync_s / count, sync_s=0.0)
                for one in table
            )
            for table in chain.kinds
        )
        yield with_pace(replace(chain, steady=float(count), fill=0.0, kinds=steady), waits)
        *_, (_, fill) = paces(layout.schedule, ranks, count)
        if not fill or layout.executed.splits_backward:
            return
        bare = tuple(tuple(replace(one, sync_s=0.0) for one in table) for table in chain.kinds)
        times = waits + (1 - waits) * transfers(layout) / (2 * (ranks - 1) * fill)
        yield with_pace(replace(chain, steady=0.0, fill=fill, kinds=bare), times)

    def solved_s(self, layout: Layout) -> float | Lost:
        """Return seconds that no split of a layout simulates below, or the limit."""
        self.tried.looked_at[SOLVED] += 1
        if layout.pipeline == 1:
            found = self.own.solve(layout, self.tried.goal.step_s)
            if isinstance(found, Lost):
                return bound_of(found)
            self._try(found)
            return found.lower_bound_s
        return self._least_s(layout, self.tried.goal.limit_s)

    def _least_s(self, layout: Layout, limit_s: float) -> float:
        """Return seconds that no split simulates below, or the limit; splits are tried."""
        step_s, low_s = self._tables.of(layout).step_s, self.bound_s(layout)
        for problem in self.problems(layout):
            answer = solve(
                problem,
                cutoff_s=limit_s - step_s,
                frontiers=self._frontiers,
                effort=self._effort,
            )
            if isinstance(answer, Infeasible):
                return math.inf
            if isinstance(answer, GraphSolution | Fathomed):
                low_s = max(low_s, answer.lower_bound_s + step_s)
            if low_s >= limit_s:
                return low_s
            if isinstance(answer, GraphSolution):
                split = answer.split
                limit_s = min(
                    limit_s, self._closed(layout, answer.order, split.cuts, split.options)
                )
        choices = self._choices(layout, limit_s)
        if choices is not None:
            low_s = max(low_s, choices.cut_s(limit_s))
        if low_s >= limit_s:
            return low_s
        if not self.own.instance(layout).chain.sides:  # which takes a program in the closed form
            closed_form = self.own.solve(layout, limit_s * ABOVE)
            if isinstance(closed_form, SplitSolution):
                limit_s = min(limit_s, self._try(closed_form))
        effort = self.tried.effort
        if choices is None or not self.tried.may(PROGRAMS, effort.programs):
            return low_s
        found_s = choices.optimum(
            limit_s,
            partial(self._try_way, layout),
            actions=effort.actions,
            nodes=effort.nodes,
            most_columns=effort.columns,
            until=time.process_time() + effort.program_s,
        )
        return max(low_s, found_s)

    def _choices(self, layout: Layout, limit_s: float) -> Choices | None:
        """Return what ranks may hold; None where there are too many downsets."""
        problem = self.own.instance(layout)
        if self._places is None or problem.chain.used_bytes is None:
            return None
        sent_s = self._places.every.crossing(problem.readers(), np.array(problem.sent_s()))
        columns = GraphColumns(
            self._model,
            self.candidates.recompute,
            replace(self._tables.of(layout), transfer_s=0.0),  # every place has its own
            layout,
            problem.chain,
            limit_s,
            self.tried.effort.ways,
            self._places,
        )
        return choices_of(
            layout, [columns], [layout.pipeline], [[sent_s]], limit_s, lambda *way: way
        )

    @cached_property
    def _places(self) -> GraphPlaces | None:
        return places_of(self._model)

    def _try_way(self, layout: Layout, way: Way) -> float:
        """Simulate the split of places and options; return its step."""
        _, ends, options = way
        assert self._places is not None
        return self._closed(layout, *self._places.laid(ends), options)

    def _closed(
        self, layout: Layout, order: Sequence[int], cuts: Sequence[int], options: Sequence[int]
    ) -> float:
        """Simulate a split; return its step, inf if it does not fit or keep what is required."""
        problem = self.own.instance(layout)
        types = (0,) * layout.pipeline
        laid = problem.laid(order, cuts, types)
        split = priced(laid, cuts, options)
        if broken(laid, split) is not None:
            return math.inf
        closed_s = split.objective_s + self._tables.of(layout).step_s
        solution = GraphSolution(
            problem=problem, order=tuple(order), types=types, split=split, method="lattice"
        )
        return self._try(SplitSolution(closed_s, closed_s, layout, solution))

    def _try(self, split: SplitSolution[GraphSolution]) -> float:
        return self.tried.keep(self.own.ranked(split))


def places_of(model: ModelGraph) -> GraphPlaces | None:
    """Return where a graph of layers one by one can be cut, if its places are few."""
    every = ideals(readers_of(model), most=MOST_PLACES, colocated=colocated(model))
    return None if every is None else GraphPlaces(every)


class GraphColumns(Columns):
    """The columns of a graph's layout on one type of devices; see the head."""

    def _contents(
        self, rank: int, first: int, end: int, options: tuple[int, ...]
    ) -> dict[int, list[tuple[int, int]]]:
        return {rank: list(zip(self.places.between(first, end), options, strict=True))}

    def _new(self, rank: int, first: int, end: int, kinds: tuple[int, ...]) -> list[Column] | None:
        fastest = self._fastest(kinds)
        if self._sure(kinds, fastest) and self._fits(rank, (first, end), fastest):
            return [self._column(rank, first, end, fastest)]
        if self._too_many(kinds):
            return self._least(rank, first, end, kinds)
        return super()._new(rank, first, end, kinds)

    def _least(self, rank: int, first: int, end: int, kinds: tuple[int, ...]) -> list[Column]:
        if self._too_many(kinds):
            return [self._column(rank, first, end, self._fastest(kinds))]
        return super()._least(rank, first, end, kinds)

    def _sure(self, kinds: tuple[int, ...], options: tuple[int, ...]) -> bool:
        """Whether each layer's option is the fastest in every part of its seconds."""
        tables = self.instance.kinds
        return all(
            no_slower([tables[kind][at]], [other])
            for kind, at in zip(kinds, options, strict=True)
            for other in tables[kind]
        )
