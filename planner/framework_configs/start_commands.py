"""Commands that start a framework's training by an exported configuration, on one node of a job.

They are lines of bash.  The job sets NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, from which
torchrun and its relatives know the other nodes.  Sources: the launch pages of torchtitan 0.3,
Megatron-LM, TRL 1.16, axolotl 0.19, LLaMA-Factory 0.9, torchtune 0.6, accelerate 1.15, DeepSpeed
0.19 and nanotron 0.4.
"""

from __future__ import annotations

import keyword
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.exportable_plan import FrameworkPlan
from meshwright.planner.framework_configs.megatron import orders_kernels
from meshwright.planner.framework_configs.torchtitan import MODULES, REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Parts of a start command."""

    wanted: FrameworkPlan
    to: str
    """Framework that reads the configuration."""
    file: str
    """Path of the configuration on a node."""
    devices: int
    """Number of ranks of each node."""
    script: str | None = None
    """Training script, where the framework has none of its own or another is wanted."""
    arguments: tuple[str, ...] = ()
    """Arguments of the user's own for the training script."""
    command: str | None = None
    """Command of the user's own in place of the framework's."""

    @property
    def quoted_file(self) -> str:
        """The configuration's path as a word of bash."""
        return shlex.quote(self.file)

    @property
    def torchrun(self) -> str:
        """The ranks of this node, which find the others at MASTER_ADDR."""
        return (
            'torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" '
            f"--nproc-per-node {self.devices} "
            '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\\n   '
        )

    def script_or(self, usual: str | None = None) -> str:
        """Return the training script as a word of bash; DocumentError if there is none."""
        script = self.script or usual
        if script is None:
            raise DocumentError(
                "job", f"{self.to} trains by a script of yours; name it with --set script=train.py"
            )
        return shlex.quote(script)


def start_lines(start: Start) -> list[str]:
    """Return the lines of bash that start training on one node.

    Raises DocumentError where the framework's start needs something that nobody gave.
    """
    if start.command is not None:
        for name, value in (("script", start.script), ("arguments", start.arguments)):
            if value:
                raise DocumentError("job", f"command= replaces {name}=; leave one of them out")
        return [start.command.replace("{config}", start.quoted_file)]
    lines = _COMMANDS.get(start.to)
    if lines is None:
        raise DocumentError(
            "job",
            f"the command that starts {start.to} is not known; give it with --set "
            "command='torchrun ... {config}'",
        )
    if start.script is not None and start.to not in _SCRIPTED:
        raise DocumentError(
            "job", f"{start.to} trains by its own program; leave script= out, or give command="
        )
    *before, command = lines(start)
    return [*before, " ".join([command, *map(shlex.quote, start.arguments)])]


def _torchtitan(start: Start) -> list[str]:
    module = PurePosixPath(start.file)
    _, name = REGISTERED.get(start.wanted.plan.model.name, (None, None))
    if name is None:
        raise DocumentError(
            "job",
            f"torchtitan has no configuration of {start.wanted.plan.model.name}; make one by "
            "planned(config) in a module, and start it with --set command='torchrun ...'",
        )
    stem = module.stem
    if module.suffix != ".py" or not stem.isidentifier() or keyword.iskeyword(stem):
        raise DocumentError(
            "output", f"is '{module.name}'; torchtitan imports the file, so call it plan.py"
        )
    if stem in {*MODULES, "torch", "torchtitan", "tyro"} or stem in sys.stdlib_module_names:
        raise DocumentError(
            "output", f"is '{module.name}', which hides a module of that name; call it plan.py"
        )
    return [
        _import_from(start),
        f"{start.torchrun} -m torchtitan.train --module {stem} --config {name}",
    ]


def _import_from(start: Start) -> str:
    folder = shlex.quote(str(PurePosixPath(start.file).parent))
    return f"export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}"


def _megatron(start: Start) -> list[str]:
    # The flags are quoted for a shell, and a comment may stand above them.
    assert start.wanted.cluster is not None, "a job is for a cluster"
    generation = start.wanted.cluster.groups[0].accelerator.architecture or ""
    ordered = orders_kernels(start.wanted) and not generation.startswith("blackwell")
    return [
        *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if ordered else []),
        f'eval "flags=(\n$(cat {start.quoted_file})\n)"',
        f'{start.torchrun} {start.script_or("pretrain_gpt.py")} "${{flags[@]}}"',
    ]


def _trl(start: Start) -> list[str]:
    objective = start.wanted.plan.training.objective
    return [f"{start.torchrun} -m trl.scripts.{objective} --config {start.quoted_file}"]


def _torchtune(start: Start) -> list[str]:
    plan = start.wanted.plan
    kind = "full" if plan.training.lora is None else "lora"
    devices = "single_device" if plan.mesh.devices == 1 else "distributed"
    ranks = start.torchrun.removeprefix("torchrun")
    return [f"tune run{ranks} {kind}_finetune_{devices} --config {start.quoted_file}"]


def _llama_factory(start: Start) -> list[str]:
    # It starts torchrun itself, by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.
    return [
        f"export FORCE_TORCHRUN=1 NPROC_PER_NODE={start.devices}",
        f"llamafactory-cli train {start.quoted_file}",
    ]


def _accelerate(start: Start) -> list[str]:
    return [
        f'accelerate launch --config_file {start.quoted_file} --machine_rank "$NODE_RANK" '
        '--main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" '
        f"{start.script_or()}"
    ]


_COMMANDS: dict[str, Callable[[Start], list[str]]] = {
    "torchtitan": _torchtitan,
    "torchtitan@0.2": lambda start: [
        f"{start.torchrun} -m torchtitan.train --job.config_file {start.quoted_file}"
    ],
    "megatron": _megatron,
    "megatron-deepspeed": _megatron,
    "megatron-bridge": lambda start: [
        f"{start.torchrun} {start.script_or()} --config_file {start.quoted_file}"
    ],
    "deepspeed": lambda start: [
        f"{start.torchrun} {start.script_or()} --deepspeed --deepspeed_config {start.quoted_file}"
    ],
    "accelerate": _accelerate,
    "transformers": lambda start: [f"{start.torchrun} {start.script_or()} {start.quoted_file}"],
    "trl": _trl,
    "axolotl": lambda start: [f"{start.torchrun} -m axolotl.cli.train {start.quoted_file}"],
    "llama-factory": _llama_factory,
    "torchtune": _torchtune,
    "nanotron": lambda start: [
        f"{start.torchrun} {start.script_or('run_train.py')} --config-file {start.quoted_file}"
    ],
    "fsdp": lambda start: [_import_from(start), f"{start.torchrun} {start.script_or()}"],
}
"""Start commands by the framework that reads the configuration."""
_SCRIPTED = frozenset(
    {
        *("accelerate", "deepspeed", "fsdp", "megatron", "megatron-bridge", "megatron-deepspeed"),
        *("nanotron", "transformers"),
    }
)
"""Frameworks that train by a script, the user's or their own."""
