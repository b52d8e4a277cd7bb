"""A launch on Slurm or Kubernetes: what is written starts the same launch on every node."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli
from meshwright.launch.schedulers import MOUNTED
from meshwright.runtime.run.authenticated_channel import job_secret
from meshwright.runtime.run.node_rank import node_rank_of

PLAN = ["plan", "gpt2", "--cluster", "2x4xa100-sxm-80gb", "--seq-len", "512"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    assert cli.main([*PLAN, "--global-batch", "32", "-o", str(file)]) == 0
    return file.read_text()


@pytest.fixture(autouse=True)
def folder(planned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(planned)
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
    assert "#SBATCH --signal=USR1@120" in script
    assert "--resume --or-start" in script
    assert manifest["Job"]["spec"]["backoffLimit"] == 2 * 3
    assert "--or-start" in manifest["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]


def test_a_job_that_hands_over_waits_for_its_turn_again_and_no_other_does(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the script itself, with a scheduler that only writes down what it is told."""
    script = written(capfd, "--on", "slurm", "--checkpoint", "saved")
    queued = tmp_path / "queued"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {queued}\n')
    # One node hands over before the other, which must not be ended for it.
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done; "$@"\n')
    launch = tmp_path / "launch"
    script = script.replace(sys.executable, str(launch))
    for name in ("scontrol", "srun", "launch"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)
    (Path("runs") / "gpt2").mkdir(parents=True)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for status in (0, 1, 137, 75):
        launch.write_text(f"#!/bin/sh\nkill -TERM $PPID\nexit {status}\n")
        done = subprocess.run(["bash", "-c", script], env=environment, check=False)
        assert done.returncode == (0 if status == 75 else status)
        assert queued.exists() == (status == 75)

    assert queued.read_text() == "requeue 7\n"


