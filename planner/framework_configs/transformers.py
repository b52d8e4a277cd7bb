"""Hugging Face transformers 5, as its TrainingArguments (YAML; HfArgumentParser reads it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    degrees_above,
    of_fsdp,
    of_one_kind,
    recompute_of,
)


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan it does not support."""
    yield from degrees_above(wanted, tensor=1, pipeline=1, context=1, expert=1)
    yield from of_fsdp(wanted)
    if wanted.plan.zero and wanted.plan.mesh.data_replicate > 1:
        yield "sharding within groups of replicas"
    yield from of_one_kind(wanted)


def text(wanted: FrameworkPlan) -> str:
    """Return the arguments."""
    plan, t = wanted.plan, wanted.plan.training
    config: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "optim": "adamw_torch_fused",
        "learning_rate": t.learning_rate,
        "adam_beta1": t.beta1,
        "adam_beta2": t.beta2,
        "adam_epsilon": t.epsilon,
        "weight_decay": t.weight_decay,
        "max_grad_norm": t.clip_norm,
        **_rates(wanted),
        "gradient_checkpointing": not plan.zero and recompute_of(wanted) == "full",
        "torch_compile": plan.compile == "block",
    }
    if plan.zero:
        config["fsdp"] = "full_shard"
        config["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": plan.zero == 3,
            "cpu_offload": plan.offload == "parameters",
            "activation_checkpointing": recompute_of(wanted) == "full",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def _rates(wanted: FrameworkPlan) -> dict[str, Any]:
    """Return the learning rates; without a fall they stay, however long the run is."""
    t = wanted.plan.training
    fields: dict[str, Any] = {"warmup_steps": t.warmup_steps}
    if not wanted.falls:
        name = "constant_with_warmup" if t.warmup_steps else "constant"
        return {"lr_scheduler_type": name, **fields}
    fields["max_steps"] = t.rate_steps
    if t.rate_schedule == "wsd":
        kind = {"num_decay_steps": t.decay_steps, "decay_type": "linear"}
        name, kwargs = "warmup_stable_decay", {**kind, "min_lr_ratio": t.floor}
    else:
        name = f"{t.rate_schedule}_with_min_lr" if t.floor else t.rate_schedule
        kwargs = {"min_lr_rate": t.floor} if t.floor else {}
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, **fields}


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan is set elsewhere."""
    plan, steps = wanted.plan, wanted.plan.training.warmup_steps
    yield f"torchrun starts {plan.mesh.devices} ranks; samples have {plan.seq_len} tokens"
    if steps:
        yield f"rates of the first {steps} steps lie 1/{steps} of the highest below the plan's"
    if wanted.falls:
        yield f"training ends at step {plan.training.rate_steps}, where its learning rate does"
