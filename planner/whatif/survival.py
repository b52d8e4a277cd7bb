"""Survival: how often a run saves and fails, and what failures cost it, by its own record.

What ranks import of it is arithmetic; `planner.whatif.goodput` has what is assumed of failures.

Source: Young, Comm. ACM 17 (1974) 530; Daly, Future Generation Computer Systems 22 (2006) 303.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.documents.document import Part
from planner.documents.events import Attempt, Event, Incident, PhaseDone, Saved, StepDone
from planner.documents.units import Amount, Rate
from planner.whatif.economics import SECONDS_PER_HOUR


def interval_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds between checkpoints at which the least is lost.

    >>> interval_s(50.0, 10_000.0)
    1000.0
    """
    return math.sqrt(2 * checkpoint_s * between_failures_s)


def every_s(*, blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Seconds between checkpoints at which the least is lost; one is written at a time."""
    return max(written_s, interval_s(blocked_s, between_failures_s))


class SaveFigures(Part):
    """What decides how often a run is saved, as predicted or as measured last."""

    failures_per_hour: Rate
    """Of the whole run."""
    blocked_s: Amount
    written_s: Amount

    def every_steps(self, step_s: float) -> int:
        """Steps between checkpoints at which the least is lost, at least 1.

        sqrt(2 x 0.5 x 3600 / 0.36) = 100 s:

        >>> SaveFigures(failures_per_hour=0.36, blocked_s=0.5, written_s=7.0).every_steps(4.0)
        25
        """
        interval = every_s(
            blocked_s=self.blocked_s,
            written_s=self.written_s,
            between_failures_s=SECONDS_PER_HOUR / self.failures_per_hour,
        )
        return max(1, round(interval / step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Where a run's seconds went, over all its attempts."""

    wall_s: float = 0.0
    """From its first event to its last."""
    trained_s: float = 0.0
    """In steps that count."""
    again_s: float = 0.0
    """In steps that were lost and done again."""
    blocked_s: float = 0.0
    """For saves."""
    attempts: int = 0
    device_hours: float = 0.0
    incidents: Counter[str] = field(default_factory=Counter)
    """By cause."""
    steps_lost: int = 0
    start_s: float | None = None
    """From the start of ranks to their first step, the last time; None before that."""

    @property
    def failures(self) -> int:
        """Incidents of the machine: what is announced, or asked for by a user, is none."""
        announced = ("notice", "user", "program", "not_a_number", "out_of_memory")
        return sum(count for cause, count in self.incidents.items() if cause not in announced)

    @property
    def goodput(self) -> float:
        """Share of the wall clock that trained what counts; 0 before the first step."""
        return min(1.0, self.trained_s / self.wall_s) if self.wall_s else 0.0


def account(events: Iterable[Event]) -> RunSeconds:
    """Return where the seconds of a run went."""
    first_s = last_s = 0.0
    devices = attempts = lost = 0
    device_s = blocked_s = again_s = 0.0
    step_s: dict[int, float] = {}
    start_s = None
    from_step: int | None = None
    incidents: Counter[str] = Counter()
    for event in events:
        at_s = event.at_unix_s
        first_s = first_s or at_s
        device_s += devices * max(0.0, at_s - last_s) if attempts else 0.0
        last_s = max(last_s, at_s)
        match event:
            case Attempt():
                attempts += 1
                devices, from_step = event.devices, event.after_step + 1
            case StepDone():
                if from_step is not None:
                    # It may have gone on from memory, behind the checkpoint that was there.
                    lost, again_s = _undone(step_s, event.record.step, lost, again_s)
                    from_step = None
                step_s[event.record.step] = event.record.step_s
            case PhaseDone(phase="start"):
                start_s = event.measured_s
            case Saved():
                blocked_s += event.blocked_s
            case Incident():
                incidents[event.cause] += 1
            case _:
                pass
    if from_step is not None:
        lost, again_s = _undone(step_s, from_step, lost, again_s)
    return RunSeconds(
        wall_s=last_s - first_s,
        trained_s=sum(step_s.values()),
        again_s=again_s,
        blocked_s=blocked_s,
        attempts=attempts,
        device_hours=device_s / SECONDS_PER_HOUR,
        incidents=incidents,
        steps_lost=lost,
        start_s=start_s,
    )


def _undone(
    step_s: dict[int, float], from_step: int, lost: int, again_s: float
) -> tuple[int, float]:
    """Take out the steps that are done again; return how many were until now, and their seconds."""
    undone = [step for step in step_s if step >= from_step]
    return lost + len(undone), again_s + sum(step_s.pop(step) for step in undone)
