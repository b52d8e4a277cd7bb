"""Schedules of one stage per rank."""

from __future__ import annotations

from planner.actions import Action, Order


def gpipe(rank: int, micro_batches: int) -> Order:
    """All forwards, then all backwards in the same order (Huang et al., 2019)."""
    return (
        *(Action(rank, "F", m) for m in range(micro_batches)),
        *(Action(rank, "B", m) for m in range(micro_batches)),
    )


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Order:
    """Warm up with as many forwards as stages follow, then alternate (PipeDream-flush, 2021)."""
    warm_up = min(micro_batches, ranks - rank - 1)
    result = [Action(rank, "F", m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        result += [Action(rank, "F", warm_up + m), Action(rank, "B", m)]
    result += [Action(rank, "B", m) for m in range(micro_batches - warm_up, micro_batches)]
    return tuple(result)
