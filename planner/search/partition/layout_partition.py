"""A layout as a partition problem, and a solved partition problem as a plan.

instance_of(layout)           what there is to choose: cuts, each layer's recomputation and so on
plan_of(layout, solution)     what was chosen

With one stage a rank, stages are the consecutive layers between cuts.  With several, what is cut
is the chain in the order of ranks (planner.search.partition.stage_counts), and t_s, mem_s of
meshwright.planner.solver.partition_problem are those of a rank, all its stages together:

    T = steady · max_r t_r + Σ_r (fill · t_r - credit_r) + max_r Σ sync + step_s

`steady` and `fill` are those of the schedule (planner.schedules), with the largest stage's share of
an average rank.  A split backward has credit_r = fill Σ c_l, c_l = `Figures.credit_s` being the
least over a layer's choices, which makes the bubble of like ranks max(f, b, f + b - w).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.costs.cut_tensors import colocated_places, in_order
from meshwright.planner.costs.layout_costs import LayoutCosts, counted_by_rank
from meshwright.planner.costs.memory.host_memory import hosts
from meshwright.planner.costs.memory.rank_memory import room_bytes
from meshwright.planner.documents.axes import axes_of
from meshwright.planner.documents.plan import (
    Layout,
    Mesh,
    OtherPipelines,
    PlacedLayer,
    Plan,
    PlannedGroup,
    PlannedModel,
    Share,
)
from meshwright.planner.documents.plan import Stage as PlanStage
from meshwright.planner.documents.training import Training
from meshwright.planner.documents.units import LONGEST_S
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.closed_form import pace
from meshwright.planner.schedules.schedule import rank_of_stage, splits_backward
from meshwright.planner.search.partition.layer_options import allowed_options
from meshwright.planner.search.partition.rank_partition import RankProblem
from meshwright.planner.search.partition.stage_counts import largest_stage, run_of
from meshwright.planner.solver.graph_instance import DeviceType, GraphInstance

if TYPE_CHECKING:
    from meshwright.planner.costs.layer_strategy import Recomputes, StrategyCost
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.model import ModelGraph
    from meshwright.planner.documents.placement_text import Placement
    from meshwright.planner.requests.request import Request
    from meshwright.planner.solver.partition_problem import Instance, Solution
    from meshwright.planner.solver.requirements import Requirement
    from meshwright.planner.solver.side_constraints import SideConstraint

SHORTEST_TIMEOUT_S = 120.0


def instance_of(
    model: ModelGraph,
    cluster: ClusterSpec,
    layout: Layout,
    costs: LayoutCosts,
    recompute: Recomputes = None,
    require: tuple[Requirement, ...] = (),
    stated: ModelGraph | None = None,
) -> Instance:
    """Return the partition problem of one layout; `recompute` allows that choice alone.

    Every one of `require` must be one that the layout can keep (see `unkept`); they speak of the
    chain of the model as it is `stated`, whose layers may have another order.
    """
    instance = _free_instance(model, cluster, layout, costs, recompute)
    on_host = any(
        option.host_bytes or option.host_resident_bytes
        for table in instance.kinds
        for option in table
    )
    return replace(
        instance,
        sides=_ties(stated or model, layout, require, model),
        hosts=hosts(cluster, layout, costs.host_share) if on_host else (),
    )


def unkept(
    model: ModelGraph, layout: Layout, require: tuple[Requirement, ...]
) -> Requirement | None:
    """Return a requirement that no plan of a layout keeps, because it lacks the stages."""
    numbers = range(len(model.chain))
    return next(
        (requirement for requirement in require if requirement.tie(numbers, layout.stages) is None),
        None,
    )


def _ties(
    model: ModelGraph, layout: Layout, require: tuple[Requirement, ...], ordered: ModelGraph
) -> tuple[SideConstraint, ...]:
    """Return what is required of a layout's stages, for layers numbered as in `ordered`.

    Where ranks have several stages it is met by their numbers of layers
    (meshwright.planner.search.partition.stage_size_rows).
    """
    if not require or layout.virtual_stages > 1:
        return ()
    place = {name: at for at, (name, _) in enumerate(ordered.chain)}
    numbers = [place[name] for name, _ in model.chain]
    ties = (asked.tie(numbers, layout.pipeline) for asked in require)
    return tuple(tie for tie in ties if tie is not None)


def _free_instance(
    model: ModelGraph,
    cluster: ClusterSpec,
    layout: Layout,
    costs: LayoutCosts,
    recompute: Recomputes,
) -> Instance:
    capacity = room_bytes(cluster.groups[0].accelerator.memory_bytes, costs)
    steady, fill = layout_pace(model, layout)
    exposed_s = boundaries_s(costs, layout)
    # Options may differ in forward: packing takes seconds there, a profile has measured others.
    tables = [
        allowed_options(table, layout, recompute, kind) for kind, table in costs.kinds.items()
    ]
    same_forward = all(len({cost.forward_s for cost in table}) == 1 for table in tables)
    apart = layout.executed_schedule.forwards_first and same_forward
    return RankProblem(model, layout, costs, recompute).instance(
        capacity, steady=steady, fill=fill, exposed_s=exposed_s, forward_apart=apart
    )


def branching_problem(
    model: ModelGraph,
    layout: Layout,
    types: Sequence[tuple[DeviceType, float]],
    output_s: tuple[tuple[tuple[float, ...], ...], ...],
) -> GraphInstance:
    """Return the partition problem of a graph's layout on devices of some types.

    Each type has the seconds of one action; that of the loss is in the last layer's own.
    """
    number = {name: at for at, (name, _) in enumerate(model.chain)}
    passes = 3.0 if counted_by_rank(layout) else 2.0
    actions = [passes] * (layout.pipeline - 1) + [passes - 1.0] if layout.pipeline > 1 else [0.0]
    limits = []
    for device_type, action_s in types:
        both = zip(device_type.chain.stages, actions, strict=True)
        stages = tuple(replace(stage, exposed_s=count * action_s) for stage, count in both)
        limits.append(
            replace(device_type, chain=replace(device_type.chain, stages=stages, cut_s=()))
        )
    return GraphInstance(
        types=tuple(limits),
        edges=tuple(sorted({(number[edge.source], number[edge.target]) for edge in model.edges})),
        output_s=output_s,
        names=tuple(number),
        colocated=colocated_places(model),
    )


def layout_pace(model: ModelGraph, layout: Layout) -> tuple[float, float]:
    """Return `steady` and `fill` of a layout."""
    if layout.pipeline == 1:
        return layout.micro_batches - 1.0, 1.0
    share, run = 1.0, run_of(model)
    if layout.virtual_stages > 1 and run is not None:
        share = largest_stage(run, layout.pipeline, layout.virtual_stages)
    return pace(
        layout.schedule,
        ranks=layout.pipeline,
        micro_batches=layout.micro_batches,
        largest_stage=share,
    )


def boundaries_s(costs: LayoutCosts, layout: Layout) -> list[float]:
    """[rank] Exposed seconds of a micro-batch that no layer counts: transfers and actions.

    A stage runs a forward and a backward, or an F, an I and a W, each one action; the layers at
    the ends of the model count one of them (see planner.costs.layer_strategy).  Each of a stage's
    ends that meets another rank has a transfer there.
    """
    ranks, virtual = layout.pipeline, layout.virtual_stages
    if not counted_by_rank(layout):
        last = ranks - 1
        return [costs.boundary_s * ((s > 0) + (s < last)) for s in range(ranks)]
    home = rank_of_stage(layout.schedule, stages=layout.stages, virtual_stages=virtual)
    actions = 3 if splits_backward(layout.schedule) else 2
    result = [virtual * actions * costs.action_s] * ranks
    result[home[0]] -= costs.action_s
    result[home[-1]] -= costs.action_s
    for stage, next_ in itertools.pairwise(home):
        if stage != next_:
            result[stage] += costs.transfer_s
            result[next_] += costs.transfer_s
    return result


def plan_of(
    request: Request,
    layout: Layout,
    costs: LayoutCosts,
    solution: Solution,
    recompute: Recomputes = None,
) -> Plan:
    """Return the plan that a solution of `instance_of` describes, of the same request.

    `recompute` is what layers may recompute, by default what is pinned or anything.
    """
    model, recompute = request.model, recompute or request.pins.recompute
    names = [name for name, _ in model.chain]
    choices = {
        kind: allowed_options(table, layout, recompute, kind) for kind, table in costs.kinds.items()
    }
    if layout.virtual_stages > 1:
        placed = RankProblem(model, layout, costs, recompute).layer_choices(solution)
    else:
        placed = [
            [(at, solution.options[at]) for at in range(first, end)]
            for first, end in itertools.pairwise(solution.cuts)
        ]
    stages = tuple(
        stage_of((names[at], choices[model.chain_kinds[at]][option]) for at, option in stage)
        for stage in placed
    )
    return plan_with(request, layout, stages, step_s=solution.objective_s + costs.step_s)


def stage_of(chosen: Iterable[tuple[str, StrategyCost]], group: str | None = None) -> PlanStage:
    """Return a plan's stage with these layers, each under its choice."""
    layers = tuple(
        PlacedLayer(layer=name, recompute=cost.recompute, activations=cost.activations)
        for name, cost in chosen
    )
    return PlanStage(layers=layers, group=group)


