"""FSDP2 of torch 2.6, as a Python module that shards a model and makes its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    compile_text,
    degrees_above,
    of_fsdp,
    rate_text,
)

_TYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan the framework does not support."""
    plan = wanted.plan
    yield from degrees_above(wanted, tensor=1, context=1, expert=1, pipeline=1)
    yield from of_fsdp(wanted)
    if plan.zero == 0 and wanted.data > 1:
        yield "replicas that divide nothing (ZeRO-0): that is DistributedDataParallel"
    if plan.precision not in _TYPES:
        yield f"precision {plan.precision}"
    if "selective" in wanted.recomputes:
        yield "selective recompute: a checkpoint recomputes all of a block"


def text(wanted: FrameworkPlan) -> str:
    """Return the module."""
    plan, t = wanted.plan, wanted.plan.training
    kinds = {name: layer.kind for name, layer in wanted.model.chain}
    blocks = [
        item
        for stage in plan.stages
        for item in stage.layers
        if kinds[item.layer] not in ("embedding", "head")
    ]
    again = [index for index, item in enumerate(blocks) if item.recompute == "full"]
    return f'''"""How {plan.model.name} is trained by {plan.mesh.devices} ranks with FSDP2."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard

REPLICAS, SHARDS = {plan.mesh.data_replicate}, {plan.mesh.data_shard}
SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = {plan.seq_len}, {plan.micro_batch}, {plan.micro_batches}
RECOMPUTED = {_spans(again)}
CLIP_NORM = {t.clip_norm!r}


def parallelize(model, blocks, device="cuda"):
    """Shard a model in place; `blocks` is the torch.nn.ModuleList of its {len(blocks)} blocks."""
    for index in RECOMPUTED:
        blocks[index] = checkpoint_wrapper(blocks[index])
    if REPLICAS * SHARDS == 1:
        return model
    mesh = init_device_mesh(device, (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    settings = {{
        "mesh": mesh["shard"] if REPLICAS == 1 else mesh,
        "reshard_after_forward": {plan.zero == 3},
        "mp_policy": MixedPrecisionPolicy({_TYPES[plan.precision]}, torch.float32),
        "offload_policy": {"CPUOffloadPolicy()" if plan.offload != "none" else "OffloadPolicy()"},
    }}
    for block in blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def optimizer(model):
    """Return AdamW, without weight decay on norms and biases."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return torch.optim.AdamW(
        [{{"params": matrices}}, {{"params": vectors, "weight_decay": 0.0}}],
        lr={t.learning_rate!r},
        betas=({t.beta1!r}, {t.beta2!r}),
        eps={t.epsilon!r},
        weight_decay={t.weight_decay!r},
        fused=True,
    )
'''


def _spans(numbers: list[int]) -> str:
    """Return an expression of numbers: `range(4)` where they are one row."""
    if not numbers:
        return "()"
    whole = list(range(numbers[0], numbers[-1] + 1))
    return f"range({numbers[0]}, {numbers[-1] + 1})" if numbers == whole else repr(tuple(numbers))


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield what of a plan is set elsewhere."""
    plan = wanted.plan
    yield (
        f"each of {wanted.data} ranks takes MICRO_BATCHES={plan.micro_batches} forwards of "
        f"MICRO_BATCH={plan.micro_batch} samples of SEQ_LEN={plan.seq_len} tokens a step"
    )
    if plan.training.clip_norm:
        yield "torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)"
    if wanted.changes_rate:
        yield rate_text(wanted)
    yield from compile_text(wanted)
