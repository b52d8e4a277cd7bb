"""All schedules: one record each, by how stages lie on ranks.

single  stage s on rank s: GPipe, 1F1B, and 1F1B without flush (PipeDream-2BW)
looped  stages go round the ranks: interleaved 1F1B, zero bubble (ZB-H1, interleaved)
folded  stages go down the ranks and up again, in a V: ZBV, DualPipe-V

A schedule is added by its record and a line of `SCHEDULES`; nothing else knows a schedule's name.
"""

from __future__ import annotations

from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules import pipeline_schedules as families
from meshwright.planner.schedules.schedule_record import Coefficients, InFlight, Schedule, Shape

__all__ = ["PLAIN", "SCHEDULES", "Coefficients", "InFlight", "Schedule", "Shape", "schedule_of"]

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        families.ONE_FORWARD_ONE_BACKWARD,
        families.GPIPE,
        families.INTERLEAVED,
        families.ZB_H1,
        families.INTERLEAVED_ZB,
        families.ZBV,
        families.DUALPIPE_V,
        families.PIPEDREAM_2BW,
    )
}
"""Schedules by name, the simplest first; among equally fast plans the simpler schedule wins."""
PLAIN = families.ONE_FORWARD_ONE_BACKWARD.name
"""Schedule that runs by default, and always without a pipeline."""


def schedule_of(name: str) -> Schedule:
    """Return a schedule by its name.

    >>> schedule_of("zbv").placement
    'v'
    """
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise DocumentError("schedule", f"'{name}' is not known; known: {', '.join(SCHEDULES)}")
    return schedule
