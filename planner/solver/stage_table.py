"""Seconds of stages with what they may hold: exact, or bounded from below.

An entry of a table is a step: a stage with some layers in a row of an order that runs, what one
downset of the layers (with a layer, all that it reads) adds to another.  Of a chain the downsets
are its prefixes.  A table has the steps that a search has left, stage after stage.

A table starts from bounds (`planner.solver.bounds.lagrangian_bounds`); `Table.settle` replaces the
bound of an entry by its exact value when a search wants to use it, and those of all entries of its
stage with as many layers of the same kinds: they share a knapsack.  Where a stage's bytes are no
sums over its layers, the value by sums is a bound too, and the options are checked
(`meshwright.planner.solver.nonadditive_stage`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.solver.bottleneck_path import Costs
from meshwright.planner.solver.bounds.downsets import Runs
from meshwright.planner.solver.bounds.lagrangian_bounds import StepBounds
from meshwright.planner.solver.knapsack import Checked, Content, Fastest
from meshwright.planner.solver.nonadditive_stage import fastest_checked
from meshwright.planner.solver.paths import Paths
from meshwright.planner.solver.split import content_of, fastest_options

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Settled:
    """Unscaled seconds and sync of the fastest options of a content; inf if it does not fit."""

    time_s: float
    sync_s: float


Known = dict[tuple[int, tuple[tuple[int, int], ...]], Settled]
"""Exact results, by stage and content (kind, number of layers), kinds rising."""


class StepTable:
    """[step] `stage_s`, and `settled` where it is exact; inf where the layers do not fit.

    `cached_costs` keeps what is exact for the tables of other ceilings.
    """

    def __init__(
        self,
        bounds: StepBounds,
        hops: Sequence[Runs],
        cached_costs: Known,
        least_s: Floats,
        *,
        quantum_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> None:
        """`hops` [stage] are the steps, from and to members of the bounds, by rising start.

        `least_s` are bounds on their seconds.  Seconds are multiples of the quantum, if there is
        one.  Of stages that take longer than `limit_s` nobody wants to know how long.
        """
        knapsacks = self._knapsacks = bounds.knapsacks
        self._bounds, self._hops, self._known = bounds, hops, cached_costs
        self._quantum_s, self._limit_s = quantum_s, limit_s
        self.ways = Paths([len(bounds.members)] * (len(hops) + 1), hops)
        self.stage_s = self._round_down(least_s)
        self.settled: Booleans = ~np.isfinite(least_s)
        self.sync_depends = knapsacks.sync_depends
        """True if options of one kind differ in `sync_s`: then it is no part of `costs`."""
        self.sync_limit_s = np.inf
        self.loose: dict[int, float] = {}
        """Seconds that are no more than those of entries that are not known exactly."""
        self._besides_s = np.concatenate([bounds.fixed_s(s, *hop) for s, hop in enumerate(hops)])
        """Seconds of stages besides their layers: exposed, and the cuts at both ends."""
        self._used_bytes = knapsacks.instance.used_bytes
        self._checked: Booleans = np.ones(len(least_s), dtype=bool)
        """True where an entry is of options that fit; with exact sums, all settled entries are."""
        if self._used_bytes is not None:
            self._checked = self.settled.copy()
        self._used_s = np.zeros(len(least_s) if self.sync_depends else 0)
        """Sync of the choice that settled an entry, where options differ in it."""
        self.content = np.arange(len(self.ways))
        self._take_over()

    def _take_over(self) -> None:
        """Number the contents of steps, and take what is known of them from other ceilings.

        Where kinds are too many for numbers, a step is the only one that is settled with it.
        """
        codes, radix = self._bounds.codes, self._knapsacks.radix
        if codes is None or radix is None:
            return
        self.content = np.concatenate([codes[b] - codes[a] for a, b in self._hops])
        for (stage, content), settled in self._known.items():
            code = sum(radix[kind] * n for kind, n in content)
            self._write_all(stage, self._with_content(stage, code), settled)

    def layers(self, entry: int) -> Sequence[int]:
        """Layers that a step adds, rising."""
        return self._bounds.every.difference(*self._place(entry))

    def _layers_before(self, entry: int) -> Sequence[int]:
        """Layers of the stages before, rising."""
        return self._bounds.every.difference(0, self._place(entry)[0])

    def _place(self, entry: int) -> tuple[int, int]:
        """Both downsets."""
        stage = self.ways.level(entry)
        at = entry - self.ways.steps(stage).start
        smaller, larger = (int(self._bounds.members[ends[at]]) for ends in self._hops[stage])
        return smaller, larger

    def _like(self, stage: int, entry: int) -> Indices:
        """Entries of a stage with as many layers of the same kinds as this one."""
        return self._with_content(stage, int(self.content[entry]))

    def _with_content(self, stage: int, code: int) -> Indices:
        steps = self.ways.steps(stage)
        entries: Indices = steps.start + np.flatnonzero(self.content[steps] == code)
        return entries

    def _sums_of_layers(self, per_kind: Floats, scale: Floats) -> Floats:
        """[entry] Sums over the layers of entries, times the scale of their stage."""
        until = self._bounds.total(per_kind)
        return np.concatenate(
            [
                factor * (until[larger] - until[smaller])
                for factor, (smaller, larger) in zip(scale, self._hops, strict=True)
            ]
        )

    def _round_down(self, values: Floats) -> Floats:
        """Return values as entries have them."""
        if not self._quantum_s:
            return values
        rounded: Floats = np.round(values / self._quantum_s) * self._quantum_s
        return rounded

    def _enough_s(self, entry: int) -> float:
        """Seconds of an entry's layers, unscaled, that are known to be the fewest; 0 if unknown."""
        if not self._quantum_s:
            return 0.0
        staged_s = float(self.stage_s[entry] - self._besides_s[entry])
        # A hair more than exactly.
        scale = float(self._knapsacks.time_scale[self.ways.level(entry)])
        return (staged_s + 4 * self._quantum_s) / scale

    def laid(self, way: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        """Return a way's layers in order, its cuts, and the options of the layers."""
        contents = [self.layers(entry) for entry in way]
        options = [option for entry in way for option in self.options(entry)]
        order = tuple(layer for layers in contents for layer in layers)
        return order, tuple(accumulate(map(len, contents), initial=0)), options

    def costs(self) -> Costs:
        """[entry] What the objective counts."""
        instance = self._knapsacks.instance
        stage_s, once_s = self.stage_s, []
        if instance.forward_apart:
            stage_s = stage_s - self.forward_s
            once_s.append(instance.steady * self.forward_s)
        if self.sync_s is not None and not self.sync_depends:
            once_s.append(self.sync_s)
        return Costs(stage_s, self.fill_s(), tuple(once_s), instance.steady)

    def bounding_costs(self) -> Costs | None:
        """[entry] Costs that are no more than exact ones; None if those of `costs` are exact."""
        return bounding_costs(self, (self,))

    def fill_s(self) -> Floats:
        """[entry] What an entry adds to the sum over stages, credits taken off."""
        fill = self._knapsacks.instance.fill
        if fill == 1.0 and self._credit_s is None:
            return self.stage_s
        fill_s = np.full(self.stage_s.shape, np.inf)
        np.multiply(self.stage_s, fill, out=fill_s, where=np.isfinite(self.stage_s))
        if self._credit_s is not None:
            fill_s -= self._credit_s
        return self._round_down(fill_s)

    @cached_property
    def _credit_s(self) -> Floats | None:
        credits_s = np.array(self._knapsacks.instance.credits_s)
        return (
            self._sums_of_layers(credits_s, self._knapsacks.time_scale) if credits_s.any() else None
        )

    @cached_property
    def forward_s(self) -> Floats:
        """[entry] The forward share of its seconds, where all options of a kind agree in it."""
        per_kind = np.array([kind[0].forward_s for kind in self._knapsacks.instance.kinds])
        own_s = self._sums_of_layers(per_kind, self._knapsacks.time_scale)
        return self._round_down(own_s + self._besides_s / 2)

    @cached_property
    def sync_s(self) -> Floats | None:
        """[entry] Least seconds of synchronisation; None if there are none."""
        per_kind = self._knapsacks.options.sync_s.min(axis=1)
        if not per_kind.any():
            return None
        return self._round_down(
            self._sums_of_layers(per_kind, np.ones(len(self._knapsacks.time_scale)))
        )

    def shortest_sync_s(self) -> Floats:
        """[entry] Least seconds of synchronisation."""
        return np.zeros(len(self.stage_s)) if self.sync_s is None else self.sync_s

    def settle(self, way: Sequence[int]) -> bool:
        """Make steps exact; False if all were."""
        changed = False
        for entry in way:
            if not self.settled[entry]:
                changed = True
                content = content_of(self._kinds_of(entry))
                for stage, cost in self._exact(self.ways.level(entry), content):
                    self._write(stage, entry, cost)
            if not self._checked[entry]:
                changed = True
                self._check(entry)
        return changed

    def options(self, entry: int) -> Sequence[int]:
        """Return the options of an entry's layers with which its stage is fastest."""
        stage, kinds = self.ways.level(entry), self._kinds_of(entry)
        if self._used_bytes is not None:
            checked = self._fastest_of(stage, entry, kinds)
            assert checked is not None, "only stages that fit are assembled"
            return checked.options
        return fastest_options(
            self._knapsacks,
            kinds,
            stage,
            sync_limit_s=self.sync_limit_s,
            enough_s=self._enough_s(entry),
        )

    def limit_sync(self, limit_s: float) -> None:
        """Allow only options with which no stage synchronises longer than `limit_s`.

        What an entry was settled at stays a lower bound, and exact if its choice keeps the limit.
        """
        self.sync_limit_s = limit_s
        if self.sync_depends:
            keeps = ~np.isfinite(self.stage_s) | (self._used_s <= limit_s)
            self.settled &= keeps
            if self._used_bytes is not None:
                self._checked &= keeps
        elif self.sync_s is not None:
            self.stage_s[self.sync_s > limit_s] = np.inf
            self.settled |= self.sync_s > limit_s

    def _kinds_of(self, entry: int) -> tuple[int, ...]:
        kinds = self._knapsacks.instance.layers
        return tuple(kinds[layer] for layer in self.layers(entry))

    def _staged_s(self, stage: int, entries: Indices, layers_s: float) -> Floats:
        """[entry] Seconds of a stage from the unscaled ones of its layers."""
        own_s = layers_s * float(self._knapsacks.time_scale[stage])
        return self._round_down(own_s + self._besides_s[entries])

    def _exact(self, stage: int, content: Content) -> list[tuple[int, Settled]]:
        """Return the exact value for a stage, and for others where they come for free."""
        knapsacks, key = self._knapsacks, tuple(content)
        cached = self._known.get((stage, key))
        if knapsacks.alike(content):
            family = knapsacks.family_of(stage)
            stages = knapsacks.families[family].stages.tolist()
            if cached is not None:
                return [(s, self._known[s, key]) for s in stages]
            seconds = knapsacks.fastest_s(content, family).tolist()
            costs = [(s, Settled(time_s, 0.0)) for s, time_s in zip(stages, seconds, strict=True)]
            self._known.update({(s, key): value for s, value in costs})
            return costs
        if cached is not None and cached.sync_s <= self.sync_limit_s:
            return [(stage, cached)]
        choice = knapsacks.fastest_choice(content, stage, sync_limit_s=self.sync_limit_s)
        value = Settled(np.inf, 0.0) if choice is None else Settled(choice.time_s, choice.sync_s)
        if self.sync_limit_s == np.inf:
            self._known[stage, key] = value
        return [(stage, value)]

    def _write(self, stage: int, entry: int, settled: Settled) -> None:
        """Make exact the entries of a stage that hold what this one does."""
        self._write_all(stage, self._like(stage, entry), settled)

    def _write_all(self, stage: int, same: Indices, settled: Settled) -> None:
        self.stage_s[same] = self._staged_s(stage, same, settled.time_s)
        self.settled[same] = True
        if self._used_bytes is not None:
            self._checked[same] = ~np.isfinite(self.stage_s[same])
        if self.sync_depends:
            self._used_s[same] = settled.sync_s

    def _check(self, entry: int) -> None:
        """Make an entry that of the fastest options that fit, and others that hold the same."""
        stage, kinds = self.ways.level(entry), self._kinds_of(entry)
        fastest = self._fastest_of(stage, entry, kinds)
        same = np.array([entry])
        if self._used_bytes is not None and not self._used_bytes.by_place:
            same = self._like(stage, entry)
            if len(set(kinds)) > 1:
                # Layers of the same kinds may come in another order.
                same = same[[self._kinds_of(at) == kinds for at in same.tolist()]]
        self._checked[same] = True
        least_s = self.stage_s[same]
        if self.loose:
            least_s = [self.loose.pop(at, float(self.stage_s[at])) for at in same.tolist()]
        if fastest is None:
            self._exclude(stage, same)
            return
        if fastest.at_least_s < fastest.time_s:
            at_least_s = np.maximum(least_s, self._staged_s(stage, same, fastest.at_least_s))
            self.loose.update(zip(same.tolist(), at_least_s.tolist(), strict=True))
        self.stage_s[same] = np.maximum(least_s, self._staged_s(stage, same, fastest.time_s))
        if self.sync_depends:
            self._used_s[same] = fastest.sync_s

    def _exclude(self, stage: int, same: Indices) -> None:
        """Exclude entries that do not fit, and those that have all layers of one of them."""
        assert self._used_bytes is not None, "sums are exact without"
        if self._used_bytes.grows:
            first, (smaller, larger) = self.ways.steps(stage).start, self._hops[stage]
            least_end = np.full(len(self._bounds.members), np.inf)
            np.minimum.at(least_end, smaller[same - first], larger[same - first])
            least_end = np.minimum.accumulate(least_end[::-1])[::-1]
            same = first + np.flatnonzero(larger >= least_end[smaller])
        self.stage_s[same], self.settled[same], self._checked[same] = np.inf, True, True
        for entry in self.loose.keys() & set(same.tolist()):
            del self.loose[entry]

    def _fastest_of(self, stage: int, entry: int, kinds: tuple[int, ...]) -> Fastest | None:
        """Return the fastest options of an entry that fit, within limits on seconds and sync."""
        used_bytes, knapsacks = self._used_bytes, self._knapsacks
        assert used_bytes is not None, "sums are exact without"
        key = stage, self._place(entry) if used_bytes.by_place else None, kinds, self.sync_limit_s
        limit_s = self._limit_s - float(knapsacks.exposed_s[stage])
        limit_s /= float(knapsacks.time_scale[stage])
        cached = knapsacks.checked.get(key)
        if cached is None or (cached.fastest is None and cached.limit_s < limit_s):
            place = stage, self._layers_before(entry), self.layers(entry)
            fastest = fastest_checked(
                knapsacks,
                stage,
                kinds,
                partial(used_bytes.of, *place),
                used_by_many=used_bytes.of_many and partial(used_bytes.of_many, *place),
                fewest_bytes=used_bytes.fewest and partial(used_bytes.fewest, *place),
                sync_limit_s=self.sync_limit_s,
                limit_s=limit_s,
            )
            cached = knapsacks.checked[key] = Checked(limit_s, fastest)
        return cached.fastest


class _Priced(Protocol):
    def costs(self) -> Costs:
        """[step] What the objective counts."""


def bounding_costs(steps: _Priced, tables: Sequence[StepTable]) -> Costs | None:
    """Return the costs of steps with no more than exact seconds in the tables behind them.

    None if all seconds there are exact.
    """
    if not any(table.loose for table in tables):
        return None
    exact_costs = [table.stage_s for table in tables]
    for table in tables:
        table.stage_s = table.stage_s.copy()
        table.stage_s[list(table.loose)] = list(table.loose.values())
    costs = steps.costs()
    for table, stage_s in zip(tables, exact_costs, strict=True):
        table.stage_s = stage_s
    return costs
