"""Seconds of every step through a lattice of ideals: exact, or bounded from below.

A table starts from bounds (`planner.solver.graphs.step_bounds`); `StepTable.settle` replaces the
bound of a step by its exact value, and that of all steps of its stage with layers of the same
kinds.  Where a stage's bytes are no sums over its layers, the value by sums is a bound too, and the
options of the step are checked (`planner.solver.checked`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.solver.assembly import content_of, fastest_options
from planner.solver.checked import fastest_checked
from planner.solver.descent import Costs
from planner.solver.graphs.step_bounds import StepBounds
from planner.solver.instance import UsedBytes
from planner.solver.knapsack import Fastest
from planner.solver.paths import Paths

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Booleans = NDArray[np.bool_]

# Up to so many alike contents of so many steps are solved without bounds.
_OUTRIGHT, _OUTRIGHT_STEPS = 64, 20_000


@dataclass(frozen=True, slots=True)
class Settled:
    """Unscaled seconds and sync of the fastest options of a content; inf if it does not fit."""

    time_s: float
    sync_s: float


# What is known exactly, by stage and content (kind, number of layers), kinds rising.
Known = dict[tuple[int, tuple[tuple[int, int], ...]], Settled]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """How a stage's bytes are counted where they are no sums over its layers."""

    used_bytes: UsedBytes
    known: dict[tuple[object, ...], Fastest | None] = field(default_factory=dict, repr=False)
    """What was found of stages and their layers, for the tables of other ceilings."""


