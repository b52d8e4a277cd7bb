"""Jobs that start an exported configuration on a plan's nodes: sbatch, Kubeflow TrainJob, SkyPilot.

A job is text; nothing is submitted.  On each node it sets NNODES, NODE_RANK, MASTER_ADDR and
MASTER_PORT from its scheduler's own variables, then runs the framework's start command
(`start_commands`).  The Slurm script and the SkyPilot task read the configuration's file, a
TrainJob has it as a ConfigMap.  Sources: sbatch(1) and srun(1) of Slurm 22.05; the API of Kubeflow
Trainer 2.3 (trainer.kubeflow.org/v1alpha1); SkyPilot 0.14, sky/utils/schemas.py.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.catalog.imports import SKYPILOT_NAMES
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import nearest
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.exportable_plan import FrameworkPlan
from meshwright.planner.framework_configs.job_files import (
    RESOURCES,
    BlockTexts,
    job_name,
    job_settings,
    pod_name,
    refuse_lines,
    sbatch_lines,
)
from meshwright.planner.framework_configs.start_commands import Start, start_lines

ENDINGS = {"slurm": ".sbatch", "kubernetes": ".k8s.yaml", "skypilot": ".sky.yaml"}
"""Ends of a job's file name, by the kind of job."""
SUBMITTED_BY = {"slurm": "sbatch", "kubernetes": "kubectl apply -f", "skypilot": "sky launch"}
"""Commands that submit a job's file."""
PORT = 29400
"""Port of rank 0's node where ranks meet; of Slurm's jobs one of a thousand from here on."""
POD_FOLDER = "/tmp/meshwright"
"""Folder of the configuration in a pod, and on a machine of SkyPilot's."""
RUNTIME = "torch-distributed"
"""Training runtime that Kubeflow Trainer installs for torch."""
_COMMON = ("script", "arguments", "command", "setup", "name")
_OF_TRAIN_JOBS = ("image", "namespace", "runtime")
_OF_SKYPILOT = (
    *("accelerators", "infra", "image_id", "instance_type", "use_spot", "disk_size"),
    *("cpus", "memory", "workdir"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedJob:
    """A job that starts an exported configuration."""

    kind: str
    text: str
    file: str
    """Path that the job is written to."""

    @property
    def submitted_by(self) -> str:
        """The command that submits it."""
        return f"{SUBMITTED_BY[self.kind]} {shlex.quote(self.file)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnwrittenJob:
    """A job before it is written for one scheduler."""

    wanted: FrameworkPlan
    cluster: ClusterSpec
    to: str
    file: Path
    text: str
    """The configuration."""
    environment: Mapping[str, str]
    settings: Mapping[str, str]
    nodes: int
    devices: int
    """Number of ranks, and of devices, of each node."""

    @property
    def kind_of_device(self) -> str:
        """The kind of accelerator: cuda, rocm, cpu."""
        return self.cluster.groups[0].accelerator.kind

    @property
    def name(self) -> str:
        """The job's name."""
        return self.settings.get("name", job_name(self.wanted.plan))

    def body(self, file: str, variables: Sequence[str]) -> list[str]:
        """Return the lines of bash of one node, which begin by its scheduler's variables."""
        exports = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        setup = self.settings.get("setup")
        try:
            arguments = tuple(shlex.split(self.settings.get("arguments", "")))
        except ValueError as error:
            raise DocumentError("job", f"arguments= is not a line of bash: {error}") from error
        start = Start(
            wanted=self.wanted,
            to=self.to,
            file=file,
            devices=self.devices,
            script=self.settings.get("script"),
            arguments=arguments,
            command=self.settings.get("command"),
        )
        return [
            *(f"export {line}" for line in (*variables, *exports)),
            *([setup] if setup else []),
            *start_lines(start),
        ]


def exported_job(
    wanted: FrameworkPlan,
    cluster: ClusterSpec,
    kind: str,
    *,
    to: str,
    file: str,
    text: str,
    environment: Mapping[str, str],
    settings: Sequence[str],
) -> ExportedJob:
    """Return the job that starts a configuration, which is `text` in `file`, on a plan's nodes.

    `settings` are NAME=VALUE: `script`, `arguments`, `command`, `setup`, `name`, and those of the
    scheduler.  Raises DocumentError where the job cannot be written.
    """
    if kind not in ENDINGS:
        raise DocumentError("job", f"is '{kind:.40}'; {nearest(kind, list(ENDINGS))}")
    counts = wanted.ranks_of_nodes
    if len(set(counts)) > 1:
        raise DocumentError(
            "job",
            f"{wanted.plan.mesh.devices} ranks fill nodes of {counts[0]} devices unevenly; plan "
            "for a number of devices that fills whole nodes",
        )
    if len(cluster.groups) > 1 and len(counts) > cluster.groups[0].nodes:
        raise DocumentError(
            "job",
            f"{wanted.plan.cluster} has several kinds of nodes, which one job cannot request; "
            "plan for one of them",
        )
    written_to = str(Path(file).with_suffix(ENDINGS[kind]))
    if written_to == file:
        raise DocumentError("output", f"is '{file}', the name of its job; name it otherwise")
    job = _UnwrittenJob(
        wanted=wanted,
        cluster=cluster,
        to=to,
        file=Path(file),
        text=text,
        environment=environment,
        settings=job_settings(settings, option="set"),
        nodes=len(counts),
        devices=counts[0],
    )
    writer = {"slurm": _slurm, "kubernetes": _train_job, "skypilot": _skypilot}[kind]
    return ExportedJob(kind=kind, text=writer(job), file=written_to)


def _refuse_unknown(job: _UnwrittenJob, known: Sequence[str], of: str) -> None:
    for name in job.settings:
        if name not in known:
            raise DocumentError("set", f"'{name}' is no setting of {of}; known: {', '.join(known)}")


def _slurm(job: _UnwrittenJob) -> str:
    """Return a batch script.  The user's options of sbatch replace the defaults."""
    count = str(job.devices)
    on_cpu = job.kind_of_device == "cpu"
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        ("cpus-per-task" if on_cpu else "gpus-per-node"): count,
        "exclusive": "",
        "chdir": str(Path.cwd()),
        "output": "slurm-%j.log",
        **{name: value for name, value in job.settings.items() if name not in _COMMON},
    }
    body = job.body(str(job.file.absolute()), ['NNODES="$SLURM_NNODES" NODE_RANK="$SLURM_NODEID"'])
    refuse_lines([*options.values(), str(job.file)])
    return "\n".join(
        [
            "#!/bin/bash",
            *sbatch_lines(options),
            "set -euo pipefail",
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
            "# Its address, as Slurm knows it: names of nodes do not resolve everywhere.",
            'shown=$(scontrol show node "$host")',
            "MASTER_ADDR=$(sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p' <<< \"$shown\")",
            f"MASTER_PORT=$(({PORT} + SLURM_JOB_ID % 1000))",
            "export MASTER_ADDR MASTER_PORT",
            "",
            "start() {",
            textwrap.indent("\n".join(body), "  "),
            "}",
            "export -f start",
            "srun --kill-on-bad-exit=1 --wait=60 bash -euo pipefail -c start",
            "",
        ]
    )


def _train_job(job: _UnwrittenJob) -> str:
    """Return a TrainJob of Kubeflow Trainer, and the ConfigMap with the configuration."""
    _refuse_unknown(job, (*_COMMON, *_OF_TRAIN_JOBS), "a TrainJob")
    if "image" not in job.settings:
        raise DocumentError(
            "set",
            f"image=NAME is missing; name a container image that has {job.to}: --set image=NAME",
        )
    name = pod_name(job.name, option="set")
    meta = {"name": name}
    if "namespace" in job.settings:
        meta["namespace"] = job.settings["namespace"]
    file = f"{POD_FOLDER}/{job.file.name}"
    body = [
        "set -euo pipefail",
        f"mkdir -p {shlex.quote(POD_FOLDER)}",
        f'printf %s "$CONFIGURATION" > {shlex.quote(file)}',
        *job.body(
            file,
            [
                'NNODES="$PET_NNODES" NODE_RANK="$PET_NODE_RANK"',
                'MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"',
            ],
        ),
    ]
    configured = {"configMapKeyRef": {"name": name, "key": job.file.name}}
    resource = RESOURCES.get(job.kind_of_device, "cpu")
    trainer: dict[str, Any] = {
        "image": job.settings["image"],
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        # Kubernetes puts variables for $(NAME), and takes $$ for $.
        "command": ["bash", "-c", "\n".join(body).replace("$", "$$") + "\n"],
        "env": [{"name": "CONFIGURATION", "valueFrom": configured}],
        "resourcesPerNode": {"limits": {resource: str(job.devices)}},
    }
    parts = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {job.file.name: job.text},
        },
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": meta,
            "spec": {
                "runtimeRef": {"name": job.settings.get("runtime", RUNTIME)},
                "trainer": trainer,
            },
        },
    ]
    return yaml.dump_all(parts, Dumper=BlockTexts, sort_keys=False)


