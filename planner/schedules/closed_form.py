"""Closed forms of the schedules' costs: the numbers by which a solver chooses a split.

With t_r the seconds that rank r spends on one micro-batch, all its stages together, and w_r the
part of them that its W take, a step of m micro-batches on P ranks of V stages takes

    T = steady · max_r t_r + Σ_r (fill · t_r - credit · w_r)

and rank r has the activations of in_flight_r micro-batches, all its stages together.

Accuracy against the simulator, without transfer time (transfers are charged to t_r); the last
column is for stages whose times scatter by 10 % (`forward_apart`: see
meshwright.planner.solver.partition_problem):

    schedule         uniform stages                uneven stages, form / simulated
    1f1b             exact                         1.00-1.12; 1.00 if the slowest is the last
    gpipe            exact                         1.00 with `forward_apart`
    interleaved      exact                         0.94-1.13
    1f1b ahead=1-0   as 1f1b, transfers included   as 1f1b
    zb-h1            exact if f, b <= f + b - w    0.99-1.08
    interleaved-zb   exact if f, b <= f + b - w    0.94-1.05
    zbv              exact if f = b = w            0.97-1.08
    dualpipe-v       exact if f = b = w            0.97-1.08; overlap's gain is not counted
    pipedream-2bw    exact, per step               1.00, as long as it never drains

Here f, b, w are a stage's seconds of F, I and W.  On uniform stages zb-h1 and interleaved-zb take
m t + (P - 1) max(f, b, f + b - w) / V, of which the form is the last branch
(`benchmarks.closed_forms`).
The counts in flight are those of the orders; zbv on fewer than 2 P - 1 micro-batches may have
fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.schedules import Shape, schedule_of


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
    """Largest number of micro-batches that a rank holds, counted for each of its stages.

    `alive` counts from F to the end of I, `waiting` from the start of I to W.  Early stages hold
    the most: at any moment, of the last j of the V stages no more than j / V · `alive` are alive.
    So if no stage needs less than the one before it, x_0 <= x_1 <= ..., which makes x a sum of
    suffixes,

        Σ_c alive_c x_c <= alive / V · Σ_c x_c
    """

    alive: int
    waiting: int


def in_flight_counts(
    name: str, rank: int, *, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> InFlightCounts:
    """Return a rank's micro-batches in flight under a schedule; tests count those of its order.

    >>> [in_flight_counts("zb-h1", rank, ranks=4, micro_batches=8).waiting for rank in range(4)]
    [1, 2, 3, 4]
    """
    counts = schedule_of(name).counts(rank, Shape(ranks, micro_batches, virtual_stages))
    return InFlightCounts(counts.alive, counts.deferred)


def most_on_first_stage(name: str, *, ranks: int, micro_batches: int, virtual_stages: int) -> int:
    """Return the largest number of micro-batches in flight on the model's first stage."""
    return schedule_of(name).on_first_stage(Shape(ranks, micro_batches, virtual_stages))
