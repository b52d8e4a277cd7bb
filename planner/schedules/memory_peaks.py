"""Memory of a rank's stages at every moment of its order, and the peak of their sum.

A micro-batch is alive on a stage from F to the end of B or I, and waits from the end of I to W.  A
moment is an action with what is alive and waits beside it.  From 2 P micro-batches on moments are
the same, however many there are, if a schedule repeats itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules import Shape, schedule_of
from meshwright.planner.schedules.schedule import Kind, orders, rank_of_stage
from meshwright.planner.schedules.schedule_record import DEFERRED, LATE, Fullest

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
    if schedule_of(name).repeats:
        micro_batches = min(micro_batches, 2 * ranks)
    stages = ranks * virtual_stages
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual_stages)
    places = {s: at for at, s in enumerate(s for s, r in enumerate(home) if r == rank)}
    order = orders(
        name,
        stages=stages,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
    )[rank]
    place = np.array([places[stage] for stage, _, _ in order])
    kind = np.array([KINDS.index(kind) for _, kind, _ in order])
    acts = place[:, None] == np.arange(virtual_stages)
    begun, backward, split, weight = (acts * (kind == kind_)[:, None] for kind_ in range(4))
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


@lru_cache(maxsize=1 << 12)
def fullest(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    deferred: float = DEFERRED,
) -> Fullest:
    """Return the moment of every rank by which its bytes are bounded from below.

    A micro-batch that waits for W counts `deferred`.

    >>> fullest("interleaved", ranks=2, micro_batches=4, virtual_stages=2).holding.tolist()
    [[3.0, 2.0], [2.0, 1.0]]
    """
    schedule, shape = schedule_of(name), Shape(ranks, micro_batches, virtual_stages)
    if schedule.fullest is not None:
        return schedule.fullest(shape, deferred)
    holding, waiting, place = [], [], []
    for rank in range(ranks):
        peaks = moments(
            name, rank, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages
        )
        backward = np.flatnonzero((peaks.kind == 1) | (peaks.kind == 2))
        late = peaks.holding @ (1 + LATE * np.arange(virtual_stages))
        most = backward[(late + peaks.waiting.sum(axis=1) * deferred)[backward].argmax()]
        holding.append(peaks.holding[most])
        waiting.append(peaks.waiting[most])
        place.append(peaks.place[most])
    return Fullest(np.array(holding).T.copy(), np.array(waiting).T.copy(), np.array(place))
