"""Overheads: how seconds seen are divided, by hand; and that a machine gives sensible ones."""

import pytest
import torch
import torch.distributed as dist

from meshwright.planner.documents.profile import Overheads
from meshwright.profiler import links, overheads
from meshwright.profiler.chain import Chain
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")
SIZES = {"gathered_bytes": 2.0, "reduced_bytes": 4.0}


def test_collectives_that_hide_whole_are_overlap_of_one() -> None:
    found = overheads.sharing_of(gather=(0.0, 2.0), reduces=((-0.1, 2.0),), **SIZES)

    assert found == overheads.ShardingOverhead(
        overlap=1.0, gather_copy_s_per_byte=0.0, reduce_copy_s_per_byte=0.0
    )


def test_what_is_seen_beyond_the_collectives_is_copies() -> None:
    found = overheads.sharing_of(gather=(6.0, 2.0), reduces=((4.0, 2.0), (9.0, 1.0)), **SIZES)

    assert found == overheads.ShardingOverhead(
        overlap=0.0, gather_copy_s_per_byte=2.0, reduce_copy_s_per_byte=1.25
    )


def test_a_pipeline_as_fast_as_its_layers_adds_nothing() -> None:
    assert overheads.action_s(
        0.1, forward_s=[0.1, 0.1], backward_s=[0.2, 0.2], transfer_s=0.0
    ) == pytest.approx(0.0, abs=1e-9)


def measured() -> Overheads:
    model = cases.transformer()
    world = dist.get_world_size()
    curves = links.curves(
        links.groups_of(world, "memory"),
        device=CPU,
        sizes_bytes=(links.KIB, links.MIB),
        budget_s=0.3,
    )
    chain = Chain(model, seq_len=16, precision="fp32", tensor=1, device=CPU)
    return overheads.overheads(chain, model, curves, device=CPU)


@pytest.mark.matrix
@pytest.mark.ranks
def test_two_ranks_find_overheads_that_a_machine_can_have() -> None:
    first, second = on_ranks(2, measured)

    assert first == second
    assert 0 < first.step_s < 1
    assert 0 < first.optimizer_s_per_parameter < 1e-5
    assert 0 <= first.pipeline_action_s < 0.5
    assert 0 <= first.shard_unit_s < 0.5
    assert 0 <= first.overlap <= 1