def plan_of_placement(request: Request, layout: Layout, placement: Placement) -> Plan:
    """Return the plan of a layout whose text says what its stages have."""
    if request.cluster.is_mixed:
        raise DocumentError("cluster", "has devices that differ; predict the plan's file instead")
    model, pins = request.model, request.pins
    names = [name for name, _ in (in_order(model) if model.edges else model).chain]
    choices = {"recompute": pins.recompute or "none", "activations": pins.activations or "keep"}
    stages = tuple(
        PlanStage(
            layers=tuple(
                PlacedLayer(layer=name, recompute=recompute, activations=activations)
                for name, recompute, activations in layers
            )
        )
        for layers in placement.stages_of(names, layout.stages, **choices)
    )
    return plan_with(request, layout, stages, step_s=1.0)


def plan_with(
    request: Request,
    layout: Layout,
    stages: tuple[PlanStage, ...],
    *,
    step_s: float,
    groups: tuple[PlannedGroup, ...] | None = None,
    shares: tuple[Share, ...] | None = None,
    others: tuple[OtherPipelines, ...] | None = None,
) -> Plan:
    """Return the plan of a layout with these stages; ranks wait ten times `step_s` for others.

    `others` are pipelines that differ from those of the layout.
    """
    job = request.job
    return Plan(
        model=PlannedModel.of(request.model),
        cluster=request.cluster_name,
        framework=request.framework.name,
        seq_len=job.seq_len,
        document_len=job.document_len,
        global_batch=job.global_batch,
        precision=job.precision,
        mesh=Mesh(
            tensor=layout.tensor,
            context=layout.context,
            data_shard=layout.data_shard,
            data_replicate=layout.data_replicate,
            pipeline=layout.pipeline,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            sequence_parallel=layout.sequence_parallel,
            order=layout.order,
        ),
        zero=layout.zero,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        **axes_of(layout),
        timeout_s=min(max(SHORTEST_TIMEOUT_S, 10.0 * step_s), LONGEST_S),
        training=Training(
            lora=job.lora,
            optimizer=job.optimizer,
            master_weights=job.master_weights,
            objective=job.objective,
        ),
        stages=stages,
        groups=groups,
        shares=shares,
        other_pipelines=others,
    )
