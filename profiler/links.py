"""Seconds of each collective by message size, among ranks that this process is one of.

Sizes are those of nccl-tests (see planner.documents.profile.CollectiveCurve).  Groups of one shape
work at the same time, since that is what they do in training; a repetition takes as long as its
slowest rank.  Points are raw medians: no operation is derived from another one, because on gloo and
NCCL alike they do not follow one bandwidth.  Lines through them are fitted by
meshwright.planner.costs.alpha_beta_fit.

Small messages are timed in a row of several, as nccl-tests does, so that the ranks' different
moments of arrival count once; a send is half a round trip.

Between nodes a sweep ends where a message would take too long: by then seconds grow with the size.
Pairs of nodes are measured in rounds in which every node talks to one other, both ways in turn; the
rate is the slope between two sizes, which neither latency nor a bucket that was full changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.planner.costs.alpha_beta_fit import fit_link
from meshwright.planner.documents.cluster import Collective
from meshwright.planner.documents.profile import CollectiveCurve, LinkPoint, NodePair
from meshwright.profiler.clock import Clock, median, slowest, spread
from meshwright.runtime.core.object_collectives import all_gather_json

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
"""Number of visits to each point, so that a busy second of the machine spoils no point entirely."""
LEAST_REPETITIONS = 2
"""Smallest number of repetitions of a point in a round."""
MOST_IN_A_ROW = 16
LONGEST_S = 1.0
"""Seconds above which messages of more than 1 MiB are left out."""
AGAIN = 4
"""Number of messages that must be slow before the next size is skipped."""
PAIR_S = 0.04
PAIR_BYTES = 16 * MIB
"""Messages between two nodes grow until one takes so long, or is so large."""
LEAST_PAIRS = 5
TARGET_SPREAD = 0.1


# torch 2.13 renamed both, and warns at the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One of several like groups that work at the same time."""

    tier: str
    ranks: tuple[int, ...]
    """This process's group."""
    handle: dist.ProcessGroup
    inner: int = 1
    """Neighbours in it that a faster tier joins."""


def groups_of(degree: int, tier: str, *, stride: int = 1, inner: int = 1) -> RankGroup:
    """Divide all ranks into groups, `stride` apart; return this rank's.  All ranks call it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if degree == world:
        everyone = tuple(range(world))
        everybody = dist.group.WORLD
        assert everybody is not None, "no process group"
        return RankGroup(tier=tier, ranks=everyone, handle=everybody, inner=inner)
    mine = None
    for ranks in members(world, degree, stride):
        handle = dist.new_group(list(ranks))
        if rank in ranks:
            mine = RankGroup(tier=tier, ranks=ranks, handle=handle, inner=inner)
    assert mine is not None
    return mine


def members(world: int, degree: int, stride: int) -> list[tuple[int, ...]]:
    """Return the ranks of all groups.

    >>> members(8, 2, 2)
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    """
    return [
        tuple(range(start + offset, start + offset + degree * stride, stride))
        for start in range(0, world, degree * stride)
        for offset in range(stride)
    ]


def sizes_up_to(largest_bytes: float) -> tuple[int, ...]:
    """Return the standard sizes, and one more of 64 MiB for who sends messages that need it.

    >>> len(sizes_up_to(1e6)), len(sizes_up_to(20e6))
    (7, 8)
    """
    return SIZES_BYTES + ((LARGEST_BYTES,) if largest_bytes > SIZES_BYTES[-1] else ())


def curves(
    group: RankGroup,
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
    `progress` gets the share that is done.
    """
    clock = Clock(device)
    begin_s = clock.now_s()
    samples: dict[tuple[int, Collective], list[float]] = {}
    if group.inner > 1:
        operations = [operation for operation in operations if operation != "send_recv"]
    works: dict[tuple[int, Collective], Callable[[], None]] = {}
    once_s: dict[tuple[int, Collective], float] = {}
    for operation in operations:
        seen: list[tuple[int, float]] = [(0, 0.0)]
        for size in sorted(sizes_bytes):
            if size > MIB and _straight_on(seen, size) > LONGEST_S:
                # Other programs can only add time: perhaps the last message was disturbed.
                last, seconds = seen[-1]
                again = [clock.seconds(works[last, operation]) for _ in range(AGAIN)]
                seen[-1] = (last, min(seconds, slowest([min(again)])[0]))
                if _straight_on(seen, size) > LONGEST_S:
                    break
            works[size, operation] = _operation(operation, size, group, device)
            works[size, operation]()
            (once_s[size, operation],) = slowest([clock.seconds(works[size, operation])])
            seen.append((size, once_s[size, operation]))
    points = sorted(works, key=lambda point: (point[0], operations.index(point[1])))
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
    result = []
    for operation in operations:
        measured = tuple(
            LinkPoint(
                size_bytes=size,
                seconds=median(samples[size, operation]),
                spread=spread(samples[size, operation]),
            )
            for size in sorted(sizes_bytes)
            if (size, operation) in samples
        )
        result.append(
            CollectiveCurve(
                tier=group.tier,
                operation=operation,
                ranks=2 if operation == "send_recv" else len(group.ranks),
                inner=group.inner,
                points=measured,
                fit=fit_link(measured),
            )
        )
    return result


