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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.cluster import ClusterSpec
from planner.costs import memory
from planner.costs.activations import Treated, treated
from planner.costs.calibration import Figures
from planner.costs.collectives import Level, group_steps, levels, same_experts_steps
from planner.costs.crossings import narrowest_bytes, sink_kind, widest_bytes
from planner.costs.layer_figures import KindFigures, LayerFigures
from planner.costs.lora import adapter_parameters
from planner.costs.memory import Sharing, States
from planner.costs.rates import Rates, assumptions, host_assumptions, rates
from planner.costs.sharding import POWERSGD_RANK, Links, Traffic, traffic
from planner.costs.strategy import (
    Holding,
    StrategyCost,
    StrategyParts,
    neighbour_bytes,
    strategy_cost,
)
from planner.layers import arithmetic
from planner.layers.operator_table import FP32, RECOMPUTES, Setting
from planner.model import Layer, ModelGraph
from planner.native import caveat, refusal
from planner.plan import Activations, Axis, Job, Layout
from planner.prediction import Assumption
from planner.profile import Profile, Recompute
from planner.schedule import splits_backward

__all__ = [
    "CostTables",
    "LayoutCosts",
    "StrategyCost",
    "StrategyParts",
    "layout_costs",
    "refusal",
]

CONTEXT_BYTES = 0.5e9
"""CUDA context, kernels and cuBLAS workspace of a process.  NVIDIA data-centre devices with torch 2
hold 0.4-0.6 GB after the first matrix product."""
COLLECTIVE_LIBRARY_BYTES = 0.4e9
"""NCCL's own buffers, 0.35-0.4 GB with a few communicators (Megatron-LM on B200)."""
ALLOCATOR_SLACK = 1.048
"""Reserved over allocated bytes of torch's caching allocator: mean of 43 runs on B200
(1.03-1.09)."""

SHARD_AXES: tuple[Axis, ...] = ("context", "data_shard")


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


