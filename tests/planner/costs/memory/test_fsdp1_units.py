"""Units of FSDP1 by hand from torch's source; tests/runtime/test_flat_units.py runs it."""

from dataclasses import replace

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.costs.memory import resident_states as flat_units
from meshwright.planner.costs.memory import state_bytes as memory
from meshwright.planner.costs.memory.state_bytes import StateSharding, state_types

N, D = 1000.0, 8
MIXED = StateSharding(
    types=state_types(frameworks()["llm-foundry-fsdp"], "bf16"),
    zero=3,
    shard=D,
    data=D,
    pipelined=False,
    accumulated=False,
)
"""fp32 masters; parameters, gradients and their reduction in 16 bits."""
PURE = replace(MIXED, types=state_types(frameworks()["litgpt"], "bf16"))
"""All in 16 bits, reduced in fp32."""


@pytest.mark.parametrize(
    ("sharing", "forward", "backward", "end"),
    [
        # Working 2 N, of the next one's shard 2 N / 8 cast; the unit before waits as it was made.
        (MIXED, 4 + 0.25, 2 + 2.25 + 2, 4 + 2 + 2.25 + 2),
        (replace(MIXED, gathers_before=False), 4 + 0.25, 2 + 2, 4 + 2 + 2),
        # Nothing is cast before a gather, but gradients are before their reduction.
        (PURE, 4, 2 + 2 + 2 + 4, 4 + 2 + 2 + 2 + 4),
        # Divided gradients alone: no gathers.
        (replace(PURE, zero=2), 0, 2 + 4, 4 + 2 + 4),
        (replace(MIXED, zero=0, shard=1), 0, 2, 4 + 2),
    ],
)
def test_a_working_unit_by_hand(
    sharing: StateSharding, forward: float, backward: float, end: float
) -> None:
    held = flat_units.fsdp1_states(N, sharing)

    assert held.forward_transient_bytes == forward * N
    assert held.backward_transient_bytes == backward * N
    assert held.after_backward_bytes == end * N


@pytest.mark.parametrize("zero", [2, 3])
def test_what_stays_is_what_fsdp2_keeps(zero: int) -> None:
    for sharing in (MIXED, PURE):
        shared = replace(sharing, zero=zero)
        kept = flat_units.fsdp1_states(N, shared)

        assert kept.resident_bytes == memory.states(N, shared).resident_bytes
        on_host = flat_units.fsdp1_states(N, replace(shared, offload="parameters"))
        assert on_host.resident_bytes == kept.resident_bytes - on_host.host_bytes


def test_gradients_wait_whole_for_the_last_micro_batch_where_nothing_is_reduced_before() -> None:
    """FSDP1's no_sync: 2 bytes of each, though a shard of them would take 2 / 8."""
    many = replace(PURE, accumulated=True)

    each, last = (
        flat_units.fsdp1_states(N, replace(many, syncs_each=syncs)) for syncs in (True, False)
    )

    assert (each.gradients_bytes, last.gradients_bytes) == (2 * N / D, 2 * N)
    once = flat_units.fsdp1_states(N, replace(PURE, syncs_each=False))
    assert once.gradients_bytes == 2 * N / D


def test_forward_gathers_straight_into_the_working_copy() -> None:
    """FSDP2 has the buffer of its collective beside it."""
    flat, apart = flat_units.fsdp1_states(N, PURE), memory.states(N, PURE)

    assert apart.forward_transient_bytes - flat.forward_transient_bytes == 2 * N


def test_the_root_waits_for_the_gradient_of_its_first_layer() -> None:
    """A head of 3 N and an embedding of 2 N; blocks of N stand between them."""
    head = flat_units.fsdp1_in_root(
        flat_units.fsdp1_states(3 * N, PURE), 3 * N, PURE, root=5 * N, before=2 * N
    )
    embedding = flat_units.fsdp1_in_root(
        flat_units.fsdp1_states(2 * N, PURE), 2 * N, PURE, root=5 * N, before=None
    )

    resident = (2 + 2 + 4) * 3 * N / D
    # A copy from its forward on, until the last backward ends; its gradient from its own backward
    # on, with the block before it there.
    assert head.between_bytes == 2 * 3 * N
    assert head.resident_bytes == resident + 2 * 3 * N + 2 * 3 * N
    assert (head.forward_transient_bytes, head.backward_transient_bytes) == (0, 2 * N)
    # All gradients join; then, when copies are gone, they are cast for their reduction.
    assert embedding.after_backward_bytes == max(4 * N + 10 * N, 10 * N + 20 * N - 10 * N - 6 * N)
    held = flat_units.fsdp1_states(N, replace(PURE, zero=2))
    kept = flat_units.fsdp1_in_root(held, N, replace(PURE, zero=2), root=N, before=None)
    assert (kept.parameters_bytes, kept.between_bytes) == (held.parameters_bytes, 0)


def test_frozen_units_are_gathered_in_their_own_type_and_have_no_gradients() -> None:
    four = state_types(frameworks()["fsdp_qlora"], "bf16", weights="nf4")
    pair = replace(PURE, types=four, shard=2, data=2)

    held = flat_units.fsdp1_frozen_states(64.0, pair)

    scales = 1 + 4 / 256
    assert held.parameters_bytes == pytest.approx(64 / 2 / 2 + scales, 1e-4)
    assert held.forward_transient_bytes == held.backward_transient_bytes == 2 * 32
    assert held.gradients_bytes == held.after_backward_bytes - 2 * 32 == 0
    on_host = flat_units.fsdp1_frozen_states(64.0, replace(pair, offload="parameters"))
    assert on_host.host_bytes == 16
    assert on_host.parameters_bytes == pytest.approx(scales, 1e-4)
    assert on_host.forward_transient_bytes == 2 * 32 + 16
