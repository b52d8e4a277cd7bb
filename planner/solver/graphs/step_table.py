"""The table of steps through a lattice of ideals: what a search has left of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.solver.paths import Paths
from planner.solver.step_bounds import StepBounds
from planner.solver.table import Known, StageSecondsTable

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class StepTable(StageSecondsTable):
    """[step] Steps of all stages in turn.

    `hops` [stage] are the steps, from and to members of the bounds, by rising start, and `least_s`
    bounds on their seconds.
    """

    def __init__(
        self,
        bounds: StepBounds,
        hops: Sequence[tuple[Indices, Indices]],
        known: Known,
        least_s: Floats,
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
        self._begin(least_s, ~np.isfinite(least_s))
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