def _skypilot(job: _UnwrittenJob) -> str:
    """Return a task of SkyPilot."""
    _refuse_unknown(job, (*_COMMON, *_OF_SKYPILOT), "a SkyPilot task")
    known = job.settings
    resources: dict[str, Any] = {
        name: _scalar(known[name]) for name in _OF_SKYPILOT if name in known and name != "workdir"
    }
    if job.kind_of_device != "cpu" and not {"accelerators", "instance_type"} & {*resources}:
        accelerator = job.cluster.groups[0].accelerator.name.lower()
        if accelerator not in SKYPILOT_NAMES:
            raise DocumentError(
                "set",
                f"SkyPilot's name of {accelerator} is not known here; give it with "
                f"--set accelerators=NAME:{job.devices}",
            )
        resources = {"accelerators": f"{SKYPILOT_NAMES[accelerator]}:{job.devices}", **resources}
    file = f"{POD_FOLDER}/{job.file.name}"
    body = job.body(
        file,
        [
            'NNODES="$SKYPILOT_NUM_NODES" NODE_RANK="$SKYPILOT_NODE_RANK"',
            f'MASTER_ADDR="$(sed -n 1p <<< "$SKYPILOT_NODE_IPS")" MASTER_PORT={PORT}',
        ],
    )
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        **({"resources": resources} if resources else {}),
        **({"workdir": known["workdir"]} if "workdir" in known else {}),
        "file_mounts": {file: str(job.file)},
        "run": "\n".join(["set -euo pipefail", *body, ""]),
    }
    return yaml.dump(task, Dumper=BlockTexts, sort_keys=False)


def _scalar(text: str) -> str | int | bool:
    """Return a setting as YAML's scalar: true and false, whole numbers, else text.

    >>> _scalar("true"), _scalar("256"), _scalar("8+")
    (True, 256, '8+')
    """
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text
