"""DeepSpeed's configuration (JSON)."""

from __future__ import annotations

from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import ParsedConfig, Settings


def read(text: str) -> ParsedConfig:
    """Return the settings of the configuration, which is all that is said of the run."""
    data = limits.json_settings(text, "deepspeed")
    config = of_settings(data)
    if config.micro_batch is None:  # which the trainer's own arguments give
        config.unknown += [f"{key}=auto" for key in _SIZES if data.get(key) == "auto"]
    if config.recompute == "none":
        config.assumed.append(
            "no block is recomputed, which the script says: model.gradient_checkpointing_enable()"
        )
    return config


def of_settings(data: dict[str, Any]) -> ParsedConfig:
    """Return the parsed settings; `auto` is no setting."""
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
        place = part.choice("device", _PLACES, "none")
        if place != "none" or (key == "offload_optimizer" and zero.flag("cpu_offload")):
            config.offload = offload
        if str(part.ignore("device")).lower() == "nvme":
            part.name("device")
        part.expect("pin_memory", True, "auto")
        config.gather(part, f"zero_optimization.{key}")
    for also in ("overlap_comm", "contiguous_gradients"):
        zero.expect(also, True, "auto")
    for key, usual in _USUAL.items():
        zero.expect(key, usual, "auto")
    config.gather(zero, "zero_optimization")
    _precision(settings, config)
    _optimizer(settings.part("optimizer"), config)
    _rates(settings.part("scheduler"), config)
    again = settings.part("activation_checkpointing")
    if again.unread:
        config.recompute = "full"
        config.assumed.append("activation_checkpointing: every block is recomputed")
        config.gather(again, "activation_checkpointing")
    divided = settings.part("tensor_parallel")
    config.tensor = divided.degree("autotp_size", "tp_size")
    config.gather(divided, "tensor_parallel")
    config.gather(settings)
    config.understood = settings.understood
    return config


def _precision(settings: Settings, config: ParsedConfig) -> None:
    """Read the type of weights, of which one is on; `auto` is the trainer's."""
    config.precision = "fp32"
    kinds = []
    for name in ("bf16", "bfloat16", "fp16", "amp"):
        part = settings.part(name)
        if part.ignore("enabled") == "auto":
            config.precision = None
        elif part.flag("enabled") and name == "amp":
            part.name("enabled")
        elif part.flag("enabled"):
            kinds.append("fp16" if name == "fp16" else "bf16")
        config.gather(part, name)
    if len(kinds) > 1:
        raise DocumentError("bf16", "and fp16 are both enabled; enable one")
    config.precision = kinds[0] if kinds else config.precision


_USUAL = {
    "allgather_partitions": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
}
"""DeepSpeed's defaults (runtime/zero/config.py), which plans have too."""
_PLACES = {"cpu": "host", "nvme": "host", "none": "none"}


_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


def _batches(data: dict[str, Any]) -> list[Any]:
    """Return the batch sizes; `auto` is left to the trainer."""
    return [data.get(key) for key in _SIZES]


def _optimizer(optimizer: Settings, config: ParsedConfig) -> None:
    kinds = {"Adam": "adamw", "AdamW": "adamw", "Lion": "lion", "Muon": "muon", "SGD": "sgd"}
    config.trains(optimizer=optimizer.choice("type", kinds, "adamw"))
    values = optimizer.part("params")
    config.trains_by_adamw(values)
    config.gather(values, "optimizer.params")
    config.gather(optimizer, "optimizer")


def _rates(scheduler: Settings, config: ParsedConfig) -> None:
    kind = scheduler.word("type")
    values = scheduler.part("params")
    total = values.number("total_num_steps")
    config.trains(warmup_steps=values.number("warmup_num_steps"))
    most = values.amount("warmup_max_lr")
    if most:
        config.trains(learning_rate=most)
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and total:
        config.trains(rate_schedule="linear" if kind == "WarmupDecayLR" else "cosine")
        config.trains(rate_steps=total, floor=values.amount("cos_min_ratio"))
    elif kind not in (None, "WarmupLR"):
        config.assumed.append(f"scheduler.type {kind!r:.40}: the rate stays constant")
    config.gather(values, "scheduler.params")
    config.gather(scheduler, "scheduler")
