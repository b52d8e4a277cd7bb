"""Seconds that operators take on a device, from its calibrated curve.

    seconds = kernels launch_s + FLOPs / (f P) + bytes / (g W)

P is the peak of the job's precision times the share of it that lasts through a step, W the memory
bandwidth, f and g the fractions of the device's curve; f differs between matrix products and
attention, forward and backward.  The additive form fits measured products of ten accelerators to
5-13 %, where a roofline (the larger term alone) is 18-34 % optimistic.  Of a communication only
its launch and the copies beside it count here; its time on the links stands in
`planner.costs.collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster import Accelerator, DeviceCurve, Precision
from planner.errors import DocumentError
from planner.layers.operator_table import Operator
from planner.stack import EightBit

MATMUL_BACKWARD = 2.0
"""A product's backward is two products of its size: one for each factor's gradient."""

ATTENTION_BACKWARD = 2.5
"""Fused attention recomputes the scores: 5 products instead of 2 (Dao et al., 2022, appendix B)."""

BACKWARD_KERNELS = 2
"""A backward starts about two kernels for each one of its forward."""


SAME_RATE: dict[Precision, tuple[Precision, ...]] = {
    "tf32": ("tf32", "fp32"),
    "bf16": ("bf16", "fp16"),
    "fp16": ("fp16", "bf16"),
    "fp8": ("fp8", "bf16", "fp16"),
}
"""Where a sheet does not quote a precision, whose rate stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The rates of one device in one precision."""

    peak_flops: float
    memory_bytes_per_s: float
    curve: DeviceCurve
    sustained: float = 1.0
    """Rate of products in a training step over that of single kernels."""
    eight_bit_flops: float | None = None
    """Of products of 8-bit operands, where the precision has them."""
    cast_bytes: float = 0.0
    """Memory traffic of rounding an operand to 8 bits, per element."""
    cast_kernels: int = 0
    """Kernels started to round one operand."""


def device(accelerator: Accelerator, precision: Precision, casts: EightBit) -> Device:
    """Return the rates that an accelerator has in a precision, with a stack's casts to 8 bits.

    What fp8 does not make in 8 bits it makes in bf16.
    """
    eight = precision == "fp8"
    return Device(
        peak_flops=peak_flops(accelerator, "bf16" if eight else precision),
        eight_bit_flops=peak_flops(accelerator, precision) if eight else None,
        memory_bytes_per_s=accelerator.memory_bytes_per_s,
        curve=accelerator.curve,
        sustained=sustained(accelerator),
        cast_bytes=casts.cast_bytes,
        cast_kernels=casts.cast_kernels,
    )


def sustained(accelerator: Accelerator) -> float:
    """Return the share of a single kernel's rate that a step sustains.

    A curve measured on the machine itself contains it, and CPUs' curves are always of long runs.
    """
    if accelerator.curve.provenance == "measured" or accelerator.kind == "cpu":
        return 1.0
    return accelerator.kernels.sustained


def peak_flops(accelerator: Accelerator, precision: Precision) -> float:
    """Return the dense peak of a precision, FLOP/s."""
    for name in SAME_RATE.get(precision, (precision,)):
        if name in accelerator.peak_flops:
            return accelerator.peak_flops[name]
    known = ", ".join(sorted(accelerator.peak_flops))
    raise DocumentError(
        "precision", f"is {precision}, which {accelerator.name} has no peak for; it has {known}"
    )


def forward_s(operator: Operator, on: Device) -> float:
    """Seconds of an operator's forward.

    >>> curve = DeviceCurve(launch_s=4e-6, matmul=0.7, attention_forward=0.5,
    ...     attention_backward=0.4, memory=0.8, spread=0.1, provenance="quoted", source="example")
    >>> h100 = Device(peak_flops=989e12, memory_bytes_per_s=3.35e12, curve=curve)
    >>> product = Operator(name="8192^3", kind="matmul", inputs=(), outputs={},
    ...     flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2)
    >>> f"{1e3 * forward_s(product, h100):.2f} ms"
    '1.74 ms'
    """
    return seconds(
        on,
        kind=operator.kind,
        flops=operator.flops,
        moved_bytes=operator.copied_bytes if operator.communicates else operator.moved_bytes,
        kernels=operator.kernels,
    )


def backward_s(operator: Operator, on: Device) -> float:
    """Seconds of an operator's backward, recomputation not counted."""
    factor = ATTENTION_BACKWARD if operator.kind == "attention" else MATMUL_BACKWARD
    return seconds(
        on,
        kind=operator.kind,
        flops=factor * operator.flops,
        moved_bytes=operator.copied_bytes
        if operator.communicates
        else operator.backward_moved_bytes,
        kernels=1 if operator.communicates else BACKWARD_KERNELS * operator.kernels,
        backward=True,
    )


