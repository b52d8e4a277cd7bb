"""A launch on Slurm or Kubernetes: what is written starts the same launch on every node."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli
from meshwright.jobs import MOUNTED
from runtime.nodes import node_rank_of

PLAN = ["plan", "gpt2", "--cluster", "2x4xa100-sxm-80gb", "--seq-len", "512"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*PLAN, "--global-batch", "32", "-o", "plan.yaml"]) == 0
    return tmp_path


def written(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    capfd.readouterr()
    assert cli.main(["launch", "plan.yaml", "--dry-run", *options]) == 0
    return capfd.readouterr().out


def refused(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    capfd.readouterr()
    assert cli.main(["launch", "plan.yaml", *options]) == 1
    return capfd.readouterr().err


def test_a_batch_script_asks_for_the_plans_nodes_and_starts_one_launch_on_each(
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["--steps", "7", "--data", "my text", "--training", "clip_norm=2", "--tensorboard"]

    script = written(capfd, "--on", "slurm", "--job", "partition=gpu", *options)

    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    )
    assert asked["nodes"] == "2"
    assert asked["gpus-per-node"] == "4"
    assert asked["ntasks-per-node"] == "1"
    assert asked["partition"] == "gpu"
    assert "requeue" not in asked
    command = shlex.split(script.splitlines()[-1])
    launch = command.index("launch")
    assert command[launch + 1] == "plan.yaml"
    given = command[launch + 2 :]
    assert given[given.index("--data") + 1] == "my text"
    assert given[given.index("--training") + 1] == "clip_norm=2"
    assert "--tensorboard" in given
    assert "--resume" not in given


def test_a_job_with_checkpoints_goes_on_when_it_is_started_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = written(capfd, "--on", "slurm", "--checkpoint", "saved")
    manifest = pods(written(capfd, *POD, "--checkpoint", "/data/saved"))

    assert "#SBATCH --requeue" in script
    assert "--resume --or-start" in script
    assert manifest["Job"]["spec"]["backoffLimit"] == 2 * 3
    assert "--or-start" in manifest["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]


POD = ["--on", "kubernetes", "--job", "image=registry/meshwright:1", "--job", "volume=claim:/data"]


def pods(text: str) -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def test_a_manifests_pods_find_each_other_and_the_plan(capfd: pytest.CaptureFixture[str]) -> None:
    manifest = pods(written(capfd, *POD))

    job, service = manifest["Job"]["spec"], manifest["Service"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    name = manifest["Job"]["metadata"]["name"]
    assert job["completions"] == job["parallelism"] == 2
    assert job["backoffLimit"] == 0
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert job["template"]["metadata"]["labels"] == service["selector"] == {"job-name": name}
    environment = {each["name"]: each["value"] for each in container["env"]}
    found = node_rank_of(environment | {"JOB_COMPLETION_INDEX": "1"})
    assert (found.node, found.nodes) == (1, 2)
    assert found.host == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == manifest["Service"]["metadata"]["name"]
    assert manifest["ConfigMap"]["data"]["plan.yaml"] == Path("plan.yaml").read_text()
    where = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert where["plan"] == container["workingDir"] == MOUNTED
    assert where["data"] == "/data"
    command = container["command"]
    assert command[command.index("--output") + 1].startswith("/data/")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--on", "pbs"], "known: local, slurm, kubernetes"),
        (["--on", "kubernetes"], "image=NAME is missing"),
        ([*POD, "--job", "partition=gpu"], "'partition' is not known"),
        ([*POD, "--job", "volume=claim"], "write CLAIM:/path"),
        ([*POD, "--job", "name=A job"], "small letters"),
        (["--on", "slurm", "--job", "partition"], "write NAME=VALUE"),
        (["--on", "slurm", "--job", "x=1\n#SBATCH --uid=0"], "write NAME=VALUE"),
        (["--job", "partition=gpu"], "go with --on"),
        (["--or-start"], "goes with `resume`"),
    ],
)
def test_what_cannot_be_a_job_is_refused(
    options: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("runtime.preflight.cuda_devices", lambda: 8)

    assert says in refused(capfd, *options)


def test_a_job_is_submitted_by_the_schedulers_own_command(
    capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = folder / "sbatch"
    sbatch.write_text('#!/bin/sh\ngrep -q nodes=2 "$1" && echo "Submitted batch job 7"\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    assert cli.main(["launch", "plan.yaml", "--on", "slurm", "--output", "out"]) == 0

    assert "Submitted batch job 7" in capfd.readouterr().out
    assert "nodes=2" in Path("out", "job.sbatch").read_text()


def test_a_scheduler_that_is_not_here_is_said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")

    assert "sbatch: is not on this machine" in refused(capfd, "--on", "slurm")
    assert not Path("runs").exists()
