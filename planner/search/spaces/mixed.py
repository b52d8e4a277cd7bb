"""The search along pipelines whose stages may differ: which layout, what runs where.

Every device group of a request is used whole, as stages of a pipeline; without one its devices are
data-parallel ranks with their own shares (`planner.search.spaces.shares`).  For each layout the
order of the groups along the pipeline, the cuts and every layer's treatment are chosen together,
exactly (`planner.solver.solve`); where ranks have several stages, what is cut is the chain in the
order of ranks (`planner.search.partition.stage_counts`).  Layouts wait in `planner.search.queue` by
the bounds of their candidates, then by the least seconds of a split within memory.

Where layers form a graph, on devices that are alike too, the order of its branches is open as well:
exactly while it has at most `planner.costs.cut_tensors.MOST_IDEALS` downsets, else several orders
are tried, with a bound for all (`planner.solver.graphs.lattice`).  A tensor that stages pass on is
sent, and counted, at every boundary that it crosses, over the link between the devices of both. For
its buffers every stage sets aside what the widest boundary of any split needs; the prediction of
the chosen plan counts what its own boundaries need.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.planner.costs.predict import branches_of
from meshwright.planner.costs.stage_placement import branching
from meshwright.planner.documents.tolerances import EQUAL
from meshwright.planner.search.answer import TIES_NODES
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.mixed_family_cuts import FamilyCuts
from meshwright.planner.search.goals import SplitSolution, split_or_pruned, timetable
from meshwright.planner.search.offload_choices import Saving
from meshwright.planner.search.partition.stage_size_rows import is_within
from meshwright.planner.search.plan_candidate import Ranked, predict_candidate
from meshwright.planner.search.proof_account import (
    BOUNDS,
    COMMUNICATION,
    COMPUTATION,
    DOMINATED,
    MEMORY,
    OUT_OF_MEMORY,
    UNFINISHED,
    UNKEPT,
)
from meshwright.planner.search.queue import Bound, Pruned
from meshwright.planner.search.space import kind
from meshwright.planner.search.spaces.group_stages import (
    graph_problem,
    placed_problem,
    plan_of_split,
    stages_problem,
    way_back_s,
    ways_back_s,
)
from meshwright.planner.search.spaces.groups import GroupSpace
from meshwright.planner.solver import ilp
from meshwright.planner.solver.bounds.memory_feasibility import why_no_split
from meshwright.planner.solver.graph_instance import GraphEffort, GraphInstance, GraphSolution
from meshwright.planner.solver.partition_problem import (
    CutOff,
    Infeasible,
    Instance,
    Unfinished,
    evaluate_split,
)
from meshwright.planner.solver.solve import solve, split_bound_s

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.bounds.mixed_device_bounds import GroupCandidates
    from meshwright.planner.search.space import Degrees, LayoutFamily

Split = GraphSolution | Infeasible | CutOff | Unfinished
MOST_BOUNDED = 50
"""Layouts along a pipeline that are bounded within memory, whatever they have in common."""
ALIKE = 1
"""Further layouts bounded within memory of those that differ in sharing and loss alone.
Their closed forms are near one another, and the simulated step decides."""


MOST_KIN = 150
"""Timetables whose layouts are searched in the closed form, where there is no first plan."""
FIRST, LOOSE, HAIR = 6, 1.4, 1e-3
"""Layouts that are solved to have a first plan; largest ratio of its step to what computation
takes; relative excess over it of the bounds of layouts that are left out."""


@dataclass(slots=True)
class FirstStep:
    """The simulated step of a first plan, of whichever set of groups; inf of none."""

    step_s: float = math.inf


class MixedSpace(GroupSpace):
    """The layouts of some groups that use each of them whole, as ranks of a pipeline."""

    def __init__(
        self,
        candidates: GroupCandidates | Candidates,
        *,
        by_program: bool = False,
        effort: GraphEffort | None = None,
        most_nodes: int = TIES_NODES,
        likely: FirstStep | None = None,
    ) -> None:
        """The integer program decides where it is asked to, or else the exact solver.

        With `likely` pipelines are left out where they are many and a first plan is known, be it
        of another set of groups: they are bounded by what they simulate.

        `effort` is left for graphs that have too many downsets, `most_nodes` of the tree of the
        integer program of one layout's hosts and ties.
        """
        super().__init__(candidates)
        self.by_program, self.effort = by_program, effort or GraphEffort()
        self._most_nodes = most_nodes
        self._known_instances: dict[Layout, Any] = {}
        self._bounded_alike: Counter[tuple[object, ...]] = Counter()
        """Layouts with a split within memory that differ in sharing and loss alone."""
        self._communicated_s: dict[Layout, float] = {}
        self._likely = likely
        self.families: FamilyCuts | None = None
        """Bounds of the layouts of one timetable together, of chains on groups that differ."""
        if not isinstance(candidates, Candidates) and not self.model.edges:
            self.families = FamilyCuts(candidates)
        self.first: list[SplitSolution[GraphSolution]] = []
        """Splits that were solved to have a first plan."""

    def refusal(self, layout: Layout) -> str | None:
        """Return why no plan is made of a layout, or None if one can be."""
        return self.candidates.refusal(layout)

    def repeats(self, layout: Layout) -> bool:
        """Return whether another layout of the space does the same."""
        return self.candidates.repeats(layout)

    def bundles(self, refused: Counter[str]) -> Iterator[tuple[float, LayoutFamily]]:
        """Yield every layout that keeps what the user fixed, those alike but for sharing in one."""
        families = list(self.candidates.by_timetable(refused))
        if self.families is None:
            yield from families
            return
        self.families.group_kin(family for _, family in families)
        likely = self._likely
        if likely is not None and (likely.step_s < math.inf or len(self.families.kin) > MOST_KIN):
            bounds_s = {id(family): bound_s for bound_s, family in families}
            likely.step_s = self._first_step_s(self.families, bounds_s, likely.step_s)
        limit_s = math.inf if likely is None else likely.step_s * (1 + HAIR)
        for bound_s, family in families:
            if limit_s < math.inf and (bound_s >= limit_s or family.degrees.pipeline > 1):
                self.passed_over_s = min(self.passed_over_s, bound_s)
            else:
                yield bound_s, family

    def _first_step_s(
        self, families: FamilyCuts, bounds_s: dict[int, float], step_s: float
    ) -> float:
        """Return the simulated step of a plan that is likely to be fast, or `step_s` if less.

        `bounds_s` are those of families by their ids.  Of each mesh the timetables with the least
        computation are bounded, and the lowest solved.
        """
        by_mesh: dict[Degrees, list[tuple[float, int, LayoutFamily]]] = {}
        for number, kin in enumerate(families.kin):
            if kin[0].degrees.pipeline > 1:
                least_s = min(bounds_s[id(family)] for family in kin)
                by_mesh.setdefault(kin[0].degrees, []).append((least_s, number, kin[0]))
        some = [entry for mesh in by_mesh.values() for entry in sorted(mesh)[:: len(mesh) // 3 + 1]]
        if not some:
            return step_s
        limit_s = min(step_s, LOOSE * min(some)[0])
        bounded = [
            (families.bound_s(families.kin[number], limit_s), number) for _, number, _ in some
        ]
        for least_s, number in sorted(bounded)[:FIRST]:
            if least_s >= min(step_s, limit_s):
                break
            layouts = [
                layout
                for family in families.kin[number]
                for layout in family.part(losses=family.losses[:1]).layouts()
                if self.refusal(layout) is None
            ]
            if not layouts:
                continue
            solution = self.solve(min(layouts, key=self.candidates.communication_s), math.inf)
            if isinstance(solution, SplitSolution):
                plan = self.candidate_of(solution)
                if plan.prediction.fits:
                    self.first.append(solution)
                    step_s = min(step_s, plan.prediction.step_time_s)
        return step_s

    @property
    def bounds(self) -> Sequence[tuple[str, Bound]]:
        """Lower bounds on a layout's seconds, and what falls to each."""
        return [
            (BOUNDS[COMPUTATION], lambda _: 0.0),
            (BOUNDS[COMMUNICATION], self._communication_s),
            (BOUNDS[MEMORY], self._memory_s),
        ]

    def _communication_s(self, layout: Layout) -> float:
        """Return the bound with what is sent, which is kept."""
        least_s = self._communicated_s[layout] = self.candidates.communication_s(layout)
        return least_s

    def problem(self, layout: Layout, chains: dict[str, Instance]) -> GraphInstance:
        """Return the partition problem of a layout from those of the groups."""
        return stages_problem(self.costs, layout, chains)

    def instance(self, layout: Layout) -> Any:
        """Return the partition problem of a layout."""
        if layout not in self._known_instances:
            self._known_instances[layout] = self.problem(layout, self.chains(layout))
        return self._known_instances[layout]

    def evaluated_split(
        self,
        layout: Layout,
        types: Sequence[int],
        cuts: Sequence[int],
        options: Sequence[int],
        layers: Sequence[int] = (),
    ) -> GraphSolution:
        """Return a split with what it takes in the closed form, of `layers` in their order."""
        names = list(self.costs.tables)
        back_s = way_back_s(self.costs, layout, names[types[0]], names[types[-1]])
        problem = placed_problem(self.instance(layout), self.costs, layout, back_s)
        order = tuple(layers) or tuple(range(len(problem.chain.layers)))
        laid = problem.laid(order, cuts, types)
        split = evaluate_split(laid, cuts, options)
        if layout.executed_schedule.forwards_first and not laid.forward_apart:
            objective_s = _objective_apart_s(laid, cuts, options)
            split = replace(split, objective_s=objective_s)
        return GraphSolution(
            problem=problem, order=order, types=tuple(types), split=split, method="chain"
        )

    def _memory_s(self, layout: Layout) -> float | Pruned:
        """Return the bound within memory, where no other layout can do all that this one can."""
        alike = kind(layout), timetable(layout), layout.micro_batch, Saving.of_layout(layout)
        many = layout.pipeline > 1 and self._bounded_alike.total() >= MOST_BOUNDED
        if many and self._bounded_alike[alike] >= ALIKE:
            self.passed_over_s = min(self.passed_over_s, self._communicated_s.get(layout, 0.0))
            return Pruned(UNFINISHED)
        if self.candidates.dominator(layout) is not None:
            return Pruned(DOMINATED)
        least_s = self.memory_s(layout)
        if least_s == math.inf and self.model.edges:
            return Pruned(OUT_OF_MEMORY, reason=why_no_split(self.instance(layout)))
        self._bounded_alike[alike] += least_s < math.inf
        return least_s

    def memory_s(self, layout: Layout) -> float:
        """Least seconds of a step with what stages can hold; inf if the layout does not fit."""
        return self.split_bound_s(self.instance(layout)) + self._step_s(layout)

    def split_bound_s(self, problem: GraphInstance) -> float:
        """Least seconds of a split within memory; inf if none fits."""
        return split_bound_s(problem, frontiers=self.frontiers, effort=self.effort)

    def _step_s(self, layout: Layout) -> float:
        """Seconds once per step that no split of a layout changes."""
        return max(costs.step_s for costs in self.costs_of(layout))

    def best_split(self, problem: GraphInstance, cutoff_s: float) -> Split:
        """Return the best order of groups, of branches, cuts and options of a layout."""
        if self.by_program:
            return ilp.solve_graph(problem, most_nodes=TIES_NODES)
        return solve(
            problem,
            cutoff_s=cutoff_s,
            frontiers=self.frontiers,
            effort=self.effort,
            most_nodes=self._most_nodes,
        )

    def solve(self, layout: Layout, cutoff_s: float) -> SplitSolution[GraphSolution] | Pruned:
        """Return the best order of groups, cuts and options of a layout."""
        step_s, problem = self._step_s(layout), self.instance(layout)
        if self.effort.ways <= 0 and cutoff_s < math.inf:
            return Pruned(UNFINISHED, bound_s=self.candidates.communication_s(layout))
        answer = self.best_split(problem, cutoff_s - step_s)
        answer = self._in_rows(layout, problem, answer, cutoff_s - step_s)
        if isinstance(answer, GraphSolution):
            answer = self._with_planned_links(layout, answer)
        if isinstance(answer, Infeasible) and self.pins.require:
            return Pruned(UNKEPT)
        known_s = 0.0
        if isinstance(answer, Unfinished | CutOff):
            known_s = self.candidates.communication_s(layout)
        return split_or_pruned(answer, layout, cutoff_s, step_s, known_s)

    def _with_planned_links(self, layout: Layout, solution: GraphSolution) -> GraphSolution:
        """Return a split with what its plan takes: a problem may count less.

        Its last rank has one link to the first.  Where that is not the fastest, another split may
        do better: the best one over the slowest.  Forward and backward count apart if all forwards
        come first; a problem does not where a layer's options differ in forward.
        """
        ways_s, apart = ways_back_s(self.costs, layout), layout.executed_schedule.forwards_first
        if min(ways_s) == max(ways_s) and solution.problem.chain.forward_apart == apart:
            return solution
        bound_s, best = solution.lower_bound_s, self._evaluated_again(layout, solution)
        if min(ways_s) < max(ways_s) and best.objective_s > solution.objective_s * (1 + EQUAL):
            slowest = placed_problem(self.instance(layout), self.costs, layout, max(ways_s))
            cutoff_s = best.objective_s
            other = self._in_rows(layout, slowest, self.best_split(slowest, cutoff_s), cutoff_s)
            if isinstance(other, GraphSolution):
                other = self._evaluated_again(layout, other)
                best = min(best, other, key=lambda split: split.objective_s)
        return replace(best, split=replace(best.split, lower_bound_s=bound_s))

    def _evaluated_again(self, layout: Layout, solution: GraphSolution) -> GraphSolution:
        split = solution.split
        return self.evaluated_split(
            layout, solution.types, split.cuts, split.options, solution.order
        )

    def _in_rows(
        self, layout: Layout, problem: GraphInstance, free: Split, cutoff_s: float
    ) -> Split:
        """Return the best split whose numbers of layers keep what is required.

        That is the `free` one if its numbers do, and no split takes less than it.
        """
        rows = self.candidates.rows(layout)
        if not rows or not isinstance(free, GraphSolution):
            return free
        sizes = [end - first for first, end in itertools.pairwise(free.split.cuts)]
        if any(is_within(sizes, row) for row in rows):
            return free
        splits: list[Split] = []
        for row in rows:
            solution = ilp.solve_graph(
                problem.with_sizes(row),
                most_nodes=TIES_NODES,
                at_least_s=free.lower_bound_s,
                cutoff_s=cutoff_s,
            )
            splits.append(solution)
            if isinstance(solution, GraphSolution):
                cutoff_s = min(cutoff_s, solution.objective_s)
        left = [split for split in splits if not isinstance(split, Infeasible)]
        if not left:
            return splits[0]
        best = [split for split in left if isinstance(split, GraphSolution)]
        bound_s = min(split.lower_bound_s for split in left)
        if not best:
            return Unfinished(bound_s) if Unfinished in map(type, left) else CutOff(bound_s)
        split = replace(best[-1].split, lower_bound_s=bound_s)
        return replace(best[-1], split=split)

    def candidate_of(self, split: SplitSolution[GraphSolution]) -> Ranked:
        """Return the plan of a split and its prediction."""
        plan = plan_of_split(self, split)
        branches = branches_of(plan, self.model)
        groups = [stage.group or self.cluster.groups[0].name for stage in plan.stages]
        tables = self.costs.tables[groups[0]]
        if plan.groups is None and branches is not None:
            seats = branching(tables, plan.layout, branches)
        else:
            seats = self.costs.seats(plan.layout, groups, branches)
        return predict_candidate(plan, split.objective_s, self.model, tables, seats)


def _objective_apart_s(laid: Instance, cuts: Sequence[int], options: Sequence[int]) -> float:
    """Return seconds of a split where all forwards come first, whatever options take of each."""
    chosen = [(laid.options_of(layer)[option],) for layer, option in enumerate(options)]
    apart = replace(
        laid,
        layers=tuple(range(len(chosen))),
        kinds=tuple(chosen),
        credits_s=(),
        used_bytes=None,
        forward_apart=True,
    )
    return evaluate_split(apart, cuts, [0] * len(chosen)).objective_s


class GraphSpace(MixedSpace):
    """The partition problems of a graph's layouts: one stage a rank, on devices of any types."""

    def problem(self, layout: Layout, chains: dict[str, Instance]) -> GraphInstance:
        """Return the partition problem of a layout from those of the groups."""
        return graph_problem(self.costs, layout, self.ordered, chains)
