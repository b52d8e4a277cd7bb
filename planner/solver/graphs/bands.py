"""Which ideals can lie between two stages under a ceiling on stage seconds.

The stages before a cut host at most as much work as they have room for, and so do those after it:
`planner.solver.bounds.fractional_bound` turns a ceiling into a range of work for each cut, which
leaves a band of ideals.  No split under the ceiling is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.solver.bounds.fractional_bound import Fluid
from meshwright.planner.solver.graphs.ideals import Ideals
from meshwright.planner.solver.knapsack import Knapsacks

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_TURNS = 4  # of narrowing the bands of one ceiling ...
_WORTHWHILE = 0.9  # ... while at most this share of them is left


class Bands:
    """Bands of ideals for any ceiling.

    `cut_s` [ideal] is what a cut costs each of the stages that meet there.
    """

    def __init__(self, every: Ideals, knapsacks: Knapsacks, fluid: Fluid, cut_s: Floats) -> None:
        self._every = every
        self._fluid = fluid
        self._cut_s = cut_s
        self._scale, self._exposed_s = knapsacks.time_scale, knapsacks.exposed_s
        least_s = knapsacks.options.least_time_s[knapsacks.layers]
        totals = every.totals(np.stack([least_s, np.ones(len(least_s))], axis=1))
        self._until_s = totals[:, 0]
        self._sizes = totals[:, 1]
        self._slack_s = ROUNDING * float(self._until_s[-1])

    def ideals_under(self, ceiling_s: float) -> list[Indices]:
        """[cut] Ideals that can lie there, rising; the ends of the pipeline included.

        A cut costs at least what it costs at the cheapest ideal of its band.  That leaves the
        stages less room, which narrows the bands again.
        """
        bands = self._roughly(ceiling_s)
        member = np.zeros(len(self._every), dtype=bool)
        for band in bands:
            member[band] = True
        members = np.flatnonzero(member)
        work = self._every.totals(self._fluid.prices.T, members)
        done = [work[np.searchsorted(members, band)] for band in bands]
        for _ in range(_TURNS):
            if not all(len(band) for band in bands):
                break
            least_s = np.array([self._cut_s[band].min() for band in bands])
            ranges = self._fluid.ranges(ceiling_s, least_s)
            before = sum(len(band) for band in bands)
            for cut, band in enumerate(bands):
                further_s = (self._cut_s[band] - least_s[cut])[:, None]
                lower = ranges.lower[:, cut] + further_s * ranges.lower_per_s[:, cut]
                upper = ranges.upper[:, cut] - further_s * ranges.upper_per_s[:, cut]
                inside = np.all((done[cut] >= lower) & (done[cut] <= upper), axis=1)
                bands[cut], done[cut] = band[inside], done[cut][inside]
            if sum(len(band) for band in bands) > _WORTHWHILE * before:
                break
        return [np.zeros(1, dtype=np.intp), *bands, np.array([len(self._every) - 1])]

    def _roughly(self, ceiling_s: float) -> list[Indices]:
        """[cut] Ideals that leave the stages on both sides layers enough, not too many seconds."""
        stages, layers = len(self._scale), self._every.layers
        own_s = np.maximum((ceiling_s - self._exposed_s) / self._scale, 0.0)
        before = np.cumsum(own_s)[:-1] + self._slack_s
        after = np.cumsum(own_s[::-1])[-2::-1] + self._slack_s
        return [
            np.flatnonzero(
                (self._until_s <= before[cut])
                & (self._until_s >= self._until_s[-1] - after[cut])
                & (self._sizes > cut)
                & (self._sizes <= layers - stages + cut + 1)
            )
            for cut in range(stages - 1)
        ]
