"""A run as its events tell it: how far it is, what was predicted, and what became of incidents."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.planner.documents.document import Part
from meshwright.planner.documents.events import (
    Attempt,
    AttemptEnded,
    Cause,
    Decision,
    Drift,
    Event,
    Expected,
    Incident,
    Paced,
    PhaseDone,
    Saved,
    SaveFailed,
    StepDone,
    StepRecord,
)
from meshwright.planner.documents.units import Amount, Count, Text
from meshwright.planner.whatif.pricing.survival import Accounting, AccountState, RunSeconds

RECENT = 50
"""Steps whose median is what a step takes."""
MOST_POINTS = 400
"""Most points of a curve; of a longer run every second one is left out, again and again."""
MOST_NOTED = 200
"""Incidents and drifts that are kept, the newest; of events there may be any number."""

ADVICE: dict[Cause, str] = {
    "crash": "Look at the kernel's log of the node for oom-kill and Xid.",
    "device": "Have the device replaced.",
    "node": "Have the node looked at; the same command on it makes it a spare.",
    "hang": "If it comes again on this rank, its node is bad; else look at its framework.",
    "out_of_memory": "Plan with less memory per device; compare what was held with its prediction.",
    "transient": "Look at the file system, link or device that the error names.",
    "not_a_number": "Lower the learning rate, or look at the data of the step.",
    "doubtful_step": "If it comes again, lower the learning rate, or look at the data of the step.",
    "straggler": "Look at the clocks, cooling and neighbours of the node of the rank.",
    "corruption": "Have the device of the rank replaced; its memory or arithmetic is damaged.",
    "program": "Read the end of the rank's log: it is the program or its data.",
    "notice": "Nothing; the same command with --resume goes on.",
    "user": "Nothing; the same command with --resume goes on.",
}
"""Advice on what is left to do, by cause."""


@dataclass(slots=True, kw_only=True)
class IncidentCase:
    """One incident, and what became of it."""

    number: int
    """From 1, in the order of the run."""
    attempt: int
    incident: Incident
    decisions: list[Decision] = field(default_factory=list)
    phases: list[PhaseDone] = field(default_factory=list)
    steps_lost: int = 0
    lost_s: float | None = None
    """Until the first step begins that goes beyond, and of the steps done again; None until
    then."""

    @property
    def advice(self) -> str:
        """Advice on what is left to do."""
        return ADVICE[self.incident.cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run, as far as its events go."""

    seconds: RunSeconds
    expected: Expected | None
    last: StepRecord | None
    step_s: float | None
    """The median of the last steps."""
    predicted_step_s: float | None
    devices: int
    plan: str | None
    """The digest of the plan that it trains by now."""
    curve: tuple[tuple[int, float, float], ...]
    """Steps, their losses and seconds; some of them."""
    cases: tuple[IncidentCase, ...]
    drifts: tuple[Drift, ...]
    paced: Paced | None
    saved: Saved | None
    save_failed: SaveFailed | None
    """The last save, where it failed."""
    ended: AttemptEnded | None
    """End of its last attempt, if it ended as it should."""
    at_unix_s: float
    """Time of its last event, in Unix seconds."""


class CaseState(Part):
    """An incident as it is stored."""

    number: Count
    attempt: Count
    incident: Incident
    decisions: tuple[Decision, ...]
    phases: tuple[PhaseDone, ...]
    steps_lost: Count
    lost_s: Amount | None = None
    is_open: bool
    """True if training has not gone on yet."""


class ViewState(Part):
    """A view of a run as it is stored."""

    account: AccountState
    recent: tuple[Amount, ...]
    curve: tuple[tuple[Count, float, Amount], ...]
    every: Count
    cases: tuple[CaseState, ...]
    drifts: tuple[Drift, ...]
    attempts: Count
    devices: Count
    incidents: Count
    plan: Text | None = None
    expected: Expected | None = None
    last: StepRecord | None = None
    predicted_s: Amount | None = None
    paced: Paced | None = None
    saved: Saved | None = None
    save_failed: SaveFailed | None = None
    ended: AttemptEnded | None = None
    at_s: Amount


