"""Seconds of the collectives that divide a layer's states, and what computation hides of them.

A unit is one layer.  Counts per step with M micro-batches, as measured on FSDP2; what a pipeline
changes is torch's, and frameworks that divide buffers do as without one:

              no pipeline                   pipeline
    ZeRO-0    1 all-reduce                  1 all-reduce
    ZeRO-1    1 gather, 1 reduction         1 gather, 1 reduction
    ZeRO-2    1 gather, M reductions        1 gather, 1 reduction
    ZeRO-3    2 M gathers, M reductions     M + 1 gathers, 1 reduction

Parameters are gathered in the type of computation, gradients reduced in fp32, or in 16 bits where
the layout says so.  PowerSGD (Vogels et al., 2019) reduces two factors of rank r of each matrix
instead, r (rows + columns) numbers, and takes three products, 6 N r FLOPs, and FACTORING_TRAFFIC
bytes for each of the N gradients.  Experts with ranks of their own are another unit, gathered
and reduced over the ranks that hold the same ones.  Parameters on the host: every gather first
brings their shard, 4 N/d bytes, over the host link, every reduction takes 4 N/d bytes of gradients
back, and where the host adds them up it moves 12 N/d bytes in its own memory.

Exposure.  A collective of c seconds runs beside its own layer's computation, of w seconds, which is
slower meanwhile, as its kernel has the share k of the multiprocessors; the collective itself goes
at the rate r of one that runs alone (`Rates.beside_products`; 1 for what runs once per step).  If
it ends first, it takes c/r, in which (1 - k) c/r of the computation are done.  Else the computation
takes w/(1 - k), in which r w/(1 - k) of the collective are done, and the rest goes alone.  So

    max(c k/r, c - w (r - k)/(1 - k))

is seen.  Of the share that does not run beside anything all is.  Gradients of FSDP's units in a
pipeline are reduced after the last backward, seen in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, assert_never

from meshwright.planner.costs import compute
from meshwright.planner.costs.collectives import Levels, ranks_of
from meshwright.planner.costs.memory.state_bytes import FP32, NARROW, StateSharding, StateTypes
from meshwright.planner.operators.operator_table import either, larger, smaller

if TYPE_CHECKING:
    from meshwright.planner.costs.hardware_rates import Hidden, Rates
    from meshwright.planner.documents.framework import Accumulation

POWERSGD_RANK = 4
"""Columns of PowerSGD's factors."""
FACTORING_TRAFFIC_BYTES = 36
"""For each gradient: error added (12), two products with the factors (8), their product written
(4), error stored (12)."""
NARROWING_TRAFFIC_BYTES = 33
"""For each element of a shard that operators of their own bring to 8 bits before it is gathered: to
16 bits (4 + 2), to fp32 (2 + 4), scaled (4 + 4), clamped (4 + 4), to 8 bits (4 + 1)."""
ADDING_TRAFFIC_BYTES = 12
"""For each gradient that the host adds to another: two read, one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Levels of the groups that a layout's sharding and pipeline use."""

    shard: Levels
    replicate: Levels
    neighbours: Levels
    name: tuple[object, ...] = ()
    """Name that distinguishes these levels from others of one cluster."""
    inner: Levels = ()
    """Levels of the ranks among which parameters are divided between forward and backward."""
    same_experts: Links | None = None
    """Links of the ranks that hold the same experts, where experts have ranks of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReplicas:
    """Pipelines of a job that may be unlike, each with a whole copy of the model.

    Gradients of a layer are summed over all of them when every pipeline has ended its backwards.
    """

    number: int
    levels: Levels
    """Levels of the ranks that hold the same layer, one of each pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingTraffic:
    """Sharding seconds of one unit: in each micro-batch's passes, and once per step.

    Copies into and out of the collectives' buffers run between the layer's own kernels, and so does
    what adds gradients to those of the micro-batches before (`accumulated_bytes`).
    """

    forward_gather_s: float = 0.0
    forward_copies_s: float = 0.0
    backward_s: float = 0.0
    backward_copies_s: float = 0.0
    gather_per_step_s: float = 0.0
    reduce_per_step_s: float = 0.0
    copies_per_step_s: float = 0.0
    host_gather_s: float = 0.0
    """Seconds added to each gather: parameters come from the host first."""
    host_reduce_s: float = 0.0
    """Seconds added to each reduction: gradients go to the host."""
    implicit: float = 0.0
    """1 where a forward's gather starts no sooner than the host comes by its unit."""
    beside: float = 1.0
    """Rate of these collectives beside products over that of ones that run alone."""

    def __add__(self, other: ShardingTraffic) -> ShardingTraffic:
        """Both, one after the other."""
        return ShardingTraffic(
            forward_gather_s=self.forward_gather_s + other.forward_gather_s,
            forward_copies_s=self.forward_copies_s + other.forward_copies_s,
            backward_s=self.backward_s + other.backward_s,
            backward_copies_s=self.backward_copies_s + other.backward_copies_s,
            gather_per_step_s=self.gather_per_step_s + other.gather_per_step_s,
            reduce_per_step_s=self.reduce_per_step_s + other.reduce_per_step_s,
            copies_per_step_s=self.copies_per_step_s + other.copies_per_step_s,
            host_gather_s=self.host_gather_s + other.host_gather_s,
            host_reduce_s=self.host_reduce_s + other.host_reduce_s,
            implicit=larger(self.implicit, other.implicit),
            beside=smaller(self.beside, other.beside),
        )


