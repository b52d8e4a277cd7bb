"""Checks before a rank starts: a plan for another model, too few devices, missing data.

All that would stop a run and can be known without torch is found here, in a second, and said in one
message.  Nothing is started and nothing is written.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.catalog.expressions import locate_model, resolve_beside
from meshwright.planner.documents.document import is_file, plain, read, read_text
from meshwright.planner.documents.model import ModelGraph, is_own
from meshwright.planner.documents.plan import Plan, PlannedModel
from meshwright.planner.documents.plugins import load_plugin
from meshwright.planner.documents.prediction import ALLOCATOR
from meshwright.planner.documents.units import file_name
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.schedules import PLAIN, schedule_of
from meshwright.runtime.checkpoint import checkpoint, object_store
from meshwright.runtime.data import corpus as data
from meshwright.runtime.data.corpus import Files
from meshwright.runtime.engine.unsupported import unsupported_reason
from meshwright.runtime.models import config_fields as library_fields
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.run_folder import Device, orders_file
from meshwright.runtime.run.telemetry import address_of

RANKS_PER_CORE = 4
"""More ranks than cores take turns, which is slow but right; beyond this it is a mistake."""


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """The ranks of one node, each with its device there."""

    world: int
    """Ranks of all nodes."""
    device: Device
    devices: Mapping[int, int]
    """By rank, the number of its device on this node."""

    @property
    def leads(self) -> bool:
        """True if this node has rank 0."""
        return 0 in self.devices

    def environment(self, rank: int, *, port: int | str = "<a free port>") -> dict[str, str]:
        """Return what a rank's environment has beside the launcher's own."""
        result = rank_environment(rank, ranks=len(self.devices), port=port)
        if self.device == "cuda":
            result |= cuda_environment(os.environ)
        return {
            **result,
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.devices[rank]),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """A launch of which everything that can be checked without starting it has been checked."""

    plan: Plan
    model: ModelGraph
    run: LaunchRun
    """Options asked for; `checkpoint` and `weights` are absolute, other paths as given."""
    ranks: LocalRanks
    files: Files
    held_out: Files | None
    tokenizer: Path | None
    resumed: Path | None
    """The checkpoint to go on from."""
    output: Path
    warnings: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """Command line of each rank."""
        return [
            sys.executable,
            "-m",
            "meshwright.runtime.launch.rank_main",
            str(orders_file(self.output)),
        ]

    @property
    def nothing_left(self) -> str | None:
        """Why nothing has to be trained; None where something has.

        Whoever starts a run again that may have ended asks to go on `or_start`.
        """
        done = 0 if self.resumed is None else checkpoint.progress(self.resumed).step
        if done < self.run.steps:
            return None
        return (
            f"{self.resumed}: has done {done} steps and {self.run.steps} are asked for: nothing "
            "left to do"
        )

    def text(self) -> str:
        """Return the command and environment of each rank, as a shell would take them."""
        lines = []
        for rank in self.ranks.devices:
            settings = [
                f"{key}={shlex.quote(v)}" for key, v in self.ranks.environment(rank).items()
            ]
            lines.append(" ".join([*settings, shlex.join(self.command)]))
        return "\n".join(lines)


def cuda_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks on CUDA, unless the user's environment says otherwise.

    Segments of the allocator that grow leave less memory unused where sizes differ.  Devices have
    the numbers that nvidia-smi gives them, which is how they were planned for.

    >>> cuda_environment({"PYTORCH_CUDA_ALLOC_CONF": "", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    {}
    """
    result: dict[str, str] = {}
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
        result |= dict([ALLOCATOR])
    if "CUDA_DEVICE_ORDER" not in environment:
        result["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return result


def rank_environment(rank: int, *, ranks: int, port: int | str) -> dict[str, str]:
    """Return what the environment of one of `ranks` on this machine has beside our own."""
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    result = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        "PYTHONSAFEPATH": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path("/sys/class/net/lo").exists():
        # Host names need not resolve to an address that this machine has, and other machines need
        # not reach these ranks.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            result[name] = os.environ.get(name, "lo")
    # An empty entry is the folder where the rank is started, which PYTHONSAFEPATH leaves in.
    paths = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    root = str(Path(str(sys.modules["meshwright"].__file__)).resolve().parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths.insert(0, root)
    result["PYTHONPATH"] = os.pathsep.join(paths)
    return result


def preflight(
    plan_path: Path | str,
    run: LaunchRun,
    *,
    model: ModelGraph | None = None,
    device: Device | None = None,
    node: int = 0,
    nodes: Sequence[int] = (),
) -> Preflight:
    """Check a launch without starting or writing anything.

    `nodes` has the devices of each node where there are several, and `node` says which is this.
    """
    plan = read(Plan, plan_path)
    plan = plan.model_copy(update={"training": plan.training.with_settings(run.training)})
    _check_evaluation(plan, run)
    _check_loggers(run)
    if model is None:
        model = resolve_beside(plan.model.source, plan_path)
    try:
        plan.check_model(model)
    except DocumentError as error:
        raise error.in_file(str(plan_path)) from None
    plan = plan.model_copy(update={"model": found_here(plan.model, model, plan_path)})
    _check_trains_on_text(model)
    chosen = device or ("cuda" if cuda_devices() else "cpu")
    local_ranks = ranks_of_node(plan, node, nodes or [plan.ranks])
    warnings = check_devices(plan, chosen, local_ranks)
    reason = unsupported_reason(plan, model)
    if reason:
        raise LaunchError(f"{plan_path}: {reason}")
    if run.data is None:
        files = data.files(data.standard_library(), suffixes=[".py"])
        warnings.append(f"--data is not given; training on Python's own sources in {files.source}")
    else:
        files = data.files(run.data)
    warnings += _drawn(plan, run.weights)
    resumed = checkpoint_to_resume(run)
    output = run.output or default_output(plan)
    for folder in (output, run.checkpoint):
        if folder is not None:
            _check_writable(folder)
    if run.weights is not None and not any(run.weights.glob("*.safetensors")):
        raise LaunchError(
            f"{run.weights}: is no folder with *.safetensors in it; "
            "give the folder of published weights"
        )
    return Preflight(
        plan=plan,
        model=model,
        run=run.model_copy(
            update={
                "checkpoint": run.checkpoint and run.checkpoint.resolve(),
                "weights": run.weights and run.weights.resolve(),
            }
        ),
        ranks=LocalRanks(plan.ranks, chosen, local_ranks),
        files=files,
        held_out=data.files(run.evaluate) if run.evaluate is not None else None,
        tokenizer=run.tokenizer or _own_tokenizer(plan, run.weights),
        resumed=resumed.resolve() if resumed else None,
        # Nodes may share the folder; each writes its own ranks' files.
        output=output.resolve() if 0 in local_ranks else output.resolve() / f"node-{node:05}",
        warnings=tuple(warnings),
    )


def ranks_of_node(plan: Plan, node: int, nodes: Sequence[int]) -> dict[int, int]:
    """Return the ranks of a node, each with its device there; `nodes` has the devices of each.

    A single node has all ranks, on whichever devices.  Several are filled in their order.
    """
    devices = {rank: plan.device_of_rank(rank) for rank in range(plan.ranks)}
    if len(nodes) == 1:
        return devices
    first = sum(nodes[:node])
    ranks = range(first, first + nodes[node])
    return {rank: device - first for rank, device in devices.items() if device in ranks}


def cores() -> int:
    """Return the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_devices() -> int:
    """Return how many CUDA or ROCm devices torch would see; torch is asked only if one may be."""
    drivers = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"), Path("/dev/dxg")]
    if sys.platform.startswith("linux") and not any(driver.exists() for driver in drivers):
        return 0
    import torch  # noqa: PLC0415

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def found_here(planned: PlannedModel, model: ModelGraph, plan_path: Path | str) -> PlannedModel:
    """Return what a plan says of its model, with the files as they were found on this machine."""
    source = locate_model(planned.source, plan_path)
    here = source if source == planned.source else str(Path(source).absolute())
    return planned.model_copy(update={"source": here, "graph": planned.graph and model})


def _check_trains_on_text(model: ModelGraph) -> None:
    architecture = model.architecture
    if architecture and (architecture.patches or architecture.classes):
        raise LaunchError(
            f"{model.name}: reads images or predicts classes; launch trains models that predict "
            "the next token of a text"
        )


def _check_evaluation(plan: Plan, run: LaunchRun) -> None:
    if run.evaluate_every is not None and run.evaluate is None:
        raise LaunchError("evaluate_every: name the held-out text too (evaluate)")
    if run.evaluate is not None and schedule_of(plan.schedule).stale:
        raise LaunchError(f"evaluate: a pipeline that never drains is not evaluated; use {PLAIN}")


def _check_loggers(run: LaunchRun) -> None:
    packages = {
        "tensorboard": run.tensorboard,
        "wandb": run.wandb is not None,
        "mlflow": run.mlflow is not None,
    }
    for name, wanted in packages.items():
        if wanted and importlib.util.find_spec(name) is None:
            raise LaunchError(
                f"{name}: is not installed; install it with: pip install {name}, or read the same "
                "figures in metrics.jsonl"
            )
    if run.prometheus is not None:
        address_of(run.prometheus)
    if run.opentelemetry is not None and importlib.util.find_spec("opentelemetry") is None:
        raise LaunchError(
            "opentelemetry: is not installed; install it with: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http, or have Prometheus read the same figures"
        )
    for name in run.logger:
        load_plugin("loggers", name)


def check_devices(plan: Plan, device: Device, local_ranks: Mapping[int, int]) -> list[str]:
    """Refuse more ranks than this machine can carry; return what is worth a warning."""
    ranks = len(local_ranks)
    here = "" if ranks == plan.ranks else " on each node"
    if device == "cuda":
        have = cuda_devices()
        if ranks > have:
            raise LaunchError(
                f"the plan needs {ranks} devices{here} ({plan.layout_text}); this machine has "
                f"{have}. Plan again for `--cluster local`, or launch where they are"
            )
        return []
    have = cores()
    if ranks > RANKS_PER_CORE * have:
        raise LaunchError(
            f"the plan needs {ranks} ranks{here} ({plan.layout_text}); this machine has no "
            f"accelerator and {have} cores, which carry at most {RANKS_PER_CORE * have}. Plan "
            "again for `--cluster local`, or launch where the devices are"
        )
    problems = []
    if ranks > have:
        problems.append(
            f"{ranks} ranks share {have} cores; step times will not be those of a real machine"
        )
    load = os.getloadavg()[0]
    if load > have:
        problems.append(
            f"other programs load this machine (load {load:.0f} on {have} cores); measured times "
            "will be unreliable"
        )
    return problems


def checkpoint_to_resume(run: LaunchRun) -> Path | None:
    """Return the checkpoint to go on from, if the run is to; refuse to overwrite one otherwise."""
    folder, resume = run.checkpoint, run.resume
    name = "" if folder is None else object_store.shown(folder)
    if run.or_start and not resume:
        raise LaunchError(
            "or_start: needs resume; add resume to continue from a checkpoint where there is one"
        )
    if folder is None:
        if run.checkpoint_every is not None or resume:
            what = "resume" if resume else "checkpoint_every"
            raise LaunchError(f"{what}: name the folder of the checkpoints too (checkpoint)")
        return None
    if (folder / checkpoint.META).exists():
        raise LaunchError(
            f"{folder}: is a checkpoint; name the folder that it is in, {folder.absolute().parent}"
        )
    saved = checkpoint.to_resume(folder)
    if saved is None:
        if resume and not run.or_start:
            raise LaunchError(
                f"{name}: there is no checkpoint to resume; leave out `resume` to start anew, "
                "or add `or_start`"
            )
        return None
    done = checkpoint.progress(saved).step
    if not resume:
        raise LaunchError(
            f"{name}: already has a checkpoint of step {done}; resume it, or name another folder"
        )
    if done >= run.steps and not run.or_start:
        raise LaunchError(
            f"{saved}: has done {done} steps and {run.steps} are requested; request more steps "
            "to continue"
        )
    return saved


def default_output(plan: Plan) -> Path:
    """Return where a run's files go that names no folder."""
    return Path("runs", f"{file_name(plan.model.name)}-{time.strftime('%Y%m%d-%H%M%S')}")


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise LaunchError(
            f"{folder}: cannot be written: {existing} is not a folder; name another folder"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise LaunchError(
            f"{folder}: cannot be written: {existing} is not yours to write; name another folder"
        )


def _drawn(plan: Plan, weights: Path | None) -> list[str]:
    """Return what to say of random numbers that the model's configuration asks for."""
    folders = [Path(named) for named in (weights, plan.model.source) if named]
    files = [folder if folder.suffix == ".json" else folder / "config.json" for folder in folders]
    file = next((file for file in files if is_file(file)), None)
    if file is None:
        return []
    try:
        config = plain(read_text(file))
    except DocumentError:
        return []  # who reads it for the model says why
    fields = library_fields.drawn(config) if isinstance(config, dict) else {}
    if not fields:
        return []
    said = ", ".join(f"{name} {value}" for name, value in fields.items())
    return [f"{file}: {said}: off, since what they draw would depend on the plan"]


def _own_tokenizer(plan: Plan, weights: Path | None) -> Path | None:
    """Return the folder of the model's own tokenizer: where the plan has it from, or its weights.

    A folder of weights counts only for the model that was planned from no folder.
    """
    if is_own(plan.model.source):
        return None
    source = Path(plan.model.source)
    named = source.is_dir() or source.name == "config.json"
    folder = (source if source.is_dir() else source.parent) if named else weights
    return folder if folder and (folder / "tokenizer.json").is_file() else None
