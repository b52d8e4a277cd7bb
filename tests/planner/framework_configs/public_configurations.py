"""Configurations that were published, shortened: only figures, in each framework's own keys.

Each row says where it is from, the model, the cluster, what is written, and what it asks for by
hand: tensor, pipeline, context, expert, data, ZeRO, micro-batch, micro-batches.  All were read at
their sources on 2026-11-23; GPUs that a source leaves open are chosen here.

    Bridge      github.com/NVIDIA-NeMo/Megatron-Bridge @067f987, docs/performance-summary-archive.md
    Megatron-LM github.com/NVIDIA/Megatron-LM @core_v0.19.0, examples
    torchtitan  github.com/pytorch/torchtitan @v0.2.2, train_configs and benchmarks
    DeepSpeed   github.com/deepspeedai/DeepSpeedExamples @45b4b71
    accelerate  github.com/huggingface: accelerate, trl, peft; alignment-handbook @925acdf
    nanotron    github.com/huggingface/nanotron @2411b02, examples; others at the commit said
    FSDP        github.com/mosaicml/llm-foundry @061f2c7, scripts/train/benchmarking/README.md
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import yaml

from benchmarks.inputs_read import inputs
from meshwright.planner.framework_configs.readers.shell import is_script


class Row(NamedTuple):
    """One published configuration."""

    source: str
    model: str | None
    """A name, or a Hugging Face configuration as JSON; None: the configuration says it."""
    cluster: str
    text: str
    asks: tuple[int, ...]


# --- Megatron -------------------------------------------------------------------------------------

_BRIDGE = (
    # container, model, system, GPUs, 8 bits, batch, micro-batch, sequence, tp, pp, cp, stages of a
    # rank, ep
    ("26.06, fine-tuning", "llama-3-70b", "8xh100-sxm-80gb", 32, 1, 32, 1, 4096, 4, 4, 1, 5, 1),
    ("26.06", "llama-3.1-405b", "8xh100-sxm-80gb", 1024, 1, 1536, 1, 8192, 8, 8, 2, 8, 1),
    ("26.06", "qwen3-30b-a3b", "8xh100-sxm-80gb", 16, 1, 1024, 1, 4096, 1, 1, 1, 1, 16),
    ("26.04", "llama-3-70b", "8xh100-sxm-80gb", 64, 1, 256, 1, 8192, 4, 8, 1, 5, 1),
    ("26.04", "gpt-oss-120b", "8xh100-sxm-80gb", 64, 0, 1280, 1, 4096, 1, 4, 1, 1, 8),
    ("26.04", "qwen3-235b-a22b", "8xh100-sxm-80gb", 256, 1, 8192, 1, 4096, 2, 8, 1, 4, 32),
    ("26.02", "qwen3-30b-a3b", "8xh100-sxm-80gb", 16, 1, 1024, 1, 4096, 1, 2, 1, 12, 8),
    ("25.11", "llama-3-70b", "8xh100-sxm-80gb", 64, 1, 128, 1, 8192, 4, 8, 1, 5, 1),
    ("25.11", "llama-3.1-405b", "8xh100-sxm-80gb", 1024, 1, 512, 1, 8192, 8, 8, 2, 8, 1),
    ("25.11", "gpt-oss-120b", "8xh100-sxm-80gb", 64, 0, 512, 4, 4096, 1, 4, 1, 1, 8),
    ("25.11", "qwen3-30b-a3b", "8xh100-sxm-80gb", 16, 1, 512, 2, 4096, 1, 2, 1, 24, 8),
    ("25.11", "qwen3-235b-a22b", "8xh100-sxm-80gb", 256, 1, 2048, 1, 4096, 2, 8, 1, 4, 32),
    ("25.11", "llama-3-8b", "8xb200", 8, 1, 128, 2, 8192, 1, 1, 1, 1, 1),
    ("25.11", "llama-3.1-405b", "8xb200", 128, 1, 64, 1, 8192, 4, 8, 2, 8, 1),
    ("25.11", "gpt-oss-120b", "8xb200", 64, 0, 512, 4, 4096, 1, 1, 1, 1, 8),
    ("25.11", "llama-3-8b", "4xgb200", 8, 1, 128, 2, 8192, 1, 1, 1, 1, 1),
    ("25.11", "llama-3.1-405b", "4xgb200", 256, 1, 1536, 1, 8192, 4, 16, 1, 4, 1),
    ("25.11", "gpt-oss-120b", "4xgb200", 64, 0, 1280, 1, 8192, 1, 1, 1, 1, 64),
    ("25.11", "llama-3.1-405b", "4xgb300", 256, 1, 1536, 1, 8192, 2, 8, 2, 4, 1),
    ("25.11", "gpt-oss-120b", "4xgb300", 64, 0, 1280, 2, 8192, 1, 1, 1, 1, 64),
)  # fmt: skip
_SHORT_OF_TWO = ("llama-3.1-405b", "qwen3-235b-a22b")
"""126 and 94 blocks: embedding and loss take a block's place."""
_TABLE_1 = (
    # size, tp, pp, micro-batch, batch, blocks, hidden size, heads, nodes, blocks of a virtual stage
    ("1.7B", 1, 1, 16, 512, 24, 2304, 24, 4, 0),
    ("3.6B", 2, 1, 16, 512, 30, 3072, 32, 8, 0),
    ("7.5B", 4, 1, 16, 512, 36, 4096, 32, 16, 0),
    ("18B", 8, 1, 8, 1024, 40, 6144, 48, 32, 0),
    ("39B", 8, 2, 4, 1536, 48, 8192, 64, 64, 0),
    ("76B", 8, 4, 2, 1792, 60, 10240, 80, 128, 5),
    ("145B", 8, 8, 2, 2304, 80, 12288, 96, 192, 5),
    ("310B", 8, 16, 1, 2160, 96, 16384, 128, 240, 3),
    ("530B", 8, 35, 1, 2520, 105, 20480, 128, 315, 1),
    ("1T", 8, 64, 1, 3072, 128, 25600, 160, 384, 0),
)  # fmt: skip
_SCRIPTS = (
    # script of examples/, model, nodes, arguments, asks
    ("llama/train_llama3_8b_h100_fp8.sh", "llama-3-8b", 1,
     "--tensor-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 1 "
     "--global-batch-size 128 --seq-length 8192 --sequence-parallel --bf16 --fp8-format hybrid "
     "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
     "--use-distributed-optimizer", (1, 1, 1, 1, 8, 1, 1, 16)),
    ("mixtral/train_mixtral_8x7b_distributed.sh", "mixtral-8x7b", 8,
     "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
     "--expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256 "
     "--seq-length 4096 --sequence-parallel --bf16 --use-distributed-optimizer",
     (1, 4, 1, 8, 16, 1, 1, 16)),
    ("gpt3/train_gpt3_175b_distributed.sh", "gpt3-175b", 16,
     "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --micro-batch-size 1 "
     "--global-batch-size 1536 --seq-length 2048 --fp16", (8, 16, 1, 1, 1, 0, 1, 1536)),
)  # fmt: skip


