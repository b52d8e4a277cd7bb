"""Bytes that a layer's parameters, gradients and optimizer state take as a unit of FSDP1.

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

from dataclasses import replace

from meshwright.planner.costs.memory.state_bytes import States, StateSharding, roots_bytes


def states(parameters: float, sharing: StateSharding, *, unit: float | None = None) -> States:
    """Return the bytes of a layer with this many trained parameters on the rank (table above).

    `unit` are the parameters of its largest unit where it is several.

    >>> from meshwright.planner.catalog import stacks
    >>> from meshwright.planner.costs.memory.state_bytes import state_types
    >>> foundry = state_types(stacks()["llm-foundry-fsdp"], "bf16")
    >>> eight = StateSharding(
    ...     types=foundry, zero=3, shard=8, data=8, pipelined=False, accumulated=True
    ... )
    >>> states(8e9, eight).resident_bytes / 8e9 * 8
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
    return replace(
        working,
        parameters_bytes=master + copy,
        gradients_bytes=gradients,
        optimizer_bytes=moments,
        flat_bytes=roots_bytes(types, sharing, types.moments * n / d),
    )


def frozen_states(parameters: float, sharing: StateSharding) -> States:
    """Return what a layer's frozen parameters hold: no gradients and no optimizer state."""
    n, e, d = parameters, sharing.types.frozen, sharing.shard if sharing.is_sharded else 1
    working = _working(n, e, sharing, trained=False)
    shard, on_host = e * n / d, sharing.offload == "parameters"
    copy = 0.0 if sharing.gathers_again or (d == 1 and not on_host) else e * n
    if on_host:
        working, shard = replace(working, host_bytes=shard), 0.0
    # Scales of 4-bit weights are attributes of modules, whole on every rank.
    return replace(working, parameters_bytes=shard + copy + sharing.types.scales * n)


def in_root(
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
