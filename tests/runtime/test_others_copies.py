"""Copies of state in memory are those that another library keeps: LM Resiliency, if it is there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
gemini = pytest.importorskip(
    "lm_resiliency.checkpointing.manager", reason="pip install lm-resiliency"
)

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from meshwright.runtime.checkpoint.state_snapshot import boxes, take_snapshot  # noqa: E402
from meshwright.runtime.data.sample_digest import SampleDigest  # noqa: E402
from meshwright.runtime.resilience.in_memory_checkpoint import Mirror  # noqa: E402
from meshwright.runtime.resilience.shared_memory import Slots, slots_of_node  # noqa: E402
from tests.runtime.ranks import on_ranks  # noqa: E402


def state_of(rank: int) -> dict[str, Tensor]:
    """A rank's tensors of several types."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "weight": torch.randn(33, 7, generator=generator),
        "small": torch.randn(5, generator=generator).bfloat16(),
        "step": torch.tensor(rank, dtype=torch.int64),
        "flags": torch.tensor([True, False, rank == 1]),
    }


def kept_by_both(memory: dict[str, str], folder: str) -> tuple[list[int], bool]:
    """Return the steps that ours and theirs go on from, and whether all bits are the same."""
    rank = dist.get_rank()
    node = slots_of_node(memory)
    assert node is not None
    ours = Mirror(node, local_rank=rank, ranks=2, run="f1", plan="a")
    config = gemini.InMemoryCkptConfig(
        replication_jump=1, disk_flush_interval=0, disk_folder=folder, run_id="f1", pin_memory=False
    )
    theirs = gemini.InMemoryCheckpointManager(config)
    state = state_of(rank)
    for step in (1, 2, 3):
        for tensor in state.values():
            tensor.copy_(tensor.roll(1) if tensor.dtype == torch.bool else tensor * 3 + step)
        snapshot = take_snapshot(state, step=step, next_sample=8 * step, copied=False)
        used, begin_s = SampleDigest.of_first(8 * step), time.thread_time()
        ours.copy(snapshot, used=used, began_s=begin_s, step_s=1e9)
        theirs.save_tensors(list(state.values()), step)
        theirs.maybe_wait()
        theirs.finalize_replication()
    for tensor in state.values():
        tensor.zero_()
    found, loaded = ours.newest(boxes(state)), theirs.load_tensors()
    assert found is not None
    assert loaded is not None
    tensors, step, _ = loaded
    values = {name: part.values for one in found.snapshots for name, part in one.parts.items()}
    same = [
        torch.equal(values[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        for name, tensor in zip(state, tensors, strict=True)
    ]
    theirs.close()
    return [found.step, step], all(same)


@pytest.mark.matrix
@pytest.mark.ranks
def test_both_go_on_from_the_same_bits(tmp_path: Path) -> None:
    with Slots() as slots:
        found = on_ranks(2, kept_by_both, slots.environment(2), str(tmp_path))

    assert found == [([3, 3], True)] * 2