def eight_bit_forward_s(operator: Operator, on: Device) -> float:
    """Seconds of a product x W^T whose operands are rounded to 8 bits first.

        t = launches + F / (f P8) + (X + W) / 2 / (g M) + Y / (g M) + C (X + W) / (g M)

    X, W and Y are bytes in 16 bits, 2 C the stack's `eight_bit.cast_bytes`.  Of operators that
    PyTorch starts one by one these are |x| (read 2, write 2), largest (2), to fp32 (2 + 4), scaled
    (4 + 4), clamped (4 + 4), to 8 bits (4 + 1): 33.

    >>> curve = DeviceCurve(launch_s=4e-6, matmul=0.7, attention_forward=0.5,
    ...     attention_backward=0.4, memory=0.8, spread=0.1, provenance="quoted", source="example")
    >>> h100 = Device(peak_flops=989e12, memory_bytes_per_s=3.35e12, curve=curve,
    ...     eight_bit_flops=1979e12, cast_bytes=33, cast_kernels=9)
    >>> product = Operator(name="8192^3", kind="matmul", inputs=(), outputs={"y": 2 * 8192**2},
    ...     flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2)
    >>> f"{1e3 * eight_bit_forward_s(product, h100):.2f} ms"
    '2.62 ms'
    """
    result, operands = _result_and_operands(operator)
    return _in_eight_bits(
        on,
        flops=operator.flops,
        moved_bytes=result + operands / 2 + on.cast_bytes / 2 * operands,
        kernels=operator.kernels + 2 * on.cast_kernels,
    )


def eight_bit_backward_s(operator: Operator, on: Device) -> float:
    """Seconds of both gradients of such a product: grad W, and grad^T x.

    Every operand is rounded anew; three of the four are transposed, and copied into order.
    """
    result, operands = _result_and_operands(operator)
    rounded = 2 * result + operands
    copied = result + operands  # 8 bits read and written: as many bytes as in 16 bits
    return _in_eight_bits(
        on,
        flops=MATMUL_BACKWARD * operator.flops,
        moved_bytes=operands + rounded / 2 + on.cast_bytes / 2 * rounded + copied,
        kernels=2 * operator.kernels + 4 * on.cast_kernels + 3,
    )


def _result_and_operands(operator: Operator) -> tuple[float, float]:
    """Return the bytes of a product's output, and of its two operands together."""
    result = sum(operator.outputs.values())
    return result, operator.moved_bytes - result


def _in_eight_bits(on: Device, *, flops: float, moved_bytes: float, kernels: int) -> float:
    assert on.eight_bit_flops is not None
    curve = on.curve
    products_s = flops / (curve.matmul * on.sustained * on.eight_bit_flops)
    return (
        kernels * curve.launch_s + products_s + moved_bytes / (curve.memory * on.memory_bytes_per_s)
    )


def seconds(
    on: Device,
    *,
    kind: str,
    flops: float,
    moved_bytes: float,
    kernels: int,
    backward: bool = False,
) -> float:
    """Seconds of `kernels` kernels of one kind that do this work together."""
    curve = on.curve
    result = kernels * curve.launch_s
    if kind in ("attention", "matmul"):
        fraction = curve.matmul
        if kind == "attention":
            fraction = curve.attention_backward if backward else curve.attention_forward
        result += flops / (fraction * on.sustained * on.peak_flops)
    return result + moved_bytes / (curve.memory * on.memory_bytes_per_s)
