"""nanotron 0.4, as its configuration (YAML) but for model, data and number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    degrees_above,
    of_one_kind,
    other_schedule,
    recompute_of,
)
from meshwright.planner.frameworks.stage_rules import by_products
from meshwright.planner.schedules import PLAIN, schedule_of


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan the framework does not support."""
    plan, a = wanted.plan, wanted.model.architecture
    yield from other_schedule(wanted, "nanotron")
    yield from degrees_above(wanted, context=1, expert=1)
    if plan.zero > 1:
        yield f"ZeRO-{plan.zero}"
    if plan.offload != "none":
        yield f"{plan.offload} on the host"
    if plan.mesh.data_replicate > 1 and plan.zero:
        yield "sharding within groups of replicas"
    if plan.precision == "fp16":
        yield "precision fp16"
    if a is None or a.experts is not None:
        yield "a model that is not a dense transformer"
    elif wanted.blocks != by_products(a, plan.mesh.pipeline):
        yield (
            f"stages of {', '.join(map(str, wanted.blocks))} blocks; it makes "
            f"{', '.join(map(str, by_products(a, plan.mesh.pipeline)))}"
        )
    yield from of_one_kind(wanted)


def text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
    plan, t = wanted.plan, wanted.plan.training
    pipelined = plan.mesh.pipeline > 1
    config: dict[str, Any] = {
        "parallelism": {
            "dp": wanted.data,
            "pp": plan.mesh.pipeline,
            "tp": plan.mesh.tensor,
            "pp_engine": schedule_of(plan.schedule if pipelined else PLAIN).names["nanotron"],
            "tp_mode": "REDUCE_SCATTER" if plan.mesh.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": False,
            "recompute_layer": recompute_of(wanted) == "full",
            "expert_parallel_size": 1,
            "context_parallel_size": 1,
        },
        "model": {"dtype": "bfloat16" if plan.precision == "bf16" else "float32"},
        "tokens": {
            "sequence_length": plan.seq_len,
            "micro_batch_size": plan.micro_batch,
            "batch_accumulation_per_replica": plan.micro_batches,
        },
        "optimizer": {
            "zero_stage": plan.zero,
            "weight_decay": t.weight_decay,
            "weight_decay_exclude_named_params": [r".*norm.*", r".*bias"],
            "clip_grad": t.clip_norm or None,
            "accumulate_grad_in_fp32": True,
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": t.beta1,
                "adam_beta2": t.beta2,
                "adam_eps": t.epsilon,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": _rates(wanted),
        },
    }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def _rates(wanted: FrameworkPlan) -> dict[str, Any]:
    """Return the learning rates; a decay to the highest rate is none."""
    t = wanted.plan.training
    begin = t.rate_steps - t.decay_steps if t.rate_schedule == "wsd" else t.warmup_steps
    return {
        "learning_rate": t.learning_rate,
        "lr_warmup_steps": t.warmup_steps,
        # Its linear warm-up begins at 0, also where it has no steps.
        "lr_warmup_style": "linear" if t.warmup_steps else "constant",
        "lr_decay_style": "cosine" if t.rate_schedule == "cosine" else "linear",
        "lr_decay_starting_step": begin,
        "lr_decay_steps": t.rate_steps - begin if wanted.falls else 1,
        "min_decay_lr": t.floor * t.learning_rate if wanted.falls else t.learning_rate,
    }


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan is set elsewhere."""
    steps = wanted.plan.training.warmup_steps
    yield "model.model_config, data_stages and tokens.train_steps"
    if steps:
        yield f"rates of the first {steps} steps lie 1/{steps} of the highest below the plan's"
    if wanted.plan.compile == "block":
        yield "blocks are not compiled there"
