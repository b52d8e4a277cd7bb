"""Seconds of every stage for every run of layers it might hold: exact, or bounded from below.

Intervals of the chain with equal counts of each kind are one *signature* and share a knapsack.
Chains of few kinds have few signatures, and all of them are solved at once.  Otherwise the table
starts from Lagrangian bounds on the knapsacks,

    t(i, j) >= max_λ Σ_{i <= l < j} min_k (t_k + λ x_k) - λ · budget(i, j)

which are prefix sums along the chain, and `StageTable.settle` replaces the entries of one
signature by their exact value when a search wants to use them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.knapsack import Family, Knapsacks

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

_MULTIPLIERS = 24
_TRANSIENT_BINS = 4
# Up to so many knapsacks are solved outright; more of them are dearer than bounds and a few solves.
_OUTRIGHT = 1200


class StageTable:
    """`seconds[stage, first, n - 1]`, and `settled` where it is exact.

    Runs of layers that take more than `ceiling_s` on every stage are inf; so is what does not fit.
    """

    def __init__(self, knapsacks: Knapsacks, ceiling_s: float) -> None:
        self._knapsacks = knapsacks
        instance = knapsacks.instance
        layers, stages = len(instance.layers), len(instance.stages)
        least_s = np.array([kind.time_s.min() for kind in knapsacks.kinds])[knapsacks.layers]
        until_s = prefix_sums(least_s)
        pace, exposed_s = float(knapsacks.time_scale.min()), float(knapsacks.exposed_s.min())
        # A little more than the ceiling: one run too many is harmless, one too few is not.
        longest_s = (ceiling_s - exposed_s) / pace + 1e-12 * float(until_s[-1])
        reach = np.searchsorted(until_s, until_s[:-1] + longest_s, "right") - 1
        width = int(np.max(reach - np.arange(layers)))
        self.width = max(1, min(width, layers - stages + 1))
        self._first = np.arange(layers)[:, None]
        self._end = self._first + np.arange(1, self.width + 1)
        self._inside = self._end <= np.minimum(np.maximum(reach, 0), layers)[:, None]
        self._end = np.minimum(self._end, layers)
        self._signatures()
        self._cut_s = self._cuts()
        evaluations = len(self._representatives) * len(knapsacks.families)
        if not knapsacks.sync_depends and evaluations <= _OUTRIGHT:
            self._solve_outright()
        else:
            self._bound(until_s)

    def _signatures(self) -> None:
        """Number the distinct contents of the intervals inside the band."""
        kinds = len(self._knapsacks.kinds)
        layers = self._knapsacks.layers
        totals = np.bincount(layers, minlength=kinds)
        radix = [1]
        for total in totals[:-1].tolist():
            radix.append(radix[-1] * (total + 1))
        at = np.flatnonzero(self._inside.reshape(-1))
        if radix[-1] * (int(totals[-1]) + 1) < 2**62:
            code = prefix_sums(np.array(radix, dtype=np.int64)[layers])
            codes = (code[self._end] - code[self._first]).reshape(-1)[at]
            _, sample, number = np.unique(codes, return_index=True, return_inverse=True)
        else:  # so many kinds that no two intervals need share a content
            sample = number = np.arange(len(at), dtype=np.intp)
        signature = np.full(self._inside.size, -1, dtype=np.intp)
        signature[at] = number
        self._signature = signature.reshape(self._inside.shape)
        self._representatives = [divmod(int(edge), self.width) for edge in at[sample]]

    def _cuts(self) -> Floats | None:
        instance = self._knapsacks.instance
        if not instance.cut_s:
            return None
        cut_s = np.array(instance.cut_s)
        cut_s[0] = cut_s[-1] = 0.0
        both: Floats = cut_s[self._first] + cut_s[self._end]
        return both

    def _on_stages(self, seconds: Floats) -> Floats:
        """Stage seconds from the layers' own: scaled, with what is exposed and the cuts."""
        knapsacks = self._knapsacks
        scale, exposed_s = knapsacks.time_scale, knapsacks.exposed_s
        staged: Floats = seconds * scale[:, None, None] + exposed_s[:, None, None]
        return staged if self._cut_s is None else staged + self._cut_s

    def _solve_outright(self) -> None:
        knapsacks = self._knapsacks
        by_signature = np.full((len(knapsacks.in_flight), len(self._representatives) + 1), np.inf)
        for number, (first, n) in enumerate(self._representatives):
            by_signature[:, number] = knapsacks.fastest_s(knapsacks.content(first, n + 1))
        self.seconds = self._on_stages(by_signature[:, self._signature])
        self.settled: Booleans = np.ones(self.seconds.shape, dtype=bool)

    def settle(self, stage: int, first: int, n: int) -> None:
        """Make exact what `stage` takes for the content of `n` layers from `first` on."""
        knapsacks = self._knapsacks
        found = knapsacks.fastest_choice(knapsacks.content(first, n), stage)
        seconds = np.inf if found is None else found[0]
        same = self._signature == self._signature[first, n - 1]
        staged = seconds * knapsacks.time_scale[stage] + knapsacks.exposed_s[stage]
        self.seconds[stage][same] = staged if self._cut_s is None else staged + self._cut_s[same]
        self.settled[stage][same] = True

    def holds(self, cuts: tuple[int, ...]) -> bool:
        """Whether each stage of the split fits, as far as is known."""
        return all(
            np.isfinite(self.seconds[s, first, end - first - 1])
            for s, (first, end) in enumerate(pairwise(cuts))
        )

    def fill_s(self) -> Floats:
        """[stage, first, n - 1] What a stage adds to the sum over stages, credits taken off."""
        instance = self._knapsacks.instance
        credits_s = np.array(instance.credits_s)
        if instance.fill == 1.0 and not credits_s.any():
            return self.seconds
        fill_s = np.full(self.seconds.shape, np.inf)
        np.multiply(self.seconds, instance.fill, out=fill_s, where=np.isfinite(self.seconds))
        if credits_s.any():
            scale = self._knapsacks.time_scale[:, None, None]
            fill_s -= scale * self._over(credits_s[self._knapsacks.layers])
        return fill_s

    def sync_s(self) -> Floats | None:
        """[first, n - 1] Seconds of synchronisation, None if there are none."""
        per_kind = np.array([kind.sync_s.min() for kind in self._knapsacks.kinds])
        return self._over(per_kind[self._knapsacks.layers]) if per_kind.any() else None

    def _bound(self, until_s: Floats) -> None:
        """Fill the table with Lagrangian bounds."""
        knapsacks = self._knapsacks
        stages = len(knapsacks.in_flight)
        seconds = np.full((stages, *self._inside.shape), np.inf)
        for family_index, family in enumerate(knapsacks.families):
            for lowest, highest in self._transient_bins():
                bound = self._bound_within(family_index, family, lowest, highest)
                seconds[family.stages] = np.minimum(seconds[family.stages], bound)
        least_s = until_s[self._end] - until_s[self._first]
        seconds = np.where(self._inside, np.maximum(seconds, least_s), np.inf)
        self.seconds = self._on_stages(seconds)
        self.settled = ~np.isfinite(self.seconds)

    def _transient_bins(self) -> list[tuple[float, float]]:
        """Ranges that together hold every level the largest transient may have."""
        levels = sorted({u for kind in self._knapsacks.kinds for u in kind.levels})
        parts = np.array_split(np.array(levels), min(_TRANSIENT_BINS, len(levels)))
        return [(float(part[0]), float(part[-1])) for part in parts]

    def _bound_within(
        self, family_index: int, family: Family, lowest: float, highest: float
    ) -> Floats:
        """[stage of family, first, n - 1] Bound if the largest transient lies in this range."""
        knapsacks = self._knapsacks
        kinds, layers = knapsacks.kinds, knapsacks.layers
        able = np.array([kind.levels[0] <= highest for kind in kinds])
        within = [np.flatnonzero(kind.transient <= highest) for kind in kinds]
        slopes: set[float] = {0.0}
        for k in np.flatnonzero(able):
            added, saved = knapsacks.groups(family_index, [(int(k), 1)], highest)[0][0].hull_steps()
            slopes.update((saved / added).tolist())
        multipliers = np.array(sorted(slopes))
        if len(multipliers) > _MULTIPLIERS:
            spread = np.linspace(0, len(multipliers) - 1, _MULTIPLIERS).round().astype(int)
            multipliers = multipliers[spread]

        least = np.zeros((len(multipliers), len(kinds)))
        lean = np.zeros(len(kinds))
        for k in np.flatnonzero(able):
            loads, time_s = family.loads[k][within[k]], kinds[k].time_s[within[k]]
            least[:, k] = (time_s + np.multiply.outer(multipliers, loads)).min(axis=1)
            lean[k] = loads.min()
        smallest = np.array([kind.levels[0] for kind in kinds])
        level = np.maximum(lowest, self._running_maximum(smallest))
        budget = (knapsacks.free_bytes[family.stages, None, None] - level) - self._over(
            family.base_bytes[layers]
        )
        budget /= family.scale[:, None, None]
        bound = np.zeros(budget.shape)
        for multiplier, row in zip(multipliers, least, strict=True):
            np.maximum(bound, self._over(row[layers]) - multiplier * budget, out=bound)
        holds = self._over((~able[layers]).astype(float)) == 0
        rounding = 1e-9 * np.abs(budget)
        return np.where(holds & (self._over(lean[layers]) <= budget + rounding), bound, np.inf)

    def _over(self, per_layer: Floats) -> Floats:
        """[first, n - 1] Sums over the intervals of the band."""
        until = prefix_sums(per_layer)
        total: Floats = until[self._end] - until[self._first]
        return total

    def _running_maximum(self, per_kind: Floats) -> Floats:
        """[first, n - 1] Largest value of the kinds in the interval."""
        at = np.minimum(self._end - 1, len(self._knapsacks.layers) - 1)
        largest: Floats = np.maximum.accumulate(per_kind[self._knapsacks.layers][at], axis=1)
        return largest


def prefix_sums(values: NDArray) -> NDArray:  # type: ignore[type-arg]
    """[0, v0, v0 + v1, ...]: one more entry than `values`."""
    until = np.zeros(len(values) + 1, dtype=values.dtype)
    np.cumsum(values, out=until[1:])
    return until
