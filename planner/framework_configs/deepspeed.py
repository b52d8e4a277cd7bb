"""DeepSpeed 0.19, as its configuration (JSON)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    compile_text,
    degrees_above,
    of_one_kind,
    rate_text,
    recompute_of,
    script_text,
)


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan the framework does not support."""
    plan = wanted.plan
    yield from degrees_above(wanted, tensor=1, pipeline=1, context=1, expert=1)
    if plan.offload == "parameters" and plan.zero != 3:
        yield f"parameters on the host with ZeRO-{plan.zero}"
    if plan.mesh.data_replicate > 1 and plan.zero:
        yield "sharding within groups of replicas"
    yield from of_one_kind(wanted)


def text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
    plan, t = wanted.plan, wanted.plan.training
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True}
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    text = json.dumps(
        {
            "train_batch_size": plan.global_batch,
            "train_micro_batch_size_per_gpu": plan.micro_batch,
            "gradient_accumulation_steps": plan.micro_batches,
            "gradient_clipping": t.clip_norm,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": t.learning_rate,
                    "betas": [t.beta1, t.beta2],
                    "eps": t.epsilon,
                    "weight_decay": t.weight_decay,
                },
            },
            "bf16": {"enabled": plan.precision == "bf16"},
            "fp16": {"enabled": plan.precision == "fp16"},
            "zero_optimization": zero,
        },
        indent=2,
    )
    return text + "\n"


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan is set elsewhere."""
    if recompute_of(wanted) == "full":
        yield "every block is recomputed: model.gradient_checkpointing_enable()"
    if wanted.changes_rate:
        # Its own schedulers begin two steps later, and none has a floor with each fall.
        yield f"{rate_text(wanted)}; as lr_scheduler of deepspeed.initialize"
    yield from script_text(wanted)
    yield from compile_text(wanted)
