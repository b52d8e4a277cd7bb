"""How far a step may lie from its prediction: 80 % ranges, as docs/accuracy.md found them.

On a machine whose kernels and links were measured, each cause misses by its own share.  Without
that, rates of kernels come from other software and sheets, and what holds is how far steps of
sources lie that no constant was fitted to.  Layouts of one model on one machine share those rates,
so what tells them apart is the first range, not the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LINK_SPREAD = 0.15
"""Relative error of collective seconds: the alpha-beta model misses NCCL's curves by 7-21 %."""
UNMODELLED_SPREAD = 0.1
"""Relative error of what no fit speaks of: caches, clocks, stragglers, the host.  Of all 72 layouts
that were run on a measured machine 80 % lie within 9.6 % (benchmarks/results/local_truth.md)."""
UNMEASURED_BELOW, UNMEASURED_ABOVE = 0.2, 0.4
"""Logarithms: 80 of 100 steps of a source that no constant was fitted to lie between, mean over
sources (docs/accuracy.md, leaving sources out).  Steps are rather slower than predicted than
faster, since what nobody knows of takes time."""
EXPERTS_SPREAD = 0.35
"""Logarithm: spread of steps with experts, since routing is as skewed as the data makes it."""


def link_seconds(parts: Mapping[str, float]) -> float:
    """Return the seconds of a step that wait for links between devices."""
    return parts.get("tensor communication", 0.0) + parts.get("data communication", 0.0)


def own_miss(parts: Mapping[str, float], spread: float = UNMODELLED_SPREAD) -> float:
    """Return by what share of a step its causes miss together, all in the same direction.

    >>> round(own_miss({"forward": 2.0, "data communication": 2.0}), 3)
    0.125
    """
    step_s = sum(parts.values())
    links_s = link_seconds(parts)
    miss_s = (step_s - links_s) * max(spread, UNMODELLED_SPREAD) + links_s * LINK_SPREAD
    return miss_s / step_s if step_s else 0.0


def step_range(
    parts: Mapping[str, float], spread: float, *, measured: bool, experts: bool = False
) -> tuple[float, float]:
    """Return the ends of the range of a step, in seconds.

    `spread` is the relative error of its kernels; `measured` says that a profile of this machine
    is behind them.

    >>> low_s, high_s = step_range({"forward": 10.0}, 0.1, measured=True)
    >>> round(low_s, 3), round(high_s, 3)
    (9.0, 11.0)
    >>> low_s, high_s = step_range({"forward": 10.0}, 0.1, measured=False)
    >>> round(low_s, 2), round(high_s, 2)
    (8.19, 14.92)
    """
    step_s, miss = sum(parts.values()), own_miss(parts, spread)
    low, high = max(0.0, 1 - miss), 1 + miss
    if not measured:
        low, high = (
            min(low, math.exp(-UNMEASURED_BELOW)),
            max(high, math.exp(UNMEASURED_ABOVE)),
        )
    if experts and not measured:
        low = min(low, math.exp(-EXPERTS_SPREAD))
    return low * step_s, high * step_s