def _straight_on(seen: Sequence[tuple[int, float]], size_bytes: int) -> float:
    """Seconds at the next size, by those of the last two  [(bytes, seconds), ...].

    >>> _straight_on([(0, 0.0), (10, 2.0), (20, 3.0)], 40)
    5.0
    """
    if len(seen) < 2:
        return 0.0
    (before_bytes, before_s), (last_bytes, last_s) = seen[-2:]
    slope = max(0.0, last_s - before_s) / (last_bytes - before_bytes)
    return last_s + slope * (size_bytes - last_bytes)


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
    operation: Collective, size_bytes: int, group: RankGroup, device: torch.device
) -> Callable[[], None]:
    """Return the function that performs one operation on buffers of this size."""
    ranks, handle = len(group.ranks), group.handle
    count = max(ranks, size_bytes // 4 // ranks * ranks)
    whole = torch.ones(count, device=device)
    part = torch.ones(count // ranks, device=device)
    if operation == "all_reduce":
        return lambda: _finish(dist.all_reduce(whole, group=handle))
    if operation == "all_gather":
        return lambda: _finish(_ALL_GATHER(whole, part, group=handle))
    if operation == "reduce_scatter":
        return lambda: _finish(_REDUCE_SCATTER(part, whole, group=handle))
    if operation == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: _finish(dist.all_to_all_single(other, whole, group=handle))
    if operation == "broadcast":
        return lambda: _finish(dist.broadcast(whole, src=group.ranks[0], group=handle))
    return _half_round_trip(whole, group)


def _half_round_trip(buffer: torch.Tensor, group: RankGroup) -> Callable[[], None]:
    """Return one message between neighbours, there or back in turn.

    With an odd number of ranks the last one has no partner and only watches.
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


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which every node meets one other, until each has met all: the circle method.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    circle = list(range(nodes + nodes % 2))
    result = []
    for _ in range(len(circle) - 1):
        met = [(circle[i], circle[-1 - i]) for i in range(len(circle) // 2)]
        result.append([pair for pair in met if max(pair) < nodes])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return result


def pairs(
    first_ranks: Sequence[int],
    *,
    device: torch.device,
    budget_s: float,
    progress: Callable[[float], None] | None = None,
) -> list[NodePair]:
    """Measure messages between the first ranks of all nodes, both ways; all ranks call it."""
    rank = dist.get_rank()
    node = first_ranks.index(rank) if rank in first_ranks else None
    pairs: list[NodePair] = []
    met = rounds(len(first_ranks))
    for index, meetings in enumerate(met):
        for first, other in meetings:
            for source, target in ((first, other), (other, first)):
                if node in (source, target):
                    peer = first_ranks[target if node == source else source]
                    pair = _one_way(
                        sends=node == source,
                        peer=peer,
                        device=device,
                        budget_s=budget_s / len(met) / 2,
                    )
                    if pair is not None:
                        pairs.append(pair.model_copy(update={"source": source, "target": target}))
        dist.barrier()
        if progress:
            progress((index + 1) / len(met))
    everyone = all_gather_json([pair.model_dump() for pair in pairs])
    every_pair = [NodePair.model_validate(pair) for of_rank in everyone for pair in of_rank]
    return sorted(every_pair, key=lambda p: (p.source, p.target))


def _one_way(*, sends: bool, peer: int, device: torch.device, budget_s: float) -> NodePair | None:
    """Send, or receive what the peer sends; the sender returns what it measured.

    Every message is answered, so that a time ends when all has arrived.
    """
    clock = Clock(device)
    answer = torch.zeros(1, device=device)
    state = torch.zeros(2, dtype=torch.int64, device=device)  # bytes to send next, 0: done

    def sent_s(size_bytes: int) -> float:
        """Seconds from sending a number of bytes to the answer."""
        state[0] = size_bytes
        dist.send(state, peer)
        buffer = torch.ones(max(1, size_bytes // 4), device=device)
        dist.recv(answer, peer)
        begin_s = clock.now_s()
        dist.send(buffer, peer)
        dist.recv(answer, peer)
        return clock.now_s() - begin_s

    if not sends:
        while True:
            dist.recv(state, peer)
            size_bytes = int(state[0])
            if size_bytes == 0:
                return None
            buffer = torch.empty(max(1, size_bytes // 4), device=device)
            dist.send(answer, peer)
            dist.recv(buffer, peer)
            dist.send(answer, peer)
    sent_s(KIB)
    latency_s = median([sent_s(4) for _ in range(MOST_IN_A_ROW)]) / 2
    small = MIB
    while small < PAIR_BYTES and sent_s(small) < PAIR_S:
        small *= 2
    short_s: list[float] = []
    long_s: list[float] = []
    begin_s = clock.now_s()
    while len(long_s) < LEAST_PAIRS or (
        clock.now_s() - begin_s < budget_s
        and len(long_s) < MOST_IN_A_ROW
        and spread(long_s) > TARGET_SPREAD
    ):
        short_s.append(sent_s(small))
        long_s.append(sent_s(3 * small))
    state[0] = 0
    dist.send(state, peer)
    # Other programs on the two nodes can only add time; the fastest messages show the cable.
    return NodePair(
        source=0,
        target=0,
        bytes_per_s=2 * small / max(min(long_s) - min(short_s), 1e-9),
        latency_s=latency_s,
        spread=spread(long_s),
    )


def _finish(_: object) -> None:
    """Collectives called without async_op return None when they are done."""
