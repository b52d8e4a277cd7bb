"""What Megatron-LM, torchtitan, DeepSpeed and nanotron make of a configuration.

Written from their sources, and sharing no code with what is tested: which settings there are and of
which type, what is refused, how a step's batch is divided, and the learning rate of each step.

    Megatron-LM  August 2026: megatron/training/arguments.py, training/config/training_config.py,
                 core/num_microbatches_calculator.py, core/optimizer_param_scheduler.py
    torchtitan   0.2.2: config/job_config.py, train.py, components/lr_scheduler.py,
                 distributed/{pipeline_parallel,utils}.py, models/llama3/infra/parallelize.py
    DeepSpeed    0.19: runtime/config.py, runtime/constants.py
    nanotron     0.4: config/{config,parallelism_config}.py, helpers.py
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import tomllib
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Step:
    """How one optimizer step is made."""

    forward_samples: int
    """In one forward of one data-parallel rank."""
    forwards: int
    """Of each data-parallel rank, pipeline micro-batches and accumulation together."""
    data: int
    seq_len: int

    @property
    def tokens(self) -> int:
        return self.forward_samples * self.forwards * self.data * self.seq_len


# --- Megatron-LM ----------------------------------------------------------------------------------

_WHOLE = [
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "num-layers-per-virtual-pipeline-stage",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "micro-batch-size",
    "global-batch-size",
    "seq-length",
    "recompute-num-layers",
    "lr-warmup-iters",
    "lr-decay-iters",
    "lr-wsd-decay-iters",
]
_REAL = [
    "lr",
    "min-lr",
    "lr-warmup-init",
    "weight-decay",
    "clip-grad",
    "adam-beta1",
    "adam-beta2",
    "adam-eps",
]
_SWITCHES = [
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-megatron-fsdp",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "bf16",
    "fp16",
    "fp8-param-gather",
    "reuse-grad-buf-for-mxfp8-param-ag",
    "fp8-dot-product-attention",
    "no-gradient-accumulation-fusion",
    "moe-grouped-gemm",
]
_WORDS = {
    "data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "ckpt-format": ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"],
    "recompute-granularity": ["full", "selective"],
    "recompute-method": ["uniform", "block"],
    "lr-decay-style": ["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    "lr-wsd-decay-style": ["exponential", "linear", "cosine", "minus_sqrt"],
    "fp8-format": ["e4m3", "hybrid"],
    "fp8-recipe": ["tensorwise", "delayed", "mxfp8", "blockwise", "custom"],
    "optimizer": ["adam", "sgd"],
    "moe-token-dispatcher-type": ["allgather", "alltoall", "flex"],
}
_DEFAULTS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "min_lr": 0.0,
    "lr_warmup_iters": 0,
    "lr_warmup_init": 0.0,
    "lr_decay_style": "linear",
    "lr_wsd_decay_style": "exponential",
    "optimizer": "adam",
    "moe_token_dispatcher_type": "allgather",
}


def megatron_layout(text: str) -> tuple[int, ...]:
    """Return blocks of each stage, as Megatron unrolls them."""
    stages = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text).split("|")
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    assert set("".join(stages)[1:-1]) == {"t"}
    return tuple(stage.count("t") for stage in stages)


def megatron(text: str) -> argparse.Namespace:
    """Parse and validate flags as Megatron-LM does."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in _WHOLE:
        parser.add_argument(f"--{name}", type=int)
    for name in _REAL:
        parser.add_argument(f"--{name}", type=float)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, choices in _WORDS.items():
        parser.add_argument(f"--{name}", choices=choices)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.set_defaults(**_DEFAULTS)
    args = parser.parse_args(shlex.split(text))
    if args.pipeline_model_parallel_layout is not None:
        assert args.num_layers_per_virtual_pipeline_stage is None
        assert args.decoder_first_pipeline_num_layers is None
        assert not args.account_for_embedding_in_pipeline_split
        assert not args.account_for_loss_in_pipeline_split
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    if args.use_megatron_fsdp:
        args.use_distributed_optimizer = True
        assert args.ckpt_format == "fsdp_dtensor"
    if args.fp8_param_gather:
        assert args.use_distributed_optimizer or args.use_megatron_fsdp
    if args.reuse_grad_buf_for_mxfp8_param_ag:
        assert args.fp8_param_gather and args.fp8_recipe == "mxfp8"
    if args.overlap_param_gather:
        assert args.use_distributed_optimizer
        assert args.overlap_grad_reduce
    if args.lr_decay_style != "constant" and args.lr_decay_iters is not None:
        assert args.lr_warmup_iters < args.lr_decay_iters
    assert args.lr is None or args.lr_warmup_init <= args.lr
    return args


