"""One layer's seconds and bytes under a layout, cause by cause: passes, states, what sharing moves.

Tensor-parallel collectives wait; what is seen of sharding, `planner.costs.sharding` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple, assert_never, cast

import numpy as np

from meshwright.planner.costs.activations import ActivationCost, activation_cost
from meshwright.planner.costs.collectives import Level, group_steps, levels, same_experts_steps
from meshwright.planner.costs.layer_seconds import ENDS
from meshwright.planner.costs.layer_strategy import StrategyParts
from meshwright.planner.costs.memory.resident_states import (
    ResidentParameters,
    ResidentStates,
    loss_gradients,
    matrices_bytes,
    weight_versions,
)
from meshwright.planner.costs.sharding import (
    ExposedSharding,
    Links,
    PipelineReplicas,
    ShardingTraffic,
    seen_in_passes,
    seen_once,
    traffic,
)
from meshwright.planner.documents.axes import computed_by
from meshwright.planner.documents.model import Layer, ModelGraph, trains_as_module

if TYPE_CHECKING:
    from meshwright.planner.costs.calibration import Figures
    from meshwright.planner.costs.hardware_rates import Rates
    from meshwright.planner.costs.layer_costs import LayerFigures
    from meshwright.planner.costs.memory.state_bytes import States, StateSharding
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Activations, Axis, Layout
    from meshwright.planner.documents.profile import Recompute
    from meshwright.planner.operators.operator_table import Setting

SHARD_AXES: tuple[Axis, ...] = ("context", "data_shard")


class LayerParts:
    """The parts of a model's layers on a cluster, for any layout."""

    def __init__(
        self,
        model: ModelGraph,
        cluster: ClusterSpec,
        figures: LayerFigures,
        rates: Rates,
        holding: ResidentStates,
        *,
        setting: Callable[[Layout], Setting],
        activations: tuple[Activations, ...],
        recomputes: tuple[Recompute, ...],
        replicas: PipelineReplicas | None = None,
    ) -> None:
        """`setting` tells what of a layout the computation inside layers depends on; `replicas` are
        pipelines that may be unlike, over which gradients are summed."""
        self._replicas = replicas
        self._cluster = cluster
        self._figures = figures
        self._rates = rates
        self._holding = holding
        self._setting = setting
        self._activations = activations
        self._recomputes = recomputes
        self._layers = {layer.kind: layer for layer in model.layers}
        self._with_loss = {model.loss_kind, *holding.end_kinds[1:]}
        """Kinds whose parts depend on how the loss is computed."""
        self._scripted = trains_as_module(model.source or "")
        gathered = rates.framework.eight_bit.gathered
        self._narrow = rates.device.eight_bit_flops is not None and "parameters" in gathered
        self._traffic: dict[tuple[object, ...], ShardingTraffic] = {}
        self._known_moved: dict[tuple[object, ...], Moved] = {}
        self._known_links: dict[tuple[object, ...], Links] = {}
        self._known_parts: dict[tuple[object, ...], tuple[StrategyParts, ...]] = {}

    def parts_of(self, kind: str, layout: Layout, *, linked: bool) -> tuple[StrategyParts, ...]:
        """[choice] One kind's parts, with the seconds of sharing only if `linked`."""
        # Measured stages have the loss that they were measured with.
        depends = kind in self._with_loss or self._figures.profile is not None
        key = (kind, linked, layout.loss if depends else None, *_passes_key(layout))
        parts = self._known_parts.get(key)
        if parts is None:
            figures = self._figures.figures_of(self._setting(layout), layout)[kind]
            parts = self._put_parts(self._layers[kind], layout, figures, linked=linked)
            self._known_parts[key] = parts
        return parts

    def together(self, kind: str, first: Layout, moved: Moved) -> tuple[StrategyParts, ...]:
        """[choice] One kind's parts as arrays [layout], those of its states aside.

        `moved` is that of layouts that compute as the first does (`moved_together`).
        """
        figures = self._figures.figures_of(self._setting(first), first)[kind]
        return self._put_together(self._layers[kind], first, figures, moved)

    def moved_together(self, kind: str, layouts: Sequence[Layout]) -> Moved:
        """Return what sharing takes of a kind as arrays [layout], whatever the micro-batch.

        The layouts differ in how widely one ZeRO level divides states and where the axes lie.
        """
        each = [self._states_and_traffic(self._layers[kind], layout) for layout in layouts]
        moving = ShardingTraffic(
            **{
                name: _column([getattr(layer.traffic, name) for layer in each])
                for name in _TRAFFIC_NAMES
            }
        )
        held = replace(each[0].held, optimized=_column([layer.held.optimized for layer in each]))
        host_bytes = _column([layer.held.states.host_bytes for layer in each])
        held = replace(held, states=replace(held.states, host_bytes=host_bytes))
        return Moved(held, moving, _column([layer.tied_s for layer in each]))

    def _put_parts(
        self, layer: Layer, layout: Layout, figures: tuple[Figures, ...], *, linked: bool
    ) -> tuple[StrategyParts, ...]:
        """Add the states, and over links the sharding communication, to a layer's figures."""
        if linked:
            return self._put_together(
                layer, layout, figures, self._states_and_traffic(layer, layout)
            )
        held = self._holding.resident_parameters(layer, layout, self._holding.sharing(layout))
        return self._put_together(layer, layout, figures, Moved(held, None, 0.0))

    def resident_and_traffic(
        self, kind: str, layout: Layout
    ) -> tuple[ResidentParameters, ShardingTraffic, float]:
        """Return a rank's bytes of a kind, what its sharing takes, and a tied weight's sums."""
        held, moving, tied_s = self._states_and_traffic(self._layers[kind], layout)
        assert moving is not None
        return held, moving, tied_s

    def _states_and_traffic(self, layer: Layer, layout: Layout) -> Moved:
        """Return what a layer's states are and what their sharing takes, whatever the passes."""
        gradients = loss_gradients(layout) if layer.kind in self._with_loss else None
        key = layer.kind, gradients, *_sharing_key(layout)
        moved = self._known_moved.get(key)
        if moved is None:
            sharing, links = self._holding.sharing(layout), self.links(layout)
            held = self._holding.resident_parameters(layer, layout, sharing)
            narrow = (self._narrow or sharing.narrow) and layer.kind not in ENDS
            moving = self._moving(held, sharing, links, narrow=narrow)
            once_s = self._tied_s(layer, layout, links)
            once_s += self._matrices_s(layer, layout, sharing, links)
            moved = Moved(held, moving, once_s)
            self._known_moved[key] = moved
        return moved

    def _put_together(
        self, layer: Layer, layout: Layout, figures: tuple[Figures, ...], moved: Moved
    ) -> tuple[StrategyParts, ...]:
        """[choice] Return the parts of a layer; nothing moves where links are left out."""
        held, moving, sync_s = moved
        sharing = self._holding.sharing(layout)
        last = layout.pipeline > 1 and layer.kind == self._holding.end_kinds[1]
        last = last and self._rates.framework.pipeline.keeps_results
        # A script's loss is part of its last stage, which hands on one number.
        last = last and not self._scripted
        optimizer_s = self._rates.optimizer_s(held.optimized, sharing.types)
        update_flops = self._holding.update_flops(layer, layout, sharing)
        if update_flops:
            optimizer_s += self._rates.products_s(update_flops)
        stream_s = 0.0
        match layout.offload:
            case "none":
                pass
            case "optimizer":
                match self._rates.framework.offload.updates:
                    case "streamed":
                        stream_s = 2 * self._rates.host_copy_s(held.states.host_bytes)
                    case "on_host":
                        optimizer_s = self._rates.host_optimizer_s(held.optimized, sharing.types)
                        size = sharing.types.working * held.optimized
                        stream_s = self._rates.host_exchange_s(size, figures[0].backward_s)
            case "parameters":
                optimizer_s = self._rates.host_optimizer_s(held.optimized, sharing.types)
            case _:
                assert_never(layout.offload)
        if self._holding.has_reference:
            again_s = figures[0].forward_s
            figures = tuple(
                replace(choice, forward_s=choice.forward_s + again_s) for choice in figures
            )
        once = ExposedSharding(0.0, 0.0)
        if moving:
            plain = figures[0]
            once = seen_once(
                moving,
                sharing,
                self._rates,
                forward_s=plain.forward_s,
                backward_s=plain.backward_s,
            )
        inside = layer.kind not in self._holding.end_kinds
        if self._holding.wide and not layout.zero and inside:
            # Of a block that recomputes all of itself its input alone is stored.
            figures = tuple(
                replace(choice, stored_bytes=2 * choice.stored_bytes) if again == "full" else choice
                for again, choice in zip(self._recomputes, figures, strict=True)
            )
        return tuple(
            self._strategy(
                recompute,
                choice,
                moving,
                sharing,
                activations=activations,
                states=held.states,
                treated=activation_cost(
                    activations,
                    choice,
                    self._rates,
                    passed=choice.passed_bytes(activations) if last else 0.0,
                ),
                sync_s=sync_s + once.shard_s,
                stream_s=stream_s + once.host_s,
                optimizer_s=optimizer_s,
                left_bytes=self._leftover_bytes(layer, recompute, choice, held, sharing),
            )
            for recompute, choice in zip(self._recomputes, figures, strict=True)
            for activations in self._activations
        )

    def _moving(
        self, held: ResidentParameters, sharing: StateSharding, links: Links, *, narrow: bool
    ) -> ShardingTraffic:
        """Return the traffic of a layer's states, the same for every micro-batch size.

        Those of Linears may be gathered in 8 bits (`narrow`), experts' in 16.
        """
        apart, among = held.experts, links.same_experts
        frozen = held.parameters - held.adapters if held.frozen else 0.0
        if apart is None or among is None:
            wide = held.wide if sharing.narrow else 0.0
            return self._traffic_of(
                held.parameters, held.sides, sharing, links, frozen, narrow, wide
            )
        inside = held.parameters - apart.parameters
        frozen -= apart.parameters * held.frozen
        dense = self._traffic_of(inside, held.sides, sharing, links, frozen, narrow)
        frozen = apart.parameters * held.frozen
        return dense + self._traffic_of(apart.parameters, 0.0, apart.sharing, among, frozen, False)

    def _traffic_of(
        self,
        parameters: float,
        sides: float,
        sharing: StateSharding,
        links: Links,
        frozen: float,
        narrow: bool,
        wide: float = 0.0,
    ) -> ShardingTraffic:
        key = (parameters, sides, sharing, links.name, frozen, narrow, wide)
        layer_traffic = self._traffic.get(key)
        if layer_traffic is None:
            layer_traffic = traffic(
                parameters,
                sharing,
                links,
                self._rates,
                sides=sides,
                frozen=frozen,
                narrow=narrow,
                wide=wide,
            )
            self._traffic[key] = layer_traffic
        return layer_traffic

    def _strategy(
        self,
        recompute: Recompute,
        figures: Figures,
        moving: ShardingTraffic | None,
        sharing: StateSharding,
        *,
        activations: Activations,
        states: States,
        treated: ActivationCost,
        sync_s: float,
        stream_s: float,
        optimizer_s: float,
        left_bytes: float,
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
                left_bytes=left_bytes,
            )
        if self._rates.framework.sharding.regathers and recompute == "full":
            moving = replace(moving, backward_s=moving.backward_s + moving.forward_gather_s)
        (gather_s, forward_fetch_s), (backward_s, backward_fetch_s) = seen_in_passes(
            moving,
            sharing,
            self._rates,
            forward_s=figures.forward_s,
            backward_s=figures.backward_s + figures.recompute_s,
            waits_s=figures.waits_s,
            forward_waits_s=figures.forward_waits_s,
        )
        hooks_s = 0.0
        if sharing.is_wrapped:
            hooks_s = self._rates.hooks_s
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
            left_bytes=left_bytes,
            hooks_s=hooks_s,
        )

    def _leftover_bytes(
        self,
        layer: Layer,
        recompute: Recompute,
        figures: Figures,
        held: ResidentParameters,
        sharing: StateSharding,
    ) -> float:
        """Return what a layer's backward leaves until that of the whole model ends.

        It is the copy of its input that a reentrant checkpoint recomputes from, and its gradient,
        where the layer's weights are frozen in a unit of their own (torch,
        distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook).
        """
        keeps = self._rates.framework.recompute.reentrant and held.frozen and recompute == "full"
        if not (keeps and sharing.is_wrapped and layer.kind not in self._holding.end_kinds):
            return 0.0
        return 2 * figures.stored_bytes

    def _tied_s(self, layer: Layer, layout: Layout, links: Links) -> float:
        """Seconds of summing a tied weight's gradients between the ends of a pipeline.

        Both ends take part, so it begins when the later one has its gradient.
        """
        summed = self._holding.tied_sum(layer) if layout.pipeline > 1 else 0.0
        if not summed or not links.neighbours:
            return 0.0
        divided = layout.tensor * (layout.data_shard * layout.context if layout.zero else 1)
        ends = (Level(links.neighbours[-1].tier, 2),)
        size = self._holding.sharing(layout).types.gradient * summed / divided
        return self._rates.link_s("all_reduce", size, ends)

    def _matrices_s(
        self, layer: Layer, layout: Layout, sharing: StateSharding, links: Links
    ) -> float:
        """Seconds of bringing matrices to the ranks that update them whole, and back.

        Of each matrix the gradient and the weight are gathered, and the new weight is broadcast
        (runtime/optim/sharded_optimizer.py).
        """
        group = links.shard
        if not sharing.is_sharded:
            steps = group_steps(layout, ("tensor",))
            group = levels(self._cluster.tiers, steps, devices=layout.devices)
        sizes: tuple[float, ...] = matrices_bytes(layer, sharing, layout.tensor)
        if self._holding.gathers_matrices and (sharing.is_sharded or layout.tensor > 1):
            sizes = (sharing.types.stored_bytes * layer.parameters,)
        return sum(
            2 * self._rates.link_s("all_gather", size, group)
            + self._rates.link_s("broadcast", size, group)
            for size in sizes
        )

    def links(self, layout: Layout) -> Links:
        """Return the links of a layout that share states and join stages."""
        name = (
            group_steps(layout, SHARD_AXES),
            group_steps(layout, ("data_replicate",)),
            group_steps(layout, ("pipeline",)),
            layout.devices,
            layout.reshard_after_forward,
        )
        same = same_experts_steps(layout) if layout.expert > 1 else None
        key = (name, same)
        if key not in self._known_links:
            shard, replicate, neighbours = (
                levels(self._cluster.tiers, steps, devices=layout.devices) for steps in name[:3]
            )
            inner = levels(self._cluster.tiers, _inner_steps(layout), devices=layout.devices)
            if self._replicas is not None:
                replicate = self._replicas.levels
            whole = Links(
                shard=shard, replicate=replicate, neighbours=neighbours, inner=inner, name=name
            )
            if same is not None:
                inside = levels(self._cluster.tiers, same, devices=layout.devices)
                apart = replace(whole, shard=inside, name=(same, *name[1:]))
                whole = replace(whole, same_experts=apart)
            self._known_links[key] = whole
        return self._known_links[key]


