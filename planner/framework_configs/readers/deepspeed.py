"""DeepSpeed's configuration (JSON)."""

from __future__ import annotations

from typing import Any

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers import input_limits as limits
from meshwright.planner.framework_configs.readers.parsed_config import Settings, Told, under


def read(text: str) -> Told:
    """Return what the configuration says."""
    return of_settings(limits.json_settings(text, "deepspeed"))


def of_settings(data: dict[str, Any]) -> Told:
    """Return what settings say; `auto` says nothing."""
    known = Settings(data)
    told = Told(framework="deepspeed")
    told.global_batch = known.count("train_batch_size")
    told.micro_batch = known.count("train_micro_batch_size_per_gpu")
    told.micro_batches = known.count("gradient_accumulation_steps")
    alone = told.global_batch is None or told.micro_batch is None
    if (
        alone
        and "gradient_accumulation_steps" not in data
        and any(_batches(data))
        and "auto" not in _batches(data)
    ):
        told.micro_batches = 1
    told.trains(clip_norm=known.amount("gradient_clipping"))
    zero = known.part("zero_optimization")
    told.zero = zero.number("stage") or 0
    if told.zero not in (0, 1, 2, 3):
        raise DocumentError("zero_optimization.stage", f"is {told.zero}; it is 0, 1, 2 or 3")
    for key, offload in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        part = zero.part(key)
        device = part.word("device")
        part.take("pin_memory")
        if device in ("cpu", "nvme") or (key == "offload_optimizer" and zero.flag("cpu_offload")):
            told.offload = offload
        if device == "nvme":
            told.assumed.append(f"zero_optimization.{key}: in host memory instead of on NVMe")
        told.unknown += under(f"zero_optimization.{key}", part)
    for also in ("overlap_comm", "contiguous_gradients"):
        zero.take(also)
    formats = {name: known.part(name) for name in ("bf16", "bfloat16", "fp16", "amp")}
    told.precision = "fp32"
    for name, part in formats.items():
        on = part.take("enabled")
        if on == "auto":
            told.precision = None
        elif on and name != "amp":
            told.precision = "fp16" if name == "fp16" else "bf16"
        told.unknown += under(name, part)
    _optimizer(known.part("optimizer"), told)
    _rates(known.part("scheduler"), told)
    again = known.part("activation_checkpointing")
    if again.left:
        told.recompute = "full"
        told.assumed.append("activation_checkpointing: every block is recomputed")
        told.unknown += under("activation_checkpointing", again)
    pipeline = known.part("tensor_parallel")
    told.tensor = pipeline.degree("autotp_size", "tp_size")
    told.unknown = [
        *known.left,
        *under("zero_optimization", zero),
        *told.unknown,
    ]
    return told


def _batches(data: dict[str, Any]) -> list[Any]:
    """Return what is said of batches; `auto` is left to the trainer."""
    return [data.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]


def _optimizer(optimizer: Settings, told: Told) -> None:
    kind = optimizer.word("type")
    if kind not in (None, "Adam", "AdamW"):
        told.assumed.append(f"optimizer.type {kind!r:.40}: AdamW instead")
    values = optimizer.part("params")
    first, second = values.pair("betas")
    told.trains(
        learning_rate=values.amount("lr"),
        beta1=first,
        beta2=second,
        epsilon=values.amount("eps"),
        weight_decay=values.amount("weight_decay"),
    )
    told.unknown += under("optimizer.params", values)


def _rates(scheduler: Settings, told: Told) -> None:
    kind = scheduler.word("type")
    values = scheduler.part("params")
    total = values.number("total_num_steps")
    told.trains(warmup_steps=values.number("warmup_num_steps"))
    values.take("warmup_min_lr")
    most = values.amount("warmup_max_lr")
    if most:
        told.trains(learning_rate=most)
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and total:
        told.trains(rate_schedule="linear" if kind == "WarmupDecayLR" else "cosine")
        told.trains(rate_steps=total, floor=values.amount("cos_min_ratio"))
    elif kind not in (None, "WarmupLR"):
        told.assumed.append(f"scheduler.type {kind!r:.40}: the rate stays constant")
    told.unknown += under("scheduler.params", values)
