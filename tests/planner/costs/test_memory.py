"""Resident bytes per parameter against the tables of the ZeRO paper and of FSDP2's source."""

from dataclasses import replace

import pytest

from planner.costs.memory import Sharing, padded, states

N = 1000.0
ALONE = Sharing(precision="fp32", zero=0, shard=1, data=1, pipelined=False, accumulated=False)
MIXED = replace(ALONE, precision="bf16")
EIGHT = replace(MIXED, shard=8, data=8, accumulated=True)


def per_parameter(sharing: Sharing) -> tuple[float, float, float]:
    found = states(N, sharing)
    parameters = found.parameters_bytes + found.gathered_bytes
    return parameters / N, found.gradients_bytes / N, found.optimizer_bytes / N


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
    assert padded(1e9, pieces, shard) == 1e9


def test_ranks_beyond_the_experts_divide_nothing_more() -> None:
    """Of 8 experts over 16 ranks each of the first 8 holds one: an eighth, not a sixteenth."""
    sixteen = Sharing(
        precision="bf16", zero=3, shard=16, data=16, pipelined=False, accumulated=True
    )
    eight = replace(sixteen, shard=8)

    over = states(8e9, sixteen, pieces=8)

    assert over.resident_bytes == states(8e9, eight).resident_bytes
    assert over.forward_transient_bytes == 2 * states(8e9, sixteen).forward_transient_bytes


def test_a_loss_is_done_before_its_weights_gradient_is_reduced() -> None:
    shared = Sharing(precision="bf16", zero=1, shard=8, data=8, pipelined=False, accumulated=True)

    head = states(1e9, shared, loss=True)

    assert head.after_loss_bytes == (2 + 4) * 1e9  # fresh in bf16, the reduction's input in fp32
    assert states(1e9, shared).after_loss_bytes == 0
    assert replace(head, after_loss_bytes=0.0) == states(1e9, shared)
