"""Bytes of the states of one layer on a rank: parameters, gradients and optimizer.

How states are shared follows from the layout alone; routed experts may have ranks of their own, and
adapters leave all but their own parameters frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.planner.costs.cut_tensors import sink_kind
from meshwright.planner.costs.layer_seconds import ENDS
from meshwright.planner.costs.memory import fsdp1_units as flat_units
from meshwright.planner.costs.memory import state_bytes as memory
from meshwright.planner.costs.memory.state_bytes import (
    FP32,
    FirstLayer,
    LastLayer,
    States,
    StateSharding,
)
from meshwright.planner.costs.sharding import POWERSGD_RANK
from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.model import Layer, ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.profile import LossGradients
from meshwright.planner.documents.stack import Stack
from meshwright.planner.operators import layer_operators as arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentParameters:
    """Parameters of a layer on a rank: computed with, updated by it, and their bytes."""

    parameters: float
    optimized: float
    states: States
    sides: float
    """Rows and columns of its matrices, added up; counted where gradients are factored."""
    frozen: bool = False
    """All but its adapters are."""
    adapters: float = 0.0
    largest: float = 0.0
    """Parameters of its largest matrix."""
    experts: ExpertShard | None = None
    wide: float = 0.0
    """Routed experts' parameters, which no rank gathers in 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShard:
    """Those of its parameters that are experts with ranks of their own, and how they are shared."""

    parameters: float
    sharing: StateSharding


