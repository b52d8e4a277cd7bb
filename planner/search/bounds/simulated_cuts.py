"""The least simulated step of one layout over all its cuts, by paths that stay with one rank.

Two kinds of paths (`planner.schedules.steady_state`) bound the step T of m micro-batches at all
stage times.

Straight: a rank begins with the forward of its first stage, which the first micro-batch reaches
through the first stages of the ranks before; behind its last way back to the stage before, that
micro-batch goes back through them.  With p_s seconds of a forward and a way back of the first stage
of rank s, c the latency between ranks, and σ_r what rank r does once,

    T >= Σ_{s<r} (p_s + 2 c) + o_r + σ_0        T >= m t_r + σ_r                               (1)

o_r being all that rank r does, m t_r, but the W behind its last way back.

Rounds, under 1F1B with m >= 2 P: behind the backward of micro-batch j rank 0 begins micro-batch
j + P.  A path that follows micro-batch 0 through all ranks and back, then micro-batch P, and so on
for n rounds, 2 <= n <= m / P, has m - 1 - (n - 1) P micro-batches left to reach the last backward.
It spends them on any one rank r in the first way back, where rank r does a backward and a forward
in turn: behind B of micro-batch 0 come F of P - r, B of 1, and so on, and there are enough of both,
since P - r + (m - 1 - (n - 1) P) - 1 <= m - 1.  So

    T >= n (Σ_s t_s + 2 (P - 1) c) + (m - 1 - (n - 1) P) max_r t_r + σ_0                       (2)

The mean of (2) over r with n = ⌊m / P⌋ has (m + P - 1) / P for every second of a micro-batch and
2 (P - 1) ⌊m / P⌋ transfers.

Ranks take columns (`planner.search.bounds.simulated_optimum`), one behind the other.  Of all ways
in which the first ranks hold what lies before a place, with given numbers of each device type, each
path of (1) at most θ and no t_r above a ceiling, what lies behind needs to know the least Σ (p_s +
2 c) alone.  θ is a bound where none reaches the last place; with rounds, where for every interval
of the slowest rank (2) is above θ by the interval's lower end and the least sum below its upper
one.

Places are the positions of a chain, or the downsets of a graph: a column leads from one to another
that contains it.  Where transfers differ by place or type, c is what a column's own takes at least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.steady_state import split_of

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

FEW, MANY = 24, 256
"""Intervals of the slowest rank's seconds that are separate at first, and of those left then."""
HALVINGS = 9
"""Number of halvings of the interval in which the least limit lies."""


@dataclass(frozen=True, slots=True)
class Placed:
    """[column] What a rank may hold, from one place to another, on a device type."""

    rank: Indices
    first: Indices
    end: Indices
    seconds: Floats
    """[column, kind of `meshwright.planner.schedules.steady_state.KINDS`, stage]"""
    sync_s: Floats
    update_s: Floats
    number: Indices
    """The device type."""
    hop_s: Floats
    """Least seconds by which a transfer to the rank behind takes longer than others."""
    numbers: tuple[int, ...]
    """[type] Ranks on devices of it."""
    more_s: Floats
    """[column] Seconds of a micro-batch that some of the rank's layers take beside."""
    more_in: NDArray[np.bool_]
    """[column, part, stage] Whether they may be part of forward, of inputs or of weights there."""
    joints: int = 1
    """Number of places that are one but for the types that meet there."""

    def passes_s(self) -> Floats:
        """[column] Seconds of a micro-batch on the rank."""
        passes_s: Floats = self.seconds[:, :2].sum(axis=(1, 2)) + self.more_s
        return passes_s

    def visited_s(self, visits: Floats) -> Floats:
        """[column] Seconds of the `visits` [kind, stage] of some paths, wherever the rest is."""
        seconds: Floats = np.einsum("cks,ks->c", self.seconds, visits)
        rest = np.flatnonzero(self.more_s)
        if len(rest):
            parts = np.stack([visits[0], visits[1] + visits[2], visits[1] + visits[3]])
            each = np.where(self.more_in[rest], parts, np.inf).min(axis=(1, 2))
            seconds[rest] += self.more_s[rest] * each
        return seconds


