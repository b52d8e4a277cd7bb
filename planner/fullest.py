"""What the stages of a pipeline's rank hold at every moment of its order, and when that is most.

A micro-batch is alive on a stage from F to the end of B or I, and waits from the end of I to W.  A
moment is an action with what is alive and waits beside it.  From 2 P micro-batches on moments are
the same, however many there are: schedules repeat themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.schedule import Kind, orders, rank_of_stage, splits_backward

Counts = NDArray[np.float64]
Indices = NDArray[np.intp]

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """All moments of a rank; stages have places in the order of the model."""

    place: Indices
    """[moment] Of the stage that acts."""
    kind: Indices
    """[moment] Place of its action in `KINDS`."""
    beside: Counts
    """[moment, stage] Micro-batches alive but the one that acts."""
    waiting: Counts
    """[moment, stage]"""
    holding: Counts
    """[moment, stage] Micro-batches alive, the one that acts included; a W has none alive."""


@lru_cache(maxsize=1 << 12)
def moments(
    name: str, rank: int, *, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> Moments:
    """Return the moments of a rank under a schedule.

    >>> found = moments("zb-h1", 0, ranks=2, micro_batches=2)
    >>> "".join(KINDS[kind] for kind in found.kind), found.holding[:, 0].tolist()
    ('FFIWIW', [1.0, 2.0, 2.0, 1.0, 1.0, 0.0])
    """
    stages = ranks * virtual_stages
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual_stages)
    places = {s: at for at, s in enumerate(s for s, r in enumerate(home) if r == rank)}
    order = orders(
        name,
        stages=stages,
        micro_batches=min(micro_batches, 2 * ranks),
        virtual_stages=virtual_stages,
    )[rank]
    place = np.array([places[stage] for stage, _, _ in order])
    kind = np.array([KINDS.index(kind) for _, kind, _ in order])
    acts = place[:, None] == np.arange(virtual_stages)
    begun, backward, split, weight = (acts * (kind == one)[:, None] for one in range(4))
    ended = backward + split
    alive = np.cumsum(begun, axis=0) - np.cumsum(ended, axis=0)
    waiting = np.cumsum(split, axis=0) - np.cumsum(weight, axis=0)
    # Beside an action is what an F has not added yet and what a backward has taken off.
    beside = alive - begun
    return Moments(
        place,
        kind,
        beside.astype(float),
        (waiting - split + weight).astype(float),
        (alive + ended).astype(float),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Fullest:
    """One moment of every rank: with most alive, and of such with most on late stages."""

    holding: Counts
    """[stage of the rank, rank] Micro-batches alive."""
    waiting: Counts
    place: Indices
    """[rank] Of the stage that acts; in a backward."""


@lru_cache(maxsize=1 << 12)
def fullest(name: str, *, ranks: int, micro_batches: int, virtual_stages: int = 1) -> Fullest:
    """Return such moments without going through all of them.

    Looped schedules do their k-th forward and k-th backward as planner.schedules.looped has it;
    folded ones have most alive in the first backward of the stage on the way up.

    >>> fullest("interleaved", ranks=2, micro_batches=4, virtual_stages=2).holding.tolist()
    [[3.0, 2.0], [2.0, 1.0]]
    """
    at = np.arange(ranks)
    if name in ("zbv", "dualpipe-v"):
        down = 2 * ranks - at - (name == "zbv")
        counts = np.minimum(np.stack([down, at + 1]), micro_batches).astype(float)
        return Fullest(counts, np.zeros((2, ranks)), np.ones(ranks, dtype=np.intp))
    split = splits_backward(name)
    warm_up = (1 if split else 2) * (ranks - 1 - at) + (virtual_stages - 1) * ranks
    whole = micro_batches * virtual_stages
    # From when on backwards repeat, or end.
    number = np.arange(min(ranks * virtual_stages, whole))
    chunks = np.arange(virtual_stages)
    begun = _done(np.minimum(warm_up[:, None] + number + 1, whole), chunks, ranks, virtual_stages)
    back = chunks[::-1]
    ended = _done(np.broadcast_to(number, begun.shape[:2]), back, ranks, virtual_stages)
    holding, waiting = begun - ended, np.zeros(begun.shape)
    if split:
        waiting = ended - _done(np.maximum(number - at[:, None], 0), back, ranks, virtual_stages)
    weight = holding @ (1 + 1e-3 * chunks) + 0.3 * waiting.sum(axis=2)
    best = weight.argmax(axis=1)
    place = virtual_stages - 1 - number[best] // ranks % virtual_stages
    return Fullest(holding[at, best].T.copy(), waiting[at, best].T.copy(), place)


def _done(number: NDArray[np.intp], chunks: Indices, ranks: int, virtual: int) -> Counts:
    """[..., stage] Of so many passes of a looped rank, those of each stage in its turn."""
    cycles, rest = np.divmod(number[..., None], ranks * virtual)
    done: Counts = cycles * ranks + np.clip(rest - chunks * ranks, 0, ranks).astype(float)
    return done
