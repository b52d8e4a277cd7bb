"""Offload and compression of layouts, and a lower bound of the seconds that they add to a step.

To offload changes no result and fewer bits do.  Both must be allowed: the first because a search
with it takes longer, the second because it loses something.  A CPU is its own host and gains
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, assert_never

from meshwright.planner.documents.framework_space import EVERYTHING, Space

if TYPE_CHECKING:
    from meshwright.planner.costs.hardware_rates import Rates
    from meshwright.planner.costs.memory.state_bytes import StateTypes
    from meshwright.planner.documents.cluster import ClusterSpec
    from meshwright.planner.documents.plan import Activations, GradientCompression, Layout, Offload
    from meshwright.planner.requests.pins import Pins
    from meshwright.planner.requests.request import Request


class Saving(NamedTuple):
    """States on the host, and how gradients travel."""

    offload: Offload = "none"
    gradient_compression: GradientCompression = "full"

    def applied_to(self, layout: Layout) -> Layout:
        """Return a layout that saves this."""
        return replace(layout, **self._asdict())

    @classmethod
    def of_layout(cls, layout: Layout) -> Saving:
        """Return what a layout saves."""
        return cls(layout.offload, layout.gradient_compression)


def in_bf16(layout: Layout) -> Layout | None:
    """Return a layout whose gradients are bf16 where those of this one are fp16."""
    return (
        replace(layout, gradient_compression="bf16")
        if layout.gradient_compression == "fp16"
        else None
    )


def reaches_host(cluster: ClusterSpec) -> bool:
    """Return whether states and activations may lie on hosts: all devices are linked to theirs."""
    return all(
        group.host_link_bytes_per_s is not None and group.accelerator.kind != "cpu"
        for group in cluster.groups
    )


def savings_of(
    plain: Layout, request: Request, refusal: Callable[[Layout], str | None]
) -> tuple[Saving, ...]:
    """Return what layouts like a plain one may save; `refusal` tells why one does not run."""

    def runs(saving: Saving) -> bool:
        return refusal(saving.applied_to(plain)) is None

    return savings(request.cluster, request.pins, runs, space=request.space)


def savings(
    cluster: ClusterSpec,
    pins: Pins,
    runs: Callable[[Saving], bool],
    *,
    space: Space = EVERYTHING,
) -> tuple[Saving, ...]:
    """Return those to choose among, the simplest first; `runs` tells what a framework executes."""
    offloads: tuple[Offload, ...] = ("none",)
    if pins.offload is not None:
        offloads = (pins.offload,)
    elif "offload" in pins.allowed and reaches_host(cluster):
        offloads = ("none", "optimizer", "parameters")
    wires: tuple[GradientCompression, ...] = ("full",)
    if pins.gradient_compression is not None:
        wires = (pins.gradient_compression,)
    elif "compress" in pins.allowed:
        wires = ("full", "bf16", "fp16", "powersgd")
    offloads = tuple(offload for offload in offloads if offload in space.offload)
    wires = tuple(wire for wire in wires if wire in space.gradient_compressions)
    every = tuple(Saving(offload, wire) for wire in wires for offload in offloads)
    # What is pinned stays, so that its refusal is shown.
    pinned = pins.offload is not None or pins.gradient_compression is not None
    return tuple(saving for saving in every if pinned or saving == Saving() or runs(saving))


def activations(
    cluster: ClusterSpec, pins: Pins, *, space: Space = EVERYTHING
) -> tuple[Activations, ...]:
    """Return the ways to treat activations that layers may choose among."""
    if pins.activations is not None:
        return (pins.activations,)
    return tuple(
        activation for activation in _activations(cluster, pins) if activation in space.activations
    )


def _activations(cluster: ClusterSpec, pins: Pins) -> Iterator[Activations]:
    yield "keep"
    if "offload" in pins.allowed and reaches_host(cluster):
        yield "offload"
    if "compress" in pins.allowed:
        yield "compress"


def offload_s(saving: Saving, share: float, rates: Rates, types: StateTypes) -> float:
    """Least seconds that offloaded states add to a step: no rank has less than the mean `share`.

    Moments cross the link twice, 16 bytes per parameter; parameters on the host are updated there.
    """
    match saving.offload:
        case "none":
            return 0.0
        case "optimizer":
            return rates.host_copy_s(16 * share)
        case "parameters":
            return rates.host_optimizer_s(share, types)
        case _:
            assert_never(saving.offload)
