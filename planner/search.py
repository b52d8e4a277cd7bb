"""The search: every layout, bounded first and solved exactly only where a bound allows it to win.

Objective, the closed form that the certificate speaks of (SOLVER's T):

    T = (m - 1) max_s t_s + sum_s t_s + max_s sync_s + step_s,      mem_s <= capacity

with t_s the seconds of stage s on one micro-batch.  A layout's lower bound takes each layer's
fastest strategy and ignores memory: the slowest stage is at least the mean stage and at least the
slowest layer.  Layouts are solved in the order of their bounds; when the next bound reaches the
best objective found, no layout that is left can be faster, and the search ends with a proof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from planner import inner
from planner.cluster import ClusterSpec
from planner.costs import CostTables, LayoutCosts, StrategyCost, refusal
from planner.errors import DocumentError, NoPlanFits
from planner.frontier import FrontierStore
from planner.instance import Fathomed, Infeasible, Instance, Option, Solution, Stage
from planner.model import ModelGraph
from planner.plan import Job, Layout, Mesh, PlacedLayer, Plan, PlannedModel
from planner.plan import Stage as PlanStage
from planner.predict import predict
from planner.prediction import Certificate, Loser, Prediction
from planner.profile import Profile, Recompute
from planner.schedule import in_flight, orders
from planner.space import Pins, complexity, layouts
from planner.units import bytes_text, seconds_text

CLOSED_FORM = "T = (m-1) max_s t_s + sum_s t_s + max_s sync_s + step_s, memory of every stage held"
TOLERANCE = 1e-9
RUNNERS_UP = 5
MISSES_LOOKED_AT = 8

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a search found: the plan, what it should do, and why nothing else is faster."""

    plan: Plan
    prediction: Prediction
    certificate: Certificate
    search_s: float
    """CPU seconds of the search itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with its costs and its bound."""

    layout: Layout
    costs: LayoutCosts
    lower_bound_s: float


def search(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    *,
    cluster_name: str | None = None,
    profile: Profile | None = None,
    pins: Pins | None = None,
    solver: str = "exact",
    progress: Progress | None = None,
) -> Answer:
    """Return the fastest plan that fits, with its proof; NoPlanFits names the closest miss."""
    started = time.process_time()
    pins = pins or Pins()
    tables = CostTables(model, cluster, job, profile)
    candidates, refused = _candidates(model, cluster, job, tables, pins)
    if not candidates:
        raise NoPlanFits(_nothing_runs(model, cluster, job, refused))
    counts = {"refused by the backend": sum(refused.values())} if refused else {}
    counts |= {"out of memory": 0, "bound": 0, "solved, slower": 0}

    best: tuple[float, tuple[int, ...], Candidate, Solution] | None = None
    losers: list[Loser] = []
    frontiers = FrontierStore()
    for index, candidate in enumerate(candidates):
        if progress:
            progress(index, len(candidates))
        if best and candidate.lower_bound_s > best[0] * (1 + TOLERANCE):
            counts["bound"] += len(candidates) - index
            losers += [_outbounded(c) for c in candidates[index : index + RUNNERS_UP]]
            break
        result = _solved(
            instance_of(model, cluster, candidate, pins), candidate, best, solver, frontiers
        )
        if isinstance(result, Infeasible):
            counts["out of memory"] += 1
            losers.append(_loser(candidate, f"does not fit: {result.reason}"))
        elif isinstance(result, Fathomed):
            counts["bound"] += 1
            bound_s = result.lower_bound_s + candidate.costs.step_s
            losers.append(_loser(candidate, "no split of it is faster", bound_s=bound_s))
        else:
            objective_s = result.objective_s + candidate.costs.step_s
            key = (objective_s, complexity(candidate.layout))
            if best is None or _wins(key, best[:2]):
                if best:
                    counts["solved, slower"] += 1
                    losers.append(_loser(best[2], "solved; slower", objective_s=best[0]))
                best = (*key, candidate, result)
            else:
                counts["solved, slower"] += 1
                losers.append(_loser(candidate, "solved; slower", objective_s=objective_s))
    if progress:
        progress(len(candidates), len(candidates))
    if best is None:
        raise NoPlanFits(_closest_miss(model, cluster, job, candidates, profile))

    objective_s, _, winner, solution = best
    plan = plan_of(model, cluster_name or cluster.name, job, winner, solution, pins)
    prediction = predict(plan, model, cluster, profile)
    certificate = _certificate(
        objective_s, winner, solution, {"chosen": 1, **counts}, losers, solver
    )
    return Answer(
        plan=plan,
        prediction=prediction,
        certificate=certificate,
        search_s=time.process_time() - started,
    )