def test_pods_that_a_node_takes_with_it_are_no_failures(capfd: pytest.CaptureFixture[str]) -> None:
    job = pods(written(capfd, *POD, "--checkpoint", "/data/saved"))["Job"]["spec"]
    pod = job["template"]["spec"]
    evicted, handed_over = job["podFailurePolicy"]["rules"]

    assert evicted["action"] == handed_over["action"] == "Ignore"
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert handed_over["onExitCodes"]["values"] == [75]
    assert handed_over["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never"  # such rules need it
    assert pod["terminationGracePeriodSeconds"] == 120
    assert "podFailurePolicy" not in pods(written(capfd, *POD))["Job"]["spec"]


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
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
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


def test_pods_take_the_secret_of_their_job_from_an_object_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    manifest, again = pods(written(capfd, *POD)), pods(written(capfd, *POD))

    secret = manifest["Secret"]["stringData"]["secret"]
    assert job_secret({"MESHWRIGHT_SECRET": secret}) == secret.encode()
    assert secret != again["Secret"]["stringData"]["secret"]
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    told = {each["name"]: each for each in container["env"]}
    assert told["MESHWRIGHT_SECRET"]["valueFrom"] == {
        "secretKeyRef": {"name": manifest["Secret"]["metadata"]["name"], "key": "secret"}
    }
    for kind in ("Job", "Service", "ConfigMap"):
        assert secret not in str(manifest[kind])
    assert told["PYTHONSAFEPATH"]["value"] == "1"


SRUN = """#!/bin/sh
echo "$@"
echo "$MESHWRIGHT_SECRET" > secret-$$
"""


def test_a_batch_script_makes_a_secret_for_its_tasks_and_shows_it_nowhere(
    capfd: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(capfd, "--on", "slurm")
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("MESHWRIGHT_SECRET")

    runs = [
        subprocess.run(["bash", "-x"], input=script, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]

    first, second = (file.read_text().strip() for file in folder.glob("secret-*"))
    assert job_secret({"MESHWRIGHT_SECRET": first}) == first.encode()
    assert len(first) == len(second) == 64
    assert first != second
    for done in runs:
        assert "--export=ALL" in done.stdout
        assert first not in done.stdout + done.stderr
        assert second not in done.stdout + done.stderr


def test_a_job_with_a_secret_in_it_is_written_for_its_owner_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "kubectl").write_text("#!/bin/sh\necho created\n")
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    assert cli.main(["launch", "plan.yaml", *POD, "--output", "out"]) == 0

    assert Path("out", "job.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--on", "pbs"], "known: local, ray, slurm, kubernetes"),
        (["--on", "kubernetes"], "image=NAME is missing"),
        ([*POD, "--job", "partition=gpu"], "'partition' is not known"),
        ([*POD, "--job", "volume=claim"], "write CLAIM:/path"),
        ([*POD, "--job", "name=A job"], "lower-case letters"),
        (["--on", "slurm", "--job", "partition"], "write NAME=VALUE"),
        (["--on", "slurm", "--job", "x=1\n#SBATCH --uid=0"], "write NAME=VALUE"),
        (["--job", "partition=gpu"], "go with --on"),
        (["--or-start"], "needs resume"),
    ],
)
def test_what_cannot_be_a_job_is_refused(
    options: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("meshwright.runtime.launch.preflight.cuda_devices", lambda: 8)

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

    assert "sbatch is not on this machine" in refused(capfd, "--on", "slurm")
    assert not Path("runs").exists()


def job_of_script(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    capfd.readouterr()
    Path("train.py").write_text("print('trains')\n")
    words = ["run", "--plan", "plan.yaml", *options, "--dry-run", "train.py", "--lr", "1e-3"]
    assert cli.main(words) == 0
    return capfd.readouterr().out


def test_a_batch_script_runs_a_users_script_on_every_node(
    capfd: pytest.CaptureFixture[str],
) -> None:
    once = job_of_script(capfd, "--on", "slurm", "--job", "partition=gpu")
    again = job_of_script(capfd, "--on", "slurm", "--restarts", "2")

    command = shlex.split(once.splitlines()[-1])
    started = ["-m", "meshwright", "run", "--plan", "plan.yaml", "train.py", "--lr", "1e-3"]
    assert command[-len(started) :] == started
    assert "#SBATCH --nodes=2" in once
    assert "#SBATCH --requeue" not in once
    assert "--plan plan.yaml --restarts 2 train.py --lr 1e-3" in again
    assert "#SBATCH --requeue" in again


def test_a_pod_has_the_script_beside_the_plan(capfd: pytest.CaptureFixture[str]) -> None:
    manifest = pods(job_of_script(capfd, *POD, "--restarts", "1"))

    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    name = manifest["Job"]["metadata"]["name"]
    assert container["command"] == [
        *("meshwright", "run", "--plan", "plan.yaml", "--restarts", "1"),
        *("--output", f"/data/runs/{name}", "train.py", "--lr", "1e-3"),
    ]
    assert manifest["ConfigMap"]["data"]["train.py"] == "print('trains')\n"
    assert manifest["Job"]["spec"]["backoffLimit"] == 2 * 3


def test_a_script_that_is_not_there_is_refused_before_a_job_is_written(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run", "--on", "slurm", "none.py"]) == 1

    assert "none.py is no file" in capfd.readouterr().err


def test_a_job_set_starts_all_pods_again_and_counts_no_notice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = pods(written(capfd, *POD, "--job", "kind=jobset", "--checkpoint", "/data/saved"))
    spec = found["JobSet"]["spec"]
    (nodes,) = spec["replicatedJobs"]
    job = nodes["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}

    assert set(found) == {"Secret", "ConfigMap", "JobSet"}
    name = found["JobSet"]["metadata"]["name"]
    # As a JobSet names its pods: set, replicated job, its index, the pod's index.
    assert environment["MASTER_ADDR"] == f"{name}-{nodes['name']}-0-0.{name}"
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": name}
    assert (job["completionMode"], job["completions"], job["backoffLimit"]) == ("Indexed", 2, 0)
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert spec["failurePolicy"]["maxRestarts"] == 3
    capfd.readouterr()
    assert "known: job, jobset" in refused(capfd, *POD, "--job", "kind=pod")


def keys(data: object, at: str = "") -> set[str]:
    """Return the paths of all keys."""
    if isinstance(data, dict):
        return {f"{at}.{key}" for key in data}.union(
            *(keys(value, f"{at}.{key}") for key, value in data.items())
        )
    if isinstance(data, list):
        return set().union(*(keys(value, f"{at}[]") for value in data))
    return set()


@pytest.mark.matrix
def test_a_job_set_is_one_by_its_published_schema(capfd: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = pods(written(capfd, *POD, "--job", "kind=jobset", "--checkpoint", "/data/saved"))
    spec = found["JobSet"]["spec"]

    read = models.JobsetV1alpha2JobSetSpec.from_dict(spec)

    # What it does not know it drops.
    assert keys(read.to_dict()) == keys(spec)
