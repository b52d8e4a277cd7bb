"""The command line of `calibrate`: a profile of constants that plans and predictions then use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.planner.calibration.fitting.test_runs import TRUTH, table


@pytest.mark.matrix
def test_a_profile_is_written_that_predict_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, profile = table(tmp_path / "runs.csv", TRUTH), tmp_path / "constants.yaml"
    asked = [
        "predict",
        "llama-3.1-8b",
        "--cluster",
        "8xa100-sxm-80gb",
        "--layout",
        "dp=8",
        "--json",
    ]

    assert main(["calibrate", str(runs), "-o", str(profile), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(asked) == 0
    before = json.loads(capsys.readouterr().out)
    assert main([*asked, "--profile", str(profile)]) == 0
    after = json.loads(capsys.readouterr().out)

    assert told["calibration"]["matmul"] == pytest.approx(0.55, rel=0.05)
    assert after["step_time_s"] > 1.2 * before["step_time_s"]
    assert any("runs.csv" in each["source"] for each in after["assumptions"])


def test_a_folder_that_no_launch_wrote_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(tmp_path)]) == 1
    assert "lacks plan.yaml" in capsys.readouterr().err