class CostTables:
    """Costs of a model on a cluster, for any layout."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        job: Job,
        profile: Profile | None = None,
        activations: tuple[Activations, ...] = ("keep",),
    ) -> None:
        """`activations` are the ways to treat them that layers may choose among."""
        self.model = model
        self.cluster = cluster
        self.job = job
        self.profile = profile
        self.activations = activations
        self._rates = rates(cluster, job, profile)
        warning = caveat(model, cluster)
        self._assumptions = (
            *assumptions(cluster, profile, self._rates),
            *((warning,) if warning else ()),
        )
        self._layers = {layer.kind: layer for layer in model.layers}
        self._figures = LayerFigures(model, cluster, profile, self._rates)
        self._states: dict[tuple[object, ...], _Held] = {}
        self._known_states: dict[tuple[object, ...], tuple[States, ...]] = {}
        self._layouts: dict[tuple[object, ...], _Shared] = {}
        self._traffic: dict[tuple[object, ...], Traffic] = {}
        self._known_moved: dict[tuple[object, ...], _Moved] = {}
        self._known_links: dict[tuple[object, ...], Links] = {}
        self._kinds: dict[tuple[object, Holding], dict[str, tuple[StrategyCost, ...]]] = {}
        self._known_parts: dict[tuple[object, ...], tuple[StrategyParts, ...]] = {}
        self._slack = 1.0 if self._rates.on_cpu else self._rates.slack or ALLOCATOR_SLACK
        self._step_s = self._rates.step_s

    def of(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout.

        Where layers form a graph, transfers are the least and buffers the most that any boundary
        has.
        """
        return self._of(layout, linked=True)

    def unlinked(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout but the seconds of sharing and of the pipeline's links."""
        return self._of(layout, linked=False)

    def _of(self, layout: Layout, *, linked: bool) -> LayoutCosts:
        key = linked, *_key(layout)
        shared = self._layouts.get(key)
        if shared is None:
            shared = self._layouts[key] = self._build(layout, linked=linked)
        holding = holding_of(layout)
        kinds = self._kinds.get((key, holding))
        if kinds is None:
            kinds = self._kinds[key, holding] = self._added_up(layout, shared, holding)
        return LayoutCosts(
            kinds=kinds,
            boundary_s=shared.transfer_s + shared.action_s,
            fixed_bytes=shared.context_bytes,
            slack=self._slack,
            step_s=self._step_s,
            parts=shared.parts,
            transfer_s=shared.transfer_s,
            action_s=shared.action_s,
            boundary_bytes=shared.boundary_bytes,
            context_bytes=shared.context_bytes,
            assumptions=shared.assumptions,
        )

    @property
    def step_s(self) -> float:
        """Seconds of a step that no layer causes, the same for all layouts."""
        return self._step_s

    @property
    def action_s(self) -> float:
        """Seconds that the runtime takes per pipeline action."""
        return self._rates.action_s

    def figures_together(self, layouts: Sequence[Layout]) -> KindFigures:
        """Return each kind's figures as arrays [layout], before anything is sharded."""
        return self._figures.together([(self._setting(layout), layout) for layout in layouts])

    def fastest_s(
        self, layouts: Sequence[Layout], recompute: Recompute | None = None
    ) -> NDArray[np.float64]:
        """[kind, layout] Least forward and backward seconds of each kind on one micro-batch.

        Sharding, which only adds to them, is left out, so that they are the same for many layouts.
        With `recompute` only that choice counts.
        """
        return self.passes_s(layouts, recompute)[0]

    def passes_s(
        self, layouts: Sequence[Layout], recompute: Recompute | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[kind, layout] `fastest_s`, and the least `Figures.credit_s` of any choice."""
        figures = self.figures_together(layouts)
        return fastest_s(figures, recompute), least_credits_s(figures)

    @property
    def rates(self) -> Rates:
        """How fast the cluster does what is not a layer's computation."""
        return self._rates

    @property
    def end_kinds(self) -> tuple[str | None, str | None]:
        """Kinds of the first and last layer, each None if other layers have the same kind."""
        return self._end_kinds

    def states(self, layout: Layout) -> tuple[States, ...]:
        """[kind] What a rank holds of one layer's parameters, gradients and optimizer."""
        key = (layout.tensor, layout.expert, sharing := self._sharing(layout))
        found = self._known_states.get(key)
        if found is None:
            held = (self._held(layer, layout, sharing) for layer in self._layers.values())
            found = self._known_states[key] = tuple(one.states for one in held)
        return found

    def output_bytes(self, layout: Layout) -> dict[str, float]:
        """Bytes of one micro-batch's output on a rank, by kind of layer."""
        setting = self._setting(layout)
        stream = self._stream_bytes(setting)
        scale = setting.micro_batch * setting.element_bytes / FP32
        return {
            kind: layer.trace.output_bytes * scale if layer.trace else stream
            for kind, layer in self._layers.items()
        }

    def output_sizes(self, layout: Layout) -> dict[str, float]:
        """Bytes of one micro-batch's output on a rank, by layer."""
        by_kind = self.output_bytes(layout)
        return {name: by_kind[layer.kind] for name, layer in self.model.chain}

    def crossing_s(self, layout: Layout, sizes_bytes: Iterable[float]) -> float:
        """Seconds until tensors of these sizes, sent one by one, are with the next stage."""
        neighbours = self._links(layout).neighbours
        return sum(self._rates.link_s("send_recv", size, neighbours) for size in sizes_bytes)

    def _setting(self, layout: Layout) -> Setting:
        return Setting(
            micro_batch=layout.micro_batch,
            seq_len=self.job.seq_len,
            precision=self.job.precision,
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
        )

    def _build(self, layout: Layout, *, linked: bool) -> _Shared:
        """Work out what layouts that differ only in schedule and step length have in common."""
        setting = self._setting(layout)
        links = self._links(layout) if linked else None
        transfer_s = action_s = boundary_bytes = 0.0
        if layout.pipeline > 1:
            boundary_bytes, least_bytes = self._boundary_bytes(setting)
            if links is not None:
                transfer_s = self._rates.link_s("send_recv", least_bytes, links.neighbours)
            action_s = self._rates.action_s
        parts = {kind: self.parts(kind, layout, linked=linked) for kind in self._layers}
        return _Shared(
            parts=parts,
            neighbours=neighbour_bytes(parts, self._chain, any_order=bool(self.model.edges))
            if "offload" in self.activations
            else {kind: (0.0,) * len(choices) for kind, choices in parts.items()},
            transfer_s=transfer_s,
            action_s=action_s,
            boundary_bytes=boundary_bytes,
            context_bytes=self._context_bytes(layout),
            assumptions=(
                *self._figures.assumptions(setting, layout),
                *self._assumptions,
                *self._of_host(layout),
            ),
        )

    def parts(self, kind: str, layout: Layout, *, linked: bool) -> tuple[StrategyParts, ...]:
        """[choice] One kind's parts, with the seconds of sharing only if `linked`."""
        key = (kind, linked, *_key(layout))
        found = self._known_parts.get(key)
        if found is None:
            figures = self._figures.of(self._setting(layout), layout)[kind]
            found = self._parts(self._layers[kind], layout, figures, linked=linked)
            self._known_parts[key] = found
        return found

    def boundary_bytes(self, layout: Layout) -> float:
        """Activation that crosses a stage boundary; 0 if there is none."""
        return self._boundary_bytes(self._setting(layout))[0] if layout.pipeline > 1 else 0.0

    def _added_up(
        self, layout: Layout, shared: _Shared, holding: Holding
    ) -> dict[str, tuple[StrategyCost, ...]]:
        """Return the parts of every strategy added up, as the solver wants them."""
        first, last = self._end_kinds
        return {
            kind: tuple(
                strategy_cost(
                    part,
                    neighbour_bytes=beside,
                    action_s=shared.action_s if kind in (first, last) else 0.0,
                    holding=holding,
                    last=kind == last,
                    once=layout.micro_batches == 1,
                )
                for part, beside in zip(strategies, shared.neighbours[kind], strict=True)
            )
            for kind, strategies in shared.parts.items()
        }

    def parts_together(self, kind: str, layouts: Sequence[Layout]) -> tuple[StrategyParts, ...]:
        """[choice] One kind's parts as arrays [layout], those of its states aside.

        The layouts differ in how widely one ZeRO level divides states and where the axes lie.
        """
        layer, first = self._layers[kind], layouts[0]
        figures = self._figures.of(self._setting(first), first)[kind]
        each = [self._moved(layer, layout) for layout in layouts]
        moving = Traffic(
            **{
                name: _column([getattr(one.traffic, name) for one in each])
                for name in _TRAFFIC_NAMES
            }
        )
        held = replace(each[0].held, optimized=_column([one.held.optimized for one in each]))
        host_bytes = _column([one.held.states.host_bytes for one in each])
        held = replace(held, states=replace(held.states, host_bytes=host_bytes))
        tied_s = _column([one.tied_s for one in each])
        return self._put_together(layer, first, figures, _Moved(held, moving, tied_s))

    def _parts(
        self, layer: Layer, layout: Layout, figures: tuple[Figures, ...], *, linked: bool
    ) -> tuple[StrategyParts, ...]:
        """Add the states, and over links the sharding communication, to a layer's figures."""
        if linked:
            return self._put_together(layer, layout, figures, self._moved(layer, layout))
        held = self._held(layer, layout, self._sharing(layout))
        return self._put_together(layer, layout, figures, _Moved(held, None, 0.0))

    def _moved(self, layer: Layer, layout: Layout) -> _Moved:
        """Return what a layer's states are and what their sharing takes, whatever the passes."""
        key = layer.kind, *_sharing_key(layout)
        found = self._known_moved.get(key)
        if found is None:
            sharing, links = self._sharing(layout), self._links(layout)
            held = self._held(layer, layout, sharing)
            moving = self._moving(held, sharing, links)
            found = _Moved(held, moving, self._tied_s(layer, layout, links))
            self._known_moved[key] = found
        return found

    def _put_together(
        self, layer: Layer, layout: Layout, figures: tuple[Figures, ...], moved: _Moved
    ) -> tuple[StrategyParts, ...]:
        """[choice] Return the parts of a layer; nothing moves where links are left out."""
        held, moving, sync_s = moved
        sharing = self._sharing(layout)
        last = layout.pipeline > 1 and layer.kind == self._end_kinds[1]
        optimizer_s = self._rates.optimizer_s(held.optimized)
        stream_s = 0.0
        if layout.offload == "optimizer":
            stream_s = 2 * self._rates.host_copy_s(held.states.host_bytes)
        elif layout.offload == "parameters":
            optimizer_s = self._rates.host_optimizer_s(held.optimized)
        once = self._sync_s(moving, figures[0], sharing) if moving else (0.0, 0.0)
        return tuple(
            self._strategy(
                recompute,
                choice,
                moving,
                sharing,
                activations=activations,
                states=held.states,
                treated=treated(
                    activations, choice, self._rates, passed=choice.returned_bytes if last else 0.0
                ),
                sync_s=sync_s + once[0],
                stream_s=stream_s + once[1],
                optimizer_s=optimizer_s,
            )
            for recompute, choice in zip(RECOMPUTES, figures, strict=True)
            for activations in self.activations
        )

    def _sharing(self, layout: Layout) -> Sharing:
        return Sharing(
            precision=self.job.precision,
            zero=layout.zero,
            shard=layout.data_shard * layout.context,
            data=layout.data * layout.context,
            pipelined=layout.pipeline > 1,
            accumulated=layout.micro_batches > 1,
            offload=layout.offload,
            wire=layout.gradient_wire,
            versions=_weight_versions(layout),
        )

    def _moving(self, held: _Held, sharing: Sharing, links: Links) -> Traffic:
        """Return the traffic of a layer's states, the same for every micro-batch size."""
        apart, among = held.experts, links.same_experts
        if apart is None or among is None:
            return self._traffic_of(held.parameters, held.sides, sharing, links)
        dense = self._traffic_of(held.parameters - apart.parameters, held.sides, sharing, links)
        return dense + self._traffic_of(apart.parameters, 0.0, apart.sharing, among)

    def _traffic_of(
        self, parameters: float, sides: float, sharing: Sharing, links: Links
    ) -> Traffic:
        key = (parameters, sides, sharing, links.name)
        found = self._traffic.get(key)
        if found is None:
            found = traffic(parameters, sharing, links, self._rates, sides=sides)
            self._traffic[key] = found
        return found

    def _strategy(
        self,
        recompute: Recompute,
        figures: Figures,
        moving: Traffic | None,
        sharing: Sharing,
        *,
        activations: Activations,
        states: States,
        treated: Treated,
        sync_s: float,
        stream_s: float,
        optimizer_s: float,
    ) -> StrategyParts:
        """Hide what computation hides of a unit's communication in each micro-batch.

        With nothing `moving`, sharing takes no seconds.
        """
        if moving is None:
            return StrategyParts(
                recompute=recompute,
                activations=activations,
                figures=figures,
                states=states,
                treated=treated,
                gather_s=0.0,
                backward_shard_s=0.0,
                sync_s=sync_s,
                optimizer_s=optimizer_s,
            )
        again, each = sharing.gathers_again, sharing.reduces_each_micro_batch
        fetched_s = moving.host_gather_s if again and not sharing.pipelined else 0.0
        gather_s, forward_fetch_s = self._seen(
            moving.forward_gather_s, fetched_s, figures.forward_s
        )
        gather_s += moving.forward_copies_s
        returned_s = (moving.host_gather_s if again else 0.0) + (
            moving.host_reduce_s if each or (again and not sharing.pipelined) else 0.0
        )
        backward_s, backward_fetch_s = self._seen(
            moving.backward_s, returned_s, figures.backward_s + figures.recompute_s
        )
        backward_s += moving.backward_copies_s
        if sharing.wrapped:
            gather_s += self._rates.unit_s(figures.forward_ahead_s)
            backward_s += self._rates.unit_s(figures.backward_ahead_s)
        return StrategyParts(
            recompute=recompute,
            activations=activations,
            figures=figures,
            states=states,
            treated=treated,
            gather_s=gather_s,
            backward_shard_s=backward_s,
            sync_s=sync_s,
            optimizer_s=optimizer_s,
            forward_fetch_s=forward_fetch_s,
            backward_fetch_s=backward_fetch_s,
            stream_s=stream_s,
        )

    def _seen(self, links_s: float, host_s: float, window_s: float) -> tuple[float, float]:
        """Return what a window leaves of a collective, and what a copy of the host adds to it."""
        seen_s = self._rates.exposed_s(links_s, window_s)
        if isinstance(host_s, float) and not host_s:
            return seen_s, 0.0
        return seen_s, self._rates.exposed_s(links_s + host_s, window_s) - seen_s

    def _sync_s(self, moving: Traffic, plain: Figures, sharing: Sharing) -> tuple[float, float]:
        """Exposed seconds once per step: of sharding, and of copies of the host.

        They hide behind the passes without recomputation, so that every choice has the same.
        """
        again = sharing.gathers_again and not sharing.pipelined
        fetched_s = 0.0 if again else moving.host_gather_s
        gather_s, fetch_s = self._seen(moving.gather_per_step_s, fetched_s, plain.forward_s)
        late = not (again or sharing.reduces_each_micro_batch)
        returned_s = moving.host_reduce_s if late else 0.0
        window_s = 0.0 if sharing.pipelined else plain.backward_s
        reduce_s, return_s = self._seen(moving.reduce_per_step_s, returned_s, window_s)
        return moving.copies_per_step_s + gather_s + reduce_s, fetch_s + return_s

    def _held(self, layer: Layer, layout: Layout, sharing: Sharing) -> _Held:
        """Return what a rank holds of a layer; routed experts divide over other ranks."""
        key = (layer.kind, layout.tensor, layout.expert, sharing)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._count_held(layer, layout, sharing)
        return found

    def _count_held(self, layer: Layer, layout: Layout, sharing: Sharing) -> _Held:
        dense, routed = arithmetic.local_parameters(
            self.model, layer, tensor=layout.tensor, expert=layout.expert
        )
        if sharing.pipelined:
            dense += self._tied_copy(layer) / layout.tensor
        if self.job.lora is not None:
            trained = adapter_parameters(
                self.model, layer.kind, self.job.lora, tensor=layout.tensor
            )
            states = memory.frozen_states(dense, sharing)
            states += memory.frozen_states(routed, _of_experts(layout, sharing))
            return _Held(
                parameters=dense + routed + trained,
                optimized=trained / (sharing.shard if sharing.sharded else 1),
                states=states + memory.states(trained, sharing, largest=trained),
                sides=0.0,
            )
        largest = arithmetic.largest_matrix(self.model, layer, tensor=layout.tensor)
        sides = 0.0
        if sharing.wire == "powersgd":
            sides = arithmetic.matrix_sides(self.model, layer, tensor=layout.tensor)
        a = self.model.architecture
        states = memory.states(
            dense,
            sharing,
            largest=largest,
            factors=POWERSGD_RANK * sides,
            loss=a is not None and layer.kind == self._end_kinds[1],
        )
        optimized = dense / (sharing.shard if sharing.sharded else 1)
        apart: _Apart | None = None
        if routed:
            if layout.expert > 1:
                sharing = _of_experts(layout, sharing)
                apart = _Apart(parameters=routed, sharing=sharing)
            assert a is not None and a.experts is not None
            # Ranks that experts do not fill divide every expert's hidden dim.
            pieces = max(1, a.experts.count // layout.expert)
            pieces = 0 if a.hidden_size % sharing.shard == 0 else pieces
            states = states + memory.states(routed, sharing, pieces=pieces)
            optimized += routed / (sharing.shard if sharing.sharded else 1)
        return _Held(
            parameters=dense + routed,
            optimized=optimized,
            states=states,
            sides=sides,
            experts=apart,
        )

    def _tied_s(self, layer: Layer, layout: Layout, links: Links) -> float:
        """Seconds of summing a tied weight's gradients between the ends of a pipeline."""
        copy = self._tied_copy(layer) if layout.pipeline > 1 else 0.0
        if not copy or not links.neighbours:
            return 0.0
        divided = layout.tensor * (layout.data_shard * layout.context if layout.zero else 1)
        ends = (Level(links.neighbours[-1].tier, 2),)
        return self._rates.link_s("all_reduce", memory.MASTER * copy / divided, ends)

    def _links(self, layout: Layout) -> Links:
        name = (
            group_steps(layout, SHARD_AXES),
            group_steps(layout, ("data_replicate",)),
            group_steps(layout, ("pipeline",)),
            layout.devices,
        )
        same = same_experts_steps(layout) if layout.expert > 1 else None
        key = (name, same)
        if key not in self._known_links:
            shard, replicate, neighbours = (
                levels(self.cluster.tiers, steps, devices=layout.devices) for steps in name[:3]
            )
            whole = Links(shard=shard, replicate=replicate, neighbours=neighbours, name=name)
            if same is not None:
                inside = levels(self.cluster.tiers, same, devices=layout.devices)
                apart = replace(whole, shard=inside, name=(same, *name[1:]))
                whole = replace(whole, same_experts=apart)
            self._known_links[key] = whole
        return self._known_links[key]

    def _tied_copy(self, layer: Layer) -> float:
        """Parameters of the output projection where the pipeline's last stage holds a copy."""
        a = self.model.architecture
        if layer.kind != "head" or a is None or not a.tied_embeddings:
            return 0.0
        return float(a.vocab_size * (a.embedding_size or a.hidden_size))

    def _of_host(self, layout: Layout) -> Iterator[Assumption]:
        if layout.offload != "none" or "offload" in self.activations:
            yield from host_assumptions(self.cluster)

    @cached_property
    def _chain(self) -> list[str]:
        """Kinds of all layers in order."""
        return [layer.kind for _, layer in self.model.chain]

    @cached_property
    def _end_kinds(self) -> tuple[str | None, str | None]:
        """Kinds of the first and last layer, each None if other layers have the same kind."""
        kinds = self._chain
        if self.model.edges:
            return None, sink_kind(self.model)
        first, last = kinds[0], kinds[-1]
        return (
            first if kinds.count(first) == 1 else None,
            last if kinds.count(last) == 1 else None,
        )

    def _boundary_bytes(self, setting: Setting) -> tuple[float, float]:
        """Most and least bytes of one micro-batch that cross a boundary on a rank."""
        scale = setting.micro_batch * setting.element_bytes / FP32
        if self.model.edges and self.model.architecture is None:
            widest, narrowest = self._sample_crossings
            return widest * scale, narrowest * scale
        a = self.model.architecture
        if a is None:
            # What the last layer returns crosses no boundary.
            traces = [layer.trace for _, layer in self.model.chain[:-1] if layer.trace]
            largest = max((trace.output_bytes for trace in traces), default=0) * scale
            return largest, largest
        stream = self._stream_bytes(setting)
        if self.model.edges:
            return widest_bytes(self.model, dict.fromkeys(self._layers, stream)), stream
        return stream, stream

    def _stream_bytes(self, setting: Setting) -> float:
        a = self.model.architecture
        return setting.stream_tokens * a.hidden_size * setting.element_bytes if a else 0.0

    @cached_property
    def _sample_crossings(self) -> tuple[float, float]:
        """Most and least bytes of one sample in fp32 that cross a boundary of a traced graph."""
        output_bytes = {
            kind: float(layer.trace.output_bytes) if layer.trace else 0.0
            for kind, layer in self._layers.items()
        }
        return (
            widest_bytes(self.model, output_bytes),
            narrowest_bytes(self.model, output_bytes),
        )

    def _context_bytes(self, layout: Layout) -> float:
        if self._rates.on_cpu:
            return 0.0
        return CONTEXT_BYTES + (COLLECTIVE_LIBRARY_BYTES if layout.devices > 1 else 0.0)


def fastest_s(figures: KindFigures, recompute: Recompute | None = None) -> NDArray[np.float64]:
    """[kind, place] Fewest seconds of both passes, of one choice of recompute or the best."""
    return np.array(
        [
            np.min(
                [
                    one.passes_s
                    for choice, one in zip(RECOMPUTES, of_kind, strict=True)
                    if recompute in (None, choice)
                ],
                axis=0,
            )
            for of_kind in figures.values()
        ]
    )


def least_credits_s(figures: KindFigures) -> NDArray[np.float64]:
    """[kind, place] The least `Figures.credit_s` of any choice."""
    return np.array([np.min([one.credit_s for one in each], axis=0) for each in figures.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Parameters of a layer on a rank: computed with, updated by it, and their bytes."""

    parameters: float
    optimized: float
    states: States
    sides: float
    """Rows and columns of its matrices, added up; counted where gradients are factored."""
    experts: _Apart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    """Those of its parameters that are experts with ranks of their own, and how they are shared."""

    parameters: float
    sharing: Sharing


class _Moved(NamedTuple):
    """A layer's states, the traffic of sharing them, and a tied weight's seconds."""

    held: _Held
    traffic: Traffic | None
    tied_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """LayoutCosts without what schedule and number of micro-batches change."""

    parts: dict[str, tuple[StrategyParts, ...]]
    neighbours: dict[str, tuple[float, ...]]
    transfer_s: float
    action_s: float
    boundary_bytes: float
    context_bytes: float
    assumptions: tuple[Assumption, ...]


def counted_by_rank(layout: Layout) -> bool:
    """Whether planner.costs.rank_memory tells memory: several stages a rank, or split backwards."""
    split = layout.pipeline > 1 and splits_backward(layout.schedule)
    return layout.virtual_stages > 1 or split


def holding_of(layout: Layout) -> Holding:
    if counted_by_rank(layout):
        return "whole, last stage too" if layout.schedule == "dualpipe-v" else "whole"
    if layout.pipeline > 1 and layout.schedule == "gpipe":
        return "all forwards first"
    return "each backward soon"


def _of_experts(layout: Layout, sharing: Sharing) -> Sharing:
    """Return how routed experts are shared, which may have ranks of their own."""
    if layout.expert == 1:
        return sharing
    spread = max(1, sharing.shard * layout.tensor // layout.expert)
    same = max(1, sharing.data * layout.tensor // layout.expert)
    return replace(sharing, shard=spread if sharing.sharded else 1, data=same)


def _weight_versions(layout: Layout) -> int:
    """How often a rank holds its parameters."""
    return 2 if layout.pipeline > 1 and layout.schedule == "pipedream-2bw" else 1


def _column(values: list[float]) -> float:
    """Return one number for each of many layouts as an array, or the number that all have."""
    if values.count(values[0]) == len(values):
        return values[0]
    return cast(float, np.array(values))


_TRAFFIC_NAMES = tuple(field.name for field in fields(Traffic))


def _key(layout: Layout) -> tuple[object, ...]:
    """What parts depend on."""
    return layout.micro_batch, *_sharing_key(layout)


def _sharing_key(layout: Layout) -> tuple[object, ...]:
    """What the sharing of states depends on."""
    return (
        layout.tensor,
        layout.context,
        layout.expert,
        layout.zero,
        layout.data_shard,
        layout.data_replicate,
        layout.pipeline,
        layout.order,
        layout.micro_batches > 1,
        layout.offload,
        layout.gradient_wire,
        _weight_versions(layout),
    )