def shorter_s(placed: Placed, other: Placed, layout: Layout) -> float:
    """Return by how much a layout's step is shorter, at most, than that of a like one.

    Each column of the layout, which are `placed`, is beside that of the `other` one between the
    same places that it is the least quicker than.  A path has one pass each way of every
    micro-batch of a stage at most, and ends at one rank, so that a way is shorter by no more than

        m Σ_rank max Σ_stage (ΔF + max(ΔB, ΔI + ΔW)) + max Δσ + max Δω

    Infinite where the other one has no column between some places, or transfers differ.
    """
    if placed.hop_s.any() or other.hop_s.any() or other.more_s.any():
        return np.inf
    less_s, others = np.zeros((3, layout.pipeline)), _by_span(other)
    home = np.array(
        rank_of_stage(layout.schedule, stages=layout.stages, virtual_stages=layout.virtual_stages)
    )
    for span, mine in _by_span(placed).items():
        if span not in others:
            return np.inf
        among, of_rank = others[span], home == span[0]
        each_s = other.seconds[among][:, :, of_rank] - placed.seconds[mine][:, :, of_rank][:, None]
        each_s = np.maximum(each_s, 0.0)
        forward_s, whole_s, inputs_s, weight_s = np.moveaxis(each_s, 2, 0)
        passes_s = (forward_s + np.maximum(whole_s, inputs_s + weight_s)).sum(axis=2)
        parts = np.stack(
            [
                layout.micro_batches * passes_s,
                np.maximum(other.sync_s[among] - placed.sync_s[mine, None], 0.0),
                np.maximum(other.update_s[among] - placed.update_s[mine, None], 0.0),
            ]
        )
        nearest = parts.sum(axis=0).argmin(axis=1)
        most_s = parts[:, np.arange(len(mine)), nearest].max(axis=1)
        less_s[:, span[0]] = np.maximum(less_s[:, span[0]], most_s)
    passes_s, sync_s, update_s = less_s
    return float(passes_s.sum() + sync_s.max() + update_s.max())


def _by_span(placed: Placed) -> dict[tuple[int, ...], Indices]:
    """Return the columns by rank, first place, end and type."""
    every = np.stack([placed.rank, placed.first, placed.end, placed.number], axis=1).tolist()
    spans: dict[tuple[int, ...], list[int]] = {}
    for column, span in enumerate(map(tuple, every)):
        spans.setdefault(span, []).append(column)
    return {span: np.array(columns, dtype=np.intp) for span, columns in spans.items()}


@dataclass(frozen=True, slots=True, eq=False)
class RankWays:
    """[column] What a rank may hold, with the seconds of the paths that stay with it."""

    rank: Indices
    first: Indices
    end: Indices
    number: Indices
    """The device type."""
    passes_s: Floats
    """Seconds of one micro-batch, t."""
    own_s: Floats
    """Seconds of all micro-batches but the W behind the last way back, o."""
    straight_s: Floats
    """Seconds of a forward and a way back of the first stage, p."""
    sync_s: Floats
    update_s: Floats
    hop_s: Floats
    numbers: tuple[int, ...]
    passes_on: bool
    """True if ranks begin and end with their first stage."""


@lru_cache(maxsize=256)
def drained_backwards(
    schedule: str, stages: int, virtual_stages: int, micro_batches: int
) -> tuple[Floats, NDArray[np.bool_]] | None:
    """[stage] How many W stand behind the last way back of its rank; whether one is on the way.

    None if ranks do not begin and end with their first stage.  The end of the lists is the same
    from 2 P micro-batches on but for whole rounds (`meshwright.planner.schedules.steady_state`).

    >>> problems = (("zb-h1", 3, 1, 8), ("interleaved", 6, 2, 6))
    >>> tuple(drained_backwards(*problem)[0].tolist() for problem in problems)
    ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    """
    ranks = stages // virtual_stages
    behind, whole = np.zeros(stages), np.ones(stages, dtype=bool)
    if not schedule_of(schedule).splits_backward:
        return behind, whole
    count = min(micro_batches, 2 * ranks + micro_batches % ranks)
    lists = orders(schedule, stages=stages, micro_batches=count, virtual_stages=virtual_stages)
    split = split_of(lists)
    for rank, order in enumerate(lists):
        last = max(at for at, action in enumerate(order) if action.kind in "BI")
        if order[0] != (rank, "F", 0) or order[last].stage != rank:
            return None
        for stage, _, _ in order[last + 1 :]:
            behind[stage] += 1
        for stage in range(rank):
            whole[stage] &= (stage, order[last].micro_batch) not in split
    return behind, whole


