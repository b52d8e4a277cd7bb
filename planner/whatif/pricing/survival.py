"""Survival: how often a run saves and fails, and what failures cost it, by its own record.

What ranks import of it is arithmetic; `planner.whatif.pricing.goodput` has what is assumed of
failures.

Source: Young, Comm. ACM 17 (1974) 530; Daly, Future Generation Computer Systems 22 (2006) 303.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.events import Attempt, Event, Incident, PhaseDone, Saved, StepDone
from meshwright.planner.documents.units import Amount, Count, Rate, Text
from meshwright.planner.whatif.pricing.economics import SECONDS_PER_HOUR

COPIES_SHARE = 0.0075
"""Share of training that copies of its state in memory may take; `--elastic` may cost a
hundredth."""


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
    """Figures that decide how often a run is saved, as predicted or as measured last."""

    failures_per_hour: Rate
    """Failures of the whole run."""
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
    """Seconds of a run by what was done in them, over all its attempts."""

    wall_s: float = 0.0
    """From its first event to its last."""
    trained_s: float = 0.0
    """In steps that count."""
    again_s: float = 0.0
    """In steps that were lost and done again."""
    blocked_s: float = 0.0
    """For saves."""
    attempts: int = 0
    begin_s: float = 0.0
    """Until the first step begins."""
    restart_s: float = 0.0
    """From the last step of an attempt until the next one begins its first: a step that was cut
    off, until it was seen, what was decided, the start of ranks."""
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
    def parts_s(self) -> dict[str, float]:
        """Seconds by what was done in them; they add up to those of the wall clock.

        >>> RunSeconds(wall_s=10.0, trained_s=7.0, blocked_s=1.0, restart_s=1.5).parts_s["other"]
        0.5
        """
        parts = {
            "steps": self.trained_s,
            "steps done again": self.again_s,
            "saves": self.blocked_s,
            "start": self.begin_s,
            "restarts": self.restart_s,
        }
        return parts | {"other": max(0.0, self.wall_s - sum(parts.values()))}

    @property
    def goodput(self) -> float:
        """Share of the wall clock that trained what counts; 0 before the first step."""
        return min(1.0, self.trained_s / self.wall_s) if self.wall_s else 0.0


KEPT_STEPS = 5_000
"""Steps that may be done again: what counts of those before is one sum."""


class AccountState(Part):
    """An account as it is stored."""

    step_s: tuple[tuple[Count, Amount], ...]
    earlier_s: Amount
    steps_lost: Count
    again_s: Amount
    ended_s: Amount
    first_s: Amount
    last_s: Amount
    begin_s: Amount
    restart_s: Amount
    device_s: Amount
    blocked_s: Amount
    devices: Count
    attempts: Count
    start_s: Amount | None = None
    from_step: Count | None = None
    incidents: dict[Text, Count]


class Accounting:
    """Adds up where the seconds of a run go, event by event."""

    def __init__(self) -> None:
        self.step_s: dict[int, float] = {}
        """Seconds of the newest steps that count."""
        self._earlier_s = 0.0
        """Seconds of the steps before those."""
        self.steps_lost, self.again_s = 0, 0.0
        self.ended_s = 0.0
        """When the last step, or save, was written down."""
        self._first_s = self._last_s = self._begin_s = self._restart_s = 0.0
        self._device_s = self._blocked_s = 0.0
        self._devices = self._attempts = 0
        self._start_s: float | None = None
        self._from_step: int | None = None
        self._incidents: Counter[str] = Counter()

    def state(self) -> AccountState:
        """Return what another account goes on from."""
        return AccountState(
            step_s=tuple(self.step_s.items()),
            earlier_s=self._earlier_s,
            steps_lost=self.steps_lost,
            again_s=self.again_s,
            ended_s=self.ended_s,
            first_s=self._first_s,
            last_s=self._last_s,
            begin_s=self._begin_s,
            restart_s=self._restart_s,
            device_s=self._device_s,
            blocked_s=self._blocked_s,
            devices=self._devices,
            attempts=self._attempts,
            start_s=self._start_s,
            from_step=self._from_step,
            incidents=dict(self._incidents),
        )

    @classmethod
    def of_state(cls, state: AccountState) -> Accounting:
        """Return an account that goes on from another."""
        account = cls()
        account.step_s, account._earlier_s = dict(state.step_s), state.earlier_s
        account.steps_lost, account.again_s = state.steps_lost, state.again_s
        account.ended_s, account._first_s, account._last_s = (
            state.ended_s,
            state.first_s,
            state.last_s,
        )
        account._begin_s, account._restart_s = state.begin_s, state.restart_s
        account._device_s, account._blocked_s = state.device_s, state.blocked_s
        account._devices, account._attempts = state.devices, state.attempts
        account._start_s, account._from_step = state.start_s, state.from_step
        account._incidents = Counter(state.incidents)
        return account

    @property
    def idle_since_s(self) -> float:
        """When the last step, or save, was written down, or else the first event."""
        return self.ended_s or self._first_s

    def add(self, event: Event) -> None:
        """Take what happened next."""
        at_s = event.at_unix_s
        self._first_s = self._first_s or at_s
        if self._attempts:
            self._device_s += self._devices * max(0.0, at_s - self._last_s)
        self._last_s = max(self._last_s, at_s)
        match event:
            case Attempt():
                self._attempts += 1
                self._devices, self._from_step = event.devices, event.after_step + 1
            case StepDone():
                if self._from_step is not None:
                    # It may have gone on from memory, behind the checkpoint that was there.
                    self._undo(event.record.step)
                    gap_s = max(0.0, at_s - event.record.step_s - self.idle_since_s)
                    self._begin_s += 0.0 if self.ended_s else gap_s
                    self._restart_s += gap_s if self.ended_s else 0.0
                self.ended_s = at_s
                self.step_s[event.record.step] = event.record.step_s
                if len(self.step_s) > 2 * KEPT_STEPS:
                    for step in list(itertools.islice(self.step_s, KEPT_STEPS)):
                        self._earlier_s += self.step_s.pop(step)
            case PhaseDone(phase="start"):
                self._start_s = event.measured_s
            case Saved():
                self._blocked_s += event.blocked_s
                self.ended_s = self.ended_s and at_s
            case Incident():
                self._incidents[event.cause] += 1
            case _:
                pass

    def _undo(self, from_step: int) -> None:
        """Take out the steps that are done again."""
        while self.step_s and next(reversed(self.step_s)) >= from_step:
            _, seconds = self.step_s.popitem()
            self.steps_lost += 1
            self.again_s += seconds
        self._from_step = None

    def seconds(self) -> RunSeconds:
        """Return where they went until now."""
        cut = [step for step in self.step_s if step >= (self._from_step or math.inf)]
        cut_s = sum(self.step_s[step] for step in cut)
        return RunSeconds(
            wall_s=self._last_s - self._first_s,
            trained_s=self._earlier_s + sum(self.step_s.values()) - cut_s,
            again_s=self.again_s + cut_s,
            blocked_s=self._blocked_s,
            begin_s=self._begin_s,
            restart_s=self._restart_s,
            attempts=self._attempts,
            device_hours=self._device_s / SECONDS_PER_HOUR,
            incidents=Counter(self._incidents),
            steps_lost=self.steps_lost + len(cut),
            start_s=self._start_s,
        )


def account(events: Iterable[Event]) -> RunSeconds:
    """Return where the seconds of a run went."""
    accounting = Accounting()
    for event in events:
        accounting.add(event)
    return accounting.seconds()


def expected_run_seconds(
    saves: SaveFigures,
    *,
    steps: int,
    step_s: float,
    every_steps: int,
    start_s: float,
    restart_s: float,
    copied_every: int | None = None,
    other: float = 0.0,
) -> tuple[RunSeconds, float]:
    """Return where the seconds of a run should go, and how many failures it should have.

    With S steps of s seconds, each `every_steps`-th saved, which blocks δ seconds and counts after
    w; λ failures a second; R seconds until ranks run again; q the share of training beside steps:

        wall = T + saves + start + q T + F (A + R + s / 2)       T = S s,  F = λ wall
        A = s (e - 1) / 2 + w - δ                                e = steps between saves, or copies

    A step that is cut off is half done.  A run that fails faster than it goes on never ends: its
    goodput is 0.  `copied_every` are the steps between copies in memory from which ranks go on.

    >>> figures = SaveFigures(failures_per_hour=0.36, blocked_s=0.5, written_s=0.5)
    >>> run, failures = expected_run_seconds(
    ...     figures, steps=10_000, step_s=4.0, every_steps=25, start_s=20.0, restart_s=30.0
    ... )
    >>> round(failures, 2), round(run.goodput, 4)
    (4.05, 0.9866)
    """
    trained_s = steps * step_s
    every = min(every_steps, steps)
    saved = math.ceil(steps / every)
    pending_s = saves.written_s - saves.blocked_s if every_steps <= steps else 0.0
    again = (every - 1) / 2
    if copied_every is not None:
        again, pending_s = (min(copied_every, every) - 1) / 2, 0.0
    again_s = again * step_s + max(0.0, pending_s)
    cut_s = restart_s + step_s / 2
    without_s = trained_s * (1 + other) + saved * saves.blocked_s + start_s
    rate = saves.failures_per_hour / SECONDS_PER_HOUR
    kept = 1 - rate * (again_s + cut_s)
    if kept <= 0:
        return RunSeconds(), rate * without_s
    wall_s = without_s / kept
    failures = rate * wall_s
    run_seconds = RunSeconds(
        wall_s=wall_s,
        trained_s=trained_s,
        again_s=failures * again_s,
        blocked_s=saved * saves.blocked_s,
        begin_s=start_s,
        restart_s=failures * cut_s,
    )
    return run_seconds, failures
