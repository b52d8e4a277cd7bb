"""Which framework a configuration is of, by settings that it alone has."""

from __future__ import annotations

import re
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers import shell

_TELLING: dict[str, tuple[frozenset[str], ...]] = {
    reader: tuple(frozenset(keys.split()) for keys in several)
    for reader, several in {
        "verl": ("actor_rollout_ref",),
        "axolotl": ("base_model",),
        "llama-factory": (
            *("finetuning_type", "stage", "cutoff_len", "pure_bf16", "template", "lora_target"),
            "model dist_config",
        ),
        "ms-swift": ("tuner_type", "train_type", "rlhf_type"),
        "accelerate": ("distributed_type", "compute_environment"),
        "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
        "nanotron": ("parallelism tokens",),
        "litgpt": ("checkpoint_dir train", "model_name train", "out_dir train"),
        "nemo": ("trainer model.micro_batch_size", "trainer model.tensor_model_parallel_size"),
        "megatron-bridge": ("model train ddp", "model train checkpoint"),
        "megatron": ("MODEL_ARGS", "micro_batch_size seq_length"),
        "trl": (
            *("use_peft", "dataset_mixture", "dataset_name", "packing", "beta"),
            *("max_completion_length", "max_prompt_length"),
        ),
        "transformers": ("per_device_train_batch_size",),
    }.items()
}
"""Settings of a document or its sections, all of a set, in the order of looking for them."""
_TOML = re.compile(r"^\s*\[[\w.]+\]\s*(#.*)?$", re.MULTILINE)
_MODULE = re.compile(r"\btorchtitan\b|\bconfig\.(training|parallelism|optimizer)\.")


def reader_of(text: str) -> str:
    """Return the reader of a configuration's text.

    Raises
    ------
    DocumentError
        Its settings are those of no framework, or it is none of their files.

    Examples
    --------
    >>> reader_of("base_model: gpt2"), reader_of("torchrun pretrain_gpt.py --bf16")
    ('axolotl', 'slurm')
    """
    if shell.is_script(text):
        return "slurm"
    for form, reader in ((_TOML, "torchtitan@0.2"), (_MODULE, "torchtitan")):
        if form.search(text) and limits.is_toml_or_module(text):
            return reader
    data: dict[str, Any] = limits.settings(text, "from")
    present = {key for key, value in data.items() if value is not None}
    parts = {key: part for key, part in data.items() if isinstance(part, dict)}
    present |= {f"{section}.{key}" for section, part in parts.items() for key in part}
    for reader, several in _TELLING.items():
        if any(keys <= present for keys in several):
            return reader
    shown = ", ".join(list(map(str, data))[:3])
    raise DocumentError(
        "from", f"is not said, and its settings ({shown}) are those of no framework; add --from"
    )
