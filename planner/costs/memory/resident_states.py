"""Bytes of the states of one layer on a rank: parameters, gradients and optimizer.

How states are shared follows from the layout alone; routed experts may have ranks of their own, and
adapters leave all but their own parameters frozen.

Bytes that a layer's parameters, gradients and optimizer state take as a unit of FSDP1.

A unit's parameters are one flat tensor.  Its shard is the master; the working one is gathered
straight into the tensor that layers use, where FSDP2 has a buffer beside it.  FSDP2's units and
whole buffers stand in `planner.costs.memory.state_bytes`, whose symbols these are: N parameters of
the unit, d ranks, bytes e of a working parameter, s of a stored one, g, o and w of gradients,
moments and the reduction.  Padding to a multiple of d is less than d elements and left out.

                       parameters      gradients       optimizer
    NO_SHARD           s N (+ e N)     g N             o N
    SHARD_GRAD_OP      s N/d + e N     g N/d           o N/d
    FULL_SHARD         s N/d           g N/d           o N/d

While a unit works under FULL_SHARD its working copy is G = e N, and M = e N/d is the shard that
mixed precision casts before it is gathered.  The reduction of the unit behind it is under way, with
R = e N + w N: a flat gradient, and its cast where w and e differ.

    forward        2 G + M             it and the next one: the host waits for the copy before last
                                       to be let go of (limit_all_gathers)
    backward       G + p (G + M) + R   p = 1 under BACKWARD_PRE, which gathers the next unit before
                                       this one's gradients, 0 under BACKWARD_POST
    its end        2 e N more          gradients of its parameters, and the flat one they join

Units are reduced in every micro-batch, or, under no_sync, in the last one; until then whole
gradients of e N are summed.  What no unit wraps is in the root's, gathered from the
first forward until the end of the backward; so long do gradients of the output projection wait for
those of the embedding, with which they join.

Source: torch 2.13, distributed/fsdp/_runtime_utils.py (_unshard, _reshard, _pre_backward_hook,
_post_backward_hook, _reduce_grad), _flat_param.py (_use_low_precision_shard,
_free_unsharded_flat_param) and _limiter_utils.py (_FreeEventQueue, two in flight).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from meshwright.planner.costs.cut_tensors import sink_kind
from meshwright.planner.costs.layer_seconds import ENDS
from meshwright.planner.costs.memory import state_bytes as memory
from meshwright.planner.costs.memory.state_bytes import (
    FP32,
    FirstLayer,
    LastLayer,
    States,
    StateSharding,
    roots_bytes,
)
from meshwright.planner.costs.sharding import POWERSGD_RANK
from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.training import REFERENCED
from meshwright.planner.operators import layer_operators as arithmetic

if TYPE_CHECKING:
    from meshwright.planner.costs.memory.state_bytes import StateTypes
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.model import Layer, ModelGraph
    from meshwright.planner.documents.plan import Job, Layout
    from meshwright.planner.documents.profile import LossGradients
    from meshwright.planner.documents.training import FrozenWeights


def fsdp1_states(parameters: float, sharing: StateSharding, *, unit: float | None = None) -> States:
    """Return the bytes of a layer with this many trained parameters on the rank (table above).

    `unit` are the parameters of its largest unit where it is several.

    >>> from meshwright.planner.catalog import frameworks
    >>> from meshwright.planner.costs.memory.state_bytes import state_types
    >>> foundry = state_types(frameworks()["llm-foundry-fsdp"], "bf16")
    >>> eight = StateSharding(
    ...     types=foundry, zero=3, shard=8, data=8, pipelined=False, accumulated=True
    ... )
    >>> fsdp1_states(8e9, eight).resident_bytes / 8e9 * 8
    16.0
    """
    types, n, d = sharing.types, parameters, sharing.shard if sharing.is_sharded else 1
    master = types.stored_bytes * n / d
    gradients = types.gradient * n / (d if sharing.zero >= 2 else 1)
    if sharing.accumulated and d > 1 and not sharing.reduces_each_micro_batch:
        gradients = max(gradients, types.working * n)
    moments = types.moments * n / d
    beside = (
        d > 1 or types.stored_bytes != types.working
    )  # else it is computed with as it is stored
    copy = 0.0 if sharing.gathers_again or not beside else types.working * n
    working = _working(n if unit is None else unit, types.working, sharing, trained=True)
    if sharing.offload == "parameters":
        working = replace(working, host_bytes=master + gradients + moments)
        master = gradients = moments = 0.0
    elif sharing.offload == "optimizer":
        working, moments = replace(working, host_bytes=moments), 0.0
    return replace(
        working,
        parameters_bytes=master + copy,
        gradients_bytes=gradients,
        optimizer_bytes=moments,
        flat_bytes=roots_bytes(types, sharing, types.moments * n / d),
    )


def fsdp1_frozen_states(parameters: float, sharing: StateSharding) -> States:
    """Return what a layer's frozen parameters hold: no gradients and no optimizer state."""
    n, e, d = parameters, sharing.types.frozen, sharing.shard if sharing.is_sharded else 1
    working = _working(n, e, sharing, trained=False)
    shard, on_host = sharing.types.frozen_stored * n / d, sharing.offload == "parameters"
    copy = 0.0 if sharing.gathers_again or (d == 1 and not on_host) else e * n
    if on_host:
        working, shard = replace(working, host_bytes=shard), 0.0
    # Scales of 4-bit weights are attributes of modules, whole on every rank.
    return replace(working, parameters_bytes=shard + copy + sharing.types.scales * n)


