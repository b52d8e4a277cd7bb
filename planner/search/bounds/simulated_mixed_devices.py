"""Lower bounds of the simulated step of layouts where device groups differ.

The bounds of `planner.search.bounds.simulated_step` hold for stages of any seconds, so also where
they run on devices of different types:

    T >= m max_r t_r + what it does once       T >= K Σ_r t_r

Of both any mean is a bound too.  With weights w_g = α K + (1 - α) m y_g of a stage on group g,
Σ_g P_g y_g = 1, which even out w_g T_g as far as y_g >= 0 allows,

    T >= Σ_l min_g w_g t_gl

Before rank r does its m micro-batches, the first of them passes the first stages of the ranks
before it, and where backwards are whole the last one goes back through them. With whole layers
and any order of groups, T is enough only if

    Σ_r ⌊(T - Σ_{s<r} x_s) / (m t_g(r))⌋ >= N           x_s: its ⌊n_s / V⌋ like layers, n_s at least
                                                         what the other ranks leave
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.planner.documents.tolerances import ROUNDING, SLACK
from meshwright.planner.search.bounds.mixed_device_bounds import Floats, GroupCandidates
from meshwright.planner.search.bounds.simulated_step import forward_share, paces, split_fill
from meshwright.planner.search.partition.stage_counts import run_of
from meshwright.planner.solver.heterogeneous.reach import Counts, shift_count

if TYPE_CHECKING:
    from meshwright.planner.documents.plan import Layout

_RANGE, _HALVES = 0.2, 7
"""Relative range below a limit in which a step is looked for, and how often it is halved."""


class SimulatedGroupCandidates(GroupCandidates):
    """The layouts of some groups whose bounds are those of the simulated step."""

    @classmethod
    def from_candidates(cls, candidates: GroupCandidates) -> SimulatedGroupCandidates:
        """Return the same layouts, with what is known of them."""
        bounds = cls.__new__(cls)
        bounds.__dict__.update(candidates.__dict__)
        return bounds

    def computation_s(self, layout: Layout) -> float:
        """Least seconds of a step by layers alone, memory ignored."""
        fastest_s, _ = self.passes_s(layout)
        return self._weighed_s(layout, fastest_s, np.zeros_like(fastest_s), fill_of(layout))

    def communication_s(self, layout: Layout) -> float:
        """Least seconds of a step with what is shared; inf if layers cannot fit."""
        of_groups = self.costs_of(layout)
        most = self.most_layers(layout, of_groups)
        if most.max(axis=0).sum() < max(self.counts):
            return math.inf
        fastest_s = self.fewest_of_kinds(of_groups, "time_s")
        once_s = self.fewest_of_kinds(of_groups, "sync_s")
        weighed_s = self._weighed_s(layout, fastest_s, once_s, self.fill_of(layout))
        count = layout.micro_batches
        slowest_s = self.slowest_s(layout, most, fastest_s + once_s / count)
        return max(weighed_s, (1 - ROUNDING) * count * slowest_s + self._step_s(layout))

    def ordered_s(self, layout: Layout, limit_s: float) -> float:
        """Least seconds of a step with whole layers behind what lies before; up to a limit."""
        if self.model.edges or layout.pipeline == 1:
            return 0.0
        of_groups, count = self.costs_of(layout), layout.micro_batches
        kinds, like = list(of_groups[0].kinds), int(np.argmax(self.counts))
        time_s, forward_s, sync_s = (
            self.fewest_of_kinds(of_groups, figure) for figure in ("time_s", "forward_s", "sync_s")
        )
        if not time_s[:, like].all():
            return 0.0
        last = kinds.index(self.model.layers[-1].kind)
        back_s = forward_s if layout.executed_schedule.splits_backward else time_s
        ranks = WholeLayers(
            numbers=tuple(self.stages(layout).tolist()),
            room=self.most_layers(layout, of_groups).max(axis=1).tolist(),
            passes=(
                LayerPasses.from_seconds(count * time_s, back_s, like, last),
                LayerPasses.from_seconds(count * time_s + sync_s, forward_s, like, last),
            ),
            virtual_stages=layout.virtual_stages,
            folded=layout.executed_schedule.placement == "v",
            layers=int(max(self.counts)),
        )
        step_s = self._step_s(layout)
        upper_s = limit_s - step_s
        if not ranks.are_enough(upper_s):
            return limit_s
        least_s = lower_s = (1 - _RANGE) * upper_s
        for _ in range(_HALVES):
            middle_s = (lower_s + upper_s) / 2
            enough = ranks.are_enough(middle_s)
            lower_s, upper_s = (lower_s, middle_s) if enough else (middle_s, upper_s)
        return lower_s + step_s if lower_s > least_s else 0.0

    def fill_of(self, layout: Layout) -> float:
        """K of T >= K Σ t by what the layers of a layout take; 0 where none is known."""
        if self.model.edges or not layout.executed_schedule.splits_backward:
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
        return (1 - ROUNDING) * found_s + self._step_s(layout)

    def _step_s(self, layout: Layout) -> float:
        """Return the seconds that every plan of a layout takes once, besides what ranks do."""
        return min(table.layout_step_s(layout) for table in self.group_costs.tables.values())


class LayerPasses(NamedTuple):
    """[group] Seconds of all micro-batches through a layer and through the last one of the model.

    And what a layer on a first stage takes of the time of the ranks behind it.
    """

    layer_s: list[float]
    last_s: list[float]
    first_s: list[float]

    @classmethod
    def from_seconds(cls, seconds: Floats, first_s: Floats, like: int, last: int) -> LayerPasses:
        """Read those [group, kind] of the like layers and of the last one."""
        last_s = 0.0 * seconds[:, last] if last == like else seconds[:, last]
        return cls(seconds[:, like].tolist(), last_s.tolist(), first_s[:, like].tolist())


class WholeLayers(NamedTuple):
    """Ranks of several groups, and how many like layers they are to have; by group."""

    numbers: tuple[int, ...]
    room: list[float]
    passes: tuple[LayerPasses, ...]
    """Ways to count seconds, each of which a step takes at least."""
    virtual_stages: int
    folded: bool
    """True if the last stage lies on the first rank, and not on the last one."""
    layers: int

    def are_enough(self, step_s: float) -> bool:
        """Return whether they may have all layers in these seconds, in the best order of groups."""
        step_s *= 1 + SLACK
        none, *others = _counts(self.numbers)
        groups = range(len(none))
        alone = [self._most_layers(g, step_s, (0.0, 0.0), last=False) for g in groups]
        spare = sum(alone[g] * self.numbers[g] for g in groups) - self.layers
        if spare < 0:
            return False
        firsts = [max(0.0, most - spare) // self.virtual_stages for most in alone]
        least_s = {none: 0.0}
        for counts in others:
            most = 0.0
            for g in groups:
                if not counts[g]:
                    continue
                behind = shift_count(counts, g, -1)
                first, second = (
                    sum(behind[h] * firsts[h] * pass_.first_s[h] for h in groups)
                    for pass_ in self.passes
                )
                last = behind == none if self.folded else counts == self.numbers
                number = self._most_layers(g, step_s, (first, second), last=last)
                most = max(most, least_s[behind] + number)
            least_s[counts] = most
        return least_s[self.numbers] >= self.layers

    def _most_layers(
        self, g: int, step_s: float, before_s: tuple[float, float], *, last: bool
    ) -> float:
        """Return how many layers a rank of a group may have behind what lies before it."""
        most = self.room[g]
        for pass_, waited_s in zip(self.passes, before_s, strict=True):
            left_s = step_s - waited_s - pass_.last_s[g] * last
            most = min(most, max(0.0, left_s) // pass_.layer_s[g] if left_s >= 0 else -math.inf)
        return most


@lru_cache(maxsize=64)
def _counts(numbers: tuple[int, ...]) -> tuple[Counts, ...]:
    """Return how many ranks of each group may lie before a place, by rising sums."""
    return tuple(sorted(product(*(range(n + 1) for n in numbers)), key=sum))


def fill_of(layout: Layout) -> float:
    """K of T >= K Σ t; 0 where W is no part of it."""
    if layout.pipeline == 1 or layout.executed_schedule.splits_backward:
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