class Viewer:
    """Makes a view of a run, event by event."""

    def __init__(self) -> None:
        self._account = Accounting()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._curve: list[tuple[int, float, float]] = []
        self._every = 1
        self._cases: deque[IncidentCase] = deque(maxlen=MOST_NOTED)
        self._drifts: deque[Drift] = deque(maxlen=MOST_NOTED)
        self._open: list[IncidentCase] = []
        """Incidents from which training has not gone on yet."""
        self._attempts = self._devices = self._incidents = 0
        self._plan: str | None = None
        self._expected: Expected | None = None
        self._last: StepRecord | None = None
        self._predicted_s: float | None = None
        self._paced: Paced | None = None
        self._saved: Saved | None = None
        self._save_failed: SaveFailed | None = None
        self._ended: AttemptEnded | None = None
        self._at_s = 0.0

    def add(self, event: Event) -> None:
        """Take what happened next."""
        idle_since_s = self._account.idle_since_s
        lost, again_s = self._account.steps_lost, self._account.again_s
        self._account.add(event)
        self._at_s = event.at_unix_s
        match event:
            case Attempt():
                self._attempts += 1
                self._devices, self._plan = event.devices, event.plan
                self._predicted_s, self._ended = event.predicted_step_s, None
            case StepDone():
                self._count_step(event)
                gap_s = max(0.0, event.at_unix_s - event.record.step_s - idle_since_s)
                self._go_on(
                    gap_s + self._account.again_s - again_s, self._account.steps_lost - lost
                )
            case Incident():
                self._incidents += 1
                case = IncidentCase(number=self._incidents, attempt=self._attempts, incident=event)
                self._cases.append(case)
                if event.cause not in ("notice", "user"):
                    self._open.append(case)
            case Decision() | PhaseDone():
                self._react(event)
            case _:
                self._note(event)

    def _note(self, event: Event) -> None:
        """Keep what is shown as it is."""
        match event:
            case Expected():
                self._expected = self._expected or event
            case Drift():
                self._drifts.append(event)
            case Paced():
                self._paced = event
            case Saved():
                self._saved, self._save_failed = event, None
            case SaveFailed():
                self._save_failed = event
            case AttemptEnded():
                self._ended = event
            case _:
                pass

    def _go_on(self, lost_s: float, steps_lost: int) -> None:
        for case in self._open:
            case.lost_s, case.steps_lost = lost_s, steps_lost
        self._open.clear()

    def _react(self, event: Decision | PhaseDone) -> None:
        for case in self._open:
            if isinstance(event, PhaseDone):
                case.phases.append(event)
            elif event.reaction != "interval":
                case.decisions.append(event)

    def _count_step(self, event: StepDone) -> None:
        record = self._last = event.record
        self._recent.append(record.step_s)
        if event.predicted_s is not None:
            self._predicted_s = event.predicted_s
        while self._curve and self._curve[-1][0] >= record.step:
            self._curve.pop()
        if record.step % self._every == 0:
            self._curve.append((record.step, record.loss, record.step_s))
        if len(self._curve) > MOST_POINTS:
            self._every *= 2
            self._curve = [point for point in self._curve if point[0] % self._every == 0]

    def state(self) -> ViewState:
        """Return what another viewer goes on from."""
        return ViewState(
            account=self._account.state(),
            recent=tuple(self._recent),
            curve=tuple(self._curve),
            every=self._every,
            cases=tuple(
                CaseState(
                    number=case.number,
                    attempt=case.attempt,
                    incident=case.incident,
                    decisions=tuple(case.decisions),
                    phases=tuple(case.phases),
                    steps_lost=case.steps_lost,
                    lost_s=case.lost_s,
                    is_open=case in self._open,
                )
                for case in self._cases
            ),
            drifts=tuple(self._drifts),
            attempts=self._attempts,
            devices=self._devices,
            incidents=self._incidents,
            plan=self._plan,
            expected=self._expected,
            last=self._last,
            predicted_s=self._predicted_s,
            paced=self._paced,
            saved=self._saved,
            save_failed=self._save_failed,
            ended=self._ended,
            at_s=self._at_s,
        )

    @classmethod
    def of_state(cls, state: ViewState) -> Viewer:
        """Return a viewer that goes on from another."""
        viewer = cls()
        viewer._account = Accounting.of_state(state.account)
        viewer._recent.extend(state.recent)
        viewer._curve, viewer._every = list(state.curve), max(1, state.every)
        for stored in state.cases:
            case = IncidentCase(
                number=stored.number,
                attempt=stored.attempt,
                incident=stored.incident,
                decisions=list(stored.decisions),
                phases=list(stored.phases),
                steps_lost=stored.steps_lost,
                lost_s=stored.lost_s,
            )
            viewer._cases.append(case)
            viewer._open += [case] if stored.is_open else []
        viewer._drifts.extend(state.drifts)
        viewer._attempts, viewer._devices = state.attempts, state.devices
        viewer._incidents, viewer._plan = state.incidents, state.plan
        viewer._expected, viewer._last = state.expected, state.last
        viewer._predicted_s, viewer._paced = state.predicted_s, state.paced
        viewer._saved, viewer._save_failed = state.saved, state.save_failed
        viewer._ended, viewer._at_s = state.ended, state.at_s
        return viewer

    @property
    def expectation(self) -> Expected | None:
        """Prediction made before the first attempt."""
        return self._expected

    @property
    def seconds(self) -> RunSeconds:
        """Seconds of the run until now, by what was done in them."""
        return self._account.seconds()

    def view(self) -> RunView:
        """Return the run as it is now."""
        return RunView(
            seconds=self._account.seconds(),
            expected=self._expected,
            last=self._last,
            step_s=statistics.median(self._recent) if self._recent else None,
            predicted_step_s=self._predicted_s,
            devices=self._devices,
            plan=self._plan,
            curve=tuple(self._curve),
            cases=tuple(self._cases),
            drifts=tuple(self._drifts),
            paced=self._paced,
            saved=self._saved,
            save_failed=self._save_failed,
            ended=self._ended,
            at_unix_s=self._at_s,
        )


def run_view(events: Iterable[Event]) -> RunView:
    """Return a run as its events tell it.

    >>> crash = Incident(at_unix_s=9.0, cause="crash", rank=1, after_step=1, evidence="killed")
    >>> [case.advice for case in run_view([crash]).cases]
    ["Look at the kernel's log of the node for oom-kill and Xid."]
    """
    viewer = Viewer()
    for event in events:
        viewer.add(event)
    return viewer.view()