def megatron_step(args: argparse.Namespace, world: int) -> Step:
    model_ranks = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    assert world % model_ranks == 0
    data = world // model_ranks
    at_once = args.micro_batch_size * data
    assert args.global_batch_size % at_once == 0
    return Step(args.micro_batch_size, args.global_batch_size // at_once, data, args.seq_length)


def megatron_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step; the scheduler counts the samples of the steps before."""
    n = step * args.global_batch_size
    warmup = args.lr_warmup_iters * args.global_batch_size
    if warmup > 0 and n <= warmup:
        return args.lr_warmup_init + (args.lr - args.lr_warmup_init) * n / warmup
    if args.lr_decay_style == "constant":
        return args.lr
    decay = args.lr_decay_iters * args.global_batch_size
    if n > decay:
        return args.min_lr
    ratio = (n - warmup) / (decay - warmup)
    if args.lr_decay_style == "linear":
        coefficient = 1 - ratio
    elif args.lr_decay_style == "cosine":
        coefficient = 0.5 * (math.cos(math.pi * ratio) + 1)
    else:
        assert args.lr_decay_style == "WSD"
        anneal = args.lr_wsd_decay_iters * args.global_batch_size
        ratio = max(0, n - (decay - anneal)) / anneal
        coefficient = {
            "linear": 1 - ratio,
            "exponential": 2 * 0.5**ratio - 1,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1),
            "minus_sqrt": 1 - math.sqrt(ratio),
        }[args.lr_wsd_decay_style]
    return args.min_lr + coefficient * (args.lr - args.min_lr)


# --- torchtitan 0.2 -------------------------------------------------------------------------------

_JOB: dict[str, dict[str, Any]] = {
    "model": {"converters": []},
    "optimizer": {
        "name": "AdamW",
        "lr": 8e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    },
    "lr_scheduler": {
        "warmup_steps": 200,
        "total_steps": None,
        "decay_ratio": None,
        "decay_type": "linear",
        "min_lr_factor": 0.0,
    },
    "training": {
        "local_batch_size": 8,
        "global_batch_size": -1,
        "seq_len": 2048,
        "max_norm": 1.0,
        "steps": 10000,
        "enable_cpu_offload": False,
        "mixed_precision_param": "bfloat16",
    },
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "default",
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "module_fqns_per_model_part": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 1,
        "pipeline_parallel_expert_parallel_overlap": True,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "enable_async_tensor_parallel": False,
    },
    "compile": {"enable": False, "components": ["model", "loss"]},
    "quantize": {"linear": {}, "grouped_mm": {}},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
}
_QUANTIZE: dict[str, dict[str, Any]] = {
    "linear.float8": {
        "enable_fsdp_float8_all_gather": False,
        "precompute_float8_dynamic_scale_for_fsdp": False,
        "recipe_name": None,
        "filter_fqns": [],
        "emulate": False,
    },
    "linear.mx": {
        "mxfp8_dim1_cast_kernel_choice": "triton",
        "recipe_name": "mxfp8_cublas",
        "filter_fqns": ["output"],
    },
    "grouped_mm.float8": {"fqns": []},
    "grouped_mm.mx": {"recipe_name": "mxfp8", "fqns": []},
}
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def torchtitan(text: str, *, layers: int) -> dict[str, dict[str, Any]]:
    """Read a job's TOML over the defaults, and refuse what a run would; it ignores unknown keys."""
    told = tomllib.loads(text)
    job = {name: dict(section) for name, section in _JOB.items()}
    for name, section in told.items():
        assert set(section) <= set(job[name]), f"no such keys: {set(section) - set(job[name])}"
        job[name].update(section)
    axes = job["parallelism"]
    _check_quantized(job)
    shards = axes["data_parallel_shard_degree"] * axes["context_parallel_degree"]
    others = axes["tensor_parallel_degree"] * axes["pipeline_parallel_degree"]
    if shards == 1 and axes["data_parallel_replicate_degree"] > 1:
        assert others == 1, "DDP has not supported > 1D parallelism"
    if shards == 1 and others > 1:
        assert job["training"]["mixed_precision_param"] == "float32", "mixed precision is disabled"
    if axes["pipeline_parallel_degree"] > 1:
        stages = len(titan_stages(job, layers))
        assert stages % axes["pipeline_parallel_degree"] == 0
        each = stages // axes["pipeline_parallel_degree"]
        schedule = axes["pipeline_parallel_schedule"]
        assert schedule in SINGLE + LOOPED
        assert (each == 1) == (schedule in SINGLE)
    return job


def _check_quantized(job: dict[str, dict[str, Any]]) -> None:
    """Refuse what its converters do (components/quantization of torchtitan 0.2.2)."""
    told = job["quantize"]
    for first, parts in told.items():
        for second, section in parts.items():
            usual = _QUANTIZE[f"{first}.{second}"]
            assert set(section) <= set(usual), f"no such keys: {set(section) - set(usual)}"
    converters = {name.removeprefix("quantize.") for name in job["model"]["converters"]}
    assert converters <= set(_QUANTIZE)
    compiled = job["compile"]["enable"] and "model" in job["compile"]["components"]
    axes = job["parallelism"]
    if "linear.float8" in converters:
        own = _QUANTIZE["linear.float8"] | told.get("linear", {}).get("float8", {})
        if own["recipe_name"] is not None:
            assert own["recipe_name"] in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
            assert not own["enable_fsdp_float8_all_gather"]
        if "auto_filter_small_kn" in own["filter_fqns"]:
            assert own["recipe_name"] != "rowwise_with_gw_hp", "torchao: Unsupported recipe"
    if "linear.mx" in converters:
        assert not (compiled and axes["tensor_parallel_degree"] > 1), "TP not yet supported"
    if "grouped_mm.float8" in converters:
        assert axes["pipeline_parallel_degree"] == axes["context_parallel_degree"] == 1


def titan_stages(job: dict[str, dict[str, Any]], layers: int) -> list[int]:
    """Return how many blocks each stage has."""
    axes = job["parallelism"]
    if axes["module_fqns_per_model_part"] is not None:
        return [
            sum(name.startswith("layers.") for name in part)
            for part in axes["module_fqns_per_model_part"]
        ]
    first = axes["pipeline_parallel_first_stage_less_layers"]
    last = axes["pipeline_parallel_last_stage_less_layers"]
    ranks, each = axes["pipeline_parallel_degree"], axes["pipeline_parallel_layers_per_stage"]
    if each is not None:
        stages = math.ceil((layers + first + last) / each)
    else:
        stages = ranks * (1 if axes["pipeline_parallel_schedule"] in SINGLE else 2)
    least, more = divmod(layers + first + last, stages)
    blocks = [least + (stage < more) for stage in range(stages)]
    blocks[0] -= first
    blocks[-1] -= last
    return blocks


def titan_step(job: dict[str, dict[str, Any]]) -> Step:
    training, axes = job["training"], job["parallelism"]
    data = axes["data_parallel_replicate_degree"] * axes["data_parallel_shard_degree"]
    local = training["local_batch_size"]
    whole = training["global_batch_size"]
    whole = local * data if whole < 0 else whole
    assert whole % (local * data) == 0
    forwards, samples = whole // (local * data), local
    if axes["pipeline_parallel_degree"] > 1:
        samples = axes["pipeline_parallel_microbatch_size"]
        assert local % samples == 0
        forwards *= local // samples
    return Step(samples, forwards, data, training["seq_len"])


def titan_rate(job: dict[str, dict[str, Any]], step: int) -> float:
    """Return the learning rate of a step, the first is 0."""
    schedule, training = job["lr_scheduler"], job["training"]
    assert step < training["steps"], "training has ended"
    total = schedule["total_steps"]
    total = training["steps"] if total is None else total
    warmup = min(schedule["warmup_steps"], total)
    decay = total - warmup
    if schedule["decay_ratio"] is not None:
        decay = min(decay, round(total * schedule["decay_ratio"]))
    stable = total + 1 - warmup - decay
    factor = 1.0
    if step < warmup:
        factor = (step + 1) / warmup
    elif step >= warmup + stable:
        done = (step + 1 - warmup - stable) / decay
        left = 1 - done
        if schedule["decay_type"] == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * done))
        factor = schedule["min_lr_factor"] + (1 - schedule["min_lr_factor"]) * left
    return job["optimizer"]["lr"] * factor


