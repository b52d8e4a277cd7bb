"""What a run's own record says: its failures, how often it saves, where its seconds went."""

from __future__ import annotations

import pytest

from planner.documents.document import json_line
from planner.documents.events import (
    Attempt,
    AttemptEnded,
    Event,
    Incident,
    Saved,
    StepDone,
    StepRecord,
    events_of,
)
from planner.whatif.goodput import failures_per_device_hour, save_figures
from planner.whatif.study import Failures
from planner.whatif.survival import RunSeconds, account


def step(number: int, at: float, seconds: float = 2.0) -> StepDone:
    record = StepRecord(step=number, loss=1.0, grad_norm=1.0, step_s=seconds, epoch=0)
    return StepDone(at_unix_s=at, record=record)


# Two attempts on 4 devices: 5 steps of 2 s, a crash, 3 of them done again in 3 s each.
RUN: list[Event] = [
    Attempt(at_unix_s=100.0, plan="p", devices=4),
    *[step(number, 110.0 + 2 * number) for number in range(1, 6)],
    Saved(at_unix_s=121.0, step=2, blocked_s=0.5, written_s=4.0),
    Incident(at_unix_s=125.0, cause="crash", rank=1, after_step=5, evidence="SIGKILL"),
    Attempt(at_unix_s=130.0, plan="p", devices=2, after_step=2),
    *[step(number, 130.0 + 3 * number, 3.0) for number in range(3, 6)],
    AttemptEnded(at_unix_s=160.0, stopped="steps", after_step=5),
]


def test_seconds_of_a_run_by_hand() -> None:
    found = account(RUN)

    assert (found.attempts, found.failures, found.steps_lost) == (2, 1, 3)
    assert found.wall_s == 60.0
    assert (found.trained_s, found.again_s, found.blocked_s) == (2 * 2 + 3 * 3, 3 * 2, 0.5)
    assert found.goodput == pytest.approx(13 / 60)
    assert found.device_hours == pytest.approx((30 * 4 + 30 * 2) / 3600)


def test_the_record_is_read_from_its_lines_and_what_is_no_event_left_out() -> None:
    lines = [json_line(event).encode() for event in RUN]
    harmful = [b"", b"\xff\n", b"[" * 100_000, b'{"event": "x"}', lines[0][:-9], b"9" * 70_000]

    assert list(events_of([*harmful, *lines])) == RUN


def test_what_is_announced_or_asked_for_is_no_failure_of_the_machine() -> None:
    told = [Incident(at_unix_s=1.0, cause=cause, evidence="x") for cause in ("notice", "user")]

    assert account(told).failures == 0


def test_failures_that_are_seen_move_the_rate_from_the_assumed_to_the_measured() -> None:
    usual = Failures()
    hours = 1e4
    rates = [
        failures_per_device_hour(usual, observed=seen, device_hours=hours) for seen in range(5)
    ]

    assert rates == sorted(rates)
    assert rates[0] < usual.per_device_hour.value < rates[2]
    many = failures_per_device_hour(usual, observed=100_000, device_hours=1e8)
    assert many == pytest.approx(1e-3, rel=2e-3)


def test_a_bad_cluster_saves_more_often() -> None:
    def every(known: RunSeconds) -> int:
        figures = save_figures(Failures(), known, parameters=70e9, devices=512)
        return figures.every_steps(6.0)

    bad = account([*RUN, *[event for event in RUN if event.event == "incident"] * 9])

    assert every(bad) < every(RunSeconds()) / 2
