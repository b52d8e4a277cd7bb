"""Goodput predicted before a run beside that of the run, on traces of failures.

    python -m benchmarks.goodput [TRACE ...]       # a minute of processor time for a dozen traces

A trace is a file of one of three public collections, as they lie in their repositories:

    skypilot-org/spot-traces   preemption/**/*.json, availability/**/*.json
    uclasystem/bamboo          traces/*.csv
    eth-easl/sailor            sailor/Controller/trace_based/*.json

Without one, failures are drawn at random at published rates.  A run lives through the trace by a
clock of its own: its steps, saves and restarts take seconds of that clock, and what decides is the
runtime's own code: how often it saves (`SaveSchedule`), what it does about an end (`verdict`),
where its seconds went (`account`).  Each loss of nodes ends an attempt.  While no node is there the
clock stands: nobody predicts a market.

The first half of a trace is what the run knows; goodput of the second half is predicted from it,
written down, and then lived through.  Restarts, saves and steps are uneven by a fifth and more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from meshwright.planner.documents.events import (
    Attempt,
    Event,
    Expected,
    Incident,
    PhaseDone,
    Saved,
    StepDone,
    StepRecord,
)
from meshwright.planner.whatif.pricing.goodput import expected_of, save_figures
from meshwright.planner.whatif.pricing.survival import RunSeconds, SaveFigures, account
from meshwright.planner.whatif.study import FAILURE_RATES, Failures
from meshwright.runtime.checkpoint.writer import Saver, SaveSeconds
from meshwright.runtime.launch.checkpoint_interval import SaveSchedule
from meshwright.runtime.run.recovery_policy import RankEnd, verdict
from meshwright.runtime.run.run_folder import RankOrders

PARAMETERS = 7_000_000_000
DETECT_S = (0.4, 5.0)
START_S = (10.0, 40.0)
UNEVEN = 0.2
SHORTEST_STEP_S, LONGEST_STEP_S, MOST_STEPS = 6.0, 15.0, 5_000
"""A longer trace has longer steps."""
TARGET = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """When nodes were lost, by a clock that stands while there are none."""

    name: str
    hours: float
    lost_s: tuple[float, ...]
    nodes: float
    """That were there, on average."""
    gap_s: float = 0.0
    """Between looks: what was lost at one was lost at some time since the one before."""

    def half(self, second: bool) -> Trace:
        """Return its first or second half."""
        middle_s = self.hours * 1800
        start_s = middle_s if second else 0.0
        own = [at - start_s for at in self.lost_s if (at >= middle_s) == second]
        return Trace(
            name=self.name,
            hours=self.hours / 2,
            lost_s=tuple(own),
            nodes=self.nodes,
            gap_s=self.gap_s,
        )


def read(path: Path) -> Trace:
    """Read a trace of one of the collections."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        at_s: dict[float, int] = {}
        for line in text.split():
            milliseconds, what, _ = line.split(",")
            when = float(milliseconds) / 1e3
            at_s[when] = at_s.get(when, 0) + (1 if what == "add" else -1)
        count, counts = 0, []
        for when, change in sorted(at_s.items()):
            count += change
            counts.append((when, count))
        return of_counts(path.stem, counts)
    found = json.loads(text)
    if isinstance(found, dict):
        gap_s = found["metadata"]["gap_seconds"]
        counts = [(at * gap_s, n) for at, n in enumerate(found["data"])]
        return replace(of_counts(path.stem, counts), gap_s=gap_s)
    return of_counts(path.stem, [(row["Time"], row["GPUs"]) for row in found])


def of_counts(name: str, counts: Sequence[tuple[float, int]]) -> Trace:
    """Return a trace of how many nodes were there from when on."""
    clock_s = node_s = 0.0
    lost = []
    for (at_s, count), (next_s, following) in itertools.pairwise(counts):
        if count > 0:
            clock_s += next_s - at_s
            node_s += count * (next_s - at_s)
        if following < count:
            lost.append(clock_s)
    nodes = node_s / clock_s if clock_s else 0.0
    return Trace(name=name, hours=clock_s / 3600, lost_s=tuple(lost), nodes=nodes)