def _inner_steps(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return (ranks, stride) of those that divide parameters between forward and backward."""
    if layout.reshard_after_forward in (None, 1):
        return ()
    shard = group_steps(layout, ("data_shard",))
    return tuple((layout.reshard_after_forward, stride) for _, stride in shard)


class Moved(NamedTuple):
    """A layer's states, the traffic of sharing them, and a tied weight's seconds."""

    held: ResidentParameters
    traffic: ShardingTraffic | None
    tied_s: float


def _column(values: list[float]) -> float:
    """Return one number for each of many layouts as an array, or the number that all have."""
    if values.count(values[0]) == len(values):
        return values[0]
    return cast(float, np.array(values))


_TRAFFIC_NAMES = tuple(field.name for field in fields(ShardingTraffic))


def parts_key(layout: Layout) -> tuple[object, ...]:
    """Return the values of a layout that parts depend on."""
    return (layout.loss, *_passes_key(layout))


def _passes_key(layout: Layout) -> tuple[object, ...]:
    """Return the same but how the loss is computed, which few kinds depend on."""
    return (
        layout.micro_batch,
        layout.sequence_parallel,
        *computed_by(layout),
        *_sharing_key(layout),
    )


def _sharing_key(layout: Layout) -> tuple[object, ...]:
    """Return the values of a layout that the sharing of states depends on, but for the loss."""
    return (
        layout.tensor,
        layout.context,
        layout.expert,
        layout.expert_tensor,
        layout.zero,
        layout.data_shard,
        layout.data_replicate,
        layout.pipeline,
        layout.order,
        layout.micro_batches > 1,
        layout.offload,
        layout.gradient_compression,
        layout.prefetch,
        layout.reshard_after_forward,
        layout.weight_gather_dtype,
        weight_versions(layout),
    )
