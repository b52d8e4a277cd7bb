"""Fewest seconds in which a stage can hold given layers: the options that fit its bytes.

The transient bytes of a stage are the largest of its layers, so every level that this largest may
have is tried: options above the level are forbidden, the level is charged, and the rest is a
knapsack over bytes that add up.  The least over the levels is exact.

Bytes that add up are resident + in_flight · stored + waiting · saved.  Where the resident and the
saved bytes of a layer do not depend on its option, all stages share the Pareto sets of (stored,
seconds), and only the budget (free - level - Σ (resident + waiting · saved)) / in_flight differs
between them; otherwise only stages of equal in_flight and waiting share them.

Where hosts have too little memory (planner.solver.side_constraints), a stage also has a limit on
the bytes that it puts there: its part of a host that it has for itself, or the whole of one that it
shares. A choice that breaks the limit is replaced by the fastest that keeps it
(planner.solver.sync_limited_knapsack).

`bounds_s` gives Lagrangian lower bounds for many contents at once,

    seconds >= max_λ Σ_l min_k (t_k + λ x_k) - λ · budget        λ >= 0, in s/byte.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING, SLACK
from meshwright.planner.solver.frontier import (
    FrontierStore,
    Group,
    Runs,
    fastest_choice,
    fastest_s,
    hull_steps,
)
from meshwright.planner.solver.partition_problem import Instance, Option

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_MULTIPLIERS = 24
# Beyond this number of hulls the multipliers come from the whole option tables only.
_HULLS = 64

# Kind of layer and how many: the content of a stage, order forgotten.
Content = Sequence[tuple[int, int]]


class OptionTable:
    """The options of all kinds as arrays [kind, option]; kinds with fewer are padded with inf."""

    def __init__(self, kinds: Sequence[Sequence[Option]]) -> None:
        shape = (len(kinds), max(map(len, kinds)), 6)
        numbers = np.full(shape, np.inf)
        for row, options in zip(numbers, kinds, strict=True):
            row[: len(options)] = [
                (
                    o.time_s,
                    o.stored_bytes,
                    o.transient_bytes,
                    o.resident_bytes,
                    o.sync_s,
                    o.kept_bytes,
                )
                for o in options
            ]
        self.sizes = [len(options) for options in kinds]
        self.present = np.isfinite(numbers[:, :, 0])
        self.time_s, self.stored, self.transient, self.resident, self.sync_s, self.kept = (
            np.ascontiguousarray(numbers[:, :, column]) for column in range(6)
        )
        self.least_time_s: Floats = self.time_s.min(axis=1)
        self.levels = [sorted({o.transient_bytes for o in options}) for options in kinds]
        self.host, self.host_resident = np.zeros((2, *self.present.shape))
        for kind, options in enumerate(kinds):
            self.host[kind, : len(options)] = [o.host_bytes for o in options]
            self.host_resident[kind, : len(options)] = [o.host_resident_bytes for o in options]

    def constant(self, values: Floats) -> bool:
        """Return whether `values` [kind, option] are the same for all options of each kind."""
        same = (values == values[:, :1]) | ~self.present
        return bool(same.all())


@dataclass(frozen=True, slots=True, eq=False)
class StageClass:
    """Stages that share Pareto sets: `stages` indexes them, `scale` divides their budgets.

    `load[kind, option]` are the bytes of a knapsack, `base_bytes[kind]` what any option has.
    """

    stages: Indices
    scale: Floats
    load: Floats
    base_bytes: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """`charged[kind, levels allowed, λ]` is the least t + λ x under each limit on the transient.

    `lean[kind, levels allowed]` are the least bytes.  With no level allowed both are inf.
    """

    multipliers: Floats
    charged: Floats
    lean: Floats


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one knapsack; `budget_bytes` is what its transient level leaves for loads."""

    transient_bytes: float
    budget_bytes: float
    sync_s: float
    host_bytes: float = np.inf
    in_flight: float = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Unscaled seconds and sync of a content, and the rising options of each kind's layers."""

    time_s: float
    sync_s: float
    options: list[list[int]]


