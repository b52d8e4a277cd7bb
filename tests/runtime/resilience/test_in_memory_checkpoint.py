"""State in memory that outlives ranks: they agree on the newest step that is whole."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.runtime.checkpoint.state_snapshot import Box, Snapshot, SnapshotPart
from meshwright.runtime.data.sample_digest import SampleDigest
from meshwright.runtime.resilience.in_memory_checkpoint import MEASURED, Mirror
from meshwright.runtime.resilience.replication import to_write
from meshwright.runtime.resilience.shared_memory import Slots, StateSlot, slots_of_node
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
    return Snapshot(step, parts, next_sample=8 * step)


def needed_by(rank: int) -> dict[str, Box]:
    """What two ranks hold; a third number stands for one rank that holds all."""
    if rank == ALL:
        whole = {"weight": (4, 3), "small": (4,), "step": (), "none": (4, 0)}
        return {name: Box(shape, (0,) * len(shape), shape) for name, shape in whole.items()}
    parts = state_of(rank, 0).parts.items()
    return {name: Box(part.shape, part.offset, tuple(part.values.shape)) for name, part in parts}


def mirror_of(memory: dict[str, str], *, run: str) -> Mirror:
    """Return this rank's, where all ranks are on one node."""
    node = slots_of_node(memory)
    assert node is not None
    return Mirror(node, local_rank=dist.get_rank(), ranks=dist.get_world_size(), run=run, plan="a")


def copied(mirror: Mirror, steps: list[int], *, step_s: float = 1e9) -> None:
    for step in steps:
        assert mirror.is_due(step)
        begin_s = time.thread_time()
        used = SampleDigest.of_first(8 * step)
        mirror.copy(state_of(dist.get_rank(), step), used=used, began_s=begin_s, step_s=step_s)


def found_by(mirror: Mirror, rank: int) -> int | None:
    """Return the step that ranks go on from, once all that a rank needs of it is there."""
    kept = mirror.newest(needed_by(rank))
    if kept is None:
        return None
    assert kept.used == SampleDigest.of_first(8 * kept.step)
    assert {one.next_sample for one in kept.snapshots} == {8 * kept.step}
    for name, box in needed_by(rank).items():
        values = torch.full(box.shape, -1.0, dtype=state_of(0, 0).parts[name].values.dtype)
        for one in kept.snapshots:
            if name in one.parts:
                part = one.parts[name]
                spans = zip(part.offset, box.offset, part.values.shape, strict=True)
                values[tuple(slice(a - o, a - o + n) for a, o, n in spans)] = part.values
        halves = [state_of(half, kept.step).parts[name] for half in (0, 1)]
        whole = torch.cat([half.values for half in halves]) if box.shape else halves[0].values
        at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        assert torch.equal(values, whole[at]), name
    return kept.step


def gone_on(memory: dict[str, str]) -> list[Any]:
    """Return what ranks find, one attempt after another."""
    rank = dist.get_rank()
    assert found_by(mirror_of(memory, run="f1"), rank) is None
    first = mirror_of(memory, run="f1")
    # Rank 1 ends before it has a copy of step 7.
    copied(first, [6, 7] if rank == 0 else [6])

    dist.barrier()
    second = mirror_of(memory, run="f2")
    found = [found_by(second, rank)]

    # What was not whole goes first: the sixth stays until the new seventh is there on both.
    copied(second, [7] if rank == 0 else [])
    dist.barrier()
    found.append(found_by(mirror_of(memory, run="f3"), rank))

    # Another plan: each needs all, or they have changed places.
    found.append(found_by(mirror_of(memory, run="f4"), ALL))
    found.append(found_by(mirror_of(memory, run="f4"), 1 - rank))
    return found


ALL = 2


def test_ranks_go_on_from_the_newest_step_that_all_have() -> None:
    with Slots() as slots:
        assert on_ranks(2, gone_on, slots.environment(2)) == 2 * [[6, 6, 6, 6]]


def sent(memory: list[dict[str, str]], missing: int, lost: int | None) -> int | None:
    """Two nodes of a rank each keep each other's copies; one is lost, or its newest copy is.

    A node that takes its place has nothing.
    """
    rank = dist.get_rank()
    nodes = [slots_of_node(one) for one in memory]
    node, partner = nodes[rank], nodes[1 - rank]
    assert node is not None
    assert partner is not None
    assert node.kept is not None
    mirror = Mirror(node, local_rank=0, ranks=1, run="f1", plan="a")
    for step in (6, 8):
        assert mirror.is_due(step)
        used = SampleDigest.of_first(8 * step)
        begin_s = time.thread_time()
        mirror.copy(state_of(rank, step), used=used, began_s=begin_s, step_s=1e9)
        assert not mirror.is_due(step + 1), "it is copied before the last one is kept"
        if step == 6 or missing != rank:
            move(node.own[0], partner.wards[0])
        node.kept.write_step("f1", step, processor_s=0.0)
        dist.barrier()
    if lost == rank:
        node = slots_of_node(memory[2])
        assert node is not None
    return found_by(Mirror(node, local_rank=0, ranks=1, run="f2", plan="a"), rank)


def move(pair: Sequence[StateSlot], ward: Sequence[StateSlot]) -> None:
    """Do what two launchers do."""
    newest = max(pair, key=lambda slot: (slot.label() or {"step": 0})["step"])
    found = newest.contents()
    assert found is not None
    text, content, code = found
    with to_write(ward, json.loads(text)).fill(text, len(content)) as filling:
        filling[0 : len(content)] = content
        filling.commit(code)


