"""Resident bytes per parameter against the tables of the ZeRO paper and of FSDP2's source."""

from dataclasses import fields, replace

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.costs.memory.state_bytes import (
    FirstLayer,
    LastLayer,
    StateSharding,
    frozen_states,
    padded_parameters,
    state_types,
    states,
)

N = 1000.0
FULL, HALF = state_types(native(), "fp32"), state_types(native(), "bf16")
ALONE = StateSharding(types=FULL, zero=0, shard=1, data=1, pipelined=False, accumulated=False)
MIXED = replace(ALONE, types=HALF)
EIGHT = replace(MIXED, shard=8, data=8, accumulated=True)


def per_parameter(sharing: StateSharding) -> tuple[float, float, float]:
    found = states(N, sharing)
    parameters = found.parameters_bytes + found.gathered_bytes
    gradients = found.gradients_bytes + found.gradient_buffers_bytes
    return parameters / N, gradients / N, found.optimizer_bytes / N


def test_one_fp32_device_holds_16_bytes_per_parameter() -> None:
    assert per_parameter(ALONE) == (4, 4, 8)


def test_bf16_adds_a_working_copy() -> None:
    assert per_parameter(MIXED) == (6, 4, 8)


def test_each_zero_level_divides_one_more_thing() -> None:
    zero = [per_parameter(replace(EIGHT, zero=level)) for level in (1, 2, 3)]

    assert zero == [(4 / 8 + 2, 4, 1), (4 / 8 + 2, 4 / 8, 1), (4 / 8, 4 / 8, 1)]


def test_a_single_micro_batch_needs_no_whole_gradients_under_zero_1() -> None:
    once = replace(EIGHT, zero=1, accumulated=False)

    assert per_parameter(once) == (4 / 8 + 2, 4 / 8, 1)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_pipeline_keeps_gradients_whole_and_parameters_gathered(zero: int) -> None:
    piped = replace(EIGHT, zero=zero, pipelined=True)

    assert per_parameter(piped) == (4 / 8 + 2, 4, 1)


def test_zero_3_of_a_70b_model_on_512_ranks_leaves_16_bytes_over_512() -> None:
    found = states(70e9, replace(EIGHT, zero=3, shard=512, data=512))

    assert found.resident_bytes == pytest.approx(16 * 70e9 / 512)


def test_gathered_units_are_transient_only_where_they_are_gathered_again() -> None:
    assert states(N, replace(EIGHT, zero=2)).forward_transient_bytes == 0
    assert states(N, replace(EIGHT, zero=3)).forward_transient_bytes == 3 * 2 * N


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_higher_level_never_holds_more(pipelined: bool) -> None:
    held = [
        states(N, replace(EIGHT, zero=zero, pipelined=pipelined)).resident_bytes
        for zero in range(4)
    ]

    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(("pieces", "shard"), [(8, 1), (8, 2), (8, 8), (128, 32)])
def test_pieces_that_the_ranks_divide_need_no_padding(pieces: int, shard: int) -> None:
    assert padded_parameters(1e9, pieces, shard) == 1e9


def test_ranks_beyond_the_experts_divide_nothing_more() -> None:
    """Of 8 experts over 16 ranks each of the first 8 holds one: an eighth, not a sixteenth."""
    sixteen = StateSharding(
        types=HALF, zero=3, shard=16, data=16, pipelined=False, accumulated=True
    )
    eight = replace(sixteen, shard=8)

    over = states(8e9, sixteen, pieces=8)

    assert over.resident_bytes == states(8e9, eight).resident_bytes
    assert over.forward_transient_bytes == 2 * states(8e9, sixteen).forward_transient_bytes


LOGITS = LastLayer(before=5e8, logits=True)
CHUNKS = LastLayer(before=5e8, logits=False)
"""Heads of 10^9 parameters, behind blocks of half as many."""


