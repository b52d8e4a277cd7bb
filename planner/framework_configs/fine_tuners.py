"""Configurations of programs that fine-tune models of transformers, and of torchtune.

TRL 1.16, as the file of `trl sft --config`, or of `trl dpo`, `reward` and `grpo` (YAML; TrlParser
reads it): TrainingArguments with a ModelConfig.

axolotl 0.19, LLaMA-Factory 0.9 and torchtune 0.6, as their files (YAML) but for model and data.

Adapters and packed weights have words in each; what has none is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Lora, Optimizer
from meshwright.planner.framework_configs.exportable_plan import (
    FrameworkPlan,
    degrees_above,
    of_fsdp,
    of_one_kind,
    recompute_of,
)

SAYS = frozenset({"lora", "optimizer", "master_weights"})
"""Fields of a plan's training that these files contain."""
EVERY_LINEAR = "all-linear"
PROMPT_LEN = 512
"""Tokens of a prompt at most, where TRL generates an answer."""
TRANSFORMERS_OPTIMIZERS: Mapping[Optimizer, str] = {
    "adamw": "adamw_torch_fused",
    "adamw-8bit": "adamw_bnb_8bit",
    "adamw-8bit-paged": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "sgd": "sgd",
}
"""Names of optimizers in TrainingArguments (transformers, training_args.py, OptimizerNames)."""
TORCHTUNE_OPTIMIZERS: Mapping[Optimizer, str] = {
    "adamw": "torch.optim.AdamW",
    "adamw-8bit": "torchao.optim.AdamW8bit",
    "adamw-8bit-paged": "bitsandbytes.optim.PagedAdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.SGD",
}
_PACKED = {"nf4": 4, "int8": 8}
"""Bits as bitsandbytes has them."""


def adapter_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties that files of programs around transformers cannot express."""
    plan, lora = wanted.plan, wanted.plan.training.lora
    yield from degrees_above(wanted, tensor=1, pipeline=1, context=1, expert=1)
    yield from of_fsdp(wanted)
    if plan.zero and plan.mesh.data_replicate > 1:
        yield "sharding within groups of replicas"
    yield from of_one_kind(wanted)
    yield from optimizer_obstacles(wanted, TRANSFORMERS_OPTIMIZERS)
    if lora is not None and lora.weights not in ("full", *_PACKED):
        yield f"frozen weights in {lora.weights}, which bitsandbytes does not pack"


def optimizer_obstacles(wanted: FrameworkPlan, words: Mapping[Optimizer, str]) -> Iterator[str]:
    """Yield an optimizer that a framework has no word for."""
    if wanted.plan.training.optimizer not in words:
        yield f"optimizer {wanted.plan.training.optimizer}"


def peft_text(lora: Lora) -> str:
    """Return adapters as a script makes them with peft.

    >>> peft_text(Lora(rank=8, alpha=16.0, targets=("q_proj",)))
    "peft.LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj'], task_type='CAUSAL_LM')"
    """
    targets = EVERY_LINEAR if EVERY_LINEAR in lora.targets else list(lora.targets)
    return (
        f"peft.LoraConfig(r={lora.rank}, lora_alpha={lora.alpha:g}, target_modules={targets!r}, "
        "task_type='CAUSAL_LM')"
    )


def quantization_text(lora: Lora, *, sharded: bool) -> str:
    """Return packed weights as a script loads them with bitsandbytes.

    FSDP divides what is stored in the type of the computation alone.
    """
    if lora.weights == "int8":
        return "transformers.BitsAndBytesConfig(load_in_8bit=True)"
    storage = ", bnb_4bit_quant_storage='bfloat16'" if sharded else ""
    return (
        "transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
        f"bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype='bfloat16'{storage})"
    )


def transformers_rates(wanted: FrameworkPlan) -> dict[str, Any]:
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


def _training_arguments(wanted: FrameworkPlan) -> dict[str, Any]:
    """Return the TrainingArguments, by the names that all three share."""
    plan, t = wanted.plan, wanted.plan.training
    config: dict[str, Any] = {
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": plan.precision == "bf16" and not trains_working(wanted),
        "fp16": plan.precision == "fp16",
        "gradient_checkpointing": not plan.zero and recompute_of(wanted) == "full",
        "torch_compile": plan.compile == "block",
        "optim": TRANSFORMERS_OPTIMIZERS[t.optimizer],
    }
    if wanted.recipe:
        config |= {
            "learning_rate": t.learning_rate,
            "weight_decay": t.weight_decay,
            "adam_beta1": t.beta1,
            "adam_beta2": t.beta2,
            "adam_epsilon": t.epsilon,
            "max_grad_norm": t.clip_norm,
            **transformers_rates(wanted),
        }
    return config


def trains_working(wanted: FrameworkPlan) -> bool:
    """Return whether FSDP would turn weights that are trained in 16 bits into fp32."""
    return wanted.plan.training.master_weights == "none" and wanted.plan.zero > 0


def _fsdp(wanted: FrameworkPlan) -> dict[str, Any]:
    """Return the settings by which FSDP2 divides states."""
    plan, lora = wanted.plan, wanted.plan.training.lora
    return {
        "reshard_after_forward": plan.zero == 3,
        # Ranks but the first would wait for weights that are packed as they are loaded.
        "cpu_ram_efficient_loading": lora is None or not lora.packs_weights,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": recompute_of(wanted) == "full",
    }


def trl_text(wanted: FrameworkPlan) -> str:
    """Return the file of `trl sft --config`."""
    plan, lora = wanted.plan, wanted.plan.training.lora
    config = {
        "per_device_train_batch_size": plan.micro_batch,
        **_training_arguments(wanted),
        **_trl_samples(plan),
        "dtype": "bfloat16" if plan.precision == "bf16" else "auto",
        "attn_implementation": "flash_attention_2",
    }
    if plan.zero:
        config["fsdp"] = True
        config["fsdp_config"] = {
            "version": 2,
            "cpu_offload": plan.offload == "parameters",
            **_fsdp(wanted),
        }
    if lora is not None:
        config |= {
            "use_peft": True,
            "lora_r": lora.rank,
            "lora_alpha": round(lora.alpha),
            "lora_dropout": 0.0,
            "lora_target_modules": list(lora.targets),
            **_trl_bits(lora, sharded=plan.zero > 0),
        }
    return _yaml(config)


def _trl_samples(plan: Plan) -> dict[str, Any]:
    """Return the lengths of samples, and what tells one of TRL's commands from another."""
    match plan.training.objective:
        case "sft":
            return {"max_length": plan.seq_len, "packing": plan.document_len is not None}
        case "dpo":
            return {"max_length": plan.seq_len, "loss_type": ["sigmoid"]}
        case "reward":
            return {"max_length": plan.seq_len, "center_rewards_coefficient": None}
        case "grpo":  # a reference model is there where beta is not 0
            return {"max_completion_length": plan.seq_len - _prompt_len(plan), "beta": 0.04}


