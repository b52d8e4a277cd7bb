"""Configurations of the frameworks whose settings fit in one short file.

Hugging Face transformers 5, as its TrainingArguments (YAML; HfArgumentParser reads it).

DeepSpeed 0.19, as its configuration (JSON).

accelerate 1.15, as the configuration of its launcher (YAML).

nanotron 0.4, as its configuration (YAML) but for model, data and number of steps.

FSDP2 of torch 2.6, as a Python module that shards a model and makes its optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.planner.framework_configs import fine_tuners
from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    compile_text,
    degrees_above,
    of_fsdp,
    of_one_kind,
    other_schedule,
    rate_text,
    recompute_of,
    script_text,
)
from meshwright.planner.frameworks.stage_rules import by_products
from meshwright.planner.schedules import PLAIN, schedule_of


def transformers_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that it does not support."""
    if fine_tuners.trains_working(wanted):
        yield "FSDP of weights that are trained in 16 bits, which the script loads"
    yield from degrees_above(wanted, tensor=1, pipeline=1, context=1, expert=1)
    yield from of_fsdp(wanted)
    if wanted.plan.zero and wanted.plan.mesh.data_replicate > 1:
        yield "sharding within groups of replicas"
    yield from of_one_kind(wanted)
    yield from fine_tuners.optimizer_obstacles(wanted, fine_tuners.TRANSFORMERS_OPTIMIZERS)


_LAYOUT_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "torch_compile",
)
"""Keys that are no part of an optimizer's recipe."""


def transformers_text(wanted: FrameworkPlan) -> str:
    """Return the arguments."""
    plan, t = wanted.plan, wanted.plan.training
    config: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "optim": fine_tuners.TRANSFORMERS_OPTIMIZERS[t.optimizer],
        "learning_rate": t.learning_rate,
        "adam_beta1": t.beta1,
        "adam_beta2": t.beta2,
        "adam_epsilon": t.epsilon,
        "weight_decay": t.weight_decay,
        "max_grad_norm": t.clip_norm,
        **fine_tuners.transformers_rates(wanted),
        "gradient_checkpointing": not plan.zero and recompute_of(wanted) == "full",
        "torch_compile": plan.compile == "block",
    }
    if not wanted.recipe:
        config = {key: value for key, value in config.items() if key in _LAYOUT_KEYS}
    if plan.zero:
        config["fsdp"] = True
        config["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": plan.zero == 3,
            "cpu_offload": plan.offload == "parameters",
            "activation_checkpointing": recompute_of(wanted) == "full",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def transformers_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    plan, steps = wanted.plan, wanted.plan.training.warmup_steps
    if not wanted.has_job:
        yield f"torchrun starts {plan.mesh.devices} ranks"
    yield f"samples have {plan.seq_len} tokens"
    lora = plan.training.lora
    if lora is not None:
        yield f"adapters: {fine_tuners.peft_text(lora)}"
    if lora is not None and lora.packs_weights:
        yield f"frozen weights: {fine_tuners.quantization_text(lora, sharded=plan.zero > 0)}"
    if plan.training.optimizer != "adamw" and not wanted.recipe:
        yield f"optim: {fine_tuners.TRANSFORMERS_OPTIMIZERS[plan.training.optimizer]}"
    if steps:
        yield f"rates of the first {steps} steps lie 1/{steps} of the highest below the plan's"
    if wanted.falls:
        yield f"training ends at step {plan.training.rate_steps}, where its learning rate does"


def deepspeed_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that the framework does not support."""
    plan = wanted.plan
    yield from degrees_above(wanted, tensor=1, pipeline=1, context=1, expert=1)
    if plan.offload == "parameters" and plan.zero != 3:
        yield f"parameters on the host with ZeRO-{plan.zero}"
    if plan.mesh.data_replicate > 1 and plan.zero:
        yield "sharding within groups of replicas"
    yield from of_one_kind(wanted)


def deepspeed_text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
    plan, t = wanted.plan, wanted.plan.training
    zero: dict[str, object] = {"stage": plan.zero, "overlap_comm": True}
    if plan.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    recipe = {
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
    }
    text = json.dumps(
        {
            "train_batch_size": plan.global_batch,
            "train_micro_batch_size_per_gpu": plan.micro_batch,
            "gradient_accumulation_steps": plan.micro_batches,
            **(recipe if wanted.recipe else {}),
            "bf16": {"enabled": plan.precision == "bf16"},
            "fp16": {"enabled": plan.precision == "fp16"},
            "zero_optimization": zero,
        },
        indent=2,
    )
    return text + "\n"


def deepspeed_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    if recompute_of(wanted) == "full":
        yield "every block is recomputed: model.gradient_checkpointing_enable()"
    if wanted.changes_rate:
        # Its own schedulers begin two steps later, and none has a floor with each fall.
        yield f"{rate_text(wanted)}; as lr_scheduler of deepspeed.initialize"
    yield from script_text(wanted)
    yield from compile_text(wanted)


def accelerate_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that the framework does not support."""
    plan = wanted.plan
    yield from degrees_above(wanted, pipeline=1, expert=1)
    yield from of_fsdp(wanted)
    if plan.zero == 0 and plan.mesh.tensor * plan.mesh.context > 1:
        yield "replicas with tensor or context parallelism"
    if plan.mesh.tensor > 1 and plan.mesh.sequence_parallel:
        yield "tensor parallelism that divides the sequence"
    counts = wanted.ranks_of_nodes
    if len(set(counts)) > 1:
        yield (
            f"{plan.mesh.devices} ranks on nodes of {counts[0]}; it starts as many ranks on each"
        )
    yield from of_one_kind(wanted)


def accelerate_text(wanted: FrameworkPlan) -> str:
    """Return the configuration."""
    plan, mesh = wanted.plan, wanted.plan.mesh
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU'}",
        "mixed_precision: " + ('"no"' if plan.precision == "fp32" else plan.precision),
        f"num_machines: {len(wanted.ranks_of_nodes)}",
        f"num_processes: {mesh.devices}",
    ]
    if not plan.zero:
        return "\n".join(lines) + "\n"
    recomputed = str(recompute_of(wanted) == "full").lower()
    lines += [
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {str(plan.zero == 3).lower()}",
        f"  fsdp_offload_params: {str(plan.offload == 'parameters').lower()}",
        f"  fsdp_activation_checkpointing: {recomputed}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        "parallelism_config:",
        f"  parallelism_config_dp_replicate_size: {mesh.data_replicate}",
        f"  parallelism_config_dp_shard_size: {mesh.data_shard}",
        f"  parallelism_config_tp_size: {mesh.tensor}",
        f"  parallelism_config_cp_size: {mesh.context}",
    ]
    return "\n".join(lines) + "\n"


