"""All schedules: one record each, by how stages lie on ranks.

single  stage s on rank s: GPipe, 1F1B, and 1F1B without flush (PipeDream-2BW)
looped  stages go round the ranks: interleaved 1F1B, zero bubble (ZB-H1, interleaved)
folded  stages go down the ranks and up again, in a V: ZBV, DualPipe-V

A schedule is added by its record and a line of `SCHEDULES`; nothing else knows a schedule's name.
One that has the form `with_ahead` is also a schedule for every number of forwards ahead of each
link, which its name says: `1f1b ahead=1-0-0`.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules import pipeline_schedules as families
from meshwright.planner.schedules.schedule_record import (
    AHEAD,
    Coefficients,
    InFlight,
    Schedule,
    Shape,
    name_with_ahead,
    read_ahead,
)

__all__ = [
    "PLAIN",
    "SCHEDULES",
    "Coefficients",
    "InFlight",
    "Schedule",
    "Shape",
    "family_of",
    "name_with_ahead",
    "schedule_of",
]

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
    >>> schedule_of("1f1b ahead=1-0-0").ahead
    (1, 0, 0)
    """
    schedule = SCHEDULES.get(name)
    return _read_schedule(name) if schedule is None else schedule


@lru_cache(maxsize=1 << 10)
def _read_schedule(name: str) -> Schedule:
    """Return a schedule whose ranks run ahead of some links."""
    family, _, ahead = name.partition(AHEAD)
    schedule = SCHEDULES.get(family)
    if schedule is None:
        raise DocumentError("schedule", f"'{family}' is not known; known: {', '.join(SCHEDULES)}")
    if schedule.with_ahead is None:
        able = " or ".join(each.name for each in SCHEDULES.values() if each.with_ahead)
        raise DocumentError(
            "schedule", f"is '{name:.60}'; {family} has no forwards ahead: leave it out, or {able}"
        )
    numbers = read_ahead(ahead)
    if not any(numbers):
        raise DocumentError("schedule", f"is '{name:.60}', which is {family}: write {family}")
    return schedule.with_ahead(schedule, numbers)


def family_of(name: str) -> str:
    """Return the name of a schedule without its forwards ahead.

    >>> family_of("1f1b ahead=1-0-0"), family_of("zbv")
    ('1f1b', 'zbv')
    """
    return name.partition(AHEAD)[0]