def traffic(
    parameters: float,
    sharing: StateSharding,
    links: Links,
    rates: Rates,
    *,
    sides: float = 0.0,
    frozen: float = 0.0,
    narrow: bool = False,
    wide: float = 0.0,
) -> ShardingTraffic:
    """Return the sharding seconds of a unit with this many parameters on the rank.

    `sides` are rows and columns of all its matrices, added up; `frozen` of its parameters
    have no gradients.  What is gathered anew for each pass may be `narrow`: cast to 8 bits where
    it is a shard (torchao, enable_fsdp_float8_all_gather), but for `wide` of it; so may what
    a step updated in whole buffers (Megatron-LM, --fp8-param-gather).
    """
    types, rule = sharing.types, rates.framework.sharding
    trained = parameters - frozen
    added_s = 0.0
    if types.unit == "buffer" or (sharing.accumulated and not sharing.reduces_each_micro_batch):
        added_s = rates.adding_s(accumulated_bytes(types, rule.accumulation) * trained)
    whole = sharing.leaves_whole and not sharing.is_wrapped
    narrowed_s, widened_s = _whole_copies_s(trained, sharing, rates)
    added_s += widened_s
    if not (sharing.is_wrapped or sharing.data > 1):
        return ShardingTraffic(backward_copies_s=added_s, copies_per_step_s=narrowed_s)
    working = types.working * trained
    if not sharing.has_whole_frozen:
        working += types.frozen * frozen
    if narrow and (sharing.gathers_again or types.unit == "buffer"):
        working = min(working, NARROW * (parameters - wide) + types.working * wide)
    gather_s, reduce_s, factoring_s = _collectives_s(
        trained, working, sharing, links, rates, sides=sides
    )
    unpack_s, pack_s = narrowed_s, factoring_s
    match rule.copies:
        case "none":
            pass
        case "around_collectives":
            # The whole parameters of a replica in fp32 are those that its optimizer holds.
            copied = sharing.is_sharded or (sharing.is_mixed and not whole)
            unpack_s += rates.gather_copy_s(working) if copied else 0.0
            apart = rates.framework.eight_bit.cast_kernels > 0
            if narrow and apart and sharing.gathers_again:
                cast = NARROWING_TRAFFIC_BYTES * (parameters - wide) / sharing.shard
                unpack_s += rates.memory_s(cast)
            fresh = types.working * trained
            pack_s += rates.reduce_copy_s(fresh, sharing.wire_bytes * trained)
        case _:
            assert_never(rule.copies)
    host_gather_s = host_reduce_s = 0.0
    again, each = sharing.gathers_again, sharing.reduces_each_micro_batch
    if sharing.offload == "parameters":
        d = sharing.shard if sharing.is_sharded else 1
        host_reduce_s = rates.host_copy_s(types.stored_bytes * trained / d)
        host_gather_s = host_reduce_s
        if frozen:
            host_gather_s += rates.host_copy_s(types.frozen * frozen / d)
        if each:
            host_reduce_s += rates.host_memory_s(ADDING_TRAFFIC_BYTES * trained / d)
    if again and not sharing.pipelined_units:
        inner_s = rates.link_s("all_gather", working, links.inner)
        back_s = gather_s if sharing.between is None else inner_s
        return ShardingTraffic(
            forward_gather_s=gather_s,
            forward_copies_s=unpack_s,
            backward_s=back_s + reduce_s,
            backward_copies_s=unpack_s * (sharing.between != 1) + pack_s + added_s,
            implicit=float(rule.implicit_gathers and not sharing.prefetch),
            beside=rates.beside_products(links.shard),
            host_gather_s=host_gather_s,
            host_reduce_s=host_reduce_s,
        )
    return ShardingTraffic(
        backward_s=(gather_s if again else 0.0) + (reduce_s if each else 0.0),
        backward_copies_s=(unpack_s if again else 0.0) + (pack_s if each else 0.0) + added_s,
        gather_per_step_s=gather_s,
        reduce_per_step_s=0.0 if each else reduce_s,
        copies_per_step_s=unpack_s + (0.0 if each else pack_s),
        beside=rates.beside_products(links.shard),
        host_gather_s=host_gather_s,
        host_reduce_s=host_reduce_s,
    )


