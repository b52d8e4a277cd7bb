"""torchtitan 0.2.2, the last release that reads TOML, as its job configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    mixed_recompute,
    of_fsdp,
    other_schedule,
    recompute_of,
    whole_experts,
)
from meshwright.planner.framework_configs.torchtitan import (
    options_of,
    other_narrow,
    other_selective,
    parts_of,
    sharded_by_context,
)
from meshwright.planner.schedules import schedule_of


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that the framework does not support."""
    plan = wanted.plan
    yield from whole_experts(wanted)
    yield from sharded_by_context(wanted)
    if plan.mesh.tensor > 1 and not plan.mesh.sequence_parallel:
        yield "tensor parallelism that does not divide the sequence"
    yield from other_schedule(wanted, "torchtitan")
    yield from of_fsdp(wanted)
    others = plan.mesh.tensor * plan.mesh.pipeline
    if others > 1 and plan.mesh.data_shard * plan.mesh.context == 1:
        if plan.mesh.data_replicate > 1:
            yield "replicas (ZeRO-0) with tensor or pipeline parallelism"
        if plan.precision in ("bf16", *EIGHT_BITS):
            yield (
                f"{plan.precision} with tensor or pipeline parallelism and no sharding: it would "
                "train in fp32"
            )
    yield from other_narrow(wanted)
    if plan.precision == "mxfp8" and plan.compile == "block" and plan.mesh.tensor > 1:
        yield "mxfp8 with compiled blocks and tensor parallelism"
    if "narrow-experts" in options_of(wanted) and plan.mesh.pipeline * plan.mesh.context > 1:
        yield "experts in 8 bits with pipeline or context parallelism"
    yield from other_selective(wanted)
    yield from mixed_recompute(wanted)


def text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
    plan, mesh = wanted.plan, wanted.plan.mesh
    replicas, shards = mesh.data_replicate, mesh.data_shard
    # The samples that a data-parallel rank takes at once: a forward's samples, or those of a whole
    # pipeline schedule, which cuts them into micro-batches.  The rest of a step is accumulated.
    at_once = plan.micro_batch * (plan.micro_batches if mesh.pipeline > 1 else 1)
    lines = [
        *_converters(wanted),
        "[training]",
        f"local_batch_size = {at_once}",
        f"global_batch_size = {plan.global_batch}",
        f"seq_len = {plan.seq_len}",
        f'mixed_precision_param = "{"float32" if plan.precision == "fp32" else "bfloat16"}"',
        f"enable_cpu_offload = {str(plan.offload == 'parameters').lower()}",
        *(_titan_training(wanted) if wanted.recipe else ()),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicas}",
        f"data_parallel_shard_degree = {shards}",
        f"tensor_parallel_degree = {mesh.tensor}",
        f"context_parallel_degree = {mesh.context}",
        f"pipeline_parallel_degree = {mesh.pipeline}",
    ]
    if plan.overlaps_tensors:
        lines.append("enable_async_tensor_parallel = true")
    if mesh.expert > 1:
        lines.append(f"expert_parallel_degree = {mesh.expert}")
    if shards > 1:
        lines.append(f'fsdp_reshard_after_forward = "{"always" if plan.zero == 3 else "never"}"')
    if mesh.pipeline > 1:
        schedule = schedule_of(plan.schedule)
        parts = json.dumps(parts_of(wanted, "output"))
        lines.append(f'pipeline_parallel_schedule = "{schedule.names["torchtitan"]}"')
        lines.append(f"pipeline_parallel_microbatch_size = {plan.micro_batch}")
        lines.append(f"module_fqns_per_model_part = {parts}")
        lines += schedule.settings.get("torchtitan", ())
    if plan.compile == "block":
        lines += ["", "[compile]", "enable = true", 'components = ["model"]']
    lines += ["", "[activation_checkpoint]", f'mode = "{recompute_of(wanted)}"']
    if recompute_of(wanted) == "selective":
        lines.append('selective_ac_option = "op"')
    return "\n".join(lines) + "\n"


def _converters(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the converters of products to 8 bits: in blocks, not in the head or the router."""
    plan, a, options = wanted.plan, wanted.model.architecture, options_of(wanted)
    if plan.precision not in EIGHT_BITS:
        return
    kind = "float8" if plan.precision == "fp8" else "mx"
    experts = a is not None and a.experts is not None
    grouped = experts and "narrow-experts" in options
    names = [f"quantize.linear.{kind}", *([f"quantize.grouped_mm.{kind}"] if grouped else [])]
    left = ["output", *(["router.gate"] if experts else [])]
    if "auto-filter" in options:
        left.append("auto_filter_small_kn")
    yield from ("[model]", f"converters = {json.dumps(names)}", "")
    yield f"[quantize.linear.{kind}]"
    if plan.precision == "mxfp8":
        yield 'recipe_name = "mxfp8_cublas"'
        yield 'mxfp8_dim1_cast_kernel_choice = "cuda"'
    elif plan.scales == "tensorwise":
        narrow = str(plan.weight_gather_dtype == "fp8").lower()
        yield f"enable_fsdp_float8_all_gather = {narrow}"
        yield f"precompute_float8_dynamic_scale_for_fsdp = {narrow}"
    else:
        yield f'recipe_name = "{plan.scales}"'
    yield f"filter_fqns = {json.dumps(left)}"
    yield ""
    if grouped:
        yield from (f"[quantize.grouped_mm.{kind}]", 'fqns = ["experts"]', "")


def _titan_training(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the end of `training`, optimizer and learning rates."""
    t = wanted.plan.training
    # A bound of 0 would make every gradient 0.
    yield f"max_norm = {t.clip_norm or math.inf}"
    if wanted.falls:
        yield f"steps = {t.rate_steps}"  # behind it the rate would go on falling
    yield from ("", "[optimizer]", 'name = "AdamW"')
    yield f"lr = {t.learning_rate!r}"
    yield f"beta1 = {t.beta1!r}"
    yield f"beta2 = {t.beta2!r}"
    yield f"eps = {t.epsilon!r}"
    yield f"weight_decay = {t.weight_decay!r}"
    yield from ("", "[lr_scheduler]", f"warmup_steps = {t.warmup_steps}")
    if not wanted.falls:
        yield "decay_ratio = 0.0"
        return
    yield f"total_steps = {t.rate_steps}"
    if t.rate_schedule == "wsd":
        yield f"decay_ratio = {t.decay_steps / t.rate_steps!r}"
    yield f'decay_type = "{"cosine" if t.rate_schedule == "cosine" else "linear"}"'
    yield f"min_lr_factor = {t.floor!r}"


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    plan = wanted.plan
    if not wanted.recipe:
        return
    if plan.training.weight_decay:
        yield "weight decay acts on norms too, which the plan leaves out"
    if wanted.falls:
        yield f"training ends at step {plan.training.rate_steps}, where its learning rate does"
