"""`plan --framework`: a plan of that framework, which show, predict, export and whatif take."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan

ASKED = ["plan", "llama-3.1-8b", "--cluster", "8xh100-sxm-80gb", "--global-batch", "64"]


def test_a_plan_is_written_shown_predicted_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, job = tmp_path / "plan.yaml", tmp_path / "job.py"

    assert main([*ASKED, "--framework", "torchtitan", "--json", "-o", str(output)]) == 0
    answer = json.loads(capsys.readouterr().out)
    plan = document.read(Plan, output)
    assert main(["predict", str(output), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert main(["show", str(output)]) == 0
    assert main(["export", str(output), "-o", str(job)]) == 0

    assert plan.framework == answer["plan"]["framework"] == "torchtitan"
    assert answer["certificate"]["gap"] < 0.01
    assert predicted["step_time_s"] == answer["step_time_s"]
    assert f"data_parallel_shard_degree = {plan.mesh.data_shard}\n" in job.read_text()
    assert "torchtitan reads it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.matrix
def test_text_says_how_the_configuration_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.yaml"

    assert main([*ASKED, "--framework", "megatron-lm", "-o", str(output)]) == 0

    told = " ".join(capsys.readouterr().out.split())
    assert f"next meshwright export {output}" in told
    assert document.read(Plan, output).framework == "megatron"


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--framework", "megatrom"], "did you mean 'megatron'"),
        (["--framework", "litgpt"], "framework is litgpt, whose runs are priced"),
        (
            ["--framework", "megatron", "--fix", "schedule=zbv"],
            "schedule=zbv: megatron has 1f1b or",
        ),
        (["--framework", "fsdp", "--fix", "tp=2"], "tp=2: fsdp has no such axis"),
        (["--framework", "torchtitan", "--fix", "zero=1"], "zero=1: torchtitan has 0 or 2 or 3"),
        (["--framework", "nanotron", "--fix", "v=2"], "v=2: nanotron has at most 1 stages"),
        (["--framework", "torchtitan", "--lora", "rank=8"], "adapters are not planned for it"),
    ],
)
def test_what_a_framework_does_not_have_is_told(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *options]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_other_models_and_mixed_clusters_are_natives_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mixed = "8xh100-sxm-80gb+8xa100-sxm-80gb"
    for model, cluster, message in (
        ("vit-l-16", "8xh100-sxm-80gb", "megatron trains language models"),
        ("llama-3.1-8b", mixed, "megatron takes one kind"),
    ):
        assert main(["plan", model, "--cluster", cluster, "--framework", "megatron"]) == 1
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_native_plan_is_exported_to_a_framework_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.yaml"
    assert main([*ASKED, "--fix", "zero=3,pp=1,tp=1,recompute=none", "-o", str(output)]) == 0

    assert main(["export", str(output)]) == 1
    assert "a native plan is launched" in " ".join(capsys.readouterr().err.split())
    assert main(["export", str(output), "--to", "fsdp"]) == 0
    assert "fully_shard" in capsys.readouterr().out


def test_studies_compare_plans_of_a_framework(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["whatif", "--model", "llama-3.1-8b", "--clusters", "8xh100-sxm-80gb", "--json"]

    assert main([*asked, "--framework", "megatron"]) == 0
    theirs = json.loads(capsys.readouterr().out)

    plans = [one["plan"] for one in theirs["outcomes"]]
    assert {plan["framework"] for plan in plans} == {"megatron"}