def rank_ways(layout: Layout, placed: Placed) -> RankWays:
    """Return columns with the seconds of the paths that stay with their rank."""
    count = layout.micro_batches
    forward_s, whole_s, inputs_s, _ = np.moveaxis(placed.seconds, 1, 0)
    passes_s = placed.passes_s()
    first = np.arange(len(placed.rank)), placed.rank
    drain = drained_backwards(
        layout.executed_schedule.name, layout.stages, layout.virtual_stages, count
    )
    own_s = count * passes_s
    straight_s = np.zeros(len(passes_s))
    if drain is not None:
        behind, whole = drain
        own_s = own_s - (whole_s - inputs_s) @ behind
        own_s -= placed.more_s * np.where(placed.more_in[:, 2], behind, 0.0).max(axis=1)
        back_s = np.where(whole[placed.rank], whole_s[first], inputs_s[first])
        straight_s = forward_s[first] + back_s
        if layout.virtual_stages == 1:
            straight_s += np.where(placed.more_in[:, 2].any(axis=1), 0.0, placed.more_s)
    return RankWays(
        rank=placed.rank,
        first=placed.first,
        end=placed.end,
        number=placed.number,
        passes_s=passes_s,
        own_s=own_s,
        straight_s=straight_s,
        sync_s=placed.sync_s,
        update_s=placed.update_s,
        hop_s=placed.hop_s,
        numbers=placed.numbers,
        passes_on=drain is not None,
    )


def cuts_bound_s(layout: Layout, columns: RankWays, transfer_s: float, limit_s: float) -> float:
    """Return seconds that no cut of a layout simulates below, or `limit_s` if that is less.

    A transfer takes `transfer_s` and a column's `hop_s`.
    """
    update_s = max(
        float(columns.update_s[columns.rank == rank].min(initial=np.inf))
        for rank in range(layout.pipeline)
    )
    if update_s >= limit_s:
        return limit_s  # of a rank without a column it is inf
    cuts, high_s = Cuts(layout, columns, transfer_s), limit_s - update_s
    if not cuts.possible(high_s):
        return limit_s
    low_s = min(cuts.surely_s, high_s)
    for _ in range(HALVINGS):
        tried_s = (low_s + high_s) / 2
        if cuts.possible(tried_s):
            high_s = tried_s
        else:
            low_s = tried_s
    return low_s * (1 - ROUNDING) + update_s


