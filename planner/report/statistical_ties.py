"""Which plans no prediction tells apart: those closer to the best than its error bar.

Rates of kernels err for all layouts of one model on one machine alike, so the bar of such plans is
what links and all that no fit speaks of leave open (`planner.costs.uncertainty`).  A tie does not
claim that two are equal, but that only a measurement decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.planner.costs.uncertainty import own_miss
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.units import seconds_text


def ties(prediction: Prediction, certificate: Certificate) -> list[str]:
    """Return the layouts that were simulated and lie within the error bar of the plan."""
    bar = 1 + own_miss(prediction.step_parts)
    ties = [
        finalist.layout
        for finalist in certificate.finalists
        if finalist.step_time_s <= bar * prediction.step_time_s
    ]
    return [layout for layout in dict.fromkeys(ties) if layout != prediction.layout]


def parts(layout: str) -> int:
    """Return how much a layout's text asks for: axes of several ranks, sharding, schedules.

    >>> parts("tp=1 pp=1 dp=8 zero=3 micro_batch=1x4"), parts("tp=2 pp=4 dp=1 zero=0 1f1b v=2")
    (2, 3)
    """
    degrees = re.findall(r"\b(?:tp|pp|dp|cp|ep|vpp|v)=(\d+)", layout)
    sharded = re.search(r"\bzero=[1-3]", layout) is not None
    return sum(int(n) > 1 for n in degrees) + sharded + layout.count("stages=")


def tie_text(best: str, others: Sequence[str], low_s: float, high_s: float) -> str:
    """Return that layouts tie, and which of them is simplest; nothing if there are none."""
    if not others:
        return ""
    simplest = min(others, key=parts)
    simpler = f"; the simplest: {simplest}" if parts(simplest) < parts(best) else ""
    return (
        f"{len(others)} others lie within the error bar ({seconds_text(low_s)} to "
        f"{seconds_text(high_s)}){simpler}"
    )
