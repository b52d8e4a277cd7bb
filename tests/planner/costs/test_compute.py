"""Operator seconds against the curve's formula by hand, and laws that no curve may break."""

import pytest

from planner.catalog import native
from planner.cluster import Accelerator, DeviceCurve
from planner.costs.compute import (
    Device,
    backward_s,
    device,
    forward_s,
    narrow_backward_s,
    narrow_forward_s,
    peak_flops,
    sustained,
)
from planner.errors import DocumentError
from planner.expressions import resolve_cluster
from planner.layers.operator_table import Operator

CURVE = DeviceCurve(
    launch_s=5e-6,
    matmul=0.5,
    attention_forward=0.4,
    attention_backward=0.25,
    memory=0.8,
    spread=0.1,
    provenance="quoted",
    source="example",
)
GPU = Device(peak_flops=100e12, memory_bytes_per_s=1e12, curve=CURVE)


def operator(kind: str, **figures: float) -> Operator:
    return Operator(name="op", kind=kind, inputs=(), outputs={}, **figures)


def test_a_product_takes_launch_and_flops_and_bytes() -> None:
    product = operator("matmul", flops=1e12, moved_bytes=8e9, backward_moved_bytes=16e9)

    assert forward_s(product, GPU) == pytest.approx(5e-6 + 1e12 / 50e12 + 8e9 / 0.8e12)
    assert backward_s(product, GPU) == pytest.approx(2 * 5e-6 + 2e12 / 50e12 + 16e9 / 0.8e12)


def test_attention_backward_does_five_products_at_its_own_fraction() -> None:
    core = operator("attention", flops=1e12)

    assert forward_s(core, GPU) == pytest.approx(5e-6 + 1e12 / 40e12)
    assert backward_s(core, GPU) == pytest.approx(2 * 5e-6 + 2.5e12 / 25e12)


def test_an_elementwise_operator_pays_for_each_of_its_kernels() -> None:
    norm = operator("memory", moved_bytes=0.8e9, kernels=6)

    assert forward_s(norm, GPU) == pytest.approx(6 * 5e-6 + 1e-3)


def test_communication_computes_nothing_but_its_copies() -> None:
    gather = operator("all_gather", moved_bytes=1e9, copied_bytes=0.8e9)

    assert forward_s(gather, GPU) == pytest.approx(5e-6 + 1e-3)
    assert backward_s(gather, GPU) == forward_s(gather, GPU)


@pytest.mark.parametrize("kind", ["matmul", "attention", "memory"])
@pytest.mark.parametrize("faster", ["peak_flops", "memory_bytes_per_s"])
def test_a_faster_device_is_never_slower(kind: str, faster: str) -> None:
    rates = {"peak_flops": 100e12, "memory_bytes_per_s": 1e12}
    quick = Device(**{**rates, faster: 2 * rates[faster]}, curve=CURVE)
    work = operator(kind, flops=1e12, moved_bytes=1e9, backward_moved_bytes=2e9)

    assert forward_s(work, quick) <= forward_s(work, GPU)
    assert backward_s(work, quick) <= backward_s(work, GPU)


def accelerator(**peaks: float) -> Accelerator:
    return Accelerator(
        name="old", memory_bytes=1, peak_flops=peaks, memory_bytes_per_s=1.0, curve=CURVE
    )


def test_bf16_runs_at_the_rate_of_fp16_where_the_sheet_has_only_that() -> None:
    assert peak_flops(accelerator(fp32=1.0, fp16=8.0), "bf16") == 8.0
    assert device(accelerator(fp32=1.0, fp16=8.0), "fp32", native()).peak_flops == 1.0


def test_a_precision_without_a_peak_is_an_error_that_says_which_there_are() -> None:
    with pytest.raises(DocumentError, match="it has fp32"):
        peak_flops(accelerator(fp32=1.0), "bf16")


def test_only_curves_of_single_kernels_are_lowered_to_what_a_step_sustains() -> None:
    quoted = accelerator(fp32=1.0).model_copy(update={"name": "h100-sxm-80gb"})
    measured = quoted.model_copy(
        update={"curve": CURVE.model_copy(update={"provenance": "measured"})}
    )

    assert sustained(quoted, native()) == device(quoted, "fp32", native()).sustained == 0.9
    assert sustained(measured, native()) == 1.0
    assert sustained(quoted.model_copy(update={"kind": "cpu"}), native()) == 1.0


def test_a_product_in_eight_bits_pays_for_rounding_its_operands() -> None:
    narrow = Device(
        peak_flops=100e12,
        memory_bytes_per_s=1e12,
        curve=CURVE,
        eight_bit_flops=200e12,
        cast_bytes=33,
        cast_kernels=9,
    )
    x, w, y = 2e9, 3e9, 4e9  # bytes in 16 bits
    product = Operator(
        name="up", kind="matmul", inputs=(), outputs={"y": y}, flops=1e12, moved_bytes=x + w + y
    )

    forward = narrow_forward_s(product, narrow)
    backward = narrow_backward_s(product, narrow)

    rounding = 33 / 2
    moved = rounding * (x + w) + (x + w) / 2 + y
    assert forward == pytest.approx(19 * 5e-6 + 1e12 / 100e12 + moved / 0.8e12)
    # Gradients of x and of w: y and w are rounded for the one, y and x for the other.
    moved = rounding * (2 * y + w + x) + (2 * y + w + x) / 2 + x + w + (w + y + x)
    assert backward == pytest.approx(41 * 5e-6 + 2e12 / 100e12 + moved / 0.8e12)


def test_what_fp8_does_not_round_runs_as_in_bf16() -> None:
    accelerator = resolve_cluster("8xh100-sxm-80gb").groups[0].accelerator

    narrow, wide = (device(accelerator, precision, native()) for precision in ("fp8", "bf16"))

    assert narrow.peak_flops == wide.peak_flops
    assert narrow.eight_bit_flops == accelerator.peak_flops["fp8"]
    assert wide.eight_bit_flops is None
