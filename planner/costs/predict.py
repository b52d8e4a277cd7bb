"""Prediction for a plan: step time by cause, memory of every stage by cause, and their ranges.

The step is simulated (`meshwright.planner.schedules.simulate`) with each stage's seconds from
`planner.costs.layout_costs`; then come the reduction of gradients, the optimizer and what the
runtime does once per step.  The solver's closed form (see planner.costs.layout_costs) prices the
same plan without simulation; on the same seconds it is equal for uniform stages without transfers,
and at most 20 % above or 3 % below otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING

from meshwright.planner.costs.compute import peak_flops
from meshwright.planner.costs.cut_tensors import blocks_of, in_order
from meshwright.planner.costs.group_costs import GroupCosts, replicas_of
from meshwright.planner.costs.layer_seconds import ENDS
from meshwright.planner.costs.layout_costs import CostTables, LayoutCosts
from meshwright.planner.costs.memory.host_memory import (
    assumed_room,
    filled_host,
    fullest_host,
    room_odds,
)
from meshwright.planner.costs.memory.rank_memory import (
    NOT_TENSORS,
    has_room,
    host_bytes,
    rank_memory_parts,
    tensors_bytes,
    whole_room_bytes,
    widest,
)
from meshwright.planner.costs.slowdown import host_pace
from meshwright.planner.costs.stage_placement import StagePlacements, alike, branching
from meshwright.planner.costs.uncertainty import (
    bounded_by_words,
    fit_probability,
    memory_range,
    step_range,
)
from meshwright.planner.documents.model import ModelGraph, is_script
from meshwright.planner.documents.placement_text import alike_words, placement_words
from meshwright.planner.documents.plan import Activations, Layout, Plan
from meshwright.planner.documents.prediction import (
    Assumption,
    HostUse,
    Memory,
    Prediction,
    StagePrediction,
    compaction,
)
from meshwright.planner.documents.profile import Profiles, Recompute
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.errors import DocumentError
from meshwright.planner.operators.expert_routing import routing_of
from meshwright.planner.operators.layer_operators import step_flops, unmasked_step_flops
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import Order, orders, rank_of_stage
from meshwright.planner.schedules.simulate import Timeline, timeline
from meshwright.planner.schedules.steady_state import RankTimes, StageTimes, rank_times

if TYPE_CHECKING:
    from meshwright.planner.costs.layer_strategy import StrategyParts
    from meshwright.planner.documents.cluster import ClusterSpec

Placement = tuple[tuple[str, Recompute, Activations], ...]
"""Layer kinds of one stage in order, each with its choices."""

TOLD = "not known of the run"
"""Source of what is assumed of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One stage's seconds by cause.  All but the last three are of one micro-batch."""

    forward_s: float
    backward_s: float
    recompute_s: float
    forward_tensor_s: float
    backward_tensor_s: float
    forward_shard_s: float
    backward_shard_s: float
    action_s: float
    sync_s: float
    optimizer_s: float
    spread: float
    weight_s: float = 0.0
    """Seconds of backward_s that W takes if backwards are split."""
    forward_host_s: float = 0.0
    """Copies over the host link that nothing hides."""
    backward_host_s: float = 0.0
    packing_s: float = 0.0
    unpacking_s: float = 0.0
    stream_s: float = 0.0
    """Copies over the host link once per step."""

    @property
    def whole_forward_s(self) -> float:
        """A forward action."""
        computing = self.forward_s + self.packing_s
        waiting = self.forward_tensor_s + self.forward_shard_s + self.forward_host_s
        return computing + waiting + self.action_s

    @property
    def whole_backward_s(self) -> float:
        """A backward action."""
        computing = self.backward_s + self.recompute_s + self.unpacking_s
        waiting = self.backward_tensor_s + self.backward_shard_s + self.backward_host_s
        return computing + waiting + self.action_s

    def __add__(self, other: StageSeconds) -> StageSeconds:
        """Return the seconds of two stages of one rank."""
        names = (field.name for field in fields(self))
        total = {name: getattr(self, name) + getattr(other, name) for name in names}
        return StageSeconds(**{**total, "spread": max(self.spread, other.spread)})


