"""The allocator's model against cases of torch's own tests, by hand, and by laws."""

import random

import pytest

from meshwright.planner.costs.memory.caching_allocator import MIB, CachingAllocator, MemoryBlock

CASES = [
    (512, 2 * MIB, 2 * MIB),
    (MIB, 2 * 2 * MIB, 2 * 2 * MIB),
    (MIB + 512, 20 * MIB, 20 * MIB),
    (10 * MIB - 512, 2 * 20 * MIB, 2 * 20 * MIB),
    (10 * MIB + 512, 3 * 12 * MIB, 2 * 20 * MIB),
]
"""Bytes of a tensor, and what is reserved for the program below: torch, test/test_cuda.py,
test_graph_memory_stats_and_use_result_after_destroy_graph, without and with expandable segments."""


@pytest.mark.parametrize(("size", "reserved", "grown"), CASES)
def test_torchs_own_cases(size: int, reserved: int, grown: int) -> None:
    for expandable, expected in ((False, reserved), (True, grown)):
        allocator = CachingAllocator(expandable=expandable)

        b = allocator.allocate(size)
        for _ in range(5):  # b = b.clone() + 1
            clone = allocator.allocate(size)
            more = allocator.allocate(size)
            allocator.free(clone)
            allocator.free(b)
            b = more

        assert allocator.reserved_bytes == expected
        assert allocator.allocated_bytes == b.size
        # Within a mebibyte a rest stays with its block.
        assert 3 * size <= allocator.peak_allocated_bytes <= 3 * (size + MIB)


def test_a_longer_sequence_finds_no_block_of_a_shorter_one() -> None:
    """By hand: what grows a little at a time keeps a segment of every size but the last in vain."""
    plain, expandable = CachingAllocator(), CachingAllocator(expandable=True)

    for allocator in (plain, expandable):
        for size in (30, 34, 38):
            allocator.free(allocator.allocate(size * MIB))

    assert plain.reserved_bytes == (30 + 34 + 38) * MIB
    assert expandable.reserved_bytes == 2 * 20 * MIB
    # Shorter ones share what a longer one left: 16 and 14 in the smallest that holds them.
    for size in (16, 14):
        plain.allocate(size * MIB)
    assert plain.reserved_bytes == (30 + 34 + 38) * MIB


def test_the_rest_of_a_block_stays_with_it_up_to_a_mebibyte() -> None:
    allocator = CachingAllocator()

    allocator.free(allocator.allocate(12 * MIB))
    kept = allocator.allocate(11 * MIB)

    assert kept.size == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_never_overlap_and_nothing_is_lost(seed: int, *, expandable: bool) -> None:
    rng = random.Random(seed)
    allocator = CachingAllocator(expandable=expandable)
    held: list[tuple[MemoryBlock, int]] = []

    for _ in range(400):
        if held and rng.random() < 0.48:
            allocator.free(held.pop(rng.randrange(len(held)))[0])
        else:
            size = int(2 ** rng.uniform(5, 27))
            held.append((allocator.allocate(size), size))
        assert sum(size for _, size in held) <= allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert all(block.size >= size and not block.free for block, size in held)
    before = allocator.reserved_bytes
    for block, _ in held:
        allocator.free(block)

    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, before)
    # All is joined again: the same requests ask the device for nothing.
    assert len(allocator.free_bytes()) <= before // (2 * MIB)
    assert sum(allocator.free_bytes()) == before


def test_of_equal_free_blocks_the_lowest_is_taken() -> None:
    """So the same requests reserve the same bytes in every process."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(12 * MIB) for _ in range(20)]

    for block in random.Random(0).sample(blocks, len(blocks)):
        allocator.free(block)

    assert [allocator.allocate(12 * MIB) for _ in blocks] == blocks
