"""The command line decides, then variables, then the user's file; what was taken is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import cli
from meshwright.api.defaults import CommandDefaults

ASKED = ["plan", "gpt2", "--seq-len", "1024", "--global-batch", "8"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of defaults, in a home of its own; `MESHWRIGHT_DEFAULTS` is not set."""
    monkeypatch.delenv("MESHWRIGHT_DEFAULTS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "config" / "meshwright").mkdir(parents=True)
    return tmp_path / "config" / "meshwright" / "defaults.yaml"


def test_the_file_says_what_the_command_line_does_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("cluster: 2xa100-sxm-80gb\nframework: fsdp\nprecision: fp32\n")

    assert cli.main(ASKED) == 0
    told = capsys.readouterr().out
    assert cli.main([*ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)

    assert "gpt2 on 2xa100-sxm-80gb: 8 samples of 1,024 tokens a step, fp32" in told
    assert f"--cluster 2xa100-sxm-80gb ({file})" in told and f"--framework fsdp ({file})" in told
    assert answer["plan"]["framework"] == "fsdp" and answer["plan"]["precision"] == "fp32"


def test_a_variable_goes_before_the_file_and_an_option_before_both(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("cluster: 2xa100-sxm-80gb\n")
    monkeypatch.setenv("MESHWRIGHT_CLUSTER", "1xa100-sxm-80gb")

    assert cli.main(ASKED) == 0
    by_variable = capsys.readouterr().out
    assert cli.main([*ASKED, "--cluster", "4xv100-sxm-32gb"]) == 0
    by_option = capsys.readouterr().out

    assert "gpt2 on 1xa100-sxm-80gb:" in by_variable
    assert "--cluster 1xa100-sxm-80gb (MESHWRIGHT_CLUSTER)" in by_variable
    assert "gpt2 on 4xv100-sxm-32gb:" in by_option and "defaults" not in by_option


def test_sequence_and_batch_that_nobody_gave_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["predict", "gpt2", "--cluster", "2xa100-sxm-80gb", "--layout", "pp=2"]

    assert cli.main(asked) == 0

    told = capsys.readouterr().out
    assert "4,096 samples of 1,024 tokens a step" in told
    assert "defaults  --seq-len 1024 --global-batch 4096 (not given)" in told


def test_a_short_name_of_an_accelerator_is_said_in_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = ["predict", "gpt2", "--cluster", "2x1xa100,network=25GB/s", "--layout", "pp=2"]

    assert cli.main(named) == 0

    assert ", a100 is a100-sxm-80gb" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seq-len", "32k"], "'32k' is not a whole number; write all digits, as in 32768"),
        (["--global-batch", "1.5"], "'1.5' is not a whole number"),
        (["--fit-probability", "high"], "'high' is not a number; write it as in 0.5"),
    ],
)
def test_a_value_that_is_no_number_is_said_with_the_way_out(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*ASKED, *words]) == 2

    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.matrix
def test_a_plan_keeps_its_own_cluster_and_framework(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = str(tmp_path / "plan.yaml")
    assert cli.main([*ASKED, "--cluster", "2xv100-sxm-32gb", "-o", plan]) == 0
    capsys.readouterr()
    file.write_text("cluster: 8xh100-sxm-80gb\nframework: megatron\nprecision: bf16\n")

    assert cli.main(["predict", plan]) == 0

    told = capsys.readouterr().out
    assert "gpt2 on 2xv100-sxm-32gb:" in told and "defaults" not in told


def test_no_cluster_anywhere_is_told_with_every_way_to_name_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(ASKED) == 1

    told = capsys.readouterr().err
    assert all(way in told for way in ("--cluster", "MESHWRIGHT_CLUSTER", "defaults.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clutser: local\n", "clutser: unknown key; did you mean 'cluster'?"),
        ("precision: bf61\n", 'precision is "bf61"'),
        ("cluster: !!python/object/apply:os.system [true]\n", "python/object"),
        ("- cluster\n", "a file of defaults is a mapping"),
        ('cluster: "a\\nb"\n', "write one line of printable characters"),
        ("format: 2\n", "format is 2"),
    ],
)
def test_what_the_file_may_not_say_is_refused_with_its_name(
    text: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)

    assert cli.main(ASKED) == 1

    told = capsys.readouterr().err
    assert (
        told.startswith((f"meshwright: {file}: ", f"meshwright: {file} is [")) and message in told
    )


def test_a_variable_that_is_no_precision_is_refused_by_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_PRECISION", "fp17")

    assert cli.main([*ASKED, "--cluster", "1xa100-sxm-80gb"]) == 1

    assert "MESHWRIGHT_PRECISION is 'fp17'; did you mean" in capsys.readouterr().err


def test_a_file_that_is_named_must_be_there_and_an_empty_name_is_none(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")

    with pytest.raises(Exception, match=r"missing\.yaml"):
        CommandDefaults({"MESHWRIGHT_DEFAULTS": missing}).value_of("cluster", None)
    assert CommandDefaults({"MESHWRIGHT_DEFAULTS": ""}).value_of("cluster", None) is None
    assert CommandDefaults({"HOME": "/nowhere"}).value_of("cluster", "local") == "local"


def test_a_cluster_file_may_lie_by_the_file_of_defaults(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("")
    (tmp_path / "defaults.yaml").write_text("cluster: ours.yaml\n")
    mine = CommandDefaults({"MESHWRIGHT_DEFAULTS": str(tmp_path / "defaults.yaml")})

    assert mine.value_of("cluster", None) == str(tmp_path / "ours.yaml")


def test_prices_and_framework_of_a_study_are_its_own(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file.write_text("framework: deepspeed\nprices: nowhere.yaml\n")
    flags = ["--model", "gpt2", "--clusters", "1xa10g", "--tokens", "1e8"]

    assert cli.main(["whatif", *flags]) == 1
    assert "nowhere.yaml" in capsys.readouterr().err

    file.write_text("framework: deepspeed\n")
    study = str(tmp_path / "study.yaml")
    assert cli.main(["whatif", *flags, "--write", study, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"][0]["framework"] == "deepspeed"
    file.write_text("framework: nonsense\n")
    assert cli.main(["whatif", study]) == 0
