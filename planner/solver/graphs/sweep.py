"""The steps through bands of ideals that a split can take if it is to beat the best one known.

The sweep goes backward from the last stage.  For every ideal it has reached it knows, of all ways
from there to the end, the least slowest stage and the least sum (bounds, each the best of its own);
of the ways from the start to an ideal it knows bounds from the seconds of the fastest options.  An
ideal or a step is left out if

    steady · max(slowest before, step, slowest after) + sum before + step + sum after + sync

is not below the cutoff, or the step is above the ceiling, or it leads nowhere.  Every split below
the cutoff and under the ceiling keeps all of its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.solver.bounds.lagrangian_bounds import StepBounds
from meshwright.planner.solver.graphs.ideals import Ideals

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]

_CHUNK = 1 << 19  # pairs of ideals compared at a time


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """[step] The steps of one stage, by rising `smaller`, and bounds on its seconds."""

    smaller: Indices
    larger: Indices
    stage_s: Floats

    def only(self, some: Booleans) -> Hop:
        """Return these steps alone."""
        return Hop(self.smaller[some], self.larger[some], self.stage_s[some])


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBound:
    """Limits of a split: no stage is above the ceiling, and the whole is below the cutoff.

    Every split takes at least `sync_s` to synchronise.
    """

    ceiling_s: float
    cutoff_s: float
    sync_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _IdealWays:
    """[member] Of all ways from one end of the pipeline to an ideal, bounds on two things each.

    The slowest stage on the way, and the sum; inf where there is no way.
    """

    slowest_s: Floats
    sum_s: Floats


class Sweep:
    """One sweep; `bands` [cut] hold the members that can lie there, rising, both ends included."""

    def __init__(
        self, bounds: StepBounds, every: Ideals, bands: Sequence[Indices], aim: TargetBound
    ) -> None:
        self._bounds = bounds
        self._bands = bands
        knapsacks = bounds.knapsacks
        instance = knapsacks.instance
        self._steady, self._fill = instance.steady, instance.fill
        self._scale, self._exposed_s = knapsacks.time_scale, knapsacks.exposed_s
        self._words = every.words[bounds.members]
        self._until_s = bounds.total(knapsacks.options.least_time_s)
        credits_s = np.array(instance.credits_s or (0.0,) * len(instance.kinds))
        self._credit_s = bounds.total(credits_s)
        gain_s = self._fill * knapsacks.options.least_time_s - credits_s
        pace = self._scale.max(), self._scale.min()
        self._gain_s = bounds.total(np.minimum(gain_s * pace[0], gain_s * pace[1]))
        self._slack_s = ROUNDING * float(self._until_s[-1])
        self._highest_s = aim.ceiling_s * (1 + ROUNDING) + self._slack_s
        self._below_s = aim.cutoff_s - aim.sync_s
        if self._below_s < np.inf:
            self._below_s -= ROUNDING * abs(aim.cutoff_s)

    def hops(self, most_pairs: int) -> list[Hop] | None:
        """[stage] Steps worth trying; None if more pairs of ideals would have to be compared."""
        ends = self._bands[-1]
        ways = [self._staying_ways(ends)]
        hops: list[Hop] = []
        for stage in range(len(self._scale) - 1, -1, -1):
            starts = self._bands[stage]
            before = self._fluid_before(stage)
            starts = starts[self._worth(before, self._fluid_after(stage), starts, starts)]
            ends = ends[np.argsort(self._until_s[ends], kind="stable")]
            first, last = self._reach(stage, starts, ends)
            most_pairs -= int(np.sum(last - first))
            if most_pairs < 0:
                return None
            parts = [
                self._steps(stage, starts[rows], ends[columns], before, ways[-1])
                for rows, columns in _ranges(first, last)
            ]
            hops.append(
                Hop(
                    np.concatenate([starts[:0], *(part.smaller for part in parts)]),
                    np.concatenate([starts[:0], *(part.larger for part in parts)]),
                    np.concatenate([np.empty(0), *(part.stage_s for part in parts)]),
                )
            )
            ways.append(self._onward(stage, hops[-1], ways[-1], hops[-1].larger, hops[-1].smaller))
            ends = starts[np.isfinite(ways[-1].sum_s[starts])]
        return self._forward(hops[::-1], ways[::-1])

    def _forward(self, hops: list[Hop], after: list[_IdealWays]) -> list[Hop]:
        """Leave out what is not worth it in the light of the real ways from the start."""
        before = self._staying_ways(self._bands[0])
        kept = []
        for stage, hop in enumerate(hops):
            worth = self._steps_worth(stage, hop, before, after[stage + 1])
            kept.append(hop.only(worth))
            before = self._onward(stage, kept[-1], before, kept[-1].smaller, kept[-1].larger)
        return kept

    def _steps(
        self, stage: int, smaller: Indices, larger: Indices, before: _IdealWays, after: _IdealWays
    ) -> Hop:
        """Steps among pairs of members: one in the other, fast enough, and worth it."""
        for word in range(self._words.shape[1]):
            inside = self._words[smaller, word] & ~self._words[larger, word] == 0
            smaller, larger = smaller[inside], larger[inside]
        least_s = self._scale[stage] * (self._until_s[larger] - self._until_s[smaller])
        least_s += self._bounds.fixed_s(stage, smaller, larger)
        hop = Hop(smaller, larger, least_s)
        hop = hop.only((least_s <= self._highest_s) & (smaller != larger))
        hop = hop.only(self._steps_worth(stage, hop, before, after))
        stage_s = self._bounds.stage_s(stage, hop.smaller, hop.larger)
        hop = Hop(hop.smaller, hop.larger, np.maximum(stage_s, hop.stage_s))
        hop = hop.only(hop.stage_s <= self._highest_s)
        return hop.only(self._steps_worth(stage, hop, before, after))

    def _steps_worth(self, stage: int, hop: Hop, before: _IdealWays, after: _IdealWays) -> Booleans:
        """[step] Whether a split that takes the step can be below the cutoff."""
        through = _IdealWays(
            np.maximum(hop.stage_s, after.slowest_s[hop.larger]),
            self._fill_s(stage, hop) + after.sum_s[hop.larger],
        )
        return self._worth(before, through, hop.smaller, slice(None))

    def _worth(
        self, before: _IdealWays, after: _IdealWays, here: Indices, there: Indices | slice
    ) -> Booleans:
        """Return whether ways to `here` and on from `there` can make a split below the cutoff."""
        slowest_s = np.maximum(before.slowest_s[here], after.slowest_s[there])
        total_s = before.sum_s[here] + after.sum_s[there]
        if self._steady:
            total_s = total_s + self._steady * slowest_s
        promising: Booleans = total_s < self._below_s
        return promising

    def _fill_s(self, stage: int, hop: Hop) -> Floats:
        """[step] What a step adds to the sum, credits taken off."""
        credit_s = self._credit_s[hop.larger] - self._credit_s[hop.smaller]
        fill_s: Floats = self._fill * hop.stage_s - self._scale[stage] * credit_s
        return fill_s

    def _onward(
        self, stage: int, hop: Hop, ways: _IdealWays, origin: Indices, target: Indices
    ) -> _IdealWays:
        """Ways made longer by one step."""
        longer = self._staying_ways(origin[:0])
        np.minimum.at(longer.slowest_s, target, np.maximum(ways.slowest_s[origin], hop.stage_s))
        np.minimum.at(longer.sum_s, target, ways.sum_s[origin] + self._fill_s(stage, hop))
        return longer

    def _staying_ways(self, members: Indices) -> _IdealWays:
        """No way but to stay at these members."""
        slowest_s, sum_s = np.full((2, len(self._until_s)), np.inf)
        slowest_s[members] = sum_s[members] = 0.0
        return _IdealWays(slowest_s, sum_s)

    def _fluid_before(self, cut: int) -> _IdealWays:
        """Bounds on the ways from the start to a cut: seconds shared evenly, bytes pooled."""
        if not cut:
            return self._staying_ways(self._bands[0])
        own_s = self._bounds.shared_s(slice(0, cut))
        return self._shared_bounds(slice(0, cut), cut - 1, own_s, (self._gain_s, self._credit_s))

    def _fluid_after(self, cut: int) -> _IdealWays:
        """Bounds on the ways from a cut to the end."""
        own_s = self._bounds.shared_s(slice(cut, None), rest=True)
        gain_s, credit_s = self._gain_s[-1] - self._gain_s, self._credit_s[-1] - self._credit_s
        return self._shared_bounds(slice(cut, None), cut, own_s, (gain_s, credit_s))

    def _shared_bounds(
        self, stages: slice, beside: int, own_s: Floats, gains: tuple[Floats, Floats]
    ) -> _IdealWays:
        """Bounds for stages, one of them beside the cut, whose layers take `own_s` in all."""
        gain_s, credit_s = gains
        pace, exposed_s = self._scale[stages], self._exposed_s[stages]
        cut_s = self._bounds.cut_s
        fixed_s = float(np.sum(exposed_s / pace)) + cut_s / self._scale[beside]
        slowest_s = (own_s + fixed_s) / float(np.sum(1 / pace))
        sum_s = self._fill * float(pace.min()) * own_s - float(pace.max()) * credit_s
        sum_s = np.maximum(sum_s, gain_s)
        return _IdealWays(slowest_s, sum_s + self._fill * (float(exposed_s.sum()) + cut_s))

    def _reach(self, stage: int, starts: Indices, ends: Indices) -> tuple[Indices, Indices]:
        """[start] Range of the ends, by rising seconds, that are near enough for a step."""
        until = self._until_s[ends]
        own_s = self._highest_s - self._exposed_s[stage] - self._bounds.cut_s[starts]
        own_s = np.maximum(own_s / self._scale[stage], 0.0) + self._slack_s
        first = np.searchsorted(until, self._until_s[starts] - self._slack_s, "left")
        last = np.searchsorted(until, self._until_s[starts] + own_s, "right")
        return first, np.maximum(first, last)


def _ranges(first: Indices, last: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Row and column of all pairs with first[row] <= column < last[row], some at a time."""
    counts = last - first
    until = np.cumsum(counts)
    row = 0
    while row < len(counts):
        done = int(until[row - 1]) if row else 0
        end = max(row + 1, int(np.searchsorted(until, done + _CHUNK, "right")))
        some = counts[row:end]
        rows = np.repeat(np.arange(row, end), some)
        offsets = first[row:end] - (np.cumsum(some) - some)
        yield rows, np.arange(len(rows)) + np.repeat(offsets, some)
        row = end
