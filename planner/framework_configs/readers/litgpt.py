"""LitGPT's configuration of its pretraining and fine-tuning scripts (YAML), as of 0.5.

A file does not name the script that reads it: one with adapters is finetune_lora's, one with
`model_name` or without `checkpoint_dir` is pretrain's, any other is finetune_full's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, Settings
from meshwright.planner.framework_configs.readers.transformers import read_dropout

_PRECISIONS = {
    "bf16-true": "bf16", "bf16-mixed": "bf16", "16-mixed": "fp16", "16-true": "fp16",
    "32-true": "fp32",
}  # fmt: skip
_ADAPTED = {
    "lora_query": "q_proj",
    "lora_key": "k_proj",
    "lora_value": "v_proj",
    "lora_projection": "o_proj",
    "lora_mlp": "gate_proj up_proj down_proj",
}
_ON = ("lora_query", "lora_value")
"""Adapters that are there unless they are switched off."""


def read(text: str) -> ParsedConfig:
    """Return the settings of the configuration."""
    return of_settings(limits.settings(text, "litgpt"))


def of_settings(data: Mapping[str, Any]) -> ParsedConfig:
    """Return the parsed settings."""
    settings = Settings(data)
    config = ParsedConfig(framework="litgpt")
    devices, nodes = settings.word("devices"), settings.count("num_nodes") or 1
    if devices is not None and devices.isdecimal():
        config.devices = int(devices) * nodes
    elif devices not in (None, "auto"):
        settings.name("devices")
    _precision(settings, config)
    train = settings.part("train")
    config.micro_batch = train.count("micro_batch_size") or 4
    config.global_batch = train.count("global_batch_size")
    config.seq_len = train.number("max_seq_length")
    is_adapted = any(str(key).startswith("lora_") for key in settings.unread)
    is_pretraining = not is_adapted and (
        settings.ignore("model_name") is not None or "checkpoint_dir" not in settings
    )
    wanted = settings.word("checkpoint_dir", "model_name", "initial_checkpoint_dir")
    if wanted:
        config.model["registered"] = wanted
    if config.devices is None or config.devices > 1:
        config.zero = 3
    # FSDP of Lightning: HYBRID_SHARD in pretrain.py, whole sharding and recomputed blocks in
    # finetune/full.py; its ranks of one node shard.
    if config.devices is None:
        settings.idle("num_nodes")  # beside those of the cluster
    if is_pretraining and nodes > 1:
        config.data_shard = 0
    if not is_pretraining and not is_adapted and config.zero:
        config.recompute = "full"
    config.assumed.append(
        "it is the file of "
        + ("pretrain" if is_pretraining else "finetune_lora" if is_adapted else "finetune_full")
    )
    _adapters(settings, config)
    _optimizer(settings, train, config)
    config.gather(train, "train")
    config.gather(settings)
    config.understood = settings.understood
    return config


def _precision(settings: Settings, config: ParsedConfig) -> None:
    """Read the type of weights and products: states of mixed types are in 32 bits."""
    config.precision = settings.choice("precision", _PRECISIONS, "bf16")
    if str(settings.ignore("precision")).endswith("-mixed"):
        config.options.append("wide-states")


def _adapters(settings: Settings, config: ParsedConfig) -> None:
    rank = settings.count("lora_r")
    if rank is None:
        settings.idle("lora_alpha", "lora_dropout", *_ADAPTED, "lora_head")
        settings.expect("quantize", "none")
        return
    targets: list[str] = []
    for key, names in _ADAPTED.items():
        on = settings.flag(key)
        if on or (on is None and key in _ON):
            targets += names.split()
    if settings.flag("lora_head"):
        settings.name("lora_head")
    kinds = ("bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq")
    weights = settings.choice("quantize", dict.fromkeys(kinds, "nf4"), "full")
    if not targets:
        raise DocumentError("lora_query", "is off, and so are all others; give one an adapter")
    read_dropout(settings, config)
    lora: dict[str, Any] = {"rank": rank, "alpha": settings.amount("lora_alpha") or 16.0}
    config.trains(lora={**lora, "targets": tuple(targets), "weights": weights})


def _optimizer(settings: Settings, train: Settings, config: ParsedConfig) -> None:
    optimizer = settings.ignore("optimizer")
    part = settings.part("optimizer") if isinstance(optimizer, dict) else Settings({})
    if isinstance(optimizer, str):
        settings.expect("optimizer", "AdamW")
    part.expect("class_path", "torch.optim.AdamW", "AdamW")
    values = part.part("init_args")
    config.trains_by_adamw(values)
    config.trains(
        clip_norm=train.amount("max_norm") or 0.0,
        warmup_steps=train.number("lr_warmup_steps"),
        seed=settings.number("seed"),
    )
    steps = train.number("max_steps")
    if steps and steps > (config.training.get("warmup_steps") or 0):
        config.trains(rate_schedule="cosine", rate_steps=steps)
    config.gather(values, "optimizer.init_args")
    config.gather(part, "optimizer")
