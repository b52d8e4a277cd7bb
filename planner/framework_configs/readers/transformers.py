"""Hugging Face TrainingArguments: YAML or JSON, or the flags of a training script."""

from __future__ import annotations

from typing import Any

from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment
from meshwright.planner.framework_configs.readers import deepspeed
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    named_file,
    unread_keys,
)

_RATES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "linear_with_min_lr": "linear",
    "warmup_stable_decay": "wsd",
}


def read(text: str, surroundings: ScriptEnvironment | None = None) -> ParsedConfig:
    """Return what the arguments say."""
    return of_settings(limits.settings(text, "transformers"), surroundings)


def of_flags(
    flags: dict[str, str | bool | list[str]], surroundings: ScriptEnvironment | None = None
) -> ParsedConfig:
    """Return what flags of a script say."""
    data: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags.items()}
    nested = data.get("fsdp_config")
    if isinstance(nested, str) and nested.startswith("{"):
        data["fsdp_config"] = limits.json_settings(nested, "--fsdp_config")
    return of_settings(data, surroundings)


def of_settings(
    data: dict[str, Any], surroundings: ScriptEnvironment | None = None
) -> ParsedConfig:
    """Return what arguments say; other files that they name are read too."""
    settings = Settings(data)
    config = ParsedConfig(framework="transformers")
    nested = settings.pop("deepspeed")
    if nested is not None and not isinstance(nested, dict):
        name, text = named_file("deepspeed", nested, surroundings)
        nested = limits.json_settings(text, name)
    if nested is not None:
        config = deepspeed.of_settings(nested)
    config.micro_batch = settings.count("per_device_train_batch_size") or 8
    config.micro_batches = settings.count("gradient_accumulation_steps") or 1
    config.precision = "fp32"
    for name in ("fp16", "bf16"):
        if settings.flag(name):
            config.precision = name
    if nested is None:
        _of_fsdp(settings, config, surroundings)
    if settings.flag("gradient_checkpointing"):
        config.recompute = "full"
    settings.pop("gradient_checkpointing_kwargs")
    if settings.flag("torch_compile"):
        config.compile = "block"
    config.seq_len = settings.number(
        "max_length", "max_seq_length", "model_max_length", "block_size", "cutoff_len"
    )
    wanted = settings.word("model_name_or_path")
    if wanted:
        config.model["registered"] = wanted
    optimizer = settings.word("optim")
    if optimizer is not None and not optimizer.startswith("adamw_torch"):
        config.assumed.append(f"optim {optimizer!r:.40}: AdamW in the plan's types instead")
    _rates(settings, config)
    config.unknown += [*settings.unread, *settings.loose]
    config.understood += settings.understood
    return config


def _of_fsdp(
    settings: Settings, config: ParsedConfig, surroundings: ScriptEnvironment | None
) -> None:
    value, nested = settings.pop("fsdp"), settings.pop("fsdp_config")
    if isinstance(nested, str):
        name, text = named_file("fsdp_config", nested, surroundings)
        nested = limits.json_settings(text, name)
    fsdp = Settings(
        {key.removeprefix("fsdp_"): value for key, value in (nested or {}).items()}
        if isinstance(nested, dict)
        else {}
    )
    words = value if isinstance(value, list) else str(value or "").split()
    if not value or value == "no_shard":
        return
    again = fsdp.flag("reshard_after_forward")
    config.zero = 2 if "shard_grad_op" in words or again is False else 3
    if any(str(word).startswith("hybrid_shard") for word in words):
        config.assumed.append("hybrid_shard: shards within a node")
        config.data_shard = 0
    if "offload" in words or fsdp.flag("cpu_offload", "offload_params"):
        config.offload = "parameters"
    if fsdp.flag("activation_checkpointing"):
        config.recompute = "full"
    for key in ("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap"):
        fsdp.pop(key)
    settings.pop("fsdp_transformer_layer_cls_to_wrap")
    config.unknown += unread_keys("fsdp_config", fsdp)


def _rates(settings: Settings, config: ParsedConfig) -> None:
    config.trains(
        learning_rate=settings.amount("learning_rate"),
        beta1=settings.amount("adam_beta1"),
        beta2=settings.amount("adam_beta2"),
        epsilon=settings.amount("adam_epsilon"),
        weight_decay=settings.amount("weight_decay") or 0.0,
        clip_norm=settings.amount("max_grad_norm"),
        seed=settings.number("seed"),
    )
    steps = settings.number("max_steps")
    steps = steps if steps and steps > 0 else None
    warmup, ratio = settings.amount("warmup_steps"), settings.share("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:
        warmup, ratio = None, warmup
    if warmup is None and ratio and steps:
        warmup = round(ratio * steps)
    elif ratio and warmup is None:
        config.assumed.append("warmup: a share of the steps, whose number is not said; no warm-up")
    config.trains(warmup_steps=None if warmup is None else int(warmup))
    kind, values = (
        settings.word("lr_scheduler_type") or "linear",
        settings.pop("lr_scheduler_kwargs"),
    )
    if isinstance(values, str):
        values = limits.json_settings(values, "lr_scheduler_kwargs")
    kwargs = Settings({"lr_scheduler_kwargs": values}).part("lr_scheduler_kwargs")
    rate = _RATES.get(kind)
    if rate is None or steps is None:
        if not kind.startswith("constant"):
            config.assumed.append(f"lr_scheduler_type {kind!r:.40}: the rate stays constant")
    else:
        config.trains(rate_schedule=rate, rate_steps=steps)
        config.trains(floor=kwargs.amount("min_lr_rate", "min_lr_ratio"))
        if rate == "wsd":
            config.trains(decay_steps=kwargs.number("num_decay_steps"))
            if kwargs.word("decay_type") not in (None, "linear"):
                config.assumed.append("lr_scheduler_kwargs.decay_type: it falls linearly")
    config.unknown += unread_keys("lr_scheduler_kwargs", kwargs)
