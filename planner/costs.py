"""What the layers of a model cost under a layout: the numbers that the solver chooses among.

`CostTables` belongs to one model, cluster, job and profile.  Whatever depends only on how a layer
is divided (tensor, context, expert, micro-batch) is worked out once and shared by the thousands of
layouts of a search; `of` then adds what data parallelism and the pipeline make of it.

With t_s the seconds of stage s on one micro-batch, the layers' forward and backward and the
boundaries at its ends, m micro-batches and q_s of them in flight, the solver optimises

    T     = (m - 1) max_s t_s + Σ_s t_s + max_s Σ sync_s + step_s
    t_s   = Σ (forward_s + backward_s) + boundary_s (one boundary at the ends, two between)
    mem_s = fixed_bytes + slack (Σ resident_bytes + q_s Σ stored_bytes + max transient_bytes)

`planner.predict` simulates the plan instead; for stages with no transfer time the two agree exactly
where one stage is the slowest and stands last, and the closed form is above otherwise.

Exposed communication.  Tensor-parallel collectives wait.  A sharding collective hides behind its
own layer's computation: of its c seconds beside w of compute, max((1 - o) c, c - w) are seen, o
being the share that can hide.  Gradients of a pipeline are reduced after the last backward, seen
in full.  What happens in each micro-batch is in forward_s and backward_s, what happens once per
step in sync_s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from planner import arithmetic, collectives, compute, memory
from planner.calibration import Figures, calibrated
from planner.cluster import ClusterSpec, Collective
from planner.collectives import Levels, collective_s, group_levels
from planner.memory import Sharing, States
from planner.model import Architecture, Layer, ModelGraph
from planner.operator_table import BACKWARD_OF, FP32, RECOMPUTES, Setting
from planner.plan import Axis, Job, Layout
from planner.prediction import Assumption
from planner.profile import Profile, Recompute

CONTEXT_BYTES = 0.5e9
"""CUDA context, kernels and cuBLAS workspace of a process.  NVIDIA data-centre devices with torch 2
hold 0.4-0.6 GB after the first matrix product."""
COLLECTIVE_LIBRARY_BYTES = 0.4e9
"""NCCL's own buffers, 0.35-0.4 GB with a few communicators (Megatron-LM on B200)."""
ALLOCATOR_SLACK = 1.048
"""Reserved over allocated bytes of torch's caching allocator: mean of 43 runs on B200
(1.03-1.09)."""
OVERLAP = 0.9
"""Share of sharding collectives that can hide behind compute on an accelerator without a profile;
the rest stands for the kernels' contention for the same device."""
OPTIMIZER_TRAFFIC_BYTES = 40
"""Memory traffic per parameter of fused AdamW in fp32: read p, g, m, v and write p, m, v (28), read
g for the norm (4), read and write g to clip it (8)."""
REDUCED_BYTES = 4
"""Bytes per gradient element on the wire: reductions are in fp32."""

