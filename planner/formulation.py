"""A layout as a partition problem, and a solved partition problem as a plan.

instance_of(layout)           what there is to choose: cuts and each layer's recomputation
plan_of(layout, solution)     what was chosen
"""

from __future__ import annotations

from planner.cluster import ClusterSpec
from planner.costs import LayoutCosts, StrategyCost
from planner.instance import Instance, Option, Solution, Stage
from planner.model import ModelGraph
from planner.plan import Job, Layout, Mesh, PlacedLayer, Plan, PlannedModel
from planner.plan import Stage as PlanStage
from planner.profile import Recompute
from planner.schedule import most_in_flight

SHORTEST_TIMEOUT_S = 120.0


def instance_of(
    model: ModelGraph,
    cluster: ClusterSpec,
    layout: Layout,
    costs: LayoutCosts,
    recompute: Recompute | None = None,
) -> Instance:
    """Return the partition problem of one layout; `recompute` allows that choice alone."""
    numbers = {name: number for number, name in enumerate(costs.kinds)}
    capacity = (cluster.groups[0].accelerator.memory_bytes - costs.fixed_bytes) / costs.slack
    last = layout.pipeline - 1
    # Options may differ in forward: packing takes seconds there, a profile has measured others.
    tables = [allowed(table, layout, recompute) for table in costs.kinds.values()]
    same_forward = all(len({cost.forward_s for cost in table}) == 1 for table in tables)
    return Instance(
        layers=tuple(numbers[layer.kind] for _, layer in model.chain),
        kinds=tuple(tuple(_option(cost) for cost in table) for table in tables),
        stages=tuple(
            Stage(
                capacity_bytes=capacity,
                in_flight=most_in_flight(
                    layout.schedule, s, stages=layout.pipeline, micro_batches=layout.micro_batches
                ),
                exposed_s=costs.boundary_s * ((s > 0) + (s < last)),
            )
            for s in range(layout.pipeline)
        ),
        steady=layout.micro_batches - 1,
        forward_apart=layout.schedule == "gpipe" and layout.pipeline > 1 and same_forward,
    )


def plan_of(
    model: ModelGraph,
    cluster_name: str,
    job: Job,
    layout: Layout,
    costs: LayoutCosts,
    solution: Solution,
    recompute: Recompute | None = None,
) -> Plan:
    """Return the plan that a solution of `instance_of` describes, with the same `recompute`."""
    names = [name for name, _ in model.chain]
    choices = {kind: allowed(table, layout, recompute) for kind, table in costs.kinds.items()}
    chosen = [
        choices[layer.kind][option]
        for (_, layer), option in zip(model.chain, solution.options, strict=True)
    ]
    return Plan(
        model=PlannedModel(name=model.name, source=model.source or model.name, digest=model.digest),
        cluster=cluster_name,
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        precision=job.precision,
        mesh=Mesh(
            tensor=layout.tensor,
            context=layout.context,
            data_shard=layout.data_shard,
            data_replicate=layout.data_replicate,
            pipeline=layout.pipeline,
            expert=layout.expert,
            order=layout.order,
        ),
        zero=layout.zero,
        schedule=layout.schedule,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        timeout_s=max(SHORTEST_TIMEOUT_S, 10.0 * (solution.objective_s + costs.step_s)),
        stages=tuple(
            PlanStage(
                layers=tuple(
                    PlacedLayer(
                        layer=names[i],
                        recompute=chosen[i].recompute,
                        activations=chosen[i].activations,
                    )
                    for i in range(solution.cuts[s], solution.cuts[s + 1])
                )
            )
            for s in range(layout.pipeline)
        ),
    )


def allowed(
    table: tuple[StrategyCost, ...], layout: Layout, recompute: Recompute | None
) -> tuple[StrategyCost, ...]:
    """Return what a layer may choose among.

    To offload or to compress is left out where another choice is no worse in any figure: then no
    optimum needs it.  Forward and backward count apart under GPipe alone.
    """
    apart = layout.schedule == "gpipe" and layout.pipeline > 1
    asked = [cost for cost in table if recompute in (None, cost.recompute)]
    return tuple(
        cost
        for at, cost in enumerate(asked)
        if cost.activations == "keep"
        or not any(_no_worse(other, cost, apart, first=i < at) for i, other in enumerate(asked))
    )


def _no_worse(other: StrategyCost, cost: StrategyCost, apart: bool, *, first: bool) -> bool:
    """Whether `other` can stand for `cost`; of two that are equal the first can."""
    theirs, mine = _figures(other, apart), _figures(cost, apart)
    if other is cost or any(a > b for a, b in zip(theirs, mine, strict=True)):
        return False
    return first or theirs != mine


def _figures(cost: StrategyCost, apart: bool) -> tuple[float, ...]:
    return (
        cost.forward_s if apart else cost.forward_s + cost.backward_s,
        cost.backward_s if apart else 0.0,
        cost.stored_bytes,
        cost.transient_bytes,
        cost.resident_bytes,
        cost.sync_s,
        cost.host_bytes,
        cost.host_resident_bytes,
    )


def _option(cost: StrategyCost) -> Option:
    return Option(
        name=cost.name,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        stored_bytes=cost.stored_bytes,
        transient_bytes=cost.transient_bytes,
        resident_bytes=cost.resident_bytes,
        sync_s=cost.sync_s,
    )
