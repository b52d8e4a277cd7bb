"""Configurations that were published, shortened: only figures, in each framework's own keys.

Each row says where it is from, the model, the cluster, what is written, and what it asks for by
hand: tensor, pipeline, context, expert, data, ZeRO, micro-batch, micro-batches.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import yaml


class Row(NamedTuple):
    """One published configuration."""

    source: str
    model: str | None
    """None: the configuration says it."""
    cluster: str
    text: str
    asks: tuple[int, ...]


# --- Megatron -------------------------------------------------------------------------------------

_BRIDGE = "Megatron-Bridge, performance summary, DGX-H100"
_FIGURES = (
    # source, model, GPUs, 8 bits, batch, micro-batch, sequence, tp, pp, cp, stages of a rank, ep
    (f"{_BRIDGE}, 0.3", "llama-3.1-70b", 64, 1, 256, 1, 8192, 4, 8, 1, 5, 1),
    (f"{_BRIDGE}, 0.3", "llama-3.1-405b", 1024, 1, 1536, 1, 8192, 8, 8, 2, 8, 1),
    (f"{_BRIDGE}, 0.3", "gpt-oss-120b", 64, 0, 1280, 1, 4096, 1, 4, 1, 1, 8),
    (f"{_BRIDGE}, 0.3", "qwen3-30b-a3b", 16, 1, 1024, 1, 4096, 1, 2, 1, 12, 8),
    (f"{_BRIDGE}, 0.4", "qwen3-30b-a3b", 16, 1, 1024, 1, 4096, 1, 1, 1, 1, 16),
    (f"{_BRIDGE}, 0.2", "llama-3.1-8b", 8, 1, 128, 1, 8192, 1, 1, 1, 1, 1),
    (f"{_BRIDGE}, 0.2", "llama-3.1-70b", 64, 1, 128, 1, 8192, 4, 8, 1, 5, 1),
    (f"{_BRIDGE}, 0.2", "llama-3.1-405b", 1024, 1, 512, 1, 8192, 8, 8, 2, 8, 1),
    (f"{_BRIDGE}, 0.2", "gpt-oss-120b", 64, 0, 512, 4, 4096, 1, 4, 1, 1, 8),
    (f"{_BRIDGE}, 0.2", "qwen3-30b-a3b", 16, 1, 512, 2, 4096, 1, 2, 1, 24, 8),
    (f"{_BRIDGE}, 0.1", "llama-3.1-8b", 8, 0, 128, 1, 8192, 1, 1, 1, 1, 1),
    (f"{_BRIDGE}, 0.1", "llama-3.1-70b", 64, 0, 128, 1, 8192, 4, 8, 1, 5, 1),
    ("Megatron-LM, train_llama3_8b_h100_fp8.sh", "llama-3-8b", 8, 1, 128, 1, 8192, 1, 1, 1, 1, 1),
    ("Megatron-LM, train_mixtral_8x7b_distributed.sh", "mixtral-8x7b", 64, 0, 256, 1, 4096,
     1, 4, 1, 1, 8),
    ("Megatron-LM, train_gpt3_175b_distributed.sh", "gpt3-175b", 1024, 0, 1536, 1, 2048,
     8, 16, 1, 1, 1),
    ("Narayanan et al. 2021, table 1", "gpt3-175b", 1024, 0, 1536, 1, 2048, 8, 12, 1, 1, 1),
    ("Llama 3 paper, table 4, 8,192 GPUs", "llama-3.1-405b", 8192, 0, 2048, 1, 8192,
     8, 16, 1, 1, 1),
    ("Llama 3 paper, table 4, 16,384 GPUs, long", "llama-3.1-405b", 16384, 0, 128, 1, 131072,
     8, 16, 16, 1, 1),
    ("Qwen 2.5 in Megatron-LM conversions", "qwen2.5-72b", 64, 0, 512, 1, 4096, 8, 4, 1, 1, 1),
    ("Megatron-LM, docs llama_mistral", "llama-2-70b", 64, 0, 512, 1, 4096, 8, 2, 1, 1, 1),
)  # fmt: skip


def _megatron(row: tuple[str, str, *tuple[int, ...]]) -> Row | None:
    source, model, gpus, fp8, batch, micro, seq, tp, pp, cp, virtual, ep = row
    data, left = divmod(gpus, tp * pp * cp)
    if left:
        return None
    flags = [
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {pp}",
        f"--context-parallel-size {cp}",
        f"--micro-batch-size {micro} --global-batch-size {batch} --seq-length {seq}",
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
        "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --train-iters 1000 --lr-warmup-iters 10",
    ]
    if tp > 1:
        flags.append("--sequence-parallel")
    if fp8:
        flags.append("--fp8-format hybrid")
    if virtual > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {virtual}")
    if ep > 1:
        flags.append(f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size 1")
    if model == "llama-3.1-405b":  # of 126 blocks
        flags.append("--account-for-embedding-in-pipeline-split")
        flags.append("--account-for-loss-in-pipeline-split")
    lines = ["#!/bin/bash", f"#SBATCH --nodes={gpus // 8}", "#SBATCH --gpus-per-node=8", "ARGS=("]
    lines += [f"  {flag}" for flag in flags]
    lines += [")", 'srun python pretrain_gpt.py "${ARGS[@]}" --log-interval 10', ""]
    text = "\n".join(lines)
    zero = 1 if data * cp > 1 else 0
    asks = (tp, pp, cp, ep, data, zero, micro, batch // (micro * data))
    return Row(source, model, f"{gpus // 8}x8xh100-sxm-80gb", text, asks)


MEGATRON = [row for row in map(_megatron, _FIGURES) if row]

# --- torchtitan -----------------------------------------------------------------------------------

_TITAN = (
    # source, name, flavor, GPUs, samples, tokens, shard, replicate, tp, pp, cp, ep, recompute
    ("0.2.2, llama3_8b.toml", "llama3", "8B", 8, 1, 8192, -1, 1, 1, 1, 1, 1, "selective"),
    ("0.2.2, llama3_70b.toml", "llama3", "70B", 256, 8, 8192, -1, 1, 8, 1, 1, 1, "full"),
    ("0.2.2, llama3_405b.toml", "llama3", "405B", 512, 2, 8192, -1, 1, 8, 1, 1, 1, "full"),
    ("0.2.2, deepseek_v3_16b.toml", "deepseek_v3", "16B", 8, 4, 4096, -1, 1, 1, 1, 1, 8,
     "selective"),
    ("0.2.2, deepseek_v3_671b.toml", "deepseek_v3", "671B", 512, 4, 4096, -1, 1, 1, 1, 1, 1,
     "selective"),
    ("0.2.2, qwen3_0.6b.toml", "qwen3", "0.6B", 8, 4, 4096, -1, 1, 1, 1, 1, 1, "selective"),
    ("0.2.2, qwen3_32b.toml", "qwen3", "32B", 64, 2, 4096, -1, 1, 1, 1, 1, 1, "full"),
    ("performance, 8B, 1D, 8 GPUs", "llama3", "8B", 8, 2, 8192, -1, 1, 1, 1, 1, 1, "selective"),
    ("performance, 8B, 1D, 128 GPUs", "llama3", "8B", 128, 2, 8192, -1, 1, 1, 1, 1, 1,
     "selective"),
    ("paper, 8B, 1D, 64 GPUs", "llama3", "8B", 64, 2, 8192, -1, 1, 1, 1, 1, 1, "selective"),
    ("paper, 8B, HSDP", "llama3", "8B", 64, 2, 8192, 8, 8, 1, 1, 1, 1, "selective"),
    ("paper, 70B, 2D, 256 GPUs", "llama3", "70B", 256, 16, 8192, 32, 1, 8, 1, 1, 1, "full"),
    ("paper, 405B, 2D, 512 GPUs", "llama3", "405B", 512, 2, 8192, 64, 1, 8, 1, 1, 1, "full"),
    ("paper, 405B, 3D, 512 GPUs", "llama3", "405B", 512, 32, 8192, 8, 1, 8, 8, 1, 1, "none"),
    ("paper, 8B, long, 8 GPUs", "llama3", "8B", 8, 1, 32768, 8, 1, 1, 1, 1, 1, "selective"),
    ("paper, 8B, long, cp=2", "llama3", "8B", 8, 1, 65536, 4, 1, 1, 1, 2, 1, "selective"),
    ("paper, 8B, long, cp=4", "llama3", "8B", 8, 1, 131072, 2, 1, 1, 1, 4, 1, "selective"),
    ("paper, 8B, long, cp=8", "llama3", "8B", 8, 1, 262144, 1, 1, 1, 1, 8, 1, "selective"),
    ("paper, 405B, 4D, 512 GPUs", "llama3", "405B", 512, 8, 65536, 4, 1, 8, 8, 2, 1, "full"),
    ("docs, pipeline of 70B", "llama3", "70B", 64, 8, 8192, -1, 1, 4, 4, 1, 1, "full"),
)  # fmt: skip


def _titan(row: tuple[object, ...], *, python: bool) -> Row:
    source, name, flavor, gpus, samples, tokens, shard, replicate, tp, pp, cp, ep, again = row
    assert isinstance(gpus, int) and isinstance(samples, int)
    assert all(isinstance(one, int) for one in (shard, replicate, tp, pp, cp, ep))
    data = gpus // (tp * pp * cp)  # type: ignore[operator]
    said = {
        "training": {"local_batch_size": samples, "seq_len": tokens, "steps": 1000},
        "optimizer": {"name": "AdamW", "lr": 3e-4},
        "lr_scheduler": {"warmup_steps": 200},
        "parallelism": {
            "data_parallel_replicate_degree": replicate,
            "data_parallel_shard_degree": shard,
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            "context_parallel_degree": cp,
            "expert_parallel_degree": ep,
        },
    }
    if python:
        policy = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}
        lines = ["def planned(config):"]
        for section, values in said.items():
            if section == "optimizer":
                lines.append("    config.optimizer = default_adamw(lr=3e-4)")
                continue
            if section == "parallelism":
                inside = ", ".join(f"{key}={value}" for key, value in values.items())
                lines.append(f"    config.parallelism = ParallelismConfig({inside})")
                continue
            lines += [f"    config.{section}.{key} = {value!r}" for key, value in values.items()]
        lines.append(f"    config.activation_checkpoint = {policy[str(again)]}")
        text = "\n".join(lines) + "\n"
    else:
        said["activation_checkpoint"] = {"mode": again}
        said["model"] = {"name": name, "flavor": flavor}
        text = "\n".join(
            f"[{section}]\n"
            + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
            for section, values in said.items()
        )
    # Pipelines keep what they gathered; a pipeline forward has one sample.
    zero = 2 if pp > 1 else 3  # type: ignore[operator]
    micro, count = (1, samples) if pp > 1 else (samples, 1)  # type: ignore[operator]
    models = {
        "8B": "llama-3.1-8b",
        "70B": "llama-3.1-70b",
        "405B": "llama-3.1-405b",
        "16B": "deepseek-v2-lite",
        "671B": "deepseek-v3",
        "0.6B": "qwen3-0.6b",
        "32B": "qwen3-32b",
    }
    asks = (tp, pp, cp, ep, data, zero, micro, count)
    model = models[str(flavor)] if python else None
    where = f"{gpus // 8}x8xh100-sxm-80gb"
    return Row(f"torchtitan {source}", model, where, text, asks)  # type: ignore[arg-type]


TORCHTITAN = [_titan(row, python=False) for row in _TITAN]
TORCHTITAN_PYTHON = [_titan(row, python=True) for row in _TITAN]

# --- DeepSpeed ------------------------------------------------------------------------------------

_EXAMPLES = "DeepSpeedExamples"
_TRANSFORMERS = "transformers, documentation of DeepSpeed"
_DEEPSPEED = (
    # source, GPUs, batch, micro-batch, accumulated, stage, optimizer and parameters, format
    (f"{_EXAMPLES}, BingBertSquad, batch 24", 8, 24, 3, None, 0, "", "", "fp16"),
    (f"{_EXAMPLES}, BingBertSquad, 1-bit Adam", 32, 96, 3, None, 0, "", "", "fp16"),
    (f"{_EXAMPLES}, bing_bert, sequence 128", 64, 65536, 64, None, 0, "", "", "fp16"),
    (f"{_EXAMPLES}, bing_bert, sequence 512", 64, 32768, 8, None, 0, "", "", "fp16"),
    (f"{_EXAMPLES}, gpt2 compression", 2, 8, 4, None, 0, "", "", "fp16"),
    (f"{_EXAMPLES}, random-LTD, medium", 2, 4, 2, None, 0, "", "", "no"),
    (f"{_EXAMPLES}, imagenet", 16, 256, None, 1, 0, "", "", "no"),
    (f"{_EXAMPLES}, imagenet, ZeRO-1", 16, 256, None, 1, 1, "", "", "fp16"),
    (f"{_EXAMPLES}, bf16_master_weight", 4, None, 4, 1, 3, "", "", "bf16"),
    (f"{_EXAMPLES}, ZenFlow", 4, 8, None, None, 2, "cpu", "", "bf16"),
    (f"{_EXAMPLES}, DeepSpeed-Chat, stage 1", 8, 256, 16, None, 2, "", "", "fp16"),
    (f"{_EXAMPLES}, DeepSpeed-Chat, offload", 8, 32, 4, None, 3, "cpu", "cpu", "fp16"),
    (f"{_TRANSFORMERS}, ZeRO-1", 8, 64, 8, 1, 1, "", "", "bf16"),
    (f"{_TRANSFORMERS}, ZeRO-2", 8, 64, 4, 2, 2, "", "", "bf16"),
    (f"{_TRANSFORMERS}, ZeRO-2 offload", 8, 64, 4, 2, 2, "cpu", "", "fp16"),
    (f"{_TRANSFORMERS}, ZeRO-3", 8, 64, 2, 4, 3, "", "", "bf16"),
    (f"{_TRANSFORMERS}, ZeRO-3 offload", 8, 64, 2, 4, 3, "cpu", "cpu", "bf16"),
    (f"{_TRANSFORMERS}, ZeRO-3 NVMe", 8, 16, 2, 1, 3, "nvme", "nvme", "bf16"),
    ("DeepSpeed, tutorial of ZeRO, 1.5B", 8, 32, 4, None, 1, "", "", "fp16"),
    ("DeepSpeed, tutorial of ZeRO, 10B", 16, 64, 4, None, 2, "", "", "fp16"),
)


def _deepspeed(row: tuple[object, ...]) -> Row:
    source, gpus, batch, micro, count, stage, optimizer, parameters, kind = row
    zero: dict[str, object] = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 5e8}
    for key, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if device:
            zero[key] = {"device": device, "pin_memory": True}
    said = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
        "steps_per_print": 50,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.8, 0.999]}},
        "fp16": {"enabled": kind == "fp16"},
        "bf16": {"enabled": kind == "bf16"},
        "zero_optimization": zero,
    }
    text = json.dumps({key: value for key, value in said.items() if value is not None})
    assert isinstance(gpus, int)
    whole = batch or (micro or 1) * (count or 1) * gpus  # type: ignore[operator]
    each = micro or whole // (gpus * (count or 1))  # type: ignore[operator]
    asks = (1, 1, 1, 1, gpus, stage, each, whole // (each * gpus))  # type: ignore[operator]
    where = f"{gpus}xa100-sxm-80gb" if gpus <= 8 else f"{gpus // 8}x8xa100-sxm-80gb"
    return Row(str(source), "gpt2-xl", where, text, asks)  # type: ignore[arg-type]


DEEPSPEED = [_deepspeed(row) for row in _DEEPSPEED]

# --- accelerate -----------------------------------------------------------------------------------

_ACCELERATE = (
    # source, kind, GPUs, nodes, strategy or stage, replicate, shard, tp, offload, format
    ("alignment-handbook, ddp", "MULTI_GPU", 8, 1, 0, 8, 1, 1, False, "bf16"),
    ("alignment-handbook, fsdp", "FSDP", 8, 1, "FULL_SHARD", 1, 8, 1, False, "bf16"),
    ("alignment-handbook, zero3", "DEEPSPEED", 8, 1, 3, 1, 8, 1, False, "bf16"),
    ("TRL, single node", "MULTI_GPU", 8, 1, 0, 8, 1, 1, False, "bf16"),
    ("TRL, zero1", "DEEPSPEED", 8, 1, 1, 1, 8, 1, False, "bf16"),
    ("TRL, zero2", "DEEPSPEED", 8, 1, 2, 1, 8, 1, False, "bf16"),
    ("TRL, zero3", "DEEPSPEED", 8, 1, 3, 1, 8, 1, False, "bf16"),
    ("TRL, fsdp2", "FSDP", 8, 1, True, 1, 8, 1, False, "bf16"),
    ("TRL, context parallelism", "FSDP", 8, 1, True, 1, 8, 1, False, "bf16"),
    ("accelerate, examples, fsdp2", "FSDP", 8, 1, True, 1, 8, 1, False, "bf16"),
    ("accelerate, examples, torch_tp and fsdp", "FSDP", 8, 1, True, 1, 4, 2, False, "bf16"),
    ("accelerate, examples, hsdp", "FSDP", 16, 2, True, 2, 8, 1, False, "bf16"),
    ("accelerate, examples, multi_gpu", "MULTI_GPU", 4, 1, 0, 4, 1, 1, False, "fp16"),
    ("accelerate, examples, multi_node", "MULTI_GPU", 16, 2, 0, 16, 1, 1, False, "fp16"),
    ("accelerate, documents, fsdp offload", "FSDP", 4, 1, "FULL_SHARD", 1, 4, 1, True, "bf16"),
    ("accelerate, documents, grad_op", "FSDP", 4, 1, "SHARD_GRAD_OP", 1, 4, 1, False, "bf16"),
    ("accelerate, documents, no shard", "FSDP", 4, 1, "NO_SHARD", 4, 1, 1, False, "bf16"),
    ("accelerate, documents, by number", "FSDP", 8, 1, "1", 1, 8, 1, False, "fp16"),
    ("FSDP-QLoRA post, 70B", "FSDP", 4, 1, "FULL_SHARD", 1, 4, 1, True, "bf16"),
    ("PEFT, 70B by fsdp", "FSDP", 8, 1, "FULL_SHARD", 1, 8, 1, False, "bf16"),
)


def _accelerate(row: tuple[object, ...]) -> Row:
    source, kind, gpus, nodes, how, replicate, shard, tp, offload, precision = row
    said: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": precision,
        "num_machines": nodes,
        "num_processes": gpus,
        "main_training_function": "main",
    }
    zero = 0
    if kind == "DEEPSPEED":
        zero = int(str(how))
        said["deepspeed_config"] = {"zero_stage": how, "gradient_accumulation_steps": 4}
    if kind == "FSDP":
        fsdp: dict[str, object] = {"fsdp_offload_params": offload}
        if how is True:
            zero = 3
            fsdp |= {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
            said["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": replicate,
                "parallelism_config_dp_shard_size": shard,
                "parallelism_config_tp_size": tp,
            }
        else:
            zero = {"SHARD_GRAD_OP": 2, "NO_SHARD": 0}.get(str(how), 3)
            fsdp["fsdp_sharding_strategy"] = how
        said["fsdp_config"] = fsdp
    assert isinstance(gpus, int) and isinstance(tp, int)
    count = 4 if kind == "DEEPSPEED" else 64 * 16 // (gpus // tp)
    asks = (tp, 1, 1, 1, gpus // tp, zero, 64 * 16 // (count * gpus // tp), count)
    where = f"{gpus}xa100-sxm-80gb" if gpus <= 8 else f"{gpus // 8}x8xa100-sxm-80gb"
    return Row(str(source), "llama-2-7b", where, yaml.safe_dump(said), asks)


ACCELERATE = [_accelerate(row) for row in _ACCELERATE]

# --- Hugging Face TrainingArguments ---------------------------------------------------------------

_HANDBOOK = (
    # recipe, model, samples, accumulated, rate, schedule, tokens
    ("constitutional-ai, dpo", "mistral-7b", 2, 1, 5e-7, "linear", 1024),
    ("constitutional-ai, sft", "mistral-7b", 8, 4, 2e-5, "cosine", 2048),
    ("constitutional-ai, sft, grok", "mistral-7b", 8, 4, 2e-5, "cosine", 2048),
    ("pref_align_scan, openhermes", "mistral-7b", 8, 2, 5e-7, "cosine", None),
    ("pref_align_scan, zephyr", "mistral-7b", 8, 2, 5e-7, "cosine", None),
    ("smollm, sft", "qwen2.5-0.5b", 4, 4, 1e-3, "cosine", 2048),
    ("smollm2, dpo", "llama-3.2-1b", 2, 8, 1e-6, "cosine", 1024),
    ("smollm2, dpo, small", "qwen2.5-0.5b", 2, 8, 1e-6, "cosine", 1024),
    ("smollm2, sft", "llama-3.2-1b", 4, 4, 3e-4, "cosine", 8192),
    ("smollm2, sft, small", "qwen2.5-0.5b", 4, 4, 1e-3, "cosine", 8192),
    ("starchat2-15b, dpo", "starcoder2-15b", 2, 8, 5e-7, "cosine", 1024),
    ("starchat2-15b, sft", "starcoder2-15b", 8, 2, 2e-5, "cosine", 2048),
    ("zephyr-141b, orpo", "mixtral-8x22b", 1, 1, 5e-6, "inverse_sqrt", 2048),
    ("zephyr-7b-beta, dpo", "mistral-7b", 8, 2, 5e-7, "cosine", 1024),
    ("zephyr-7b-beta, dpo, qlora", "mistral-7b", 4, 4, 5e-6, "cosine", 1024),
    ("zephyr-7b-beta, sft", "mistral-7b", 16, 1, 2e-5, "cosine", 2048),
    ("zephyr-7b-beta, sft, qlora", "mistral-7b", 4, 2, 2e-4, "cosine", 2048),
    ("zephyr-7b-gemma, dpo", "gemma-7b", 2, 8, 5e-7, "cosine", 1024),
    ("zephyr-7b-gemma, sft", "gemma-7b", 4, 4, 2e-5, "cosine", 2048),
    ("stanford_alpaca, 7B by fsdp", "llama-2-7b", 4, 8, 2e-5, "cosine", 512),
)


def _handbook(row: tuple[object, ...]) -> Row:
    source, model, samples, count, rate, schedule, tokens = row
    said = {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": count,
        "learning_rate": rate,
        "lr_scheduler_type": schedule,
        "max_seq_length": tokens,
        "warmup_ratio": 0.1,
        "bf16": True,
        "gradient_checkpointing": True,
        "num_train_epochs": 1,
        "fsdp": "full_shard auto_wrap",
    }
    text = yaml.safe_dump({key: value for key, value in said.items() if value is not None})
    asks = (1, 1, 1, 1, 8, 3, samples, count)
    return Row(f"alignment-handbook {source}", str(model), "8xa100-sxm-80gb", text, asks)  # type: ignore[arg-type]


TRANSFORMERS = [_handbook(row) for row in _HANDBOOK]