def instance_of(
    model: ModelGraph, cluster: ClusterSpec, candidate: Candidate, pins: Pins | None = None
) -> Instance:
    """Return the partition problem of one layout: which layers in which stage, recomputed how."""
    layout, costs = candidate.layout, candidate.costs
    allowed = pins.recompute if pins else None
    names = list(costs.kinds)
    capacity = cluster.groups[0].accelerator.memory_bytes - costs.fixed_bytes
    flying = [
        in_flight(order)
        for order in orders(
            layout.schedule, stages=layout.pipeline, micro_batches=layout.micro_batches
        )
    ]
    last = layout.pipeline - 1
    return Instance(
        layers=tuple(names.index(layer.kind) for _, layer in model.chain),
        kinds=tuple(
            tuple(_option(cost) for cost in costs.kinds[name] if allowed in (None, cost.recompute))
            for name in names
        ),
        stages=tuple(
            Stage(
                capacity_bytes=capacity / costs.slack,
                in_flight=flying[s],
                exposed_s=costs.boundary_s * ((s > 0) + (s < last)),
            )
            for s in range(layout.pipeline)
        ),
        steady=layout.micro_batches - 1,
    )


def plan_of(
    model: ModelGraph,
    cluster_name: str,
    job: Job,
    candidate: Candidate,
    solution: Solution,
    pins: Pins | None = None,
) -> Plan:
    """Return the plan that a solved layout describes."""
    layout, costs = candidate.layout, candidate.costs
    allowed = pins.recompute if pins else None
    names = [name for name, _ in model.chain]
    choices = {
        kind: [cost.recompute for cost in table if allowed in (None, cost.recompute)]
        for kind, table in costs.kinds.items()
    }
    chosen: list[Recompute] = [
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
        timeout_s=max(120.0, 10.0 * (solution.objective_s + costs.step_s)),
        stages=tuple(
            PlanStage(
                layers=tuple(
                    PlacedLayer(layer=names[i], recompute=chosen[i])
                    for i in range(solution.cuts[s], solution.cuts[s + 1])
                )
            )
            for s in range(layout.pipeline)
        ),
    )


def lower_bound_s(model: ModelGraph, layout: Layout, costs: LayoutCosts) -> float:
    """Return seconds that no split of the layout can beat, memory ignored.

    With S the sum over layers of their fastest strategy and C the exposed transfers, the slowest
    stage takes at least (S + C) / P and at least the slowest layer; sync is at least its mean.
    """
    fastest = {
        kind: min(cost.forward_s + cost.backward_s for cost in table)
        for kind, table in costs.kinds.items()
    }
    least_sync = {kind: min(cost.sync_s for cost in table) for kind, table in costs.kinds.items()}
    total_s = sync_s = 0.0
    slowest_s = 0.0
    for layer in model.layers:
        total_s += layer.repeat * fastest[layer.kind]
        sync_s += layer.repeat * least_sync[layer.kind]
        slowest_s = max(slowest_s, fastest[layer.kind])
    total_s += 2 * (layout.pipeline - 1) * costs.boundary_s
    bottleneck_s = max(total_s / layout.pipeline, slowest_s)
    steady = layout.micro_batches - 1
    return steady * bottleneck_s + total_s + sync_s / layout.pipeline + costs.step_s