def fsdp1_in_root(
    held: States,
    parameters: float,
    sharing: StateSharding,
    *,
    root: float,
    before: float | None,
    tied: float = 0.0,
) -> States:
    """Return the bytes of an end of the model as a part of the root unit, which trains `root`.

    `before` is None of the embedding; of the output projection bytes of the copy of the unit that
    ends before the loss, and is gathered for its own backward before that of the loss.  The copy
    that the embedding uses is there from its forward to its backward, so for the whole of both;
    that of the projection, its gradients and those of a `tied` matrix that it uses are counted as
    copies that a backward leaves there until it ends.
    """
    e, w = sharing.types.working, sharing.wire_bytes
    copy = e * parameters if sharing.gathers_again else 0.0
    fresh = e * (parameters + tied) if root else 0.0
    kept = replace(held, between_bytes=held.between_bytes + copy, forward_transient_bytes=0.0)
    if before is None:
        joined, cast = e * root, w * root if w != e else 0.0
        # Copies and gradients of single parameters are gone before gradients are cast.
        gone = (joined if copy else 0.0) + joined - fresh
        after = max(fresh + joined, joined + cast - gone)
        return replace(kept, backward_transient_bytes=fresh, after_backward_bytes=after)
    ahead = before if sharing.gathers_again and sharing.gathers_before else 0.0
    return replace(
        kept,
        gathered_bytes=fresh + copy,
        backward_transient_bytes=ahead,
        after_backward_bytes=ahead + fresh,
        waiting_gradients=0.0,
    )


def _working(parameters: float, each: float, sharing: StateSharding, *, trained: bool) -> States:
    """Return the working memory of a unit that computes with `each` bytes of a parameter."""
    types, d = sharing.types, sharing.shard if sharing.is_sharded else 1
    gathered = each * parameters if sharing.gathers_again else 0.0
    cast = each if trained and types.stored_bytes != each else 0.0
    on_host = sharing.offload == "parameters"
    stored = types.stored_bytes if trained else each
    arriving = (cast + (stored if on_host else 0.0)) * parameters / d
    if not (sharing.gathers_again or on_host):
        arriving = 0.0
    ahead = gathered + arriving if sharing.gathers_before else 0.0
    fresh = reduced = 0.0
    if trained:
        fresh = each * parameters
        wire = sharing.wire_bytes * parameters
        reduced = (fresh + (wire if wire != fresh else 0.0)) if sharing.data > 1 else 0.0
    beside = gathered + ahead + reduced
    return States(
        parameters_bytes=0.0,
        gathered_bytes=0.0,
        gradients_bytes=0.0,
        optimizer_bytes=0.0,
        forward_transient_bytes=2 * gathered + arriving,
        backward_transient_bytes=beside,
        after_backward_bytes=max(2 * fresh + beside, reduced + gathered + arriving),
        waiting_gradients=1.0 if trained else 0.0,
    )


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
    """Parameters of a layer's experts that have ranks of their own, and how they are shared."""

    parameters: float
    sharing: StateSharding


