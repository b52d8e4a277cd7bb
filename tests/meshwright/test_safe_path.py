"""A module that lies where a command or a job is started is never imported by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import cli
from meshwright.runtime.launch.preflight import rank_environment
from tests.limits import PATIENCE_S

PLAN = ["plan", "gpt2", "--cluster", "2x4xa100-sxm-80gb", "--seq-len", "512", "--global-batch", "8"]
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
PLANTED = ("json", "torch", "numpy", "yaml", "multiprocessing", "socket")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan for eight devices, and with modules that note that they ran."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*PLAN, "-o", "plan.yaml"]) == 0
    for name in PLANTED:
        ran = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n"
        (tmp_path / f"{name}.py").write_text(f"{ran}raise ImportError\n")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def ran(folder: Path) -> str:
    file = folder / "ran"
    return file.read_text() if file.exists() else ""


@pytest.mark.matrix
def test_a_slurm_job_imports_nothing_of_its_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "plan.yaml", "--on", "slurm", "--dry-run"]) == 0
    script = capfd.readouterr().out
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(SRUN)
    (folder / "bin" / "srun").chmod(0o755)
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}

    done = subprocess.run(
        ["bash"],
        input=script,
        env={**outside, "PATH": f"{folder / 'bin'}:{outside['PATH']}", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert ran(folder) == "", done.stderr
    assert "meshwright: " in done.stderr  # it came as far as the devices that are not here
    assert "Traceback" not in done.stderr


def test_what_a_command_starts_imports_nothing_of_the_folder(folder: Path) -> None:
    command = [sys.executable, "-P", "-c", "from meshwright.cli import main; main()"]
    plan = ["plan", "demo-4m", "--cluster", "local:2", "--seq-len", "64", "--global-batch", "4"]

    done = subprocess.run(
        [*command, *plan, "-o", "local.yaml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert ran(folder) == "", done.stderr
    assert (folder / "local.yaml").exists(), done.stderr


def test_ranks_search_neither_their_folder_nor_empty_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}/libraries{os.pathsep}")

    told = rank_environment(0, ranks=1, port=1)

    assert told["PYTHONSAFEPATH"] == "1"
    assert "" not in told["PYTHONPATH"].split(os.pathsep)
    assert "/libraries" in told["PYTHONPATH"].split(os.pathsep)
