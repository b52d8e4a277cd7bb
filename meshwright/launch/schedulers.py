"""A launch as a job for a cluster's own scheduler: a Slurm batch script, a Kubernetes manifest.

Either starts the same `meshwright launch` or `meshwright run` once on every node, which finds the
other nodes by the scheduler's variables (runtime.run.node_rank).  A job with checkpoints goes on
from the newest one when the scheduler starts it again, after a node was lost.  Each job has a
secret of its own, by which its nodes know each other
(meshwright.runtime.run.authenticated_channel).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup
from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, HandedOver, LaunchError
from meshwright.planner.framework_configs.job_files import (
    RESOURCES,
    BlockTexts,
    job_name,
    job_settings,
    pod_name,
    refuse_lines,
    sbatch_lines,
)
from meshwright.runtime.run.authenticated_channel import SECRET, new_secret
from meshwright.runtime.run.launch_options import Where
from meshwright.runtime.run.preemption import GRACE_S

SCHEDULERS = ("slurm", "kubernetes")
SUBMITTED_BY = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f")}
MOUNTED = "/meshwright"
"""Folder of a pod with the plan and the files that it names."""
STARTS_OF_A_POD = 4
"""Number of starts of a pod before its job gives up."""
POD_SETTINGS = ("image", "namespace", "name", "volume", "cpus", "kind")
KINDS = ("job", "jobset")
"""Kinds of Kubernetes objects that start the pods: the Indexed Job, or a JobSet, which starts all
of them again when one fails."""
JOBS_OF_SET = "nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of every node: `meshwright BEFORE plan.yaml OPTIONS AFTER`."""

    before: tuple[str, ...]
    options: tuple[str, ...]
    after: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Files that it reads beside the plan."""
    goes_on: bool
    """True if it may be started again."""
    handed_over: bool = False
    """True if a notice ends it after a saved step; its exit status then reports the notice."""

    def words(self, plan: str, *options: str) -> list[str]:
        """Return it with more options."""
        return [*self.before, plan, *self.options, *options, *self.after]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that was written, and submitted unless it is a dry run."""

    text: str
    file: Path | None = None
    said: str = ""
    """Answer of the scheduler's own command."""