@dataclass(frozen=True, slots=True)
class Fastest:
    """Unscaled seconds, sync, and options of a stage's layers in their order.

    No options that fit take less than `at_least_s`; without any that are known to, `time_s` is inf.
    """

    time_s: float
    sync_s: float
    options: tuple[int, ...]
    at_least_s: float


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a search among a stage's options that take no longer than a limit."""

    limit_s: float
    fastest: Fastest | None


def _refuse_both(both: bool) -> None:
    if both:
        raise ValueError("options that differ in sync_s leave no limit on hosts; use the program")


class Knapsacks:
    """All knapsacks of one instance; `store` keeps what other instances can use again."""

    def __init__(self, instance: Instance, store: FrontierStore) -> None:
        self.instance = instance
        self.store = store
        self.options = OptionTable(instance.kinds)
        self.layers = np.array(instance.layers, dtype=np.intp)
        stages = instance.stages
        self.time_scale = np.array([s.time_scale for s in stages])
        self.exposed_s = np.array([s.exposed_s for s in stages])
        self.in_flight = np.array([s.in_flight for s in stages])
        self.waiting = np.array([s.waiting for s in stages])
        capacity = np.array([s.capacity_bytes for s in stages])
        # Half of the allowance of instance.fits, which re-adds the bytes in another order.
        self.free_bytes = capacity * (1 + ROUNDING / 2) - [s.fixed_bytes for s in stages]
        self.sync_depends = not self.options.constant(self.options.sync_s)
        self.families = self._families()
        self._place = {
            int(s): (f, at)
            for f, family in enumerate(self.families)
            for at, s in enumerate(family.stages)
        }
        self._runs: dict[tuple[int, int, int], Runs] = {}
        self.checked: dict[tuple[int, Hashable, tuple[int, ...], float], Checked] = {}
        """By stage, its place (None where that is all the same), kinds of its layers and limit on
        sync: its fastest options that fit."""
        self.visited = 0
        """Parts of choices that were looked at for them (planner.solver.nonadditive_stage)."""
        self.host_limit = np.full(len(stages), np.inf)
        for host in instance.hosts:
            for s, ranks in enumerate(host.ranks):
                if ranks:
                    limit = host.capacity_bytes * (1 + ROUNDING / 2) / ranks
                    self.host_limit[s] = min(self.host_limit[s], limit)
        self.host_limited = bool(np.isfinite(self.host_limit).any())
        _refuse_both(self.host_limited and self.sync_depends)

    @cached_property
    def radix(self) -> list[int] | None:
        """[kind] What one layer adds to the number of a content; None if there are too many."""
        radix = [1]
        for total in np.bincount(self.layers, minlength=len(self.options.sizes)).tolist():
            radix.append(radix[-1] * (total + 1))
        return radix[:-1] if radix[-1] < 2**62 else None

    def _families(self) -> list[StageClass]:
        options, families = self.options, []
        if options.constant(options.resident) and options.constant(options.kept):
            for waiting in sorted(set(self.waiting.tolist())):
                stages = np.flatnonzero(self.waiting == waiting)
                base = options.resident[:, 0] + waiting * options.kept[:, 0]
                families.append(StageClass(stages, self.in_flight[stages], options.stored, base))
            return families
        pairs = zip(self.in_flight.tolist(), self.waiting.tolist(), strict=True)
        for in_flight, waiting in sorted(set(pairs)):
            stages = np.flatnonzero((self.in_flight == in_flight) & (self.waiting == waiting))
            load = options.resident + in_flight * options.stored
            if waiting:
                load = load + waiting * options.kept
            fewest_bytes = options.resident.min(axis=1)
            families.append(
                StageClass(stages, np.ones(len(stages)), load - fewest_bytes[:, None], fewest_bytes)
            )
        return families

    @cached_property
    def relaxed_families(self) -> list[Relaxed]:
        """Relaxed problems behind the Lagrangian bounds, one for each family."""
        return [self._relax_family(family) for family in self.families]

    def _relax_family(self, family: StageClass) -> Relaxed:
        options = self.options
        kinds, depth = len(options.sizes), max(map(len, options.levels))
        every_level = sum(map(len, options.levels)) <= _HULLS
        slopes = {0.0}
        for kind, levels in enumerate(options.levels):
            for level in levels if every_level else levels[-1:]:
                within = options.transient[kind] <= level
                added, saved = hull_steps(family.load[kind][within], options.time_s[kind][within])
                slopes.update((saved / added).tolist())
        multipliers = np.array(sorted(slopes))
        if len(multipliers) > _MULTIPLIERS:
            spread = np.linspace(0, len(multipliers) - 1, _MULTIPLIERS).round().astype(int)
            multipliers = multipliers[spread]

        charged_least = np.full((kinds, depth + 1, len(multipliers)), np.inf)
        lean = np.full((kinds, depth + 1), np.inf)
        padded = np.array(
            [levels + levels[-1:] * (depth - len(levels)) for levels in options.levels]
        )
        load = np.where(options.present, family.load, np.inf)
        charged = (
            options.time_s[:, :, None]
            + np.where(options.present, family.load, 0.0)[:, :, None] * multipliers
        )
        for allowed in range(1, depth + 1):
            forbidden = options.transient > padded[:, allowed - 1, None]
            charged_least[:, allowed] = np.where(forbidden[:, :, None], np.inf, charged).min(axis=1)
            lean[:, allowed] = np.where(forbidden, np.inf, load).min(axis=1)
        return Relaxed(multipliers, charged_least, lean)

    def allowed_levels(self, kinds: Iterable[int], level: float) -> list[int]:
        """Count the transient levels of each kind that do not exceed `level`."""
        return [sum(u <= level for u in self.options.levels[kind]) for kind in kinds]

    def fastest_s(self, content: Content, family: int) -> Floats:
        """[stage of family] Fewest unscaled seconds of the content; inf where it does not fit."""
        members = self.families[family]
        best = np.full(len(members.stages), np.inf)
        least_s = sum(count * float(self.options.least_time_s[kind]) for kind, count in content)
        for level in self._transient_levels(content):
            budgets = self._budgets(members, content, level)
            time_s = fastest_s(self._groups(family, content, level), budgets)
            np.minimum(best, time_s, out=best)
            if best.max() <= least_s * (1 + ROUNDING):
                break
        return best

    def family_of(self, stage: int) -> int:
        """Index of the family that a stage belongs to."""
        return self._place[stage][0]

    def alike(self, content: Content) -> bool:
        """Return whether one run of like layers makes up nearly all of the content.

        Then all stages of a family are cheapest to answer together.
        """
        if self.sync_depends or self.host_limited:
            return False
        sizes = sorted(self.options.sizes[kind] ** min(count, 3) for kind, count in content)
        return len(content) <= 4 and int(np.prod(sizes[:-1])) <= 16

    def fastest_choice(
        self,
        content: Content,
        stage: int,
        *,
        enough_s: float = 0.0,
        sync_limit_s: float = np.inf,
        spare_bytes: float = 0.0,
    ) -> Choice | None:
        """Return the options of the content that take the fewest seconds on `stage`.

        None if the content does not fit.  `enough_s` are seconds known to be the fewest,
        `spare_bytes` stay free.
        """
        f, at = self._place[stage]
        levels = self._transient_levels(content)
        spare = spare_bytes / float(self.families[f].scale[at])
        budgets = [float(self._budgets(self.families[f], content, u)[at]) - spare for u in levels]
        bounds_s = self._level_bounds_s(f, content, levels, budgets)
        best: Choice | None = None
        most = self.instance.stages[stage].most_in_flight
        for i in np.argsort(bounds_s, kind="stable").tolist():
            upper_s = best.time_s if best else np.inf
            if bounds_s[i] >= upper_s * (1 - ROUNDING) or bounds_s[i] == np.inf:
                break
            limits = Limits(
                levels[i],
                budgets[i],
                sync_limit_s,
                float(self.host_limit[stage]),
                float(self.in_flight[stage] if most is None else most),
            )
            choice = self._fastest_at(f, content, limits, upper_s)
            if choice is not None:
                best = choice
                if best.time_s <= enough_s:
                    break
        return best

    def _fastest_at(
        self, family: int, content: Content, limits: Limits, upper_s: float
    ) -> Choice | None:
        """Fastest choice at one transient level, None if none is below `upper_s`."""
        groups = self._groups(family, content, limits.transient_bytes)
        choice = fastest_choice(groups, limits.budget_bytes, upper_s)
        if choice is None:
            return None
        within = {
            kind: np.flatnonzero(self.options.transient[kind] <= limits.transient_bytes)
            for kind, _ in content
        }
        seconds, points = choice
        taken = [runs.options(n, point) for (runs, n), point in zip(groups, points, strict=True)]
        chosen = self._chosen(content, within, seconds, taken)
        if chosen.sync_s <= limits.sync_s and self._on_host(content, chosen, limits):
            return chosen
        from meshwright.planner.solver.sync_limited_knapsack import KindOptions, fastest_synced  # noqa: PLC0415 - seldom

        load, options = self.families[family].load, self.options
        second, most = options.sync_s, limits.sync_s
        if self.host_limited:
            second, most = self._host_load(limits), limits.host_bytes
        synced = fastest_synced(
            [
                KindOptions(
                    load_bytes=load[kind][within[kind]],
                    time_s=options.time_s[kind][within[kind]],
                    sync_s=second[kind][within[kind]],
                    count=count,
                )
                for kind, count in content
            ],
            limits.budget_bytes,
            most,
            upper_s,
        )
        return None if synced is None else self._chosen(content, within, *synced)

    def _host_load(self, limits: Limits) -> Floats:
        """[kind, option] Bytes on the host of a layer of a stage."""
        load: Floats = self.options.host_resident + limits.in_flight * self.options.host
        return load

    def _on_host(self, content: Content, chosen: Choice, limits: Limits) -> bool:
        """Return whether a choice of options stays within the bytes of the host."""
        if limits.host_bytes == np.inf:
            return True
        load = self._host_load(limits)
        used = sum(
            float(load[kind][picks].sum())
            for (kind, _), picks in zip(content, chosen.options, strict=True)
        )
        return used <= limits.host_bytes

    def _chosen(
        self, content: Content, within: dict[int, Indices], time_s: float, taken: list[list[int]]
    ) -> Choice:
        """Translate options among those `within` a level to options of their kinds."""
        options = [
            [int(within[kind][o]) for o in picks]
            for (kind, _), picks in zip(content, taken, strict=True)
        ]
        sync_s = sum(
            float(self.options.sync_s[kind][picks].sum())
            for (kind, _), picks in zip(content, options, strict=True)
        )
        return Choice(time_s, sync_s, options)

    def _level_bounds_s(
        self, family: int, content: Content, levels: list[float], budgets: list[float]
    ) -> Floats:
        """[level] Lagrangian bound if the largest transient is that level; inf if it cannot be."""
        relaxed = self.relaxed_families[family]
        kinds = [kind for kind, _ in content]
        counts = np.array([count for _, count in content], dtype=float)
        allowed = np.array([self.allowed_levels(kinds, level) for level in levels])
        room = np.array(budgets)
        charged_s = counts @ relaxed.charged[kinds, allowed]
        bounds_s: Floats = (charged_s - relaxed.multipliers * room[:, None]).max(axis=1)
        lean = relaxed.lean[kinds, allowed] @ counts
        bounds_s[lean > room + SLACK * np.abs(room)] = np.inf
        return bounds_s

    def _transient_levels(self, content: Content) -> list[float]:
        """Values that the largest transient of a stage with this content may take, rising."""
        levels = self.options.levels
        floor = max(levels[kind][0] for kind, _ in content)
        return sorted({u for kind, _ in content for u in levels[kind] if u >= floor})

    def _groups(self, family: int, content: Content, level: float) -> list[Group]:
        """Return the Pareto sets of the content with the transient limited to `level`."""
        return [(self._limited_runs(family, kind, level), count) for kind, count in content]

    def _limited_runs(self, family: int, kind: int, level: float) -> Runs:
        (allowed,) = self.allowed_levels([kind], level)
        runs = self._runs.get((family, kind, allowed))
        if runs is None:
            within = self.options.transient[kind] <= level
            load = self.families[family].load[kind][within]
            runs = self.store.runs(load, self.options.time_s[kind][within])
            self._runs[family, kind, allowed] = runs
        return runs

    def _budgets(self, family: StageClass, content: Content, level: float) -> Floats:
        """Bytes, on the scale of the family, that the loads may use on each of its stages."""
        base_bytes = sum(float(family.base_bytes[kind]) * count for kind, count in content)
        budgets: Floats = (self.free_bytes[family.stages] - level - base_bytes) / family.scale
        return budgets
