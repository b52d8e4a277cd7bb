"""Seconds that single splits of a layout simulate at least: longest paths that are kept.

A path through a step's actions is a lower bound at all stage times
(planner.schedules.steady_state).  Splits near one another have nearly the same longest path, so one
that was found excludes most of those that are slower, by a product of arrays in place of a
simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules.schedule import rank_of_stage
from meshwright.planner.schedules.steady_state import KINDS, graph_of
from meshwright.planner.search.bounds.simulated_step import hidden_s

if TYPE_CHECKING:
    from meshwright.planner.costs.layout_costs import LayoutCosts
    from meshwright.planner.documents.plan import Layout
    from meshwright.planner.search.bounds.simulated_optimum import RankColumn

MOST_ACTIONS = 20_000
"""Most actions of a step whose paths are looked for."""

Floats = NDArray[np.float64]


class SplitPaths:
    """Paths of a layout's step."""

    def __init__(self, layout: Layout, costs: LayoutCosts) -> None:
        """`costs` have the least seconds of a transfer, and of what a step takes once."""
        self._layout, self._step_s = layout, costs.step_s
        self._delays_s = [hidden_s(costs)] * (layout.stages - 1)
        shape = {"stages": layout.stages, "virtual_stages": layout.virtual_stages}
        home = rank_of_stage(layout.schedule, **shape)
        self._sent_s = np.zeros((len(KINDS), layout.stages))
        """[kind, stage] What senders wait for."""
        for stage, (rank, following) in enumerate(itertools.pairwise(home)):
            if rank != following:
                self._sent_s[0, stage] = self._sent_s[1, stage + 1] = costs.waits * costs.transfer_s
        self._visits = np.empty((0, self._sent_s.size))
        self._waiting_s, self._ranks = np.empty(0), np.empty(0, dtype=np.intp)

    def all_exceed(self, columns: Sequence[RankColumn], limit_s: float) -> bool:
        """Return whether a split into one column a rank surely simulates at least `limit_s`."""
        layout = self._layout
        if 2 * layout.micro_batches * layout.stages > MOST_ACTIONS:
            return False
        seconds = self._sent_s + np.sum([column.seconds for column in columns], axis=0)
        if layout.executed_schedule.splits_backward:
            seconds[2] = seconds[1] - seconds[3]
        once_s = np.array([column.sync_s for column in columns])
        each_s, left_s = seconds.ravel(), limit_s - self._step_s
        if (self._visits @ each_s + self._waiting_s + once_s[self._ranks] >= left_s).any():
            return True
        graph = graph_of(
            layout.executed_schedule.name,
            stages=layout.stages,
            micro_batches=layout.micro_batches,
            virtual_stages=layout.virtual_stages,
        )
        ends_s = graph.longest(each_s.tolist(), self._delays_s)
        last_s = once_s + [ends_s[end] for end in graph.ends]
        rank = int(np.argmax(last_s))
        if last_s[rank] < left_s:
            return False
        path = graph.path(rank, ends_s, self._delays_s)
        self._visits = np.vstack([self._visits, path.visits.ravel()])
        self._waiting_s = np.append(self._waiting_s, path.hops @ np.array(self._delays_s))
        self._ranks = np.append(self._ranks, rank)
        return True
