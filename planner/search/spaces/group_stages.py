"""A layout over unequal devices as a partition problem, and its solution as a plan.

Every group has the partition problem that it would have alone
(`planner.search.partition.layout_partition`); together they are the problem of
`planner.solver.graph_instance`, whose stages are the ranks of the pipeline.  What crosses from one
rank to a neighbour depends on the groups of both. Where ranks have several stages in a loop, the
last rank's output goes back to the first: the problem counts the fastest link that the two may
have, and a split that is known the one that it has (`placed_problem`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.costs.layer_strategy import StrategyCost
from meshwright.planner.costs.layout_costs import CostTables, counted_by_rank
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import rank_of_stage
from meshwright.planner.search.partition.layer_options import allowed_options
from meshwright.planner.search.partition.layout_partition import (
    branching_problem,
    plan_with,
    stage_of,
)
from meshwright.planner.search.partition.rank_partition import RankProblem
from meshwright.planner.solver.graph_instance import (
    DeviceType,
    GraphInstance,
    GraphSolution,
    in_a_row,
)

if TYPE_CHECKING:
    from meshwright.planner.costs.group_costs import GroupCosts
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.plan import Layout, Plan, Stage
    from meshwright.planner.search.goals import SplitSolution
    from meshwright.planner.search.spaces.groups import GroupSpace
    from meshwright.planner.solver.partition_problem import Instance


def stages_problem(costs: GroupCosts, layout: Layout, chains: dict[str, Instance]) -> GraphInstance:
    """Return the problem of a layout from those of the groups."""
    crossings_s = _crossings_s(costs, layout)
    back_s = min(ways_back_s(costs, layout))
    return _problem(costs, layout, chains, back_s, _cuts_s(costs, layout, crossings_s))


def placed_problem(
    problem: GraphInstance, costs: GroupCosts, layout: Layout, back_s: float
) -> GraphInstance:
    """Return the problem of a layout whose way back takes `back_s`, from what `stages_problem` is.

    Where it is what two ranks have, only splits with these at both ends mean anything in it.
    """
    more_s = (layout.virtual_stages - 1) * (back_s - min(ways_back_s(costs, layout)))
    if not more_s:
        return problem
    return replace(
        problem,
        types=tuple(
            replace(
                device_type,
                chain=replace(
                    device_type.chain,
                    stages=tuple(
                        replace(stage, exposed_s=stage.exposed_s + more_s)
                        if rank in (0, layout.pipeline - 1)
                        else stage
                        for rank, stage in enumerate(device_type.chain.stages)
                    ),
                ),
            )
            for device_type in problem.types
        ),
    )


def computing_problem(
    costs: GroupCosts, layout: Layout, chains: dict[str, Instance]
) -> GraphInstance:
    """Return the same where nothing takes time but computation, and with what is taken back."""
    none_s = [[0.0] * len(chains)] * len(chains)
    bare = {
        name: replace(chain, credits_s=(), forward_apart=False) for name, chain in chains.items()
    }
    return replace(_problem(costs, layout, bare, 0.0, none_s), output_s=())


def _problem(
    costs: GroupCosts,
    layout: Layout,
    chains: dict[str, Instance],
    back_s: float,
    cuts_s: list[list[float]],
) -> GraphInstance:
    apart = all(chain.forward_apart for chain in chains.values())
    layers, numbers = len(next(iter(chains.values())).layers), costs.stages_of(layout)
    return GraphInstance(
        types=tuple(
            DeviceType(
                name=name,
                stages=numbers[name],
                chain=replace(
                    chains[name],
                    stages=tuple(
                        replace(stage, exposed_s=exposed_s)
                        for stage, exposed_s in zip(
                            chains[name].stages,
                            _exposed_s(layout, costs.tables[name], back_s),
                            strict=True,
                        )
                    ),
                    forward_apart=apart,
                ),
            )
            for name in chains
        ),
        edges=in_a_row(layers),
        output_s=tuple(tuple((cut_s,) * layers for cut_s in row) for row in cuts_s),
    )


def graph_problem(
    costs: GroupCosts, layout: Layout, model: ModelGraph, chains: dict[str, Instance]
) -> GraphInstance:
    """Return the problem of a graph's layout from the groups' chains of its layers in order.

    Each output is sent over the link between the groups of both stages.
    """
    names, types = list(costs.tables), stages_problem(costs, layout, chains).types
    return branching_problem(
        model,
        layout,
        [(device_type, costs.tables[device_type.name].action_s) for device_type in types],
        tuple(
            tuple(_outputs_s(costs, layout, model, before, after) for after in names)
            for before in names
        ),
    )


def _outputs_s(
    costs: GroupCosts, layout: Layout, model: ModelGraph, before: str, after: str
) -> tuple[float, ...]:
    """[layer] Seconds of its output from a stage on one group to one on another."""
    if layout.pipeline == 1:
        return (0.0,) * len(model.chain)
    by_kind = {
        kind: costs.crossing_s(layout, before, after, size)
        for kind, size in costs.tables[before].output_bytes(layout).items()
    }
    return tuple(by_kind[kind] for kind in model.chain_kinds)


def _crossings_s(costs: GroupCosts, layout: Layout) -> list[list[float]]:
    """[group before][group after] Seconds of one crossing from a rank to its neighbour."""
    if layout.pipeline == 1:
        return [[0.0]]
    return [
        [costs.crossing_s(layout, before, after) for after in costs.tables]
        for before in costs.tables
    ]


def _cuts_s(costs: GroupCosts, layout: Layout, crossings_s: list[list[float]]) -> list[list[float]]:
    """[group before][group after] Seconds that each of two neighbours spends on a micro-batch.

    Each of the V stages of a rank has a neighbour on the next rank.  With whole backwards and one
    stage a rank, a boundary also stands for one of the two actions of each.
    """
    if layout.pipeline == 1:
        return crossings_s
    if counted_by_rank(layout):
        return [[layout.virtual_stages * each_s for each_s in row] for row in crossings_s]
    action_s = [tables.action_s for tables in costs.tables.values()]
    return [
        [each_s + max(before_s, after_s) for each_s, after_s in zip(row, action_s, strict=True)]
        for row, before_s in zip(crossings_s, action_s, strict=True)
    ]


def ways_back_s(costs: GroupCosts, layout: Layout) -> list[float]:
    """Return seconds of a transfer from any last rank to any first one; 0 where there is none."""
    numbers = costs.stages_of(layout)
    return [
        way_back_s(costs, layout, first, last)
        for last in numbers
        for first in numbers
        if last != first or numbers[last] > 1
    ] or [0.0]


def way_back_s(costs: GroupCosts, layout: Layout, first: str, last: str) -> float:
    """Return seconds of a transfer from the last rank's group to the first one's, if there is one.

    There is where ranks have several stages, one behind the other in a loop.
    """
    loop = schedule_of(layout.schedule).placement == "loop"
    return (
        float(costs.crossing_s(layout, last, first)) if layout.virtual_stages > 1 and loop else 0.0
    )


def _exposed_s(layout: Layout, tables: CostTables, back_s: float) -> list[float]:
    """[rank] Seconds of a micro-batch that neither layers nor neighbours count.

    These are actions, of which the layers at the ends of the model count one each, and the way
    back from the last rank to the first, whose transfer takes `back_s`.
    """
    ranks, virtual = layout.pipeline, layout.virtual_stages
    if not counted_by_rank(layout):
        return [0.0] * ranks
    action_s = tables.action_s * tables.action_share(virtual)
    home = rank_of_stage(layout.schedule, stages=layout.stages, virtual_stages=virtual)
    schedule = schedule_of(layout.schedule)
    result = [virtual * (3 if schedule.splits_backward else 2) * action_s] * ranks
    result[home[0]] -= action_s
    result[home[-1]] -= action_s
    result[0] += (virtual - 1) * back_s
    result[-1] += (virtual - 1) * back_s
    return result


def plan_of_split(space: GroupSpace, split: SplitSolution[GraphSolution]) -> Plan:
    """Return the plan that a solution describes."""
    return plan_with(
        space.request,
        split.layout,
        stages_of_split(space, split),
        step_s=split.objective_s,
        groups=space.planned_groups,
    )


def stages_of_split(space: GroupSpace, split: SplitSolution[GraphSolution]) -> tuple[Stage, ...]:
    """Return the stages of a plan that a solution describes."""
    layout, group_of_rank = split.layout, split.split.stage_types
    home = rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    names = [name for name, _ in space.ordered.chain]
    placed = (_split_shares if layout.virtual_stages > 1 else _consecutive)(space, split)
    groups = space.planned_groups
    return tuple(
        stage_of(
            ((names[at], cost) for at, cost in layers), group_of_rank[rank] if groups else None
        )
        for layers, rank in zip(placed, home, strict=True)
    )


Placed = list[list[tuple[int, StrategyCost]]]


def _consecutive(space: GroupSpace, solution: SplitSolution[GraphSolution]) -> Placed:
    """[stage] Positions of its layers and what becomes of them, one stage a rank."""
    layout, split = solution.layout, solution.split.split
    kinds, order = space.ordered.chain_kinds, solution.split.order
    placed: Placed = []
    for group, (first, end) in zip(
        solution.split.stage_types, itertools.pairwise(split.cuts), strict=True
    ):
        tables = space.costs.tables[group].costs_of(layout).kinds
        choices = {
            kind: allowed_options(tables[kind], layout, space.candidates.recompute, kind)
            for kind in tables
        }
        placed.append(
            [
                (layer, choices[kinds[layer]][option])
                for layer, option in zip(order[first:end], split.options[first:end], strict=True)
            ]
        )
    return placed


def _split_shares(space: GroupSpace, solution: SplitSolution[GraphSolution]) -> Placed:
    """The same where ranks have several stages: shares of like layers (`stage_counts`)."""
    layout, split = solution.layout, solution.split.split
    groups = sorted(set(solution.split.stage_types))
    problems = {
        group: RankProblem(
            space.model, layout, space.costs.tables[group].costs_of(layout), space.pins.recompute
        )
        for group in groups
    }
    shares = problems[groups[0]].shares
    assert shares is not None, "ranks have several stages"
    # Choices of every group have numbers of their own, those that store least first.
    like = space.model.chain_kinds[shares.run.before]
    numbered: list[StrategyCost] = []
    order: list[int] = []
    first_of: dict[tuple[str, str], int] = {}
    for group, problem in problems.items():
        for kind in problem.costs.kinds:
            first = first_of[group, kind] = len(numbered)
            numbered += problem.choices(kind)
            if kind == like:
                entries = range(first, len(numbered))
                order += sorted(entries, key=lambda n: (numbered[n].layer_bytes.stored, -n))
    choices: list[tuple[int, ...]] = []
    for rank, (first, end) in enumerate(itertools.pairwise(split.cuts)):
        group = solution.split.stage_types[rank]
        for entry in range(first, end):
            chosen = problems[group].chosen(entry, split.options[entry])
            choices.append(tuple(first_of[group, kind] + choice for kind, choice in chosen))
    placed = shares.layer_choices(split.cuts, choices, order)
    return [[(at, numbered[choice]) for at, choice in stage] for stage in placed]
