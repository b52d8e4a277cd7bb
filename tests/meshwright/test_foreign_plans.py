"""A plan names the framework that trains it and prices it; our runtime leaves it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.api import commands
from meshwright.cli import main
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan

PLAN = Path(__file__).parents[2] / "plans" / "llama-3.1-8b-on-8xh100" / "plan.yaml"


def plan_of(framework: str, folder: Path) -> str:
    path = folder / f"{framework}.yaml"
    wanted = document.read(Plan, PLAN)
    document.write(wanted.model_copy(update={"framework": framework}), path)
    return str(path)


def test_a_plan_is_priced_by_its_own_framework(tmp_path: Path) -> None:
    ours = commands.predict(str(PLAN))
    theirs = commands.predict(plan_of("megatron", tmp_path))

    assert theirs.layout == ours.layout
    assert theirs.step_time_s != ours.step_time_s
    assert commands.show(plan_of("native", tmp_path)).prediction == ours


@pytest.mark.parametrize("options", [[], ["--on", "slurm"]])
def test_a_plan_for_another_framework_is_not_launched(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", plan_of("torchtitan", tmp_path), *options, "--dry-run"]) == 1

    said = " ".join(capsys.readouterr().err.split())
    assert "framework is torchtitan" in said
    assert "meshwright export" in said


@pytest.mark.parametrize("command", ["predict", "show", "launch"])
def test_a_plan_for_a_framework_that_nobody_knows_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, plan_of("megatrom", tmp_path)]) == 1

    assert "framework is 'megatrom'; did you mean 'megatron'" in " ".join(
        capsys.readouterr().err.split()
    )