def _candidates(
    model: ModelGraph, cluster: ClusterSpec, job: Job, tables: CostTables, pins: Pins
) -> tuple[list[Candidate], dict[str, int]]:
    """Return the layouts that the backend runs, best bound first, and the refusals by reason."""
    refused: dict[str, int] = {}
    result = []
    for layout in layouts(model, cluster, job, pins):
        reason = refusal(model, cluster, job, layout)
        if reason is not None:
            refused[reason] = refused.get(reason, 0) + 1
            continue
        costs = tables.of(layout)
        bound = lower_bound_s(model, layout, costs)
        result.append(Candidate(layout=layout, costs=costs, lower_bound_s=bound))
    result.sort(key=lambda c: (c.lower_bound_s, complexity(c.layout)))
    return result, refused


def _solved(
    instance: Instance,
    candidate: Candidate,
    best: tuple[float, tuple[int, ...], Candidate, Solution] | None,
    solver: str,
    frontiers: FrontierStore,
) -> Solution | Infeasible | Fathomed:
    cutoff = float("inf")
    if best is not None:
        cutoff = best[0] * (1 + TOLERANCE) - candidate.costs.step_s
    if solver == "exact":
        return inner.solve(instance, cutoff_s=cutoff, frontiers=frontiers)
    if solver == "ilp":
        from planner import ilp  # noqa: PLC0415 - loads HiGHS

        result: Solution | Infeasible | Fathomed = ilp.solve(instance)
        return result
    raise DocumentError("solver", f"is '{solver}'; the solvers are exact and ilp")


def _option(cost: StrategyCost) -> Option:
    return Option(
        name=cost.recompute,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        stored_bytes=cost.stored_bytes,
        transient_bytes=cost.transient_bytes,
        resident_bytes=cost.resident_bytes,
        sync_s=cost.sync_s,
    )


def _wins(key: tuple[float, tuple[int, ...]], best: tuple[float, tuple[int, ...]]) -> bool:
    """Faster wins; of equally fast ones the simpler, whatever the order they came in."""
    if abs(key[0] - best[0]) <= TOLERANCE * best[0]:
        return key[1] < best[1]
    return key[0] < best[0]


def _certificate(
    objective_s: float,
    winner: Candidate,
    solution: Solution,
    counts: dict[str, int],
    losers: Iterable[Loser],
    solver: str,
) -> Certificate:
    """Every other layout is infeasible, solved, or bounded by no less: that is the proof."""
    proven_s = min(objective_s, solution.lower_bound_s + winner.costs.step_s)
    gap = 0.0 if solution.optimal else 1 - proven_s / objective_s
    total = sum(counts.values())
    ranked = sorted(
        (loser for loser in losers if not loser.reason.startswith("does not fit")),
        key=lambda loser: loser.objective_s or loser.lower_bound_s or 0.0,
    )
    return Certificate(
        statement=(
            f"Of {total} configurations none takes less than {seconds_text(proven_s)} a step; "
            f"the plan takes {seconds_text(objective_s)} (gap {100 * gap:.2g} %)."
        ),
        model=CLOSED_FORM,
        solver=solver,
        optimal=solution.optimal,
        objective_s=objective_s,
        lower_bound_s=proven_s,
        gap=gap,
        configurations=total,
        counts=counts,
        runners_up=tuple(ranked[:RUNNERS_UP]),
    )


def _loser(
    candidate: Candidate,
    reason: str,
    *,
    objective_s: float | None = None,
    bound_s: float | None = None,
) -> Loser:
    if objective_s is None and bound_s is None:
        bound_s = candidate.lower_bound_s
    return Loser(
        layout=candidate.layout.text(),
        objective_s=objective_s,
        lower_bound_s=bound_s,
        reason=reason,
    )


def _outbounded(candidate: Candidate) -> Loser:
    return _loser(candidate, "not solved; its bound is no faster than the plan")