class ResidentStates:
    """States of a model's layers that ranks hold, for any layout."""

    def __init__(
        self, model: ModelGraph, job: Job, framework: Framework, replicas: int | None = None
    ) -> None:
        """`replicas` is the number of pipelines of a job that may be unlike; None: they are alike,
        and a layout says how many there are."""
        self._replicas = replicas
        self._model = model
        self._job = job
        self._framework = framework
        weights = job.lora.weights if job.lora is not None else "full"
        adamw = memory.state_types(framework, job.precision, masters=job.master_weights).moments

        def types(weights: FrozenWeights, *, matrices: bool) -> list[StateTypes]:
            """[ZeRO level] Bytes of each parameter's states."""
            own = model.optimizer_bytes
            if own is None:
                own = memory.moments_bytes(job.optimizer, adamw, matrices=matrices)
            return [
                memory.state_types(
                    framework,
                    job.precision,
                    zero=zero,
                    weights=weights,
                    moments=own,
                    masters=job.master_weights,
                )
                for zero in range(4)
            ]

        self._types = types(weights, matrices=True)
        self._types_of_ends = types("full", matrices=False)
        self._types_unpacked = types("full", matrices=True)
        self._types_of_adapters = self._types_unpacked
        if framework.types.wide_adapters:
            wide = memory.state_types(
                framework,
                "fp32",
                moments=memory.moments_bytes(job.optimizer, 8.0, matrices=True),
            )
            self._types_of_adapters = [wide, *self._types_unpacked[1:]]
        self._paged = job.optimizer == "adamw-8bit-paged"
        self.has_reference = job.objective in REFERENCED
        """A frozen model runs forward too: another one, or this one without its adapters."""
        self.gathers_matrices = framework.name == "native" and job.optimizer in (
            "adafactor",
            "muon",
        )
        """Each matrix is updated whole by one rank, which keeps a copy of it."""
        self.wide = weights == "nf4" and framework.types.wide_frozen
        """True if the part of a frozen model not in 4 bits is fp32, where nothing is divided."""
        if self.wide:
            ends, fp32 = self._types_of_ends, float(FP32)
            ends[0] = replace(ends[0], frozen=fp32, frozen_stored=fp32)
        self._gathers_narrow = (
            job.precision in EIGHT_BITS and "parameters" in framework.eight_bit.gathered
        )
        self._known: dict[tuple[object, ...], ResidentParameters] = {}

    def sharing(self, layout: Layout) -> StateSharding:
        """Return among how many ranks a layout divides states."""
        return StateSharding(
            types=self._types[layout.zero],
            zero=layout.zero,
            shard=layout.data_shard * layout.context,
            data=(self._replicas or layout.data) * layout.context,
            pipelined=layout.pipeline > 1 or self._replicas is not None,
            accumulated=layout.micro_batches > 1,
            captured=layout.graphs != "none",
            offload="optimizer" if self._paged and layout.offload == "none" else layout.offload,
            wire=layout.gradient_compression,
            prefetch=layout.prefetch,
            reshard_after_forward=layout.reshard_after_forward,
            versions=weight_versions(layout),
            narrow=layout.weight_gather_dtype == "fp8" or self._gathers_narrow,
            gathers_before=self._framework.sharding.backward_prefetch == "before",
            syncs_each=self._framework.sharding.syncs_each,
            leaves_frozen=self._framework.sharding.leaves_frozen,
            leaves_whole=self._framework.sharding.leaves_whole,
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
            held_states = self._count_held(layer, layout, sharing)
            if self.has_reference and not held_states.frozen:
                beside = self._reference(layer, layout, sharing)
                held_states = replace(held_states, states=held_states.states + beside)
            self._known[key] = held_states
        return held_states

    def _local_parameters(self, layer: Layer, layout: Layout) -> tuple[float, float]:
        """Parameters of a layer on a rank: those of all, and those of its experts."""
        return arithmetic.local_parameters(
            self._model,
            layer,
            tensor=layout.tensor,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            shared_whole=self._framework.experts.shared == "whole",
        )

    def _reference(self, layer: Layer, layout: Layout, sharing: StateSharding) -> States:
        """Return a rank's bytes of the reference model's layer, which is frozen."""
        dense, routed = self._local_parameters(layer, layout)
        frozen = fsdp1_frozen_states if self._flat(sharing) else memory.frozen_states
        apart = of_experts(sharing, layout.tensor, layout.expert, layout.expert_tensor)
        return frozen(dense, sharing) + frozen(routed, apart)

    def expert_padding(self, layout: Layout) -> float:
        """Return how many times as large padding makes routed experts, 1 without."""
        sharing = self.sharing(layout)
        if self._job.lora is not None or self._flat(sharing):
            return 1.0
        sharing = of_experts(sharing, layout.tensor, layout.expert, layout.expert_tensor)
        if not sharing.is_sharded:
            return 1.0
        pieces = {
            self._pieces(layer, layout, sharing)
            for layer in self._model.layers
            if self._local_parameters(layer, layout)[1]
        }
        return max(
            (memory.padded_parameters(1.0, number, sharing.shard) for number in pieces if number),
            default=1.0,
        )

    def _pieces(self, layer: Layer, layout: Layout, sharing: StateSharding) -> int:
        """Return into how many pieces a layer's experts divide at most, 0 for any number."""
        a = self._model.architecture
        hidden = a.hidden_size if a is not None else layer.experts and layer.experts.hidden
        # Ranks that experts do not fill divide every expert's hidden dim.
        divides = hidden and hidden % sharing.shard == 0
        return 0 if divides else max(1, self._model.expert_count // layout.expert)

    def _count_held(
        self, layer: Layer, layout: Layout, sharing: StateSharding
    ) -> ResidentParameters:
        sharing = self._of_kind(layer.kind, sharing)
        dense, routed = self._local_parameters(layer, layout)
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
            states = fsdp1_states(dense, sharing)
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
        elif self.gathers_matrices and (sharing.is_sharded or layout.tensor > 1):
            owners = sharing.shard if sharing.is_sharded else 1
            held = sharing.types.stored_bytes * dense / owners
            states = replace(
                states,
                optimizer_bytes=states.optimizer_bytes + held,
                flat_bytes=states.flat_bytes + sharing.types.gradient * dense / owners,
            )
        optimized = dense / (sharing.shard if sharing.is_sharded else 1)
        apart: ExpertShard | None = None
        if routed:
            sharing = replace(sharing, narrow=False) if sharing.narrow else sharing
            if layout.expert > 1:
                sharing = of_experts(sharing, layout.tensor, layout.expert, layout.expert_tensor)
                apart = ExpertShard(parameters=routed, sharing=sharing)
            states += (
                fsdp1_states(routed, sharing)
                if self._flat(sharing)
                else memory.states(routed, sharing, pieces=self._pieces(layer, layout, sharing))
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

    def _of_kind(self, kind: str, sharing: StateSharding) -> StateSharding:
        """Return how a kind is shared: ends are not gathered in 8 bits, and Muon's have AdamW."""
        if kind in ENDS and sharing.narrow:
            sharing = replace(sharing, narrow=False)
        if kind in self.end_kinds and self._job.optimizer == "muon":
            return replace(sharing, types=self._types_of_ends[sharing.zero])
        return sharing

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
                kept=self._framework.sharding.ends == "kept",
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
            shared_whole=self._framework.experts.shared == "whole",
        )
        return dense + (routed if layout.expert == 1 else 0.0)

    def _flat(self, sharing: StateSharding) -> bool:
        """Return whether units are those of FSDP1; it has no pipelines."""
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
        return fsdp1_in_root(
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
        packed, packed_routed = self._packed_parameters(layer, layout, dense, routed)
        plain = replace(sharing, types=self._types_unpacked[sharing.zero])
        plain_apart = replace(apart, types=plain.types)
        frozen_states, trained_states = memory.frozen_states, memory.states
        if self._flat(sharing):
            frozen_states = fsdp1_frozen_states
        states = frozen_states(packed, sharing) + frozen_states(packed_routed, apart)
        if dense > packed:
            states += frozen_states(dense - packed, sharing if end else plain)
        if routed > packed_routed:
            states += frozen_states(routed - packed_routed, plain_apart)
        if self._flat(sharing):
            if end:
                states = self._in_root(states, layer, dense, layout, sharing)
            widest = largest_adapter(self._model, layer.kind, self._job.lora, tensor=layout.tensor)
            states += fsdp1_states(trained, sharing, unit=widest)
        else:
            beside = replace(sharing, types=self._types_of_adapters[sharing.zero])
            states += trained_states(trained, beside, largest=trained)
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

    def _packed_parameters(
        self, layer: Layer, layout: Layout, dense: float, routed: float
    ) -> tuple[float, float]:
        """Return how many of a layer's dense and of its routed parameters on a rank are packed.

        Matrices of blocks are; MXFP4 is of experts alone, where a model has any (gpt-oss).
        """
        from meshwright.planner.costs.lora import packed_matrices  # noqa: PLC0415

        lora = self._job.lora
        if lora is None or not lora.packs_weights or layer.kind in self.end_kinds:
            return 0.0, 0.0
        matrices = packed_matrices(self._model, layer.kind, lora, tensor=layout.tensor)
        return min(dense, matrices), routed

    def update_flops(self, layer: Layer, layout: Layout, sharing: StateSharding) -> float:
        """Return the arithmetic of a rank's share of the update of a layer's matrices by Muon.

        Each of a block's matrices is updated whole by one rank of those that divide it, and by each
        replica.
        """
        from meshwright.planner.costs.lora import linears  # noqa: PLC0415

        a = self._model.architecture
        if self._job.optimizer != "muon" or a is None or layer.kind in self.end_kinds:
            return 0.0
        owners = (sharing.shard if sharing.is_sharded else 1) * layout.tensor
        each = linears(a, experts=False)
        return (
            sum(memory.orthogonalized_flops(linear.inputs, linear.outputs) for linear in each)
            / owners
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

    def tied_sum(self, layer: Layer) -> float:
        """Parameters of a layer whose gradients are summed with a copy on another stage.

        The sum waits for both stages, so both ends of a language model have it.
        """
        a = self._model.architecture
        if a is not None and a.tied_embeddings and layer.kind == "embedding":
            return float(a.vocab_size * (a.embedding_size or a.hidden_size))
        return self.tied_copy(layer)

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
    """Return the number of copies of its parameters that a rank has."""
    return layout.executed_schedule.weight_versions
