"""Seconds that no plan of some candidates takes less than in the simulator.

The bounds of `meshwright.planner.search.bounds.layout_bounds` hold for any objective

    steady max_r t_r + fill Σ_r t_r

in the seconds t_r that ranks spend on one micro-batch.  Those of that form below are never above
the simulated step T of m micro-batches on P ranks of V stages (`paces`), and the greatest of them
counts.

    m max_r t_r      a rank does one action at a time.  What it does once, σ_r, follows its last
                     action: T >= max_r m t_r + σ_r, so that σ_r / m counts like seconds of a
                     micro-batch
    K Σ_r t_r        (m + P - 1) / P          under GPipe, and under 1F1B with m > P
                     1 / (1 - (1 - 1/m)^P)    under 1F1B with m <= P
    K Σ_r (t_r - w_r)
                     1 / (1 - (1 - 1/m)^(P V)) where backwards are split, w_r being seconds of W
    K Σ_r t_r        `forward_fill` where backwards are split

The first K, under 1F1B with stages s of t_s = f_s + b_s seconds, one a rank: stage d computes
m t_d, and the stages before it need pre_d = Σ_{s<d} t_s before its first forward and after its
last backward.  From its first forward's end to its first backward the D_d = Σ_{s>d} t_s of the
stages behind it pass, and only n_d = min(m, P - d) - 1 forwards can fill that time; so it is
from its last forward to its last backward.  So T >= pre_d + m t_d + 2 D_d - n_d t_d.  With
μ = Σ t / P, x_s = t_s - μ and Y_d = Σ_{s>=d} x_s that is, for m > P,
Σ t + (m - 1) μ + (m - P + d - 1) x_d + Y_d.  Take the last d that makes Y_d largest:
Y_d >= Y_0 = 0 and x_d = Y_d - Y_{d+1} >= 0.  For m <= P it is false: a heavier first stage gains up
to 7 %.

GPipe takes Σ f + (m - 1) max f + Σ b + (m - 1) max b at least, where a maximum is no less than the
mean.

The second and the last: before stage q begins, the first micro-batch passes the stages before it,
and when stage q has done its last way back, that micro-batch goes back through them.  With x_s
seconds of both ways, T >= m x_q + Σ_{s<q} x_s.  So T is at least any mean of these over q with
weights y.  With Y_q = Σ_{p>q} y_p, stage q then counts m y_q + Y_q times.  That is K for all of
them if y_q = (K - Y_q) / m, which makes Y_{q-1} = (1 - 1/m) Y_q + K / m, hence
Y_{-1} = K (1 - (1 - 1/m)^S), and weights add up to 1.

Of other schedules no such constant is known for all cuts: under interleaved 1F1B uneven ranks may
be 2 % faster than even ones with the same sum.

Transfers that computation hides take no time here; those that do not are seconds of their senders.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from meshwright.planner.costs.layer_strategy import Recomputes, choices_of
from meshwright.planner.costs.layout_costs import LayoutCosts
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.tolerances import ROUNDING
from meshwright.planner.operators.operator_table import RECOMPUTES
from meshwright.planner.schedules import schedule_of
from meshwright.planner.search.bounds.layout_bounds import Candidates
from meshwright.planner.search.bounds.layout_groups import StatedProblem
from meshwright.planner.search.partition.layout_partition import boundaries_s
from meshwright.planner.search.partition.stage_counts import LongestRun, run_of
from meshwright.planner.search.space import LayoutFamily
from meshwright.planner.solver.bounds import path_bounds as bounds
from meshwright.planner.solver.partition_problem import Instance

WORTHWHILE = 1.02
"""Ratio to m / P above which the constant of split backwards is worth asking for."""
Pace = tuple[float, float]
"""`steady` and `fill` of a bound of the simulated step."""


def paces(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[Pace, ...]:
    """Return the paces of the simulated step: `steady`, then `fill` where that may say more.

    Where backwards are split, seconds of W do not count for `fill`.

    >>> paces("1f1b", 4, 8), paces("1f1b", 2, 2)
    (((8.0, 0.0), (0.0, 2.75)), ((2.0, 0.0), (0.0, 1.3333333333333333)))
    >>> paces("zbv", 4, 8, 2)
    ((8.0, 0.0),)
    """
    timetable, m = schedule_of(schedule), micro_batches
    steady = float(m), 0.0
    if ranks == 1 or timetable.weight_versions > 1:
        return (steady,)
    if flat(schedule, ranks) and (timetable.forwards_first or m > ranks):
        return steady, (0.0, (m + ranks - 1) / ranks)
    fill = counted_fill(ranks * virtual_stages, m)
    # Without W, about a third of both passes, the second is rarely the higher one below that.
    enough = 1.5 * m if timetable.splits_backward else m
    return (steady, (0.0, fill)) if fill * ranks >= enough else (steady,)


def counted_fill(stages: int, micro_batches: int) -> float:
    """Return the K of as many stages whose weights even out what each counts; see the head.

    >>> counted_fill(2, 2)
    1.3333333333333333
    """
    return 1.0 / (1.0 - (1.0 - 1.0 / micro_batches) ** stages)


def flat(schedule: str, ranks: int) -> bool:
    """Return whether a constant is known for all seconds of a micro-batch, wherever they are."""
    timetable = schedule_of(schedule)
    return ranks > 1 and (timetable.forwards_first or timetable.phi_bound)


@lru_cache(maxsize=1024)
def forward_fill(ranks: int, micro_batches: int, share: float) -> float:
    """Return K with T >= K Σ t, `share` being that of first forwards in a rank's seconds, at least.

    Before rank r begins, the first micro-batch passes the first stages of the ranks before it,
    forward.  Then it does all it has to do:

        T >= Σ_{s<r} f_s + m t_r                    f_s >= share · t_s but on the first rank

    In the mean with weights y_r, rank r counts m y_r + share · Y_r times, Y_r = Σ_{s>r} y_s, the
    first one m y_0 times.  Where each is K, the weights are (K - share · Y_r) / m, and add up to 1.

    >>> round(forward_fill(64, 64, 1 / 3), 3), round(forward_fill(8, 32, 0.125), 3)
    (1.167, 4.041)
    """
    behind = 0.0
    for rank in reversed(range(ranks)):
        before = share * behind if rank else 0.0
        behind += max(0.0, 1.0 - before) / micro_batches
    return 1.0 / behind


@lru_cache(maxsize=1024)
def first_share(run: LongestRun | None, ranks: int, virtual_stages: int) -> float:
    """Return the share of a rank's like layers that its first stage has, at least.

    The first rank aside, whose first stage may have others alone; 0 if layers are not alike.

    >>> first_share(LongestRun(1, 126, 1), 16, 2), first_share(LongestRun(1, 14, 1), 8, 2)
    (0.3333333333333333, 0.5)
    """
    if virtual_stages == 1:
        return 1.0
    if run is None:
        return 0.0
    # The first and the last stage may have none of them; of the others each has one.
    most = run.alike - (ranks - 2) * virtual_stages
    numbers = range(virtual_stages, max(virtual_stages, min(most, 2 * virtual_stages - 1)) + 1)
    return min(number // virtual_stages / number for number in numbers)


def split_fill(layout: Layout, share: float, run: LongestRun | None) -> float:
    """Return `forward_fill` where backwards are split; 0 if it says no more than what is known.

    `share` is that of forward in the seconds of layers, `run` those that are alike.
    """
    ranks, count, virtual = layout.pipeline, layout.micro_batches, layout.virtual_stages
    if ranks == 1 or not layout.executed_schedule.splits_backward or not share:
        return 0.0
    # Of what an action takes besides its layers, a third is of forwards.
    fill = forward_fill(ranks, count, min(share, 1 / 3) * first_share(run, ranks, virtual))
    # W is about a third of what the other constant leaves out.
    apart = counted_fill(ranks * virtual, count)
    return fill if fill * ranks > WORTHWHILE * count and fill >= apart / 1.5 else 0.0


def forward_share(
    costs: LayoutCosts, recompute: Recomputes, ends: tuple[str | None, str | None]
) -> float:
    """Return the least share of forward in the seconds of a layer of a layout, ends aside."""
    shares = (
        row.forward_s / (row.forward_s + row.backward_s)
        for kind, table in costs.kinds.items()
        if kind not in ends
        for row in table
        if row.recompute in choices_of(recompute, kind)
    )
    return min(shares, default=0.0)


class SimulatedCandidates(Candidates):
    """Candidates whose bounds are those of the simulated step."""

    _most_paces = 2

    _closed_form: Candidates
    """The same by the closed form."""

    @classmethod
    def from_candidates(cls, candidates: Candidates) -> SimulatedCandidates:
        """Return the same candidates; what depends on how a step is measured is not known yet."""
        if not candidates._divided:
            candidates.computation_s()
        bounds = cls.__new__(cls)
        bounds.__dict__.update(candidates.__dict__)
        bounds._closed_form = candidates
        bounds._known_paces, bounds._known_numbers = {}, {}
        bounds._forget()
        if bounds.families:
            # W takes the place of what a zero-bubble schedule takes back: `fill` leaves it out.
            chain = candidates._chain
            weights_s = [
                np.max([figure.weight_s for figure in figures], axis=0)
                for figures in chain.figures.values()
            ]
            counts = np.array([chain.counts[kind] for kind in chain.figures])
            credits_s = (counts @ np.array(weights_s))[chain.members].max(axis=-1)
            bounds._chain = replace(chain, credits_s=credits_s)
            bounds._rooms = candidates._rooms.with_credits(bounds._chain)
        return bounds

    def paces(self, layout: Layout) -> tuple[Pace, ...]:
        """Return `steady` and `fill` of each bound of the simulated step."""
        count, virtual = layout.micro_batches, layout.virtual_stages
        paces_of = paces(layout.schedule, layout.pipeline, count, virtual)
        fill = self._forward_fill(layout, self._forward_share)
        return (paces_of[0], (0.0, fill)) if fill else paces_of

    def _forward_fill(self, layout: Layout, share: float) -> float:
        """Return K by what forwards share in the seconds of layers; 0 if others say as much."""
        return split_fill(layout, share, self._run)

    @cached_property
    def _forward_share(self) -> float:
        """Least share of forward in the seconds of a layer, ends of the model aside."""
        if self.tables.activations != ("keep",) or not self.families or self.model.edges:
            return 0.0
        shares = [
            np.min(costs.whole_forward_s / costs.passes_s)
            for kind, of_kind in self._chain.figures.items()
            if kind not in self.tables.end_kinds
            for choice, costs in zip(RECOMPUTES, of_kind, strict=True)
            if choice in choices_of(self.recompute, kind)
        ]
        return float(min(shares, default=0.0))

    @cached_property
    def _run(self) -> LongestRun | None:
        return run_of(self.model)

    def _leaves_w_out(self, layout: Layout) -> bool:
        """Return whether `fill` counts W's credits; a constant of forwards counts all seconds."""
        split = layout.executed_schedule.splits_backward
        return split and not self._forward_fill(layout, self._forward_share)

    def _actions(self, layout: Layout, fill: float) -> int:
        """Return the counted actions of a rank for a micro-batch, without W if `fill` omits it."""
        return 2 * layout.virtual_stages if fill else super()._actions(layout, fill)

    def _with_once(
        self,
        part: LayoutFamily,
        fill: float,
        passes_s: bounds.Floats,
        once_s: bounds.Floats,
        *,
        alone_s: float = 0.0,
    ) -> tuple[bounds.Floats, bounds.Floats]:
        if fill:
            if schedule_of(part.timetables[0].schedule).splits_backward:
                counted = self._counted_whole(part.first, self._forward_share)
                passes_s = alone_s + counted * (passes_s - alone_s)
            return passes_s, 0.0 * once_s
        return passes_s + once_s / part.micro_batches, 0.0 * once_s

    def _communication_s(self, layout: Layout) -> float:
        """Least seconds with what sharding takes, memory ignored."""
        costs, bound_s = self.tables.costs_of(layout), 0.0
        for steady, fill in self._whole_paces(layout, costs):
            once = 0.0 if fill else 1.0 / layout.micro_batches
            rows = []
            for kind, table in costs.kinds.items():
                among = choices_of(self.recompute, kind)
                fastest_s = min(
                    row.forward_s + row.backward_s + once * row.sync_s
                    for row in table
                    if row.recompute in among
                )
                rows.append((self._counts[kind], fastest_s, 0.0))
            balanced_s = bounds.balanced_s(
                rows, stages=layout.pipeline, exposed_s=0.0, steady=steady, fill=fill
            )
            bound_s = max(bound_s, balanced_s)
        return bound_s * (1 - ROUNDING) + costs.step_s

    def _whole_paces(self, layout: Layout, costs: LayoutCosts) -> tuple[Pace, ...]:
        """Return the paces that count both passes whole, by what the layers of a layout take."""
        paces = self.paces(layout)
        if not layout.executed_schedule.splits_backward:
            return paces
        fill = self._forward_fill(layout, self._share_of(costs))
        return (paces[0], (0.0, fill)) if fill else paces[:1]

    def _share_of(self, costs: LayoutCosts) -> float:
        if not self._forward_share:
            return 0.0
        return forward_share(costs, self.recompute, self.tables.end_kinds)

    def _counted_whole(self, layout: Layout, share: float) -> float:
        """Return how often K counts seconds that are no part of any forward, relatively."""
        fill = self._forward_fill(layout, share)
        return max(0.0, 1.0 - share / fill) if fill else 1.0

    def memory_s(self, layout: Layout) -> float:
        """Least seconds with what each stage can hold, by every pace that is known."""
        return self.within_memory_s(layout, self._closed_form.problem_of(layout))

    def within_memory_s(
        self, layout: Layout, stated: StatedProblem, enough_s: float = math.inf
    ) -> float:
        """Least seconds of a problem of a layout, or of several ones that are alike to schedules.

        Where one pace gives `enough_s`, the others are not asked.
        """
        least_s = 0.0
        for instance, more_s in reversed(self.instances(layout, stated)):
            if least_s < enough_s:
                least_s = max(least_s, bounds.counted_s(instance) + more_s + stated.costs.step_s)
        return least_s

    def instances(self, layout: Layout, stated: StatedProblem) -> list[tuple[Instance, float]]:
        """Return partition problems, none of whose optima is above the least simulated step.

        Each with what its optimum is below that at least: transfers.
        """
        costs, count = stated.costs, layout.micro_batches
        base = replace(_sending(layout, stated), credits_s=(), forward_apart=False)
        steady = replace(
            base,
            steady=float(count),
            fill=0.0,
            kinds=tuple(
                tuple(
                    replace(row, backward_s=row.backward_s + row.sync_s / count, sync_s=0.0)
                    for row in table
                )
                for table in base.kinds
            ),
        )
        *_, (_, fill) = self._whole_paces(layout, costs)
        if not fill:
            return [(steady, 0.0)]
        if layout.executed_schedule.splits_backward:
            counted = self._counted_whole(layout, self._share_of(costs))
            stages = (replace(stage, exposed_s=counted * stage.exposed_s) for stage in base.stages)
            base = replace(base, stages=tuple(stages))
        unsynced = tuple(
            tuple(replace(option, sync_s=0.0) for option in table) for table in base.kinds
        )
        waited_s = transfers(layout) * hidden_s(costs)
        flat = replace(base, steady=0.0, fill=fill, kinds=unsynced)
        return [(steady, 0.0), (flat, waited_s)]

    def likely(self, layout: Layout) -> tuple[Instance, float]:
        """Return the closed form's problem with transfers as the simulator has them.

        And what a step takes beside it: what is done once, and the way of one micro-batch through
        all stages and back.  The optimum is no bound: it lies within 3 % of the simulated step of
        most layouts whose stages are even, and below it of those whose stages are not.
        """
        stated = self._closed_form.problem_of(layout)
        ways_s = 2 * (layout.stages - 1) * hidden_s(stated.costs)
        return _sending(layout, stated), stated.costs.step_s + ways_s


