"""Host memory for offload: blocks of their own bytes, used anew only behind the last copy."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshwright.planner.errors import LaunchError
from meshwright.runtime.core import pinned_memory as arena_module
from meshwright.runtime.core import pinned_memory as host
from meshwright.runtime.core.pinned_memory import LINE_BYTES, SEGMENT_BYTES, Arena, Memory
from tests.cuda.streams import WORLD, Event, Stream


@pytest.mark.parametrize("seed", range(2))
def test_blocks_that_live_at_once_never_overlap_and_keep_what_is_written(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment_bytes = 2**20  # the rule does not know how many these are, and a GB takes seconds
    monkeypatch.setattr(arena_module, "SEGMENT_BYTES", segment_bytes)
    rng = random.Random(seed)
    arena = Arena(lambda segment: None)
    alive: list[tuple[Memory, int]] = []

    for step in range(300):
        if alive and rng.random() < 0.5:
            alive.pop(rng.randrange(len(alive)))
        size = rng.choice([1, LINE_BYTES, 1000, 5000, 3 * segment_bytes // 4, segment_bytes + 1])
        block = arena.block(size)
        block[:] = step % 251
        alive.append((block, step % 251))

    assert all((block == value).all() for block, value in alive)
    spans = sorted((b.ctypes.data, b.ctypes.data + b.nbytes) for b, _ in alive)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    held = sum(-(-block.nbytes // LINE_BYTES) * LINE_BYTES for block, _ in alive)
    assert arena.resident_bytes == held <= arena.peak_bytes <= arena.reserved_bytes


def test_micro_batches_of_one_shape_take_the_bytes_of_the_fullest_moment_and_no_more() -> None:
    arena = Arena(lambda segment: None)
    sizes = [3 * 2**20 + 512 * at for at in range(20)]  # a power of two would be 4 MiB each

    for in_flight in (1, 4, 2, 4, 4):
        waiting = [[arena.block(size) for size in sizes] for _ in range(in_flight)]
        del waiting

    assert arena.peak_bytes == 4 * sum(sizes)
    assert arena.resident_bytes == 0
    # The end of a segment may be too short for any block, and the last one is not filled.
    assert arena.reserved_bytes <= 1.06 * arena.peak_bytes + SEGMENT_BYTES


def test_each_segment_is_pinned_once() -> None:
    pinned: list[int] = []
    arena = Arena(lambda segment: pinned.append(segment.nbytes))

    for _ in range(3):
        _ = [arena.block(size) for size in (1000, SEGMENT_BYTES // 2, 2 * SEGMENT_BYTES)]

    assert pinned == [SEGMENT_BYTES, 2 * SEGMENT_BYTES]
    assert arena.reserved_bytes == sum(pinned)


def test_what_the_driver_does_not_pin_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(LaunchError, match=r"cannot pin 4,096 bytes.*plan without offload"):
        host.pin(np.zeros(4096, np.uint8))


def test_a_block_is_filled_anew_only_behind_the_copy_out_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    streams = {way: Stream(name=way) for way in ("to host", "to device")}
    monkeypatch.setattr(host, "_side_stream", lambda _, way: streams[way])
    monkeypatch.setattr(host, "pin", lambda segment: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: WORLD.current())
    monkeypatch.setattr(torch.cuda, "stream", WORLD.on)
    waited: list[tuple[str, Event]] = []
    monkeypatch.setattr(Stream, "wait_event", lambda own, event: waited.append((own.name, event)))
    host.arena.cache_clear()
    source, size = torch.arange(1024.0), (1024,)

    first = host._room(size, torch.float32, device)
    out = host._start_copy(source, first, device, "to host")
    back = host._start_copy(first, torch.empty(1024), device, "to device")
    place = first.data_ptr()
    del first, out
    again = host._room(size, torch.float32, device)
    host._start_copy(source, again, device, "to host")

    assert again.data_ptr() == place
    assert [way for way, _ in waited] == ["to device", "to host"]
    assert waited[-1][1] is back.done
    host.arena.cache_clear()
