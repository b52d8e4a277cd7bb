"""Seconds that no plan of some candidates takes less than in the simulator.

The bounds of `planner.search.candidates` hold for any objective

    steady max_r t_r + fill Σ_r t_r

in the seconds t_r that ranks spend on one micro-batch.  Two of that form are never above the
simulated step T of m micro-batches on P ranks (`pace`):

    m max_r t_r      a rank does one action at a time.  What it does once, σ_r, follows its last
                     action: T >= max_r m t_r + σ_r, so that σ_r / m counts like seconds of a
                     micro-batch
    K Σ_r t_r        of schedules with one stage a rank and whole backwards, K being
                     (m + P - 1) / P          under GPipe, and under 1F1B with m > P
                     1 / (1 - (1 - 1/m)^P)    under 1F1B with m <= P

The first K is proven for 1F1B in `planner.solver.phi.balanced_s`.  GPipe takes
Σ f + (m - 1) max f + Σ b + (m - 1) max b at least, where a maximum is no less than the mean.

The second: before rank r begins, the first micro-batch passes the ranks before it, and when it has
ended the last one goes back through them, T >= m t_r + Σ_{s<r} t_s.  So T is at least any mean of
these over r with weights y.  With Y_r = Σ_{q>r} y_q, rank r then counts m y_r + Y_r times.  That is
K for all of them if y_r = (K - Y_r) / m, which makes Y_{r-1} = (1 - 1/m) Y_r + K / m, hence
Y_{-1} = K (1 - (1 - 1/m)^P), and weights add up to 1.

Of other schedules no such constant is known that holds for all cuts: under interleaved 1F1B uneven
ranks may be 2 % faster than even ones with the same sum.

Transfers that computation hides take no time here; those that do not are seconds of their senders.
"""

from __future__ import annotations

from dataclasses import replace

from planner.costs.layout_costs import LayoutCosts
from planner.costs.recomputes import choices_of
from planner.plan import Layout
from planner.schedules import schedule_of
from planner.search.candidates import Candidates
from planner.search.formulation import instance_of
from planner.search.space import Family
from planner.solver import bounds
from planner.solver.instance import Instance
from planner.tolerances import ROUNDING


def pace(schedule: str, ranks: int, micro_batches: int) -> tuple[float, float]:
    """Return `steady` and `fill` of a bound of the simulated step.

    >>> pace("1f1b", 4, 8), pace("1f1b", 2, 2), pace("zbv", 4, 8)
    ((0.0, 2.75), (0.0, 1.3333333333333333), (8.0, 0.0))
    """
    known, m = schedule_of(schedule), micro_batches
    if not flat(schedule, ranks):
        return float(m), 0.0
    if known.forwards_first or m > ranks:
        return 0.0, (m + ranks - 1) / ranks
    return 0.0, 1.0 / (1.0 - (1.0 - 1.0 / m) ** ranks)


def flat(schedule: str, ranks: int) -> bool:
    """Whether a constant is known that all seconds of a micro-batch count, wherever they are."""
    known = schedule_of(schedule)
    return ranks > 1 and (known.forwards_first or known.phi_bound)


class SimulatedCandidates(Candidates):
    """Candidates whose bounds are those of the simulated step."""

    @classmethod
    def of(cls, candidates: Candidates) -> SimulatedCandidates:
        """Return the same candidates; what depends on how a step is measured is not known yet."""
        found = cls.__new__(cls)
        found.__dict__.update(candidates.__dict__)
        moved = candidates._known_moved  # the same in either measure
        found._known_paces = {}
        found._forget()
        found._known_moved = moved
        return found

    def _pace(self, layout: Layout) -> tuple[float, float]:
        return pace(layout.schedule, layout.pipeline, layout.micro_batches)

    def _credited(self, fill: float) -> float:
        """Nothing is taken back: `fill` is no bubble."""
        return 0.0

    def _with_once(
        self, part: Family, passes_s: bounds.Floats, once_s: bounds.Floats
    ) -> tuple[bounds.Floats, bounds.Floats]:
        count = part.micro_batches
        if flat(part.timetables[0].schedule, part.degrees.pipeline):
            return passes_s, 0.0 * once_s
        return passes_s + once_s / count, 0.0 * once_s

    def _communication_s(self, layout: Layout) -> float:
        """Least seconds with what sharding takes, memory ignored."""
        costs, count = self.tables.of(layout), layout.micro_batches
        steady, fill = self._pace(layout)
        rows = []
        for kind, table in costs.kinds.items():
            among = choices_of(self.recompute, kind)
            once = 0.0 if fill else 1.0 / count
            fastest_s = min(
                one.forward_s + one.backward_s + once * one.sync_s
                for one in table
                if one.recompute in among
            )
            rows.append((self._counts[kind], fastest_s, 0.0))
        bound_s = bounds.balanced_s(
            rows, stages=layout.pipeline, exposed_s=0.0, steady=steady, fill=fill
        )
        return bound_s * (1 - ROUNDING) + costs.step_s

    def dominator(self, layout: Layout) -> Layout | None:
        """None: what dominates in the closed form may be slower in the simulator."""
        return None

    def memory_s(self, layout: Layout) -> float:
        """Least seconds with what each stage can hold, by every pace that is known."""
        if layout not in self._known_memory_s:
            step_s = self.tables.of(layout).step_s
            each = (bounds.counted_s(one) for one in self.instances(layout))
            self._known_memory_s[layout] = max(each) + step_s
        return self._known_memory_s[layout]

    def instances(self, layout: Layout) -> list[Instance]:
        """Return partition problems none of whose optima is above the least simulated step."""
        costs, count = self._sending(layout), layout.micro_batches
        base = instance_of(
            self.model, self.cluster, layout, costs, self.recompute, self.pins.require
        )
        asked = self.rows(layout)
        base = replace(base, credits_s=(), forward_apart=False, sizes=asked or base.sizes)
        steady = replace(
            base,
            steady=float(count),
            fill=0.0,
            kinds=tuple(
                tuple(
                    replace(one, backward_s=one.backward_s + one.sync_s / count, sync_s=0.0)
                    for one in table
                )
                for table in base.kinds
            ),
        )
        if not flat(layout.schedule, layout.pipeline):
            return [steady]
        unsynced = tuple(tuple(replace(one, sync_s=0.0) for one in table) for table in base.kinds)
        _, fill = pace(layout.schedule, layout.pipeline, count)
        return [steady, replace(base, steady=0.0, fill=fill, kinds=unsynced)]

    def _sending(self, layout: Layout) -> LayoutCosts:
        """Return costs whose transfers are what their senders wait for."""
        costs = self.costs(layout)
        waiting_s = costs.waits * costs.transfer_s
        action_s = costs.boundary_s - costs.transfer_s
        return replace(costs, transfer_s=waiting_s, boundary_s=waiting_s + action_s)