def submit(
    plan_path: str,
    plan: Plan,
    machine: ClusterSpec,
    command: Command,
    where: Where,
    *,
    folder: Path,
    dry_run: bool,
) -> Submission:
    """Write a job that starts this on all nodes of a plan, and submit it.

    `where.job` has NAME=VALUE: any option of sbatch (`partition=gpu`), or of POD_SETTINGS.
    """
    scheduler = where.on
    if scheduler not in SCHEDULERS:
        raise LaunchError(
            f"on: '{scheduler}' is not known; known: local, ray, {', '.join(SCHEDULERS)}"
        )
    if len(machine.groups) > 1:
        raise LaunchError(
            f"on: {plan.cluster} has several kinds of nodes, which one {scheduler} job cannot "
            f"request; start `meshwright {command.before[0]}` on each node with --nodes, --node "
            "and --rendezvous"
        )
    settings = job_settings(where.job)
    if scheduler == "slurm":
        text = _slurm(plan_path, plan, machine, command, settings, logs=folder)
    else:
        text = _kubernetes(plan_path, plan, machine, command, settings)
    if dry_run:
        return Submission(text=text)
    submitted_by = SUBMITTED_BY[scheduler]
    if shutil.which(submitted_by[0]) is None:
        raise LaunchError(
            f"{submitted_by[0]}: is not on this machine; submit where it is, or write the job with "
            f"--dry-run and submit it yourself"
        )
    file = folder / ("job.sbatch" if scheduler == "slurm" else "job.yaml")
    document.write_text(text, file, private=True)  # a manifest has the job's secret
    # A folder's name may begin as an option does.
    told_to = [*submitted_by, str(file.absolute())]
    done = subprocess.run(told_to, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{submitted_by[0]} refused {file}: {done.stderr.strip() or done.stdout}")
    return Submission(text=text, file=file, said=done.stdout.strip())


def _slurm(
    plan_path: str,
    plan: Plan,
    machine: ClusterSpec,
    command: Command,
    settings: Mapping[str, str],
    *,
    logs: Path,
) -> str:
    """Return a batch script.  The user's options of sbatch replace the defaults."""
    (group,) = machine.groups
    each = group.devices_per_node
    asked = {
        "job-name": job_name(plan),
        "nodes": str(group.nodes),
        "ntasks-per-node": "1",
        **({"cpus-per-task": str(each)} if group.accelerator.kind == "cpu" else {}),
        **({"gpus-per-node": str(each)} if group.accelerator.kind != "cpu" else {}),
        "exclusive": "",
        "chdir": str(Path.cwd()),
        "output": str(logs / "slurm-%j.log"),
        "open-mode": "append",
        **({"requeue": "", "signal": f"USR1@{GRACE_S}"} if command.handed_over else {}),
        **({"requeue": ""} if command.goes_on else {}),
        **settings,
    }
    words = [sys.executable, "-P", "-m", "meshwright", *command.words(plan_path)]
    refuse_lines([*asked.values(), *words])
    return "\n".join(
        [
            "#!/bin/bash",
            *sbatch_lines(asked),
            # No `set -x` of a site shows it, and no command has it as an argument.
            "set +x -euo pipefail",
            f"{SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            f"export {SECRET} PYTHONSAFEPATH=1",
            *_srun_lines(shlex.join(words), logs, hands_over=command.handed_over),
            "",
        ]
    )


def _srun_lines(words: str, logs: Path, *, hands_over: bool) -> list[str]:
    """Return the lines that start a command once on every node.

    One that hands over ends well on each of them, or srun would end the others before they have
    saved; that it did so is a file.  Signals of a notice go to all processes of a step, and the
    shell between srun and the command waits for it.
    """
    srun = "srun --export=ALL --kill-on-bad-exit=1 --wait=60"
    if not hands_over:
        return [f"{srun} {words}"]
    return [
        f"export handed_over={shlex.quote(str(logs.absolute()))}/handed-over-$SLURM_JOB_ID",
        'rm -f "$handed_over"',
        f"{srun} bash -c {shlex.quote(_HANDS_OVER)} - {words} || status=$?",
        "# A notice ended the run, and it is saved: this job waits for its turn again.",
        'if [ -e "$handed_over" ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "${status:-0}"',
    ]


_HANDS_OVER = (
    'trap : TERM USR1 HUP; "$@" || { status=$?; '
    f'[ $status = {HandedOver.status} ] || exit $status; : > "$handed_over"; }}'
)


def _kubernetes(
    plan_path: str,
    plan: Plan,
    machine: ClusterSpec,
    command: Command,
    settings: Mapping[str, str],
) -> str:
    """Return an Indexed Job with its headless service, its secret, and the plan as a ConfigMap."""
    unknown = [name for name in settings if name not in POD_SETTINGS]
    if unknown or "image" not in settings:
        what = f"'{unknown[0]}' is not known" if unknown else "image=NAME is missing"
        raise DocumentError("job", f"{what}; settings of a pod: {', '.join(POD_SETTINGS)}")
    kind = settings.get("kind", "job")
    if kind not in KINDS:
        raise DocumentError("job", f"kind={kind}: is not known; known: {', '.join(KINDS)}")
    (group,) = machine.groups
    name = pod_name(settings.get("name", job_name(plan)))
    meta = {
        "name": name,
        **({"namespace": settings["namespace"]} if "namespace" in settings else {}),
    }
    service = {
        "clusterIP": "None",
        "selector": {"job-name": name},
        # Pods find each other before any of them is ready.
        "publishNotReadyAddresses": True,
    }
    starts = STARTS_OF_A_POD if command.goes_on else 1
    indexed = {
        "completions": group.nodes,
        "parallelism": group.nodes,
        "completionMode": "Indexed",
        # All pods leave when one does.
        "backoffLimit": group.nodes * (starts - 1),
        **({"podFailurePolicy": {"rules": _UNCOUNTED}} if command.handed_over else {}),
        "template": {
            "metadata": {"labels": {"job-name": name}},
            "spec": _pod(name, group, command, settings),
        },
    }
    files = _files(plan_path, plan, command.files)
    secret = {"secret": new_secret()}
    parts: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": secret},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": files},
    ]
    if kind == "jobset":
        parts.append(_job_set(meta, indexed, starts, hands_over=command.handed_over))
        return yaml.dump_all(parts, Dumper=BlockTexts, sort_keys=False)
    parts += [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": indexed},
    ]
    return yaml.dump_all(parts, Dumper=BlockTexts, sort_keys=False)


