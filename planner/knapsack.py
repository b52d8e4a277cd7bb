"""Fewest seconds in which a stage can hold given layers: the options that fit its bytes.

The transient bytes of a stage are the largest of its layers, so every level that this largest may
have is tried: options above the level are forbidden, the level is charged, and the rest is a
knapsack over bytes that add up.  The least over the levels is exact.

Bytes that add up are resident + in_flight · stored.  Where the resident bytes of a layer do not
depend on its option, all stages share the Pareto sets of (stored, seconds), and only the budget
(free - level - Σ resident) / in_flight differs between them; otherwise only stages of equal
in_flight share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.frontier import FrontierStore, Group, Runs, fastest_choice, fastest_s
from planner.instance import ROUNDING, Instance, Option

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Kind of layer and how many: the content of a stage, order forgotten.
Content = Sequence[tuple[int, int]]


class Kind:
    """The options of one kind of layer as arrays [option]."""

    def __init__(self, options: Sequence[Option]) -> None:
        self.time_s = np.array([o.time_s for o in options])
        self.stored = np.array([o.stored_bytes for o in options])
        self.transient = np.array([o.transient_bytes for o in options])
        self.resident = np.array([o.resident_bytes for o in options])
        self.sync_s = np.array([o.sync_s for o in options])
        self.levels: list[float] = sorted(set(self.transient.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Stages that share Pareto sets: `stages` indexes them, `scale` divides their budgets.

    `loads[kind]` are bytes per option, `base_bytes[kind]` what every option of a kind holds.
    """

    stages: NDArray[np.intp]
    scale: Floats
    loads: list[Floats]
    base_bytes: Floats


class Knapsacks:
    """All knapsacks of one instance; `store` keeps what other instances can use again."""

    def __init__(self, instance: Instance, store: FrontierStore) -> None:
        self.instance = instance
        self.store = store
        self.kinds = [Kind(options) for options in instance.kinds]
        self.layers = np.array(instance.layers, dtype=np.intp)
        stages = instance.stages
        self.time_scale = np.array([s.time_scale for s in stages])
        self.exposed_s = np.array([s.exposed_s for s in stages])
        self.in_flight = np.array([s.in_flight for s in stages])
        capacity = np.array([s.capacity_bytes for s in stages])
        # Half of the allowance of instance.fits, which re-adds the bytes in another order.
        self.free_bytes = capacity * (1 + ROUNDING / 2) - [s.fixed_bytes for s in stages]
        self.sync_depends = any(np.ptp(kind.sync_s) > 0 for kind in self.kinds)
        self.families = self._families()
        self._family_of = {int(s): f for f in self.families for s in f.stages}
        self._runs: dict[tuple[int, int, int], Runs] = {}
        self._members = [(f, {int(s): at for at, s in enumerate(f.stages)}) for f in self.families]

    def _families(self) -> list[Family]:
        if all(np.ptp(kind.resident) == 0 for kind in self.kinds):
            return [
                Family(
                    stages=np.arange(len(self.in_flight)),
                    scale=self.in_flight,
                    loads=[kind.stored for kind in self.kinds],
                    base_bytes=np.array([kind.resident[0] for kind in self.kinds]),
                )
            ]
        least = np.array([kind.resident.min() for kind in self.kinds])
        return [
            Family(
                stages=np.flatnonzero(self.in_flight == in_flight),
                scale=np.ones(int(np.count_nonzero(self.in_flight == in_flight))),
                loads=[
                    kind.resident - floor + in_flight * kind.stored
                    for kind, floor in zip(self.kinds, least, strict=True)
                ],
                base_bytes=least,
            )
            for in_flight in sorted(set(self.in_flight.tolist()))
        ]

    def content(self, first: int, count: int) -> list[tuple[int, int]]:
        """Kinds, rising, and their number among `count` layers from `first` on."""
        numbers: dict[int, int] = {}
        for kind in self.instance.layers[first : first + count]:
            numbers[kind] = numbers.get(kind, 0) + 1
        return sorted(numbers.items())

    def transient_levels(self, content: Content) -> list[float]:
        """Values that the largest transient of a stage with this content may take, rising."""
        floor = max(self.kinds[kind].levels[0] for kind, _ in content)
        return sorted({u for kind, _ in content for u in self.kinds[kind].levels if u >= floor})

    def groups(self, family: int, content: Content, level: float) -> list[Group]:
        """Return the Pareto sets of the content with the transient limited to `level`."""
        return [(self._limited(family, kind, level), count) for kind, count in content]

    def _limited(self, family: int, kind: int, level: float) -> Runs:
        table = self.kinds[kind]
        allowed = sum(u <= level for u in table.levels)
        key = (family, kind, allowed)
        runs = self._runs.get(key)
        if runs is None:
            within = np.flatnonzero(table.transient <= level)
            loads = self.families[family].loads[kind]
            # The index of an option inside `within` is translated back by `options`.
            runs = self.store.runs(loads[within], table.time_s[within])
            self._runs[key] = runs
        return runs

    def budgets(self, family: Family, content: Content, level: float) -> Floats:
        """Bytes, on the scale of the family, that the loads may use on each of its stages."""
        held = sum(float(family.base_bytes[kind]) * count for kind, count in content)
        budgets: Floats = (self.free_bytes[family.stages] - level - held) / family.scale
        return budgets

    def fastest_s(self, content: Content) -> Floats:
        """[stage] Fewest seconds of the content on each stage, unscaled; inf if it does not fit."""
        best = np.full(len(self.in_flight), np.inf)
        least_s = sum(count * float(self.kinds[kind].time_s.min()) for kind, count in content)
        for level in self.transient_levels(content):
            for f, family in enumerate(self.families):
                found = fastest_s(
                    self.groups(f, content, level), self.budgets(family, content, level)
                )
                best[family.stages] = np.minimum(best[family.stages], found)
            if best.max() <= least_s * (1 + ROUNDING):
                break
        return best

    def fastest_choice(self, content: Content, stage: int) -> tuple[float, list[list[int]]] | None:
        """Fewest unscaled seconds on `stage`, and the rising options of each kind's layers."""
        f, at = next(
            (f, where[stage]) for f, (_, where) in enumerate(self._members) if stage in where
        )
        family = self.families[f]
        best: tuple[float, list[int], float] | None = None
        for level in self.transient_levels(content):
            budget = float(self.budgets(family, content, level)[at])
            upper_s = best[0] if best else np.inf
            found = fastest_choice(self.groups(f, content, level), budget, upper_s)
            if found is not None:
                best = (*found, level)
        if best is None:
            return None
        seconds, points, level = best
        options = []
        for (kind, count), point in zip(content, points, strict=True):
            within = np.flatnonzero(self.kinds[kind].transient <= level)
            taken = self._limited(f, kind, level).options(count, point)
            options.append([int(within[o]) for o in taken])
        return seconds, options
