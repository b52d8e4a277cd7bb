"""Seconds that operators take on a device, from its calibrated curve.

    seconds = kernels launch_s + FLOPs / (f P) + bytes / (g W)

P is the peak of the job's precision times the share of it that lasts through a step, and that the
slowest of all devices has (`slowest`), W the memory bandwidth, f and g the fractions of the
device's curve; f differs between matrix products and attention, forward and backward.  The additive
form fits measured products of ten accelerators to 5-13 %, where a roofline (the larger term alone)
is 18-34 % optimistic.  Of a communication only its launch and the copies beside it count here; its
time on the links stands in `meshwright.planner.costs.collectives`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.planner.documents.cluster import (
    EIGHT_BITS,
    Accelerator,
    AttentionKernel,
    DeviceCurve,
)
from meshwright.planner.errors import DocumentError
from meshwright.planner.operators.expert_routing import expected_largest
from meshwright.planner.operators.operator_table import Operator

if TYPE_CHECKING:
    from meshwright.planner.documents.framework import Framework, Recipe

MATMUL_BACKWARD = 2.0
"""A product's backward is two products of its size: one for each factor's gradient."""

ATTENTION_BACKWARD = 2.5
"""Fused attention recomputes the scores: 5 products instead of 2 (Dao et al., 2022, appendix B)."""

LONG_SEQUENCE = 8192
"""Tokens at which the catalogue's attention fractions hold."""
HEAD_MULTIPLE = 32
"""Sizes of heads for which there are kernels of fused attention are multiples of it."""
SMALL_HEAD = 0.85
"""Rate of attention with heads of 64 over that with 128 (Dao, 2023, figures 4-6)."""

TRANSPOSED_BYTES = 1.0
"""Bytes of an element that a cast writes in a second order, for the gradient of weights."""

ROUTING = ("router", "shared_weight")
"""Products that weigh experts, which no framework has in 8 bits."""

BACKWARD_KERNELS = 2
"""A backward starts about two kernels for each one of its forward."""

DEVICES_SPREAD = 0.014
"""Standard deviation of the seconds of the same products over devices of one kind, whose clocks a
power limit sets to unlike rates.  Medians of devices, interquartile range over 1.349 (hal-uw's
blox-pal at da726ca, aggregated_data, measured for arXiv:2208.11035 and 2408.11919): ResNet-50 on
219 A100 of Lonestar6 2.1 %; SGEMM, ResNet-50 and BERT on 392, 336 and 136 V100 of Longhorn 1.7, 2.3
and 0.5 %; ResNet-50 and BERT on 296 and 276 RTX 5000 of Frontera 0.6 and 0.4 %: 1.4 % over the
three clusters.  PageRank, which waits for memory, has 0.1 and 0.05 % there: traffic is alike."""
WATT_FLOPS = {"blackwell": 1.1e12}
"""FLOP/s of products in 16 bits that a watt of a board's power sustains through a step, by
architecture.  B200, B300, GB200 and GB300 have 1,000, 1,100, 1,200 and 1,400 W, and are in steps as
much faster; boards of before reach the rate of their short products."""
WATT_BASIS = {"blackwell": "fitted to megatron_bridge, mlperf, simumax_b200"}
POWER_EXPONENT = 0.75
"""Exponent p: with a share x of its design power, a device multiplies at x**p of its rate."""
POWER_EXPONENT_RANGE = 0.33, 1.0
POWER_BASIS = "POWERCAP, 0.7 to 1.05; low the cube law of frequency and power"
POWER_CURVES = ("cuda", "rocm")
"""Kinds of devices that the exponent is taken to hold for; it is quoted of one H100."""
ONE_NODE = 8
"""Devices whose slowest the rates of kernels in the catalogue are of."""


