"""Costs of a model's layers under a layout: the numbers among which the solver chooses.

`CostTables` belongs to one request.  Whatever depends only on how a layer
is divided (tensor, context, expert, micro-batch) is worked out once and shared by the thousands of
layouts of a search; `of` then adds what data parallelism and the pipeline make of it.

With t_s the seconds of stage s on one micro-batch, the layers' forward and backward and the
boundaries at its ends, m micro-batches and q_s of them in flight, the solver optimises

    T     = (m - 1) max_s t_s + Σ_s t_s + max_s Σ sync_s + step_s
    t_s   = Σ (forward_s + backward_s) + boundary_s (one boundary at the ends, two between)

and keeps what meshwright.planner.costs.memory.rank_memory counts within the device.
`planner.costs.predict` simulates the plan instead; for stages with no transfer time the two agree
exactly where one stage is the slowest and stands last, and the closed form is above otherwise.

What happens in each micro-batch is in forward_s and backward_s, what happens once per step in
sync_s; `meshwright.planner.costs.layer_cost_breakdown` tells how much of what is sent is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.cut_tensors import Boundaries
from meshwright.planner.costs.hardware_rates import Rates, assumptions, host_assumptions, rates
from meshwright.planner.costs.layer_cost_breakdown import LayerParts, Moved, parts_key
from meshwright.planner.costs.layer_costs import LayerFigures
from meshwright.planner.costs.layer_strategy import (
    Recomputes,
    StrategyCost,
    StrategyParts,
    choices_of,
    strategy_cost,
)
from meshwright.planner.costs.lora import reach_feed_forward, unmatched_targets
from meshwright.planner.costs.memory.host_memory import usable_share
from meshwright.planner.costs.memory.resident_states import (
    ResidentParameters,
    ResidentStates,
)
from meshwright.planner.costs.memory.state_bytes import FP32, States, StateSharding
from meshwright.planner.costs.slowdown import (
    pace_of,
    paced_framework,
    slower_framework,
    slower_profile,
)
from meshwright.planner.costs.uncertainty import MEASURED_MEMORY_SPREAD, room_share
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.training import SEQUENCES
from meshwright.planner.frameworks.native_limits import caveat, refusal
from meshwright.planner.operators import layer_operators as arithmetic
from meshwright.planner.operators.kernels import kernels_of
from meshwright.planner.operators.operator_table import RECOMPUTES, Setting

if TYPE_CHECKING:
    from meshwright.planner.costs.cost_cache import FigureStore, KindFigures
    from meshwright.planner.costs.sharding import PipelineReplicas, ShardingTraffic
    from meshwright.planner.documents.plan import Activations, Layout
    from meshwright.planner.documents.prediction import Assumption
    from meshwright.planner.documents.profile import ChunkedLoss, Recompute
    from meshwright.planner.requests.request import Request

__all__ = [
    "CostTables",
    "LayoutCosts",
    "StrategyCost",
    "StrategyParts",
    "refusal",
]


REDUCE_BUCKETS = 2
"""One fills while the other is reduced (DeepSpeed, runtime/zero/stage_1_and_2.py with
overlap_comm); under ZeRO-3 one that fills and what is joined of it to be scattered (stage3.py,
runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCosts:
    """Every layer kind's strategies under one layout, and what a rank costs beside layers."""

    kinds: dict[str, tuple[StrategyCost, ...]]
    """By Layer.kind: none, selective, full, each with every way to treat activations."""
    boundary_s: float
    """Exposed seconds of one crossing of a stage boundary, one direction, one micro-batch."""
    fixed_bytes: float
    """Per rank: device context, collective library."""
    slack: float
    """Reserved over allocated bytes."""
    tight: float
    """The same where memory is short (meshwright.planner.costs.memory.rank_memory.room_bytes)."""
    room_share: float
    """Share of a device's room that predicted needs may take to fit with the requested
    probability."""
    keeps_sent: bool
    """Activations sent to the next stage stay until their backward."""
    step_s: float
    """Seconds of a step that no layer causes."""
    parts: dict[str, tuple[StrategyParts, ...]]
    transfer_s: float
    """Seconds that an activation takes to the next stage, part of boundary_s."""
    waits: float
    """Share of transfer_s for which the sender waits; the rest hides."""
    action_s: float
    """Seconds that the runtime takes per pipeline action, the rest of boundary_s."""
    boundary_bytes: float
    """Activation that crosses a stage boundary."""
    narrowest_bytes: float
    """Least that crosses any boundary of a graph; boundary_bytes are the most."""
    output_bytes: dict[str, float]
    """Bytes of one micro-batch's output on a rank, by kind of layer; empty of a chain."""
    context_bytes: float
    """Part of fixed_bytes: all but the pipeline's buffers."""
    reduce_bytes: float
    """Part of context_bytes: buffers in which gradients are gathered for their reduction."""
    flat_bytes_at_most: float
    """Bytes of a shard's gradients that the optimizer's step copies together, at most."""
    has_gradient_buckets: bool
    """True if the gradients of neighbouring parameters are allocated together."""
    recorded_bytes: float
    """Freed buffers of collectives, not reusable until these end on the device."""
    workspace_bytes: float
    """Bytes of workspaces of matrix-product libraries, in the caching allocator."""
    host_share: float
    """Share of a host's memory that may be filled."""
    assumptions: tuple[Assumption, ...]
    host_assumptions: tuple[Assumption, ...]
    """Further assumptions where something lies on the host."""


class CostTables:
    """Costs of a model on a cluster of devices that are alike, for any layout."""

    def __init__(
        self,
        request: Request,
        activations: tuple[Activations, ...] = ("keep",),
        recomputes: tuple[Recompute, ...] = RECOMPUTES,
        store: FigureStore | None = None,
    ) -> None:
        """`activations` and `recomputes` are what layers may choose among, `none` first.

        What the request pins is left to the search, which needs all ways to recompute.  `store`
        has figures of requests on other clusters, and gets those of this one.
        """
        self.request = request
        self.model = model = request.model
        self.cluster = cluster = request.cluster
        self.job = job = request.job
        self.profile = profile = slower_profile(request.only_profile)
        self.activations = activations
        a = model.architecture
        self.unmatched_targets = unmatched_targets(model, job.lora) if job.lora else ()
        """Targets of adapters that name nothing of the model."""
        self._rates = rates(
            cluster,
            job,
            profile,
            slower_framework(paced_framework(request.framework, cluster), pace_of(profile)),
            head_dim=a.head_dim if a else 128,
        )
        self._kernels = kernels_of(
            self._rates.framework,
            job.precision,
            frozen=job.lora is not None,
            weights=job.lora.weights if job.lora is not None else "full",
        )
        native = (
            base_of(request.framework.name) == "native"
        )  # others' constants are fitted to their rule
        if native and job.lora is not None and not reach_feed_forward(model, job.lora):
            self._kernels = replace(self._kernels, frozen="attention")
        warning = caveat(model, cluster) if native else None
        self._assumptions = (
            *assumptions(cluster, profile, self._rates),
            *((warning,) if warning else ()),
        )
        self._layers = {layer.kind: layer for layer in model.layers}
        self._figures = LayerFigures(model, cluster, profile, self._rates, recomputes, store)
        self._holding = ResidentStates(model, job, self._rates.framework)
        self._boundaries = Boundaries(model)
        self._recomputes = recomputes
        self._replicas: PipelineReplicas | None = None
        self._parts = self._layer_parts()
        self._known_states: dict[tuple[object, ...], tuple[States, ...]] = {}
        self._layouts: dict[tuple[object, ...], _ScheduleFreeCosts] = {}
        self._known_costs: dict[Layout, LayoutCosts] = {}
        self.slack = self.tight = 1.0
        if not self._rates.on_cpu:
            rule = self._rates.framework.memory
            self.slack = self._rates.slack or rule.reserved
            self.tight = self.slack * rule.tight / rule.reserved
        self.memory_spread = self._rates.framework.memory.spread
        """Standard deviation of the logarithm of needs over what is predicted of them."""
        if profile is not None:
            self.memory_spread = min(self.memory_spread, MEASURED_MEMORY_SPREAD)
        self.room_share = room_share(request.fit_probability, self.memory_spread)
        self._step_s = self._rates.step_s
        spaces = self._rates.framework.memory.workspaces
        architecture = cluster.groups[0].accelerator.architecture or ""
        self._workspace_bytes = spaces.get(architecture, spaces.get("other", 0.0))

    def _layer_parts(self) -> LayerParts:
        return LayerParts(
            self.model,
            self.cluster,
            self._figures,
            self._rates,
            self._holding,
            setting=self._setting,
            activations=self.activations,
            recomputes=self._recomputes,
            replicas=self._replicas,
        )

    def among(self, replicas: PipelineReplicas) -> CostTables:
        """Return the costs on pipelines that may be unlike; a layout describes one kind of them."""
        tables = copy(self)
        tables._replicas = replicas
        tables._holding = ResidentStates(
            self.model, self.job, self._rates.framework, replicas.number
        )
        tables._parts = tables._layer_parts()
        tables._known_states, tables._layouts, tables._known_costs = {}, {}, {}
        return tables

    def costs_of(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout.

        Where layers form a graph, transfers are the least and buffers the most that any boundary
        has.
        """
        costs = self._known_costs.get(layout)
        if costs is None:
            costs = self._known_costs[layout] = self._layout_costs(layout, linked=True)
        return costs

    def of_any_loss(self, layout: Layout, losses: Sequence[ChunkedLoss | None]) -> LayoutCosts:
        """Return the costs of layouts that differ in how they compute the loss alone, as of one.

        The model's last layer has the options of all of them, way by way.
        """
        first, *others = (self.costs_of(replace(layout, loss=loss)) for loss in losses)
        head = self.model.chain_kinds[-1]
        return replace(
            first,
            kinds={
                **first.kinds,
                head: sum((group.kinds[head] for group in others), first.kinds[head]),
            },
            parts={
                **first.parts,
                head: sum((group.parts[head] for group in others), first.parts[head]),
            },
        )

    def costs_without_links(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout but the seconds of sharing and of the pipeline's links."""
        return self._layout_costs(layout, linked=False)

    def _layout_costs(self, layout: Layout, *, linked: bool) -> LayoutCosts:
        key = linked, self._rates.action_share(layout.virtual_stages), *parts_key(layout)
        shared = self._layouts.get(key)
        if shared is None:
            shared = self._layouts[key] = self._build(layout, linked=linked)
        return LayoutCosts(
            kinds=shared.kinds,
            boundary_s=shared.transfer_s + shared.action_s,
            fixed_bytes=shared.context_bytes,
            slack=self.slack,
            tight=self.tight,
            room_share=self.room_share,
            keeps_sent=self._rates.framework.pipeline.keeps_sent,
            step_s=self.layout_step_s(layout),
            parts=shared.parts,
            transfer_s=shared.transfer_s,
            waits=self._rates.waits(layout),
            action_s=shared.action_s,
            boundary_bytes=shared.boundary_bytes,
            narrowest_bytes=shared.narrowest_bytes,
            output_bytes=shared.output_bytes,
            context_bytes=shared.context_bytes,
            reduce_bytes=shared.reduce_bytes,
            flat_bytes_at_most=self._flat_bytes_at_most(layout),
            has_gradient_buckets=self._holding.sharing(layout).has_buckets,
            recorded_bytes=shared.recorded_bytes,
            workspace_bytes=self._workspace_bytes,
            host_share=usable_share(self._rates.framework, layout.offload),
            assumptions=shared.assumptions,
            host_assumptions=shared.host_assumptions,
        )

    @property
    def step_s(self) -> float:
        """Seconds of a step that no layer causes, of any layout; transfers that poll add to it."""
        return self._step_s

    def layout_step_s(self, layout: Layout) -> float:
        """Return `step_s` of a layout, as `of` has it, without the costs of its layers."""
        return self._step_s + self._rates.polled_s(layout)

    @property
    def action_s(self) -> float:
        """Seconds that the runtime takes per pipeline action, with one stage a rank."""
        return self._rates.action_s

    def action_share(self, virtual_stages: int) -> float:
        """Return the share of `action_s` that an action takes with several stages a rank."""
        return self._rates.action_share(virtual_stages)

    def figures_together(self, layouts: Sequence[Layout]) -> KindFigures:
        """Return each kind's figures as arrays [layout], before anything is sharded."""
        return self._figures.together([(self._setting(layout), layout) for layout in layouts])

    def fastest_s(
        self, layouts: Sequence[Layout], recompute: Recomputes = None
    ) -> NDArray[np.float64]:
        """[kind, layout] Least forward and backward seconds of each kind on one micro-batch.

        Sharding, which only adds to them, is left out, so that they are the same for many layouts.
        With `recompute` only that choice counts.
        """
        return self.passes_s(layouts, recompute)[0]

    def passes_s(
        self, layouts: Sequence[Layout], recompute: Recomputes = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[kind, layout] `fastest_s`, and the least `Figures.credit_s` of any choice."""
        figures = self.figures_together(layouts)
        return fastest_s(figures, recompute), least_credits_s(figures)

    @property
    def rates(self) -> Rates:
        """Rates of the cluster for what is not a layer's computation."""
        return self._rates

    @property
    def end_kinds(self) -> tuple[str | None, str | None]:
        """Kinds of the first and last layer, each None if other layers have the same kind."""
        return self._holding.end_kinds

    def sharing(self, layout: Layout) -> StateSharding:
        """Return among how many ranks a layout divides states."""
        return self._holding.sharing(layout)

    def expert_padding(self, layout: Layout) -> float:
        """Return how many times their bytes the padding of routed experts makes them."""
        return self._holding.expert_padding(layout)

    def resident_and_traffic(
        self, kind: str, layout: Layout
    ) -> tuple[ResidentParameters, ShardingTraffic, float]:
        """Return a rank's bytes of a kind, what its sharing takes, and a tied weight's sums."""
        return self._parts.resident_and_traffic(kind, layout)

    def states(self, layout: Layout) -> tuple[States, ...]:
        """[kind] A rank's bytes of one layer's parameters, gradients and optimizer."""
        return self._states(layout, layout.loss, self._holding.sharing(layout))

    def states_together(
        self, layouts: Sequence[Layout], losses: Sequence[Sequence[ChunkedLoss | None]]
    ) -> list[list[tuple[States, ...]]]:
        """[loss][layout][kind] The same of layouts that compute the loss in these ways."""
        sharings = [self._holding.sharing(layout) for layout in layouts]
        return [list(map(self._states, layouts, some, sharings)) for some in losses]

    def _states(
        self, layout: Layout, loss: ChunkedLoss | None, sharing: StateSharding
    ) -> tuple[States, ...]:
        gradients = None if loss is None else loss.gradients
        key = (layout.tensor, layout.expert, layout.expert_tensor, gradients, sharing)
        states = self._known_states.get(key)
        if states is None:
            layout = replace(layout, loss=loss)
            held = (
                self._holding.resident_parameters(layer, layout, sharing)
                for layer in self._layers.values()
            )
            states = self._known_states[key] = tuple(layer.states for layer in held)
        return states

    def output_bytes(self, layout: Layout) -> dict[str, float]:
        """Bytes of one micro-batch's output on a rank, by kind of layer."""
        return self._boundaries.output_bytes(self._setting(layout))

    def output_sizes(self, layout: Layout) -> dict[str, float]:
        """Bytes of one micro-batch's output on a rank, by layer."""
        by_kind = self.output_bytes(layout)
        return {name: by_kind[layer.kind] for name, layer in self.model.chain}

    def reserved_beside_bytes(
        self, layout: Layout, placement: Sequence[tuple[str, Recompute, Activations]]
    ) -> float | None:
        """Return what the allocator reserves beside the allocated peak of a rank with all layers.

        None where a replay of its step does not tell.
        """
        rule, a = self._rates.framework, self.model.architecture
        kept = all(activations == "keep" for _, _, activations in placement)
        if not rule.memory.replayed or self._rates.on_cpu or layout.pipeline > 1 or not kept:
            return None
        if a is None or layout.loss is not None:
            return None
        from meshwright.planner.costs.memory.allocator_segments import (  # noqa: PLC0415
            Replayed,
            reserved_beside_bytes,
        )

        setting, again = self._setting(layout), self.sharing(layout).gathers_again
        replayed: dict[tuple[str, Recompute], Replayed] = {}
        for kind, recompute, _ in placement:
            if kind not in self.end_kinds and (kind, recompute) not in replayed:
                replayed[kind, recompute] = Replayed(
                    table=arithmetic.table(self.model, self._layers[kind], setting),
                    recompute=recompute,
                    unit_bytes=self._holding.copy_bytes(kind, layout) if again else 0.0,
                )
        return reserved_beside_bytes(
            [replayed[kind, choice] for kind, choice, _ in placement if (kind, choice) in replayed],
            logits=setting.tokens * a.vocab_size / (layout.tensor if rule.loss.divided else 1),
            bytes_per_logit=rule.loss.peak_bytes,
        )

    def crossing_s(self, layout: Layout, sizes_bytes: Iterable[float]) -> float:
        """Seconds until tensors of these sizes, sent one by one, are with the next stage."""
        neighbours = self._parts.links(layout).neighbours
        return sum(self._rates.link_s("send_recv", size, neighbours) for size in sizes_bytes)

    def _setting(self, layout: Layout) -> Setting:
        a = self.model.architecture
        return Setting(
            micro_batch=layout.micro_batch * SEQUENCES[self.job.objective],
            seq_len=self.job.seq_len,
            document_len=self.job.document_len,
            precision=self.job.precision,
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            sequence_parallel=layout.sequence_parallel,
            loss=layout.loss,
            compiled=layout.compile == "block",
            captured=layout.graphs != "none",
            overlaps_tensors=layout.overlaps_tensors,
            scales=layout.scales,
            dispatch=layout.dispatch,
            hierarchical_all_to_all=layout.hierarchical_all_to_all or 0,
            narrow_weights=layout.weight_gather_dtype == "fp8",
            gathers_heads=a is not None and a.latent is None and a.kv_heads < layout.tensor,
            kernels=self._kernels,
        )

    def _build(self, layout: Layout, *, linked: bool) -> _ScheduleFreeCosts:
        """Work out what layouts that differ only in schedule and step length have in common."""
        setting = self._setting(layout)
        links = self._parts.links(layout) if linked else None
        transfer_s = boundary_bytes = least_bytes = 0.0
        if layout.pipeline > 1:
            boundary_bytes, least_bytes = self._boundaries.crossing_bytes(setting)
            if links is not None:
                divided = self._rates.framework.pipeline.divided_transfers
                if divided and not setting.sequence_parallel:
                    least_bytes /= layout.tensor
                transfer_s = self._rates.link_s("send_recv", least_bytes, links.neighbours)
        action_s = self._action_s(layout)
        parts = {kind: self.parts(kind, layout, linked=linked) for kind in self._layers}
        return _ScheduleFreeCosts(
            parts=parts,
            kinds={
                kind: tuple(
                    strategy_cost(part, action_s=action_s if kind in self.end_kinds else 0.0)
                    for part in choices
                )
                for kind, choices in parts.items()
            },
            transfer_s=transfer_s,
            action_s=action_s,
            boundary_bytes=boundary_bytes,
            narrowest_bytes=least_bytes,
            output_bytes=self._boundaries.output_bytes(setting) if self.model.edges else {},
            context_bytes=self.context_bytes(layout),
            reduce_bytes=self._reduce_bytes(layout),
            recorded_bytes=self._recorded_bytes(layout, setting),
            assumptions=(
                *self._figures.assumptions(setting, layout),
                *self._assumptions,
            ),
            host_assumptions=tuple(host_assumptions(self.cluster, layout.offload)),
        )

    def parts(self, kind: str, layout: Layout, *, linked: bool) -> tuple[StrategyParts, ...]:
        """[choice] One kind's parts, with the seconds of sharing only if `linked`."""
        return self._parts.parts_of(kind, layout, linked=linked)

    def parts_together(self, kind: str, first: Layout, moved: Moved) -> tuple[StrategyParts, ...]:
        """[choice] One kind's parts as arrays [layout]; see `LayerParts.together`."""
        return self._parts.together(kind, first, moved)

    def moved_together(self, kind: str, layouts: Sequence[Layout]) -> Moved:
        """Return what sharing takes of a kind; see `LayerParts.moved_together`."""
        return self._parts.moved_together(kind, layouts)

    def boundary_bytes(self, layout: Layout) -> float:
        """Activation that crosses a stage boundary; 0 if there is none."""
        return (
            self._boundaries.crossing_bytes(self._setting(layout))[0]
            if layout.pipeline > 1
            else 0.0
        )

    def _action_s(self, layout: Layout) -> float:
        """Return what each forward and each backward of a layout's stages takes beside layers."""
        if layout.pipeline == 1 and self._rates.framework.host.actions == "pipeline":
            return 0.0
        return self._rates.action_s * self._rates.action_share(layout.virtual_stages)

    def _recorded_bytes(self, layout: Layout, setting: Setting) -> float:
        """Return what stays allocated until the pass of all blocks ends; unknown of scripts."""
        a, each = self.model.architecture, self._rates.framework.tensor.recorded
        divided = setting.divides_tensors and setting.sequence_parallel
        if a is None or not each or not divided or layout.pipeline > 1:
            return 0.0
        return each * a.layers * setting.tokens * a.hidden_size * setting.element_bytes

    def context_bytes(self, layout: Layout) -> float:
        """Bytes of a process beside its tensors."""
        if self._rates.on_cpu:
            return self._reduce_bytes(layout)
        memory = self._rates.framework.memory
        several = layout.devices > 1 or self._replicas is not None
        communicators = memory.communicator_bytes if several else 0.0
        return memory.context_bytes + communicators + self._reduce_bytes(layout)

    def _flat_bytes_at_most(self, layout: Layout) -> float:
        together = self._rates.framework.optimizer.flat_together
        if layout.zero != 3 or together is None:
            return math.inf
        gradient = self._holding.sharing(layout).types.gradient
        return together * (gradient + (FP32 if gradient != FP32 else 0.0))

    def _reduce_bytes(self, layout: Layout) -> float:
        """Bytes of the buffers in which gradients are gathered for their reduction."""
        each = self._rates.framework.sharding.bucket_gradients
        if not each or not layout.zero or layout.data * layout.context == 1:
            return 0.0
        return REDUCE_BUCKETS * each * self._holding.sharing(layout).types.working


def fastest_s(figures: KindFigures, recompute: Recomputes = None) -> NDArray[np.float64]:
    """[kind, place] Fewest seconds of both passes, of what layers may recompute."""
    return np.array(
        [
            np.min(
                [
                    costs.passes_s
                    for choice, costs in zip(RECOMPUTES, of_kind, strict=True)
                    if choice in choices_of(recompute, kind)
                ],
                axis=0,
            )
            for kind, of_kind in figures.items()
        ]
    )


def least_credits_s(figures: KindFigures) -> NDArray[np.float64]:
    """[kind, place] The least `Figures.credit_s` of any choice."""
    return np.array(
        [np.min([costs.credit_s for costs in each], axis=0) for each in figures.values()]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleFreeCosts:
    """LayoutCosts without what schedule and number of micro-batches change."""

    parts: dict[str, tuple[StrategyParts, ...]]
    kinds: dict[str, tuple[StrategyCost, ...]]
    transfer_s: float
    action_s: float
    boundary_bytes: float
    narrowest_bytes: float
    output_bytes: dict[str, float]
    context_bytes: float
    reduce_bytes: float
    recorded_bytes: float
    assumptions: tuple[Assumption, ...]
    host_assumptions: tuple[Assumption, ...]


def counted_by_rank(layout: Layout) -> bool:
    """Return whether rank_memory computes memory: several stages a rank, or split backwards."""
    return layout.virtual_stages > 1 or layout.executed_schedule.splits_backward
