"""Treatment of a layer's stored tensors between forward and backward, and its seconds and bytes.

With B bytes stored by one layer and micro-batch, n elements in the floating tensors among them,
S their bytes, e bytes of an activation, L the host link's bytes per second, W memory bandwidth:

                 on the device between    while the layer runs        seconds
    keep         B                                                    none
    offload      0; B in host memory      its own B and its           out: max(0, B / L - forward)
                                          neighbour's                 in: max(0, B / L - backward)
    compress     B - S + n (1 + 4 / 128)  its own S, unpacked         (37 + e) n / W, (9 + e) n / W

Offload: what a layer stores, or the share of it that a framework moves, leaves while the next layer
runs, and comes back while the next one's backward runs, so two layers' tensors are on the device at
a time.  Before a layer that keeps its tensors, and at the end of a stage, all have left.  Copies
run beside computation and beside the links between devices; at the ends of a row of offloaded
layers, where one copy has nothing to hide behind, nothing is added.

Compress: 8 bits for every element, a scale in fp32 for every 128.  Packing widens to fp32, takes
magnitudes, their largest, divides, rounds and narrows, each in a kernel of its own; unpacking
multiplies and narrows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from meshwright.planner.operators.operator_table import larger, share

if TYPE_CHECKING:
    from meshwright.planner.costs.calibration import Figures
    from meshwright.planner.costs.hardware_rates import Rates
    from meshwright.planner.documents.plan import Activations

PACKED_BYTES_PER_ELEMENT = 1 + 4 / 128
PACKING_TRAFFIC_BYTES = 37
"""For each element, beside reading it: fp32 written, read twice and written for magnitudes and
their largest (16), quotients (8), rounding (8), 8 bits (5)."""
UNPACKING_TRAFFIC_BYTES = 9
"""For each element, beside writing it: 8 bits read, a product in fp32 written and read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCost:
    """The stored tensors of one layer and micro-batch under one treatment; seconds are exposed."""

    stored_bytes: float
    """On the device from forward to backward."""
    moving_bytes: float = 0.0
    """On the device beside them while the layer runs: on the way out or in, or unpacked."""
    host_bytes: float = 0.0
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    packing_s: float = 0.0
    unpacking_s: float = 0.0


def activation_cost(
    activations: Activations, figures: Figures, rates: Rates, *, passed: float
) -> ActivationCost:
    """Return what becomes of a layer's stored tensors.

    `passed` are bytes that stay whatever happens, beside `figures.stored_bytes`: what a pipeline
    keeps of its last stage's results.
    """
    stored = figures.stored_bytes
    match activations:
        case "keep":
            return ActivationCost(stored_bytes=stored + passed)
        case "offload":
            moved = rates.framework.offload.activations_share * figures.own_share * stored
            copy_s = rates.host_copy_s(moved)
            return ActivationCost(
                stored_bytes=passed + stored - moved,
                moving_bytes=moved,
                host_bytes=moved,
                forward_host_s=uncovered_s(copy_s, figures.whole_forward_s),
                backward_host_s=uncovered_s(copy_s, figures.whole_backward_s),
            )
        case "compress":
            return _compression_cost(figures, rates, passed=passed)
        case _:
            assert_never(activations)


def uncovered_s(copy_s: float, pass_s: float) -> float:
    """Return the seconds of a copy to or from the host that a pass beside it leaves."""
    return larger(0.0, copy_s - pass_s)


def _compression_cost(figures: Figures, rates: Rates, *, passed: float) -> ActivationCost:
    stored = figures.stored_bytes
    packable = figures.packable_share * stored
    elements = figures.elements_per_stored_byte * stored
    width = share(packable, elements)
    return ActivationCost(
        stored_bytes=stored + passed - packable + PACKED_BYTES_PER_ELEMENT * elements,
        moving_bytes=packable,
        packing_s=rates.memory_s((PACKING_TRAFFIC_BYTES + width) * elements),
        unpacking_s=rates.memory_s((UNPACKING_TRAFFIC_BYTES + width) * elements),
    )