SAME_RATE: dict[str, tuple[str, ...]] = {
    "tf32": ("tf32", "fp32"),
    "bf16": ("bf16", "fp16"),
    "fp16": ("fp16", "bf16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "mxfp8": ("mxfp8", "fp8", "bf16", "fp16"),
    "nvfp4": ("nvfp4", "fp8", "bf16", "fp16"),
}
"""Precisions whose rate stands for one that a sheet does not quote, the preferred one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The rates of one device in one precision with one framework's kernels."""

    peak_flops: float
    memory_bytes_per_s: float
    curve: DeviceCurve
    sustained: float = 1.0
    """Rate of products in a training step over that of single kernels."""
    slowest: float = 1.0
    """Rate of products and attention of the slowest device, and under its power limit, over that of
    a node's slowest."""
    attention: float = 1.0
    """The same of fused attention, for its generation, its length and its heads."""
    eight_bit_flops: float | None = None
    """FLOP/s of products of 8-bit operands, where the precision has them."""
    every_product: bool = False
    """All products of blocks are in 8 bits, not only those of Linears."""
    every_launch: bool = True
    """Launches of memory-bound kernels count; else those of products and attention alone."""
    cast_bytes: float = 0.0
    """Memory traffic of rounding an operand to 8 bits, per element."""
    cast_kernels: int = 0
    """Kernels started to round one operand; 0: other operators write it in 8 bits too."""
    input_bytes: float = 0.0
    """Bytes moved by fused casts per element of a product's input, in its forward."""
    gradient_bytes: float = 0.0
    """Per element of the gradient of its output, in its backward."""
    weight_bytes: float = 0.0
    """Per element of its weight, in either pass."""
    narrow_weights: bool = False
    """Weights come in 8 bits, so that products do not round them."""
    wide_gradients: bool = False
    """Gradients of weights are products in 16 bits."""
    narrow_attention: tuple[float, float] = (1.0, 1.0)
    """Rates of fused attention in 8 bits over those in 16, forward and backward."""
    architecture: str | None = None


def device(
    accelerator: Accelerator,
    precision: str,
    framework: Framework,
    *,
    seq_len: int = LONG_SEQUENCE,
    head_dim: int = 128,
    devices: int = ONE_NODE,
) -> DeviceRates:
    """Return the rates of an accelerator in a precision, with a framework's kernels.

    What products in 8 bits and fewer do not make, 16 bits make.  Attention's rate depends on the
    length of a sequence and the size of a head unless it is torch's own.  `devices` wait for each
    other in every step.
    """
    eight, casts = precision in EIGHT_BITS, framework.eight_bit
    return DeviceRates(
        peak_flops=peak_flops(accelerator, "bf16" if eight else precision),
        eight_bit_flops=_narrow_flops(accelerator, precision, framework) if eight else None,
        memory_bytes_per_s=accelerator.memory_bytes_per_s,
        curve=accelerator.curve,
        sustained=sustained_share(accelerator, framework),
        slowest=(1.0 if accelerator.kind == "cpu" else slowest(devices))
        * limited_rate(accelerator.power_limit or 1.0),
        attention=attention_share(
            accelerator, framework.kernels.attention, seq_len=seq_len, head_dim=head_dim
        )
        if framework.kernels.attention != "module"
        else sustained_share(accelerator, framework),
        every_product=casts.products == "all",
        every_launch=framework.kernels.launches == "every",
        cast_bytes=casts.cast_bytes,
        cast_kernels=casts.cast_kernels,
        input_bytes=casts.input_bytes,
        gradient_bytes=casts.gradient_bytes,
        weight_bytes=casts.weight_bytes,
        narrow_attention=narrow_attention(accelerator, precision, framework),
        architecture=accelerator.architecture,
    )


def compiled_rates(on: DeviceRates) -> DeviceRates:
    """Return a device whose kernels a compiler made: it fuses casts with what lies around them."""
    return replace(on, cast_bytes=0.0, cast_kernels=0) if on.cast_kernels else on


def recipe_of(framework: Framework, precision: str, scales: str) -> Recipe | None:
    """Return what differs from a framework's usual scales, where a layout asks for others."""
    return framework.eight_bit.recipes.get(scales if precision == "fp8" else precision)


def rates_with_scales(on: DeviceRates, recipe: Recipe) -> DeviceRates:
    """Return a device whose products in 8 bits have other scales than the usual ones."""
    if on.eight_bit_flops is None:
        return on
    rate = recipe.architecture_rates.get(on.architecture or "", recipe.rate)
    return replace(
        on,
        eight_bit_flops=rate * on.eight_bit_flops,
        input_bytes=recipe.input_bytes,
        gradient_bytes=recipe.gradient_bytes,
        weight_bytes=recipe.weight_bytes,
        wide_gradients=recipe.wide_gradients,
    )


def with_narrow_weights(on: DeviceRates, framework: Framework) -> DeviceRates:
    """Return a device whose weights come in 8 bits: they are brought into order, not rounded."""
    return replace(on, narrow_weights=True, weight_bytes=framework.eight_bit.arrived_bytes)


def sustained_share(accelerator: Accelerator, framework: Framework) -> float:
    """Return the share of a single kernel's rate that products sustain in a framework's step.

    A curve measured on the machine itself contains it, and CPUs' curves are always of long runs.
    """
    kernels, rule = accelerator.kernels, framework.kernels
    if rule.tuned:
        generation = rule.architecture_products.get(accelerator.architecture or "", 1.0)
        share = min(kernels.sustained_tuned, power_share(accelerator))
        return share * rule.products * generation
    if accelerator.curve.provenance == "measured" or accelerator.kind == "cpu":
        return 1.0
    return min(kernels.sustained, power_share(accelerator))


def power_share(accelerator: Accelerator) -> float:
    """Return the share of a single kernel's rate for which a board has power, 1 or more if it has.

        η P / (f F)

    P is the board's power, f F the rate of short products in 16 bits, η what a watt sustains.
    """
    watt_flops = WATT_FLOPS.get(accelerator.architecture or "")
    if watt_flops is None or accelerator.tdp_w is None:
        return math.inf
    fastest = accelerator.curve.matmul * peak_flops(accelerator, "bf16")
    return watt_flops * accelerator.tdp_w / fastest


def limited_rate(share: float) -> float:
    """Return the rate of products under a power limit over that at full power.

        x^p

    x is the limit's share of the design power.  Source: `POWER_BASIS`.

    >>> round(limited_rate(0.6), 3)
    0.682
    """
    return math.pow(share, POWER_EXPONENT)


def slowest(devices: int) -> float:
    """Return the rate of the slowest of many devices over that of the slowest of one node.

        1 / (1 + σ (E(n) - E(8)))

    E(n) is the expected largest of n standard normal deviations, and n the next power of two, so
    that clusters of nearly one size share their figures (0.2 % of a step between two of them).

    >>> [round(slowest(n), 3) for n in (1, 8, 128, 1024, 16384)]
    [1.0, 1.0, 0.984, 0.975, 0.966]
    """
    many = 2 ** math.ceil(math.log2(max(devices, ONE_NODE)))
    return 1 / (1 + DEVICES_SPREAD * (expected_largest(many) - expected_largest(ONE_NODE)))


def attention_share(
    accelerator: Accelerator, generation: AttentionKernel, *, seq_len: int, head_dim: int
) -> float:
    """Return the rate of a generation of fused attention over that of the device's curve.

        (1 + k / 8192) s / (s + k), and 0.85 of it for heads of 64

    k are the tokens at which single kernels have half of their rate on endless sequences.  Beyond
    8,192 tokens it stays: kernels alone still gain, but they fill the step, and power limits hold
    them.  Published runs of 16 thousand to a million tokens with context parallelism reach what
    those of 8 thousand do (docs/results/public-facts.md).

    Heads of other sizes take the seconds of the next multiple of 32, for which there is a kernel
    (flash-attention, csrc/flash_attn/flash_api.cpp).  Forward, heads of 64, 192 and 256 reach 0.81,
    0.98 and 1.06 of the rate of 128 on H100 (aiconfigurator's tables).
    """
    kernels = accelerator.kernels
    half = kernels.attention_half_tokens
    tokens = min(seq_len, LONG_SEQUENCE)
    length = (1 + half / LONG_SEQUENCE) * tokens / (tokens + half)
    padded = HEAD_MULTIPLE * -(-head_dim // HEAD_MULTIPLE)
    head = (SMALL_HEAD if padded < 96 else 1.0) * head_dim / padded
    return length * kernels.attention[generation] * head


def narrow_attention(
    accelerator: Accelerator, precision: str, framework: Framework
) -> tuple[float, float]:
    """Return the rates of attention in 8 bits over those in 16, where a framework's is."""
    if not framework.kernels.eight_bit_attention or precision not in EIGHT_BITS:
        return 1.0, 1.0
    by_precision = accelerator.kernels.eight_bit_attention
    kernel_rates = next((rates for name, rates in by_precision.items() if name == precision), None)
    if kernel_rates is None:
        raise DocumentError(
            "framework",
            f"is {framework.name}, and of attention in {precision} on {accelerator.name} no "
            "measured rate is known; leave fp8-attention out",
        )
    return kernel_rates


def _narrow_flops(accelerator: Accelerator, precision: str, framework: Framework) -> float:
    """Return the rate of products in 8 or 4 bits, to be multiplied by the curve's fraction.

    Devices whose sheet has no rate in 8 bits multiply in 16, and those without 4 bits in 8.
    """
    of_libraries = framework.eight_bit.architecture_rates.get(accelerator.architecture or "", 1.0)
    if not framework.eight_bit.large_rate or "fp8" not in accelerator.peak_flops:
        return of_libraries * peak_flops(accelerator, "fp8")
    kernels = accelerator.kernels
    in_four = precision == "nvfp4" and kernels.four_bit is not None
    share = kernels.four_bit if in_four and kernels.four_bit else kernels.eight_bit
    return of_libraries * share * accelerator.peak_flops["fp8"]


def peak_flops(accelerator: Accelerator, precision: str) -> float:
    """Return the dense peak of a precision, FLOP/s."""
    for name in SAME_RATE.get(precision, (precision,)):
        if name in accelerator.peak_flops:
            return accelerator.peak_flops[name]
    names = ", ".join(sorted(accelerator.peak_flops))
    raise DocumentError(
        "precision", f"is {precision}, which {accelerator.name} has no peak for; it has {names}"
    )


def forward_s(operator: Operator, on: DeviceRates) -> float:
    """Seconds of an operator's forward.

    >>> curve = DeviceCurve(launch_s=4e-6, matmul=0.7, attention_forward=0.5,
    ...     attention_backward=0.4, memory=0.8, spread=0.1, provenance="quoted", source="example")
    >>> h100 = DeviceRates(peak_flops=989e12, memory_bytes_per_s=3.35e12, curve=curve)
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
        share=operator.share,
    )


def backward_s(operator: Operator, on: DeviceRates) -> float:
    """Seconds of an operator's backward, recomputation not counted."""
    factor = ATTENTION_BACKWARD if operator.kind == "attention" else MATMUL_BACKWARD
    frozen = operator.frozen
    return seconds(
        on,
        kind=operator.kind,
        flops=(1 if frozen else factor) * operator.flops,
        moved_bytes=operator.copied_bytes
        if operator.communicates
        else operator.backward_moved_bytes,
        kernels=1
        if operator.communicates
        else (1 if frozen else BACKWARD_KERNELS) * operator.kernels,
        backward=True,
        share=operator.share,
    )


def narrow_forward_s(operator: Operator, on: DeviceRates) -> float:
    """Seconds of a product x W^T whose operands are in 8 bits.

        t = launches + F / (f P8) + (X + W) / 2 / (g M) + Y / (g M) + casts / (g M)

    X, W and Y are bytes in 16 bits.  Casts of operators that PyTorch starts one by one move
    `eight_bit.cast_bytes` for each element of x and W: |x| (read 2, write 2), largest (2), to fp32
    (2 + 4), scaled (4 + 4), clamped (4 + 4), to 8 bits (4 + 1): 33.  Fused ones move `input_bytes`
    for each of x, once for all products that multiply it, and `weight_bytes` for each of W; where
    W is frozen nothing is transposed for its gradient.

    >>> curve = DeviceCurve(launch_s=4e-6, matmul=0.7, attention_forward=0.5,
    ...     attention_backward=0.4, memory=0.8, spread=0.1, provenance="quoted", source="example")
    >>> h100 = DeviceRates(peak_flops=989e12, memory_bytes_per_s=3.35e12, curve=curve,
    ...     eight_bit_flops=1979e12, cast_bytes=33, cast_kernels=9)
    >>> product = Operator(name="8192^3", kind="matmul", inputs=(), outputs={"y": 2 * 8192**2},
    ...     flops=2 * 8192**3, moved_bytes=3 * 2 * 8192**2)
    >>> f"{1e3 * narrow_forward_s(product, h100):.2f} ms"
    '2.62 ms'
    """
    result, operands = _result_and_operands(operator)
    arrived = 2 * operator.weights if on.narrow_weights else 0.0
    if on.cast_kernels:
        cast_bytes = on.cast_bytes / 2 * (operands - arrived)
    else:
        read = (operands / 2 - operator.weights) / operator.kernels
        each = on.input_bytes - TRANSPOSED_BYTES * operator.frozen
        cast_bytes = each * read + on.weight_bytes * operator.weights
    return _in_eight_bits(
        on,
        flops=operator.flops,
        moved_bytes=result + operands / 2 + cast_bytes,
        kernels=operator.kernels + (2 - on.narrow_weights) * on.cast_kernels,
        share=operator.share,
    )


def narrow_backward_s(operator: Operator, on: DeviceRates) -> float:
    """Seconds of both gradients of such a product: grad W, and grad^T x.

    Where casts are kernels of their own every operand is rounded anew; three of the four are
    transposed, and copied into order.  Else each of the two is a product of the forward's size, of
    frozen weights there is one, and what is cast is the gradient of the output.  That of W may be
    left to 16 bits.
    """
    result, operands = _result_and_operands(operator)
    if not on.cast_kernels:
        products = 1 if operator.frozen or on.wide_gradients else MATMUL_BACKWARD
        each = on.gradient_bytes - TRANSPOSED_BYTES * operator.frozen
        gradients = each * result / 2
        wide_s = 0.0
        if on.wide_gradients and not operator.frozen:
            wide_s = forward_s(operator, on)
        return wide_s + _in_eight_bits(
            on,
            flops=products * operator.flops,
            moved_bytes=products * (result + operands / 2)
            + gradients
            + on.weight_bytes * operator.weights,
            kernels=products * operator.kernels,
            share=operator.share,
        )
    arrived = 2 * operator.weights if on.narrow_weights else 0.0
    rounded = 2 * result + operands - arrived
    copied = result + operands  # 8 bits read and written: as many bytes as in 16 bits
    return _in_eight_bits(
        on,
        flops=MATMUL_BACKWARD * operator.flops,
        moved_bytes=operands + (rounded + arrived) / 2 + on.cast_bytes / 2 * rounded + copied,
        kernels=2 * operator.kernels + (4 - on.narrow_weights) * on.cast_kernels + 3,
        share=operator.share,
    )


def is_narrow(operator: Operator, on: DeviceRates, *, end: bool) -> bool:
    """Return whether a product is in 8 bits: those of blocks, of Linears or of experts too.

    Embedding and head, the `end` layers, never are, and neither are what weighs experts and
    products of two activations that one kernel would have made.  Sources: torchao, float8
    training filters (output, router.gate); Transformer Engine has no module for either.
    """
    if on.eight_bit_flops is None or end or operator.kind != "matmul" or operator.in_core:
        return False
    if operator.name in ROUTING:
        return False
    return on.every_product or not operator.name.startswith("expert")


def _result_and_operands(operator: Operator) -> tuple[float, float]:
    """Return the bytes of a product's output, and of its two operands together."""
    result = sum(operator.outputs.values())
    return result, operator.moved_bytes - result


def _in_eight_bits(
    on: DeviceRates, *, flops: float, moved_bytes: float, kernels: float, share: float
) -> float:
    assert on.eight_bit_flops is not None
    curve = on.curve
    products_s = flops / (curve.matmul * on.sustained * on.slowest * on.eight_bit_flops)
    traffic_s = moved_bytes / (curve.memory * on.memory_bytes_per_s)
    return (kernels * curve.launch_s + products_s + traffic_s) / share


def seconds(
    on: DeviceRates,
    *,
    kind: str,
    flops: float,
    moved_bytes: float,
    kernels: float,
    backward: bool = False,
    share: float = 1.0,
) -> float:
    """Seconds of `kernels` kernels of one kind that do this work together."""
    curve = on.curve
    if kind == "matmul":
        rate = curve.matmul * on.sustained * on.slowest
        result = kernels * curve.launch_s + flops / (rate * on.peak_flops)
    elif kind == "attention":
        fraction = curve.attention_backward if backward else curve.attention_forward
        rate = fraction * on.attention * on.slowest * on.narrow_attention[backward]
        result = kernels * curve.launch_s + flops / (rate * on.peak_flops)
    else:
        result = kernels * curve.launch_s if on.every_launch else 0.0
    return (result + moved_bytes / (curve.memory * on.memory_bytes_per_s)) / share
