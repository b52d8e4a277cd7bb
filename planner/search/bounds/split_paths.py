"""Seconds that single splits of a layout simulate at least: longest paths that are kept.

A path through a step's actions is a lower bound at all stage times
(planner.schedules.steady_state).  Splits near one another have nearly the same longest path, so one
that was found excludes most of those that are slower, by a product of arrays in place of a
simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules.schedule import rank_of_stage
from meshwright.planner.schedules.steady_state import KINDS, graph_of

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.bounds.simulated_optimum import RankColumn

MOST_ACTIONS = 20_000
"""Most actions of a step whose paths are looked for."""

Floats = NDArray[np.float64]


class SplitPaths:
    """Paths of a layout's step."""

    def __init__(
        self, layout: Layout, costs: LayoutCosts, crossing_s: Sequence[Sequence[float]]
    ) -> None:
        """`costs` say what a step takes once; `crossing_s` [type][type] what a transfer takes."""
        self._layout, self._step_s, self._waits = layout, costs.step_s, costs.waits
        self._crossing_s = np.array(crossing_s)
        shape = {"stages": layout.stages, "virtual_stages": layout.virtual_stages}
        self._home = np.array(rank_of_stage(layout.schedule, **shape))
        self._visits = np.empty((0, len(KINDS) * layout.stages))
        self._hops = np.empty((0, layout.stages - 1))
        self._ranks = np.empty(0, dtype=np.intp)

    def exceeds(self, columns: Sequence[RankColumn], types: Sequence[int], limit_s: float) -> bool:
        """Return whether a split into one column a rank surely simulates at least `limit_s`.

        `types` [rank] are those of its devices.
        """
        layout = self._layout
        if 2 * layout.micro_batches * layout.stages > MOST_ACTIONS:
            return False
        seconds, delays_s = self._seconds(columns, types)
        once_s = np.array([column.sync_s for column in columns])
        each_s, left_s = seconds.ravel(), limit_s - self._step_s
        if (self._visits @ each_s + self._hops @ delays_s + once_s[self._ranks] >= left_s).any():
            return True
        graph = graph_of(
            layout.executed_schedule.name,
            stages=layout.stages,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
        ends_s = graph.longest(each_s.tolist(), delays_s.tolist())
        last_s = once_s + [ends_s[end] for end in graph.ends]
        rank = int(np.argmax(last_s))
        if last_s[rank] < left_s:
            return False
        path = graph.path(rank, ends_s, delays_s.tolist())
        self._visits = np.vstack([self._visits, path.visits.ravel()])
        self._hops = np.vstack([self._hops, path.hops])
        self._ranks = np.append(self._ranks, rank)
        return True

    def _seconds(
        self, columns: Sequence[RankColumn], types: Sequence[int]
    ) -> tuple[Floats, Floats]:
        """[kind, stage] Seconds with what senders wait for, and [boundary] what receivers do."""
        seconds: Floats = np.sum([column.seconds for column in columns], axis=0)
        of_stage = np.array(types)[self._home]
        between = self._home[:-1] != self._home[1:]
        there_s = self._crossing_s[of_stage[:-1], of_stage[1:]] * between
        back_s = self._crossing_s[of_stage[1:], of_stage[:-1]] * between
        seconds[0, :-1] += self._waits * there_s
        seconds[1, 1:] += self._waits * back_s
        if self._layout.executed_schedule.splits_backward:
            seconds[2] = seconds[1] - seconds[3]
        return seconds, (1 - self._waits) * np.minimum(there_s, back_s)
