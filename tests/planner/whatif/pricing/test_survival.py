"""What a run's own record says: its failures, how often it saves, where its seconds went."""

from __future__ import annotations

import pytest

from meshwright.planner.documents.document import json_line
from meshwright.planner.documents.events import (
    Attempt,
    AttemptEnded,
    Event,
    Incident,
    Saved,
    StepDone,
    StepRecord,
    events_of,
)
from meshwright.planner.whatif.pricing.goodput import (
    expected_of,
    failures_per_device_hour,
    save_figures,
)
from meshwright.planner.whatif.pricing.survival import (
    RunSeconds,
    SaveFigures,
    account,
    expected_run_seconds,
)
from meshwright.planner.whatif.study import Failures


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
    # From 100 until step 1 begins at 110, and from a save told at 121 until step 3 begins at 136.
    assert (found.begin_s, found.restart_s) == (10.0, 15.0)
    assert found.parts_s["other"] == 60 - 13 - 6 - 0.5 - 10 - 15
    assert found.device_hours == pytest.approx((30 * 4 + 30 * 2) / 3600)


def test_the_record_is_read_from_its_lines_and_what_is_no_event_left_out() -> None:
    lines = [json_line(event).encode() for event in RUN]
    harmful = [b"", b"\xff\n", b"[" * 100_000, b'{"event": "x"}', lines[0][:-9], b"9" * 70_000]

    assert list(events_of([*harmful, *lines])) == RUN


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


def test_what_a_run_should_take_by_hand() -> None:
    # 100 steps of 3 s, saved every 10 steps for 1 s: 300 + 10 s; start 20 s.  A failure costs 4.5
    # steps of 3 s, 5 s of a save under way, 6.5 s of restart and cut step: 25 s, every 250 s.
    saves = SaveFigures(failures_per_hour=3600 / 250, blocked_s=1.0, written_s=6.0)

    run, failures = expected_run_seconds(
        saves, steps=100, step_s=3.0, every_steps=10, start_s=20.0, restart_s=5.0
    )

    assert run.wall_s == pytest.approx(330 / (1 - 25 / 250))
    assert failures == pytest.approx(run.wall_s / 250)
    assert run.again_s == pytest.approx(failures * 18.5)
    assert run.restart_s == pytest.approx(failures * 6.5)
    assert run.parts_s["other"] == pytest.approx(0.0)
    never, _ = expected_run_seconds(
        saves, steps=100, step_s=3.0, every_steps=100, start_s=0.0, restart_s=150.0
    )
    assert never.goodput == 0.0


def test_copies_in_memory_cost_a_share_and_save_steps() -> None:
    figures = SaveFigures(failures_per_hour=2.0, blocked_s=3.0, written_s=60.0)

    def goodput(**more: object) -> float:
        return expected_of(
            Failures(), RunSeconds(), figures, steps=10_000, step_s=5.0, every_steps=20, **more
        ).goodput  # type: ignore[arg-type]

    assert goodput(elastic=False) < goodput(elastic=True)
    assert goodput(elastic=True) < goodput(elastic=True, copies=0.01)
    again = RunSeconds(attempts=3, restart_s=2000.0, start_s=10.0)
    known = expected_of(
        Failures(), again, figures, steps=10_000, step_s=5.0, every_steps=20, elastic=True
    )
    assert known.seconds["start"] == 10.0
    assert known.seconds["restarts"] == pytest.approx(known.failures * 1002.5)


def test_many_failures_are_those_of_spot_instances() -> None:
    found = failures_per_device_hour(Failures(), observed=80, device_hours=400.0)

    assert found == pytest.approx(80 / 400, rel=0.05)
