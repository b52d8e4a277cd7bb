"""Transfers between stages that poll, against a replay of the engine that does."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator

import pytest

from meshwright.planner.catalog import framework
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.hardware_rates import rates
from meshwright.planner.documents.plan import Job, Layout

MESSAGES = {"activation": 4, "gradient": 2}
"""Of metadata: two of each tensor; an activation goes with its mask."""
Step = tuple[str, int, float]


def sent(peer: int, what: str) -> list[Step]:
    return [("send", peer, 0.0)] * MESSAGES[what]


def received(peer: int, what: str) -> list[Step]:
    return [("receive", peer, 0.0)] * MESSAGES[what]


def program(rank: int, ranks: int, micro_batches: int, forward_s: float) -> Iterator[Step]:
    """Yield what nanotron's OneForwardOneBackwardPipelineEngine does on a rank, in its order."""
    first, last = rank == 0, rank == ranks - 1
    ahead, owed = ranks - rank - 1, 0
    for index in range(micro_batches):
        if not first:
            yield from received(rank - 1, "activation")
            if owed:
                yield from sent(rank - 1, "gradient")
                owed -= 1
        yield "compute", 0, forward_s
        if not last:
            yield from sent(rank + 1, "activation")
        if index >= ahead:
            if not last:
                yield from received(rank + 1, "gradient")
            yield "compute", 0, 2 * forward_s
            owed += not first
    for _ in range(owed):
        yield from sent(rank - 1, "gradient")
    for _ in range(ahead):
        yield from received(rank + 1, "gradient")
        yield "compute", 0, 2 * forward_s
        if not first:
            yield from sent(rank - 1, "gradient")


def replayed_s(ranks: int, micro_batches: int, forward_s: float, polled_s: float) -> float:
    """Seconds of a step: who sends and who receives each look every `polled_s` for their match."""
    programs = [list(program(rank, ranks, micro_batches, forward_s)) for rank in range(ranks)]
    at, ends = [0] * ranks, [0.0] * ranks
    waiting: dict[tuple[int, int, str], deque[tuple[int, float]]] = defaultdict(deque)
    clock = [(0.0, rank) for rank in range(ranks)]
    while clock:
        now, rank = heapq.heappop(clock)
        if at[rank] == len(programs[rank]):
            ends[rank] = now
            continue
        kind, peer, seconds = programs[rank][at[rank]]
        if kind == "compute":
            at[rank] += 1
            heapq.heappush(clock, (now + seconds, rank))
            continue
        way = (rank, peer) if kind == "send" else (peer, rank)
        other = waiting[(*way, "receive" if kind == "send" else "send")]
        if not other:
            waiting[(*way, kind)].append((rank, now))
            continue
        matched_s = now + 1e-4
        for one, since in ((rank, now), other.popleft()):
            looks = max(1, -(-(matched_s - since) // polled_s))
            at[one] += 1
            heapq.heappush(clock, (since + looks * polled_s, one))
    assert all(at[rank] == len(programs[rank]) for rank in range(ranks))
    return max(ends)


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(2, 4), (2, 16), (4, 8), (4, 32), (8, 32), (16, 64)]
)
def test_a_step_sleeps_as_long_as_its_engine_replayed(ranks: int, micro_batches: int) -> None:
    job = Job(seq_len=4096, global_batch=256)
    cluster = resolve_cluster("64x8xh100-sxm-80gb")
    layout = Layout(pipeline=ranks, micro_batches=micro_batches)
    found = rates(cluster, job, None, framework("nanotron+polled-transfers")).polled_s(layout)

    computed_s = 3 * 0.02 * (micro_batches + ranks - 1)
    assert found == pytest.approx(replayed_s(ranks, micro_batches, 0.02, 0.1) - computed_s, rel=0.2)
    assert rates(cluster, job, None, framework("nanotron")).polled_s(layout) == 0.0
