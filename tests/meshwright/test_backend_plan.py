"""`plan --backend`: one JSON object, and a file of the framework's flags."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main

ASKED = ["plan", "llama-3.1-8b", "--cluster", "8xh100-sxm-80gb", "--global-batch", "64"]


def test_flags_are_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "titan.toml"

    assert main([*ASKED, "--backend", "torchtitan", "--json", "-o", str(output)]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert output.read_text().splitlines() == answer["plan"]["flags"]
    assert answer["certificate"]["configurations"] > 10
    assert answer["step_time_low_s"] < answer["step_time_s"] < answer["step_time_high_s"]


def test_text_names_flags_and_ties(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--backend", "megatron"]) == 0

    told = capsys.readouterr().out
    assert "--micro-batch-size" in told
    assert "within the error bar" in told


def test_a_backend_without_a_space_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--backend", "megatrom"]) == 1
    assert "megatron" in capsys.readouterr().err
