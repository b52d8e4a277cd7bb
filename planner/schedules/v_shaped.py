"""Schedules whose stages are folded to a V: rank r has stages r and 2 P - 1 - r.

`down` is a rank's stage on the way down the V, `up` the one on the way back.  The last stage lies
on rank 0, so a micro-batch's first backward begins where its forward began.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from meshwright.planner.schedules.actions import Action, Kind, Order
from meshwright.planner.schedules.interleaved import Counts
from meshwright.planner.schedules.schedule_record import SPLIT, Fullest, InFlight, Schedule, Shape


class _Writer:
    """Writes a rank's order; each kind of action of a stage counts its micro-batches up."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._next: dict[tuple[int, Kind], int] = {}
        self._owed: deque[Action] = deque()

    def add(self, stage: int, *kinds: Kind) -> None:
        """Write the next micro-batch of each kind; an I owes its W."""
        for kind in kinds:
            # B and I are the same backward, done in one piece or two.
            key = (stage, "I" if kind == "B" else kind)
            micro_batch = self._next.get(key, 0)
            self._next[key] = micro_batch + 1
            self.order.append(Action(stage, kind, micro_batch))
            if kind == "I":
                self._owed.append(Action(stage, "W", micro_batch))

    def add_owed(self) -> None:
        """Write the oldest W that is owed."""
        self.order.append(self._owed.popleft())


def zbv(rank: int, shape: Shape) -> Order:
    """ZB-V (Qi et al., 2024, section 6): no bubble but the fill where F, I and W take equally long.

    The pattern needs 2 P - 1 micro-batches; with fewer, actions of those that are not there drop
    out.
    """
    ranks, micro_batches, _ = shape
    down, up = rank, 2 * ranks - 1 - rank
    count = max(2 * ranks - 1, micro_batches)
    write = _Writer()
    for _ in range(2 * (ranks - rank) - 1):
        write.add(down, "F")
    for _ in range(rank):
        write.add(up, "F")
        write.add(down, "F")
    for _ in range(ranks - rank):
        write.add(up, "F", "I", "W")
    # By now `down` has done 2 P - 1 - rank forwards, `up` P forwards and P - rank backwards.
    for at in range(count - ranks):
        if 2 * ranks - 1 - rank + at < count:
            write.add(down, "F")
        write.add(down, "I", "W")
        write.add(up, "F", "I", "W")
    for _ in range(rank):
        write.add(down, "I")
        write.add(up, "I")
    for _ in range(ranks - rank):
        write.add(down, "I", "W")
    for _ in range(rank):
        write.add(up, "W")
    for _ in range(rank):
        write.add(down, "W")
    return tuple(action for action in write.order if action.micro_batch < micro_batches)


def dualpipe_v(rank: int, shape: Shape) -> Order:
    """DualPipe-V (DeepSeek-AI, 2024-25), from 2 P micro-batches on.

    In its middle, a forward of one stage stands next to a backward of the other, so that a runtime
    can run the communication of one beside the computation of the other.
    """
    ranks, micro_batches, _ = shape
    down, up = rank, 2 * ranks - 1 - rank
    behind = ranks - 1 - rank
    write = _Writer()
    for _ in range(2 * behind):
        write.add(down, "F")
    for _ in range(rank + 1):
        write.add(down, "F")
        write.add(up, "F")
    for _ in range(behind):
        write.add(up, "I")
        write.add_owed()
        write.add(up, "F")
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        write.add(down, "F")
        write.add(up, "B")
        write.add(up, "F")
        write.add(down, "B")
    for _ in range(behind):
        write.add(up, "B")
        write.add(up, "F")
        write.add(down, "B")
    # From the middle of the drain on, backwards are split: their W fill the waits that follow.
    for at in range(2 * (rank + 1)):
        write.add(down if at % 2 else up, "I" if at > rank else "B")
    for _ in range(behind):
        write.add_owed()
        write.add(down, "I")
    for _ in range(rank + 1):
        write.add_owed()
    return tuple(write.order)


def _two_for_each_rank(shape: Shape) -> str:
    least = 2 * shape.ranks
    return "" if shape.micro_batches >= least else f"at least {least}, 2 for each of its ranks"


def _fuller(shape: Shape, most: int, owed: Counts, deferred: float) -> Fullest:
    """Return the first backward on the way up, or the first after the last one of the drain.

    At the former rank + 1 forwards are done on the way up; on the way down the first rank has done
    `most`, each further one fewer.  At the latter the W of `owed` [stage, rank] wait, and the last
    micro-batches of the ranks from here on are alive on the way down.  The one is taken that counts
    more, with `deferred` for each that waits.
    """
    at = np.arange(shape.ranks)
    alive = np.minimum(np.stack([most - at, at + 1]), shape.micro_batches)
    left = np.stack([shape.ranks - at, 0 * at])
    late = (left + deferred * owed).sum(axis=0) > alive.sum(axis=0)
    late &= shape.micro_batches >= 2 * shape.ranks
    return Fullest(
        np.where(late, left, alive).astype(float),
        np.where(late, owed, 0.0),
        np.where(late, 0, np.ones_like(at)),
    )


def _fullest_zbv(shape: Shape, deferred: float) -> Fullest:
    at = np.arange(shape.ranks)
    return _fuller(shape, shape.stages - 1, np.stack([at, at]), deferred)


def _fullest_dualpipe_v(shape: Shape, deferred: float) -> Fullest:
    at = np.arange(shape.ranks)
    return _fuller(shape, shape.stages, np.stack([at // 2, (at + 1) // 2]), deferred)


ZBV = Schedule(
    name="zbv",
    order=zbv,
    coefficients=SPLIT,
    stages_per_rank=(2, 2),
    placement="v",
    splits_backward=True,
    last_waits=False,
    repeats=True,
    # Fewer than 2 P - 1 micro-batches may have one less in flight.
    in_flight=lambda rank, shape: InFlight(shape.stages, shape.stages, max(2, 2 * rank + 1)),
    fullest=_fullest_zbv,
    names={"torchtitan": "ZBVZeroBubble"},
)
DUALPIPE_V = Schedule(
    name="dualpipe-v",
    order=dualpipe_v,
    coefficients=SPLIT,
    stages_per_rank=(2, 2),
    placement="v",
    micro_batches_needed=_two_for_each_rank,
    splits_backward=True,
    repeats=True,
    in_flight=lambda rank, shape: InFlight(shape.stages + 1, shape.stages + 1, max(2, rank + 1)),
    fullest=_fullest_dualpipe_v,
    names={"torchtitan": "DualPipeV"},
    # Its own overlap of experts' messages does not go with recomputation.
    settings={"torchtitan": ("pipeline_parallel_expert_parallel_overlap = false",)},
)