def _whole_copies_s(trained: float, sharing: StateSharding, rates: Rates) -> tuple[float, float]:
    """Return the seconds of copies in 16 bits, made of what a step has updated, and of gradients.

    Where they are added up or sent to others, gradients get to fp32 on the way.
    """
    types = sharing.types
    if not (sharing.leaves_whole and sharing.is_mixed) or sharing.is_wrapped:
        return 0.0, 0.0
    alone = not sharing.accumulated and sharing.data == 1
    return (
        rates.memory_s((types.stored_bytes + types.working) * trained),
        rates.adding_s((types.working + types.gradient) * trained) if alone else 0.0,
    )


def _collectives_s(
    trained: float,
    working_bytes: float,
    sharing: StateSharding,
    links: Links,
    rates: Rates,
    *,
    sides: float,
) -> tuple[float, float, float]:
    """Return the seconds of one gather, of one reduction, and of factoring gradients for it."""
    rule, both = rates.framework.sharding, links.shard + links.replicate
    reduced, calls = sharing.wire_bytes * trained, rule.collectives_per_layer
    if sharing.is_sharded:
        listed_s = calls * rule.listed_s * ranks_of(links.shard)
        gather_s = calls * rates.link_s("all_gather", working_bytes / calls, links.shard)
        if rule.reduces_whole and sharing.zero == 1:
            return gather_s, calls * rates.link_s("all_reduce", reduced / calls, both), 0.0
        each = reduced / calls
        reduce_s = rates.link_s("reduce_scatter", each, links.shard)
        reduce_s += rates.link_s("all_reduce", each / sharing.shard, links.replicate)
        reduce_s = calls * reduce_s
        return gather_s + listed_s, reduce_s + listed_s, 0.0
    if sharing.data == 1:
        return 0.0, 0.0, 0.0
    if sharing.wire == "powersgd":
        reduced = min(sharing.types.stored_bytes * trained, FP32 * POWERSGD_RANK * sides)
        factoring_s = compute.seconds(
            rates.device,
            kind="matmul",
            flops=6 * POWERSGD_RANK * trained,
            moved_bytes=FACTORING_TRAFFIC_BYTES * trained,
            kernels=0,
        )
        return 0.0, rates.link_s("all_reduce", reduced, both), factoring_s
    return 0.0, calls * rates.link_s("all_reduce", reduced / calls, both), 0.0


class ExposedSharding(NamedTuple):
    """Exposed seconds of sharding in one pass, or once per step."""

    shard_s: float
    """Seconds of collectives and copies beside them."""
    host_s: float
    """Seconds that copies over the host link add."""