class ResidentStates:
    """What ranks hold of a model's layers, for any layout."""

    def __init__(self, model: ModelGraph, job: Job, stack: Stack) -> None:
        self._model = model
        self._job = job
        self._stack = stack
        quantised = job.lora is not None and job.lora.quantised
        self._types = [
            memory.state_types(
                stack,
                job.precision,
                zero=zero,
                quantised=quantised,
                moments=model.optimizer_bytes,
            )
            for zero in range(4)
        ]
        self._types_of_ends = [
            memory.state_types(stack, job.precision, zero=zero, moments=model.optimizer_bytes)
            for zero in range(4)
        ]
        self.wide = quantised and stack.types.wide_frozen
        """Whether what of a frozen model is not in 4 bits is fp32, where nothing is divided."""
        if self.wide:
            self._types_of_ends[0] = replace(self._types_of_ends[0], frozen=float(FP32))
        self._gathers_narrow = (
            job.precision in EIGHT_BITS and "parameters" in stack.eight_bit.gathered
        )
        self._known: dict[tuple[object, ...], ResidentParameters] = {}

    def sharing(self, layout: Layout) -> StateSharding:
        """Return among how many ranks a layout divides states."""
        return StateSharding(
            types=self._types[layout.zero],
            zero=layout.zero,
            shard=layout.data_shard * layout.context,
            data=layout.data * layout.context,
            pipelined=layout.pipeline > 1,
            accumulated=layout.micro_batches > 1,
            offload=layout.offload,
            wire=layout.gradient_wire,
            prefetch=layout.prefetch,
            reshard=layout.reshard,
            versions=weight_versions(layout),
            narrow=layout.weight_wire == "fp8" or self._gathers_narrow,
            gathers_before=self._stack.sharding.backward_prefetch == "before",
            syncs_each=self._stack.sharding.syncs_each,
        )

    def resident_parameters(
        self, layer: Layer, layout: Layout, sharing: StateSharding
    ) -> ResidentParameters:
        """Return a rank's bytes of a layer; routed experts divide over other ranks."""
        key = (
            layer.kind,
            layout.tensor,
            layout.expert,
            layout.expert_tensor,
            loss_gradients(layout) if layer.kind == self.end_kinds[1] else None,
            sharing,
        )
        held_states = self._known.get(key)
        if held_states is None:
            held_states = self._known[key] = self._count_held(layer, layout, sharing)
        return held_states

    def _count_held(
        self, layer: Layer, layout: Layout, sharing: StateSharding
    ) -> ResidentParameters:
        if layer.kind in ENDS and sharing.narrow:
            sharing = replace(sharing, narrow=False)
        dense, routed = arithmetic.local_parameters(
            self._model,
            layer,
            tensor=layout.tensor,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            shared_whole=self._stack.experts.shared == "whole",
        )
        if sharing.pipelined:
            dense += self.tied_copy(layer) / layout.tensor
        if self._job.lora is not None:
            return self._frozen(layer, layout, sharing, dense, routed)
        largest = arithmetic.largest_matrix(self._model, layer, tensor=layout.tensor)
        if layer.trace is not None:  # which is an expert's, where those have ranks of their own
            largest = min(largest, dense)
        sides = 0.0
        if sharing.wire == "powersgd":
            sides = arithmetic.matrix_sides(self._model, layer, tensor=layout.tensor)
        a = self._model.architecture
        if self._flat(sharing):
            states = flat_units.states(dense, sharing)
            if layer.kind in self.end_kinds:
                states = self._in_root(states, layer, dense, layout, sharing)
        else:
            states = memory.states(
                dense,
                sharing,
                largest=largest,
                factors=POWERSGD_RANK * sides,
                end=self._end(layer.kind, layout),
            )
            tied = a is not None and a.tied_embeddings and layer.kind == self.end_kinds[0]
            tied = tied and sharing.types.unit == "layer"
            if tied and sharing.gathers_again and not sharing.pipelined:
                states = memory.in_root(states, largest, sharing)
        whole = sum(matrices_bytes(layer, sharing, layout.tensor))
        if whole:  # each at its owner, beside the part that it has of it
            owners = sharing.shard if sharing.is_sharded else layout.tensor
            states = replace(states, optimizer_bytes=states.optimizer_bytes + whole / owners)
        optimized = dense / (sharing.shard if sharing.is_sharded else 1)
        apart: ExpertShard | None = None
        if routed:
            sharing = replace(sharing, narrow=False) if sharing.narrow else sharing
            if layout.expert > 1:
                sharing = of_experts(sharing, layout.tensor, layout.expert, layout.expert_tensor)
                apart = ExpertShard(parameters=routed, sharing=sharing)
            hidden = a.hidden_size if a is not None else layer.experts and layer.experts.hidden
            # Ranks that experts do not fill divide every expert's hidden dim.
            pieces = max(1, self._model.expert_count // layout.expert)
            pieces = 0 if hidden and hidden % sharing.shard == 0 else pieces
            states += (
                flat_units.states(routed, sharing)
                if self._flat(sharing)
                else memory.states(routed, sharing, pieces=pieces)
            )
            optimized += routed / (sharing.shard if sharing.is_sharded else 1)
        return ResidentParameters(
            parameters=dense + routed,
            optimized=optimized,
            states=states,
            sides=sides,
            experts=apart,
            wide=routed,
        )

    def _end(self, kind: str, layout: Layout) -> LastLayer | FirstLayer | None:
        """Return what is different of a language model's ends; None of other layers."""
        a, (first, last) = self._model.architecture, self.end_kinds
        kinds = self._model.chain_kinds
        if a is None or len(kinds) < 2:
            return None
        if kind == last:
            return LastLayer(
                before=self._unit(kinds[-2], layout),
                logits=layout.loss is None,
                kept=self._stack.sharding.ends == "kept",
                holds_gradient=loss_gradients(layout) == "precomputed",
            )
        # A table that both ends use is of the root unit (memory.in_root).
        if kind == first and not a.tied_embeddings:
            return FirstLayer(behind=self._unit(kinds[1], layout))
        return None

    def copy_bytes(self, kind: str, layout: Layout) -> float:
        """Return bytes of a block's working copy, frozen weights as they are stored."""
        types = self._types[layout.zero]
        each = types.working if self._job.lora is None else types.frozen
        return each * self._unit(kind, layout)

    def _unit(self, kind: str, layout: Layout) -> float:
        """Return the parameters of a unit of sharing; experts on ranks of their own are others."""
        dense, routed = arithmetic.local_parameters(
            self._model,
            next(layer for layer in self._model.layers if layer.kind == kind),
            tensor=layout.tensor,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            shared_whole=self._stack.experts.shared == "whole",
        )
        return dense + (routed if layout.expert == 1 else 0.0)

    def _flat(self, sharing: StateSharding) -> bool:
        """Whether units are those of FSDP1; it has no pipelines."""
        return sharing.types.unit == "flat" and sharing.is_wrapped and not sharing.pipelined

    def _in_root(
        self,
        states: States,
        layer: Layer,
        parameters: float,
        layout: Layout,
        sharing: StateSharding,
    ) -> States:
        """Return the bytes of an end in FSDP1's root unit, which has all that no block is."""
        kinds, (_, last) = self._model.chain_kinds, self.end_kinds
        trained = self._job.lora is None
        before: float | None = None
        if layer.kind == last:
            before = self.copy_bytes(kinds[-2], layout) if len(kinds) > 1 else 0.0
        ends = (kind for kind in self.end_kinds if kind is not None)
        return flat_units.in_root(
            states,
            parameters,
            sharing,
            root=sum(self._unit(kind, layout) for kind in ends) if trained else 0.0,
            before=before,
            tied=self.tied_copy(layer) / layout.tensor,
        )

    def _frozen(
        self, layer: Layer, layout: Layout, sharing: StateSharding, dense: float, routed: float
    ) -> ResidentParameters:
        """Return a rank's bytes of a layer of which adapters alone are trained."""
        from meshwright.planner.costs.lora import adapter_parameters, largest_adapter  # noqa: PLC0415

        assert self._job.lora is not None
        end = layer.kind in self.end_kinds
        if end:  # 4 bits are of the blocks' products
            sharing = replace(sharing, types=self._types_of_ends[sharing.zero])
        trained = adapter_parameters(self._model, layer.kind, self._job.lora, tensor=layout.tensor)
        apart = of_experts(sharing, layout.tensor, layout.expert, layout.expert_tensor)
        if self._flat(sharing):
            states = flat_units.frozen_states(dense, sharing)
            states += flat_units.frozen_states(routed, apart)
            if end:
                states = self._in_root(states, layer, dense, layout, sharing)
            widest = largest_adapter(self._model, layer.kind, self._job.lora, tensor=layout.tensor)
            states += flat_units.states(trained, sharing, unit=widest)
        else:
            states = memory.frozen_states(dense, sharing) + memory.frozen_states(routed, apart)
            states += memory.states(trained, sharing, largest=trained)
        return ResidentParameters(
            parameters=dense + routed + trained,
            optimized=trained / (sharing.shard if sharing.is_sharded else 1),
            states=states,
            sides=0.0,
            frozen=True,
            adapters=trained,
            largest=arithmetic.largest_matrix(self._model, layer, tensor=layout.tensor),
            experts=ExpertShard(parameters=routed, sharing=apart)
            if routed and layout.expert > 1
            else None,
        )

    def tied_copy(self, layer: Layer) -> float:
        """Parameters of other stages of which a layer's own has a copy in a pipeline.

        Of a language model it is the output projection's, on the last stage.
        """
        a = self._model.architecture
        if a is None:
            return float(layer.tied or 0)
        if layer.kind != "head" or not a.tied_embeddings:
            return 0.0
        return float(a.vocab_size * (a.embedding_size or a.hidden_size))

    @cached_property
    def end_kinds(self) -> tuple[str | None, str | None]:
        """Kinds of the first and last layer, each None if other layers have the same kind."""
        kinds = list(self._model.chain_kinds)
        if self._model.edges:
            return None, sink_kind(self._model)
        first, last = kinds[0], kinds[-1]
        return (
            first if kinds.count(first) == 1 else None,
            last if kinds.count(last) == 1 else None,
        )


def matrices_bytes(layer: Layer, sharing: StateSharding, tensor: int) -> tuple[int, ...]:
    """Return the bytes of each matrix that one rank updates whole, while ranks divide it.

    ZeRO divides all of them, else the tensor axis some.
    """
    if sharing.is_sharded:
        matrices = layer.whole_matrices or ()
    else:
        divided = layer.divided_among(tensor)
        matrices = divided.whole_matrices if divided else ()
    return tuple(FP32 * size for size in matrices)


def of_experts(
    sharing: StateSharding, tensor: int, expert: int, expert_tensor: int = 1
) -> StateSharding:
    """Return how routed experts are shared, which may have ranks of their own."""
    if expert == 1:
        return sharing
    spread = max(1, sharing.shard * tensor // (expert * expert_tensor))
    same = max(1, sharing.data * tensor // (expert * expert_tensor))
    return replace(sharing, shard=spread if sharing.is_sharded else 1, data=same)


def loss_gradients(layout: Layout) -> LossGradients | None:
    """Return how a loss in chunks makes its gradients; None where all logits are made."""
    return None if layout.loss is None else layout.loss.gradients


def weight_versions(layout: Layout) -> int:
    """How many copies of its parameters a rank has."""
    return layout.executed_schedule.weight_versions
