"""Jobs of exported plans start each framework's own command on every node of the plan.

The scripts are run by bash, with a scheduler and programs that only note how they are started.
What torchrun is given is read by torch's own parser; manifests and tasks are read by the published
models of Kubeflow Trainer and by SkyPilot, where these are installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import cli
from meshwright.api import commands
from meshwright.planner.documents import document
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import FRAMEWORKS
from tests.meshwright.launch.test_schedulers import keys

PROGRAMS = ("torchrun", "accelerate", "tune", "llamafactory-cli")
NOTE = """#!{python}
import json, os, sys
names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "FORCE_TORCHRUN",
         "NPROC_PER_NODE", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF")
known = {{name: os.environ[name] for name in names if name in os.environ}}
with open({file!r}, "a") as file:
    print(json.dumps([sys.argv[1:], known, os.path.basename(sys.argv[0])]), file=file)
"""
SCONTROL = """#!/bin/bash
if [ "$2" = hostnames ]; then echo n03; echo n04; else echo "NodeName=$3 NodeAddr=10.0.0.3 x=1"; fi
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return plans of two nodes, by their framework."""
    folder = tmp_path_factory.mktemp("plans")
    asked = {
        "torchtitan": ["qwen3-0.6b", "--framework", "torchtitan", "--fix", "pp=1,zero=3"],
        "megatron": ["gpt2", "--framework", "megatron", "--fix", "tp=2,pp=2,recompute=none"],
        "transformers": ["gpt2", "--framework", "transformers", "--fix", "zero=3"],
    }
    texts = {}
    for name, words in asked.items():
        file = str(folder / f"{name}.yaml")
        cluster = ["--cluster", "2x4xh100-sxm-80gb", "--seq-len", "512", "--global-batch", "64"]
        assert cli.main(["plan", *words, *cluster, "-o", file]) == 0
        texts[name] = Path(file).read_text()
    return texts


@pytest.fixture(autouse=True)
def folder(plans: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in plans.items():
        Path(f"{name}.yaml").write_text(text)
    return tmp_path


def exported(
    plan: str, job: str, *settings: str, output: str = "a.yaml", to: str | None = None
) -> str:
    """Return the text of the job of an exported plan."""
    written = commands.export(plan, to=to, output=output, job=job, settings=settings)
    assert isinstance(written, commands.FrameworkConfiguration) and written.job is not None
    assert Path(written.job.file).read_text() == written.job.text
    assert Path(output).read_text() == written.text
    return written.job.text


def started(script: str, **environment: str) -> list[Any]:
    """Return arguments, variables and name of every program that a script starts."""
    folder, notes = Path("bin"), Path("started.jsonl").absolute()
    folder.mkdir(exist_ok=True)
    notes.write_text("")
    texts = dict.fromkeys(PROGRAMS, NOTE.format(python="/usr/bin/env python3", file=str(notes)))
    for name, text in {**texts, "scontrol": SCONTROL, "srun": SRUN}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    plain = {
        "PATH": f"{folder.absolute()}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[03-04]",
        "SLURM_JOB_ID": "1007",
        "SLURM_NNODES": "2",
    }
    done = subprocess.run(
        ["bash", "-c", script], env={**plain, **environment}, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in notes.read_text().splitlines()]


def torchruns(started: list[Any]) -> Iterator[Any]:
    """Yield the arguments of torchrun, as torch reads them."""
    run = pytest.importorskip("torch.distributed.run")
    for arguments, _, name in started:
        assert name == "torchrun"
        yield run.get_args_parser().parse_args(arguments)


def test_a_batch_script_starts_torchtitan_by_the_configuration_on_each_node() -> None:
    script = exported("torchtitan.yaml", "slurm", "partition=gpu", output="out/plan.py")

    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    )
    assert options["nodes"] == "2" and options["gpus-per-node"] == "4"
    assert options["ntasks-per-node"] == "1" and options["partition"] == "gpu"
    runs = started(script)
    for rank, asked in enumerate(torchruns(runs)):
        assert (asked.nnodes, asked.nproc_per_node, asked.node_rank) == ("2", "4", rank)
        assert (asked.master_addr, asked.master_port) == ("10.0.0.3", 29407)
        assert asked.module and asked.training_script == "torchtitan.train"
        assert asked.training_script_args == ["--module", "plan", "--config", "qwen3_0_6b"]
    assert len(runs) == 2
    assert runs[0][1]["PYTHONPATH"] == str(Path("out").absolute())


@pytest.fixture(autouse=True)
def out(folder: Path) -> None:
    (folder / "out").mkdir()


def test_megatrons_flags_reach_it_as_they_stand_in_the_file() -> None:
    """The layout of a pipeline has letters that a shell would take for its own."""
    script = exported("megatron.yaml", "slurm", "arguments=--data-path 'my data'", output="a.args")
    flags = Path("a.args").read_text()
    Path("a.args").write_text(f"# a comment\n{flags}--pipeline-model-parallel-layout 'Et*2|t*3L'\n")
    runs = started(script)

    (asked, _) = torchruns(runs)

    given = asked.training_script_args
    assert asked.training_script == "pretrain_gpt.py"
    assert given[-2:] == ["--data-path", "my data"]
    assert given[given.index("--pipeline-model-parallel-layout") + 1] == "Et*2|t*3L"
    assert given[given.index("--tensor-model-parallel-size") + 1] == "2"
    assert "comment" not in " ".join(given)
    assert runs[0][1]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


STARTS = {
    "trl": ["-m", "trl.scripts.sft", "--config", "FILE"],
    "axolotl": ["-m", "axolotl.cli.train", "FILE"],
    "llama-factory": ["train", "FILE"],
    "transformers": ["my train.py", "FILE"],
    "deepspeed": ["my train.py", "--deepspeed", "--deepspeed_config", "FILE"],
    "accelerate": ["my train.py"],
    "torchtune": ["full_finetune_distributed", "--config", "FILE"],
    "fsdp": ["my train.py"],
}


@pytest.mark.parametrize("to", STARTS)
def test_each_program_has_its_own_command(to: str) -> None:
    own = to in ("transformers", "deepspeed", "accelerate", "fsdp")
    settings = ["script=my train.py"] if own else []
    script = exported("transformers.yaml", "slurm", *settings, "arguments=--more 1", to=to)
    file = str(Path("a.yaml").absolute())

    for rank, (arguments, known, name) in enumerate(started(script)):
        *mine, more, one = arguments
        assert (more, one) == ("--more", "1")
        expected = [file if word == "FILE" else word for word in STARTS[to]]
        assert mine[-len(expected) :] == expected
        if to == "accelerate":
            options = dict(zip(mine[1:-1:2], mine[2:-1:2], strict=True))
            assert options["--machine_rank"] == str(rank)
            assert options["--main_process_ip"] == "10.0.0.3"
            assert options["--config_file"] == file
        elif to == "llama-factory":  # which starts torchrun by these
            assert known["FORCE_TORCHRUN"] == "1" and known["NPROC_PER_NODE"] == "4"
            assert known["NODE_RANK"] == str(rank) and known["NNODES"] == "2"
        else:
            assert name == ("tune" if to == "torchtune" else "torchrun")
            assert mine[mine.index("--node-rank") + 1] == str(rank)


def train_job(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    configured, job = yaml.safe_load_all(text)
    assert (configured["kind"], job["kind"]) == ("ConfigMap", "TrainJob")
    return configured, job


def test_a_train_job_writes_the_configuration_and_starts_it(
    monkeypatch: Any, tmp_path: Path
) -> None:
    pod = "meshwright.planner.framework_configs.exported_jobs.POD_FOLDER"
    monkeypatch.setattr(pod, str(tmp_path / "a pod"))
    text = exported(
        "torchtitan.yaml", "kubernetes", "image=my/titan:1", "namespace=team", output="plan.py"
    )
    configured, job = train_job(text)
    trainer = job["spec"]["trainer"]

    assert trainer["numNodes"] == 2 and trainer["numProcPerNode"] == 4
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert job["metadata"] == configured["metadata"] and job["metadata"]["namespace"] == "team"
    (variable,) = trainer["env"]
    key = variable["valueFrom"]["configMapKeyRef"]
    assert key["name"] == configured["metadata"]["name"]
    shell, option, script = trainer["command"]
    assert (shell, option) == ("bash", "-c")
    assert "$" not in script.replace("$$", "")
    script = script.replace("$$", "$")  # which Kubernetes does
    pods = {
        variable["name"]: configured["data"][key["key"]],
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-0",
        "PET_MASTER_PORT": "29500",
    }
    (asked,) = torchruns(started(script, **pods))
    assert (asked.node_rank, asked.master_addr, asked.master_port) == (1, "job-0", 29500)
    assert (tmp_path / "a pod" / "plan.py").read_text() == Path("plan.py").read_text()


def test_a_task_of_skypilot_asks_for_the_plans_accelerators() -> None:
    text = exported("torchtitan.yaml", "skypilot", "infra=aws", "use_spot=true", output="plan.py")
    task = yaml.safe_load(text)

    # sky/utils/schemas.py of SkyPilot 0.14: fields of a task and of its resources.
    assert task.keys() <= {"name", "num_nodes", "resources", "workdir", "file_mounts", "run"}
    assert task["resources"] == {"accelerators": "H100:4", "infra": "aws", "use_spot": True}
    assert task["num_nodes"] == 2
    ((there, here),) = task["file_mounts"].items()
    assert here == "plan.py" and there.endswith("/plan.py")
    machine = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.1.0.1\n10.1.0.2",
    }
    (asked,) = torchruns(started(task["run"], **machine))
    assert (asked.nnodes, asked.node_rank, asked.master_addr) == ("2", 1, "10.1.0.1")


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_a_batch_script_is_read_back_as_the_plan(name: str) -> None:
    output = "plan.py" if name == "torchtitan" else "plan.args"
    exported(f"{name}.yaml", "slurm", output=output)
    before = document.read(Plan, f"{name}.yaml")

    found = commands.import_plan(
        "plan.sbatch", of="slurm", cluster=before.cluster, model=before.model.source
    )

    assert found.plan.not_understood == ()
    assert found.plan.layout == before.layout
    assert (found.plan.mesh, found.plan.seq_len) == (before.mesh, before.seq_len)
    assert found.plan.stages == before.stages


@pytest.mark.parametrize(
    ("plan", "job", "settings", "output", "reason"),
    [
        ("torchtitan", "slrm", (), "plan.py", "did you mean 'slurm'"),
        ("torchtitan", "kubernetes", (), "plan.py", "image=NAME is missing"),
        ("torchtitan", "kubernetes", ("image=a", "partition=b"), "plan.py", "'partition' is no"),
        ("torchtitan", "kubernetes", ("image=a", "name=A_b"), "plan.py", "lower-case letters"),
        ("torchtitan", "skypilot", ("partition=b",), "plan.py", "'partition' is no setting"),
        ("torchtitan", "slurm", ("partition",), "plan.py", "write NAME=VALUE"),
        ("torchtitan", "slurm", (), "plan.txt", "call it plan.py"),
        ("torchtitan", "slurm", (), "qwen3.py", "hides a module"),
        ("torchtitan", "slurm", (), "random.py", "hides a module"),
        ("torchtitan", "slurm", ("arguments=a 'b",), "plan.py", "no line of bash|not a line"),
        ("torchtitan", "slurm", ("command=x", "script=y"), "plan.py", "leave one of them out"),
        ("transformers", "slurm", (), "a.yaml", "name it with --set script=train.py"),
        ("transformers", "slurm", ("script=a.py",), "a.sbatch", "the name of its job"),
        ("torchtitan", "slurm", (), None, "name it with -o"),
        ("torchtitan", "slurm", ("script=a.py",), "plan.py", "leave script= out"),
    ],
)
def test_a_job_that_cannot_be_written_is_refused_before_anything_is(
    plan: str, job: str, settings: tuple[str, ...], output: str | None, reason: str
) -> None:
    to = "transformers" if plan == "transformers" else None
    with pytest.raises(DocumentError, match=reason):
        commands.export(f"{plan}.yaml", to=to, output=output, job=job, settings=settings)
    assert output is None or not Path(output).exists()


def test_settings_without_a_job_and_jobs_of_checkpoints_are_refused() -> None:
    with pytest.raises(DocumentError, match="add --job"):
        commands.export("torchtitan.yaml", settings=("a=b",))
    with pytest.raises(DocumentError, match="starts an exported plan"):
        commands.export("checkpoints", job="slurm", output="a")


def test_a_command_of_the_users_own_starts_what_is_not_known() -> None:
    own = "command=python my.py {config} $NODE_RANK"
    script = exported("torchtitan.yaml", "slurm", own, output="plan.py")
    assert f"  python my.py {Path('plan.py').absolute()} $NODE_RANK\n" in script


def test_every_framework_that_is_exported_has_a_start() -> None:
    from meshwright.planner.framework_configs.start_commands import _COMMANDS

    assert _COMMANDS.keys() == FRAMEWORKS.keys()


@pytest.mark.matrix
def test_manifest_and_task_are_such_by_their_publishers_own_readers() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, job = train_job(exported("torchtitan.yaml", "kubernetes", "image=a", output="plan.py"))

    # What it does not know it drops.
    assert keys(models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()) == keys(job)


@pytest.mark.matrix
def test_a_task_is_one_of_skypilot() -> None:
    sky = pytest.importorskip("sky")
    exported("torchtitan.yaml", "skypilot", "use_spot=true", output="plan.py")

    task = sky.Task.from_yaml("plan.sky.yaml")

    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 4} and resources.use_spot
