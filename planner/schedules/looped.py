"""Schedules whose stages go round the ranks: stage s lies on rank s mod P.

Micro-batches go through in groups of P: a rank runs its first stage on the whole group, then its
second stage, and so on.  With V stages per rank, the k-th forward of a rank is thus

    chunk (k div P) mod V,  micro-batch P (k div P V) + k mod P

and its k-th backward the same with the chunks in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.actions import Action, Kind, Order


def interleaved(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> Order:
    """Interleaved 1F1B (Narayanan et al., 2021, as in Megatron-LM).

    Warms up with 2 (P - 1 - rank) + (V - 1) P forwards, so that each rank's first backward finds
    its gradient there, then alternates.
    """
    warm_up = 2 * (ranks - 1 - rank) + (virtual_stages - 1) * ranks
    forwards = _forwards(rank, ranks, virtual_stages, micro_batches)
    result = forwards[:warm_up]
    for at, backward in enumerate(_backwards("B", forwards, rank, ranks, virtual_stages)):
        result += forwards[warm_up + at : warm_up + at + 1]
        result.append(backward)
    return tuple(result)


def zero_bubble(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> Order:
    """ZB-H1 (one stage per rank) and its interleaved form (Qi et al., 2024).

    Gradients travel back as soon as the I are done, so P - 1 - rank forwards fewer warm up.  Rank r
    does every W r backwards late: then all ranks hold equally many micro-batches, and the W that
    are left at the end fill time in which 1F1B waits.
    """
    warm_up = (ranks - 1 - rank) + (virtual_stages - 1) * ranks
    forwards = _forwards(rank, ranks, virtual_stages, micro_batches)
    weights = _backwards("W", forwards, rank, ranks, virtual_stages)
    result = forwards[:warm_up]
    for at, backward in enumerate(_backwards("I", forwards, rank, ranks, virtual_stages)):
        result += forwards[warm_up + at : warm_up + at + 1]
        result.append(backward)
        if at >= rank:
            result.append(weights[at - rank])
    result += weights[max(0, len(weights) - rank) :]
    return tuple(result)


def _forwards(rank: int, ranks: int, virtual_stages: int, micro_batches: int) -> list[Action]:
    return [
        Action(stage, "F", m)
        for group in range(0, micro_batches, ranks)
        for stage in range(rank, virtual_stages * ranks, ranks)
        for m in range(group, min(group + ranks, micro_batches))
    ]


def _backwards(
    kind: Kind, forwards: Sequence[Action], rank: int, ranks: int, virtual_stages: int
) -> list[Action]:
    last = (virtual_stages - 1) * ranks + 2 * rank
    return [Action(last - stage, kind, m) for stage, _, m in forwards]
