"""Seconds of every step through a lattice of ideals: exact, or bounded from below.

The layers of a step (stage s, ideals I < J) are a knapsack.  A table starts from Lagrangian bounds

    t(I, J) >= max_λ Σ_{l in J - I} min_k (t_k + λ x_k) - λ · budget_s(I, J)

in which the sum is a difference of two sums over ideals.  The transient bytes are not additive: the
levels that their largest may have are put in a few ranges; within one, options above the range are
forbidden, its lowest level is charged (or the largest of the layers' smallest, if that is more),
and the least of the bounds over the ranges holds.  `StepTable.settle` replaces the bound of a step
by its exact value, and that of all steps with layers of the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.assembly import content_of
from planner.cuts import Costs
from planner.ideals import Ideals
from planner.knapsack import Family, Knapsacks, Relaxed
from planner.paths import Paths

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]

_TRANSIENT_BINS = 4
# Up to so many alike contents of so many steps are solved without bounds.
_OUTRIGHT, _OUTRIGHT_STEPS = 64, 20_000


@dataclass(frozen=True, slots=True)
class Settled:
    """Unscaled seconds and sync of the fastest options of a content; inf if it does not fit."""

    time_s: float
    sync_s: float


# What is known exactly, by stage and content (kind, number of layers), kinds rising.
Known = dict[tuple[int, tuple[tuple[int, int], ...]], Settled]


class StepTable:
    """[step] `stage_s`, and `settled` where it is exact; inf where the layers do not fit.

    `known` keeps what is exact for the tables of other ceilings.
    """

    def __init__(
        self,
        knapsacks: Knapsacks,
        *,
        every: Ideals,
        bands: Sequence[Indices],
        hops: Sequence[tuple[Indices, Indices]],
        cut_s: Floats,
        known: Known,
    ) -> None:
        self._knapsacks = knapsacks
        self._every = every
        self._known = known
        self.paths = Paths([len(band) for band in bands], hops)
        member = np.zeros(len(every), dtype=bool)
        for band in bands:
            member[band] = True
        self._members = np.flatnonzero(member)
        at = [np.searchsorted(self._members, band) for band in bands]
        self._smaller = [at[s][starts] for s, (starts, _) in enumerate(hops)]
        self._larger = [at[s + 1][ends] for s, (_, ends) in enumerate(hops)]
        self._codes()
        cut_s = cut_s[self._members]
        self._fixed_s = np.concatenate(
            [
                exposed_s + cut_s[smaller] + cut_s[larger]
                for exposed_s, smaller, larger in zip(
                    knapsacks.exposed_s, self._smaller, self._larger, strict=True
                )
            ]
        )
        credits_s = np.array(knapsacks.instance.credits_s)
        self._forward_s: Floats | None = None
        self._credit_s = self._over(credits_s, knapsacks.time_scale) if credits_s.any() else None
        sync_s = knapsacks.options.sync_s.min(axis=1)
        self.sync_s = self._over(sync_s, np.ones(len(hops))) if sync_s.any() else None
        self.sync_depends = knapsacks.sync_depends
        self.sync_limit_s = np.inf
        # Sync of the choice that settled a step; read only where options differ in it.
        self._used_s = np.zeros(len(self.paths) if self.sync_depends else 0)
        exact_s = self._outright()
        self.stage_s = self._bounds() if exact_s is None else exact_s
        self.settled: Booleans = ~np.isfinite(self.stage_s)
        if exact_s is None:
            self._recall()
        else:
            self.settled[:] = True

    def costs(self) -> Costs:
        """[step] What the objective counts."""
        instance = self._knapsacks.instance
        stage_s, once_s = self.stage_s, []
        if instance.forward_apart:
            stage_s = stage_s - self.forward_s()
            once_s.append(instance.steady * self.forward_s())
        if self.sync_s is not None and not self.sync_depends:
            once_s.append(self.sync_s)
        return Costs(stage_s, self.fill_s(), tuple(once_s), instance.steady)

    def fill_s(self) -> Floats:
        """[step] What a step adds to the sum over stages, credits taken off."""
        fill = self._knapsacks.instance.fill
        if fill == 1.0 and self._credit_s is None:
            return self.stage_s
        fill_s = np.full(self.stage_s.shape, np.inf)
        np.multiply(self.stage_s, fill, out=fill_s, where=np.isfinite(self.stage_s))
        return fill_s if self._credit_s is None else fill_s - self._credit_s

    def forward_s(self) -> Floats:
        """[step] The forward share of its seconds, where all options of a kind agree in it."""
        if self._forward_s is None:
            per_kind = np.array([kind[0].forward_s for kind in self._knapsacks.instance.kinds])
            self._forward_s = self._over(per_kind, self._knapsacks.time_scale) + self._fixed_s / 2
        return self._forward_s

    def least_sync_s(self) -> Floats:
        """[step] Least seconds of synchronisation."""
        return np.zeros(len(self.paths)) if self.sync_s is None else self.sync_s

    def layers(self, step: int) -> list[int]:
        """Layers that the step adds, rising."""
        stage = self.paths.level(step)
        at = step - self.paths.steps(stage).start
        smaller, larger = self._smaller[stage][at], self._larger[stage][at]
        return self._every.difference(int(self._members[smaller]), int(self._members[larger]))

    def settle(self, steps: Sequence[int]) -> bool:
        """Make exact what the steps take; False if everything was."""
        bounded = [step for step in steps if not self.settled[step]]
        for step in bounded:
            stage = self.paths.level(step)
            for at, found in self._exact(stage, self._content(step)):
                self._write(at, int(self.content[step]), found)
        return bool(bounded)

    def _exact(self, stage: int, content: Sequence[tuple[int, int]]) -> list[tuple[int, Settled]]:
        """Return the exact value for a stage, and for others where they come for free."""
        knapsacks, key = self._knapsacks, tuple(content)
        known = self._known.get((stage, key))
        if knapsacks.alike(content):
            family = knapsacks.family_of(stage)
            stages = knapsacks.families[family].stages.tolist()
            if known is not None:
                return [(s, self._known[s, key]) for s in stages]
            seconds = knapsacks.fastest_s(content, family).tolist()
            found = [(s, Settled(time_s, 0.0)) for s, time_s in zip(stages, seconds, strict=True)]
            self._known.update({(s, key): value for s, value in found})
            return found
        if known is not None and known.sync_s <= self.sync_limit_s:
            return [(stage, known)]
        choice = knapsacks.fastest_choice(content, stage, sync_limit_s=self.sync_limit_s)
        value = Settled(np.inf, 0.0) if choice is None else Settled(choice.time_s, choice.sync_s)
        if self.sync_limit_s == np.inf:
            self._known[stage, key] = value
        return [(stage, value)]

    def limit_sync(self, limit_s: float) -> None:
        """Allow only options with which no stage synchronises longer than `limit_s`.

        What a step was settled at stays a lower bound, and exact if its choice keeps the limit.
        """
        self.sync_limit_s = limit_s
        if self.sync_depends:
            self.settled &= ~np.isfinite(self.stage_s) | (self._used_s <= limit_s)
        elif self.sync_s is not None:
            self.stage_s[self.sync_s > limit_s] = np.inf
            self.settled |= self.sync_s > limit_s

    def _write(self, stage: int, code: int, found: Settled) -> None:
        steps = self.paths.steps(stage)
        same = steps.start + np.flatnonzero(self.content[steps] == code)
        self.stage_s[same] = found.time_s * self._knapsacks.time_scale[stage] + self._fixed_s[same]
        self.settled[same] = True
        if self.sync_depends:
            self._used_s[same] = found.sync_s

    def _recall(self) -> None:
        """Take over what is known from other ceilings."""
        for (stage, content), found in self._known.items() if self._radix else ():
            self._write(stage, sum(self._radix[kind] * n for kind, n in content), found)

    def _outright(self) -> Floats | None:
        """[step] Exact seconds, if contents are so few and alike that bounds are not worth it."""
        if not self._radix or self.sync_depends or len(self.paths) > _OUTRIGHT_STEPS:
            return None
        _, sample, number = np.unique(self.content, return_index=True, return_inverse=True)
        if len(sample) > _OUTRIGHT:
            return None
        contents = [self._content(int(step)) for step in sample]
        if not all(self._knapsacks.alike(content) for content in contents):
            return None
        scale = self._knapsacks.time_scale
        seconds = np.empty((len(scale), len(contents)))
        for at, content in enumerate(contents):
            for family in self._knapsacks.families:
                for stage, found in self._exact(int(family.stages[0]), content):
                    seconds[stage, at] = found.time_s
        held = [number[self.paths.steps(stage)] for stage in range(len(scale))]
        staged = [factor * own[at] for factor, own, at in zip(scale, seconds, held, strict=True)]
        exact_s: Floats = np.concatenate(staged) + self._fixed_s
        return exact_s

    def _content(self, step: int) -> list[tuple[int, int]]:
        """Kinds, rising, and their number among the layers of a step."""
        return content_of([self._knapsacks.instance.layers[layer] for layer in self.layers(step)])

    def _codes(self) -> None:
        """Number the contents: mixed-radix counts of kinds, or one number per step if too many.

        A step with a number of its own is the only one of its stage to be settled with it.
        """
        layers = self._knapsacks.layers
        radix = [1]
        for total in np.bincount(layers, minlength=len(self._knapsacks.options.sizes)).tolist():
            radix.append(radix[-1] * (total + 1))
        if radix[-1] < 2**62:
            self._radix = radix[:-1]
            codes = self._every.codes(np.array(radix[:-1])[layers], self._members)
            self.content = np.concatenate(
                [codes[b] - codes[a] for a, b in zip(self._smaller, self._larger, strict=True)]
            )
        else:
            self._radix = []
            self.content = np.arange(len(self.paths))

    def _totals(self, per_kind: Floats) -> Floats:
        """[column, member] Sums over ideals of `per_kind` [kind, column]."""
        totals = self._every.totals(per_kind[self._knapsacks.layers], self._members)
        return np.ascontiguousarray(totals.T)

    def _over(self, per_kind: Floats, scale: Floats) -> Floats:
        """[step] Sums over the layers of steps, times the scale of their stage."""
        (until,) = self._totals(per_kind[:, None])
        return np.concatenate(
            [
                factor * (until[larger] - until[smaller])
                for factor, smaller, larger in zip(scale, self._smaller, self._larger, strict=True)
            ]
        )

    def _bounds(self) -> Floats:
        """[step] Lagrangian bounds on the stage seconds."""
        knapsacks = self._knapsacks
        bounds = [np.full(len(smaller), np.inf) for smaller in self._smaller]
        levels = sorted({u for levels in knapsacks.options.levels for u in levels})
        bins = len(levels) if len(levels) <= 2 * _TRANSIENT_BINS else _TRANSIENT_BINS
        for part in np.array_split(levels, bins):
            lowest, highest = float(part[0]), float(part[-1])
            floors = self._floors(lowest, highest)
            for family, relaxed in zip(knapsacks.families, knapsacks.relaxed, strict=True):
                totals = self._charged(family, relaxed, highest)
                for stage, scale in zip(family.stages.tolist(), family.scale.tolist(), strict=True):
                    bound = self._bound(stage, scale, totals, relaxed.multipliers, floors)
                    np.minimum(bounds[stage], bound, out=bounds[stage])
        scaled = [scale * bound for scale, bound in zip(knapsacks.time_scale, bounds, strict=True)]
        staged: Floats = np.concatenate(scaled) + self._fixed_s
        return staged

    def _charged(self, family: Family, relaxed: Relaxed, highest: float) -> Floats:
        """[column, member] Sums over ideals, with options up to a transient of `highest`.

        Columns: bytes that any option holds; layers that have no option; the leanest load; and for
        each multiplier the least t + λ x.
        """
        kinds = np.arange(len(self._knapsacks.options.sizes))
        allowed = np.array(self._knapsacks.allowed(kinds.tolist(), highest))
        none = allowed == 0
        columns = np.column_stack(
            [
                family.base_bytes,
                none.astype(np.float64),
                np.where(none, 0.0, relaxed.lean[kinds, allowed]),
                np.where(none[:, None], 0.0, relaxed.least[kinds, allowed]),
            ]
        )
        return self._totals(columns)

    def _bound(
        self,
        stage: int,
        scale: float,
        totals: Floats,
        multipliers: Floats,
        floors: Sequence[tuple[float, Floats]],
    ) -> Floats:
        """[step of stage] Bound if the largest transient lies in the range of `floors`."""
        smaller, larger = self._smaller[stage], self._larger[stage]
        level = np.full(len(smaller), floors[0][0])
        for floor, reached in floors[1:]:
            level[reached[larger] > reached[smaller]] = floor
        room = (self._knapsacks.free_bytes[stage] - level) / scale
        base = totals[0] / scale
        bound = np.zeros(len(smaller))
        for multiplier, least in zip(multipliers, totals[3:], strict=True):
            until = least + multiplier * base
            charge = until[larger]
            charge -= until[smaller]
            charge -= multiplier * room
            np.maximum(bound, charge, out=bound)
        lean = totals[2] + base
        fits = lean[larger] - lean[smaller] <= room + 1e-9 * (np.abs(room) + lean[-1])
        fits &= totals[1][larger] == totals[1][smaller]
        return np.where(fits, bound, np.inf)

    def _floors(self, lowest: float, highest: float) -> list[tuple[float, Floats]]:
        """Rising transient levels in the range, and how many layers of each ideal need them."""
        smallest = np.array([levels[0] for levels in self._knapsacks.options.levels])
        levels = np.unique(smallest[(smallest > lowest) & (smallest <= highest)])
        if len(levels) > _TRANSIENT_BINS:
            levels = levels[np.linspace(0, len(levels) - 1, _TRANSIENT_BINS).round().astype(int)]
        levels = np.append(lowest, levels)
        reached = self._totals((smallest[:, None] >= levels).astype(np.float64))
        return list(zip(levels.tolist(), reached, strict=True))
