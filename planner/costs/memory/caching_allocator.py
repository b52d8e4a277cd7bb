"""Device memory that torch's caching allocator reserves for tensors that come and go.

A size is rounded to 512 bytes.  Up to 1 MiB it comes from segments of 2 MiB, below 10 MiB from
segments of 20 MiB, and from there on from a segment of its own, rounded to 2 MiB.  A request takes
the smallest free block of its pool that is large enough, of several the one with the lowest
address, and leaves the rest of it free if that is at least 512 bytes of a small pool, more than
1 MiB of a large one; else a new segment is asked of the device.  Free neighbours within a segment
are joined, segments are kept.

With expandable segments each pool is one segment that grows by whole pages, of 2 MiB in the small
pool and 20 MiB in the large one, so that what is free at its end counts towards a larger request.

One stream, and a device that always has more memory; nothing rounds to powers of two.

Sources: PyTorch, c10/cuda/CUDACachingAllocator.cpp (round_size, get_pool, get_allocation_size,
get_free_block, should_split, try_merge_blocks, try_allocate_expandable_block) and
c10/core/AllocatorConfig.h; read 2026-11-23.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
ROUNDED = 512
SMALL = MIB
"""Largest request of the small pool."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
"""From this size on a request has a segment of its own."""
OWN_ROUNDED = 2 * MIB


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment, between its neighbours."""

    size: int
    address: int
    """Rising with every byte that its pool reserves."""
    pool: _Pool
    free: bool = True
    before: MemoryBlock | None = None
    behind: MemoryBlock | None = None


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks by size; small requests and large ones have a pool each."""

    small: bool
    blocks: list[MemoryBlock] = field(default_factory=list)
    end: MemoryBlock | None = None
    """The last block of the segment that expands."""

    def insert(self, block: MemoryBlock) -> None:
        insort(self.blocks, block, key=_order)

    def remove(self, block: MemoryBlock) -> None:
        self.blocks.pop(bisect_left(self.blocks, _order(block), key=_order))

    def smallest(self, size: int) -> MemoryBlock | None:
        """Return and remove the smallest free block of `size` bytes or more."""
        at = bisect_left(self.blocks, (size, 0), key=_order)
        return self.blocks.pop(at) if at < len(self.blocks) else None


def _order(block: MemoryBlock) -> tuple[int, int]:
    return block.size, block.address


class CachingAllocator:
    """Reserved and allocated bytes of one device while tensors come and go.

    >>> allocator = CachingAllocator()
    >>> first = allocator.allocate(11 * 2**20)
    >>> allocator.free(first)
    >>> allocator.reserved_bytes // 2**20, allocator.allocated_bytes
    (12, 0)
    >>> _ = allocator.allocate(13 * 2**20)
    >>> allocator.reserved_bytes // 2**20
    26
    """

    def __init__(self, *, expandable: bool = False) -> None:
        """Begin with nothing reserved; segments are `expandable` or of one request each."""
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = 0
        self._expandable = expandable
        self._small, self._large = _Pool(small=True), _Pool(small=False)

    def allocate(self, size_bytes: int) -> MemoryBlock:
        """Return the block of a tensor of `size_bytes`."""
        size = -(-max(size_bytes, 1) // ROUNDED) * ROUNDED
        pool = self._small if size <= SMALL else self._large
        block = pool.smallest(size) or self._new(pool, size)
        rest = block.size - size
        if rest >= ROUNDED if pool.small or self._expandable else rest > SMALL:
            _split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: MemoryBlock) -> None:
        """Give a tensor's block back to its pool, joined with free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        for other in (block.before, block.behind):
            if other is not None and other.free:
                block.pool.remove(other)
                _join(block, other)
        block.pool.insert(block)

    def free_bytes(self) -> list[int]:
        """Return the sizes of free blocks, those of the small pool first."""
        return [block.size for pool in (self._small, self._large) for block in pool.blocks]

    def _new(self, pool: _Pool, size: int) -> MemoryBlock:
        """Return a block of new memory of the device, whose rest is the caller's to split off."""
        if self._expandable:
            return self._grown(pool, size)
        if pool.small:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // OWN_ROUNDED) * OWN_ROUNDED
        address = self.reserved_bytes
        self.reserved_bytes += segment
        return MemoryBlock(size=segment, address=address, pool=pool)

    def _grown(self, pool: _Pool, size: int) -> MemoryBlock:
        """Return the end of the pool's one segment, with as many pages as are missing."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        last = pool.end
        there = last.size if last is not None and last.free else 0
        pages = -(-(size - there) // page) * page
        address = self.reserved_bytes
        self.reserved_bytes += pages
        if last is not None and last.free:
            pool.remove(last)
            last.size += pages
            return last
        block = MemoryBlock(size=pages, address=address, pool=pool, before=last)
        if last is not None:
            last.behind = block
        pool.end = block
        return block


def _split(block: MemoryBlock, size: int) -> None:
    rest = MemoryBlock(
        size=block.size - size,
        address=block.address + size,
        pool=block.pool,
        before=block,
        behind=block.behind,
    )
    if block.behind is not None:
        block.behind.before = rest
    block.behind, block.size = rest, size
    if block.pool.end is block:
        block.pool.end = rest
    block.pool.insert(rest)


def _join(block: MemoryBlock, other: MemoryBlock) -> None:
    block.size += other.size
    if block.before is other:
        block.before, block.address = other.before, other.address
        if other.before is not None:
            other.before.behind = block
    else:
        block.behind = other.behind
        if other.behind is not None:
            other.behind.before = block
    if block.pool.end is other:
        block.pool.end = block