def drawn(name: str, per_device_hour: float, *, devices: int, failures: int, seed: int) -> Trace:
    """Return failures at random at a rate, as many on average."""
    rng = random.Random(seed)
    hours = failures / (per_device_hour * devices)
    at_s, lost = 0.0, []
    while (at_s := at_s + rng.expovariate(failures / (hours * 3600))) < hours * 3600:
        lost.append(at_s)
    return Trace(name=name, hours=hours, lost_s=tuple(lost), nodes=devices)


class _Took:
    """Stands for a Saver whose last save took so long."""

    took: SaveSeconds | None = None


class Run:
    """A run by a clock of its own, over one trace; it goes on in the record of what was before."""

    def __init__(self, trace: Trace, *, step_s: float, before: Sequence[Event], seed: int) -> None:
        self.name, self.step_s = trace.name, step_s
        self.devices = max(2, round(trace.nodes))
        self.events: list[Event] = []
        self._told = [event for event in before if not isinstance(event, StepDone)]
        self._rng = random.Random(seed)
        self._clock_s = before[-1].at_unix_s if before else 1.0
        self._ends_s = self._clock_s + trace.hours * 3600
        self._lost_s = sorted(
            self._clock_s + max(0.0, at_s - self._rng.uniform(0.0, trace.gap_s))
            for at_s in trace.lost_s
        )

    @property
    def saves(self) -> SaveFigures:
        """What decides how often the run is saved, by all that it has seen."""
        known = account(self._told)
        return save_figures(Failures(), known, parameters=PARAMETERS, devices=self.devices)

    def live(self) -> RunSeconds:
        """Live through the trace; return where the seconds went."""
        step: int | None = 0
        ends: list[RankEnd] = []
        with tempfile.TemporaryDirectory() as folder:
            while step is not None:
                begun = step
                step = self._attempt(begun, Path(folder))
                if step is not None:
                    ends.append(RankEnd(cause="node", rank=0, after_step=self._done))
                    found = verdict(ends, devices=self.devices)
                    if found is None or found.reaction == "stop":
                        raise SystemExit(f"{self.name}: stopped after {len(ends)} losses")
        return account(self.events)

    def _attempt(self, from_step: int, folder: Path) -> int | None:
        """Train until nodes are lost, and return the step to go on from; None at the end."""
        begun_s = self._clock_s
        self._tell(Attempt(at_unix_s=begun_s, plan="p", devices=self.devices, after_step=from_step))
        self._clock_s += self._rng.uniform(*START_S)
        while (lost_s := self._lost_by(self._clock_s)) is not None:  # it begins to start anew
            detected_s = lost_s + self._rng.uniform(*DETECT_S)
            self._tell(
                Incident(at_unix_s=detected_s, cause="node", after_step=from_step, evidence="trace")
            )
            self._clock_s = detected_s + self._rng.uniform(*START_S)
        took_s = self._clock_s - begun_s
        self._tell(PhaseDone(at_unix_s=self._clock_s, phase="start", measured_s=took_s))
        figures, saver = self.saves, _Took()
        orders = RankOrders(
            token="t",
            output=folder,
            corpus=folder,
            device="cpu",
            started_unix_s=0.0,
            checkpoint_every=figures.every_steps(self.step_s),
            saves=figures,
        )
        schedule = SaveSchedule(orders, cast("Saver", saver), after_step=from_step)
        self._done = saved = from_step
        writing: tuple[int, float] | None = None
        seconds: list[float] = []
        while self._clock_s < self._ends_s:
            step_s = self._about(self.step_s)
            lost_s = self._lost_by(self._clock_s + step_s)
            self._clock_s = max(self._clock_s, lost_s) if lost_s else self._clock_s + step_s
            if writing is not None and writing[1] <= self._clock_s:
                saved, writing = writing[0], None
            if lost_s is not None:
                self._clock_s += self._rng.uniform(*DETECT_S)
                at_s, done = self._clock_s, self._done
                self._tell(
                    Incident(at_unix_s=at_s, cause="node", after_step=done, evidence="trace")
                )
                return saved
            self._done += 1
            seconds.append(step_s)
            record = StepRecord(step=self._done, loss=1.0, grad_norm=1.0, step_s=step_s, epoch=0)
            self.events.append(StepDone(at_unix_s=self._clock_s, record=record))
            if schedule.due(self._done):
                schedule.saves(self._done, seconds, None)
                blocked_s = self._about(figures.blocked_s)
                written_s = max(blocked_s, self._about(figures.written_s))
                took = SaveSeconds(step=self._done, blocked_s=blocked_s, written_s=written_s)
                saver.took, writing = took, (self._done, self._clock_s + written_s)
                self._clock_s += blocked_s
                self._tell(
                    Saved(
                        at_unix_s=self._clock_s,
                        step=self._done,
                        blocked_s=blocked_s,
                        written_s=written_s,
                    )
                )
            schedule.stepped(self._done, seconds, None)
        return None

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self._told.append(event)

    def _about(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - UNEVEN, 1 + UNEVEN)

    def _lost_by(self, at_s: float) -> float | None:
        """Take the next loss of nodes, if it comes by then."""
        return self._lost_s.pop(0) if self._lost_s and self._lost_s[0] <= at_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The second half of a trace."""

    trace: Trace
    expected: Expected
    measured: RunSeconds

    @property
    def error(self) -> float:
        """Return (predicted - measured) / measured."""
        return self.expected.goodput / self.measured.goodput - 1


def compared(trace: Trace, *, most_steps: int = MOST_STEPS, seed: int = 0) -> Row:
    """Predict the second half of a trace from the first, then live through it."""
    step_s = max(SHORTEST_STEP_S, min(LONGEST_STEP_S, trace.hours * 3600 / most_steps))
    first = Run(trace.half(second=False), step_s=step_s, before=(), seed=seed)
    known = first.live()
    second = Run(trace.half(second=True), step_s=step_s, before=first.events, seed=seed + 1)
    steps = max(1, round(trace.hours * 1800 / step_s))
    told = expected_of(
        Failures(),
        known,
        second.saves,
        steps=steps,
        step_s=step_s,
        every_steps=second.saves.every_steps(step_s),
        elastic=True,
    )
    return Row(trace=trace, expected=told, measured=second.live())


def random_traces() -> list[Trace]:
    """Return failures at random, at published rates of large runs."""
    return [
        drawn(f"{name}, 16,384 devices", rate, devices=16_384, failures=60, seed=seed)
        for seed, (name, rate) in enumerate(FAILURE_RATES.items())
    ]


def main() -> int:
    """Print a row for each trace; status 1 where a prediction misses by more than a twentieth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    args = parser.parse_args()
    traces = [read(path) for path in args.traces] or random_traces()
    print("| trace | hours | losses | predicted | of the run | error |")
    print("|---|---|---|---|---|---|")
    rows = [compared(trace) for trace in traces]
    for row in rows:
        low, high = row.expected.goodput_low, row.expected.goodput_high
        print(
            f"| {row.trace.name} | {row.trace.hours:.0f} | {len(row.trace.lost_s)} "
            f"| {100 * row.expected.goodput:.1f} % ({100 * low:.1f} to {100 * high:.1f}) "
            f"| {100 * row.measured.goodput:.1f} % | {100 * row.error:+.1f} % |"
        )
    worst = max(abs(row.error) for row in rows)
    print(f"\nworst {100 * worst:.1f} %")
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
