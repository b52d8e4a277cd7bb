"""Schedules whose stages go round the ranks: stage s lies on rank s mod P.

Micro-batches go through in groups of P: a rank runs its first stage on the whole group, then its
second stage, and so on.  With V stages per rank, the k-th forward of a rank is thus

    chunk (k div P) mod V,  micro-batch P (k div P V) + k mod P

and its k-th backward the same with the chunks in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules.actions import Action, Kind, Order, actions
from meshwright.planner.schedules.schedule_record import (
    LATE,
    SPLIT,
    Coefficients,
    Fullest,
    InFlight,
    Schedule,
    Shape,
)

Counts = NDArray[np.intp]


def interleaved_order(rank: int, shape: Shape) -> Order:
    """Interleaved 1F1B (Narayanan et al., 2021, as in Megatron-LM).

    Warms up with 2 (P - 1 - rank) + (V - 1) P forwards, so that each rank's first backward finds
    its gradient there, then alternates.
    """
    warm_up = 2 * (shape.ranks - 1 - rank) + (shape.virtual_stages - 1) * shape.ranks
    forwards = _forwards(rank, shape)
    result = forwards[:warm_up]
    for at, backward in enumerate(_backwards("B", forwards, rank, shape)):
        result += forwards[warm_up + at : warm_up + at + 1]
        result.append(backward)
    return tuple(result)


def zero_bubble(rank: int, shape: Shape) -> Order:
    """ZB-H1 (one stage per rank) and its interleaved form (Qi et al., 2024).

    Gradients travel back as soon as the I are done, so P - 1 - rank forwards fewer warm up.  Rank r
    does every W r backwards late: then all ranks hold equally many micro-batches, and the W that
    are left at the end fill time in which 1F1B waits.
    """
    warm_up = (shape.ranks - 1 - rank) + (shape.virtual_stages - 1) * shape.ranks
    forwards = _forwards(rank, shape)
    weights = _backwards("W", forwards, rank, shape)
    result = forwards[:warm_up]
    for at, backward in enumerate(_backwards("I", forwards, rank, shape)):
        result += forwards[warm_up + at : warm_up + at + 1]
        result.append(backward)
        if at >= rank:
            result.append(weights[at - rank])
    result += weights[max(0, len(weights) - rank) :]
    return tuple(result)


def _forwards(rank: int, shape: Shape) -> list[Action]:
    ranks, micro_batches, virtual_stages = shape
    return [
        action
        for group in range(0, micro_batches, ranks)
        for stage in range(rank, virtual_stages * ranks, ranks)
        for action in actions(stage, "F", range(group, min(group + ranks, micro_batches)))
    ]


def _backwards(kind: Kind, forwards: Sequence[Action], rank: int, shape: Shape) -> list[Action]:
    last = (shape.virtual_stages - 1) * shape.ranks + 2 * rank
    return actions(
        (last - action.stage for action in forwards),
        kind,
        (action.micro_batch for action in forwards),
    )


def _warm_up_and_one(rank: int, shape: Shape) -> InFlight:
    whole = 2 * (shape.ranks - 1 - rank) + (shape.virtual_stages - 1) * shape.ranks + 1
    return InFlight(whole, whole, 0)


def _as_the_first_rank(rank: int, shape: Shape) -> InFlight:
    return InFlight(shape.stages, shape.stages - rank, min(rank + 1, shape.micro_batches))


def _whole_groups(shape: Shape) -> str:
    ranks = shape.ranks
    if shape.micro_batches % ranks == 0:
        return ""
    below = shape.micro_batches // ranks * ranks
    nearby = f"{below} or {below + ranks}" if below else f"{ranks}"
    return f"a multiple of its {ranks} ranks: {nearby}"


def _fullest(shape: Shape, warm_up: Counts, late: Counts, deferred: float) -> Fullest:
    """Return the fullest backwards of ranks that warm up with these forwards.

    Their W come `late` backwards after their I; what waits for W counts `deferred`.
    """
    ranks, micro_batches, virtual = shape
    whole = micro_batches * virtual
    # From when on backwards repeat, or end.
    number, chunks = np.arange(min(ranks * virtual, whole)), np.arange(virtual)
    begun = _passes_done(np.minimum(warm_up[:, None] + number + 1, whole), chunks, ranks)
    ended = _passes_done(number[None], chunks[::-1], ranks)
    alive = begun - ended
    waiting = ended - _passes_done(np.maximum(number - late[:, None], 0), chunks[::-1], ranks)
    weight = alive @ (1 + LATE * chunks) + deferred * waiting.sum(axis=2)
    best = weight.argmax(axis=1)
    at = np.arange(ranks)
    return Fullest(
        alive[at, best].T.astype(float),
        waiting[at, best].T.astype(float),
        virtual - 1 - best // ranks % virtual,
    )


def _passes_done(number: Counts, chunks: Counts, ranks: int) -> Counts:
    """[rank, pass, stage] Of a number of passes of a rank, those of each stage in its turn."""
    cycles, rest = np.divmod(number[..., None], ranks * len(chunks))
    done: Counts = cycles * ranks + np.clip(rest - chunks * ranks, 0, ranks)
    return done


def _fullest_whole(shape: Shape, deferred: float) -> Fullest:
    behind = shape.ranks - 1 - np.arange(shape.ranks)
    none = np.zeros(shape.ranks, dtype=np.intp)
    return _fullest(shape, 2 * behind + (shape.virtual_stages - 1) * shape.ranks, none, deferred)


def _fullest_split(shape: Shape, deferred: float) -> Fullest:
    at = np.arange(shape.ranks)
    warm_up = shape.ranks - 1 - at + (shape.virtual_stages - 1) * shape.ranks
    return _fullest(shape, warm_up, at, deferred)


INTERLEAVED = Schedule(
    name="interleaved",
    order=interleaved_order,
    coefficients=Coefficients(
        lambda ranks, micro_batches, largest: (micro_batches - largest, largest),
        "m-p and p interleaved, p being the largest stage's part of a rank",
    ),
    stages_per_rank=(2, None),
    micro_batches_needed=_whole_groups,
    last_waits=False,
    repeats=True,
    in_flight=_warm_up_and_one,
    fullest=_fullest_whole,
    names={
        "torchtitan": "Interleaved1F1B",
        "megatron": "forward_backward_pipelining_with_interleaving",
    },
)
ZB_H1 = Schedule(
    name="zb-h1",
    order=zero_bubble,
    coefficients=SPLIT,
    splits_backward=True,
    last_waits=False,
    repeats=True,
    in_flight=_as_the_first_rank,
    fullest=_fullest_split,
)
INTERLEAVED_ZB = Schedule(
    name="interleaved-zb",
    order=zero_bubble,
    coefficients=SPLIT,
    stages_per_rank=(2, None),
    micro_batches_needed=_whole_groups,
    splits_backward=True,
    last_waits=False,
    repeats=True,
    in_flight=_as_the_first_rank,
    fullest=_fullest_split,
    names={"torchtitan": "InterleavedZeroBubble"},
)
