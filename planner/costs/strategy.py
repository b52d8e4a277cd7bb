"""One layer kind under one choice of recomputation and of what becomes of its activations.

`StrategyParts` has the choice's seconds and bytes by cause; `strategy_cost` adds them up into the
`StrategyCost` that the solver chooses among.  Both take arrays as well: one number for each of
many layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from planner.costs.activations import Treated
from planner.costs.calibration import Figures
from planner.costs.memory import BUCKETS, States
from planner.layers.operator_table import either, larger
from planner.plan import Activations
from planner.profile import Recompute
from planner.solver.requirements import option_name

Holding = Literal[
    "all forwards first",
    "each backward soon",
    "each backward later",
    "whole",
    "whole, last stage too",
]
"""What a rank holds when: see `strategy_cost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """One layer kind under one choice, one rank, one micro-batch."""

    recompute: Recompute
    activations: Activations = "keep"
    forward_s: float
    backward_s: float
    """Includes recomputation."""
    stored_bytes: float
    """Kept on the device from forward to backward by each micro-batch in flight."""
    transient_bytes: float
    """Needed while this layer runs; of a stage's layers the largest counts, not the sum."""
    resident_bytes: float
    """Parameters, gradients and optimizer state on the device."""
    sync_s: float
    """Exposed gradient reduction, first gather and optimizer, per step."""
    host_bytes: float = 0.0
    """Kept on the host from forward to backward by each micro-batch in flight."""
    host_resident_bytes: float = 0.0
    """States that live on the host."""

    @property
    def name(self) -> str:
        """Both choices in words."""
        return option_name(self.recompute, self.activations)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyParts:
    """The same record by cause; `planner.predict` adds these up."""

    recompute: Recompute
    activations: Activations
    figures: Figures
    states: States
    treated: Treated
    gather_s: float
    """Exposed gathering of parameters in each micro-batch's forward."""
    backward_shard_s: float
    """Exposed gathering and reduction in each micro-batch's backward."""
    sync_s: float
    """Exposed communication once per step."""
    optimizer_s: float
    forward_fetch_s: float = 0.0
    """Of states on the host, exposed copies in each micro-batch's forward."""
    backward_fetch_s: float = 0.0
    stream_s: float = 0.0
    """Of states on the host, exposed copies once per step."""

    @property
    def stored_bytes(self) -> float:
        """On the device from forward to backward."""
        return self.treated.stored_bytes

    @property
    def stores_input(self) -> bool:
        """Whether the activation that enters is among what stays on the device as it is."""
        return self.figures.stores_input and self.activations == "keep"

    @property
    def forward_host_s(self) -> float:
        """Exposed copies over the host link in each micro-batch's forward."""
        return self.treated.forward_host_s + self.forward_fetch_s

    @property
    def backward_host_s(self) -> float:
        """Exposed copies over the host link in each micro-batch's backward."""
        return self.treated.backward_host_s + self.backward_fetch_s

    @property
    def unshared_forward_s(self) -> float:
        """Forward without what sharding adds."""
        own_s = self.treated.forward_host_s + self.treated.packing_s
        return self.figures.whole_forward_s + own_s

    @property
    def unshared_backward_s(self) -> float:
        """Backward without what sharding adds."""
        own_s = self.treated.backward_host_s + self.treated.unpacking_s
        return self.figures.whole_backward_s + own_s

    @property
    def forward_s(self) -> float:
        """Forward on one micro-batch, all that is exposed included."""
        return self.unshared_forward_s + self.gather_s + self.forward_fetch_s

    @property
    def backward_s(self) -> float:
        """Backward on one micro-batch, all that is exposed included."""
        return self.unshared_backward_s + self.backward_shard_s + self.backward_fetch_s

    @property
    def sharing_s(self) -> float:
        """What sharding and copies of states add to both passes."""
        fetched_s = self.forward_fetch_s + self.backward_fetch_s
        return self.gather_s + self.backward_shard_s + fetched_s

    @property
    def once_s(self) -> float:
        """Exposed seconds once per step."""
        return self.sync_s + self.optimizer_s + self.stream_s

    @property
    def forward_transient_bytes(self) -> float:
        """Working memory of forward: gathered parameters, tensors about to leave or be packed."""
        working, gathered = (
            self.figures.forward_transient_bytes,
            self.states.forward_transient_bytes,
        )
        # The copies are gone when the loss begins.
        loss = larger(working, self.figures.returned_bytes + gathered)
        working = either(self.states.after_loss_bytes > 0, loss, working + gathered)
        return working + self.treated.moving_bytes

    @property
    def backward_transient_bytes(self) -> float:
        """Working memory of backward: gathered parameters, reduce buffers, tensors come back."""
        sharing = self.states.backward_transient_bytes
        beside = sharing - self.states.after_loss_bytes
        working = larger(self.figures.backward_transient_bytes + beside, sharing)
        return working + self.treated.moving_bytes

    @property
    def transient_bytes(self) -> float:
        """Working memory of the worse pass."""
        working = larger(self.forward_transient_bytes, self.backward_transient_bytes)
        return larger(working, BUCKETS * self.states.bucket_bytes)


def strategy_cost(
    part: StrategyParts,
    *,
    neighbour_bytes: float,
    action_s: float,
    holding: Holding,
    last: bool,
    once: bool,
) -> StrategyCost:
    """Add a strategy's parts up.

    An end of the pipeline has one boundary but two actions: hence `action_s`, half of it in either
    pass, as a boundary's is (planner.solver.instance).  `holds` says what the rest is for.  While
    an offloaded layer runs, its neighbour's `neighbour_bytes` at most are on the way.
    """
    stored, resident, transient = holds(
        part.stored_bytes,
        part.transient_bytes,
        part.states,
        holding=holding,
        last=last,
        once=once,
    )
    return StrategyCost(
        recompute=part.recompute,
        activations=part.activations,
        forward_s=part.forward_s + action_s / 2,
        backward_s=part.backward_s + action_s / 2,
        stored_bytes=stored,
        transient_bytes=transient + (neighbour_bytes if part.activations == "offload" else 0.0),
        resident_bytes=resident,
        sync_s=part.once_s,
        host_bytes=part.treated.host_bytes,
        host_resident_bytes=part.states.host_bytes,
    )


def holds(
    stored_bytes: float,
    transient_bytes: float,
    states: States,
    *,
    holding: Holding,
    last: bool,
    once: bool,
) -> tuple[float, float, float]:
    """Stored, resident and transient bytes of a layer, from what it stores and works with.

    The layer that is `last` in the model holds its activations only while it runs, unless something
    else runs between its forward and its backward: all forwards, or whatever a schedule with
    `last_waits` puts there.  What a backward gathers again, and where all forwards come first (or
    there is but one, `once`) also gradients, appears as activations of that backward go: of the two
    only the larger counts.  Where memory is counted by rank both are always there.
    """
    first = holding == "all forwards first"
    waits = first or holding == "each backward later"
    stored = 0.0 if last and not waits else stored_bytes
    passing = stored_bytes - stored
    if holding == "whole":
        return stored, states.resident_bytes, transient_bytes + passing
    if holding == "whole, last stage too":
        return stored, states.resident_bytes + passing, transient_bytes + 0.0
    late, early = states.gathered_bytes, states.gradients_bytes
    at_once = late + early
    late, early = (at_once, 0.0) if first else (either(once, at_once, late), either(once, 0, early))
    held = states.parameters_bytes + states.optimizer_bytes + states.gradient_buffers_bytes
    resident = held + early + larger(0.0, late - stored)
    return stored, resident, transient_bytes + passing


def least_resident(states: States, *, whole: bool, forwards_first: bool, once: bool) -> float:
    """Return what a layer's states hold at a rank's moment that bounds its bytes from below.

    Where memory is counted by rank that is all, `whole`.  Else the last layer of the stage goes
    backward: its copies are gone by then.  If all forwards come first so are the gradients, but
    with several micro-batches whole ones are there in a later backward, and copies too.
    """
    if whole:
        return states.resident_bytes
    held = states.parameters_bytes + states.optimizer_bytes + states.gradient_buffers_bytes
    late = states.gradients_bytes + (states.gathered_bytes if forwards_first else 0.0)
    return held + either(once, 0.0, late)


def neighbour_bytes(
    parts: dict[str, tuple[StrategyParts, ...]], chain: list[str], *, any_order: bool = False
) -> dict[str, tuple[float, ...]]:
    """Return for each kind and choice what the layer before it has on the way at most.

    Inside a stage, layers of a kind in a row stand with later choices first, so the layer before
    has the same choice or a later one; a layer of another kind may have any.  Where layers may be
    taken in `any_order`, any kind may stand before.
    """
    moving = {
        kind: [p.treated.moving_bytes if p.activations == "offload" else 0.0 for p in choices]
        for kind, choices in parts.items()
    }
    before: dict[str, set[str]] = {kind: set() for kind in parts}
    for earlier, later in pairwise(chain):
        before[later].add(earlier)
    if any_order:
        before = {kind: set(parts) for kind in parts}
    result = {}
    for kind, own in moving.items():
        others = max((max(moving[k]) for k in before[kind] if k != kind), default=0.0)
        alike = [max(own[at:]) if kind in before[kind] else 0.0 for at in range(len(own))]
        result[kind] = tuple(max(others, mine) for mine in alike)
    return result
