"""A launch that is saved at all is saved where the least is lost, and says how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.launch.attempt import with_interval
from meshwright.planner.whatif.pricing.goodput import save_figures
from meshwright.planner.whatif.pricing.survival import RunSeconds, SaveFigures
from meshwright.planner.whatif.study import Failures
from meshwright.runtime.run.launch_options import LaunchRun


def figures(parameters: int = 405_000_000_000, devices: int = 16_384) -> SaveFigures:
    return save_figures(Failures(), RunSeconds(), parameters=parameters, devices=devices)


def test_a_long_run_has_an_interval_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=1000)

    found = with_interval(run, figures(), step_s=10.0)

    assert found == run.model_copy(update={"checkpoint_every": 14})
    said = capsys.readouterr().err
    assert "checkpoints are saved every 14 steps" in said
    assert "0.323 failures an hour over 2.78 hours" in said  # 16,384 x 1.97e-5


def test_a_short_run_of_few_devices_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=300)

    found = with_interval(run, figures(7_000_000_000, 8), step_s=10.0)

    assert found.checkpoint_every is not None
    assert found.checkpoint_every > run.steps
    assert capsys.readouterr().err == ""


def test_few_devices_fail_so_rarely_that_the_end_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=500)

    with_interval(run, figures(7_000_000_000, 8), step_s=10.0)

    assert "saved after the last step only. One every" in (capsys.readouterr().err)
