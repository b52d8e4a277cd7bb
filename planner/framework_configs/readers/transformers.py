"""Hugging Face TrainingArguments: YAML or JSON, or the flags of a training script."""

from __future__ import annotations

from typing import Any

from meshwright.planner.framework_configs.readers import deepspeed
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import Settings, Told, under

_RATES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "linear_with_min_lr": "linear",
    "warmup_stable_decay": "wsd",
}


def read(text: str) -> Told:
    """Return what the arguments say."""
    return of_settings(limits.settings(text, "transformers"))


def of_flags(flags: dict[str, str | bool | list[str]]) -> Told:
    """Return what flags of a script say."""
    data: dict[str, Any] = {name.replace("-", "_"): value for name, value in flags.items()}
    nested = data.get("fsdp_config")
    if isinstance(nested, str) and nested.startswith("{"):
        data["fsdp_config"] = limits.json_settings(nested, "--fsdp_config")
    return of_settings(data)


def of_settings(data: dict[str, Any]) -> Told:
    """Return what arguments say."""
    known = Settings(data)
    told = Told(framework="transformers")
    own = known.take("deepspeed")
    if isinstance(own, dict):
        told = deepspeed.of_settings(own)
    elif own is not None:
        told.framework = "deepspeed"
        told.assumed.append(f"deepspeed {own!r:.60}: another file, of which nothing is known here")
    told.micro_batch = known.count("per_device_train_batch_size") or 8
    told.micro_batches = known.count("gradient_accumulation_steps") or 1
    told.precision = "fp32"
    for name in ("fp16", "bf16"):
        if known.flag(name):
            told.precision = name
    if own is None:
        _of_fsdp(known, told)
    if known.flag("gradient_checkpointing"):
        told.recompute = "full"
    known.take("gradient_checkpointing_kwargs")
    if known.flag("torch_compile"):
        told.compile = "block"
    told.seq_len = known.number(
        "max_length", "max_seq_length", "model_max_length", "block_size", "cutoff_len"
    )
    wanted = known.word("model_name_or_path")
    if wanted:
        told.model["registered"] = wanted
    optimizer = known.word("optim")
    if optimizer is not None and not optimizer.startswith("adamw_torch"):
        told.assumed.append(f"optim {optimizer!r:.40}: AdamW in the plan's types instead")
    _rates(known, told)
    told.unknown += known.left
    return told


def _of_fsdp(known: Settings, told: Told) -> None:
    value, nested = known.take("fsdp"), known.take("fsdp_config")
    if isinstance(nested, str):
        told.assumed.append(f"fsdp_config {nested!r:.60}: another file, of which nothing is known")
        nested = {}
    fsdp = Settings(
        {key.removeprefix("fsdp_"): one for key, one in (nested or {}).items()}
        if isinstance(nested, dict)
        else {}
    )
    words = value if isinstance(value, list) else str(value or "").split()
    if not value or value == "no_shard":
        return
    again = fsdp.flag("reshard_after_forward")
    told.zero = 2 if "shard_grad_op" in words or again is False else 3
    if any(str(word).startswith("hybrid_shard") for word in words):
        told.assumed.append("hybrid_shard: shards within a node")
        told.data_shard = 0
    if "offload" in words or fsdp.flag("cpu_offload", "offload_params"):
        told.offload = "parameters"
    if fsdp.flag("activation_checkpointing"):
        told.recompute = "full"
    for key in ("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap"):
        fsdp.take(key)
    known.take("fsdp_transformer_layer_cls_to_wrap")
    told.unknown += under("fsdp_config", fsdp)


def _rates(known: Settings, told: Told) -> None:
    told.trains(
        learning_rate=known.amount("learning_rate"),
        beta1=known.amount("adam_beta1"),
        beta2=known.amount("adam_beta2"),
        epsilon=known.amount("adam_epsilon"),
        weight_decay=known.amount("weight_decay") or 0.0,
        clip_norm=known.amount("max_grad_norm"),
        seed=known.number("seed"),
    )
    steps = known.number("max_steps")
    steps = steps if steps and steps > 0 else None
    warmup, ratio = known.amount("warmup_steps"), known.share("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:
        warmup, ratio = None, warmup
    if warmup is None and ratio and steps:
        warmup = round(ratio * steps)
    elif ratio and warmup is None:
        told.assumed.append("warmup: a share of the steps, whose number is not said; no warm-up")
    told.trains(warmup_steps=None if warmup is None else int(warmup))
    kind, values = known.word("lr_scheduler_type") or "linear", known.take("lr_scheduler_kwargs")
    if isinstance(values, str):
        values = limits.json_settings(values, "lr_scheduler_kwargs")
    kwargs = Settings({"lr_scheduler_kwargs": values}).part("lr_scheduler_kwargs")
    found = _RATES.get(kind)
    if found is None or steps is None:
        if not kind.startswith("constant"):
            told.assumed.append(f"lr_scheduler_type {kind!r:.40}: the rate stays constant")
    else:
        told.trains(rate_schedule=found, rate_steps=steps)
        told.trains(floor=kwargs.amount("min_lr_rate", "min_lr_ratio"))
        if found == "wsd":
            told.trains(decay_steps=kwargs.number("num_decay_steps"))
            if kwargs.word("decay_type") not in (None, "linear"):
                told.assumed.append("lr_scheduler_kwargs.decay_type: it falls linearly")
    told.unknown += under("lr_scheduler_kwargs", kwargs)
