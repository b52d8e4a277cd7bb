"""One layer kind under one choice of recomputation and of what becomes of its activations.

`StrategyParts` has the choice's seconds and bytes by cause; `strategy_cost` adds them up into the
`StrategyCost` that the solver chooses among.  Parts may be arrays as well: one number for each of
many layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from meshwright.planner.documents.profile import Recompute
from meshwright.planner.operators.operator_table import RECOMPUTES, either, larger
from meshwright.planner.solver.requirements import option_name

if TYPE_CHECKING:
    from meshwright.planner.costs.activations import ActivationCost
    from meshwright.planner.costs.calibration import Figures
    from meshwright.planner.costs.memory.state_bytes import States
    from meshwright.planner.documents.plan import Activations

Recomputes = Recompute | Mapping[str, tuple[Recompute, ...]] | None
"""One choice of all layers, those of each kind of layer, or (None) any."""


def choices_of(asked: Recomputes, kind: str) -> tuple[Recompute, ...]:
    """Return what layers of a kind may recompute.

    >>> choices_of(None, "block"), choices_of("full", "block"), choices_of({"a": ("none",)}, "a")
    (('none', 'selective', 'full'), ('full',), ('none',))
    """
    if asked is None:
        return RECOMPUTES
    return (asked,) if isinstance(asked, str) else asked[kind]


class LayerBytes(NamedTuple):
    """Bytes of one layer of a stage; a rank's bytes (rank_memory) grow in each."""

    stored: float
    kept: float
    forward: float
    backward: float
    """Working memory of both passes."""
    input: float
    """Working memory of I, where backward is split."""
    moving: float
    """On the way to the host or back while it runs."""
    parameters: float
    gathered: float
    gradients: float
    """Made by its backward."""
    gradient_buffers: float
    """There from the start."""
    optimizer: float
    host: float
    bucket: float
    flat: float
    """Bytes of gradients that the optimizer's step copies, beyond those that it lets go of."""
    joined: float
    """Bytes of these copies that the allocator reserves anew."""
    offloaded: bool
    receives: bool
    """True if what it receives takes a buffer: it does not store that itself."""
    left: float = 0.0
    """Left by its backward until the last one of a micro-batch ends."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer, all of which may be there at once."""
        whole = self.parameters + self.gathered + self.gradients
        return whole + self.gradient_buffers + self.optimizer

    def no_more_than(self, other: LayerBytes) -> bool:
        """Return whether a rank needs no more memory with this layer than with the other."""
        return all(map(le, self, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """One layer kind under one choice, one rank, one micro-batch."""

    recompute: Recompute
    activations: Activations = "keep"
    forward_s: float
    backward_s: float
    """Includes recomputation."""
    sync_s: float
    """Exposed gradient reduction, first gather and optimizer, per step."""
    host_bytes: float = 0.0
    """Kept on the host from forward to backward by each micro-batch in flight."""
    layer_bytes: LayerBytes

    @property
    def name(self) -> str:
        """Both choices in words."""
        return option_name(self.recompute, self.activations)


@dataclass(frozen=True, kw_only=True)
class StrategyParts:
    """The same record by cause; `meshwright.planner.costs.predict` adds these up."""

    recompute: Recompute
    activations: Activations
    figures: Figures
    states: States
    treated: ActivationCost
    gather_s: float
    """Exposed gathering of parameters in each micro-batch's forward."""
    backward_shard_s: float
    """Exposed gathering and reduction in each micro-batch's backward."""
    sync_s: float
    """Exposed communication once per step."""
    optimizer_s: float
    forward_fetch_s: float = 0.0
    """Seconds of exposed copies of states on the host, in each micro-batch's forward."""
    backward_fetch_s: float = 0.0
    stream_s: float = 0.0
    """Seconds of exposed copies of states on the host, once per step."""
    left_bytes: float = 0.0
    """Left by its backward until the last one of a micro-batch ends."""
    hooks_s: float = 0.0
    """Seconds of the host in each pass for a unit of states, whether or not the device waits."""

    def slow_host_s(self, slower: float) -> float:
        """Return what both passes of a micro-batch take longer by a host that takes `slower` times.

        A pass takes what its device or its host needs, whichever is more.
        """
        figures = self.figures
        return sum(
            max(pass_s, slower * (launch_s + self.hooks_s)) - max(pass_s, launch_s + self.hooks_s)
            for pass_s, launch_s in (
                (figures.forward_s, figures.forward_launch_s),
                (figures.backward_s + figures.recompute_s, figures.backward_launch_s),
            )
        )

    @property
    def stored_bytes(self) -> float:
        """On the device from forward to backward: activations, and parameters still gathered."""
        return self.treated.stored_bytes + self.states.between_bytes

    @property
    def stores_input(self) -> bool:
        """True if the activation that enters is among what stays on the device as it is."""
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

    @cached_property
    def forward_s(self) -> float:
        """Forward on one micro-batch, all that is exposed included."""
        return self.unshared_forward_s + self.gather_s + self.forward_fetch_s

    @cached_property
    def backward_s(self) -> float:
        """Backward on one micro-batch, all that is exposed included."""
        return self.unshared_backward_s + self.backward_shard_s + self.backward_fetch_s

    @property
    def sharing_s(self) -> float:
        """Seconds that sharding and copies of states add to both passes."""
        fetched_s = self.forward_fetch_s + self.backward_fetch_s
        return self.gather_s + self.backward_shard_s + fetched_s

    @property
    def once_s(self) -> float:
        """Exposed seconds once per step."""
        return self.sync_s + self.optimizer_s + self.stream_s

    @property
    def forward_transient_bytes(self) -> float:
        """Working memory of forward: gathered parameters, tensors about to leave or be packed."""
        working = self.figures.forward_transient_bytes + self.states.forward_transient_bytes
        return working + self.treated.moving_bytes

    @property
    def backward_transient_bytes(self) -> float:
        """Working memory of backward: gathered parameters, reduce buffers, tensors come back."""
        return self._in_backward(self.figures.fresh_bytes * self.states.waiting_gradients)

    @property
    def input_transient_bytes(self) -> float:
        """The same of I in a split backward: no less, since it keeps what W will need."""
        return larger(self.backward_transient_bytes, self._in_backward(self.figures.late_bytes))

    def _in_backward(self, recomputed_bytes: float) -> float:
        beside = self.states.backward_transient_bytes
        working = self.figures.backward_transient_bytes + recomputed_bytes + beside
        working = larger(working, self.states.after_backward_bytes)
        return working + self.treated.moving_bytes

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """Bytes of the layer."""
        states, offloaded = self.states, self.activations == "offload"
        return LayerBytes(
            stored=self.stored_bytes,
            kept=self.figures.kept_bytes,
            forward=self.forward_transient_bytes,
            backward=self.backward_transient_bytes,
            input=self.input_transient_bytes,
            moving=self.treated.moving_bytes if offloaded else 0.0,
            parameters=states.parameters_bytes,
            gathered=states.gathered_bytes,
            gradients=states.gradients_bytes,
            gradient_buffers=states.gradient_buffers_bytes,
            optimizer=states.optimizer_bytes,
            host=states.host_bytes,
            bucket=states.bucket_bytes,
            flat=states.flat_bytes,
            joined=states.joined_bytes,
            offloaded=offloaded,
            receives=not self.stores_input,
            left=self.left_bytes,
        )


def strategy_cost(part: StrategyParts, *, action_s: float) -> StrategyCost:
    """Add a strategy's parts up.

    An end of the pipeline has one boundary but two actions: hence `action_s`, half of it in either
    pass, as a boundary's is (meshwright.planner.solver.partition_problem).
    """
    return StrategyCost(
        recompute=part.recompute,
        activations=part.activations,
        forward_s=part.forward_s + action_s / 2,
        backward_s=part.backward_s + action_s / 2,
        sync_s=part.once_s,
        host_bytes=part.treated.host_bytes,
        layer_bytes=part.layer_bytes,
    )


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
