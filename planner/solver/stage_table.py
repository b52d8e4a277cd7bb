"""Seconds of every stage for every run of layers it might hold: exact, or bounded from below.

Intervals of the chain with equal counts of each kind are one *signature* and share a knapsack.
The table starts from the Lagrangian bounds of the knapsacks, which are prefix sums along the
chain; `StageTable.settle` replaces the entries of one signature by their exact value when a search
wants to use them.  A chain of like layers has few signatures, and those are settled outright.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.solver.assembly import fastest_options
from planner.solver.checked import fastest_checked
from planner.solver.cuts import Chain
from planner.solver.descent import Costs
from planner.solver.knapsack import Checked, Fastest, Knapsacks, Relaxed, StageClass
from planner.tolerances import ROUNDING, SLACK

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

_TRANSIENT_BINS = 4


class StageTable:
    """`seconds[stage, first, n - 1]`, and `settled` where it is exact.

    Runs of layers that take more than `ceiling_s` on every stage are inf; so is what does not fit.
    All seconds are rounded to a grid that is fine beside `whole_s`, the sum over the stages.
    """

    def __init__(
        self,
        knapsacks: Knapsacks,
        ceiling_s: float,
        whole_s: float,
        *,
        limit_s: float = math.inf,
    ) -> None:
        """Of stages that take longer than `limit_s` nobody wants to know how long."""
        self._knapsacks = knapsacks
        self._whole_s = whole_s
        self._limit_s = limit_s
        instance = knapsacks.instance
        layers, stages = len(instance.layers), len(instance.stages)
        until_s = _prefix_sums(knapsacks.options.least_time_s[knapsacks.layers])
        pace, exposed_s = float(knapsacks.time_scale.min()), float(knapsacks.exposed_s.min())
        # A little more than the ceiling: one run too many is harmless, one too few is not.
        longest_s = (ceiling_s - exposed_s) / pace + ROUNDING * float(until_s[-1])
        reach = np.searchsorted(until_s, until_s[:-1] + longest_s, "right") - 1
        width = int(np.max(reach - np.arange(layers)))
        self.width = max(1, min(width, layers - stages + 1))
        self._first = np.arange(layers)[:, None]
        self._end = self._first + np.arange(1, self.width + 1)
        inside = self._end <= np.maximum(reach, 0)[:, None]
        self._end = np.minimum(self._end, layers)
        self._signatures(inside)
        self._cut_s = self._cuts()

        seconds = self._bounds_s()
        staged = np.full((stages, len(self._some_first) + 1), np.inf)
        staged[:, :-1] = seconds * knapsacks.time_scale[:, None] + knapsacks.exposed_s[:, None]
        seconds = staged[:, self._signature]
        self.seconds = _on_grid(
            seconds if self._cut_s is None else seconds + self._cut_s, self._whole_s
        )
        self._stages = instance.stages
        for s, stage in enumerate(self._stages):
            self.seconds[s, :, : stage.least_layers - 1] = np.inf
            if stage.most_layers is not None:
                self.seconds[s, :, stage.most_layers :] = np.inf
        self.settled: Booleans = ~np.isfinite(self.seconds)
        # Whether an entry is that of options that fit; with exact sums it is if it is settled.
        self._checks = instance.used_bytes is not None
        self._by_place = instance.used_bytes is not None and instance.used_bytes.by_place
        self._checked = self.settled.copy() if self._checks else self.settled
        self._loose: dict[tuple[int, int, int], float] = {}
        """Of entries that are not known exactly, seconds that are no more than theirs."""
        self.ways = Chain(*self.seconds.shape)
        self.sync_depends = knapsacks.sync_depends
        self.sync_limit_s = np.inf
        # Sync of the choice that settled an entry; read only where options differ in it.
        self._sync_used_s = np.zeros(self.seconds.shape if knapsacks.sync_depends else 0)

    def _signatures(self, inside: Booleans) -> None:
        """Number the distinct contents of the intervals inside the band; -1 outside of it."""
        knapsacks = self._knapsacks
        totals = np.bincount(knapsacks.layers, minlength=len(knapsacks.options.sizes)).tolist()
        radix = [1]
        for total in totals:
            radix.append(radix[-1] * (total + 1))
        at = np.flatnonzero(inside.reshape(-1))
        if radix[-1] < 2**62:
            code = _prefix_sums(np.array(radix, dtype=np.int64)[knapsacks.layers])
            codes = (code[self._end] - code[self._first]).reshape(-1)[at]
            _, sample, number = np.unique(codes, return_index=True, return_inverse=True)
        else:  # so many kinds that hardly any two intervals share a content
            sample = number = np.arange(len(at), dtype=np.intp)
        signature = np.full(inside.size, -1, dtype=np.intp)
        signature[at] = number
        self._signature = signature.reshape(inside.shape)
        # One interval of each signature.
        self._some_first, n_less_1 = np.divmod(at[sample], self.width)
        self._some_end = self._some_first + n_less_1 + 1

    def _cuts(self) -> Floats | None:
        instance = self._knapsacks.instance
        if not instance.cut_s:
            return None
        cut_s = np.array(instance.cut_s)
        cut_s[0] = cut_s[-1] = 0.0
        both: Floats = cut_s[self._first] + cut_s[self._end]
        return both

    def settle(self, way: tuple[int, ...]) -> bool:
        """Make exact what each stage of a split takes; False if everything was."""
        changed = False
        for stage, (first, end) in enumerate(pairwise(way)):
            if not self.settled[stage, first, end - first - 1]:
                self._settle(stage, first, end - first)
                changed = True
            if self._checks and not self._checked[stage, first, end - first - 1]:
                self._check(stage, first, end - first)
                changed = True
        return changed

    def options(self, stage: int, first: int, end: int) -> Sequence[int]:
        """Return the options of layers `first` to `end` with which their stage is fastest."""
        if self._checks:
            checked = self._checked_options(stage, first, end)
            assert checked is not None, "only stages that fit are assembled"
            return checked.options
        knapsacks = self._knapsacks
        staged_s = float(self.seconds[stage, first, end - first - 1])
        staged_s -= float(knapsacks.exposed_s[stage])
        if self._cut_s is not None:
            staged_s -= float(self._cut_s[first, end - first - 1])
        # A hair more than exactly.
        enough_s = (staged_s + 2.0**-46 * self._whole_s) / float(knapsacks.time_scale[stage])
        return fastest_options(
            knapsacks,
            self._kinds_of(first, end - first),
            stage,
            sync_limit_s=self.sync_limit_s,
            enough_s=enough_s,
        )

    def _check(self, stage: int, first: int, n: int) -> None:
        """Make an entry that of the fastest options that fit."""
        found = self._checked_options(stage, first, first + n)
        knapsacks, kinds = self._knapsacks, self._kinds_of(first, n)
        same = self._signature == self._signature[first, n - 1]
        if self._by_place:
            same = np.zeros_like(same)
            same[first, n - 1] = True
        elif len(set(kinds)) > 1:
            # Layers of the same kinds may come in another order.
            for at, n_less_1 in np.argwhere(same).tolist():
                same[at, n_less_1] = self._kinds_of(at, n_less_1 + 1) == kinds
        self._checked[stage][same] = True
        if found is None:
            self.seconds[stage][same] = np.inf
            return
        if found.at_least_s < found.time_s:
            loose_s = self._staged_s(stage, same, found.at_least_s).tolist()
            for (at, n_less_1), seconds in zip(np.argwhere(same).tolist(), loose_s, strict=True):
                self._loose[stage, at, n_less_1] = seconds
        staged_s = self._staged_s(stage, same, found.time_s)
        self.seconds[stage][same] = np.maximum(self.seconds[stage][same], staged_s)
        if knapsacks.sync_depends:
            self._sync_used_s[stage][same] = found.sync_s

    def _staged_s(self, stage: int, same: Booleans, layers_s: float) -> Floats:
        """[entry of `same`] Seconds of entries from the unscaled ones of their layers."""
        knapsacks = self._knapsacks
        staged_s = layers_s * knapsacks.time_scale[stage] + knapsacks.exposed_s[stage]
        extra_s = np.zeros(int(same.sum())) if self._cut_s is None else self._cut_s[same]
        if math.isinf(staged_s):
            return np.full(extra_s.shape, np.inf)
        return _on_grid(staged_s + extra_s, self._whole_s)

    def least_costs(self) -> Costs | None:
        """Return costs that are no more than exact ones; None if those of `costs` are exact."""
        if not self._loose:
            return None
        known = self.seconds.copy()
        for place, seconds in self._loose.items():
            self.seconds[place] = seconds
        costs = self.costs()
        self.seconds = known
        return costs

    def _checked_options(self, stage: int, first: int, end: int) -> Fastest | None:
        """Return the fastest options of a stage that fit, within the limits on seconds and sync."""
        known = self._knapsacks.checked
        place = first if self._by_place else -1
        key = stage, place, self._kinds_of(first, end - first), self.sync_limit_s
        knapsacks = self._knapsacks
        limit_s = (self._limit_s - float(knapsacks.exposed_s[stage])) / float(
            knapsacks.time_scale[stage]
        )
        found = known.get(key)
        if found is None or (found.fastest is None and found.limit_s < limit_s):
            instance, held = knapsacks.instance, range(first, end)
            assert instance.used_bytes is not None, "sums are exact without"
            fastest = fastest_checked(
                knapsacks,
                stage,
                instance.layers[first:end],
                partial(instance.used_bytes.of, stage, range(first), held),
                sync_limit_s=self.sync_limit_s,
                limit_s=limit_s,
            )
            found = known[key] = Checked(limit_s, fastest)
        return found.fastest

    def _kinds_of(self, first: int, n: int) -> tuple[int, ...]:
        return self._knapsacks.instance.layers[first : first + n]

    def _settle(self, stage: int, first: int, n: int) -> None:
        """Make exact what `stage` takes for the content of `n` layers from `first` on."""
        knapsacks = self._knapsacks
        content = knapsacks.content(first, n)
        if knapsacks.alike(content):
            f = knapsacks.family_of(stage)
            stages = knapsacks.families[f].stages
            seconds = knapsacks.fastest_s(content, f)
        else:
            stages = np.array([stage])
            found = knapsacks.fastest_choice(content, stage, sync_limit_s=self.sync_limit_s)
            seconds = np.array([np.inf if found is None else found.time_s])
            if knapsacks.sync_depends and found is not None:
                self._sync_used_s[stage][self._signature == self._signature[first, n - 1]] = (
                    found.sync_s
                )
        same = self._signature == self._signature[first, n - 1]
        staged = seconds * knapsacks.time_scale[stages] + knapsacks.exposed_s[stages]
        extra = 0.0 if self._cut_s is None else self._cut_s[same]
        for s, value in zip(stages, staged, strict=True):
            if not self._stages[s].may_hold(n):
                continue
            self.seconds[s][same] = _on_grid(value + extra, self._whole_s)
            self.settled[s][same] = True
            if self._checks:
                self._checked[s][same] = False

    def limit_sync(self, limit_s: float) -> None:
        """Allow only options with which no stage synchronises longer than `limit_s`.

        What an entry was settled at stays a lower bound, and exact if its choice keeps the limit.
        """
        self.sync_limit_s = limit_s
        keeps = ~np.isfinite(self.seconds) | (self._sync_used_s <= limit_s)
        self.settled &= keeps
        if self._checks:
            self._checked &= keeps

    def least_sync_s(self) -> Floats:
        """[stage, first, n - 1] Least seconds of synchronisation."""
        every_s = self.sync_s()
        return np.broadcast_to(0.0 if every_s is None else every_s, self.seconds.shape)

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
        return _on_grid(fill_s, self._whole_s)

    def costs(self) -> Costs:
        """What the objective counts of every entry, for the search of cuts."""
        instance = self._knapsacks.instance
        once_s = []
        stage_s = self.seconds
        if instance.forward_apart:
            forward_s = self._forward_s()
            stage_s = stage_s - forward_s
            once_s.append(instance.steady * forward_s)
        sync_s = None if self._knapsacks.sync_depends else self.sync_s()
        if sync_s is not None:
            once_s.append(np.broadcast_to(sync_s, stage_s.shape))
        return Costs(stage_s, self.fill_s(), tuple(once_s), instance.steady)

    def _forward_s(self) -> Floats:
        """[stage, first, n - 1] The forward share, with half of what is exposed and of the cuts."""
        knapsacks = self._knapsacks
        share_s = knapsacks.time_scale[:, None, None] * self._over(
            np.array([kind[0].forward_s for kind in knapsacks.instance.kinds])[knapsacks.layers]
        )
        share_s = share_s + knapsacks.exposed_s[:, None, None] / 2
        return _on_grid(
            share_s if self._cut_s is None else share_s + self._cut_s / 2, self._whole_s
        )

    def sync_s(self) -> Floats | None:
        """[first, n - 1] Seconds of synchronisation, None if there are none."""
        per_kind = self._knapsacks.options.sync_s.min(axis=1)
        per_layer = per_kind[self._knapsacks.layers]
        return _on_grid(self._over(per_layer), float(per_layer.sum())) if per_kind.any() else None

    def _over(self, per_layer: Floats) -> Floats:
        """[first, n - 1] Sums over the intervals of the band."""
        until = _prefix_sums(per_layer)
        total: Floats = until[self._end] - until[self._first]
        return total

    def _bounds_s(self) -> Floats:
        """[stage, signature] Lagrangian bounds on the unscaled seconds."""
        knapsacks = self._knapsacks
        bounds_s = np.full((len(knapsacks.in_flight), len(self._some_first)), np.inf)
        smallest = np.array([levels[0] for levels in knapsacks.options.levels])
        at = np.minimum(self._end, len(knapsacks.layers)) - 1
        floor = np.maximum.accumulate(smallest[knapsacks.layers][at], axis=1)
        floor = floor[self._some_first, self._some_end - self._some_first - 1]
        for family, relaxed in zip(knapsacks.families, knapsacks.relaxed, strict=True):
            for lowest, highest in self._transient_bins():
                level = np.maximum(floor, lowest)
                bound = self._bound_within(family, relaxed, level, highest)
                bounds_s[family.stages] = np.minimum(bounds_s[family.stages], bound)
        return bounds_s

    def _transient_bins(self) -> list[tuple[float, float]]:
        """Ranges that together hold every level the largest transient may have."""
        levels = sorted({u for levels in self._knapsacks.options.levels for u in levels})
        bins = len(levels) if len(levels) <= 2 * _TRANSIENT_BINS else _TRANSIENT_BINS
        return [(float(part[0]), float(part[-1])) for part in np.array_split(levels, bins)]

    def _bound_within(
        self, family: StageClass, relaxed: Relaxed, level: Floats, highest: float
    ) -> Floats:
        """[stage of family, signature] Bound if the largest transient is `level` .. `highest`."""
        knapsacks = self._knapsacks
        layers = knapsacks.layers
        kinds = np.arange(len(knapsacks.options.sizes))
        allowed = np.array(knapsacks.allowed(kinds.tolist(), highest))
        able = allowed > 0
        least = np.where(able[:, None], relaxed.least[kinds, allowed], 0.0)
        lean = np.where(able, relaxed.lean[kinds, allowed], 0.0)
        budget = knapsacks.free_bytes[family.stages, None] - level
        budget -= self._over_some(family.base_bytes[layers])
        budget /= family.scale[:, None]
        # Rows: the least seconds for every multiplier, the leanest loads, layers without an option.
        rows = np.vstack([least.T, lean, ~able])[:, layers]
        *softened, leanest, unable = self._over_some(rows)
        charges = np.multiply.outer(-relaxed.multipliers, budget)
        charges += np.array(softened)[:, None]
        bound = np.maximum(charges.max(axis=0), 0.0)
        fits = (leanest <= budget + SLACK * np.abs(budget)) & (unable == 0)
        fits &= level <= highest
        return np.where(fits, bound, np.inf)

    def _over_some(self, per_layer: Floats) -> Floats:
        """[..., signature] Sums of [..., layer] over one interval of each signature."""
        until = np.zeros((*per_layer.shape[:-1], per_layer.shape[-1] + 1))
        np.cumsum(per_layer, axis=-1, out=until[..., 1:])
        total: Floats = until[..., self._some_end] - until[..., self._some_first]
        return total


def _on_grid(values: Floats, whole: float) -> Floats:
    """Round to multiples of a power of two small beside `whole`, which sums of them rarely exceed.

    Such multiples add up without rounding: equal sums are equal in any order, and ties are broken
    by position instead of by noise.
    """
    quantum = 2.0 ** (np.frexp(whole)[1] - 48)
    rounded: Floats = np.round(values / quantum) * quantum
    return rounded


def _prefix_sums(values: NDArray) -> NDArray:  # type: ignore[type-arg]
    """[0, v0, v0 + v1, ...]: one more entry than `values`."""
    until = np.zeros(len(values) + 1, dtype=values.dtype)
    np.cumsum(values, out=until[1:])
    return until
