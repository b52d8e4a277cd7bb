"""What the ranks of a pipeline hold at the moments by which their bytes are bounded from below.

A rank of one stage with whole backwards has its most micro-batches in flight.  Any other may be
fullest at one of two moments (planner.schedules.memory_peaks): with most alive, or, where layers
recompute much, with most that waits for W.  `binding` says which of the two a rank's layers need
more room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.costs.layout_costs import counted_by_rank
from meshwright.planner.costs.memory.rank_memory import in_flight_at_most
from meshwright.planner.documents.plan import Layout
from meshwright.planner.schedules.memory_peaks import fullest
from meshwright.planner.schedules.schedule import rank_of_stage, splits_backward
from meshwright.planner.schedules.schedule_record import DEFERRED, LEAN
from meshwright.planner.search.partition.stage_counts import shares_of

Floats = NDArray[np.float64]


class MemoryMoment(NamedTuple):
    """One moment of every rank; counts of micro-batches are [stage of the rank, rank] or [rank]."""

    alive: Floats
    waiting: Floats
    received: Floats
    """Of all stages that receive anything, alive: what came may be among what layers store."""
    sent: Floats
    """The same of stages that send."""
    first_acts: Floats
    """1 where the stage acts that has the model's first layer, of ranks of several stages."""
    last_acts: Floats
    """1 where the model's last layer acts."""
    bare: Floats
    """1 where none of the like layers may act."""

    def of_ranks(self, ranks: NDArray[np.intp]) -> MemoryMoment:
        """Return those of some ranks."""
        return MemoryMoment(*(column[..., ranks] for column in self))

    @staticmethod
    def together(moments: Sequence[MemoryMoment]) -> MemoryMoment:
        """Return the ranks of several pipelines in a row, with as many stages as any has."""
        depth = max(len(load.alive) for load in moments)
        some = [
            load._replace(
                alive=_pad_stages(load.alive, depth), waiting=_pad_stages(load.waiting, depth)
            )
            for load in moments
        ]
        return MemoryMoment(
            *(np.concatenate(columns, axis=-1) for columns in zip(*some, strict=True))
        )


@lru_cache(maxsize=1 << 12)
def loads_of(
    kinds: tuple[str, ...], schedule: str, ranks: int, micro_batches: int, virtual_stages: int
) -> tuple[MemoryMoment, ...]:
    """Return the moments of ranks that share a chain of `kinds`, the one with most alive first."""
    layout = Layout(
        pipeline=ranks,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
    )
    if not counted_by_rank(layout):
        return (_of_one(layout),)
    weights = (DEFERRED, LEAN) if splits_backward(schedule) else (DEFERRED,)
    return tuple(_of_several(kinds, layout, deferred) for deferred in weights)


def _of_one(layout: Layout) -> MemoryMoment:
    ranks, at = layout.pipeline, np.arange(layout.pipeline)
    alive = np.array([float(in_flight_at_most(layout, rank)) for rank in range(ranks)])
    # Where all forwards come first, whole gradients never lie beside all micro-batches.
    backward = alive - ((alive == layout.micro_batches) & (alive > 1))
    return MemoryMoment(
        alive=backward[None],
        waiting=np.zeros((1, ranks)),
        received=alive * (at > 0),
        sent=alive * (at < ranks - 1),
        first_acts=np.zeros(ranks),
        last_acts=1.0 * (at == ranks - 1),
        bare=np.zeros(ranks),
    )


def _of_several(kinds: tuple[str, ...], layout: Layout, deferred: float) -> MemoryMoment:
    name, ranks, virtual = layout.schedule, layout.pipeline, layout.virtual_stages
    most = fullest(
        name,
        ranks=ranks,
        micro_batches=layout.micro_batches,
        virtual_stages=virtual,
        deferred=deferred,
    )
    home = rank_of_stage(name, stages=layout.stages, virtual_stages=virtual)
    first, last = (1.0 * (np.arange(ranks) == home[end]) for end in (0, -1))
    first_acts, last_acts = first * (most.place == 0), last * (most.place == virtual - 1)
    shares = shares_of(kinds, name, ranks, virtual) if virtual > 1 else None
    bare = np.zeros(ranks)
    if shares is not None:
        bare = np.maximum(first_acts, last_acts if shares.folded else 0.0)
        bare = np.maximum(bare, last if shares.is_relieved(home[-1]) else 0.0)
    alive = most.holding.sum(axis=0)
    return MemoryMoment(
        alive=most.holding,
        waiting=most.waiting,
        received=alive - first * most.holding[0],
        sent=alive - last * most.holding[-1],
        first_acts=first_acts,
        last_acts=last_acts,
        bare=bare,
    )


def binding(
    early: MemoryMoment,
    late: MemoryMoment,
    *,
    room_bytes: Floats,
    sent_bytes: Floats,
    resident: Floats,
    kept: Floats,
    least_stored: Floats,
    most_stored: Floats,
    depths: NDArray[np.intp] | int,
) -> MemoryMoment:
    """Return of every rank the moment at which like layers need more room; figures are [rank].

    `room_bytes` are those of one like layer, which has the others, and `sent_bytes` its part of
    what is stored of a micro-batch that was sent; ranks have `depths` stages.  At the early moment
    it may store so much of what is alive as fits.
    """
    alive, alive_late = (load.alive.sum(axis=0) / depths for load in (early, late))
    beside, beside_late = (
        load.waiting.sum(axis=0) / depths * kept + load.sent * sent_bytes for load in (early, late)
    )
    stored = np.clip((room_bytes - resident - beside) / alive, least_stored, most_stored)
    bind = alive_late * stored + beside_late > alive * stored + beside
    return MemoryMoment(*(np.where(bind, b, a) for a, b in zip(early, late, strict=True)))


def _pad_stages(numbers: Floats, depth: int) -> Floats:
    """[stage, rank] Numbers for as many stages as any rank has."""
    padded = np.zeros((depth, numbers.shape[1]))
    padded[: len(numbers)] = numbers
    return padded