def _job_set(
    meta: dict[str, str], indexed: dict[str, Any], starts: int, *, hands_over: bool
) -> dict[str, Any]:
    """Return a JobSet: all pods are started again when one fails, `starts` times at most.

    An end that is no failure fails its job for a reason of its own, and is not counted.
    """
    rules = [{**rule, "action": "FailJob"} for rule in _UNCOUNTED]
    policy: dict[str, Any] = {"maxRestarts": starts - 1}
    if hands_over:
        indexed = {**indexed, "podFailurePolicy": {"rules": rules}}
        uncounted = "RestartJobSetAndIgnoreMaxRestarts"
        policy["rules"] = [
            {
                "name": "handed-over",
                "action": uncounted,
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": meta["name"]},
            "failurePolicy": policy,
            "replicatedJobs": [
                {
                    "name": JOBS_OF_SET,
                    "replicas": 1,
                    "template": {"spec": {**indexed, "backoffLimit": 0}},
                }
            ],
        },
    }


_UNCOUNTED: list[dict[str, Any]] = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "Ignore",
        "onExitCodes": {
            "containerName": "launch",
            "operator": "In",
            "values": [HandedOver.status],
        },
    },
]
"""Ends of pods that are no failures: a node was taken away."""


def _pod(
    name: str, group: DeviceGroup, command: Command, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Return the pod of one node."""
    limits = {RESOURCES.get(group.accelerator.kind, "cpu"): str(group.devices_per_node)}
    if "cpus" in settings:
        limits["cpu"] = settings["cpus"]
    kept = "/tmp"
    # Mounted volumes and their places.  Ranks of a node share tensors; the usual 64 MiB are too
    # few.
    volumes: list[tuple[dict[str, Any], str]] = [
        ({"name": "plan", "configMap": {"name": name}}, MOUNTED),
        ({"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, "/dev/shm"),
    ]
    if "volume" in settings:
        claim, colon, kept = settings["volume"].partition(":")
        if not colon or not kept.startswith("/"):
            raise DocumentError("job", f"volume={settings['volume']}: write CLAIM:/path")
        volumes.append(({"name": "data", "persistentVolumeClaim": {"claimName": claim}}, kept))
    # The plan's folder cannot be written.
    named = "--output" in command.options
    words = command.words("plan.yaml", *(() if named else ("--output", f"{kept}/runs/{name}")))
    container = {
        "name": "launch",
        "image": settings["image"],
        "workingDir": MOUNTED,
        # Kubernetes puts variables for $(NAME), and takes $$ for $.
        "command": [part.replace("$", "$$") for part in ("meshwright", *words)],
        "env": [
            {"name": "PYTHONSAFEPATH", "value": "1"},
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}},
            {"name": "NNODES", "value": str(group.nodes)},
            {"name": "MASTER_ADDR", "value": f"{_first_pod(name, settings)}.{name}"},
        ],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": volume["name"], "mountPath": at} for volume, at in volumes],
    }
    return {
        "restartPolicy": "Never",
        **({"terminationGracePeriodSeconds": GRACE_S} if command.handed_over else {}),
        "subdomain": name,
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
    }


def _first_pod(name: str, settings: Mapping[str, str]) -> str:
    """Return the host name of the pod with index 0."""
    return f"{name}-{JOBS_OF_SET}-0-0" if settings.get("kind") == "jobset" else f"{name}-0"


def _files(plan_path: str, plan: Plan, others: Sequence[str]) -> dict[str, str]:
    """Return the plan and the files beside it, as a pod will find them."""
    files = {"plan.yaml": document.read_text(plan_path)}
    main = plan.model.source.partition(":")[0]
    digests = (plan.model.graph.files if plan.model.graph else None) or {}
    code = [str(Path(main).parent / name) for name in digests]
    for named in dict.fromkeys((plan.cluster, main, *code, *others)):
        if Path(named).is_absolute() or not document.is_file(named):
            continue  # a path of the image, or no file at all
        if Path(named).name != named:
            raise LaunchError(
                f"{named}: a pod would not find it; put it beside {plan_path}, or into the "
                "image and name it from /"
            )
        files[named] = _exact_text(Path(named))
    return files


def _exact_text(path: Path) -> str:
    """Return a file's text with its ends of lines as they are: of code there is a digest."""
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise document.unreadable(error, path) from error
