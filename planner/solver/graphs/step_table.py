"""The table of steps through a lattice of ideals: what a search has left of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.solver.assembly import content_of
from planner.solver.paths import Paths
from planner.solver.step_bounds import StepBounds
from planner.solver.table import Known, Table

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# Up to so many alike contents of so many steps are solved without bounds.
_OUTRIGHT, _OUTRIGHT_STEPS = 64, 20_000


class StepTable(Table):
    """[step] Steps of all stages in turn.

    `hops` [stage] are the steps, from and to members of the bounds, by rising start.  Bounds that
    are known already can be given.
    """

    def __init__(
        self,
        bounds: StepBounds,
        hops: Sequence[tuple[Indices, Indices]],
        known: Known,
        bounds_s: Floats | None = None,
    ) -> None:
        super().__init__(bounds.knapsacks, known)
        self._bounds = bounds
        self._hops = hops
        self.ways: Paths = Paths([len(bounds.members)] * (len(hops) + 1), hops)
        self._radix = bounds.knapsacks.radix or []
        """Without it a step is the only one of its stage that is settled with it."""
        self.content = np.arange(len(self.ways))
        codes = bounds.codes
        if codes is not None:
            self.content = np.concatenate([codes[b] - codes[a] for a, b in hops])
        self._besides_s = np.concatenate(
            [bounds.fixed_s(stage, *hop) for stage, hop in enumerate(hops)]
        )
        exact_s = self._outright()
        if exact_s is not None:
            self._begin(exact_s, np.ones(len(exact_s), dtype=bool))
            return
        if bounds_s is None:
            each = [bounds.stage_s(stage, *hop) for stage, hop in enumerate(hops)]
            bounds_s = np.concatenate(each)
        self._begin(bounds_s, ~np.isfinite(bounds_s))
        # Take over what is known from other ceilings.
        for (stage, content), found in known.items() if self._radix else ():
            code = sum(self._radix[kind] * n for kind, n in content)
            self._write_all(stage, self._with_content(stage, code), found)

    def entries(self, way: tuple[int, ...]) -> Sequence[int]:
        """Steps of a path."""
        return way

    def layers(self, entry: int) -> Sequence[int]:
        """Layers that the step adds, rising."""
        return self._bounds.every.difference(*self._place(entry))

    def _before(self, entry: int) -> Sequence[int]:
        return self._bounds.every.difference(0, self._place(entry)[0])

    def _stage_of(self, entry: int) -> int:
        return self.ways.level(entry)

    def _place(self, entry: int) -> tuple[int, int]:
        """Both downsets."""
        stage = self.ways.level(entry)
        at = entry - self.ways.steps(stage).start
        smaller, larger = (int(self._bounds.members[ends[at]]) for ends in self._hops[stage])
        return smaller, larger

    def _like(self, stage: int, entry: int) -> Indices:
        return self._with_content(stage, int(self.content[entry]))

    def _with_content(self, stage: int, code: int) -> Indices:
        steps = self.ways.steps(stage)
        found: Indices = steps.start + np.flatnonzero(self.content[steps] == code)
        return found

    def _over(self, per_kind: Floats, scale: Floats) -> Floats:
        until = self._bounds.total(per_kind)
        return np.concatenate(
            [
                factor * (until[larger] - until[smaller])
                for factor, (smaller, larger) in zip(scale, self._hops, strict=True)
            ]
        )

    def _outright(self) -> Floats | None:
        """[step] Exact seconds, if contents are so few and alike that bounds are not worth it."""
        if not self._radix or self.sync_depends or len(self.ways) > _OUTRIGHT_STEPS:
            return None
        _, sample, number = np.unique(self.content, return_index=True, return_inverse=True)
        if len(sample) > _OUTRIGHT:
            return None
        contents = [content_of(self._kinds_of(int(step))) for step in sample]
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
        exact_s: Floats = np.concatenate(staged) + self._besides_s
        return exact_s