class Cuts:
    """The columns of a layout by rank, as paths that stay with it count them."""

    def __init__(self, layout: Layout, columns: RankWays, transfer_s: float) -> None:
        ranks, count = layout.pipeline, layout.micro_batches
        self._ranks, self._count, self._hops_s = ranks, count, 2 * transfer_s
        self._rounds = (
            count // ranks
            if schedule_of(layout.executed_schedule.name).phi_bound and count >= 2 * ranks
            else 0
        )
        passes_s = columns.passes_s
        self._alone_s = count * passes_s + columns.sync_s
        self._passes_s, self._rank_s = passes_s, columns.own_s
        self._straight_s = columns.straight_s + columns.passes_on * self._hops_s
        self._sync_s = float(columns.sync_s[columns.rank == 0].min())
        self._ways = Ways(columns, ranks)
        self._times_s = np.array(sorted(set(passes_s.ravel().tolist())))
        least_s = float(self._sums_s(np.inf, self._times_s[-1:])[0])
        self._mean_s = least_s / ranks - self._hops_s
        """[rank] Least mean seconds of a micro-batch."""
        self.surely_s = count * max(0.0, self._mean_s)
        """Seconds that all cuts take at least."""
        if columns.passes_on:
            self._straight_s = self._straight_s + 2 * columns.hop_s

    def possible(self, limit_s: float) -> bool:
        """Return whether the paths of some cut may all stay within a limit in seconds."""
        if not self._rounds:
            return bool(np.isfinite(self._sums_s(limit_s, self._times_s[-1:])[0]))
        # The slowest rank is no faster than the mean, and alone within the limit.
        mean_s = self._mean_s * (1 - ROUNDING)
        among = self._times_s >= mean_s
        times_s = self._times_s[among & (self._count * self._times_s <= limit_s)]
        for most in (FEW, MANY):
            if len(times_s) == 0:
                return False
            last = np.linspace(0, len(times_s), min(most, len(times_s)) + 1).astype(int)[1:] - 1
            first = np.concatenate([[0], last[:-1] + 1])
            sums_s = self._sums_s(limit_s, times_s[last])
            below = np.isfinite(sums_s)
            for rounds in (2, self._rounds):
                left = self._count - 1 - (rounds - 1) * self._ranks
                path_s = rounds * (sums_s - self._hops_s) + left * times_s[first]
                below &= path_s + self._sync_s <= limit_s
            kept = [times_s[a : b + 1] for a, b in zip(first[below], last[below], strict=True)]
            times_s = np.concatenate([*kept, np.zeros(0)])
        return len(times_s) > 0

    def _sums_s(self, limit_s: float, ceilings_s: Floats) -> Floats:
        """[ceiling] Least Σ (p_s + 2 c) of cuts with paths within a limit; inf if there is none."""
        ceiling_s = ceilings_s[:, None] * (1 + ROUNDING)

        def after_s(rank: int, columns: Indices, before_s: Floats) -> Floats:
            fits = (self._alone_s[columns] <= limit_s) & (self._passes_s[columns] <= ceiling_s)
            reached_s = before_s + self._rank_s[columns] + (self._sync_s if rank else 0.0)
            way_s = before_s + self._straight_s[columns]
            return np.where(fits & (reached_s <= limit_s), way_s, np.inf)

        return self._ways.least_s(len(ceilings_s), after_s)


class Ways:
    """Columns one behind the other, from the first place to the last, with ranks of each type."""

    def __init__(self, placed: Placed | RankWays, ranks: int) -> None:
        self._places, self._numbers = int(placed.end.max(initial=0)), placed.numbers
        self._by_rank = [
            [_of_type(placed, rank, number) for number in range(len(placed.numbers))]
            for rank in range(ranks)
        ]

    def least_s(self, rows: int, after_s: Callable[[int, Indices, Floats], Floats]) -> Floats:
        """[row] Least seconds of all ways; inf where there is none.

        `after_s` returns those behind columns of a rank: array [row, column], from those before.
        """
        none = np.full((rows, self._places + 1), np.inf)
        best_s = {(0,) * len(self._numbers): none.copy()}
        for start in best_s.values():
            start[:, 0] = 0.0
        for rank, of_types in enumerate(self._by_rank):
            after: dict[tuple[int, ...], Floats] = {}
            for number, (columns, firsts, ends, starts) in enumerate(of_types):
                if len(columns) == 0:
                    continue
                for used, before in best_s.items():
                    if used[number] == self._numbers[number]:
                        continue
                    reached_s = after_s(rank, columns, before[:, firsts])
                    lowest_s = np.minimum.reduceat(reached_s, starts, axis=1)
                    key = (*used[:number], used[number] + 1, *used[number + 1 :])
                    row = after.setdefault(key, none.copy())
                    row[:, ends] = np.minimum(row[:, ends], lowest_s)
            best_s = after
        result: Floats = best_s.get(self._numbers, none)[:, -1]
        return result


def _of_type(
    placed: Placed | RankWays, rank: int, number: int
) -> tuple[Indices, Indices, Indices, Indices]:
    """Return a rank's columns on a type by ends, where they begin, the ends, where each starts."""
    columns = np.flatnonzero((placed.rank == rank) & (placed.number == number))
    columns = columns[np.argsort(placed.end[columns], kind="stable")]
    ends, starts = np.unique(placed.end[columns], return_index=True)
    return columns, placed.first[columns], ends, starts