@pytest.mark.parametrize(
    ("missing", "lost", "step"), [(ALL, None, 8), (ALL, 0, 8), (1, 1, 6), (0, 1, 8)]
)
def test_a_node_that_is_lost_costs_no_copy_that_its_partner_has(
    missing: int, lost: int | None, step: int
) -> None:
    with Slots() as first, Slots() as second, Slots() as new:
        for slots in (first, second, new):
            slots.begin(epoch=1, wards=1, has_partner=True)
        memory = [slots.environment(1) for slots in (first, second, new)]
        assert on_ranks(2, sent, memory, missing, lost) == [step, step]


def damaged(memory: dict[str, str]) -> int | None:
    mirror = mirror_of(memory, run="f1")
    copied(mirror, [5, 6])
    dist.barrier()
    if dist.get_rank() == 1:
        pair = mirror._node.own[1]
        found = max(pair, key=lambda slot: (slot.read() or ({},))[0]["step"])
        sealed = found.contents()
        assert sealed is not None
        sealed[1][-1] ^= 0xFF
    dist.barrier()
    return found_by(mirror_of(memory, run="f2"), dist.get_rank())


def test_a_copy_that_is_damaged_is_passed_over() -> None:
    with Slots() as slots:
        assert on_ranks(2, damaged, slots.environment(2)) == [5, 5]


def intervals(memory: dict[str, str], first_s: float, then_s: float) -> list[int]:
    """Return how many steps lie between two copies, and then, where steps take another time."""
    mirror = mirror_of(memory, run="f1")
    found = []
    last = MEASURED
    # One rank copies for longer than the other.
    copied(mirror, list(range(1, last + 1)), step_s=first_s * (1 + dist.get_rank()))
    for _ in range(2):
        found.append(next(every for every in range(1, 10**9) if mirror.is_due(last + every)))
        last += found[-1]
        copied(mirror, [last], step_s=then_s * (1 + dist.get_rank()))
    return found


def test_copies_lie_so_far_apart_that_they_cost_little() -> None:
    with Slots() as slots:
        slower, alike = on_ranks(2, intervals, slots.environment(2), 1e9, 1e-4)
    with Slots() as slots:
        faster, _ = on_ranks(2, intervals, slots.environment(2), 1e-4, 1e9)

    assert slower == alike
    assert slower[0] == 1
    assert slower[1] > 10, "it is that of the first copies for ever"
    assert faster[0] > 10
    assert faster[1] == 1


def interval(memory: dict[str, str], calls_s: float, step_s: float) -> int:
    """Return how many steps lie between copies whose calls take so many seconds."""
    mirror = mirror_of(memory, run="f1")
    for step in range(MEASURED):
        used, begin_s = SampleDigest.of_first(8 * step), time.thread_time() - calls_s
        mirror.copy(state_of(dist.get_rank(), step), used=used, began_s=begin_s, step_s=step_s)
    return next(every for every in range(1, 10**9) if mirror.is_due(step + every))


def test_copies_and_what_is_behind_them_take_less_than_a_hundredth() -> None:
    most_measured = 1.82  # times its calls
    with Slots() as slots:
        for every in on_ranks(2, interval, slots.environment(2), 10.0, 1.0):
            assert most_measured * 10.0 / every < 0.01


def test_a_rank_that_is_joined_to_nobody_has_copies_too() -> None:
    with Slots() as slots:
        node = slots_of_node(slots.environment(1))
        assert node is not None
        first = Mirror(node, local_rank=0, ranks=1, run="f1", plan="a")
        for step in (6, 7, 8):
            assert first.is_due(step)
            used = SampleDigest.of_first(8 * step)
            first.copy(state_of(0, step), used=used, began_s=time.thread_time(), step_s=1e9)
        assert first.costs_more
        second = Mirror(node, local_rank=0, ranks=1, run="f2", plan="a")

        kept = second.newest(needed_by(0))

    assert kept is not None
    assert kept.step == 8
    assert torch.equal(kept.snapshots[0].parts["weight"].values, torch.full((2, 3), 80.0))


@pytest.mark.parametrize(("stored_s", "apart"), [(0.0, 1), (3.5, 4)])
def test_copies_lie_as_far_apart_as_they_take_to_the_partner(stored_s: float, apart: int) -> None:
    with Slots() as slots:
        slots.begin(epoch=1, wards=1, has_partner=True)
        node = slots_of_node(slots.environment(1))
        assert node is not None
        assert slots.node.kept is not None
        mirror = Mirror(node, local_rank=0, ranks=1, run="f1", plan="a")
        for step in (0, 2, 4):
            assert mirror.is_due(step)
            used = SampleDigest.of_first(8 * step)
            mirror.copy(state_of(0, step), used=used, began_s=time.thread_time(), step_s=1.0)
            assert not mirror.is_due(step + 1), "it is copied before the partner has the last one"
            slots.node.kept.write_step("f1", step, processor_s=0.0, stored_s=stored_s)
        mirror.copy(state_of(0, 6), used=used, began_s=time.thread_time(), step_s=1.0)

        assert (mirror.every, mirror.stored_steps) == (apart, apart)
        assert not mirror.is_due(6 + apart)
        slots.node.kept.write_step("f1", 6, processor_s=0.0, stored_s=stored_s)
        assert mirror.is_due(6 + apart + 1), "it does not ask again after the next step"
