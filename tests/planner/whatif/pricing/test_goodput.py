"""Goodput by size, by hand and by a simulation of failures that shares no formula with it."""

from __future__ import annotations

import math
import random

import pytest

from meshwright.planner.catalog import sources
from meshwright.planner.whatif.pricing.goodput import (
    blocked_s,
    goodput_of,
    goodput_share,
    save_figures,
    written_s,
)
from meshwright.planner.whatif.pricing.survival import RunSeconds, interval_s
from meshwright.planner.whatif.study import FAILURE_RATES, Failures


def test_goodput_by_hand() -> None:
    # 1,000 devices with 2e-5 failures an hour: one in 50 h = 180,000 s.  A checkpoint of 90 s is
    # written every sqrt(2 x 90 x 180,000) = 5,692.0998 s: 90 / 5,692.0998 = 0.0158114; a failure
    # costs 2,846.0499 + 600 s of 180,000: 0.0191447.  1 / 1.0349561 = 0.9662246, less 3 %.
    share = goodput_share(
        failures_per_hour=1000 * 2e-5, blocked_s=90.0, written_s=90.0, restart_s=600.0, other=0.03
    )
    assert interval_s(90.0, 180_000.0) == pytest.approx(5_692.0998)
    assert share == pytest.approx(0.97 * 0.9662246, abs=1e-6)


def test_a_large_published_run() -> None:
    # Llama 3 405B: 16,384 H100, 419 interruptions in 54 days, more than 90 % of the time training.
    published = 419 / (54 * 24 * 16_384)
    assert Failures().per_device_hour.value == pytest.approx(published, rel=0.01)
    span = goodput_of(Failures(), parameters=405e9, devices=16_384, nodes=2_048, spot=False)
    assert span.low < span.value < 0.9 < span.high


def simulated(
    every_s: float, *, between_s: float, blocked_s: float, written_s: float, restart_s: float
) -> float:
    """Share of the time that trains, over many failures drawn at random.

    After a failure a run goes on from the last checkpoint that was written by then.
    """
    rng = random.Random(0)
    clock = trained = 0.0
    for _ in range(40_000):
        fails_in = rng.expovariate(1 / between_s)
        rounds = int(max(0.0, fails_in - (written_s - blocked_s)) // (every_s + blocked_s))
        trained += rounds * every_s
        clock += fails_in + restart_s
    return trained / clock


@pytest.mark.parametrize(("blocked", "written"), [(60.0, 60.0), (2.0, 200.0), (0.5, 500.0)])
def test_a_simulation_agrees_and_finds_no_better_interval(blocked: float, written: float) -> None:
    figures = {"between_s": 20_000.0, "restart_s": 300.0}
    figures |= {"blocked_s": blocked, "written_s": written}
    every_s = max(written, interval_s(blocked, figures["between_s"]))

    best = simulated(every_s, **figures)

    ours = goodput_share(
        failures_per_hour=3600 / figures["between_s"],
        blocked_s=blocked,
        written_s=written,
        restart_s=figures["restart_s"],
        other=0.0,
    )
    assert ours == pytest.approx(best, abs=0.01)
    others = [f for f in (0.3, 3.0) if every_s * f >= written]
    assert best > max(simulated(every_s * f, **figures) for f in others)


def test_the_range_by_hand_for_opt_175b() -> None:
    # 992 A100 at the worst: as jobs of 1,024 devices go 7.9 h without a failure, one in
    # 7.9 x 1,024 / 992 h = 29,357.4 s; 14 bytes of 175e9 parameters at 992 x 50 MB/s take
    # 49.3952 s, for which training waits, and 6.3 s more, every sqrt(2 x 55.6952 x 29,357.4) =
    # 1,808.351 s: 0.0307989; half of that and 1,800 s of 29,357.4: 0.0921122.  0.6 / 1.1229110.
    span = goodput_of(Failures(), parameters=175e9, devices=992, nodes=124, spot=False)

    assert span.low == pytest.approx(0.6 / 1.1229110, rel=1e-6)
    # Its logbook has 33 days of computing between 2021-11-11 and 2022-01-06, an unlucky run.
    assert span.low < 33 / 56 < 1.15 * span.low


def steps_between_checkpoints(*, step_s: float, parameters: float, devices: int) -> int:
    figures = save_figures(Failures(), RunSeconds(), parameters=parameters, devices=devices)
    return figures.every_steps(step_s)


def test_published_rates_of_failures_are_a_table_whose_ends_are_the_range() -> None:
    found = Failures().per_device_hour

    assert found.low == pytest.approx(1.22e-5, rel=0.01)
    assert found.high == pytest.approx(1.24e-4, rel=0.01)
    assert found.low == min(FAILURE_RATES.values()) < found.value < max(FAILURE_RATES.values())
    for name in FAILURE_RATES:
        assert name in sources()
        assert sources()[name] in (found.source or "")


@pytest.mark.parametrize(("parameters", "devices"), [(7e9, 64), (70e9, 512), (405e9, 16_384)])
def test_no_other_number_of_steps_between_checkpoints_loses_less(
    parameters: float, devices: int
) -> None:
    """What is lost is counted here: time to write, and half an interval for each failure."""
    failures, step_s = Failures(), 7.0
    a_second = devices * failures.per_device_hour.value / 3600
    saving_s = blocked_s(failures, parameters=parameters, devices=devices)
    least = math.ceil(written_s(failures, parameters=parameters, devices=devices) / step_s)

    def lost(every: int) -> float:
        return saving_s / (every * step_s) + a_second * every * step_s / 2

    every = steps_between_checkpoints(parameters=parameters, devices=devices, step_s=step_s)

    assert every == min(range(max(1, least), 20 * every), key=lost)


def test_a_step_longer_than_the_interval_is_saved_each_time() -> None:
    assert steps_between_checkpoints(parameters=1e6, devices=100_000, step_s=1e4) == 1


def test_the_interval_is_near_the_best_at_both_ends_of_the_stall() -> None:
    """By hand, 16,384 devices: a copy of 0.0297 s beside 0.8, 0.1 or 6.3 s, a failure in 11,135 s.

    Young's intervals are 136, 54 and 375 s.  Of one in 136 s, half of 136/54 + 54/136, or of
    375/136 + 136/375, times the least is lost at the ends; of one in 26 s, for a copy without a
    stall, 7 times at the upper end.
    """
    copied_s, between_s = 405e9 * 12 / (16_384 * 1e10), 54 * 24 * 3600 / 419

    def lost(every_s: float, stall_s: float) -> float:
        return (stall_s + copied_s) / every_s + every_s / 2 / between_s

    failures = Failures()
    every = steps_between_checkpoints(parameters=405e9, devices=16_384, step_s=1.0)

    assert every == pytest.approx(math.sqrt(2 * (0.8 + copied_s) * between_s), abs=0.5) == 136
    for stall_s in (failures.checkpoint_stall_s.low, failures.checkpoint_stall_s.high):
        least = math.sqrt(2 * (stall_s + copied_s) / between_s)
        assert lost(every, stall_s) < 1.6 * least
    assert lost(26, failures.checkpoint_stall_s.high) > 7 * least