def predict(
    plan: Plan, model: ModelGraph, cluster: ClusterSpec, profile: Profiles = None
) -> Prediction:
    """Return what a plan should do."""
    placements = placements_of(plan, model)
    request = Request.of_plan(plan, model, cluster, profile)
    if plan.other_pipelines is not None:
        prediction = unlike_prediction(plan, request)
    elif plan.shares is not None:
        prediction = _shared_prediction(plan, request, placements)
    else:
        tables, seats = place_stages(plan, request)
        prediction = placement_prediction(tables, plan.layout, placements, seats)
    prediction = prediction.on(cluster.devices, used=plan.ranks)
    prediction = bounded_by_words(prediction, plan.not_understood)
    return prediction.model_copy(update={"plan_digest": plan.digest})


def _shared_prediction(plan: Plan, request: Request, placements: Sequence[Placement]) -> Prediction:
    """Return what unequal data-parallel ranks should do: the slowest ends the step.

    Memory is that of the ranks whose devices it fills most.
    """
    model = request.model
    costs = GroupCosts(request, activations_of(plan))
    _check_known(plan, costs)
    most: dict[str, int] = {}
    ranks: list[str] = []
    for share in plan.shares or ():
        most[share.group] = max(most.get(share.group, 0), share.micro_batches)
        ranks.append(share.group)
    each = []
    for group, micro_batches in most.items():
        layout = replace(plan.layout, micro_batches=micro_batches)
        seats = costs.seats(layout, [group] * layout.stages, branches_of(plan, model))
        each.append(placement_prediction(costs.tables[group], layout, placements, seats))
    fullest = max(
        (prediction.stages for prediction in each),
        key=lambda stages: stages[0].peak_memory_bytes / stages[0].memory_capacity_bytes,
    )
    return _together(
        plan, request, each, [(group, plan.ranks // len(ranks)) for group in ranks]
    ).model_copy(update={"layout": plan.alike_text, "placement": plan.placement, "stages": fullest})


def _together(
    plan: Plan,
    request: Request,
    each: Sequence[Prediction],
    devices: Sequence[tuple[str, int]],
) -> Prediction:
    """Return the prediction of some ranks that differ, of which the slowest ends the step.

    `devices` are numbers of devices in use, each with its group's name.
    """
    slowest = max(each, key=lambda prediction: prediction.step_time_s)
    accelerators = {group.name: group.accelerator for group in request.cluster.groups}
    peak = sum(
        number * peak_flops(accelerators[group], plan.precision) for group, number in devices
    )
    frozen = plan.training.lora is not None
    size = {"seq_len": plan.seq_len, "global_batch": plan.job.sequences}
    flops = step_flops(request.model, **size, document_len=plan.document_len, frozen=frozen)
    unmasked = unmasked_step_flops(request.model, **size, frozen=frozen)
    used = slowest.step_time_s * peak
    every = (assumption for prediction in each for assumption in prediction.assumptions)
    return slowest.model_copy(
        update={
            "fits": all(prediction.fits for prediction in each),
            "host": max(
                (prediction.host for prediction in each if prediction.host),
                key=lambda use: use.used_bytes / (use.room_bytes or math.inf),
                default=None,
            ),
            "overflows": tuple(dict.fromkeys(memory for part in each for memory in part.overflows)),
            "fit_probability": min(prediction.fit_probability or 0.0 for prediction in each),
            "mfu": flops / used if used else 0.0,
            "unmasked_mfu": unmasked / used if used else 0.0,
            "assumptions": tuple(dict.fromkeys(every)),
            "notes": tuple(dict.fromkeys(note for part in each for note in part.notes)),
        }
    )


def unlike_prediction(plan: Plan, request: Request, costs: GroupCosts | None = None) -> Prediction:
    """Return what unlike pipelines should do; `costs` are those of the request, if known.

    Each kind runs its own schedule.  A rank of kind k with layers L sums its gradients when the
    ranks of all kinds that hold any of L have ended their backwards:

        T = max_k max_r (max_{q holds some of L_r} finish_q + sync_r) + update + step_s

    Source: HARP (2025) and AutoHet (2025) sum the gradients of a layer over the unlike stages that
    hold it.
    """
    kinds, tables, seats = _unlike_seats(plan, request, costs)
    placements = [placements_of(kind, request.model) for kind in kinds]
    runs = [
        _stage_run(of_kind, kind.layout, _seconds(of_kind, placed))
        for kind, of_kind, placed in zip(kinds, seats, placements, strict=True)
    ]
    each = [
        placement_prediction(of_kind, kind.layout, placed, seated, ready_s=ready_s)
        for kind, of_kind, placed, seated, ready_s in zip(
            kinds, tables, placements, seats, _ready_s(kinds, runs), strict=True
        )
    ]
    devices = [
        (stage.group or request.cluster.groups[0].name, kind.mesh.devices // kind.mesh.pipeline)
        for kind in kinds
        for stage in kind.stages
    ]
    together = _together(plan, request, each, devices)
    peaks = [prediction.peak_memory_range_bytes for prediction in each]
    return together.model_copy(
        update={
            "layout": plan.layout_text,
            "placement": (),
            "stages": tuple(stage for prediction in each for stage in prediction.stages),
            "peak_memory_range_bytes": max(filter(None, peaks), default=None),
            "step_time_low_s": max(prediction.step_time_low_s for prediction in each),
            "step_time_high_s": max(prediction.step_time_high_s for prediction in each),
            "compile_s": max(prediction.compile_s for prediction in each),
        }
    )


def _unlike_seats(
    plan: Plan, request: Request, costs: GroupCosts | None
) -> tuple[tuple[Plan, ...], list[CostTables], list[StagePlacements]]:
    """Return the kinds of a plan's pipelines, with the costs under the stages of each."""
    kinds, cluster = plan.kinds, request.cluster
    treated = tuple(dict.fromkeys(way for kind in kinds for way in activations_of(kind)))
    groups = {group.name: group for group in cluster.groups}
    under = [[stage.group or cluster.groups[0].name for stage in kind.stages] for kind in kinds]
    for name in dict.fromkeys(itertools.chain.from_iterable(under)):
        if name not in groups:
            raise DocumentError(
                "stages", f"name group {name}; {cluster.name} has {', '.join(groups)}"
            )
    replicas = replicas_of(
        cluster,
        [
            (kind.layout, [groups[name] for name in dict.fromkeys(names)])
            for kind, names in zip(kinds, under, strict=True)
        ],
    )
    held = [branches_of(kind, request.model) for kind in kinds]
    if plan.groups is not None:
        costs = costs or GroupCosts(request, treated)
        _check_known(plan, costs)
        costs = costs.among(replicas)
        return (
            kinds,
            [costs.tables[names[0]] for names in under],
            [
                costs.seats(kind.layout, names, branches)
                for kind, names, branches in zip(kinds, under, held, strict=True)
            ],
        )
    tables = CostTables(request, treated).among(replicas)
    return (
        kinds,
        [tables] * len(kinds),
        [
            alike(tables, kind.layout)
            if branches is None
            else branching(tables, kind.layout, branches)
            for kind, branches in zip(kinds, held, strict=True)
        ],
    )


def _ready_s(kinds: Sequence[Plan], runs: Sequence[RankTimes]) -> Iterator[tuple[float, ...]]:
    """Yield, for each kind, when all ranks that hold any of a rank's layers have ended. [rank]"""
    ended_s: dict[str, float] = {}
    for kind, run in zip(kinds, runs, strict=True):
        for stage, finish_s in zip(kind.stages, run.finish_s, strict=True):
            for item in stage.layers:
                ended_s[item.layer] = max(finish_s, ended_s.get(item.layer, 0.0))
    for kind in kinds:
        yield tuple(max(ended_s[item.layer] for item in stage.layers) for stage in kind.stages)


def plan_timelines(
    plan: Plan, model: ModelGraph, cluster: ClusterSpec, profile: Profiles = None
) -> tuple[Timeline, ...]:
    """[kind of pipelines] Return when each stage of a plan does which action."""
    request = Request.of_plan(plan, model, cluster, profile)
    if plan.other_pipelines is None:
        return (_timeline(plan, model, place_stages(plan, request)[1]),)
    kinds, _, seats = _unlike_seats(plan, request, None)
    return tuple(_timeline(kind, model, seat) for kind, seat in zip(kinds, seats, strict=True))


def _timeline(plan: Plan, model: ModelGraph, seats: StagePlacements) -> Timeline:
    layout = plan.layout
    times = _stage_times(seats, layout, _seconds(seats, placements_of(plan, model)))
    return timeline(
        orders(
            layout.executed_schedule.name,
            stages=layout.stages,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        ),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_s=times.weight_s,
        transfer_s=times.transfer_s,
        exposed_s=times.exposed_s,
    )


def place_stages(plan: Plan, request: Request) -> tuple[CostTables, StagePlacements]:
    """Return the costs under each stage of a plan; tables are those of the first stage."""
    held = branches_of(plan, request.model)
    if plan.groups is not None:
        costs = GroupCosts(request, activations_of(plan))
        _check_known(plan, costs)
        busiest = max(plan.shares or (), key=lambda share: share.micro_batches, default=None)
        groups = [stage.group or (busiest.group if busiest else "") for stage in plan.stages]
        return costs.tables[groups[0]], costs.seats(plan.layout, groups, held)
    tables = CostTables(request, activations_of(plan))
    if held is not None:
        return tables, branching(tables, plan.layout, held)
    return tables, alike(tables, plan.layout)


def branches_of(plan: Plan, model: ModelGraph) -> list[list[str]] | None:
    """[stage] Names of its layers, where they form a graph."""
    if not model.edges:
        return None
    return [[item.layer for item in stage.layers] for stage in plan.stages]


def _check_known(plan: Plan, costs: GroupCosts) -> None:
    """Refuse a plan whose groups are not those of the cluster."""
    devices_of = {group.name: group.devices for group in costs.cluster.groups}
    for index, group in enumerate(plan.groups or ()):
        if devices_of.get(group.name, 0) < group.devices:
            have = ", ".join(f"{name} with {devices}" for name, devices in devices_of.items())
            raise DocumentError(
                f"groups[{index}]",
                f"is {group.name} with {group.devices} devices; {costs.cluster.name} has {have}",
            )


def activations_of(plan: Plan) -> tuple[Activations, ...]:
    """Return the ways in which a plan treats activations, each once."""
    return tuple(dict.fromkeys(item.activations for stage in plan.stages for item in stage.layers))


def placements_of(plan: Plan, model: ModelGraph) -> list[Placement]:
    """Return the layer kinds of each stage; DocumentError if the plan is for another model."""
    plan.check_model(model)
    kinds = {name: layer.kind for name, layer in model.chain}
    return [
        tuple((kinds[item.layer], item.recompute, item.activations) for item in stage.layers)
        for stage in plan.stages
    ]


def layout_prediction(
    request: Request, layout: Layout, *, tables: CostTables | None = None
) -> Prediction:
    """Return what a layout should do with all layers alike and stages of equal time.

    What is recomputed, and what becomes of activations, is as the request pins it.
    """
    model, cluster = request.model, request.cluster
    recompute = request.pins.recompute or "none"
    activations = request.pins.activations or "keep"
    if cluster.is_mixed:
        raise DocumentError(
            "cluster",
            "has devices that differ, and a layout does not assign stages to them; plan with "
            "--fix, then predict the plan",
        )
    model = in_order(model) if model.edges else model
    tables = tables or CostTables(replace(request, model=model), (activations,))
    costs = tables.costs_of(layout)
    chain = [layer.kind for _, layer in model.chain]
    chosen = {
        kind: next(
            cost for cost in table if (cost.recompute, cost.activations) == (recompute, activations)
        )
        for kind, table in costs.kinds.items()
    }
    seconds = [chosen[kind].forward_s + chosen[kind].backward_s for kind in chain]
    sizes = [len(block) for block in blocks_of(model)] if model.colocated else [1] * len(chain)
    ends = (0, *itertools.accumulate(sizes))
    parts = balanced_cuts([sum(seconds[a:b]) for a, b in itertools.pairwise(ends)], layout.stages)
    cuts = tuple(ends[cut] for cut in parts)
    placements = [
        tuple((kind, recompute, activations) for kind in chain[cuts[s] : cuts[s + 1]])
        for s in range(layout.stages)
    ]
    seats = None
    if model.edges:
        names = [name for name, _ in model.chain]
        held = [names[cuts[s] : cuts[s + 1]] for s in range(layout.stages)]
        seats = branching(tables, layout, held)
    prediction = placement_prediction(tables, layout, placements, seats)
    return prediction.on(cluster.devices, used=layout.devices)


def placement_prediction(
    tables: CostTables,
    layout: Layout,
    placements: Sequence[Placement],
    seats: StagePlacements | None = None,
    *,
    assumed: Sequence[str] = (),
    ready_s: Sequence[float] | None = None,
) -> Prediction:
    """Return what given stages should do under a layout; without `seats` they sit alike.

    `assumed` is what is not known of the run: its range is wider by it.  `ready_s` [rank] are when
    all ranks that hold its layers have ended their backwards, where these are not of this layout.
    """
    model, job = tables.model, tables.job
    seats = seats or alike(tables, layout)
    costs = seats.stages[0].costs
    layers = [
        _layers(seat.costs, placement)
        for seat, placement in zip(seats.stages, placements, strict=True)
    ]
    stages = [
        _stage_seconds(seat.costs, of_stage)
        for seat, of_stage in zip(seats.stages, layers, strict=True)
    ]
    run = _stage_run(seats, layout, stages)
    if ready_s is not None:
        run = replace(run, finish_s=tuple(ready_s))
    capacities = [float(seat.accelerator.memory_bytes) for seat in seats.stages]
    home = rank_of_stage(
        layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages
    )
    memory_of_rank = [
        _rank_memory(seats, layout, rank, {s: layers[s] for s, r in enumerate(home) if r == rank})
        for rank in range(layout.pipeline)
    ]
    beside = tables.reserved_beside_bytes(layout, placements[0])
    if beside is not None:
        _hold_segments(memory_of_rank[0], beside, costs.tight, capacities[0])
    memory = [memory_of_rank[rank] for rank in home]
    on_host = _on_host(layout, home, layers)
    ranks = [
        reduce(add, (stage for stage, r in zip(stages, home, strict=True) if r == rank))
        for rank in range(layout.pipeline)
    ]
    parts = step_parts(ranks, run, layout, costs)
    fits = all(
        has_room(seat.accelerator.memory_bytes, of_stage, seat.costs)
        for of_stage, seat in zip(memory, seats.stages, strict=True)
    )
    step_s = sum(parts.values())
    passes = layout.micro_batches + layout.pipeline - 1
    slow_host_s = partial(_slow_host_s, layers, home)
    low_s, high_s, basis = step_range(
        tables.request,
        layout,
        parts,
        max(stage.spread for stage in stages),
        slow_host_s=passes * slow_host_s(tables.rates.framework.host.slowest),
        uncaptured_high_s=_uncaptured_high_s(tables, layout, placements),
        measured=tables.profile is not None,
        assumed=assumed,
    )
    size, frozen = (
        {"seq_len": job.seq_len, "global_batch": job.sequences},
        job.lora is not None,
    )
    flops = step_flops(model, **size, document_len=job.document_len, frozen=frozen)
    unmasked = unmasked_step_flops(model, **size, frozen=frozen)
    every_peak = sum(peak_flops(seat.accelerator, job.precision) for seat in seats.stages)
    peak = every_peak / layout.stages
    peaks = [sum(of_stage.values()) for of_stage in memory]
    predicted = tuple(
        StagePrediction(
            forward_s=stage.whole_forward_s,
            backward_s=stage.whole_backward_s,
            peak_memory_bytes=size,
            memory_capacity_bytes=capacity,
            memory_parts=of_stage,
            host_bytes=on_host[rank],
        )
        for stage, size, capacity, of_stage, rank in zip(
            stages, peaks, capacities, memory, home, strict=True
        )
    )
    host = _host_use(tables, layout, seats, home, on_host)
    hosts_fit = host is None or host.fits
    overflows: list[Memory] = []
    overflows += [] if fits else ["device memory"]
    overflows += [] if hosts_fit else ["host memory"]
    fits = not overflows
    probability = min(
        fit_probability(
            tensors_bytes(of_stage),
            whole_room_bytes(seat.accelerator.memory_bytes, seat.costs),
            tables.memory_spread,
        )
        for of_stage, seat in zip(memory, seats.stages, strict=True)
    )
    compacted = compaction(predicted, probability) if fits else None
    choices = [[(recompute, kept) for _, recompute, kept in stage] for stage in placements]
    prediction = Prediction(
        layout=layout.text_with(
            tables.request.framework.name,
            alike_words(list(itertools.chain.from_iterable(choices))[1:-1]),
        ),
        placement=tuple(placement_words(choices)),
        step_time_s=step_s,
        step_time_low_s=low_s,
        step_time_high_s=high_s,
        step_parts=parts,
        tokens_per_s=job.sequences * job.seq_len / step_s if step_s else 0.0,
        samples_per_s=job.global_batch / step_s
        if is_script(model.source or "") and step_s
        else None,
        mfu=flops / (step_s * layout.devices * peak) if step_s else 0.0,
        unmasked_mfu=unmasked / (step_s * layout.devices * peak) if step_s else 0.0,
        compile_s=_compile_s(tables, layout, placements, home),
        fits=fits,
        fit_probability=probability * (1.0 if host is None else room_odds(host)),
        links=(tables.request.cluster.links_text or None) if tables.profile is None else None,
        host=host,
        overflows=tuple(overflows),
        peak_memory_range_bytes=memory_range(max(peaks), tables.memory_spread),
        stages=predicted,
        notes=tuple(
            note
            for note in (
                compacted,
                _routing_note(tables.request, layout),
                _padding_note(tables, layout),
                *_job_notes(tables),
                _host_note(tables.request) if passes * slow_host_s(2.0) > 0.01 * step_s else None,
            )
            if note
        ),
        assumptions=(
            *((basis,) if basis is not None else ()),
            *(Assumption(what=what, provenance="assumed", source=TOLD) for what in assumed),
            *seats.assumptions([on_host[rank] > 0 for rank in home]),
            *assumed_room(host),
        ),
    )
    return bounded_by_words(prediction, model.not_understood or ())


def _uncaptured_high_s(
    tables: CostTables, layout: Layout, placements: Sequence[Placement]
) -> float:
    """Return the end of the range where passes run as they are, of a layout that captures them."""
    if layout.graphs == "none" or tables.request.cluster.is_mixed:
        return 0.0
    return placement_prediction(tables, replace(layout, graphs="none"), placements).step_time_high_s


def _job_notes(tables: CostTables) -> Iterator[str]:
    """Yield what a job asks for that is no part of the step."""
    job = tables.job
    if tables.unmatched_targets:
        names = ", ".join(tables.unmatched_targets)
        yield f"adapters beside {names}: the model has none of that name; the other targets count"
    if job.objective == "grpo":
        yield "the step trains on answers that are there; their generation is no part of it"


def _routing_note(request: Request, layout: Layout) -> str | None:
    """Say what natural routers cost, where ranks have experts of their own."""
    a = request.model.architecture
    if a is None or a.experts is None or layout.expert <= 1:
        return None
    load = routing_of(a.experts, request.framework.experts.load_spread).busiest_load(layout.expert)
    if load == 1:
        return None
    return f"natural routing: busiest of {layout.expert} expert ranks has {load:.1f} x the mean"


def _padding_note(tables: CostTables, layout: Layout) -> str | None:
    """Say what ranks hold for nothing where more of them share experts than these divide over."""
    times = tables.expert_padding(layout)
    if times < 1.05:
        return None
    devices = layout.data_shard * layout.context
    note = f"padding of experts over {devices} ranks makes their weights {times:.3g} x as large"
    for shard in range(layout.data_shard // 2, 0, -1):
        if layout.data_shard % shard == 0:
            fewer = replace(layout, data_shard=shard, data_replicate=layout.data // shard)
            if tables.expert_padding(fewer) < 1.05:
                return f"{note}; shard={shard} does without"
    return note


def _host_note(request: Request) -> str | None:
    """Say how fast the hosts of a cluster are, where that was measured and is not as usual."""
    pace = host_pace(request.framework, request.cluster)
    if request.profile is not None or pace is None or 0.8 < pace < 1.25:
        return None
    return (
        f"Python and launches take {pace:.1f} times as long on this host as on that of the "
        "framework's figures"
    )


def _slow_host_s(
    layers: Sequence[Sequence[StrategyParts]], home: Sequence[int], slowest: float
) -> float:
    """Return what the slowest host adds to a micro-batch on the rank where it adds most."""
    of_rank = dict.fromkeys(home, 0.0)
    if slowest > 1:
        for rank, of_stage in zip(home, layers, strict=True):
            of_rank[rank] += sum(layer.slow_host_s(slowest) for layer in of_stage)
    return max(of_rank.values())


def _host_use(
    tables: CostTables,
    layout: Layout,
    seats: StagePlacements,
    home: Sequence[int],
    on_host: Sequence[float],
) -> HostUse | None:
    """Return what the fullest host has to hold, None where nothing is put there."""
    if not any(on_host):
        return None
    uses = [
        filled_host(seat.group, seat.group.devices_per_node * on_host[rank], seat.costs.host_share)
        for rank, seat in zip(home, seats.stages, strict=True)
        if seat.group is not None
    ]
    if uses:
        return max(uses, key=lambda use: use.used_bytes / (use.room_bytes or math.inf))
    return fullest_host(tables.cluster, layout, on_host, seats.stages[0].costs.host_share)


def _seconds(seats: StagePlacements, placements: Sequence[Placement]) -> list[StageSeconds]:
    return [
        stage_seconds(seat.costs, placement)
        for seat, placement in zip(seats.stages, placements, strict=True)
    ]


def _rank_memory(
    seats: StagePlacements, layout: Layout, rank: int, held: Mapping[int, Sequence[StrategyParts]]
) -> dict[str, float]:
    costs = seats.stages[next(iter(held))].costs
    parts = {id(part): part for of_stage in held.values() for part in of_stage}
    sizes = {key: part.layer_bytes for key, part in parts.items()}
    layers = {s: [sizes[id(part)] for part in of_stage] for s, of_stage in held.items()}
    passing = widest([p for s in held if (p := seats.stages[s].passing) is not None])
    return rank_memory_parts(costs, layout, layers, rank=rank, passing=passing)


def _hold_segments(
    parts: dict[str, float], beside_bytes: float, tight: float, capacity_bytes: float
) -> None:
    """Set the allocator overhead: segments beside tensors; unused ones are freed if need be."""
    tensors = sum(size for name, size in parts.items() if name not in NOT_TENSORS)
    others = sum(
        size for name, size in parts.items() if name in NOT_TENSORS and name != "allocator overhead"
    )
    most = max(capacity_bytes - others - tensors, (tight - 1.0) * tensors)
    parts["allocator overhead"] = max(0.0, min(beside_bytes, most))


def stage_seconds(costs: LayoutCosts, placement: Placement) -> StageSeconds:
    """Add up the layers of a stage."""
    return _stage_seconds(costs, _layers(costs, placement))


def _stage_seconds(costs: LayoutCosts, layers: Sequence[StrategyParts]) -> StageSeconds:
    figures = [layer.figures for layer in layers]
    computing = sum(f.whole_forward_s + f.whole_backward_s for f in figures)
    uncertain = sum((f.whole_forward_s + f.whole_backward_s) * f.spread for f in figures)
    return StageSeconds(
        forward_s=sum(f.forward_s for f in figures),
        backward_s=sum(f.backward_s for f in figures),
        recompute_s=sum(f.recompute_s for f in figures),
        forward_tensor_s=sum(f.forward_tensor_s for f in figures),
        backward_tensor_s=sum(f.backward_tensor_s for f in figures),
        forward_shard_s=sum(layer.gather_s for layer in layers),
        backward_shard_s=sum(layer.backward_shard_s for layer in layers),
        action_s=costs.action_s,
        sync_s=sum(layer.sync_s for layer in layers),
        optimizer_s=sum(layer.optimizer_s for layer in layers),
        spread=uncertain / computing if computing else 0.0,
        weight_s=sum(f.weight_s for f in figures),
        forward_host_s=sum(layer.forward_host_s for layer in layers),
        backward_host_s=sum(layer.backward_host_s for layer in layers),
        packing_s=sum(layer.treated.packing_s for layer in layers),
        unpacking_s=sum(layer.treated.unpacking_s for layer in layers),
        stream_s=sum(layer.stream_s for layer in layers),
    )


def within_layers(layout: Layout) -> str:
    """Return what is called the communication inside layers, by the axes that divide them.

    >>> within_layers(Layout(tensor=8)), within_layers(Layout(data_shard=8, expert=8, zero=1))
    ('tensor communication', 'expert communication')
    >>> within_layers(Layout(tensor=2, context=2, expert=4))
    'tensor, context and expert communication'
    """
    degrees = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert}
    axes = [name for name, degree in degrees.items() if degree > 1] or ["tensor"]
    *front, last = axes
    return f"{', '.join(front)} and {last} communication" if front else f"{last} communication"


def step_parts(
    stages: Sequence[StageSeconds], run: RankTimes, layout: Layout, costs: LayoutCosts
) -> dict[str, float]:
    """Return seconds by cause, of the rank that computes longest; they add up to the step.

    `stages` are the seconds of each rank, all its stages together.
    After its last backward each rank reduces its gradients; the optimizer waits for all of them,
    since it needs the norm of all gradients.
    """
    m = layout.micro_batches
    reduced_s = max(run.finish_s[s] + stage.sync_s for s, stage in enumerate(stages))
    last = max(stages, key=lambda stage: stage.optimizer_s + stage.stream_s)
    updated_s = last.optimizer_s + last.stream_s
    busiest = max(range(len(stages)), key=lambda rank: run.busy_s[rank])
    stage = stages[busiest]
    parts = {
        "forward": m * stage.forward_s,
        "backward": m * stage.backward_s,
        "recompute": m * stage.recompute_s,
        within_layers(layout): m * (stage.forward_tensor_s + stage.backward_tensor_s),
        "data communication": m * (stage.forward_shard_s + stage.backward_shard_s) + stage.sync_s,
        "optimizer": last.optimizer_s,
        "fixed": costs.step_s
        + (3 if layout.executed_schedule.splits_backward else 2) * m * stage.action_s,
    }
    more = {
        "offload": m * (stage.forward_host_s + stage.backward_host_s) + last.stream_s,
        "compression": m * (stage.packing_s + stage.unpacking_s),
    }
    parts |= {cause: seconds for cause, seconds in more.items() if seconds}
    # Idle, waiting for other stages or for their transfers.
    parts["pipeline"] = max(0.0, reduced_s + updated_s + costs.step_s - sum(parts.values()))
    return parts


def _compile_s(
    tables: CostTables, layout: Layout, placements: Sequence[Placement], home: Sequence[int]
) -> float:
    """Return the seconds before the first step in which the slowest rank compiles its blocks.

    One graph serves all blocks of a kind that recompute alike.
    """
    if layout.compile == "none":
        return 0.0
    graphs: dict[int, set[tuple[str, Recompute]]] = {}
    for rank, placement in zip(home, placements, strict=True):
        alike = {(kind, recompute) for kind, recompute, _ in placement if kind not in ENDS}
        graphs.setdefault(rank, set()).update(alike)
    return max(map(len, graphs.values())) * tables.request.framework.host.graph_s


def balanced_cuts(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return cuts into contiguous stages whose slowest is as fast as can be.

    Among equally good splits the later stages are filled first, since the first ones hold more
    micro-batches in flight.

    >>> balanced_cuts([1.0, 1.0, 1.0, 1.0, 3.0], 3)
    (0, 1, 4, 5)
    """
    count = len(seconds)
    if stages > count:
        raise DocumentError(
            "pipeline", f"{stages} stages need as many layers; the model has {count}"
        )
    low, high = max(seconds), sum(seconds)
    best = _fill_stages(seconds, stages, high)
    for _ in range(60):
        middle = (low + high) / 2
        cuts = _fill_stages(seconds, stages, middle)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    assert best is not None
    return best


def _fill_stages(seconds: Sequence[float], stages: int, limit: float) -> tuple[int, ...] | None:
    """Fill stages from the last to `limit` seconds each; None if layers are left over."""
    cuts = [len(seconds)]
    at = len(seconds)
    for left in range(stages - 1, -1, -1):
        total = 0.0
        while at > left and total + seconds[at - 1] <= limit * (1 + ROUNDING):
            at -= 1
            total += seconds[at]
        cuts.append(at)
    return None if at > 0 else tuple(reversed(cuts))


def _stage_run(seats: StagePlacements, layout: Layout, stages: Sequence[StageSeconds]) -> RankTimes:
    """Return when the ranks of stages of these seconds end."""
    return rank_times(
        layout.executed_schedule.name,
        _stage_times(seats, layout, stages),
        micro_batches=layout.micro_batches,
        virtual_stages=layout.virtual_stages,
    )


def _stage_times(
    seats: StagePlacements, layout: Layout, stages: Sequence[StageSeconds]
) -> StageTimes:
    """Return what stages of these seconds take under the schedule of a layout."""
    splits, waits = layout.executed_schedule.splits_backward, seats.stages[0].costs.waits
    return StageTimes(
        forward_s=[stage.whole_forward_s for stage in stages],
        # W is an action of its own, and costs one.
        backward_s=[stage.whole_backward_s + splits * stage.action_s for stage in stages],
        weight_s=[stage.weight_s + stage.action_s for stage in stages] if splits else None,
        transfer_s=[(1 - waits) * one_s for one_s in seats.transfer_s],
        exposed_s=[waits * one_s for one_s in seats.transfer_s],
    )


def _on_host(
    layout: Layout, home: Sequence[int], layers: Sequence[Sequence[StrategyParts]]
) -> list[float]:
    """[rank] Most bytes on the host; of schedules that repeat themselves as many micro-batches are
    gone through as change that.
    """
    held = [
        {s: layers[s] for s, r in enumerate(home) if r == rank} for rank in range(layout.pipeline)
    ]
    every: Sequence[Order] = ((),) * layout.pipeline
    if any(layer.treated.host_bytes for of_stage in layers for layer in of_stage):
        name, count = layout.executed_schedule.name, layout.micro_batches
        if schedule_of(name).repeats:
            count = min(count, 2 * layout.pipeline)
        every = orders(
            name, stages=layout.stages, micro_batches=count, virtual_stages=layout.virtual_stages
        )
    return [host_bytes(stage_bytes, order) for stage_bytes, order in zip(held, every, strict=True)]


def _layers(costs: LayoutCosts, placement: Placement) -> list[StrategyParts]:
    """Return the parts of each layer of a stage."""
    chosen = {
        (kind, part.recompute, part.activations): part
        for kind, parts in costs.parts.items()
        for part in parts
    }
    return [chosen[choice] for choice in placement]
