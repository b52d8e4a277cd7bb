"""A bound for all splits of a graph that has too many ideals: no cut is cheap everywhere.

Give layers the prices of `planner.solver.bounds.fractional_bound`.  How much of the price lies
before a cut is a number between 0 and the total; over a range of it no cut is cheaper than

    g = min { Σ output_s[l] of the layers in I with a reader outside : price of I in the range }

over all ideals I, an integer program with a binary for each layer whose own bound counts where it
is stopped early.  With a ceiling τ on stages, a stage s between cuts in ranges i and j hosts no
more of the price than h_s(τ - g_i - g_j) (`Fluid`), so the farthest that s + 1 stages get in range
j is

    far_s[j] = max_i min(high_j, far_{s-1}[i] + h_s(τ - g_i - g_j))    where that is low_j or more

and the least τ at which all stages get to the end is below the slowest stage of every split.  The
ranges that the way to it uses are halved, again and again, up to a number of programs and of their
simplex iterations; cuts of a range without a program may cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.documents.tolerances import HIGHS_FEASIBILITY, ROUNDING, SLACK
from meshwright.planner.solver.bounds.fractional_bound import Fluid
from meshwright.planner.solver.graph_instance import GraphInstance
from meshwright.planner.solver.highs import highspy, silent_highs

Floats = NDArray[np.float64]

_NODES = 30  # of the search tree of one program
_CEILINGS = 8
_CLOSE = 1e-4  # ceilings this close, as a share, are not distinguished


@dataclass(frozen=True, slots=True)
class _PriceRange:
    """Cuts with a price from `lower` to `upper` before them cost `cut_s` or more, as at `price`."""

    lower: float
    upper: float
    cut_s: float
    price: float

    @property
    def width(self) -> float:
        """Difference between the upper and the lower end."""
        return self.upper - self.lower


class _CutPlaces:
    """[range] Where cuts can be: the start, all ranges, the end; ends cost nothing."""

    def __init__(self, ranges: Sequence[_PriceRange], total: float) -> None:
        self.lower = np.array([0.0, *(cut_range.lower for cut_range in ranges), total])
        self.upper = np.array([0.0, *(cut_range.upper for cut_range in ranges), total])
        self.cut_s = np.array([0.0, *(cut_range.cut_s for cut_range in ranges), 0.0])


class CutBounds:
    """Bounds for the splits of a graph whose outputs are relayed.

    `fluid` is that of its layers, its cuts for nothing.  No program is begun after this
    number of `programs`, or of `iterations` of the simplex method in them.
    """

    def __init__(
        self,
        problem: GraphInstance,
        fluid: Fluid,
        exposed_s: Floats,
        *,
        programs: int,
        iterations: int,
    ) -> None:
        self._problem, self._fluid = problem, fluid
        self._most_programs, self._most_iterations = programs, iterations
        self.programs_run = self.iterations_run = 0
        self._steady, self._fill = problem.chain.steady, problem.chain.fill
        self._output_s = problem.sent_s()
        self._exposed_s = exposed_s
        self._row, self._prices, self._total = 0, fluid.prices[0], 0.0
        self._readers = problem.readers()

    def bound_s(self, below_s: float, typical_s: float) -> float:
        """Seconds below which no split stays, at most `below_s`, which ends the search.

        `typical_s` is what a cut costs about: by it the price is chosen of which stages have least
        to spare.
        """
        fluid, stages = self._fluid, len(self._exposed_s)
        plain_s = fluid.beyond_s(fluid.largest_s, self._steady)
        if stages == 1 or plain_s >= below_s:
            return min(plain_s, below_s)
        self._row = fluid.scarcest(typical_s)
        self._prices = fluid.prices[self._row]
        self._total = float(self._prices.sum())
        ends = np.linspace(0.0, self._total, 2 * stages + 1)
        ranges = [self._range(a, b) for a, b in pairwise(ends)]
        while True:
            least_s, way = self._bound(ranges, below_s)
            if least_s >= below_s or not self._more():
                return min(max(least_s, plain_s), below_s)
            wide = [at for at in dict.fromkeys(way) if ranges[at].width > _CLOSE * self._total]
            if not wide:
                return max(least_s, plain_s)
            halves = {at: self._halves(ranges[at]) for at in wide if self._more()}
            ranges = [half for at, whole in enumerate(ranges) for half in halves.get(at, [whole])]

    def _more(self) -> bool:
        """Return whether another integer program may be run."""
        return (
            self.programs_run < self._most_programs and self.iterations_run < self._most_iterations
        )

    def _halves(self, whole: _PriceRange) -> list[_PriceRange]:
        """Return both halves; the one with the cheapest cut of the whole keeps its bound."""
        middle = (whole.lower + whole.upper) / 2
        halves = []
        for lower, upper in ((whole.lower, middle), (middle, whole.upper)):
            if lower <= whole.price < upper or (whole.price == upper == whole.upper):
                halves.append(_PriceRange(lower, upper, whole.cut_s, whole.price))
            else:
                range_ = self._range(lower, upper)
                halves.append(
                    _PriceRange(lower, upper, max(range_.cut_s, whole.cut_s), range_.price)
                )
        return halves

    def _bound(self, ranges: Sequence[_PriceRange], below_s: float) -> tuple[float, list[int]]:
        """Return a bound for all splits below `below_s`, and the ranges of a way near to it."""
        places = _CutPlaces(ranges, self._total)
        fluid, count = self._fluid, len(self._exposed_s) - 1
        rest_s = fluid.fill_s + fluid.sync_s
        rest_s += 2 * self._fill * float(places.cut_s[1:-1].min()) * count
        least_s, most_s = fluid.largest_s, fluid.whole_s
        if self._steady:
            most_s = min(most_s, (below_s - rest_s) / self._steady)
        way = self._way(places, most_s) if most_s >= least_s else None
        if way is None:
            return below_s, []
        highest_s = most_s
        while most_s - least_s > _CLOSE * most_s:
            middle_s = (least_s + most_s) / 2
            shorter = self._way(places, middle_s)
            if shorter is None:
                least_s = middle_s
            else:
                most_s, way = middle_s, shorter
        # Either the slowest stage is above a ceiling, or the cuts cost what they cost under it.
        ceilings_s = np.linspace(least_s, highest_s, _CEILINGS + 1)
        found_s = below_s
        for above_s, under_s in pairwise(ceilings_s):
            cuts_s = self._cheapest_cuts_s(places, float(under_s))
            value_s = self._steady * above_s + fluid.fill_s + fluid.sync_s
            found_s = min(found_s, float(value_s + 2 * self._fill * cuts_s))
        return found_s, way

    def _steps(self, places: _CutPlaces, ceiling_s: float) -> list[Floats]:
        """[stage][range, range] How far a stage gets from one range in another; -inf where not."""
        stages, slack = len(self._exposed_s), SLACK * self._total
        reached = np.full(len(places.lower), -np.inf)
        reached[0] = 0.0
        ranges = []
        for stage in range(stages):
            own_s = ceiling_s - places.cut_s[:, None] - places.cut_s[None]
            hosts = self._fluid.capacity_in(self._row, stage, own_s)
            far = np.where(own_s > 0, reached[:, None] + hosts, -np.inf)
            far = np.where(far >= places.lower - slack, np.minimum(far, places.upper), -np.inf)
            far[:, 0] = -np.inf
            if stage == stages - 1:
                far[:, :-1] = -np.inf
            else:
                far[:, -1] = -np.inf
            ranges.append(far)
            reached = far.max(axis=0)
        return ranges

    def _way(self, places: _CutPlaces, ceiling_s: float) -> list[int] | None:
        """Return the ranges of the cuts of a way to the end under a ceiling; None if none is."""
        steps = self._steps(places, ceiling_s)
        if not np.isfinite(steps[-1].max()):
            return None
        way, at = [], len(places.lower) - 1
        for far in reversed(steps[1:]):
            at = int(far[:, at].argmax())
            way.append(at - 1)
        return way[::-1]

    def _cheapest_cuts_s(self, places: _CutPlaces, ceiling_s: float) -> float:
        """Least sum of the cuts of ways under a ceiling; inf if there is none."""
        sums_s = np.full(len(places.lower), np.inf)
        sums_s[0] = 0.0
        for far in self._steps(places, ceiling_s):
            open_s = np.where(np.isfinite(far), sums_s[:, None], np.inf)
            sums_s = open_s.min(axis=0) + places.cut_s
        return float(sums_s[-1])

    def _range(self, lower: float, upper: float) -> _PriceRange:
        """Return the cheapest cut of a range by an integer program, or a bound on it."""
        if not self._more():
            return _PriceRange(lower, upper, 0.0, lower)
        output_s, count = self._output_s, len(self._readers)
        unit_s = max(output_s) or 1.0
        program = silent_highs()
        for option, value in (
            ("threads", 1),
            ("mip_max_nodes", _NODES),
            ("mip_feasibility_tolerance", HIGHS_FEASIBILITY),
            ("primal_feasibility_tolerance", HIGHS_FEASIBILITY),
        ):
            program.setOptionValue(option, value)
        free = highspy.kHighsInf
        for layer in range(count):
            program.addVar(0.0, 1.0)
            program.changeColIntegrality(layer, highspy.HighsVarType.kInteger)
        for layer, outside in enumerate(self._readers):
            sent = program.getNumCol()
            if outside and output_s[layer]:
                program.addVar(0.0, 1.0)
                program.changeColCost(sent, output_s[layer] / unit_s)
            for reader in outside:
                ends = np.array([layer, reader])
                program.addRow(0.0, free, 2, ends, np.array([1.0, -1.0]))
                if output_s[layer]:
                    row = np.array([sent, layer, reader])
                    program.addRow(0.0, free, 3, row, np.array([1.0, -1.0, 1.0]))
        for first, *others in self._problem.colocated:
            for other in others:
                program.addRow(0.0, 0.0, 2, np.array([first, other]), np.array([1.0, -1.0]))
        every = np.arange(count)
        program.addRow(1.0, count - 1.0, count, every, np.ones(count))
        shares = self._prices / self._total
        program.addRow(
            lower / self._total - SLACK, upper / self._total + SLACK, count, every, shares
        )
        program.run()
        status, info = program.getModelStatus(), program.getInfo()
        self.programs_run += 1
        self.iterations_run += max(int(info.simplex_iteration_count), 0)
        if status == highspy.HighsModelStatus.kInfeasible:
            return _PriceRange(lower, upper, np.inf, lower)
        bound = max(0.0, float(info.mip_dual_bound) - ROUNDING) if info.valid else 0.0
        inside = np.array(program.getSolution().col_value[:count])
        price = float(inside @ self._prices) if len(inside) == count else lower
        return _PriceRange(lower, upper, bound * unit_s * (1 - SLACK), price)