def seen_in_passes(
    moving: ShardingTraffic,
    sharing: StateSharding,
    rates: Rates,
    *,
    forward_s: float,
    backward_s: float,
    waits_s: float = 0.0,
    forward_waits_s: float = 0.0,
) -> tuple[ExposedSharding, ExposedSharding]:
    """Return what is seen in each forward, and in each backward with what it recomputes.

    In `waits_s` the device waits for its host, and copies beside gradients take nothing more.  A
    device that waits `forward_waits_s` in a forward has done all that was started before, so that a
    gather which its host starts by the way hides behind nothing but the wait.
    """
    again, each = sharing.gathers_again, sharing.reduces_each_micro_batch
    anew = again and not sharing.pipelined_units
    by_the_way = moving.implicit * (forward_waits_s > 0)
    window_s = either(by_the_way > 0, forward_waits_s, forward_s)
    gather = _exposed_sharding(
        moving.forward_gather_s,
        moving.host_gather_s if anew else 0.0,
        window_s,
        rates,
        "units",
        moving.beside,
    )
    returned_s = (moving.host_gather_s if again else 0.0) + (
        moving.host_reduce_s if each or anew else 0.0
    )
    reduce = _exposed_sharding(
        moving.backward_s, returned_s, backward_s, rates, "units", moving.beside
    )
    return (
        ExposedSharding(gather.shard_s + moving.forward_copies_s, gather.host_s),
        ExposedSharding(
            reduce.shard_s + larger(0.0, moving.backward_copies_s - waits_s), reduce.host_s
        ),
    )


def seen_once(
    moving: ShardingTraffic,
    sharing: StateSharding,
    rates: Rates,
    *,
    forward_s: float,
    backward_s: float,
) -> ExposedSharding:
    """Return what is seen once per step.

    It hides behind the passes without recomputation, so that every choice has the same.
    """
    anew = sharing.gathers_again and not sharing.pipelined_units
    fetched_s = 0.0 if anew else moving.host_gather_s
    gather = _exposed_sharding(moving.gather_per_step_s, fetched_s, forward_s, rates, "gather", 1.0)
    late = not (anew or sharing.reduces_each_micro_batch)
    returned_s = moving.host_reduce_s if late else 0.0
    window_s = 0.0 if sharing.pipelined_units or sharing.captured else backward_s
    reduce = _exposed_sharding(moving.reduce_per_step_s, returned_s, window_s, rates, "reduce", 1.0)
    copies_s = moving.copies_per_step_s
    return ExposedSharding(
        copies_s + gather.shard_s + reduce.shard_s, gather.host_s + reduce.host_s
    )


def _exposed_sharding(
    links_s: float,
    host_s: float,
    window_s: float,
    rates: Rates,
    hidden: Hidden,
    beside: float,
) -> ExposedSharding:
    """Return what a window leaves of a collective, and what a copy of the host adds to it."""
    seen_s = rates.exposed_s(links_s, window_s, hidden, beside)
    if isinstance(host_s, float) and not host_s:
        return ExposedSharding(seen_s, 0.0)
    among: Hidden = "copies" if hidden == "units" else hidden
    links_alone_s = rates.exposed_s(links_s, window_s, among)
    return ExposedSharding(
        seen_s, rates.exposed_s(links_s + host_s, window_s, among) - links_alone_s
    )


def accumulated_bytes(types: StateTypes, accumulation: Accumulation) -> float:
    """Return the memory traffic per parameter of adding a micro-batch's gradients to a sum.

    With e bytes of a fresh gradient and g of the sum:

        none            0           nothing is added, or where it is made
        same_type       3 g         both read, the sum written
        into_sum        e + 2 g     fresh ones read, the sum read and written
        cast_then_add   e + 4 g     fresh ones read, a copy in the sum's type written and read,
                                    the sum read and written; of one type 3 g
        in_product      g           the product that makes them reads and writes the sum, half of
                                    it beside its own work

    Sources: DeepSpeed, BF16_Optimizer.update_hp_grads; Megatron-LM, fused weight gradients.

    >>> from meshwright.planner.catalog import frameworks
    >>> from meshwright.planner.costs.memory.state_bytes import state_types
    >>> accumulated_bytes(state_types(frameworks()["megatron-deepspeed"], "bf16"), "cast_then_add")
    18.0
    """
    e, g = types.working, types.gradient
    match accumulation:
        case "none":
            return 0.0
        case "same_type":
            return 3 * g
        case "into_sum":
            return e + 2 * g
        case "cast_then_add":
            return 3 * g if e == g else e + 4 * g
        case "in_product":
            return g
        case _:
            assert_never(accumulation)
