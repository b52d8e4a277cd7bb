"""Megatron-LM, as flags of its training scripts.  Written for that of 2026."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.documents.plan import Axis
from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    degrees_above,
    mixed_recompute,
    other_schedule,
    recompute_of,
)


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that the framework does not support."""
    plan = wanted.plan
    yield from other_schedule(wanted, "megatron")
    if plan.offload != "none":
        yield f"{plan.offload} on the host"
    if plan.zero in (2, 3) and plan.mesh.pipeline > 1:
        yield f"ZeRO-{plan.zero} with a pipeline"
    if plan.mesh.data_replicate > 1 and plan.zero:
        yield "sharding within groups of replicas"
    yield from other_scales(wanted)
    choices = wanted.recomputes
    if len(choices) > 1 and (set(choices) != {"none", "full"} or _full_each(wanted) is None):
        yield from mixed_recompute(wanted)


def layout_of(wanted: FrameworkPlan) -> str | None:
    """Return the blocks of every stage as `Et*6|t*7|t*6L`; None where counts of the ends suffice.

    Source: Megatron Core, transformer/pipeline_parallel_layer_layout.py.
    """
    blocks = wanted.blocks
    ends = {blocks[0], blocks[-1]} - {*blocks[1:-1]}
    if len(set(blocks[1:-1])) <= 1 and not (
        wanted.plan.virtual_stages > 1 and ends - {blocks[1] - 1}
    ):
        return None
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in blocks]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


def _full_each(wanted: FrameworkPlan) -> int | None:
    """Return the number of completely recomputed blocks of every stage, None if stages differ."""
    counts = {
        sum(item.recompute == "full" for item in stage.layers) for stage in wanted.plan.stages
    }
    return counts.pop() if len(counts) == 1 else None


def text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
    plan = wanted.plan
    lines = [
        *_megatron_mesh(wanted),
        *_megatron_sharding(wanted),
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.global_batch}",
        f"--seq-length {plan.seq_len}",
        *recompute_flags(wanted),
        *_megatron_options(wanted),
    ]
    if plan.precision in EIGHT_BITS:
        lines += _eight_bits(wanted)
    elif plan.precision in ("bf16", "fp16"):
        lines.append(f"--{plan.precision}")
    if wanted.recipe:
        lines += _megatron_training(wanted)
    return "\n".join(lines) + "\n"


SAYS = frozenset({"scales"})
RECIPES = ("delayed", "tensorwise", "blockwise")
"""Scales in fp8."""


