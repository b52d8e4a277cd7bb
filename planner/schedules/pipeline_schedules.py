"""Pipeline schedules: the actions of each rank in order, family by family.

Single: schedules of one stage per rank.

Looped: stages go round the ranks; stage s is on rank s mod P.  Micro-batches go through in groups
of P: a rank runs its first stage on the whole group, then its second stage, and so on.  With V
stages per rank, the k-th forward of a rank is thus

    chunk (k div P) mod V,  micro-batch P (k div P V) + k mod P

and its k-th backward the same with the chunks in reverse.

Folded: stages form a V; rank r has stages r and 2 P - 1 - r.  `down` is a rank's stage on the way
down the V, `up` the one on the way back.  The last stage is on rank 0, so a micro-batch's first
backward begins where its forward began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules.schedule_record import (
    DRAINED,
    LATE,
    SPLIT,
    Action,
    Coefficients,
    Fullest,
    InFlight,
    Kind,
    Order,
    Schedule,
    Shape,
    actions,
    name_with_ahead,
)


def gpipe(rank: int, shape: Shape) -> Order:
    """All forwards, then all backwards in the same order (Huang et al., 2019)."""
    return (
        *actions(rank, "F", range(shape.micro_batches)),
        *actions(rank, "B", range(shape.micro_batches)),
    )


def one_forward_one_backward(rank: int, shape: Shape, ahead: Sequence[int] = ()) -> Order:
    """Warm up with as many forwards as stages follow, then alternate (PipeDream-flush, 2021).

    `ahead` [link] are forwards more, for every link behind the rank: see `with_ahead`.
    """
    micro_batches = shape.micro_batches
    warm_up = min(micro_batches, shape.ranks - rank - 1 + sum(ahead[rank:]))
    forwards = actions(rank, "F", range(micro_batches))
    backwards = actions(rank, "B", range(micro_batches))
    alternating = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *alternating, *backwards[micro_batches - warm_up :])


def _stages_behind(rank: int, shape: Shape) -> InFlight:
    return InFlight(shape.ranks - rank, shape.ranks - rank, 0)


def with_ahead(schedule: Schedule, ahead: tuple[int, ...]) -> Schedule:
    """Return 1F1B whose ranks run ahead of their links; `ahead` [link] are forwards more.

    Under 1F1B rank r begins with P - 1 - r forwards.  Take ranks i to j, n of them, of t_s seconds
    of both passes each, with c_l seconds of a transfer over each link l between them that does not
    hold its sender.  A micro-batch has been from rank i to rank j and back before the n-th next
    forward on rank i; with a_l more forwards ahead of each link, before the (n + Σ a_l)-th.  So a
    micro-batch takes at least

        max over i <= j of (Σ t_s + 2 Σ c_l) / (n + Σ a_l)

    and transfers of alike ranks are hidden where a_l >= 2 c_l / t.  Rank r has P - r + Σ_{l>=r} a_l
    micro-batches in flight.  Sources: eager 1F1B of AlpaComm (Zhuang et al., 2023, section 4), with
    one more for each link; HARP (2025), which counts them by link.

    >>> orders = (with_ahead(ONE_FORWARD_ONE_BACKWARD, (1,)).order(rank, Shape(2, 3))
    ...     for rank in range(2))
    >>> [" ".join(map(str, order)) for order in orders]
    ['0F0 0F1 0F2 0B0 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """

    def in_flight(rank: int, shape: Shape) -> InFlight:
        most = shape.ranks - rank + sum(ahead[rank:])
        return InFlight(most, most, 0)

    return replace(
        schedule,
        name=name_with_ahead(schedule.name, ahead),
        order=partial(one_forward_one_backward, ahead=ahead),
        ahead=ahead,
        in_flight=in_flight,
        # Its counts are the same from one micro-batch more than its longest warm-up on.
        repeats=sum(ahead) <= len(ahead) + 1,
        phi_bound=False,
        no_slower=schedule.name,
        names={},
        settings={},
    )


def _one_for_each_rank(shape: Shape) -> str:
    if shape.micro_batches >= shape.ranks:
        return ""
    return f"at least one for each of its {shape.ranks} ranks, with two versions of the weights"


GPIPE = Schedule(
    name="gpipe",
    order=gpipe,
    coefficients=DRAINED,
    forwards_first=True,
    in_flight=lambda rank, shape: InFlight(shape.micro_batches, shape.micro_batches, 0),
    no_slower="1f1b",
    names={"torchtitan": "GPipe"},
)
ONE_FORWARD_ONE_BACKWARD = Schedule(
    name="1f1b",
    order=one_forward_one_backward,
    coefficients=DRAINED,
    last_waits=False,
    repeats=True,
    in_flight=_stages_behind,
    phi_bound=True,
    with_ahead=with_ahead,
    names={
        "torchtitan": "1F1B",
        "megatron": "forward_backward_pipelining_without_interleaving",
        "nanotron": "1f1b",
    },
)
PIPEDREAM_2BW = Schedule(
    name="pipedream-2bw",
    order=one_forward_one_backward,
    coefficients=Coefficients(
        lambda ranks, micro_batches, largest: (float(micro_batches), 0.0),
        "m and 0 under pipedream-2bw",
    ),
    micro_batches_needed=_one_for_each_rank,
    last_waits=False,
    weight_versions=2,
    repeats=True,
    in_flight=_stages_behind,
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

    In its middle, a forward of one stage is next to a backward of the other, so that a runtime can
    run the communication of one beside the computation of the other.
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
