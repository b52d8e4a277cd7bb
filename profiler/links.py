"""Seconds of each collective by message size, among ranks that this process is one of.

Sizes are those of nccl-tests (see planner.profile.CollectiveCurve).  Groups of one shape work at
the same time, since that is what they do in training; a repetition takes as long as its slowest
rank.  Points are raw medians: no operation is derived from another one, because on gloo and NCCL
alike they do not follow one bandwidth.

Small messages are timed in a row of several, as nccl-tests does, so that the ranks' different
moments of arrival count once; a send is half a round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.cluster import Collective
from planner.profile import CollectiveCurve, LinkPoint
from profiler.clock import Clock, median, slowest, spread

KIB, MIB = 2**10, 2**20
SIZES_BYTES = (KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
LARGEST_BYTES = 64 * MIB
OPERATIONS: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
ROUNDS = 3
"""Each point is visited this often, so that a busy second of the machine spoils no point whole."""
LEAST_REPETITIONS = 2
"""Of a point in a round."""
MOST_IN_A_ROW = 16


# torch 2.13 renamed both, and warns at the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One of several like groups that work at the same time."""

    tier: str
    ranks: tuple[int, ...]
    """This process's group."""
    handle: dist.ProcessGroup


def groups_of(degree: int, tier: str) -> Group:
    """Divide all ranks into groups of neighbours; return this rank's.  All ranks call it."""
    world, own = dist.get_world_size(), dist.get_rank()
    if degree == world:
        return Group(tier=tier, ranks=tuple(range(world)), handle=dist.group.WORLD)
    mine = None
    for start in range(0, world, degree):
        ranks = tuple(range(start, start + degree))
        handle = dist.new_group(list(ranks))
        if own in ranks:
            mine = Group(tier=tier, ranks=ranks, handle=handle)
    assert mine is not None
    return mine


def sizes_up_to(largest_bytes: float) -> tuple[int, ...]:
    """Return the standard sizes, and one more of 64 MiB for who sends messages that need it.

    >>> len(sizes_up_to(1e6)), len(sizes_up_to(20e6))
    (7, 8)
    """
    return SIZES_BYTES + ((LARGEST_BYTES,) if largest_bytes > SIZES_BYTES[-1] else ())


def curves(
    group: Group,
    *,
    device: torch.device,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    operations: Sequence[Collective] = OPERATIONS,
    budget_s: float = 12.0,
    progress: Callable[[float], None] | None = None,
) -> list[CollectiveCurve]:
    """Measure every operation in a group; all ranks of the job call it together.

    Points share what is left of the budget in equal parts.  The first round is always whole, so a
    busy machine takes longer, not less care.
    `progress` is told the share that is done.
    """
    clock = Clock(device)
    begin_s = clock.now_s()
    samples: dict[tuple[int, Collective], list[float]] = {}
    points = [(size, operation) for size in sorted(sizes_bytes) for operation in operations]
    works = {
        (size, operation): _operation(operation, size, group, device) for size, operation in points
    }
    once_s: dict[tuple[int, Collective], float] = {}
    for point in points:
        works[point]()
        (once_s[point],) = slowest([clock.seconds(works[point])])
    for lap in range(ROUNDS):
        for index, point in enumerate(points):
            done = lap * len(points) + index
            (used_s,) = slowest([clock.now_s() - begin_s])
            share_s = (budget_s - used_s) / (ROUNDS * len(points) - done)
            if share_s <= 0 and lap > 0:
                break
            row = max(1, min(MOST_IN_A_ROW, int(share_s / LEAST_REPETITIONS / once_s[point])))
            samples.setdefault(point, []).extend(
                _repetitions(works[point], clock, row=row, budget_s=share_s)
            )
            if progress:
                progress((done + 1) / (ROUNDS * len(points)))
    return [
        CollectiveCurve(
            tier=group.tier,
            operation=operation,
            ranks=2 if operation == "send_recv" else len(group.ranks),
            points=tuple(
                LinkPoint(
                    size_bytes=size,
                    seconds=median(samples[size, operation]),
                    spread=spread(samples[size, operation]),
                )
                for size in sorted(sizes_bytes)
            ),
        )
        for operation in operations
    ]


def _repetitions(
    work: Callable[[], None], clock: Clock, *, row: int, budget_s: float
) -> list[float]:
    """Return seconds of one message, several times; at least twice, then as the budget allows."""
    result: list[float] = []
    used_s = 0.0
    while len(result) < LEAST_REPETITIONS or (used_s < budget_s and len(result) < MOST_IN_A_ROW):
        dist.barrier()
        begin_s = clock.now_s()
        for _ in range(row):
            work()
        (row_s,) = slowest([clock.now_s() - begin_s])
        used_s += row_s
        result.append(row_s / row)
    return result


def _operation(
    operation: Collective, size_bytes: int, group: Group, device: torch.device
) -> Callable[[], None]:
    """Return what performs one operation on buffers of this size."""
    ranks, handle = len(group.ranks), group.handle
    count = max(ranks, size_bytes // 4 // ranks * ranks)
    whole = torch.ones(count, device=device)
    part = torch.ones(count // ranks, device=device)
    if operation == "all_reduce":
        return lambda: _done(dist.all_reduce(whole, group=handle))
    if operation == "all_gather":
        return lambda: _done(_ALL_GATHER(whole, part, group=handle))
    if operation == "reduce_scatter":
        return lambda: _done(_REDUCE_SCATTER(part, whole, group=handle))
    if operation == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: _done(dist.all_to_all_single(other, whole, group=handle))
    if operation == "broadcast":
        return lambda: _done(dist.broadcast(whole, src=group.ranks[0], group=handle))
    return _half_round_trip(whole, group)


def _half_round_trip(buffer: torch.Tensor, group: Group) -> Callable[[], None]:
    """Return one message between neighbours, there or back in turn.

    With an odd number of ranks the last one has nobody to send to and only watches.
    """
    position = group.ranks.index(dist.get_rank())
    partner_position = position ^ 1
    if partner_position >= len(group.ranks):
        return lambda: None
    partner = group.ranks[partner_position]
    turn = [position % 2 == 0]

    def send_or_receive() -> None:
        if turn[0]:
            dist.send(buffer, partner)
        else:
            dist.recv(buffer, partner)
        turn[0] = not turn[0]

    return send_or_receive


def _done(_: object) -> None:
    """Collectives called without async_op return None when they are done."""