@pytest.mark.parametrize(
    ("zero", "accumulated", "end", "beside", "after"),
    [
        # Fresh gradients, 2 GB, are in the sum of 4 bytes before that is copied for its reduction.
        (1, True, None, 0, 4e9),
        (1, True, LOGITS, 0, 4e9),
        # Those of one micro-batch are copied themselves, while the layer before works.
        (2, True, None, 4e9, 2e9 + 4e9),
        (1, False, LOGITS, 0, 2e9 + 4e9),
        (3, True, None, 4e9 + 2 * 2e9, 2e9 + 4e9 + 2 * 2e9),
        # The head's own copy, and what is asked for of the block before; no reduction is under way.
        (3, True, LOGITS, 0, 2e9 + 4e9),
        (3, True, replace(LOGITS, kept=True), 2 * 2e9, 2e9 + 4e9),
        (3, True, CHUNKS, 2e9 + 2e9 + 1e9, 2e9 + 4e9),
        (3, True, replace(CHUNKS, holds_gradient=True), 2e9 + 1e9, 4e9),
        # The first layer's own copy, and the reduction of the block behind it.
        (3, True, FirstLayer(behind=5e8), 2e9 + 2e9, 2e9 + 2e9 + 2e9),
    ],
)
def test_gradients_move_beside_a_layers_backward_or_behind_it(
    zero: int, accumulated: bool, end: LastLayer | FirstLayer | None, beside: float, after: float
) -> None:
    shared = StateSharding(
        types=HALF, zero=zero, shard=8, data=8, pipelined=False, accumulated=accumulated
    )

    found = states(1e9, shared, end=end)

    assert (found.backward_transient_bytes, found.after_backward_bytes) == (beside, after)


def test_a_heads_shard_from_the_host_is_gone_when_its_logits_are_there() -> None:
    """Rehearsed: of 8B on 4 ranks 0.734 GiB, 4 + 2 bytes of a quarter of 525e6 parameters."""
    host = replace(EIGHT, zero=3, offload="parameters")

    block, loss, chunks = (states(1e9, host, end=end) for end in (None, LOGITS, CHUNKS))

    arriving = (4 + 2) * 1e9 / 8
    assert (loss.forward_transient_bytes, loss.backward_transient_bytes) == (0, 0)
    plain = replace(host, offload="none")
    for found, end in ((block, None), (chunks, CHUNKS)):
        beside = found.forward_transient_bytes - states(1e9, plain, end=end).forward_transient_bytes
        assert beside == arriving


@pytest.mark.parametrize(
    ("prefetch", "reshard_after_forward", "forward", "backward"),
    [
        (0, None, 4e9, 2e9 + 1e9),
        (3, None, 4e9, 2e9 + 3e9),
        (2, 2, 4e9, 1e9 + 1e9),
        (2, 1, 2e9, 0),
    ],
)
def test_nothing_is_asked_for_ahead_of_the_last_unit_but_what_stands_before_it(
    prefetch: int, reshard_after_forward: int | None, forward: float, backward: float
) -> None:
    shared = replace(EIGHT, zero=3, prefetch=prefetch, reshard_after_forward=reshard_after_forward)

    found = states(1e9, shared, end=CHUNKS)

    assert found.forward_transient_bytes == forward
    assert found.backward_transient_bytes == 2e9 + backward


def of(framework: str, precision: str = "bf16", *, zero: int, shard: int = 8) -> StateSharding:
    types = state_types(frameworks()[framework], precision, zero=zero)
    return replace(EIGHT, types=types, zero=zero, shard=shard, data=shard)


def test_buffers_divide_one_more_state_at_each_level() -> None:
    """Rajbhandari et al., 2020, figure 1, with fp32 gradients: 18 bytes, 12 of the optimizer."""
    found = [per_parameter(of("megatron", zero=zero)) for zero in range(4)]

    assert found == [(2, 4, 12), (2, 4, 12 / 8), (2, 4 / 8, 12 / 8), (4 / 8, 4 / 8, 8 / 8)]


def test_the_distributed_optimizer_takes_6_and_12_over_d_bytes() -> None:
    """Megatron-LM, docs/source/api-guide/dist_optimizer.md; with fp16 gradients 4 and 16 over d."""
    for shard in (2, 8, 64):
        held = states(N, of("megatron", zero=1, shard=shard)).resident_bytes
        half = states(N, of("megatron", "fp16", zero=1, shard=shard)).resident_bytes

        assert held == pytest.approx((6 + 12 / shard) * N)
        assert half == pytest.approx((4 + 12 / shard) * N)


def test_a_model_trained_in_16_bits_has_no_fp32_copy_but_under_deepspeed() -> None:
    assert states(N, of("transformers", zero=0)).resident_bytes == (2 + 2 + 4) * N
    assert per_parameter(of("ms-swift", zero=0)) == (2, 2, 4)
    assert per_parameter(of("ms-swift", zero=1)) == (2, 2, 12 / 8)


