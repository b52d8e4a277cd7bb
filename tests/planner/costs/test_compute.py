"""Operator seconds against the curve's formula by hand, and laws that no curve may break."""

import random
from dataclasses import replace

import pytest

from meshwright.planner.catalog import accelerators, frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.compute import (
    DeviceRates,
    attention_share,
    backward_s,
    device,
    expected_largest,
    forward_s,
    narrow_backward_s,
    narrow_forward_s,
    seconds,
    sustained_share,
)
from meshwright.planner.documents.cluster import Accelerator, DeviceCurve
from meshwright.planner.operators.operator_table import Operator

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
GPU = DeviceRates(peak_flops=100e12, memory_bytes_per_s=1e12, curve=CURVE)


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
    quick = DeviceRates(**{**rates, faster: 2 * rates[faster]}, curve=CURVE)
    work = operator(kind, flops=1e12, moved_bytes=1e9, backward_moved_bytes=2e9)

    assert forward_s(work, quick) <= forward_s(work, GPU)
    assert backward_s(work, quick) <= backward_s(work, GPU)


def accelerator(**peaks: float) -> Accelerator:
    return Accelerator(
        name="old", memory_bytes=1, peak_flops=peaks, memory_bytes_per_s=1.0, curve=CURVE
    )


def test_only_curves_of_single_kernels_are_lowered_to_what_a_step_sustains() -> None:
    quoted = accelerator(fp32=1.0).model_copy(update={"name": "h100-sxm-80gb"})
    measured = quoted.model_copy(
        update={"curve": CURVE.model_copy(update={"provenance": "measured"})}
    )

    assert sustained_share(quoted, native()) == device(quoted, "fp32", native()).sustained == 0.9
    assert sustained_share(measured, native()) == 1.0
    assert sustained_share(quoted.model_copy(update={"kind": "cpu"}), native()) == 1.0