def _sending(layout: Layout, stated: StatedProblem) -> Instance:
    """Return the closed form's problem with the transfers that their senders wait for."""
    costs, rank_paces = stated
    waiting_s = costs.waits * costs.transfer_s
    action_s = costs.boundary_s - costs.transfer_s
    sending = replace(costs, transfer_s=waiting_s, boundary_s=waiting_s + action_s)
    stages = tuple(
        replace(stage, exposed_s=exposed_s)
        for stage, exposed_s in zip(rank_paces.stages, boundaries_s(sending, layout), strict=True)
    )
    return replace(rank_paces, stages=stages)


def transfers(layout: Layout) -> int:
    """Return how many transfers a step waits for beside `fill`, at least.

    Under 1F1B each of ⌊m / P⌋ rounds through all ranks and back
    (`planner.search.bounds.simulated_cuts`), under GPipe the first micro-batch on its way and the
    last one on its way back.

    >>> transfers(Layout(pipeline=4, micro_batches=9)), transfers(Layout(micro_batches=9))
    (12, 0)
    """
    schedule, ranks, m = layout.executed_schedule, layout.pipeline, layout.micro_batches
    if schedule.forwards_first:
        return 2 * (ranks - 1)
    return 2 * (ranks - 1) * (m // ranks) if schedule.phi_bound and m >= 2 * ranks else 0


def hidden_s(costs: LayoutCosts) -> float:
    """Return the seconds of a transfer that its receiver waits for, and its sender does not."""
    return (1 - costs.waits) * costs.transfer_s