def test_fresh_gradients_wait_beside_their_sum() -> None:
    assert per_parameter(of("nanotron", zero=1)) == (2, 4 + 2, 12 / 8)
    assert per_parameter(of("megatron-deepspeed", zero=1)) == (2, 4 + 2, 12 / 8)


def test_gradients_that_are_summed_where_they_are_made_stand_beside_nothing() -> None:
    assert per_parameter(of("megatron-deepspeed", "fp16", zero=1)) == (2, 2, 12 / 8)
    assert per_parameter(of("nanotron", "fp32", zero=1)) == (4, 4, 8 / 8)


def test_frozen_parameters_are_as_narrow_as_their_products_or_in_4_bits() -> None:
    four = state_types(frameworks()["fsdp_qlora"], "bf16", weights="nf4")
    eight = state_types(frameworks()["megatron"], "fp8")
    alone = replace(ALONE, types=four)

    # Four bits, and scales that no rank shares: a byte for 64 and 4 more for 256 of these.
    scales = 1 + 4 / 256
    assert frozen_states(64.0, alone).resident_bytes == pytest.approx(64 / 2 + scales, 1e-4)
    assert frozen_states(N, replace(alone, types=eight)).resident_bytes == N
    sharded = replace(EIGHT, types=four, zero=3)
    assert frozen_states(64.0, sharded).resident_bytes == pytest.approx(32 / 8 + scales, 1e-4)
    on_host = frozen_states(64.0, replace(sharded, offload="parameters"))
    assert on_host.resident_bytes == pytest.approx(scales, 1e-3)


def test_the_optimizer_of_buffers_goes_to_the_host_with_its_masters() -> None:
    first = states(N, replace(of("megatron", zero=1), offload="optimizer"))
    second = states(N, replace(of("megatron", zero=2), offload="optimizer"))

    assert (first.resident_bytes, first.host_bytes) == (6 * N, 12 * N / 8)
    assert (second.resident_bytes, second.host_bytes) == (2 * N, 16 * N / 8)


def test_buffers_of_gradients_are_there_before_any_backward() -> None:
    assert states(N, of("megatron", zero=1)).gradient_buffers_bytes == 4 * N
    assert states(N, of("native", zero=1)).gradient_buffers_bytes == 0


def test_buffers_gather_a_layer_and_the_next_one_and_reduce_from_a_copy() -> None:
    three = states(N, of("deepspeed", zero=3))

    assert three.forward_transient_bytes == 2 * 2 * N
    assert three.backward_transient_bytes == (2 * 2 + 2) * N
    assert states(N, of("deepspeed", zero=2)).backward_transient_bytes == 0


def test_deepspeed_sums_and_reduces_in_16_bits_and_copies_a_shard_at_its_step() -> None:
    """By hand from stage_1_and_2.py: averaged 2 N/d, joined 2 N/d and cast 4 N/d at once."""
    shard = N / 8
    for zero, gradients in ((1, 2 * N), (2, 2 * shard), (3, 2 * shard)):
        held = states(N, of("deepspeed", zero=zero))

        assert held.gradient_buffers_bytes == gradients
        # Whole gradients but the shard's are let go of before the shard is copied.
        assert held.gradient_buffers_bytes + held.flat_bytes == pytest.approx((2 + 2 + 4) * shard)
    assert states(N, of("deepspeed", "fp32", zero=2)).flat_bytes == 4 * shard
    assert states(N, of("megatron", zero=2)).flat_bytes == 0
    # In fp16 Megatron-DeepSpeed has that optimizer: 4 + 18 / d bytes in all.  In bf16 it steps on
    # the fp32 gradients that it sums.
    half = states(N, of("megatron-deepspeed", "fp16", zero=1, shard=1))
    assert half.resident_bytes + half.flat_bytes == (4 + 18) * N
    assert states(N, of("megatron-deepspeed", zero=1)).flat_bytes == 0
    # A shard's gradients in 16 bits and in fp32, each one tensor, fit no segment that was freed.
    eight = states(N, of("megatron-deepspeed", "fp16", zero=1))
    assert eight.joined_bytes == pytest.approx((2 + 4) * shard)
    assert states(N, of("megatron", zero=1)).joined_bytes == 0
    on_host = replace(of("deepspeed", zero=2), offload="optimizer")
    assert states(N, on_host).flat_bytes == 0


def test_two_units_together_take_what_each_takes() -> None:
    one, other = states(N, ALONE), states(3 * N, EIGHT)

    for field in fields(one):
        each = getattr(one, field.name) + getattr(other, field.name)
        assert getattr(one + other, field.name) == each, field.name
