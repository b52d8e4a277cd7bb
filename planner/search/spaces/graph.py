"""The search for graphs of layers: which layout, which split, over all orders of the branches.

For each layout the split of the graph and every layer's recomputation are chosen together: exactly
over all orders in which branches can be taken while the graph has at most
`planner.costs.crossings.MOST_IDEALS` downsets, else as the best of several orders with a bound for
all (`planner.solver.graphs.lattice`).  A tensor that stages pass on is sent, and counted, at every
boundary that it crosses.  For its buffers every stage sets aside what the widest boundary of any
split needs; the prediction of the chosen plan counts what its own boundaries need.

Layouts wait in `planner.search.queue` by their computation and their least communication.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.costs.crossings import MOST_IDEALS, in_order
from planner.costs.layout_costs import CostTables, LayoutCosts
from planner.costs.seats import branching
from planner.documents.model import ModelGraph
from planner.documents.plan import Layout, Plan, PlannedModel
from planner.search.answer import TIES_LIMIT_S
from planner.search.candidates import Candidates
from planner.search.certificate import (
    BOUNDS,
    COMMUNICATION,
    COMPUTATION,
    UNKEPT,
)
from planner.search.formulation import branching_problem, instance_of, plan_of
from planner.search.goals import SplitSolution, judged
from planner.search.queue import Bound, Layouts, Lost
from planner.search.ranked import Ranked, predicted
from planner.search.space import LayoutFamily
from planner.solver import ilp
from planner.solver.frontier import FrontierStore
from planner.solver.graph_instance import DeviceType, GraphInstance, GraphSolution
from planner.solver.graphs.lattice import GraphEffort
from planner.solver.instance import Infeasible
from planner.solver.solve import solve

MOST_PAIRS = 10_000_000
"""Pairs of downsets compared at once; more leave a gap."""
TRIED_FOR_S = 2.0
"""Seconds of the integer program of one layout's hosts where any split that fits will do."""
PROGRAMS, MOVES = 160, 40
"""Of graphs with more downsets: bounds of cuts, and moves of them, that all layouts share."""


def any_split() -> GraphEffort:
    """Return what searches share that ask for any split that fits."""
    return GraphEffort(programs=0, moves=0, most_ideals=MOST_IDEALS, most_pairs=MOST_PAIRS)


class GraphSpace(Layouts):
    """The partition problems of a graph's layouts: one stage a rank."""

    def __init__(
        self,
        candidates: Candidates,
        *,
        by_program: bool = False,
        effort: GraphEffort | None = None,
    ) -> None:
        """The integer program decides where it is asked to, or else the exact solver.

        An `effort` is what several spaces share that ask for any split that fits: they give the
        integer program of hosts less time.
        """
        self.candidates = candidates
        self._tables: CostTables = candidates.tables
        self._model: ModelGraph = in_order(candidates.model)
        self._frontiers = FrontierStore()
        self._by_program = by_program
        self._effort = effort or GraphEffort(
            programs=PROGRAMS, moves=MOVES, most_ideals=MOST_IDEALS, most_pairs=MOST_PAIRS
        )
        self._limit_s = TIES_LIMIT_S if effort is None else TRIED_FOR_S

    def costs_of(self, layout: Layout) -> tuple[LayoutCosts, ...]:
        """Return the costs of a layout."""
        return (self._tables.of(layout),)

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        return self.candidates.refusal(layout)

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [
            (BOUNDS[COMPUTATION], lambda _: 0.0),
            (BOUNDS[COMMUNICATION], self.candidates.communication_s),
        ]

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield every layout that keeps what the user fixed, by family and schedule."""
        refused.update(self.candidates.refused)
        self.candidates.computation_s()
        for family in self.candidates.families:
            least_s = self.candidates.timetables_s(family)
            yield from zip(least_s, family.by_timetable(), strict=True)

    def instance(self, layout: Layout) -> GraphInstance:
        """Return the partition problem of a layout."""
        costs, model = self._tables.of(layout), self._model
        chain = instance_of(
            model,
            self.candidates.cluster,
            layout,
            costs,
            self.candidates.pins.recompute,
            self.candidates.pins.require,
            self.candidates.model,
        )
        sent_s = {
            kind: self._tables.crossing_s(layout, [size])
            for kind, size in self._tables.output_bytes(layout).items()
        }
        alike = DeviceType(name="all", stages=layout.pipeline, chain=chain)
        output_s = tuple(sent_s[layer.kind] for _, layer in model.chain)
        return branching_problem(model, layout, [(alike, costs.action_s)], ((output_s,),))

    def solve(self, layout: Layout, cutoff_s: float) -> SplitSolution[GraphSolution] | Lost:
        """Return the best split of a layout."""
        problem, step_s = self.instance(layout), self._tables.of(layout).step_s
        answer = (
            ilp.solve_graph(problem, time_limit_s=TIES_LIMIT_S)
            if self._by_program
            else solve(
                problem,
                cutoff_s=cutoff_s - step_s,
                frontiers=self._frontiers,
                effort=self._effort,
                time_limit_s=self._limit_s,
            )
        )
        if isinstance(answer, Infeasible) and self.candidates.pins.require:
            return Lost(UNKEPT)
        known_s = self.candidates.communication_s(layout)
        return judged(answer, layout, cutoff_s, step_s, known_s)

    def ranked(self, found: SplitSolution[GraphSolution]) -> Ranked:
        """Return the plan of a split and its prediction."""
        original = self.candidates.model
        names = [found.split.problem.name(layer) for layer in found.split.order]
        ordered = in_order(self._model, names)
        plan = plan_of(
            replace(self.candidates.request, model=ordered),
            found.layout,
            self._tables.of(found.layout),
            found.split.split,
        )
        # The plan is for the model as its source has it, whatever the order of its branches.
        plan = Plan(**{**dict(plan), "model": PlannedModel.of(original)})
        cuts = found.split.split.cuts
        seats = branching(
            self._tables, found.layout, [names[a:b] for a, b in itertools.pairwise(cuts)]
        )
        return predicted(plan, found.objective_s, original, self._tables, seats)
