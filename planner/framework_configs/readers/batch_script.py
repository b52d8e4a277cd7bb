"""A batch script: whose command it runs, on how many ranks."""

from __future__ import annotations

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import megatron, shell, torchtitan, transformers
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig


def read(text: str) -> ParsedConfig:
    """Return what the script's command says, by what it looks like."""
    words = shell.words(limits.check_size(text, "slurm"))
    flags = shell.flags(words)
    asked = shell.directives(text)
    each, nodes = _plain(flags, "nproc-per-node", "num-gpus", "gpus-per-node"), None
    nodes = _plain(flags, "nnodes", "num-machines", "num-nodes", "nodes")
    processes = _plain(flags, "num-processes")
    launch = [name for name in flags if name in _OF_LAUNCH]
    if any(name.startswith("parallelism.") for name in flags) or any(
        "torchtitan" in word for word in words
    ):
        config = torchtitan.of_flags({k: v for k, v in flags.items() if k not in launch})
    elif "tensor-model-parallel-size" in flags or any("pretrain_" in word for word in words):
        config = megatron.of_flags(flags, text)
    elif "per-device-train-batch-size" in flags:
        config = transformers.of_flags({k: v for k, v in flags.items() if k not in launch})
    else:
        raise DocumentError(
            "slurm",
            "runs no command that is known: Megatron, torchtitan or a Hugging Face trainer; "
            "give the command's own file, or its configuration",
        )
    config.devices = processes or megatron.ranks_of(asked, nodes, each) or config.devices
    config.unknown = [key for key in config.unknown if key.removeprefix("--") not in _OF_LAUNCH]
    return config


_OF_LAUNCH = {
    "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-endpoint",
    "rdzv-backend", "rdzv-id", "num-processes", "num-machines", "machine-rank", "main-process-ip",
    "main-process-port", "num-gpus", "num-nodes", "gpus-per-node", "nodes", "ntasks-per-node",
    "cpus-per-task", "gres", "ntasks", "standalone", "config-file", "hostfile", "label",
    "kill-on-bad-exit",
}  # fmt: skip
"""Flags of launchers."""


def _plain(flags: dict[str, str | bool | list[str]], *names: str) -> int | None:
    for name in names:
        value = flags.get(name)
        first = value[0] if isinstance(value, list) else value
        if isinstance(first, str) and first.isdecimal() and len(first) < 8:
            return int(first)
    return None
