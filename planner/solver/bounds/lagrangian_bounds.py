"""Lagrangian bounds on the seconds of steps through a lattice of ideals.

The layers of a step (stage s, ideals I < J) are a knapsack, and

    t(I, J) >= max_λ Σ_{l in J - I} min_k (t_k + λ x_k) - λ · budget_s(I, J)

in which the sum is a difference of two sums over ideals.  The transient bytes are not additive: the
levels that their largest may have are put in a few ranges; within one, options above the range are
forbidden, its lowest level is charged (or the largest of the layers' smallest, if that is more),
and the least of the bounds over the ranges is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import SLACK
from meshwright.planner.solver.bounds.downsets import Downsets
from meshwright.planner.solver.knapsack import Knapsacks, Relaxed, StageClass

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

Sends = Callable[[Indices, Indices], Floats]
"""Seconds that steps between these members pay."""

_TRANSIENT_BINS = 4
_FEW = 8


@dataclass(frozen=True, slots=True, eq=False)
class _IdealRange:
    """Sums over ideals for one range of transient levels and one family of stages.

    `levels` above the `lowest` rise, `reached` [level, member] counts layers that need as much.
    `totals` [column, member]: bytes that any option has; layers without an option in the range;
    leanest loads; and for each multiplier the least t + λ x.
    """

    lowest: float
    levels: Floats
    reached: Floats
    multipliers: Floats
    totals: Floats


class StepBounds:
    """Bounds for the steps between some ideals; `members` are those, `cut_s` [ideal] their cuts.

    Steps are named by positions in `members`.  `sent` are outputs that are not relayed: what they
    cost is of steps, and cuts cost nothing.
    """

    def __init__(
        self,
        knapsacks: Knapsacks,
        every: Downsets,
        members: Indices,
        cut_s: Floats,
        sent: Sends | None = None,
        unpaid: Sequence[int] = (),
    ) -> None:
        self.knapsacks = knapsacks
        self.every = every
        self.members = members
        self.cut_s = cut_s[members]
        self._sent, self._unpaid = sent, unpaid

    def total(self, per_kind: Floats) -> Floats:
        """[member] Sum of `per_kind` [kind] over the layers of each ideal."""
        bounds_s: Floats = self._totals(per_kind[:, None])[0]
        return bounds_s

    def fixed_s(self, stage: int, smaller: Indices, larger: Indices) -> Floats:
        """[step] Seconds of a stage besides its layers: exposed, and what it sends and receives."""
        exposed_s = float(self.knapsacks.exposed_s[stage])
        if stage in self._unpaid:
            return np.full(len(smaller), exposed_s)
        if self._sent is not None:
            return exposed_s + self._sent(smaller, larger)
        fixed_s: Floats = exposed_s + self.cut_s[smaller] + self.cut_s[larger]
        return fixed_s

    def stage_s(self, stage: int, smaller: Indices, larger: Indices) -> Floats:
        """[step] Bound on the seconds of a stage; inf where its layers cannot fit."""
        layers_s = self._layers_s(np.array([stage]), smaller, larger)[0]
        staged: Floats = layers_s + self.fixed_s(stage, smaller, larger)
        return staged

    def stages_s(self, smaller: Indices, larger: Indices) -> Floats:
        """[stage, step] The same of all stages without their cuts, steps of one content alike."""
        sample, number = np.arange(len(smaller)), np.arange(len(smaller))
        if self.codes is not None:
            contents = self.codes[larger] - self.codes[smaller]
            _, sample, number = np.unique(contents, return_index=True, return_inverse=True)
        seconds = self.layers_s(smaller[sample], larger[sample])[:, number]
        staged: Floats = seconds + self.knapsacks.exposed_s[:, None]
        return staged

    def layers_s(self, smaller: Indices, larger: Indices) -> Floats:
        """[stage, step] Bound on the seconds of the layers alone, on all stages."""
        bounds = np.empty((len(self.knapsacks.time_scale), len(smaller)))
        for family in self.knapsacks.families:
            bounds[family.stages] = self._layers_s(family.stages, smaller, larger)
        return bounds

    def _layers_s(self, stages: Indices, smaller: Indices, larger: Indices) -> Floats:
        """[stage, step] The same of some stages of one family."""
        number = self.knapsacks.family_of(int(stages[0]))
        family = self.knapsacks.families[number]
        scale = family.scale[np.searchsorted(family.stages, stages), None]
        free = self.knapsacks.free_bytes[stages, None]
        bound = np.full((len(stages), len(smaller)), np.inf)
        for range_ in self._ranges[number]:
            np.minimum(bound, _bound(range_, free, scale, smaller, larger), out=bound)
        bound *= self.knapsacks.time_scale[stages, None]
        return bound

    @cached_property
    def codes(self) -> NDArray[np.int64] | None:
        """[member] Its layers of each kind as one number; None if there are too many of them.

        Numbers are mixed-radix counts of kinds.
        """
        radix, layers = self.knapsacks.radix, self.knapsacks.layers
        return None if radix is None else self.every.codes(np.array(radix)[layers], self.members)

    def shared_s(self, stages: slice, *, rest: bool = False) -> Floats:
        """[member] Least unscaled seconds of its layers if these stages alone hold them.

        With `rest`, of the layers that it lacks.  Stage r has no more than B_r bytes of
        resident + q_r · stored, so with q the largest q_r no more than B_r / q_r of
        y = stored + resident / q, and all stages together take

            Σ_l t_l  >=  Σ_l min_k (t_k + λ y_k) - λ Σ_r B_r / q_r          for any λ >= 0.
        """
        multipliers, softened = self._softened_least_s
        if rest:
            softened = softened[:, -1:] - softened
        knapsacks = self.knapsacks
        free = knapsacks.free_bytes - min(map(min, knapsacks.options.levels))
        given = float(np.sum((free / knapsacks.in_flight)[stages]))
        bound: Floats = (softened - multipliers[:, None] * given).max(axis=0)
        return bound

    @cached_property
    def _softened_least_s(self) -> tuple[Floats, Floats]:
        """Multipliers λ, 0 first, and [λ, member] Σ min_k (t_k + λ y_k)."""
        knapsacks, options = self.knapsacks, self.knapsacks.options
        in_flight = float(knapsacks.in_flight.max())
        place = knapsacks.family_of(int(knapsacks.in_flight.argmax()))
        multipliers = knapsacks.relaxed_families[place].multipliers
        if len(knapsacks.families) > 1:
            multipliers = multipliers * in_flight
        if len(multipliers) > _FEW:
            multipliers = multipliers[
                np.linspace(0, len(multipliers) - 1, _FEW).round().astype(int)
            ]
        load = np.where(options.present, options.stored + options.resident / in_flight, 0.0)
        charged = options.time_s[:, :, None] + load[:, :, None] * multipliers
        return multipliers, self._totals(charged.min(axis=1))

    @cached_property
    def _ranges(self) -> list[list[_IdealRange]]:
        """[family] Ranges that together hold every level the largest transient may have."""
        knapsacks = self.knapsacks
        levels = sorted({u for levels in knapsacks.options.levels for u in levels})
        bins = len(levels) if len(levels) <= 2 * _TRANSIENT_BINS else _TRANSIENT_BINS
        parts = [(float(p[0]), float(p[-1])) for p in np.array_split(levels, bins)]
        return [
            [self._range(family, relaxed, lowest, highest) for lowest, highest in parts]
            for family, relaxed in zip(knapsacks.families, knapsacks.relaxed_families, strict=True)
        ]

    def _range(
        self, family: StageClass, relaxed: Relaxed, lowest: float, highest: float
    ) -> _IdealRange:
        options = self.knapsacks.options
        smallest = np.array([levels[0] for levels in options.levels])
        inside = smallest[(smallest > lowest) & (smallest <= highest)]
        levels = np.array(sorted(set(inside.tolist())))  # np.unique would import numpy.ma
        if len(levels) > _TRANSIENT_BINS:
            levels = levels[np.linspace(0, len(levels) - 1, _TRANSIENT_BINS).round().astype(int)]
        reached = np.empty((0, 0))
        if len(levels):
            reached = self._totals((smallest[:, None] >= levels).astype(np.float64))

        kinds = np.arange(len(options.sizes))
        allowed = np.array(self.knapsacks.allowed_levels(kinds.tolist(), highest))
        none = allowed == 0
        columns = [
            family.base_bytes,
            none.astype(np.float64),
            np.where(none, 0.0, relaxed.lean[kinds, allowed]),
            np.where(none[:, None], 0.0, relaxed.charged[kinds, allowed]),
        ]
        return _IdealRange(
            lowest, levels, reached, relaxed.multipliers, self._totals(np.column_stack(columns))
        )

    def _totals(self, per_kind: Floats) -> Floats:
        """[column, member] Sums over ideals of `per_kind` [kind, column]."""
        totals = self.every.totals(per_kind[self.knapsacks.layers], self.members)
        return np.ascontiguousarray(totals.T)


def _bound(
    ideals: _IdealRange, free: Floats, scale: Floats, smaller: Indices, larger: Indices
) -> Floats:
    """[stage, step] Bound on unscaled seconds if the largest transient lies in the range.

    `free` bytes and `scale` of the stages are columns.
    """
    level = np.full(len(smaller), ideals.lowest)
    for floor, reached in zip(ideals.levels, ideals.reached, strict=True):
        level[reached[larger] > reached[smaller]] = floor
    room = (free - level) / scale
    base, none, leanest, *softened = ideals.totals
    base = base / scale
    bound = np.zeros(room.shape)
    for multiplier, softened_s in zip(ideals.multipliers, softened, strict=True):
        until = softened_s + multiplier * base
        charge = until[..., larger]
        charge -= until[..., smaller]
        charge -= multiplier * room
        np.maximum(bound, charge, out=bound)
    lean = leanest + base
    fits = lean[..., larger] - lean[..., smaller] <= room + SLACK * (np.abs(room) + lean[..., -1:])
    fits &= none[larger] == none[smaller]
    return np.where(fits, bound, np.inf)