SHARD_AXES: tuple[Axis, ...] = ("context", "data_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """One layer kind under one recompute choice, one rank, one micro-batch."""

    recompute: Recompute
    forward_s: float
    backward_s: float
    """Includes recomputation."""
    stored_bytes: float
    """Kept from forward to backward by each micro-batch in flight."""
    transient_bytes: float
    """Needed while this layer runs; of a stage's layers the largest counts, not the sum."""
    resident_bytes: float
    """Parameters, gradients and optimizer state."""
    sync_s: float
    """Exposed gradient reduction, first gather and optimizer, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyParts:
    """The same record by cause; `planner.predict` adds these up."""

    figures: Figures
    states: States
    gather_s: float
    """Exposed gathering of parameters in each micro-batch's forward."""
    backward_shard_s: float
    """Exposed gathering and reduction in each micro-batch's backward."""
    sync_s: float
    """Exposed communication once per step."""
    optimizer_s: float

    @property
    def forward_transient_bytes(self) -> float:
        """Working memory of forward, gathered parameters included."""
        return self.figures.forward_transient_bytes + self.states.forward_transient_bytes

    @property
    def backward_transient_bytes(self) -> float:
        """Working memory of backward, gathered parameters and reduce buffers included."""
        return self.figures.backward_transient_bytes + self.states.backward_transient_bytes

    @property
    def transient_bytes(self) -> float:
        """Working memory of the worse pass."""
        return max(self.forward_transient_bytes, self.backward_transient_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCosts:
    """Every layer kind's strategies under one layout, and what a rank costs beside layers."""

    kinds: dict[str, tuple[StrategyCost, ...]]
    """By Layer.kind, in the order none, selective, full."""
    boundary_s: float
    """Exposed seconds of one crossing of a stage boundary, one direction, one micro-batch."""
    fixed_bytes: float
    """Per rank: device context, collective library, pipeline buffers."""
    slack: float
    """Reserved over allocated bytes."""
    step_s: float
    """Seconds of a step that no layer causes."""
    parts: dict[str, tuple[StrategyParts, ...]]
    transfer_s: float
    """Seconds that an activation takes to the next stage, part of boundary_s."""
    action_s: float
    """Seconds that the runtime takes per pipeline action, the rest of boundary_s."""
    boundary_bytes: float
    """Activation that crosses a stage boundary."""
    context_bytes: float
    """Part of fixed_bytes: all but the pipeline's buffers."""
    assumptions: tuple[Assumption, ...]


def layout_costs(
    model: ModelGraph,
    cluster: ClusterSpec,
    job: Job,
    layout: Layout,
    profile: Profile | None = None,
) -> LayoutCosts:
    """Return the costs of one layout; for many, keep a CostTables."""
    return CostTables(model, cluster, job, profile).of(layout)


def refusal(model: ModelGraph, cluster: ClusterSpec, job: Job, layout: Layout) -> str | None:
    """Return why the native backend cannot run a layout, or None if it can."""
    return next(_obstacles(model, cluster, job, layout), None)


def _obstacles(model: ModelGraph, cluster: ClusterSpec, job: Job, layout: Layout) -> Iterator[str]:
    if job.precision not in ("fp32", "tf32", "bf16"):
        yield f"precision {job.precision} cannot be trained; use bf16, tf32 or fp32"
    if layout.devices > cluster.devices:
        yield f"it needs {layout.devices} devices, and the cluster has {cluster.devices}"
    if layout.context > 1:
        yield "context parallelism cannot be executed"
    if layout.expert > 1:
        yield "expert parallelism cannot be executed"
    if model.edges:
        yield "the model's graph is not a chain"
    if layout.pipeline > len(model.chain):
        yield f"{layout.pipeline} stages need as many layers; the model has {len(model.chain)}"
    if layout.zero and layout.data_shard == 1 and layout.data > 1:
        yield f"ZeRO-{layout.zero} needs data_shard > 1"
    if layout.tensor > 1:
        yield from _tensor_obstacles(model.architecture, job, layout.tensor)


def _tensor_obstacles(a: Architecture | None, job: Job, degree: int) -> Iterator[str]:
    if a is None:
        yield "a user's own modules cannot be divided by tensor parallelism"
        return
    if a.latent is not None:
        yield "latent attention cannot be divided by tensor parallelism"
    if a.patches is not None or a.classes:
        yield "patches and class heads cannot be divided by tensor parallelism"
    figures = {
        "seq_len": job.seq_len,
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "ffn_size": a.ffn_size,
        "vocab_size": a.vocab_size,
    }
    if a.experts is not None:
        figures["expert ffn_size"] = a.experts.ffn_size
    for name, figure in figures.items():
        if figure % degree:
            yield f"tensor parallelism does not divide {name} {figure}"


class CostTables:
    """Costs of a model on a cluster, for any layout."""

    def __init__(
        self, model: ModelGraph, cluster: ClusterSpec, job: Job, profile: Profile | None = None
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.job = job
        self.profile = profile
        accelerator = cluster.groups[0].accelerator
        self._on_cpu = accelerator.kind == "cpu"
        self._device = compute.device(accelerator, job.precision)
        self._curves = collectives.curves_by_name(profile.collectives if profile else ())
        self._overheads = profile.overheads if profile else None
        self._layers = {layer.kind: layer for layer in model.layers}
        self._figures: dict[tuple[object, ...], _KindFigures] = {}
        self._layouts: dict[tuple[object, ...], _Shared] = {}

    def of(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout."""
        shared = self._shared(layout)
        in_flight = layout.micro_batches
        if layout.schedule == "1f1b":
            in_flight = min(in_flight, layout.pipeline)
        buffers = 0.0
        if layout.pipeline > 1:
            buffers = 2 * (in_flight + 1) * shared.boundary_bytes
        return LayoutCosts(
            kinds=shared.kinds,
            boundary_s=shared.transfer_s + shared.action_s,
            fixed_bytes=shared.context_bytes + shared.slack * buffers,
            slack=shared.slack,
            step_s=shared.step_s,
            parts=shared.parts,
            transfer_s=shared.transfer_s,
            action_s=shared.action_s,
            boundary_bytes=shared.boundary_bytes,
            context_bytes=shared.context_bytes,
            assumptions=shared.assumptions,
        )

    def fastest_s(self, layout: Layout, recompute: Recompute | None = None) -> dict[str, float]:
        """Return least forward and backward seconds of each kind on one micro-batch.

        Sharding, which only adds to them, is left out, so that they are the same for many layouts.
        With `recompute` only that choice counts.
        """
        figures = self._kind_figures(self._setting(layout), layout)
        return {
            kind: min(
                figure.whole_forward_s + figure.whole_backward_s
                for choice, figure in zip(RECOMPUTES, figures_of_kind, strict=True)
                if recompute in (None, choice)
            )
            for kind, figures_of_kind in figures.items()
        }

    def _shared(self, layout: Layout) -> _Shared:
        """Return what layouts that differ only in schedule and step length have in common."""
        key = (
            layout.tensor,
            layout.context,
            layout.expert,
            layout.micro_batch,
            layout.zero,
            layout.data_shard,
            layout.data_replicate,
            layout.pipeline,
            layout.order,
            layout.micro_batches > 1,
            _all_forwards_first(layout),
        )
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = self._build(layout)
        return found

    def _build(self, layout: Layout) -> _Shared:
        setting = self._setting(layout)
        figures = self._kind_figures(setting, layout)
        links = _Links(
            shard=self._group(layout, SHARD_AXES),
            replicate=self._group(layout, ("data_replicate",)),
            neighbours=self._group(layout, ("pipeline",)),
        )
        parts = {
            kind: self._parts(layer, layout, figures[kind], links)
            for kind, layer in self._layers.items()
        }
        transfer_s = action_s = boundary_bytes = 0.0
        if layout.pipeline > 1:
            boundary_bytes = self._boundary_bytes(setting)
            transfer_s = self._link_s("send_recv", boundary_bytes, links.neighbours)
            action_s = self._overheads.pipeline_action_s if self._overheads else 0.0
        first, last = self._end_kinds
        gpipe = layout.pipeline > 1 and layout.schedule == "gpipe"
        return _Shared(
            kinds={
                kind: tuple(
                    _cost(
                        recompute,
                        part,
                        action_s=action_s if kind in (first, last) else 0.0,
                        passing=kind == last and not gpipe,
                        replacing=_all_forwards_first(layout),
                    )
                    for recompute, part in zip(RECOMPUTES, strategies, strict=True)
                )
                for kind, strategies in parts.items()
            },
            parts=parts,
            transfer_s=transfer_s,
            action_s=action_s,
            boundary_bytes=boundary_bytes,
            context_bytes=self._context_bytes(layout),
            slack=1.0 if self._on_cpu else ALLOCATOR_SLACK,
            step_s=self._overheads.step_s if self._overheads else 0.0,
            assumptions=(),
        )

    def _setting(self, layout: Layout) -> Setting:
        return Setting(
            micro_batch=layout.micro_batch,
            seq_len=self.job.seq_len,
            precision=self.job.precision,
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
        )

    def _kind_figures(self, setting: Setting, layout: Layout) -> _KindFigures:
        """Return every kind's figures under every recompute choice, worked out once."""
        groups = (
            self._group(layout, ("tensor",)),
            self._group(layout, ("context",)),
            self._expert_group(layout),
        )
        spans = (tuple((level.tier.name, level.members) for level in group) for group in groups)
        key = (setting, *spans)
        found = self._figures.get(key)
        if found is None:
            found = self._figures[key] = {
                kind: self._layer_figures(layer, setting, groups)
                for kind, layer in self._layers.items()
            }
        return found

    def _layer_figures(
        self, layer: Layer, setting: Setting, groups: tuple[Levels, Levels, Levels]
    ) -> tuple[Figures, ...]:
        """Return the figures of one layer kind, one for each recompute choice."""
        by_axis = dict(zip(("tensor", "context", "expert"), groups, strict=True))
        measurements = self.profile.layers if self.profile else ()

        def computed(at: Setting, recompute: Recompute) -> Figures:
            return self._computed(layer, at, recompute, by_axis)

        return tuple(
            calibrated(measurements, layer.kind, setting, recompute, computed)
            for recompute in RECOMPUTES
        )

    def _computed(
        self, layer: Layer, setting: Setting, recompute: Recompute, groups: dict[str, Levels]
    ) -> Figures:
        """Return a layer's figures by arithmetic alone."""
        table = arithmetic.table(self.model, layer, setting)
        forward_s = backward_s = recompute_s = forward_tensor_s = backward_tensor_s = 0.0
        again = {operator.name for operator in table.recomputed(recompute)}
        for operator in table.operators:
            own_s = compute.forward_s(operator, self._device)
            forward_s += own_s
            backward_s += compute.backward_s(operator, self._device)
            link_s = 0.0
            if operator.kind in BACKWARD_OF:
                group, size = groups[operator.axis], operator.moved_bytes
                link_s = self._link_s(cast(Collective, operator.kind), size, group)
                forward_tensor_s += link_s
                backward_tensor_s += self._link_s(BACKWARD_OF[operator.kind], size, group)
            if operator.name in again:
                recompute_s += own_s
                backward_tensor_s += link_s
        return Figures(
            forward_s=forward_s,
            forward_tensor_s=forward_tensor_s,
            backward_s=backward_s,
            recompute_s=recompute_s,
            backward_tensor_s=backward_tensor_s,
            stored_bytes=table.stored_bytes(recompute),
            forward_transient_bytes=table.forward_transient_bytes(recompute),
            backward_transient_bytes=table.backward_transient_bytes(recompute),
            returned_bytes=table.returned_bytes,
            stores_input="x" in table.stored(recompute),
            provenance=self._device.curve.provenance,
            spread=self._device.curve.spread,
        )

    def _parts(
        self, layer: Layer, layout: Layout, figures: tuple[Figures, ...], links: _Links
    ) -> tuple[StrategyParts, ...]:
        """Add the states and the sharding communication to a layer's figures."""
        dense, routed = arithmetic.local_parameters(
            self.model, layer, tensor=layout.tensor, expert=layout.expert
        )
        if layout.pipeline > 1:
            dense += self._tied_copy(layer) / layout.tensor
        shard = layout.data_shard * layout.context
        sharing = Sharing(
            precision=self.job.precision,
            zero=layout.zero,
            shard=shard,
            data=layout.data * layout.context,
            pipelined=layout.pipeline > 1,
            accumulated=layout.micro_batches > 1,
        )
        largest = arithmetic.largest_matrix(self.model, layer, tensor=layout.tensor)
        states = memory.states(dense, sharing, largest=largest)
        held = dense / (shard if sharing.sharded else 1)
        if routed:
            expert_shard = max(1, shard * layout.tensor // layout.expert)
            if layout.expert == 1:
                expert_shard = shard
            expert_sharing = replace(sharing, shard=expert_shard)
            states = states + memory.states(routed, expert_sharing)
            held += routed / (expert_shard if expert_sharing.sharded else 1)
        if layout.pipeline > 1 and layer.kind == self._end_kinds[1]:
            # The pipeline keeps what the last stage returned until its backward.
            figures = tuple(
                replace(f, stored_bytes=f.stored_bytes + f.returned_bytes) for f in figures
            )
        traffic = self._traffic(dense + routed, sharing, links)
        optimizer_s = self._optimizer_s(held)
        # The window of a whole-step collective is the same for every choice, so that sync_s is too.
        plain = figures[0]
        sync_s = traffic.copies_per_step_s
        sync_s += self._exposed_s(traffic.gather_per_step_s, plain.forward_s)
        if sharing.pipelined:
            sync_s += traffic.reduce_per_step_s
        else:
            sync_s += self._exposed_s(traffic.reduce_per_step_s, plain.backward_s)
        return tuple(
            StrategyParts(
                figures=choice,
                states=states,
                gather_s=traffic.forward_copies_s
                + self._exposed_s(traffic.forward_gather_s, choice.forward_s),
                backward_shard_s=traffic.backward_copies_s
                + self._exposed_s(traffic.backward_s, choice.backward_s + choice.recompute_s),
                sync_s=sync_s,
                optimizer_s=optimizer_s,
            )
            for choice in figures
        )

    def _traffic(self, parameters: float, sharing: Sharing, links: _Links) -> _Traffic:
        """Return the sharding communication of a unit: counts from the runtime, seconds from links.

        Counts per step with M micro-batches (measured on FSDP2; a unit is a layer):

                      no pipeline                   pipeline
            ZeRO-0    1 all-reduce                  1 all-reduce
            ZeRO-1    1 gather, 1 reduction         1 gather, 1 reduction
            ZeRO-2    1 gather, M reductions        1 gather, 1 reduction
            ZeRO-3    2 M gathers, M reductions     M + 1 gathers, 1 reduction
        """
        if not sharing.wrapped:
            return _Traffic()
        wide, e = REDUCED_BYTES * parameters, sharing.working_bytes * parameters
        unit_s = self._overheads.shard_unit_s if self._overheads else 0.0
        reduce_s = gather_s = 0.0
        if sharing.sharded:
            gather_s = self._link_s("all_gather", e, links.shard)
            reduce_s = self._link_s("reduce_scatter", wide, links.shard)
            reduce_s += self._link_s("all_reduce", wide / sharing.shard, links.replicate)
        elif sharing.data > 1:
            reduce_s = self._link_s("all_reduce", wide, links.shard + links.replicate)
        unpack_s = self._memory_s(2 * e) + unit_s
        pack_s = self._memory_s(e + wide) + unit_s
        again = sharing.gathers_again
        if again and not sharing.pipelined:
            return _Traffic(
                forward_gather_s=gather_s,
                forward_copies_s=unpack_s,
                backward_s=gather_s + reduce_s,
                backward_copies_s=unpack_s + pack_s,
            )
        each = sharing.reduces_each_micro_batch
        return _Traffic(
            backward_s=(gather_s if again else 0.0) + (reduce_s if each else 0.0),
            backward_copies_s=(unpack_s if again else 0.0) + (pack_s if each else 0.0),
            gather_per_step_s=gather_s,
            reduce_per_step_s=0.0 if each else reduce_s,
            copies_per_step_s=unpack_s + (0.0 if each else pack_s),
        )

    def _exposed_s(self, communication_s: float, window_s: float) -> float:
        """Seconds of a sharding collective that computation does not hide."""
        overlap = 0.0 if self._on_cpu else OVERLAP
        if self._overheads:
            overlap = self._overheads.overlap
        return max((1 - overlap) * communication_s, communication_s - window_s)

    def _link_s(self, operation: Collective, size_bytes: float, group: Levels) -> float:
        return collective_s(operation, size_bytes, group, self._curves)

    def _memory_s(self, moved_bytes: float) -> float:
        device = self._device
        return moved_bytes / (device.curve.memory * device.memory_bytes_per_s)

    def _optimizer_s(self, parameters: float) -> float:
        if self._overheads:
            return self._overheads.optimizer_s_per_parameter * parameters
        return self._memory_s(OPTIMIZER_TRAFFIC_BYTES * parameters)

    def _group(self, layout: Layout, axes: tuple[Axis, ...]) -> Levels:
        return group_levels(self.cluster.tiers, layout, axes)

    def _expert_group(self, layout: Layout) -> Levels:
        """Experts take neighbouring ranks of tensor, context and data_shard, innermost first."""
        if layout.expert == 1:
            return ()
        return collectives.levels(self.cluster.tiers, [(layout.expert, 1)], devices=layout.devices)

    def _tied_copy(self, layer: Layer) -> float:
        """Parameters of the output projection where the pipeline's last stage holds a copy."""
        a = self.model.architecture
        if layer.kind != "head" or a is None or not a.tied_embeddings:
            return 0.0
        return float(a.vocab_size * (a.embedding_size or a.hidden_size))

    @cached_property
    def _end_kinds(self) -> tuple[str | None, str | None]:
        """Kinds of the first and last layer, each None if other layers have the same kind."""
        kinds = [layer.kind for _, layer in self.model.chain]
        first, last = kinds[0], kinds[-1]
        return (
            first if kinds.count(first) == 1 else None,
            last if kinds.count(last) == 1 else None,
        )

    def _boundary_bytes(self, setting: Setting) -> float:
        """Bytes of one micro-batch's activation between layers on a rank."""
        a: Architecture | None = self.model.architecture
        if a is not None:
            return setting.stream_tokens * a.hidden_size * setting.element_bytes
        traces = [layer.trace for layer in self.model.layers if layer.trace]
        largest = max((trace.output_bytes for trace in traces), default=0)
        return largest * setting.micro_batch * setting.element_bytes / FP32

    def _context_bytes(self, layout: Layout) -> float:
        if self._on_cpu:
            return 0.0
        return CONTEXT_BYTES + (COLLECTIVE_LIBRARY_BYTES if layout.devices > 1 else 0.0)


_KindFigures = dict[str, tuple[Figures, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """Levels of the groups that a layout's sharding and pipeline use."""

    shard: Levels
    replicate: Levels
    neighbours: Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """Sharding seconds of one unit, before any of them hide."""

    forward_gather_s: float = 0.0
    forward_copies_s: float = 0.0
    backward_s: float = 0.0
    backward_copies_s: float = 0.0
    gather_per_step_s: float = 0.0
    reduce_per_step_s: float = 0.0
    copies_per_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """LayoutCosts without what schedule and number of micro-batches change."""

    kinds: dict[str, tuple[StrategyCost, ...]]
    parts: dict[str, tuple[StrategyParts, ...]]
    transfer_s: float
    action_s: float
    boundary_bytes: float
    context_bytes: float
    slack: float
    step_s: float
    assumptions: tuple[Assumption, ...]


def _all_forwards_first(layout: Layout) -> bool:
    """Whether no stage begins a backward before it has done all forwards of the step."""
    gpipe = layout.pipeline > 1 and layout.schedule == "gpipe"
    return gpipe or layout.micro_batches == 1


def _cost(
    recompute: Recompute, part: StrategyParts, *, action_s: float, passing: bool, replacing: bool
) -> StrategyCost:
    """Add a strategy's parts up.

    An end of the pipeline has one boundary but two actions, hence `action_s`.  A `passing` layer,
    last in the model and never with two micro-batches in flight, holds its activations only while
    it runs.  What a backward gathers again, and where all forwards come first (`replacing`) also
    gradients, appears as activations of that backward go: of the two only the larger counts.
    """
    figures, states = part.figures, part.states
    stored = 0.0 if passing else figures.stored_bytes
    late, early = states.gathered_bytes, states.gradients_bytes
    if replacing:
        late, early = late + early, 0.0
    resident = states.parameters_bytes + states.optimizer_bytes + early + max(0.0, late - stored)
    return StrategyCost(
        recompute=recompute,
        forward_s=figures.whole_forward_s + part.gather_s,
        backward_s=figures.whole_backward_s + part.backward_shard_s + action_s,
        stored_bytes=stored,
        transient_bytes=part.transient_bytes + (figures.stored_bytes if passing else 0.0),
        resident_bytes=resident,
        sync_s=part.sync_s + part.optimizer_s,
    )
