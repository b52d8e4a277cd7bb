"""A launch of over an hour that is saved at all is saved on its way, and says how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.launches import with_interval
from runtime.run import LaunchRun

LARGE = {"parameters": 405_000_000_000, "devices": 16_384}


def test_a_run_of_over_an_hour_has_an_interval_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=1000)

    found = with_interval(run, step_s=10.0, **LARGE)

    assert found == run.model_copy(update={"checkpoint_every": 14})
    said = capsys.readouterr().err
    assert "checkpoints are saved every 14 steps" in said
    assert "1.97e-05 failures a device and hour, in 2.78 hours" in said


def test_a_short_run_is_saved_at_its_end_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=360)

    assert with_interval(run, step_s=10.0, **LARGE) is run
    assert capsys.readouterr().err == ""


def test_few_devices_fail_so_rarely_that_the_end_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = LaunchRun(checkpoint=Path("saved"), steps=500)

    with_interval(run, step_s=10.0, parameters=7_000_000_000, devices=8)

    assert "saved after the last step alone: the least is lost at one every" in (
        capsys.readouterr().err
    )
