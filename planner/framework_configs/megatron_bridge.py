"""Megatron-Bridge 0.6, as overrides of a recipe (YAML)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Lora
from meshwright.planner.framework_configs import megatron
from meshwright.planner.framework_configs.exportable_plan import FrameworkPlan, recompute_of
from meshwright.planner.framework_configs.fine_tuners import EVERY_LINEAR


def obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties of a plan that it does not support: those of Megatron-LM, and FSDP."""
    yield from megatron.obstacles(wanted)
    if wanted.plan.zero in (2, 3):
        yield f"ZeRO-{wanted.plan.zero}"
    if wanted.plan.document_len is not None and wanted.plan.micro_batch > 1:
        yield "packed samples in micro-batches of several; plan with --fix micro_batch=1"
    lora = wanted.plan.training.lora
    if lora is not None and lora.packs_weights:
        yield f"frozen weights in {lora.weights}"
    if lora is not None and EVERY_LINEAR not in lora.targets:
        unknown = set(lora.targets) - set(_PEFT_MODULES)
        if unknown:
            yield f"adapters beside {', '.join(sorted(unknown))}"


def text(wanted: FrameworkPlan) -> str:
    """Return the overrides."""
    plan, t = wanted.plan, wanted.plan.training
    copies = wanted.data * plan.mesh.context > 1
    config: dict[str, Any] = {
        "model": _model(wanted),
        "train": {
            "micro_batch_size": plan.micro_batch,
            "global_batch_size": plan.global_batch,
        },
        "dataset": {"seq_length": plan.seq_len},
        "ddp": {
            "use_distributed_optimizer": plan.zero > 0,
            "overlap_grad_reduce": copies,
            "overlap_param_gather": copies and plan.zero > 0,
        },
        "optimizer": {
            "optimizer": "adam",
            "lr": t.learning_rate,
            "min_lr": t.floor * t.learning_rate if wanted.falls else t.learning_rate,
            "adam_beta1": t.beta1,
            "adam_beta2": t.beta2,
            "adam_eps": t.epsilon,
            "weight_decay": t.weight_decay,
            "clip_grad": t.clip_norm,
            "use_distributed_optimizer": plan.zero > 0,
        },
        "scheduler": _rates(wanted),
        "mixed_precision": _PRECISIONS[_recipe(plan)],
    }
    if t.lora is not None:
        config["peft"] = _peft(t.lora)
    if not wanted.recipe:
        config["optimizer"] = {"use_distributed_optimizer": plan.zero > 0}
        del config["scheduler"]
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "fp32": None,
}


_PEFT_MODULES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}
"""Its products by those of models of transformers; queries, keys and values are one, as are gate
and up."""


def _peft(lora: Lora) -> dict[str, Any]:
    """Return the section of adapters."""
    every = EVERY_LINEAR in lora.targets
    named = [_PEFT_MODULES[target] for target in lora.targets if not every]
    return {
        "_target_": "megatron.bridge.peft.lora.LoRA",
        "target_modules": list(dict.fromkeys(named or _PEFT_MODULES.values())),
        "dim": lora.rank,
        "alpha": round(lora.alpha),
        "dropout": 0.0,
    }


def _recipe(plan: Plan) -> str:
    """Return the precision, or in fp8 its scales."""
    return plan.scales if plan.precision == "fp8" else plan.precision


def _model(wanted: FrameworkPlan) -> dict[str, Any]:
    """Return degrees, stages and recomputation."""
    plan, mesh, blocks = wanted.plan, wanted.plan.mesh, wanted.blocks
    config: dict[str, Any] = {
        "seq_length": plan.seq_len,
        "tensor_model_parallel_size": mesh.tensor,
        "pipeline_model_parallel_size": mesh.pipeline,
        "context_parallel_size": mesh.context,
        "expert_model_parallel_size": mesh.expert,
        "sequence_parallel": mesh.tensor > 1 and mesh.sequence_parallel,
    }
    if "fp8-attention" in plan.framework.split("+"):
        config["fp8_dot_product_attention"] = True
    if mesh.expert > 1:
        config["expert_tensor_parallel_size"] = mesh.expert_tensor
    a = wanted.model.architecture
    if a is not None and a.experts is not None:
        config["moe_grouped_gemm"] = True
        by_kernels = megatron.dispatches_by_kernels(wanted)
        config["moe_token_dispatcher_type"] = "flex" if by_kernels else "alltoall"
        if by_kernels:
            config["moe_flex_dispatcher_backend"] = "deepep"
    layout = megatron.layout_of(wanted)
    if layout is not None:
        config["pipeline_model_parallel_layout"] = layout
    elif plan.virtual_stages > 1:
        config["virtual_pipeline_model_parallel_size"] = plan.virtual_stages
        config["account_for_embedding_in_pipeline_split"] = blocks[0] < blocks[1]
        config["account_for_loss_in_pipeline_split"] = blocks[-1] < blocks[1]
    elif mesh.pipeline > 1 and len(set(blocks)) > 1:
        config["num_layers_in_first_pipeline_stage"] = blocks[0]
        config["num_layers_in_last_pipeline_stage"] = blocks[-1]
    flags = dict(
        line.removeprefix("--").split(maxsplit=1) for line in megatron.recompute_flags(wanted)
    )
    names = {"granularity": None, "method": None, "num-layers": None} | {
        name.removeprefix("recompute-"): value for name, value in flags.items()
    }
    if recompute_of(wanted) != "none" or len(wanted.recomputes) > 1:
        count = names["num-layers"]
        config["recompute_granularity"] = names["granularity"]
        config["recompute_method"] = names["method"]
        config["recompute_num_layers"] = None if count is None else int(count)
        if modules := names.get("modules"):
            config["recompute_modules"] = modules.split()
    else:
        config["recompute_granularity"] = None
    return config


def _rates(wanted: FrameworkPlan) -> dict[str, Any]:
    """Return the learning rates."""
    t = wanted.plan.training
    config: dict[str, Any] = {
        "lr_decay_style": {"wsd": "WSD"}.get(t.rate_schedule, t.rate_schedule),
        "lr_warmup_iters": t.warmup_steps,
        "lr_warmup_init": t.learning_rate / t.warmup_steps if t.warmup_steps else 0.0,
    }
    if wanted.falls:
        config["lr_decay_iters"] = t.rate_steps
    if t.rate_schedule == "wsd":
        config |= {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": t.decay_steps}
    return config


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    plan = wanted.plan
    yield "the recipe of the model, whose overrides these are (--config_file)"
    if plan.document_len is not None:
        specs = f"PackedSequenceSpecs(packed_sequence_size={plan.seq_len})"
        yield f"packed samples: FinetuningDatasetConfig(packed_sequence_specs={specs})"
    if plan.precision == "fp8" and plan.scales == "tensorwise":
        yield "first_last_layers_bf16: false, or the first and the last block stay in 16 bits"
    steps = plan.training.warmup_steps * wanted.recipe
    if steps > 1:
        yield f"rates of the first {steps} steps lie below the plan's, by less than 1/{steps}"
    yield from megatron.fused_instead(wanted)
