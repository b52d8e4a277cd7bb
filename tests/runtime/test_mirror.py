"""State in memory that outlives ranks: they agree on the newest step that is whole."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.mirror import MEASURED, Mirror
from runtime.slots import Slots, slots_of_node
from runtime.snapshot import Snapshot, SnapshotPart
from tests.runtime.ranks import on_ranks

pytestmark = pytest.mark.ranks


def state_of(rank: int, step: int) -> Snapshot:
    """Half of a tensor, a tensor of two bytes an element, and a number."""
    half = torch.full((2, 3), 10.0 * step + rank)
    parts = {
        "weight": SnapshotPart((4, 3), (2 * rank, 0), half),
        "small": SnapshotPart((4,), (2 * rank,), torch.tensor([step, rank], dtype=torch.bfloat16)),
        "step": SnapshotPart((), (), torch.tensor(step)),
        "none": SnapshotPart((4, 0), (2 * rank, 0), torch.empty(2, 0)),
    }
    return Snapshot(step, parts)


def mirror_of(memory: dict[str, str], *, run: str, plan: str = "a plan", node: int = 0) -> Mirror:
    """Return this rank's; `node` says how many local ranks a node has, 0 that there is one node."""
    slots = slots_of_node(memory)
    rank = dist.get_rank()
    own = slots[rank : rank + 1] if node else slots
    return Mirror(own, local_rank=0 if node else rank, run=run, plan=plan)


def copied(mirror: Mirror, steps: list[int], *, step_s: float = 1e9) -> None:
    for step in steps:
        assert mirror.is_due(step)
        begin_s = time.perf_counter()
        mirror.copy(
            state_of(dist.get_rank(), step), sample=8 * step, began_s=begin_s, step_s=step_s
        )


def gone_on(memory: dict[str, str]) -> list[Any]:
    """Return what ranks find, one attempt after another."""
    rank = dist.get_rank()
    assert mirror_of(memory, run="first").newest() is None
    first = mirror_of(memory, run="first")
    # Rank 1 ends before it has a copy of step 7.
    copied(first, [6, 7] if rank == 0 else [6])

    found = []
    dist.barrier()
    second = mirror_of(memory, run="second")
    kept = second.newest()
    assert kept is not None
    found.append((kept.step, kept.sample, len(kept.snapshots)))
    for name, part in kept.snapshots[0].parts.items():
        expected = state_of(rank, 6).parts[name]
        assert torch.equal(part.values, expected.values), name
        assert (part.shape, part.offset) == (expected.shape, expected.offset)
        assert part.values.dtype == expected.values.dtype

    # What was not whole goes first: the sixth stays until the new seventh is there on both.
    copied(second, [7] if rank == 0 else [])
    dist.barrier()
    third = mirror_of(memory, run="third")
    kept = third.newest()
    assert kept is not None
    found.append((kept.step, kept.sample, len(kept.snapshots)))

    # Another plan needs the parts of all ranks, which one node has and one of two has not.
    other = mirror_of(memory, run="fourth", plan="another").newest()
    assert other is not None
    found.append((other.step, other.sample, len(other.snapshots)))
    found.append(mirror_of(memory, run="fourth", plan="another", node=1).newest())
    apart = mirror_of(memory, run="fourth", node=1).newest()
    found.append(None if apart is None else apart.step)
    return found


def test_ranks_go_on_from_the_newest_step_that_all_have() -> None:
    with Slots() as slots:
        found = on_ranks(2, gone_on, slots.environment(2))

    assert found == 2 * [[(6, 48, 1), (6, 48, 1), (6, 48, 2), None, 6]]


def damaged(memory: dict[str, str]) -> int:
    mirror = mirror_of(memory, run="first")
    copied(mirror, [5, 6])
    dist.barrier()
    if dist.get_rank() == 1:
        found = max(slots_of_node(memory)[1], key=lambda slot: (slot.read() or ({},))[0]["step"])
        with found._file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"\xff")
    dist.barrier()
    kept = mirror_of(memory, run="second").newest()
    return -1 if kept is None else kept.step


def test_a_copy_that_is_damaged_is_passed_over() -> None:
    with Slots() as slots:
        assert on_ranks(2, damaged, slots.environment(2)) == [5, 5]


def interval(memory: dict[str, str], step_s: float) -> int:
    mirror = mirror_of(memory, run="first")
    # One rank copies for longer than the other.
    copied(mirror, list(range(1, MEASURED + 1)), step_s=step_s * (1 + dist.get_rank()))
    last = MEASURED
    return next(every for every in range(1, 10**9) if mirror.is_due(last + every))


def test_copies_lie_so_far_apart_that_they_cost_little() -> None:
    with Slots() as slots:
        often, again = on_ranks(2, interval, slots.environment(2), 1e9)
        seldom, alike = on_ranks(2, interval, slots.environment(2), 1e-4)

    assert (often, again) == (1, 1)
    assert seldom == alike > 10
