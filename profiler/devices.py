"""Rates of each rank's device while all others work too: products, copies to and from the host.

All ranks repeat one matrix product for the same time; a device that is slower than its like is hot,
throttled, or shared.  On accelerators copies move pinned memory, and memory is taken in large
pieces until there is no more, which is what training can have of it.
"""

from __future__ import annotations

import gc
import itertools

import torch
import torch.distributed as dist

from meshwright.planner.documents.profile import MeasuredDevice
from meshwright.profiler.clock import Clock, median, spread
from meshwright.runtime.core.object_collectives import all_gather_json

PRODUCT_S = 0.3
LEAST_PRODUCTS = 5
SIDE = {"cpu": 384, "cuda": 4096}
COPY_BYTES = 256 * 2**20
COPIES = 5
PIECES_BYTES = (2**30, 64 * 2**20)


def devices(device: torch.device, *, name: str) -> list[MeasuredDevice]:
    """Measure every rank's device at once; all ranks call it and get all, by rank."""
    clock = Clock(device)
    if dist.is_initialized():
        dist.barrier()
    rates = _product_flops(device, clock)
    to_device, to_host = _copies(device, clock) if device.type == "cuda" else (None, None)
    description = MeasuredDevice(
        name=name,
        rank=dist.get_rank() if dist.is_initialized() else 0,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else None,
        reached_bytes=_reached_bytes(device) if device.type == "cuda" else None,
        flops=median(rates),
        spread=spread(rates),
        host_to_device_bytes_per_s=to_device,
        device_to_host_bytes_per_s=to_host,
    )
    if not dist.is_initialized():
        return [description]
    return [MeasuredDevice.model_validate(of) for of in all_gather_json(description.model_dump())]


def _product_flops(device: torch.device, clock: Clock) -> list[float]:
    side = SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Random, since equal bits use less power and let clocks rise.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    rates: list[float] = []
    torch.matmul(left, right, out=out)
    begin_s = clock.now_s()
    while not rates or clock.now_s() - begin_s < PRODUCT_S:
        # Queued together: a wait behind each would let the device idle before the next.
        moments = [clock.moment()]
        for _ in range(LEAST_PRODUCTS):
            torch.matmul(left, right, out=out)
            moments.append(clock.moment())
        rates += [2 * side**3 / clock.between_s(*pair) for pair in itertools.pairwise(moments)]
    return rates


def _copies(device: torch.device, clock: Clock) -> tuple[float, float]:
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    there.copy_(host)
    to_device = [clock.seconds(lambda: there.copy_(host)) for _ in range(COPIES)]
    to_host = [clock.seconds(lambda: host.copy_(there)) for _ in range(COPIES)]
    return COPY_BYTES / median(to_device), COPY_BYTES / median(to_host)


def _reached_bytes(device: torch.device) -> int:
    """Take all memory that there is, and give it back."""
    held: list[torch.Tensor] = []
    taken = torch.cuda.memory_reserved(device)
    for piece in PIECES_BYTES:
        while True:
            try:
                held.append(torch.empty(piece, dtype=torch.uint8, device=device))
            except torch.cuda.OutOfMemoryError:
                break
            taken += piece
    held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return int(taken)