def _prompt_len(plan: Plan) -> int:
    """Return the tokens of a prompt, of those of a sample."""
    return min(PROMPT_LEN, plan.seq_len // 2)


def _trl_bits(lora: Lora, *, sharded: bool) -> dict[str, Any]:
    bits = _PACKED.get(lora.weights)
    if bits is None:
        return {}
    if bits == 8:
        return {"load_in_8bit": True}
    storage = {"bnb_4bit_quant_storage": "bfloat16"} if sharded else {}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
        **storage,
    }


def axolotl_text(wanted: FrameworkPlan) -> str:
    """Return the file of `axolotl train`."""
    plan, lora = wanted.plan, wanted.plan.training.lora
    shared = _training_arguments(wanted)
    shared["optimizer"] = shared.pop("optim")
    if "lr_scheduler_type" in shared:
        shared["lr_scheduler"] = shared.pop("lr_scheduler_type")
    config = {
        "micro_batch_size": plan.micro_batch,
        **shared,
        "sequence_len": plan.seq_len,
        "sample_packing": plan.document_len is not None,
        "attn_implementation": "flash_attention_2",
    }
    if trains_working(wanted):
        config["bf16"] = "full"
    if plan.training.objective == "reward":
        config["reward_model"] = True
    elif plan.training.objective != "sft":
        config["rl"] = plan.training.objective
    if lora is not None:
        bits = _PACKED.get(lora.weights)
        every = EVERY_LINEAR in lora.targets
        config |= {
            "adapter": "qlora" if bits == 4 else "lora",
            "load_in_4bit": bits == 4,
            "load_in_8bit": bits == 8,
            "lora_r": lora.rank,
            "lora_alpha": round(lora.alpha),
            "lora_dropout": 0.0,
            **(
                {"lora_target_linear": True}
                if every
                else {"lora_target_modules": list(lora.targets)}
            ),
        }
    if plan.zero:
        config["fsdp_version"] = 2
        config["fsdp_config"] = {"offload_params": plan.offload == "parameters", **_fsdp(wanted)}
    return _yaml(config)


def llama_factory_text(wanted: FrameworkPlan) -> str:
    """Return the file of `llamafactory-cli train`."""
    plan, lora = wanted.plan, wanted.plan.training.lora
    shared = _training_arguments(wanted)
    # Its own word: blocks are recomputed without it (hparams/model_args.py).
    shared["disable_gradient_checkpointing"] = not shared.pop("gradient_checkpointing")
    config = {
        "stage": {"reward": "rm"}.get(plan.training.objective, plan.training.objective),
        "do_train": True,
        "finetuning_type": "full" if lora is None else "lora",
        "per_device_train_batch_size": plan.micro_batch,
        **shared,
        "cutoff_len": plan.seq_len,
        "packing": plan.document_len is not None,
        "flash_attn": "fa2",
    }
    if lora is None and plan.precision == "bf16":
        config["pure_bf16"] = True
    if plan.zero:
        config["fsdp"] = True
        config["fsdp_config"] = {"cpu_offload": plan.offload == "parameters", **_fsdp(wanted)}
    if lora is not None:
        every = EVERY_LINEAR in lora.targets
        config |= {
            "lora_rank": lora.rank,
            "lora_alpha": round(lora.alpha),
            "lora_dropout": 0.0,
            "lora_target": "all" if every else ",".join(lora.targets),
        }
        if bits := _PACKED.get(lora.weights):
            config |= {"quantization_bit": bits, "quantization_method": "bnb"}
            config |= {"double_quantization": True} if bits == 4 else {}
    return _yaml(config)