def test_a_product_in_eight_bits_pays_for_rounding_its_operands() -> None:
    narrow = DeviceRates(
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


def test_fused_casts_read_inputs_gradients_and_weights_once_in_each_pass() -> None:
    # torchao's tensorwise casts under a compiler: of x 2 read and 1 + 1 written, of the output's
    # gradient its largest beforehand too, of a weight that came in 8 bits the other order.
    narrow = DeviceRates(
        peak_flops=100e12,
        memory_bytes_per_s=1e12,
        curve=CURVE,
        eight_bit_flops=200e12,
        input_bytes=4.0,
        gradient_bytes=6.0,
        weight_bytes=2.0,
    )
    x, w, y = 1e9, 2e9, 3e9  # elements
    product = Operator(
        name="up",
        kind="matmul",
        inputs=(),
        outputs={"y": 2 * y},
        flops=1e12,
        moved_bytes=2 * (x + w + y),
        weights=w,
    )
    three = replace(product, kernels=3, moved_bytes=2 * (3 * x + w + y))

    products_s, memory = 1e12 / 100e12, 0.8e12
    forward_s, cast = products_s + 5e-6 + (x + w + 2 * y) / memory, (4 * x + 2 * w) / memory
    assert narrow_forward_s(product, narrow) == pytest.approx(forward_s + cast)
    # Three products of one input read it three times, and cast it once.
    assert narrow_forward_s(three, narrow) - narrow_forward_s(product, narrow) == pytest.approx(
        2 * 5e-6 + 2 * x / memory
    )
    back = (6 * y + 2 * w) / memory
    assert narrow_backward_s(product, narrow) == pytest.approx(2 * forward_s + back)
    # Frozen weights have no gradient, for which x and y would be written in another order too.
    frozen = replace(product, frozen=True)
    assert narrow_forward_s(frozen, narrow) == pytest.approx(forward_s + cast - x / memory)
    assert narrow_backward_s(frozen, narrow) == pytest.approx(forward_s + back - y / memory)


def test_frozen_weights_have_one_product_in_backward() -> None:
    product = operator("matmul", flops=1e12, moved_bytes=8e9, backward_moved_bytes=8e9)
    frozen = replace(product, frozen=True)

    assert backward_s(frozen, GPU) == pytest.approx(forward_s(product, GPU))


def test_products_of_a_lower_rate_take_longer_by_it() -> None:
    product = operator("matmul", flops=1e12, moved_bytes=8e9)

    assert forward_s(replace(product, share=0.8), GPU) == pytest.approx(
        forward_s(product, GPU) / 0.8
    )


def test_launches_of_memory_kernels_may_hide_and_those_of_products_not() -> None:
    hidden = replace(GPU, every_launch=False)
    norm = operator("memory", moved_bytes=0.8e9, kernels=6)
    product = operator("matmul", flops=1e12)

    assert forward_s(norm, hidden) == pytest.approx(1e-3)
    assert forward_s(product, hidden) == forward_s(product, GPU)


def test_attention_has_the_rate_of_its_curve_from_8192_tokens_on_and_less_before() -> None:
    card = accelerator(fp32=1.0)
    half = card.kernels.attention_half_tokens

    def share(**changes: int) -> float:
        return attention_share(card, "fa2", **{"seq_len": 8192, "head_dim": 128, **changes})

    assert share() == pytest.approx(1.0) == share(seq_len=2**20)
    assert share(seq_len=half) == pytest.approx((1 + half / 8192) / 2)
    assert share(head_dim=64) == pytest.approx(0.85)
    # Heads of 80 run in the kernel of 96, those of 48 in that of 64.
    assert share(head_dim=80) == pytest.approx(share(head_dim=96) * 80 / 96)
    assert share(head_dim=48) == pytest.approx(share(head_dim=64) * 48 / 64)
    assert attention_share(card, "fa1", seq_len=8192, head_dim=128) == pytest.approx(0.65)


def test_a_framework_says_which_rate_of_its_device_holds() -> None:
    h100 = resolve_cluster("8xh100-sxm-80gb").groups[0].accelerator
    kernels, fsdp, megatron = h100.kernels, frameworks()["fsdp"], frameworks()["megatron"]

    assert device(h100, "bf16", megatron).sustained == kernels.sustained_tuned
    assert device(h100, "bf16", fsdp).sustained == pytest.approx(0.89 * kernels.sustained_tuned)
    eight = device(h100, "mxfp8", megatron).eight_bit_flops
    assert eight == pytest.approx(kernels.eight_bit * h100.peak_flops["fp8"])
    b200 = resolve_cluster("8xb200").groups[0].accelerator
    assert b200.kernels.four_bit is not None
    four = device(b200, "nvfp4", megatron).eight_bit_flops
    assert four == pytest.approx(b200.kernels.four_bit * b200.peak_flops["fp8"])


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "rtx-3090", "mi300x"])
@pytest.mark.parametrize("kind", ["matmul", "attention"])
def test_the_more_devices_wait_for_each_other_the_longer_products_take_and_traffic_does_not(
    name: str, kind: str
) -> None:
    accelerator = accelerators()[name].accelerator(name)
    counts = (1, 8, 9, 16, 64, 1000, 20_000)
    on = [device(accelerator, "bf16", native(), devices=n) for n in counts]

    def times(kind: str) -> list[float]:
        return [seconds(one, kind=kind, flops=1e15, moved_bytes=1e3, kernels=1) for one in on]

    of_products, of_traffic = times(kind), times("elementwise")

    assert of_products[0] == of_products[1]
    assert of_products[2] == of_products[3], "of the next power of two"
    assert sorted(set(of_products)) == of_products[1:3] + of_products[4:]
    assert of_products[-1] < 1.05 * of_products[0]
    assert len(set(of_traffic)) == 1


def test_the_slowest_of_many_is_as_many_draws_have_it() -> None:
    draws, rng = 4000, random.Random(0)
    for count in (8, 64):
        largest = [max(rng.gauss(0, 1) for _ in range(count)) for _ in range(draws)]
        assert expected_largest(count) == pytest.approx(sum(largest) / draws, abs=0.04)
