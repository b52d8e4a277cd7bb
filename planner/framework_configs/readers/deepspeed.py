"""DeepSpeed's configuration (JSON)."""

from __future__ import annotations

from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import (
    ParsedConfig,
    Settings,
    unread_keys,
)


def read(text: str) -> ParsedConfig:
    """Return what the configuration says."""
    return of_settings(limits.json_settings(text, "deepspeed"))


def of_settings(data: dict[str, Any]) -> ParsedConfig:
    """Return what settings say; `auto` says nothing."""
    settings = Settings(data)
    config = ParsedConfig(framework="deepspeed")
    config.global_batch = settings.count("train_batch_size")
    config.micro_batch = settings.count("train_micro_batch_size_per_gpu")
    config.micro_batches = settings.count("gradient_accumulation_steps")
    alone = config.global_batch is None or config.micro_batch is None
    if (
        alone
        and "gradient_accumulation_steps" not in data
        and any(_batches(data))
        and "auto" not in _batches(data)
    ):
        config.micro_batches = 1
    config.trains(clip_norm=settings.amount("gradient_clipping"))
    zero = settings.part("zero_optimization")
    config.zero = zero.number("stage") or 0
    if config.zero not in (0, 1, 2, 3):
        raise DocumentError("zero_optimization.stage", f"is {config.zero}; it is 0, 1, 2 or 3")
    for key, offload in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        part = zero.part(key)
        device = part.word("device")
        part.pop("pin_memory")
        if device in ("cpu", "nvme") or (key == "offload_optimizer" and zero.flag("cpu_offload")):
            config.offload = offload
        if device == "nvme":
            config.assumed.append(f"zero_optimization.{key}: in host memory instead of on NVMe")
        config.unknown += unread_keys(f"zero_optimization.{key}", part)
    for also in ("overlap_comm", "contiguous_gradients"):
        zero.pop(also)
    formats = {name: settings.part(name) for name in ("bf16", "bfloat16", "fp16", "amp")}
    config.precision = "fp32"
    for name, part in formats.items():
        on = part.pop("enabled")
        if on == "auto":
            config.precision = None
        elif on and name != "amp":
            config.precision = "fp16" if name == "fp16" else "bf16"
        config.unknown += unread_keys(name, part)
    _optimizer(settings.part("optimizer"), config)
    _rates(settings.part("scheduler"), config)
    again = settings.part("activation_checkpointing")
    if again.unread:
        config.recompute = "full"
        config.assumed.append("activation_checkpointing: every block is recomputed")
        config.unknown += unread_keys("activation_checkpointing", again)
    pipeline = settings.part("tensor_parallel")
    config.tensor = pipeline.degree("autotp_size", "tp_size")
    config.unknown = [
        *settings.unread,
        *unread_keys("zero_optimization", zero),
        *config.unknown,
    ]
    config.understood = settings.understood
    return config


def _batches(data: dict[str, Any]) -> list[Any]:
    """Return what is said of batches; `auto` is left to the trainer."""
    return [data.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]


def _optimizer(optimizer: Settings, config: ParsedConfig) -> None:
    kind = optimizer.word("type")
    if kind not in (None, "Adam", "AdamW"):
        config.assumed.append(f"optimizer.type {kind!r:.40}: AdamW instead")
    values = optimizer.part("params")
    first, second = values.pair("betas")
    config.trains(
        learning_rate=values.amount("lr"),
        beta1=first,
        beta2=second,
        epsilon=values.amount("eps"),
        weight_decay=values.amount("weight_decay"),
    )
    config.unknown += unread_keys("optimizer.params", values)


def _rates(scheduler: Settings, config: ParsedConfig) -> None:
    kind = scheduler.word("type")
    values = scheduler.part("params")
    total = values.number("total_num_steps")
    config.trains(warmup_steps=values.number("warmup_num_steps"))
    values.pop("warmup_min_lr")
    most = values.amount("warmup_max_lr")
    if most:
        config.trains(learning_rate=most)
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and total:
        config.trains(rate_schedule="linear" if kind == "WarmupDecayLR" else "cosine")
        config.trains(rate_steps=total, floor=values.amount("cos_min_ratio"))
    elif kind not in (None, "WarmupLR"):
        config.assumed.append(f"scheduler.type {kind!r:.40}: the rate stays constant")
    config.unknown += unread_keys("scheduler.params", values)