def llama_factory_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties that it does not support: its reinforcement learning is PPO."""
    yield from adapter_obstacles(wanted)
    if wanted.plan.training.objective == "grpo":
        yield "objective grpo"


def trl_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere, and TRL's command that reads the file."""
    objective = wanted.plan.training.objective
    if objective != "sft" and not wanted.has_job:
        yield f"trl {objective} --config, in place of trl sft"
    if objective == "grpo":
        yield f"prompts have at most {_prompt_len(wanted.plan):,} tokens"
    yield from outside(wanted)


def outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    plan = wanted.plan
    if plan.training.objective == "grpo":
        yield "generation of answers, which is no part of the step that was planned"
    yield "the model and the data set, which the same file names"
    if not wanted.has_job:
        yield f"torchrun or accelerate starts {plan.mesh.devices} ranks"
    lora = plan.training.lora
    if lora is not None and lora.alpha != round(lora.alpha):
        yield f"lora_alpha: {lora.alpha:g} is rounded"


TORCHTUNE_ATTENTION = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "o_proj": "output_proj",
}
_TORCHTUNE_MLP = {"gate_proj", "up_proj", "down_proj"}


def torchtune_obstacles(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield properties that torchtune's recipes do not support."""
    plan, lora = wanted.plan, wanted.plan.training.lora
    yield from degrees_above(wanted, tensor=1, pipeline=1, context=1, expert=1)
    yield from of_fsdp(wanted)
    yield from of_one_kind(wanted)
    yield from optimizer_obstacles(wanted, TORCHTUNE_OPTIMIZERS)
    if plan.precision == "fp16":
        yield "precision fp16"
    if plan.zero and plan.mesh.data_replicate > 1:
        yield "sharding within groups of replicas"
    if not plan.zero and wanted.data > 1:
        yield "replicas: its distributed recipes divide all states"
    if lora is None:
        return
    if lora.weights not in ("full", "nf4"):
        yield f"frozen weights in {lora.weights}"
    unknown = set(lora.targets) - {EVERY_LINEAR, *TORCHTUNE_ATTENTION, *_TORCHTUNE_MLP}
    if unknown:
        yield f"adapters beside {', '.join(sorted(unknown))}"
    if 0 < len(_TORCHTUNE_MLP.intersection(lora.targets)) < len(_TORCHTUNE_MLP):
        yield "adapters beside some products of the feed-forward and not beside others"


def torchtune_text(wanted: FrameworkPlan) -> str:
    """Return overrides of a recipe's configuration."""
    plan, t = wanted.plan, wanted.plan.training
    optimizer: dict[str, Any] = {"_component_": TORCHTUNE_OPTIMIZERS[t.optimizer]}
    if wanted.recipe:
        optimizer |= {"lr": t.learning_rate, "weight_decay": t.weight_decay}
    config: dict[str, Any] = {
        "batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "tokenizer": {"max_seq_len": plan.seq_len},
        "dataset": {"packed": plan.document_len is not None},
        "dtype": plan.precision,
        "enable_activation_checkpointing": recompute_of(wanted) == "full",
        "enable_activation_offloading": False,
        "compile": True,
        "optimizer": optimizer,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    }
    if plan.zero:
        config["fsdp_cpu_offload"] = plan.offload == "parameters"
        config["fsdp_reshard_after_forward"] = plan.zero == 3
    if t.lora is not None:
        every = EVERY_LINEAR in t.lora.targets
        attention = [
            theirs
            for name, theirs in TORCHTUNE_ATTENTION.items()
            if every or name in t.lora.targets
        ]
        config["model"] = {
            "lora_attn_modules": attention,
            "apply_lora_to_mlp": every or bool(_TORCHTUNE_MLP.intersection(t.lora.targets)),
            "apply_lora_to_output": False,
            "lora_rank": t.lora.rank,
            "lora_alpha": t.lora.alpha,
            "lora_dropout": 0.0,
            "quantize_base": t.lora.weights == "nf4",
        }
    return _yaml(config)


def torchtune_outside(wanted: FrameworkPlan) -> Iterator[str]:
    """Yield settings of a plan that are made elsewhere."""
    lora = wanted.plan.training.lora
    kind = "full" if lora is None else "lora"
    ranks = wanted.plan.mesh.devices
    recipe = f"{kind}_finetune_{'single_device' if ranks == 1 else 'distributed'}"
    if wanted.has_job:
        yield f"the model and the data set, from the configuration of {recipe}"
    else:
        start = f"tune run --nproc_per_node {ranks} {recipe}"
        yield f"{start}, whose configuration names model and data"


def _yaml(config: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text
