"""Seconds that no 1F1B step can beat: a bound by longest paths, and one that needs no split.

Stages take f_s and b_s seconds, t_s = f_s + b_s; c is the time of one transfer, which computation
may hide.  Both bounds hold for any execution of 1F1B with these seconds, so a split chosen by them
is proven good in the simulator's own terms, where the closed form of planner.solver.instance can
be 20 % above.
"""

from __future__ import annotations

from collections.abc import Sequence


def phi_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    *,
    transfer_s: float = 0.0,
) -> float:
    """Return Φ, a lower bound of a 1F1B step; equal to it for uniform stages without transfers.

    With pre_d = Σ_{s<d} (t_s + 2 c), D_d = Σ_{s>d} (t_s + 2 c), h = P - d, n_d = min(m, h) - 1,
    i1 = (D_d - n_d f_d)⁺, i2 = (D_d - n_d b_d)⁺, k = ⌊(m - 1) / h⌋ and r = m - 1 - k h,

        Φ = max_d max { pre_d + m t_d + (i1 + i2 if m > h else max(i1, i2)),
                        pre_d + (k + 1) (t_d + D_d) + r b_d }

    Stage d computes m t_d.  Before its first forward and after its last backward the stages before
    it need pre_d.  From its first forward's end to its first backward D_d passes, and only n_d
    forwards can fill that time; the same from its last forward to its last backward.  Second term:
    with no more than h micro-batches in flight, each h-th forward waits for a whole round trip.

    >>> phi_s([1.0] * 4, [2.0] * 4, 8)
    33.0
    """
    stages, m = len(forward_s), micro_batches
    trip_s = [f + b + 2.0 * transfer_s for f, b in zip(forward_s, backward_s, strict=True)]
    before_s, behind_s = 0.0, sum(trip_s)
    most_s = 0.0
    for d in range(stages):
        behind_s -= trip_s[d]
        f, b = forward_s[d], backward_s[d]
        ahead = stages - d
        others = min(m, ahead) - 1
        first_s = max(0.0, behind_s - others * f)
        last_s = max(0.0, behind_s - others * b)
        idle_s = first_s + last_s if m > ahead else max(first_s, last_s)
        trips, rest = divmod(m - 1, ahead)
        most_s = max(
            most_s,
            before_s + m * (f + b) + idle_s,
            before_s + (trips + 1) * (f + b + behind_s) + rest * b,
        )
        before_s += trip_s[d]
    return most_s


def balanced_s(
    total_s: float, *, stages: int, micro_batches: int, transfer_s: float = 0.0
) -> float:
    """Return what 1F1B takes at least, however `total_s` = Σ_s t_s is split into stages.

        T >= (m + P - 1) / P · Σ_s t_s + 2 c (P - 1)      for m > P

    Proof for c = 0.  With μ = Σ t / P, x_s = t_s - μ and Y_d = Σ_{s>=d} x_s, the idle time of Φ
    gives Φ >= Σ t + (m - P + d) t_d + D_d = Σ t + (m - 1) μ + (m - P + d - 1) x_d + Y_d.  Take the
    last d that makes Y_d largest: Y_d >= Y_0 = 0 and x_d = Y_d - Y_{d+1} >= 0.

    For m <= P it is false, since a heavier first stage gains up to 7 %; what is returned then is
    the larger of one micro-batch's way through and m times the mean stage.

    >>> balanced_s(12.0, stages=4, micro_batches=8)
    33.0
    """
    ways_s = 2.0 * transfer_s * (stages - 1)
    if micro_batches > stages:
        return (micro_batches + stages - 1) / stages * total_s + ways_s
    return max(total_s + ways_s, micro_batches * total_s / stages)