def _nothing_runs(
    model: ModelGraph, cluster: ClusterSpec, job: Job, refused: dict[str, int]
) -> str:
    """Say why not even one layout is left to try."""
    if refused:
        reasons = sorted(refused.items(), key=lambda item: -item[1])[:3]
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons)
        return f"the native backend can run none of {sum(refused.values())} layouts: {listed}"
    return (
        f"no layout of {model.name} uses all {cluster.devices} devices and divides a global batch "
        f"of {job.global_batch}; ask for a global batch that the devices divide, or fix less"
    )


def _closest_miss(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    candidates: list[Candidate],
    profile: Profile | None,
) -> str:
    """Name the layout that misses by least, its fullest stage and where the bytes are."""

    def least_bytes(candidate: Candidate) -> float:
        table = candidate.costs.kinds
        held = sum(
            layer.repeat * min(c.resident_bytes + c.stored_bytes for c in table[layer.kind])
            for layer in model.layers
        )
        peak = max(min(c.transient_bytes for c in options) for options in table.values())
        return held / candidate.layout.pipeline + peak

    device = cluster.groups[0].accelerator
    misses = []
    for candidate in sorted(candidates, key=least_bytes)[:MISSES_LOOKED_AT]:
        leanest = _leanest(model, cluster, job, candidate, profile)
        index, stage = max(enumerate(leanest.stages), key=lambda s: s[1].peak_memory_bytes)
        misses.append((stage.peak_memory_bytes, index, stage, candidate))
    needs, index, stage, candidate = min(misses, key=lambda miss: miss[0])
    parts = sorted(stage.memory_parts.items(), key=lambda part: -part[1])[:4]
    return (
        f"no plan of {model.name} fits {cluster.devices} x {device.name} "
        f"({bytes_text(device.memory_bytes)} each) at sequence {job.seq_len} and global batch "
        f"{job.global_batch}. The closest, {candidate.layout.text()} with full recompute, needs "
        f"{bytes_text(needs)} on stage {index}: "
        + ", ".join(f"{name} {bytes_text(size)}" for name, size in parts)
        + f". {_way_out(candidate.layout, stage.memory_parts, device.memory_bytes)}"
    )


def _leanest(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    candidate: Candidate,
    profile: Profile | None,
) -> Prediction:
    """Return the prediction of a layout with full recompute and the most even split of memory."""
    instance = instance_of(model, cluster, candidate, Pins(recompute="full"))
    need = [
        min(o.resident_bytes + o.stored_bytes for o in instance.options_of(layer))
        for layer in range(len(instance.layers))
    ]
    cuts = _even_cuts(need, len(instance.stages))
    options = [0] * len(instance.layers)
    solution = Solution(
        cuts=cuts,
        options=tuple(options),
        stage_s=(),
        stage_bytes=(),
        stage_sync_s=(),
        objective_s=0.0,
        lower_bound_s=0.0,
    )
    plan = plan_of(model, cluster.name, job, candidate, solution, Pins(recompute="full"))
    return predict(plan, model, cluster, profile)


def _even_cuts(need: list[float], stages: int) -> tuple[int, ...]:
    """Cut a chain into stages of about equal need, each with at least one layer."""
    cuts, used, total = [0], 0.0, sum(need)
    for layer, size in enumerate(need):
        left = stages - len(cuts)
        enough = used + size / 2 >= total * len(cuts) / stages
        if left and layer > cuts[-1] and (enough or len(need) - layer == left):
            cuts.append(layer)
        used += size
    return (*cuts, len(need))


def _way_out(layout: Layout, parts: dict[str, float], capacity: float) -> str:
    """Suggest the change that would help, by what fills the memory."""
    states = sum(parts.get(name, 0.0) for name in ("parameters", "gradients", "optimizer"))
    if states > capacity:
        more = states / capacity
        return (
            f"Parameters, gradients and optimizer state alone are {more:.1f} times the device: "
            f"use at least {int(-(-layout.devices * more // 1))} such devices."
        )
    return "Ask for a shorter sequence, or use more devices."