# --- DeepSpeed ------------------------------------------------------------------------------------

_DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "bf16",
    "fp16",
    "zero_optimization",
}


def deepspeed(text: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(text)
    assert set(told) <= _DEEPSPEED
    return told


def deepspeed_step(told: dict[str, Any], world: int, seq_len: int) -> Step:
    samples, forwards = told["train_micro_batch_size_per_gpu"], told["gradient_accumulation_steps"]
    assert told["train_batch_size"] == samples * forwards * world
    return Step(samples, forwards, world, seq_len)


# --- nanotron 0.4 ---------------------------------------------------------------------------------

_NANOTRON = {
    "parallelism": {
        "dp",
        "pp",
        "tp",
        "pp_engine",
        "tp_mode",
        "tp_linear_async_communication",
        "recompute_layer",
        "moe_layer_recompute",
        "tp_recompute_allgather",
        "expert_parallel_size",
        "context_parallel_size",
    },
    "model": {"model_config", "init_method", "dtype", "make_vocab_size_divisible_by"},
    "tokens": {
        "sequence_length",
        "train_steps",
        "micro_batch_size",
        "batch_accumulation_per_replica",
    },
    "optimizer": {
        "optimizer_factory",
        "zero_stage",
        "weight_decay",
        "clip_grad",
        "accumulate_grad_in_fp32",
        "learning_rate_scheduler",
        "weight_decay_exclude_named_params",
    },
}


def nanotron(text: str) -> dict[str, Any]:
    """Read a configuration, refusing keys that no dataclass of it has (dacite is strict)."""
    told: dict[str, Any] = yaml.safe_load(text)
    for name, section in told.items():
        assert set(section) <= _NANOTRON[name], f"no such keys: {set(section) - _NANOTRON[name]}"
    axes, rates = told["parallelism"], told["optimizer"]["learning_rate_scheduler"]
    assert axes["pp_engine"] in ("1f1b", "afab")
    assert axes["tp_mode"] in ("ALL_REDUCE", "REDUCE_SCATTER")
    assert told["optimizer"]["zero_stage"] in (0, 1)
    assert told["optimizer"]["optimizer_factory"]["name"] == "adamW"
    assert rates["lr_warmup_style"] in ("linear", "constant")
    assert rates["lr_decay_style"] in ("linear", "cosine", "1-sqrt")
    assert told["model"]["dtype"] in ("bfloat16", "float32")
    return told


def nanotron_step(told: dict[str, Any], world: int) -> Step:
    axes, tokens = told["parallelism"], told["tokens"]
    others = axes["pp"] * axes["tp"] * axes["expert_parallel_size"] * axes["context_parallel_size"]
    assert axes["dp"] * others == world
    return Step(
        tokens["micro_batch_size"],
        tokens["batch_accumulation_per_replica"],
        axes["dp"],
        tokens["sequence_length"],
    )


def nanotron_rate(told: dict[str, Any], step: int) -> float:
    """Return the learning rate of a step, the first is 0."""
    rates = told["optimizer"]["learning_rate_scheduler"]
    highest, least = rates["learning_rate"], rates["min_decay_lr"]
    warmup, begin = rates["lr_warmup_steps"], rates["lr_decay_starting_step"]
    steps = rates["lr_decay_steps"]
    assert warmup or steps, "a rate would be used as a factor"
    if step <= warmup:
        constant = rates["lr_warmup_style"] == "constant"
        return float(highest if constant else highest * step / max(warmup, 1))
    if step < begin:
        return float(highest)
    if step >= begin + steps:
        return float(least)
    if rates["lr_decay_style"] == "cosine":
        left = (1 + math.cos(math.pi * (step - begin) / steps)) / 2
    else:
        left = (steps - (step - begin)) / steps
    return float(least + (highest - least) * left)
