"""Lower bounds of the simulated step of layouts where device groups differ.

The bounds of `planner.search.simulated_bounds` hold for stages of any seconds, so also where they
run on devices of different types:

    T >= m max_r t_r + what it does once       T >= K Σ_r t_r

Of both any mean is a bound too.  With weights w_g = α K + (1 - α) m y_g of a stage on group g,
Σ_g P_g y_g = 1, which even out w_g T_g as far as y_g >= 0 allows,

    T >= Σ_l min_g w_g t_gl
"""

from __future__ import annotations

import math

import numpy as np

from planner.documents.plan import Layout
from planner.documents.tolerances import ROUNDING
from planner.search.group_candidates import Floats, GroupCandidates
from planner.search.ranks import run_of
from planner.search.simulated_bounds import forward_share, paces, split_fill


class SimulatedGroupCandidates(GroupCandidates):
    """The layouts of some groups whose bounds are those of the simulated step."""

    @classmethod
    def of(cls, candidates: GroupCandidates) -> SimulatedGroupCandidates:
        """Return the same layouts, with what is known of them."""
        found = cls.__new__(cls)
        found.__dict__.update(candidates.__dict__)
        return found

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by layers alone, memory ignored."""
        fastest_s, _ = self.passes_s(layout)
        return self._weighed_s(layout, fastest_s, np.zeros_like(fastest_s), fill_of(layout))

    def communication_s(self, layout: Layout) -> float:
        """Least seconds of a step with what is shared; inf if layers cannot fit."""
        of_groups = self.costs_of(layout)
        if not self.has_room(layout, of_groups):
            return math.inf
        fastest_s = self.fewest_of_kinds(of_groups, "time_s")
        once_s = self.fewest_of_kinds(of_groups, "sync_s")
        return self._weighed_s(layout, fastest_s, once_s, self.fill_of(layout))

    def fill_of(self, layout: Layout) -> float:
        """K of T >= K Σ t by what the layers of a layout take; 0 where none is known."""
        if self.model.edges or not layout.executed.splits_backward:
            return fill_of(layout)
        ends = next(iter(self.group_costs.tables.values())).end_kinds
        among = self.pins.recompute
        share = min(forward_share(costs, among, ends) for costs in self.costs_of(layout))
        return split_fill(layout, share, run_of(self.model))

    def _weighed_s(self, layout: Layout, time_s: Floats, once_s: Floats, fill: float) -> float:
        """[group, kind] Least seconds of a step from those of layers; see the head."""
        stages, found_s = np.array(self.stages(layout), dtype=float), 0.0
        for share, seconds in ((0.0, time_s + once_s / layout.micro_batches), (None, time_s)):
            weights = _weights(layout, stages, seconds @ self.counts, fill, share)
            found_s = max(found_s, float(self.counts @ (weights[:, None] * seconds).min(axis=0)))
        step_s = min(one.layout_step_s(layout) for one in self.group_costs.tables.values())
        return (1 - ROUNDING) * found_s + step_s


def fill_of(layout: Layout) -> float:
    """K of T >= K Σ t; 0 where W is no part of it."""
    if layout.pipeline == 1 or layout.executed.splits_backward:
        return 0.0
    shape = layout.pipeline, layout.micro_batches, layout.virtual_stages
    return paces(layout.schedule, *shape)[-1][1]


def share_of(layout: Layout, stages: Floats, whole_s: Floats, fill: float) -> float:
    """The largest α with w_g >= α K for all groups: (m + α (K P - m)) / rate >= α K T_max.

    `fill` is K; 0 where a group takes no time.
    """
    m = float(layout.micro_batches)
    if not whole_s.all():
        return 0.0
    rate, ranks = float((stages / whole_s).sum()), float(stages.sum())
    if fill * ranks <= m:
        return 0.0
    needed = fill * float(whole_s.max()) * rate - (fill * ranks - m)
    return min(1.0, m / needed) if needed > 0 else 1.0


def _weights(
    layout: Layout, stages: Floats, whole_s: Floats, fill: float, share: float | None
) -> Floats:
    """[group] Weights w of stages; `share` is α, as large as it can be if there is none."""
    if not whole_s.all():
        return np.zeros(len(stages))
    if share is None:
        share = share_of(layout, stages, whole_s, fill)
    m = float(layout.micro_batches)
    level_s = (1 - share) * m + share * fill * float(stages.sum())
    return level_s / float((stages / whole_s).sum()) / whole_s