def accelerate_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    plan, t = wanted.plan, wanted.plan.training
    if len(wanted.ranks_of_nodes) > 1 and not wanted.has_job:
        yield "each node is started with --machine_rank, --main_process_ip and --main_process_port"
    if not plan.zero and recompute_of(wanted) == "full":
        yield "every block is recomputed: model.gradient_checkpointing_enable()"
    yield (f"micro-batches of {plan.micro_batch}, gradient_accumulation_steps={plan.micro_batches}")
    yield (
        f"AdamW(lr={t.learning_rate:g}, betas=({t.beta1:g}, {t.beta2:g}), eps={t.epsilon:g}, "
        f"weight_decay={t.weight_decay:g})"
    )
    if t.clip_norm:
        yield f"accelerator.clip_grad_norm_(model.parameters(), {t.clip_norm:g})"
    if wanted.changes_rate:
        yield rate_text(wanted)
    yield from script_text(wanted)
    yield from compile_text(wanted)


def nanotron_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that the framework does not support."""
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


def nanotron_text(wanted: FrameworkPlan) -> str:
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
            "learning_rate_scheduler": _nanotron_rates(wanted),
        },
    }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def _nanotron_rates(wanted: FrameworkPlan) -> dict[str, Any]:
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


def nanotron_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    steps = wanted.plan.training.warmup_steps
    yield "model.model_config, data_stages and tokens.train_steps"
    if steps:
        yield f"rates of the first {steps} steps lie 1/{steps} of the highest below the plan's"
    if wanted.plan.compile == "block":
        yield "blocks are not compiled there"


_TYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def fsdp_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that the framework does not support."""
    plan = wanted.plan
    yield from degrees_above(wanted, tensor=1, context=1, expert=1, pipeline=1)
    yield from of_fsdp(wanted)
    if plan.zero == 0 and wanted.data > 1:
        yield "replicas that divide nothing (ZeRO-0): that is DistributedDataParallel"
    if plan.precision not in _TYPES:
        yield f"precision {plan.precision}"
    if "selective" in wanted.recomputes:
        yield "selective recompute: a checkpoint recomputes all of a block"


def fsdp_text(wanted: FrameworkPlan) -> str:
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


def fsdp_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
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
