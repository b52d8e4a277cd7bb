"""What each schedule costs in closed form: the numbers by which a solver chooses a split.

With t_r the seconds that rank r spends on one micro-batch, all its stages together, and w_r the
part of them that its W take, a step of m micro-batches on P ranks of V stages takes

    T = steady · max_r t_r + Σ_r (fill · t_r - credit · w_r)

and rank r has the activations of in_flight_r micro-batches, all its stages together.

How exact that is, against the simulator and with no transfer time (transfers are charged to t_r);
the last column is for stages whose times scatter by 10 % (`forward_apart`: see
planner.solver.instance):

    schedule         uniform stages                uneven stages, form / simulated
    1f1b             exact                         1.00-1.12; 1.00 if the slowest is the last
    gpipe            exact                         1.00 with `forward_apart`
    interleaved      exact                         0.94-1.13
    zb-h1            exact if f, b <= f + b - w    0.99-1.08
    interleaved-zb   exact if f, b <= f + b - w    0.94-1.05
    zbv              exact if f = b = w            0.97-1.08
    dualpipe-v       exact if f = b = w            0.97-1.08; overlap's gain is not counted
    pipedream-2bw    exact, per step               1.00, as long as it never drains

Here f, b, w are a stage's seconds of F, I and W.  On uniform stages zb-h1 and interleaved-zb take
m t + (P - 1) max(f, b, f + b - w) / V, of which the form is the last branch: `uniform_step_s`.
The counts in flight are those of the orders; zbv on fewer than 2 P - 1 micro-batches may have
fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import DocumentError
from planner.schedules import Shape, schedule_of
from planner.schedules.schedule import obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """One schedule on a number of ranks and micro-batches."""

    steady: float
    fill: float
    credit: float
    in_flight: tuple[float, ...]
    """[rank], in micro-batches of the whole rank; with V stages a rank there are V-ths."""
    forward_apart: bool = False
    weight_versions: int = 1
    """How many copies of its parameters a rank has."""

    def step_s(self, rank_s: Sequence[float], weight_s: Sequence[float] | None = None) -> float:
        """Seconds of a step, from t_r and w_r [rank]; not for schedules with `forward_apart`."""
        seconds = self.steady * max(rank_s) + self.fill * sum(rank_s)
        return seconds - (self.credit * sum(weight_s) if weight_s is not None else 0.0)


def closed_form(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    largest_stage: float | None = None,
) -> ClosedForm:
    """Return a schedule's closed form.

    `largest_stage` is the share of a rank's work in its largest stage, 1 / V if they are equal: n
    layers on a rank in V stages make it ceil(n / V) / n.  The bubble waits for that stage.

    >>> closed_form("1f1b", ranks=4, micro_batches=8).step_s([3.0] * 4)
    33.0
    >>> closed_form("interleaved", ranks=4, micro_batches=8, virtual_stages=2).in_flight
    (5.5, 4.5, 3.5, 2.5)
    """
    found = obstacle(
        name,
        stages=ranks * virtual_stages,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
    )
    if found:
        raise DocumentError(*found)
    schedule = schedule_of(name)
    share = largest_stage if largest_stage is not None else 1.0 / virtual_stages
    steady, fill = pace(name, ranks=ranks, micro_batches=micro_batches, largest_stage=share)
    shape = Shape(ranks, micro_batches, virtual_stages)
    return ClosedForm(
        steady=steady,
        fill=fill,
        credit=2.0 * fill if schedule.splits_backward else 0.0,
        in_flight=tuple(
            schedule.counts(rank, shape).whole / virtual_stages for rank in range(ranks)
        ),
        forward_apart=schedule.forwards_first,
        weight_versions=schedule.weight_versions,
    )


def pace(
    name: str, *, ranks: int, micro_batches: int, largest_stage: float = 1.0
) -> tuple[float, float]:
    """Return `steady` and `fill` of a schedule that can run in this shape.

    >>> pace("interleaved", ranks=4, micro_batches=8, largest_stage=0.5)
    (7.5, 0.5)
    """
    return schedule_of(name).coefficients.of(ranks, micro_batches, largest_stage)


@dataclass(frozen=True, slots=True)
class InFlightCounts:
    """How many micro-batches the stages of a rank hold at most, each stage's counted.

    `alive` counts from F to the end of I, `waiting` from the start of I to W.  Early stages hold
    the most: at any moment, of the last j of the V stages no more than j / V · `alive` are alive.
    So if no stage needs less than the one before it, x_0 <= x_1 <= ..., which makes x a sum of
    suffixes,

        Σ_c alive_c x_c <= alive / V · Σ_c x_c
    """

    alive: int
    waiting: int


def held(
    name: str, rank: int, *, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> InFlightCounts:
    """Return a rank's micro-batches in flight under a schedule; tests count those of its order.

    >>> [held("zb-h1", rank, ranks=4, micro_batches=8).waiting for rank in range(4)]
    [1, 2, 3, 4]
    """
    counts = schedule_of(name).counts(rank, Shape(ranks, micro_batches, virtual_stages))
    return InFlightCounts(counts.alive, counts.deferred)


def most_on_first_stage(name: str, *, ranks: int, micro_batches: int, virtual_stages: int) -> int:
    """Return how many micro-batches the model's first stage has in flight at most."""
    return schedule_of(name).on_first_stage(Shape(ranks, micro_batches, virtual_stages))


def uniform_step_s(
    name: str,
    *,
    ranks: int,
    micro_batches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
    virtual_stages: int = 1,
) -> float:
    """Seconds of a step whose ranks are all alike; F, I and W of a whole rank's micro-batch.

    Exact for every schedule but zbv and dualpipe-v, which see above.

    >>> uniform_step_s("zb-h1", ranks=4, micro_batches=8, forward_s=0.4, input_s=1.0, weight_s=1.0)
    22.2
    """
    form = closed_form(
        name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    whole_s = forward_s + input_s + weight_s
    if form.credit:
        bubble_s = max(forward_s, input_s, forward_s + input_s - weight_s) / virtual_stages
        return micro_batches * whole_s + (ranks - 1) * bubble_s
    return form.step_s([whole_s] * ranks)