def _slurm(source: str, model: str, cluster: str, flags: list[str], asks: tuple[int, ...]) -> Row:
    """Return arguments of Megatron-LM as a script of Slurm."""
    nodes, _, each = cluster.partition("x")
    lines = ["#!/bin/bash", f"#SBATCH --nodes={nodes}", f"#SBATCH --gpus-per-node={each[0]}"]
    lines += ["ARGS=(", *(f"  {flag}" for flag in flags), ")"]
    lines += ['srun python pretrain_gpt.py "${ARGS[@]}" --log-interval 10', ""]
    return Row(source, model, cluster, "\n".join(lines), asks)


def _of_bridge(row: tuple[Any, ...], *, overrides: bool) -> Row:
    """Return a row of the summary, as Megatron-LM's arguments or as a recipe's overrides."""
    container, model, system, gpus, fp8, batch, micro, seq, tp, pp, cp, virtual, ep = row
    data = gpus // (tp * pp * cp)
    cluster = f"{gpus // int(system[0])}x{system}" if gpus > 8 or system[0] == "4" else system
    asks = (tp, pp, cp, ep, data, 1 if data * cp > 1 else 0, micro, batch // (micro * data))
    source = f"Megatron-Bridge, {container} container, {gpus} {system[2:]}, {batch}"
    ends = virtual > 1 and model in _SHORT_OF_TWO
    if overrides:
        told = {
            "model": {
                "seq_length": seq,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
                "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
                "context_parallel_size": cp,
                "expert_model_parallel_size": ep,
                "expert_tensor_parallel_size": 1 if ep > 1 else None,
                "sequence_parallel": tp > 1,
                "account_for_embedding_in_pipeline_split": ends,
                "account_for_loss_in_pipeline_split": ends,
            },
            "train": {"micro_batch_size": micro, "global_batch_size": batch},
            "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
            "mixed_precision": "bf16_with_fp8_current_scaling_mixed" if fp8 else "bf16_mixed",
        }
        return Row(source, model, cluster, yaml.safe_dump(told), asks)
    flags = [
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {pp}",
        f"--context-parallel-size {cp}",
        f"--micro-batch-size {micro} --global-batch-size {batch} --seq-length {seq}",
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
        *(["--sequence-parallel"] if tp > 1 else []),
        *(["--fp8-format hybrid"] if fp8 else []),
        *([f"--num-virtual-stages-per-pipeline-rank {virtual}"] if virtual > 1 else []),
        *([f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size 1"] if ep > 1 else []),
    ]
    if ends:
        flags.append("--account-for-embedding-in-pipeline-split")
        flags.append("--account-for-loss-in-pipeline-split")
    return _slurm(source, model, cluster, flags, asks)


def _of_table_1(row: tuple[Any, ...]) -> Row:
    size, tp, pp, micro, batch, blocks, hidden, heads, nodes, each = row
    flags = [
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}",
        f"--micro-batch-size {micro} --global-batch-size {batch} --seq-length 2048 --fp16",
        f"--num-layers {blocks} --hidden-size {hidden} --num-attention-heads {heads}",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ]
    if each:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    data = nodes * 8 // (tp * pp)
    model = {"model_type": "gpt2", "n_layer": blocks, "n_embd": hidden, "n_head": heads}
    model |= {"n_positions": 2048, "vocab_size": 51200}
    source = f"Megatron-LM, academic_paper_scripts/sc21/run_table_1.sh, {size}"
    asks = (tp, pp, 1, 1, data, 0, micro, batch // (micro * data))
    return _slurm(source, json.dumps(model), f"{nodes}x8xa100-sxm-80gb", flags, asks)


MEGATRON = [
    *(_of_bridge(row, overrides=False) for row in _BRIDGE),
    *map(_of_table_1, _TABLE_1),
    *(
        _slurm(f"Megatron-LM, examples/{script}", model, f"{nodes}x8xh100-sxm-80gb", [flags], asks)
        for script, model, nodes, flags, asks in _SCRIPTS
    ),
]
MEGATRON_BRIDGE = [_of_bridge(row, overrides=True) for row in _BRIDGE]

# --- torchtitan -----------------------------------------------------------------------------------

_TITAN = (
    # source, name, flavor, GPUs, samples, tokens, shard, replicate, tp, pp, cp, ep, recompute
    ("llama3_8b.toml", "llama3", "8B", 8, 1, 8192, -1, 1, 1, 1, 1, 1, "selective"),
    ("llama3_70b.toml", "llama3", "70B", 256, 8, 8192, -1, 1, 8, 1, 1, 1, "full"),
    ("llama3_405b.toml", "llama3", "405B", 512, 2, 8192, -1, 1, 8, 1, 1, 1, "full"),
    ("deepseek_v3_16b.toml", "deepseek_v3", "16B", 8, 4, 4096, -1, 1, 1, 1, 1, 8, "selective"),
    ("deepseek_v3_671b.toml", "deepseek_v3", "671B", 512, 4, 4096, -1, 1, 1, 1, 1, 1, "selective"),
    ("qwen3_0.6b.toml", "qwen3", "0.6B", 8, 4, 4096, -1, 1, 1, 1, 1, 1, "selective"),
    ("qwen3_32b.toml", "qwen3", "32B", 64, 2, 4096, -1, 1, 1, 1, 1, 1, "full"),
    ("2024-12, table 1", "llama3", "8B", 8, 2, 8192, 8, 1, 1, 1, 1, 1, "selective"),
    ("2024-12, table 2, cp 1", "llama3", "8B", 8, 1, 32768, 8, 1, 1, 1, 1, 1, "full"),
    ("2024-12, table 2, cp 2", "llama3", "8B", 8, 1, 65536, 4, 1, 1, 1, 2, 1, "full"),
    ("2024-12, table 2, cp 4", "llama3", "8B", 8, 1, 131072, 2, 1, 1, 1, 4, 1, "full"),
    ("2024-12, table 2, cp 8", "llama3", "8B", 8, 1, 262144, 1, 1, 1, 1, 8, 1, "full"),
    ("2024-12, table 3", "llama3", "8B", 128, 2, 8192, 128, 1, 1, 1, 1, 1, "selective"),
    ("2024-12, table 4", "llama3", "70B", 256, 16, 8192, 32, 1, 8, 1, 1, 1, "full"),
    ("2024-12, table 5", "llama3", "405B", 512, 32, 8192, 8, 1, 8, 8, 1, 1, "full"),
    ("2024-12, table 6, cp 1", "llama3", "405B", 512, 8, 32768, 8, 1, 8, 8, 1, 1, "full"),
    ("2024-12, table 6, cp 2", "llama3", "405B", 512, 8, 65536, 4, 1, 8, 8, 2, 1, "full"),
    ("2024-12, table 6, cp 4", "llama3", "405B", 512, 8, 131072, 2, 1, 8, 8, 4, 1, "full"),
    ("2025-06, 8B on H200", "llama3", "8B", 32, 2, 8192, -1, 1, 1, 1, 1, 1, "selective"),
    ("2025-06, 8B with tp 8", "llama3", "8B", 64, 12, 8192, 8, 1, 8, 1, 1, 1, "selective"),
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
    return Row(f"torchtitan, {source}", model, where, text, asks)  # type: ignore[arg-type]


TORCHTITAN = [_titan(row, python=False) for row in _TITAN]
TORCHTITAN_PYTHON = [_titan(row, python=True) for row in _TITAN]

# --- DeepSpeed ------------------------------------------------------------------------------------

_DEEPSPEED = (
    # file, GPUs, batch, micro-batch, accumulated, stage (-1: not said), optimizer's place,
    # optimizer, format
    ("BingBertSquad/deepspeed_bsz24_config", 8, 24, 3, None, -1, "", "Adam", "fp16"),
    ("BingBertSquad/1-bit_adam/nccl", 32, 96, 3, None, -1, "", "OnebitAdam", "fp16"),
    ("bing_bert/deepspeed_bsz64k_lamb_config_seq128", 64, 65536, 64, None, -1, "", "Lamb", "fp16"),
    ("bing_bert/deepspeed_bsz32k_lamb_config_seq512", 64, 32768, 16, None, -1, "", "Lamb", "fp16"),
    (
        "bing_bert/deepspeed_bsz4k_progressive_layer_drop",
        64,
        4096,
        16,
        None,
        -1,
        "",
        "Adam",
        "fp16",
    ),
    ("bing_bert/01_adam/nccl, sequence 128", 64, 4096, 16, None, -1, "", "ZeroOneAdam", "fp16"),
    ("bing_bert/1-bit_lamb/nccl, sequence 512", 64, 32768, 16, None, -1, "", "OneBitLamb", "fp16"),
    ("compression/gpt2/config/ds_config", 2, 8, 4, None, 0, "", "Adam", "fp16"),
    ("compression/gpt2/config/ds_config_W8A8_Qgroup64_fp32", 2, 8, 4, None, 0, "", "Adam", "no"),
    ("compression/bert/config/ds_config", 1, 32, 32, None, 0, "", "", "fp16"),
    ("compression/cifar/config/ds_config", 1, 32, 32, None, 0, "", "Adam", "fp16"),
    ("data_efficiency/gpt_finetuning, medium, random-LTD", 2, 4, 2, None, 0, "", "Adam", "no"),
    ("data_efficiency/vit_finetuning, imagenet", 16, 256, 16, None, 0, "", "Adam", "no"),
    ("imagenet/config/ds_config", 16, 256, None, 1, 0, "", "Adam", "no"),
    ("imagenet/config/ds_fp16_config", 16, 256, None, 1, 0, "", "Adam", "fp16"),
    ("imagenet/config/ds_fp16_z1_config", 16, 256, None, 1, 1, "", "Adam", "fp16"),
    ("bf16_master_weight/configs/baseline", 4, None, 4, 1, 3, "", "AdamW", "bf16"),
    ("bf16_master_weight/configs/bf16_full", 8, None, 4, 1, 3, "", "AdamW", "bf16"),
    ("DeepSpeed-ZenFlow/finetuning/zf_config", 4, 8, None, 1, 2, "cpu", "AdamW", "bf16"),
    ("pipeline_parallelism/ds_config", 8, 256, 8, None, -1, "", "Adam", "no"),
)


def _deepspeed(row: tuple[Any, ...]) -> Row:
    source, gpus, batch, micro, count, stage, place, optimizer, kind = row
    zero: dict[str, object] | None = None
    if stage >= 0:
        zero = {"stage": stage}
        if place:
            zero["offload_optimizer"] = {"device": place, "pin_memory": True}
    said = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
        "steps_per_print": 50,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4}} if optimizer else None,
        "fp16": {"enabled": True} if kind == "fp16" else None,
        "bf16": {"enabled": True} if kind == "bf16" else None,
        "zero_optimization": zero,
    }
    text = json.dumps({key: value for key, value in said.items() if value is not None})
    whole = batch or micro * count * gpus
    each = micro or whole // (gpus * count)
    asks = (1, 1, 1, 1, gpus, max(0, stage) if gpus > 1 else 0, each, whole // (each * gpus))
    where = f"{gpus}xa100-sxm-80gb" if gpus <= 8 else f"{gpus // 8}x8xa100-sxm-80gb"
    return Row(f"DeepSpeedExamples, {source}", "gpt2-xl", where, text, asks)


DEEPSPEED = [_deepspeed(row) for row in _DEEPSPEED]

# --- accelerate -----------------------------------------------------------------------------------

_SHARDED = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False}
_TWO = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
_AGAIN = {**_TWO, "fsdp_activation_checkpointing": True}
_ACCELERATE: tuple[tuple[Any, ...], ...] = (
    # source, GPUs, format, settings of FSDP or DeepSpeed, axes (replicate, shard, tp, cp), asks:
    # tp, cp, data, ZeRO, micro-batches of DeepSpeed
    ("alignment-handbook, ddp", 8, "bf16", None, None, (1, 1, 8, 0, 0)),
    ("alignment-handbook, fsdp", 8, "bf16", _SHARDED, None, (1, 1, 8, 3, 0)),
    ("alignment-handbook, zero3", 8, "bf16", {"zero_stage": 3}, None, (1, 1, 8, 3, 0)),
    ("trl, multi_gpu", 8, "no", None, None, (1, 1, 8, 0, 0)),
    ("trl, deepspeed_zero1 @3ff008b", 3, "bf16",
     {"zero_stage": 1, "gradient_accumulation_steps": 1}, None, (1, 1, 3, 1, 1)),
    ("trl, deepspeed_zero2 @48ae8de", 8, "no",
     {"zero_stage": 2, "gradient_accumulation_steps": 1}, None, (1, 1, 8, 2, 1)),
    ("trl, deepspeed_zero3 @7d75884", 8, "fp16",
     {"zero_stage": 3, "gradient_accumulation_steps": 1}, None, (1, 1, 8, 3, 1)),
    ("trl, fsdp2", 8, "bf16", _TWO, None, (1, 1, 8, 3, 0)),
    ("trl, fsdp_qlora", 8, "bf16", {**_SHARDED, "fsdp_offload_params": True}, None,
     (1, 1, 8, 3, 0)),
    ("trl, context_parallel_2gpu", 2, "bf16", _TWO, (1, 1, 1, 2), (1, 2, 1, 3, 0)),
    ("trl, context_parallel_8gpu", 8, "bf16", _AGAIN, (1, 1, 1, 8), (1, 8, 1, 3, 0)),
    ("trl, fsdp2_sharding_2gpus", 2, "bf16", _AGAIN, (1, 2, 1, 1), (1, 1, 2, 3, 0)),
    ("accelerate, config_yaml_templates/fsdp", 2, "bf16", _SHARDED, None, (1, 1, 2, 3, 0)),
    ("accelerate, config_yaml_templates/multi_gpu", 2, "bf16", None, None, (1, 1, 2, 0, 0)),
    ("accelerate, config_yaml_templates/multi_node", 8, None, None, None, (1, 1, 8, 0, 0)),
    ("accelerate, slurm/fsdp_config", None, None, _SHARDED, None, (1, 1, 8, 3, 0)),
    ("accelerate, torch_native_parallelism/tp_hsdp", 8, "bf16", _TWO, (2, 2, 2, 1),
     (2, 1, 4, 3, 0)),
    ("accelerate, torch_native_parallelism/cp", 8, "bf16", _AGAIN, (1, 1, 1, 8), (1, 8, 1, 3, 0)),
    ("accelerate, torch_native_parallelism/nd", 8, "bf16", _TWO, (1, 2, 1, 4), (1, 4, 2, 3, 0)),
    ("accelerate, tests, fsdp2", 2, None, {"fsdp_version": 2}, None, (1, 1, 2, 3, 0)),
    ("peft, sft/configs/fsdp_config", 8, "bf16",
     {**_SHARDED, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}, None, (1, 1, 8, 2, 0)),
    ("peft, sft/configs/fsdp_config_qlora", 2, "no", {**_SHARDED, "fsdp_offload_params": True},
     None, (1, 1, 2, 3, 0)),
    ("peft, sft/configs/deepspeed_config", 8, "bf16",
     {"zero_stage": 3, "gradient_accumulation_steps": 4}, None, (1, 1, 8, 3, 4)),
    ("peft, sft/configs/deepspeed_config_z3_qlora", 2, "bf16", {"zero_stage": 3}, None,
     (1, 1, 2, 3, 0)),
)  # fmt: skip


def _accelerate(row: tuple[Any, ...]) -> Row:
    source, gpus, precision, settings, axes, wanted = row
    kind = "MULTI_GPU"
    if settings is not None:
        kind = "DEEPSPEED" if "zero_stage" in settings else "FSDP"
    said: dict[str, object] = {"distributed_type": kind}
    if gpus is not None:
        said |= {"num_processes": gpus, "num_machines": 2 if "multi_node" in source else 1}
    if precision is not None:
        said["mixed_precision"] = precision
    if settings is not None:
        said[f"{kind.lower()}_config"] = settings
    if axes is not None:
        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        said["parallelism_config"] = {
            f"parallelism_config_{name}": size for name, size in zip(names, axes, strict=True)
        }
    tp, cp, data, zero, count = wanted
    asks = (tp, 1, cp, 1, data, zero, count)
    return Row(source, "llama-2-7b", f"{gpus or 8}xa100-sxm-80gb", yaml.safe_dump(said), asks)


ACCELERATE = [_accelerate(row) for row in _ACCELERATE]

# --- Hugging Face TrainingArguments ---------------------------------------------------------------

_HANDBOOK = (
    # recipe, model (or one like it), samples, accumulated, rate, schedule, tokens
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
    ("smollm3, dpo, apo", "smollm3-3b", 1, 2, 1e-6, "cosine_with_min_lr", 24576),
    ("smollm3, sft", "smollm3-3b", 1, 2, 2e-5, "cosine_with_min_lr", 65536),
    ("smollm3, sft, mid", "smollm3-3b", 1, 2, 2e-5, "cosine_with_min_lr", 32768),
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

# --- nanotron -------------------------------------------------------------------------------------

_SMALL = (16, 64, 2, 4, 4)
_NANOTRON: tuple[tuple[Any, ...], ...] = (
    # source, dp, pp, tp, mode, sequence, micro-batch, accumulated, ZeRO,
    # (hidden, feed-forward, blocks, heads, key-value heads), vocabulary, tied
    ("config_tiny_llama", 4, 1, 2, "REDUCE_SCATTER", 4096, 3, 1, 0,
     (2048, 11008, 28, 16, 2), 128256, True),
    ("config_qwen", 2, 1, 2, "REDUCE_SCATTER", 4096, 3, 1, 0,
     (2048, 11008, 36, 16, 4), 128256, True),
    ("config_resume_training", 2, 1, 1, "REDUCE_SCATTER", 256, 2, 1, 0,
     (576, 1536, 30, 9, 3), 49152, True),
    ("config_nanoset", 1, 1, 1, "REDUCE_SCATTER", 1024, 2, 1, 0, _SMALL, 50257, True),
    ("config_tiny_llama_with_s3_upload", 1, 1, 1, "REDUCE_SCATTER", 256, 2, 1, 0,
     _SMALL, 256, True),
    ("contributor-guide/debug_config_tiny_llama", 1, 1, 2, "REDUCE_SCATTER", 32, 2, 1, 0,
     _SMALL, 50277, True),
    ("custom-dataloader/config_custom_dl", 2, 1, 1, "REDUCE_SCATTER", 256, 2, 1, 0,
     _SMALL, 256, True),
    ("doremi/configs/config_2.8b_llama", 8, 1, 2, "REDUCE_SCATTER", 1024, 64, 1, 0,
     (4096, 24576, 6, 32, 16), 49152, True),
    ("doremi/configs/config_2.8b_llama_with_tuned_weights", 1, 1, 8, "REDUCE_SCATTER", 1024, 64,
     1, 0, (4096, 24576, 6, 32, 16), 49152, True),
    ("doremi/configs/config_280m_llama", 2, 1, 2, "REDUCE_SCATTER", 1024, 32, 1, 0,
     (1024, 4096, 10, 8, 4), 49152, True),
    ("mup/configs/mup_350m_llama_config", 4, 1, 2, "REDUCE_SCATTER", 1024, 32, 8, 0,
     (1024, 4096, 14, 8, 4), 49152, False),
    ("config_llama3.2-3B @1e31cb96", 2, 1, 2, "ALL_REDUCE", 8192, 2, 4, 0,
     (3072, 8192, 28, 24, 8), 128256, True),
    ("config_llama3b @4d444396", 2, 1, 4, "REDUCE_SCATTER", 256, 16, 1, 0,
     (3072, 8192, 28, 24, 8), 128256, True),
    ("config_tiny_llama_bench @67c5ebb6", 1, 1, 8, "REDUCE_SCATTER", 2048, 1, 1, 0,
     (3072, 8192, 28, 24, 8), 128256, True),
    ("config_train_llama @cb5d5afb", 4, 1, 2, "REDUCE_SCATTER", 512, 16, 32, 0,
     (768, 3072, 12, 16, 16), 50272, True),
    ("config_bfloat16_llama @ebd96c0e", 1, 1, 2, "ALL_REDUCE", 256, 256, 1, 0,
     (512, 2048, 2, 4, 4), 49152, False),
    ("config_280m_llama_1m_ctx @3282c9d8", 4, 1, 2, "REDUCE_SCATTER", 102400, 1, 5, 1,
     (1024, 4096, 10, 8, 4), 49152, False),
    ("config_distil @2e5905b1", 2, 2, 2, "REDUCE_SCATTER", 256, 1, 1, 0,
     (3072, 8192, 28, 24, 8), 128256, True),
    ("config_fp8_1b_llama @ebd96c0e", 1, 1, 4, "ALL_REDUCE", 256, 256, 1, 0,
     (2048, 8192, 14, 8, 8), 49152, False),
    ("climllama/config_finetune @7c6c3b68", 4, 1, 2, "REDUCE_SCATTER", 4096, 4, 16, 0,
     (2816, 7680, 32, 22, 22), 33152, False),
)  # fmt: skip


def _nanotron(row: tuple[Any, ...]) -> Row:
    source, dp, pp, tp, mode, seq, micro, count, zero, sizes, vocabulary, tied = row
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model = dict(zip((*names, "num_key_value_heads"), sizes, strict=True))
    model |= {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    said = {
        "parallelism": {"dp": dp, "pp": pp, "tp": tp, "pp_engine": "1f1b", "tp_mode": mode},
        "model": {"dtype": "bfloat16", "model_config": {**model, "is_llama_config": True}},
        "tokens": {
            "sequence_length": seq,
            "micro_batch_size": micro,
            "batch_accumulation_per_replica": count,
        },
        "optimizer": {"zero_stage": zero, "clip_grad": 1.0, "weight_decay": 0.01},
    }
    config = {"model_type": "llama", "max_position_embeddings": max(seq, 4096), **model}
    ranks = dp * pp * tp
    where = f"{ranks}xh100-sxm-80gb" if ranks <= 8 else f"{ranks // 8}x8xh100-sxm-80gb"
    asks = (tp, pp, 1, 1, dp, zero, micro, count)
    return Row(f"nanotron, {source}", json.dumps(config), where, yaml.safe_dump(said), asks)


NANOTRON = [_nanotron(row) for row in _NANOTRON]

# --- FSDP -----------------------------------------------------------------------------------------

_FSDP = (
    # accelerator, GPUs, sequence, micro-batch, accumulated, recomputed: MPT-7B, FULL_SHARD, bf16
    ("h100-sxm-80gb", 8, 65536, 1, 2, True),
    ("h100-sxm-80gb", 8, 32768, 2, 2, True),
    ("h100-sxm-80gb", 8, 8192, 8, 2, True),
    ("h100-sxm-80gb", 8, 4096, 16, 2, True),
    ("h100-sxm-80gb", 8, 2048, 6, 1, False),
    ("h100-sxm-80gb", 8, 1024, 64, 2, True),
    ("a100-sxm-80gb", 8, 65536, 1, 2, True),
    ("a100-sxm-80gb", 8, 32768, 2, 2, True),
    ("a100-sxm-80gb", 8, 16384, 4, 2, True),
    ("a100-sxm-80gb", 8, 8192, 8, 2, True),
    ("a100-sxm-80gb", 8, 4096, 16, 2, True),
    ("a100-sxm-80gb", 8, 2048, 6, 2, False),
    ("a100-sxm-80gb", 8, 1024, 64, 2, True),
    ("a100-sxm-40gb", 8, 16384, 1, 4, True),
    ("a100-sxm-40gb", 8, 8192, 3, 4, True),
    ("a100-sxm-40gb", 8, 4096, 6, 4, True),
    ("a100-sxm-40gb", 128, 2048, 18, 1, True),
    ("a100-sxm-40gb", 64, 2048, 18, 1, True),
    ("a100-sxm-40gb", 32, 2048, 18, 1, True),
    ("a100-sxm-40gb", 16, 2048, 16, 1, True),
    ("a100-sxm-40gb", 8, 2048, 12, 4, True),
    ("a100-sxm-40gb", 8, 1024, 24, 4, True),
    ("a100-sxm-40gb", 8, 512, 48, 4, True),
)


def _fsdp(row: tuple[Any, ...]) -> Row:
    accelerator, gpus, seq, micro, count, again = row
    text = (
        f"REPLICAS, SHARDS = 1, {gpus}\n"
        f"SEQ_LEN, MICRO_BATCH, MICRO_BATCHES = {seq}, {micro}, {count}\n"
        f"RECOMPUTED = {'range(0, 32)' if again else '()'}\n"
        "CLIP_NORM = 1.0\n"
        "settings = {\n"
        '    "reshard_after_forward": True,\n'
        '    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),\n'
        "}\n"
    )
    where = f"8x{accelerator}" if gpus == 8 else f"{gpus // 8}x8x{accelerator}"
    asks = (1, 1, 1, 1, gpus, 3, micro, count)
    return Row(f"llm-foundry, {gpus} {accelerator}, {seq}", "mpt-7b", where, text, asks)


FSDP = [_fsdp(row) for row in _FSDP]

# --- Fine-tuning frameworks -----------------------------------------------------------------------


def _tuning() -> dict[str, list[Row]]:
    """Return the configurations of benchmarks/inputs that stand alone, by their reader."""
    rows: dict[str, list[Row]] = {
        of: [] for of in ("llama-factory", "axolotl", "ms-swift", "trl", "litgpt", "verl", "nemo")
    }
    for entry in inputs():
        alone = not entry.files and not entry.values and entry.refused is None
        if entry.reader in rows and alone and not is_script(entry.text):
            row = Row(entry.source, entry.model, entry.cluster, entry.text, ())
            rows[entry.reader].append(row)
    return rows


TUNING = _tuning()
