"""Seconds of every step through a lattice of ideals: exact, or bounded from below.

The layers of a step (stage s, ideals I < J) are a knapsack.  A table starts from Lagrangian bounds

    t(I, J) >= max_λ Σ_{l in J - I} min_k (t_k + λ x_k) - λ · budget_s(I, J)

in which the sum is a difference of two sums over ideals.  The transient bytes are not additive: the
levels that their largest may have are put in a few ranges; within one, options above the range are
forbidden, its lowest level is charged (or the largest of the layers' smallest, if that is more),
and the least of the bounds over the ranges holds.  `StepTable.settle` replaces the bound of a step
by its exact value, and that of all steps of the stage with layers of the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.assembly import content_of
from planner.ideals import Ideals
from planner.knapsack import Family, Knapsacks
from planner.paths import Paths

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]
# Unscaled seconds by stage and content: (kind, number of layers), rising.
Known = dict[tuple[int, tuple[tuple[int, int], ...]], float]

_MULTIPLIERS = 24
_TRANSIENT_BINS = 4


class StepTable:
    """[step] `stage_s`, and `settled` where it is exact; inf where the layers do not fit.

    `known` keeps exact seconds by stage and content for the tables of other ceilings.
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
        self._members = _union(bands, len(every))
        at = [np.searchsorted(self._members, band) for band in bands]
        self._smaller = [at[s][starts] for s, (starts, _) in enumerate(hops)]
        self._larger = [at[s + 1][ends] for s, (_, ends) in enumerate(hops)]
        self._codes()
        cut_s = cut_s[self._members]
        self._fixed_s = np.concatenate(
            [
                knapsacks.exposed_s[s] + cut_s[self._smaller[s]] + cut_s[self._larger[s]]
                for s in range(len(hops))
            ]
        )
        self._credit_s = self._credits()
        self.sync_s = self._sync()
        self.stage_s = self._bounds()
        self.settled: Booleans = ~np.isfinite(self.stage_s)
        self._recall()

    def fill_s(self) -> Floats:
        """[step] What a step adds to the sum over stages, credits taken off."""
        fill = self._knapsacks.instance.fill
        if fill == 1.0 and self._credit_s is None:
            return self.stage_s
        fill_s = np.full(self.stage_s.shape, np.inf)
        np.multiply(self.stage_s, fill, out=fill_s, where=np.isfinite(self.stage_s))
        return fill_s if self._credit_s is None else fill_s - self._credit_s

    def layers(self, step: int) -> list[int]:
        """Layers that the step adds, rising."""
        stage = self.paths.level(step)
        at = step - self.paths.steps(stage).start
        smaller, larger = self._smaller[stage][at], self._larger[stage][at]
        return self._every.difference(int(self._members[smaller]), int(self._members[larger]))

    def settle(self, step: int) -> None:
        """Make the seconds of a step exact, and of those of its stage with the same content."""
        stage = self.paths.level(step)
        content = content_of([self._knapsacks.instance.layers[one] for one in self.layers(step)])
        key = stage, tuple(content)
        if key not in self._known:
            found = self._knapsacks.fastest_choice(content, stage)
            self._known[key] = np.inf if found is None else found[0]
        self._write(stage, self.content[step], self._known[key])

    def _write(self, stage: int, code: int, seconds: float) -> None:
        steps = self.paths.steps(stage)
        same = steps.start + np.flatnonzero(self.content[steps] == code)
        self.stage_s[same] = seconds * self._knapsacks.time_scale[stage] + self._fixed_s[same]
        self.settled[same] = True

    def _recall(self) -> None:
        """Take over what is known from other ceilings."""
        if self._radix is None:
            return
        for (stage, content), seconds in self._known.items():
            self._write(stage, sum(self._radix[kind] * n for kind, n in content), seconds)

    def _codes(self) -> None:
        """Number the contents: mixed-radix counts of kinds, or one number per step if too many."""
        layers = self._knapsacks.layers
        radix = [1]
        for total in np.bincount(layers, minlength=len(self._knapsacks.kinds)).tolist():
            radix.append(radix[-1] * (total + 1))
        if radix[-1] < 2**62:
            self._radix: list[int] | None = radix[:-1]
            codes = self._every.codes(np.array(radix[:-1])[layers], self._members)
            self.content = np.concatenate(
                [
                    codes[larger] - codes[smaller]
                    for smaller, larger in zip(self._smaller, self._larger, strict=True)
                ]
            )
        else:
            self._radix = None
            self.content = np.arange(len(self.paths))

    def _totals(self, per_kind: Floats) -> Floats:
        """[member, column] Sums over ideals of `per_kind` [kind, column]."""
        return self._every.totals(per_kind[self._knapsacks.layers], self._members)

    def _sync(self) -> Floats | None:
        per_kind = np.array([kind.sync_s.min() for kind in self._knapsacks.kinds])
        if not per_kind.any():
            return None
        until = self._totals(per_kind[:, None])[:, 0]
        return np.concatenate(
            [until[b] - until[a] for a, b in zip(self._smaller, self._larger, strict=True)]
        )

    def _credits(self) -> Floats | None:
        per_kind = np.array(self._knapsacks.instance.credits_s)
        if not per_kind.any():
            return None
        until = self._totals(per_kind[:, None])[:, 0]
        return np.concatenate(
            [
                scale * (until[b] - until[a])
                for scale, a, b in zip(
                    self._knapsacks.time_scale, self._smaller, self._larger, strict=True
                )
            ]
        )

    def _bounds(self) -> Floats:
        """[step] Lagrangian bounds on the stage seconds."""
        knapsacks = self._knapsacks
        bounds = [np.full(len(starts), np.inf) for starts in self._smaller]
        levels = sorted({u for kind in knapsacks.kinds for u in kind.levels})
        for part in np.array_split(np.array(levels), min(_TRANSIENT_BINS, len(levels))):
            for index, family in enumerate(knapsacks.families):
                found = self._bounds_within(index, family, float(part[0]), float(part[-1]))
                for stage, bound in found:
                    np.minimum(bounds[stage], bound, out=bounds[stage])
        scaled = [scale * bound for scale, bound in zip(knapsacks.time_scale, bounds, strict=True)]
        staged: Floats = np.concatenate(scaled) + self._fixed_s
        return staged

    def _bounds_within(
        self, index: int, family: Family, lowest: float, highest: float
    ) -> list[tuple[int, Floats]]:
        """Bounds for the stages of a family if the largest transient lies in this range."""
        knapsacks = self._knapsacks
        kinds = knapsacks.kinds
        able = [kind.levels[0] <= highest for kind in kinds]
        slopes = {0.0}
        for k in np.flatnonzero(able):
            added, saved = knapsacks.groups(index, [(int(k), 1)], highest)[0][0].hull_steps()
            slopes.update((saved / added).tolist())
        multipliers = np.array(sorted(slopes))
        if len(multipliers) > _MULTIPLIERS:
            spread = np.linspace(0, len(multipliers) - 1, _MULTIPLIERS).round().astype(int)
            multipliers = multipliers[spread]

        # Columns: the bytes of every option of a kind, the leanest load, kinds that have no option
        # in the range, then min_k (t + λ x) per multiplier.
        columns = np.zeros((len(kinds), 3 + len(multipliers)))
        columns[:, 0] = family.base_bytes
        columns[:, 2] = np.logical_not(able)
        for k in np.flatnonzero(able):
            within = kinds[k].transient <= highest
            loads, time_s = family.loads[k][within], kinds[k].time_s[within]
            columns[k, 1] = loads.min()
            columns[k, 3:] = (time_s + np.multiply.outer(multipliers, loads)).min(axis=1)
        totals = np.ascontiguousarray(self._totals(columns).T)
        floors = self._floors(lowest, highest)
        found = []
        for stage, scale in zip(family.stages.tolist(), family.scale.tolist(), strict=True):
            smaller, larger = self._smaller[stage], self._larger[stage]
            level = np.full(len(smaller), lowest)
            for floor, count in floors:
                level[count[larger] > count[smaller]] = floor
            budget = knapsacks.free_bytes[stage] - level - (totals[0][larger] - totals[0][smaller])
            budget /= scale
            bound = np.zeros(len(smaller))
            for multiplier, until in zip(multipliers, totals[3:], strict=True):
                np.maximum(bound, until[larger] - until[smaller] - multiplier * budget, out=bound)
            lean = totals[1][larger] - totals[1][smaller]
            holds = totals[2][larger] == totals[2][smaller]
            holds &= lean <= budget + 1e-9 * (np.abs(budget) + totals[1][-1])
            found.append((stage, np.where(holds, bound, np.inf)))
        return found

    def _floors(self, lowest: float, highest: float) -> list[tuple[float, Floats]]:
        """Rising transient levels in the range, and how many layers of each ideal reach them."""
        smallest = np.array([kind.levels[0] for kind in self._knapsacks.kinds])
        levels = np.unique(smallest[(smallest > lowest) & (smallest <= highest)])
        if len(levels) > _TRANSIENT_BINS:
            levels = levels[np.linspace(0, len(levels) - 1, _TRANSIENT_BINS).round().astype(int)]
        reached = self._totals((smallest[:, None] >= levels).astype(np.float64))
        return list(zip(levels.tolist(), reached.T, strict=True))


def _union(bands: Sequence[Indices], ideals: int) -> Indices:
    member = np.zeros(ideals, dtype=bool)
    for band in bands:
        member[band] = True
    return np.flatnonzero(member)