def other_scales(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield scales in 8 bits that Transformer Engine has not, and products in 4."""
    plan = wanted.plan
    if plan.precision == "fp8" and plan.scales not in RECIPES:
        yield f"scales of 8-bit operands are {plan.scales}"
    if plan.precision == "nvfp4":
        yield "precision nvfp4"


def _eight_bits(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the recipe of products in 8 bits, and whether weights are stored and gathered so."""
    plan = wanted.plan
    blocks = plan.precision == "mxfp8"
    yield "--bf16"
    # One format where each block has a scale, else a wider one for gradients.
    yield f"--fp8-format {'e4m3' if blocks or plan.scales == 'blockwise' else 'hybrid'}"
    yield f"--fp8-recipe {'mxfp8' if blocks else plan.scales}"
    if "fp8-attention" in plan.framework.split("+"):
        yield "--fp8-dot-product-attention"
    if plan.zero and "16-bit-gathers" not in plan.framework.split("+"):
        yield "--fp8-param-gather"
        if blocks:
            yield "--reuse-grad-buf-for-mxfp8-param-ag"


def _megatron_mesh(wanted: FrameworkPlan) -> Iterator[str]:
    plan, mesh, blocks = wanted.plan, wanted.plan.mesh, wanted.blocks
    yield f"--tensor-model-parallel-size {mesh.tensor}"
    yield f"--pipeline-model-parallel-size {mesh.pipeline}"
    layout = layout_of(wanted)
    if layout is not None:
        yield f"--pipeline-model-parallel-layout {shlex.quote(layout)}"
    elif plan.virtual_stages > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {blocks[1]}"
        if blocks[0] < blocks[1]:
            yield "--account-for-embedding-in-pipeline-split"
        if blocks[-1] < blocks[1]:
            yield "--account-for-loss-in-pipeline-split"
    elif mesh.pipeline > 1 and len(set(blocks)) > 1:
        yield f"--decoder-first-pipeline-num-layers {blocks[0]}"
        yield f"--decoder-last-pipeline-num-layers {blocks[-1]}"
    if mesh.context > 1:
        yield f"--context-parallel-size {mesh.context}"
    if mesh.expert > 1:
        yield f"--expert-model-parallel-size {mesh.expert}"
        if mesh.tensor > 1:
            # By default tensor ranks divide each expert; a plan's expert ranks hold whole ones.
            yield f"--expert-tensor-parallel-size {mesh.expert_tensor}"
    if mesh.tensor > 1 and mesh.sequence_parallel:
        yield "--sequence-parallel"


def _megatron_sharding(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the flags of sharding; messages between copies overlap, as the plan assumes."""
    zero = wanted.plan.zero
    if wanted.data * wanted.plan.mesh.context > 1:
        yield "--overlap-grad-reduce"
        if zero:
            yield "--overlap-param-gather"
    if zero:
        yield "--use-distributed-optimizer"
    if zero in (2, 3):
        sharded = "optim_grads" if zero == 2 else "optim_grads_params"
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {sharded}"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"


def recompute_flags(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield the flags of recomputation."""
    if len(wanted.recomputes) > 1:
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {_full_each(wanted)}"
    elif recompute_of(wanted) == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif recompute_of(wanted) == "selective":
        yield "--recompute-granularity selective"
        if modules := " ".join(_recomputed_modules(wanted)):
            yield f"--recompute-modules {modules}"


def _recomputed_modules(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield modules that are named, or what is cheap to make again and the model has."""
    a = wanted.model.architecture
    for option in wanted.plan.framework.split("+"):
        if option.startswith("recompute-"):
            yield option.removeprefix("recompute-").replace("-", "_")
    if "cheap-recompute" in wanted.plan.framework.split("+"):
        yield "layernorm"
        if a is not None and a.latent is not None:
            yield "mla_up_proj"
        if a is not None and a.experts is not None:
            yield "moe_act"


_OPTIONS = {
    "deepep": ("--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"),
    "expert-overlap": ("--overlap-moe-expert-parallel-comm",),
    "shared-expert-overlap": ("--moe-shared-expert-overlap",),
    "ulysses": ("--cp-comm-type a2a",),
    "gathered-context": ("--cp-comm-type all_gather",),
    "tp-overlap": ("--tp-comm-overlap",),
    "narrow-gradients": ("--grad-reduce-in-bf16",),
}
"""Flags for the kernels and exchanges of a plan's framework, where the plan has those."""
_OPTIONS_OF: dict[str, Axis | None] = {
    "ulysses": "context",
    "gathered-context": "context",
    "tp-overlap": "tensor",
    "narrow-gradients": None,
}
"""Axis of an option, by default the experts'."""


def _megatron_options(wanted: FrameworkPlan) -> Iterator[str]:
    for option in wanted.plan.framework.split("+")[1:]:
        if option == "deepep":
            continue
        axis = _OPTIONS_OF.get(option, "expert")
        if axis is None or getattr(wanted.plan.mesh, axis) > 1:
            yield from _OPTIONS.get(option, ())
    a = wanted.model.architecture
    if a is None or a.experts is None:
        return
    yield "--moe-grouped-gemm"
    if dispatches_by_kernels(wanted):
        yield from _OPTIONS["deepep"]
    else:
        yield "--moe-token-dispatcher-type alltoall"


def dispatches_by_kernels(wanted: FrameworkPlan) -> bool:
    """Return True if DeepEP sends the tokens; its kernels send each once to a node."""
    named = "deepep" in wanted.plan.framework.split("+") and wanted.plan.mesh.expert > 1
    return named or wanted.plan.hierarchical_all_to_all is not None


def _megatron_training(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield optimizer and learning rates; Megatron also exempts vectors from weight decay."""
    t = wanted.plan.training
    yield "--optimizer adam"
    yield f"--lr {t.learning_rate!r}"
    yield f"--adam-beta1 {t.beta1!r}"
    yield f"--adam-beta2 {t.beta2!r}"
    yield f"--adam-eps {t.epsilon!r}"
    yield f"--weight-decay {t.weight_decay!r}"
    yield f"--clip-grad {t.clip_norm!r}"
    if t.warmup_steps:
        # Its first step has the initial rate, the plan's the first part of the way up.
        yield f"--lr-warmup-init {t.learning_rate / t.warmup_steps!r}"
        yield f"--lr-warmup-iters {t.warmup_steps}"
    style = {"wsd": "WSD"}.get(t.rate_schedule, t.rate_schedule)
    yield f"--lr-decay-style {style}"
    if wanted.falls:
        yield f"--lr-decay-iters {t.rate_steps}"
        yield f"--min-lr {t.floor * t.learning_rate!r}"
    if t.rate_schedule == "wsd":
        yield "--lr-wsd-decay-style linear"
        yield f"--lr-wsd-decay-iters {t.decay_steps}"


def deepspeed_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield further properties of a plan that Megatron-DeepSpeed does not support."""
    plan = wanted.plan
    yield from obstacles(wanted)
    yield from degrees_above(wanted, context=1, expert=1)
    if plan.zero > 1:
        yield f"ZeRO-{plan.zero}"
    if plan.precision not in ("bf16", "fp16", "fp32"):
        yield f"precision {plan.precision}"
    if len(set(wanted.blocks)) > 1:
        yield f"stages of {', '.join(map(str, wanted.blocks))} blocks"


def deepspeed_text(wanted: FrameworkPlan) -> str:
    """Return the flags of Megatron-DeepSpeed: its own scripts, with ZeRO by DeepSpeed."""
    dropped = ("--sequence-parallel", "--overlap-", "--use-distributed-optimizer", "--moe-")
    lines = [line for line in text(wanted).splitlines() if not line.startswith(dropped)]
    return "\n".join([*lines, "--deepspeed", f"--zero-stage {wanted.plan.zero}"]) + "\n"


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    steps = wanted.plan.training.warmup_steps * wanted.recipe
    if orders_kernels(wanted) and not wanted.has_job:
        yield "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment, before Blackwell"
    if steps > 1:
        yield f"rates of the first {steps} steps lie below the plan's, by less than 1/{steps}"
    yield from fused_instead(wanted)


def orders_kernels(wanted: FrameworkPlan) -> bool:
    """Return whether Megatron wants CUDA_DEVICE_MAX_CONNECTIONS=1 on devices before Blackwell."""
    mesh = wanted.plan.mesh
    return mesh.tensor * mesh.context > 1 and wanted.plan.zero < 2


def fused_instead(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield that blocks which are compiled in the plan have kernels of its own instead."""
    if wanted.plan.compile == "block":
        yield "blocks are not compiled there: its own fused kernels take the place"
