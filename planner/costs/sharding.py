"""Seconds of the collectives that divide a layer's states: gathers, reductions, their copies.

A unit is one layer.  Counts per step with M micro-batches, as measured on FSDP2:

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
back, and where the host adds them up it moves 12 N/d bytes in its own memory.  Nothing is hidden
here; `planner.costs.rates` says what computation hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.costs import compute
from planner.costs.collectives import Levels
from planner.costs.memory import FP32, Sharing
from planner.costs.rates import Rates

POWERSGD_RANK = 4
"""Columns of PowerSGD's factors."""
FACTORING_TRAFFIC_BYTES = 36
"""For each gradient: error added (12), two products with the factors (8), their product written
(4), error kept (12)."""
ADDING_TRAFFIC_BYTES = 12
"""For each gradient that the host adds to another: two read, one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Levels of the groups that a layout's sharding and pipeline use."""

    shard: Levels
    replicate: Levels
    neighbours: Levels
    name: tuple[object, ...] = ()
    """What tells these levels from others of one cluster."""
    same_experts: Links | None = None
    """Of the ranks that hold the same experts, where experts have ranks of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Sharding seconds of one unit: in each micro-batch's passes, and once per step.

    Copies into and out of the collectives' buffers run between the layer's own kernels.
    """

    forward_gather_s: float = 0.0
    forward_copies_s: float = 0.0
    backward_s: float = 0.0
    backward_copies_s: float = 0.0
    gather_per_step_s: float = 0.0
    reduce_per_step_s: float = 0.0
    copies_per_step_s: float = 0.0
    host_gather_s: float = 0.0
    """Of each gather: parameters come from the host first."""
    host_reduce_s: float = 0.0
    """Of each reduction: gradients go to the host."""

    def __add__(self, other: Traffic) -> Traffic:
        """Both, one after the other."""
        return Traffic(
            forward_gather_s=self.forward_gather_s + other.forward_gather_s,
            forward_copies_s=self.forward_copies_s + other.forward_copies_s,
            backward_s=self.backward_s + other.backward_s,
            backward_copies_s=self.backward_copies_s + other.backward_copies_s,
            gather_per_step_s=self.gather_per_step_s + other.gather_per_step_s,
            reduce_per_step_s=self.reduce_per_step_s + other.reduce_per_step_s,
            copies_per_step_s=self.copies_per_step_s + other.copies_per_step_s,
            host_gather_s=self.host_gather_s + other.host_gather_s,
            host_reduce_s=self.host_reduce_s + other.host_reduce_s,
        )


def traffic(
    parameters: float, sharing: Sharing, links: Links, rates: Rates, *, sides: float = 0.0
) -> Traffic:
    """Return the sharding seconds of a unit with this many parameters on the rank.

    `sides` are rows and columns of all its matrices, added up.
    """
    if not (sharing.wrapped or sharing.data > 1):
        return Traffic()
    types = sharing.types
    wide, working = types.stored * parameters, types.working * parameters
    reduced = sharing.wire_bytes * parameters
    gather_s = reduce_s = factoring_s = 0.0
    if sharing.sharded:
        gather_s = rates.link_s("all_gather", working, links.shard)
        reduce_s = rates.link_s("reduce_scatter", reduced, links.shard)
        reduce_s += rates.link_s("all_reduce", reduced / sharing.shard, links.replicate)
    elif sharing.data > 1:
        if sharing.wire == "powersgd":
            reduced = min(wide, FP32 * POWERSGD_RANK * sides)
            factoring_s = compute.seconds(
                rates.device,
                kind="matmul",
                flops=6 * POWERSGD_RANK * parameters,
                moved_bytes=FACTORING_TRAFFIC_BYTES * parameters,
                kernels=0,
            )
        reduce_s = rates.link_s("all_reduce", reduced, links.shard + links.replicate)
    # The whole parameters of a replica in fp32 are those that its optimizer holds.
    copied = sharing.sharded or working != wide
    unpack_s = rates.gather_copy_s(working) if copied else 0.0
    pack_s = rates.reduce_copy_s(working, sharing.wire_bytes * parameters) + factoring_s
    host_gather_s = host_reduce_s = 0.0
    again, each = sharing.gathers_again, sharing.reduces_each_micro_batch
    if sharing.offload == "parameters":
        held = parameters / (sharing.shard if sharing.sharded else 1)
        host_gather_s = host_reduce_s = rates.host_copy_s(types.stored * held)
        if each:
            host_reduce_s += rates.host_memory_s(ADDING_TRAFFIC_BYTES * held)
    if again and not sharing.pipelined:
        return Traffic(
            forward_gather_s=gather_s,
            forward_copies_s=unpack_s,
            backward_s=gather_s + reduce_s,
            backward_copies_s=unpack_s + pack_s,
            host_gather_s=host_gather_s,
            host_reduce_s=host_reduce_s,
        )
    return Traffic(
        backward_s=(gather_s if again else 0.0) + (reduce_s if each else 0.0),
        backward_copies_s=(unpack_s if again else 0.0) + (pack_s if each else 0.0),
        gather_per_step_s=gather_s,
        reduce_per_step_s=0.0 if each else reduce_s,
        copies_per_step_s=unpack_s + (0.0 if each else pack_s),
        host_gather_s=host_gather_s,
        host_reduce_s=host_reduce_s,
    )