class StepTable:
    """[step] `stage_s`, and `settled` where it is exact; inf where the layers do not fit.

    `hops` [stage] are the steps, from and to members of the bounds, by rising start.  Bounds that
    are known already can be given; `known` keeps what is exact for the tables of other ceilings.
    """

    def __init__(
        self,
        bounds: StepBounds,
        hops: Sequence[tuple[Indices, Indices]],
        known: Known,
        bounds_s: Floats | None = None,
        counted: StageBytes | None = None,
    ) -> None:
        self._bounds = bounds
        self._counted = counted
        self._fastest: dict[int, Fastest] = {}
        """[step] Of steps that were checked, the options."""
        self._loose: dict[int, float] = {}
        self._knapsacks = knapsacks = bounds.knapsacks
        self._known = known
        self._hops = hops
        self.ways = Paths([len(bounds.members)] * (len(hops) + 1), hops)
        self._codes()
        self._fixed_s = np.concatenate(
            [bounds.fixed_s(stage, *hop) for stage, hop in enumerate(hops)]
        )
        credits_s = np.array(knapsacks.instance.credits_s)
        self._forward_s: Floats | None = None
        self._credit_s = self._over(credits_s, knapsacks.time_scale) if credits_s.any() else None
        sync_s = knapsacks.options.sync_s.min(axis=1)
        self.sync_s = self._over(sync_s, np.ones(len(hops))) if sync_s.any() else None
        self.sync_depends = knapsacks.sync_depends
        self.sync_limit_s = np.inf
        # Sync of the choice that settled a step; read only where options differ in it.
        self._used_s = np.zeros(len(self.ways) if self.sync_depends else 0)
        exact_s = self._outright()
        if exact_s is not None:
            self.stage_s = exact_s
            self.settled: Booleans = np.ones(len(exact_s), dtype=bool)
            self._checked = self._unchecked()
            return
        if bounds_s is None:
            each = [bounds.stage_s(stage, *hop) for stage, hop in enumerate(hops)]
            bounds_s = np.concatenate(each)
        self.stage_s = bounds_s
        self.settled = ~np.isfinite(bounds_s)
        self._checked = self._unchecked()
        self._recall()

    def _unchecked(self) -> Booleans:
        """[step] Whether it is that of options that fit; what is impossible by sums is."""
        return ~np.isfinite(self.stage_s) if self._counted else np.ones(len(self.stage_s), bool)

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
        return np.zeros(len(self.ways)) if self.sync_s is None else self.sync_s

    def layers(self, step: int) -> list[int]:
        """Layers that the step adds, rising."""
        stage = self.ways.level(step)
        at = step - self.ways.steps(stage).start
        smaller, larger = (self._bounds.members[ends[at]] for ends in self._hops[stage])
        return self._bounds.every.difference(int(smaller), int(larger))

    def settle(self, steps: Sequence[int]) -> bool:
        """Make exact what the steps take; False if everything was."""
        bounded = [step for step in steps if not self.settled[step]]
        for step in bounded:
            stage = self.ways.level(step)
            for at, found in self._exact(stage, self._content(step)):
                self._write(at, int(self.content[step]), found)
        unchecked = [step for step in steps if not self._checked[step]]
        for step in unchecked:
            self._check(step)
        return bool(bounded or unchecked)

    def options(self, step: int) -> list[int]:
        """Return the options of the step's layers with which its stage is fastest."""
        if step in self._fastest:
            return list(self._fastest[step].options)
        kinds = self._kinds(self.layers(step))
        return fastest_options(
            self._knapsacks, kinds, self.ways.level(step), sync_limit_s=self.sync_limit_s
        )

    def least_costs(self) -> Costs | None:
        """[step] Costs that are no more than exact ones; None if those of `costs` are exact."""
        return least_costs(self, (self,))

    @property
    def loose(self) -> dict[int, float]:
        """[step] Of steps that are not known exactly, seconds that are no more than theirs."""
        return self._loose

    def _kinds(self, held: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._knapsacks.instance.layers[layer] for layer in held)

    def _check(self, step: int) -> None:
        """Make a step that of the fastest options that fit, and others that hold the same."""
        stage, held = self.ways.level(step), self.layers(step)
        kinds = self._kinds(held)
        found = self._fastest_of(stage, step, kinds, held)
        same = [step]
        if self._counted is not None and not self._counted.used_bytes.by_place:
            steps = self.ways.steps(stage)
            alike = np.flatnonzero(self.content[steps] == self.content[step])
            same = [
                at for at in (steps.start + alike).tolist() if self._kinds(self.layers(at)) == kinds
            ]
        scale = float(self._knapsacks.time_scale[stage])
        for at in same:
            self._checked[at] = True
            fixed_s, least_s = float(self._fixed_s[at]), self._loose.pop(at, self.stage_s[at])
            if found is None:
                self.stage_s[at] = np.inf
                continue
            if found.at_least_s < found.time_s:
                self._loose[at] = max(least_s, found.at_least_s * scale + fixed_s)
            self._fastest[at] = found
            self.stage_s[at] = max(least_s, found.time_s * scale + fixed_s)
            if self.sync_depends:
                self._used_s[at] = found.sync_s

    def _fastest_of(
        self, stage: int, step: int, kinds: tuple[int, ...], held: Sequence[int]
    ) -> Fastest | None:
        assert self._counted is not None, "sums are exact without"
        place = (self._before(step), tuple(held)) if self._counted.used_bytes.by_place else ()
        key = (stage, kinds, place, self.sync_limit_s)
        known = self._counted.known
        if key not in known:
            known[key] = fastest_checked(
                self._knapsacks,
                stage,
                kinds,
                partial(self._counted.used_bytes.of, stage, self._before(step), held),
                sync_limit_s=self.sync_limit_s,
            )
        return known[key]

    def _before(self, step: int) -> tuple[int, ...]:
        """Layers of the stages before, rising."""
        stage = self.ways.level(step)
        smaller = self._hops[stage][0][step - self.ways.steps(stage).start]
        return tuple(self._bounds.every.difference(0, int(self._bounds.members[smaller])))

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
            keeps = ~np.isfinite(self.stage_s) | (self._used_s <= limit_s)
            self.settled &= keeps
            if self._counted is not None:
                self._checked &= keeps
        elif self.sync_s is not None:
            self.stage_s[self.sync_s > limit_s] = np.inf
            self.settled |= self.sync_s > limit_s

    def _write(self, stage: int, code: int, found: Settled) -> None:
        steps = self.ways.steps(stage)
        same = steps.start + np.flatnonzero(self.content[steps] == code)
        self.stage_s[same] = found.time_s * self._knapsacks.time_scale[stage] + self._fixed_s[same]
        self.settled[same] = True
        if self._counted is not None:
            self._checked[same] = ~np.isfinite(self.stage_s[same])
        if self.sync_depends:
            self._used_s[same] = found.sync_s

    def _recall(self) -> None:
        """Take over what is known from other ceilings."""
        for (stage, content), found in self._known.items() if self._radix else ():
            self._write(stage, sum(self._radix[kind] * n for kind, n in content), found)

    def _outright(self) -> Floats | None:
        """[step] Exact seconds, if contents are so few and alike that bounds are not worth it."""
        if not self._radix or self.sync_depends or len(self.ways) > _OUTRIGHT_STEPS:
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
        held = [number[self.ways.steps(stage)] for stage in range(len(scale))]
        staged = [factor * own[at] for factor, own, at in zip(scale, seconds, held, strict=True)]
        exact_s: Floats = np.concatenate(staged) + self._fixed_s
        return exact_s

    def _content(self, step: int) -> list[tuple[int, int]]:
        """Kinds, rising, and their number among the layers of a step."""
        return content_of(self._kinds(self.layers(step)))

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
            codes = self._bounds.every.codes(np.array(radix[:-1])[layers], self._bounds.members)
            self.content = np.concatenate([codes[b] - codes[a] for a, b in self._hops])
        else:
            self._radix = []
            self.content = np.arange(len(self.ways))

    def _over(self, per_kind: Floats, scale: Floats) -> Floats:
        """[step] Sums over the layers of steps, times the scale of their stage."""
        until = self._bounds.total(per_kind)
        return np.concatenate(
            [
                factor * (until[larger] - until[smaller])
                for factor, (smaller, larger) in zip(scale, self._hops, strict=True)
            ]
        )


class _Priced(Protocol):
    def costs(self) -> Costs:
        """[step] What the objective counts."""


def least_costs(steps: _Priced, tables: Sequence[StepTable]) -> Costs | None:
    """Return the costs of steps with no more than exact seconds in the tables behind them.

    None if all seconds there are exact.
    """
    if not any(table.loose for table in tables):
        return None
    known = [table.stage_s for table in tables]
    for table in tables:
        table.stage_s = table.stage_s.copy()
        table.stage_s[list(table.loose)] = list(table.loose.values())
    costs = steps.costs()
    for table, stage_s in zip(tables, known, strict=True):
        table.stage_s = stage_s
    return costs
