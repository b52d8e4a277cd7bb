"""Seconds of the collectives that divide a layer's states: gathers, reductions, their copies.

A unit is one layer.  Counts per step with M micro-batches, as measured on FSDP2:

              no pipeline                   pipeline
    ZeRO-0    1 all-reduce                  1 all-reduce
    ZeRO-1    1 gather, 1 reduction         1 gather, 1 reduction
    ZeRO-2    1 gather, M reductions        1 gather, 1 reduction
    ZeRO-3    2 M gathers, M reductions     M + 1 gathers, 1 reduction

Parameters are gathered in the type of computation, gradients reduced in fp32.  Nothing is hidden
here; `planner.rates` says what computation hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.collectives import Levels
from planner.memory import MASTER, Sharing
from planner.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Levels of the groups that a layout's sharding and pipeline use."""

    shard: Levels
    replicate: Levels
    neighbours: Levels


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


def traffic(parameters: float, sharing: Sharing, links: Links, rates: Rates) -> Traffic:
    """Return the sharding seconds of a unit with this many parameters on the rank."""
    if not sharing.wrapped:
        return Traffic()
    wide, working = MASTER * parameters, sharing.working_bytes * parameters
    gather_s = reduce_s = 0.0
    if sharing.sharded:
        gather_s = rates.link_s("all_gather", working, links.shard)
        reduce_s = rates.link_s("reduce_scatter", wide, links.shard)
        reduce_s += rates.link_s("all_reduce", wide / sharing.shard, links.replicate)
    elif sharing.data > 1:
        reduce_s = rates.link_s("all_reduce", wide, links.shard + links.replicate)
    # The whole parameters of a replica in fp32 are those that its optimizer holds.
    copied = sharing.sharded or working != wide
    unpack_s = rates.gather_copy_s(working) if copied else 0.0
    pack_s = rates.reduce_copy_s(working, wide)
    again, each = sharing.gathers_again, sharing.reduces_each_micro_batch
    if again and not sharing.pipelined:
        return Traffic(
            forward_gather_s=gather_s,
            forward_copies_s=unpack_s,
            backward_s=gather_s + reduce_s,
            backward_copies_s=unpack_s + pack_s,
        )
    return Traffic(
        backward_s=(gather_s if again else 0.0) + (reduce_s if each else 0.0),
        backward_copies_s=(unpack_s if again else 0.0) + (pack_s if each else 0.0),
        gather_per_step_s=gather_s,
        reduce_per_step_s=0.0 if each else reduce_s,
        copies_per_step_s=unpack_s + (0.0 if each else pack_s),
    )
