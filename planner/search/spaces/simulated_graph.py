"""Layouts of graphs of layers by what they simulate.

A bound of `planner.search.bounds.simulated_step` that is valid for stages of any seconds is so
whatever layers stages have:

    T >= m max_r t_r + σ_r        T >= K Σ_r t_r + 2 n Σ_b c_b

with c_b the seconds of a transfer over boundary b that computation may hide, of which `n` follow
one another on a path through all ranks (`transfers`).  Those that computation does not hide are
seconds of their senders, so they are in t_r.  Both are objectives of the partition problem of a
graph: steady m and fill 0, and steady 0 and fill K with seconds of a cut

    w x + (1 - w) (n / K) x

charged to both of its stages, x being the seconds of all outputs that cross it and w the share of
them that senders wait for.  The solver's optimum over all downsets, or its bound where there are
too many, is a bound of the simulated step.

Every rank has what one downset has and another lacks.  Where there are few downsets, these are
the columns of a program (`planner.search.bounds.simulated_optimum`), whose optimum is that of the
layout. Where a rank's layers have too many choices to list, one column stands for all: each layer
at its fastest, whether or not that fits, which no choice is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshwright.planner.costs.cut_tensors import colocated_places, readers_of
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Layout
from meshwright.planner.search.bounds.simulated_mixed_devices import fill_of
from meshwright.planner.search.bounds.simulated_optimum import (
    Columns,
    CutPoints,
    Links,
    RankColumn,
    no_slower,
)
from meshwright.planner.search.bounds.simulated_step import transfers
from meshwright.planner.search.spaces.group_stages import graph_problem
from meshwright.planner.search.spaces.mixed import GraphSpace
from meshwright.planner.search.spaces.simulated_mixed import SimulatedMixed, closed_form_solution
from meshwright.planner.solver.graph_instance import GraphInstance, GraphSolution
from meshwright.planner.solver.graphs.ideals import ideals
from meshwright.planner.solver.partition_problem import Instance

MOST_PLACES = 600
"""Downsets of graphs whose columns are listed."""


class GraphColumns(Columns):
    """The columns of a graph's layout on one type of devices; see the head."""

    def _contents(
        self, rank: int, first: int, end: int, options: tuple[int, ...]
    ) -> dict[int, list[tuple[int, int]]]:
        return {rank: list(zip(self.places.between(first, end), options, strict=True))}

    def _new(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...]
    ) -> list[RankColumn] | None:
        fastest = self._fastest(kinds)
        if self._sure(kinds, fastest) and self._fits(rank, (first, end), fastest):
            return [self._column(rank, first, end, fastest)]
        if self._too_many(kinds):
            return self._quickest(rank, first, end, kinds)
        return super()._new(rank, first, end, kinds)

    def _quickest(
        self, rank: int, first: int, end: int, kinds: tuple[int, ...]
    ) -> list[RankColumn]:
        if self._too_many(kinds):
            return [self._column(rank, first, end, self._fastest(kinds))]
        return super()._quickest(rank, first, end, kinds)

    def _sure(self, kinds: tuple[int, ...], options: tuple[int, ...]) -> bool:
        """Whether each layer's option is the fastest in every part of its seconds."""
        tables = self.instance.kinds
        return all(
            no_slower([tables[kind][at]], [other])
            for kind, at in zip(kinds, options, strict=True)
            for other in tables[kind]
        )


class SimulatedGraph(SimulatedMixed, GraphSpace):
    """The layouts of a graph, with bounds of the simulated step and splits by it.

    Bounds hold for whatever layers ranks have, so also for downsets of a graph, and where there are
    few of these, they are the places between which ranks have columns.
    """

    columns_of = GraphColumns

    def places(self, layout: Layout) -> CutPoints | None:
        """Return the downsets, if they are few."""
        return self._places

    def links(self, layout: Layout) -> Links:
        """[group before][group after][place] Seconds of a transfer of all that crosses it."""
        problem: GraphInstance = self.closed_form.instance(layout)
        places, readers = self._places, problem.readers()
        assert places is not None
        return [
            [places.downsets.crossing(readers, np.array(output_s)) for output_s in row]
            for row in problem.output_s
        ]

    @cached_property
    def _places(self) -> CutPoints | None:
        return places_of(self.ordered)

    def read(
        self, layout: Layout, order: Sequence[int], ends: Sequence[int], options: Sequence[int]
    ) -> GraphSolution:
        """Return the split of types [rank], downsets [rank + 1] and options."""
        assert self._places is not None
        layers, cuts = self._places.laid(ends)
        return closed_form_solution(self.closed_form, layout, order, cuts, options, layers)

    def computing(
        self, layout: Layout, chains: dict[str, Instance], *, flat: bool
    ) -> GraphInstance:
        """Return the problem of ranks that nothing but computation takes time on.

        What computation does not hide of a transfer its sender waits for; see the head.
        """
        problem = graph_problem(self.costs, layout, self.ordered, chains)
        times = next(iter(self.costs.costs(layout).values())).waits
        if flat:
            hidden = transfers(layout) / (2 * (layout.pipeline - 1) * fill_of(layout))
            times += (1 - times) * hidden
        output_s = tuple(
            tuple(tuple(times * each_s for each_s in seconds) for seconds in row)
            for row in problem.output_s
        )
        return replace(problem, output_s=output_s)


def places_of(model: ModelGraph) -> CutPoints | None:
    """Return where a graph of layers one by one can be cut, if its places are few."""
    every = ideals(readers_of(model), most=MOST_PLACES, colocated=colocated_places(model))
    return None if every is None else CutPoints(every)
