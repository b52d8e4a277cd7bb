"""Words of configurations that change neither seconds nor bytes of a step, a table each reader.

A word that a reader does not use and that is not listed here may change either: the answer names
it, its range is wider, and its probability to fit is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.planner.documents.prediction import Prediction

_MEGATRON = """
    log-.* timing-log-.* eval-.* test-mode save save-.* load load-.* data-path split
    .*-data-path data-cache-path data-args-path tokenizer-.* vocab-file merge-file vocab-extra-ids
    tensorboard-.* wandb-.* distributed-backend distributed-timeout-minutes init-method-std
    num-workers no-load-.* no-save-.* exit-.* ckpt-.* async-save dist-ckpt-.* use-dist-ckpt
    auto-detect-ckpt-format finetune dataloader-type no-data-sharding mock-data
    no-create-attention-mask-in-dataloader no-mmap-bin-files
    position-embedding-type rotary-.* use-rotary-position-embeddings no-rope-fusion
    max-position-embeddings
    normalization norm-epsilon swiglu disable-bias-linear untie-embeddings-and-output-weights
    make-vocab-size-divisible-by use-mcore-models add-qkv-bias qk-layernorm kv-channels
    transformer-impl moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff
    moe-router-score-function moe-router-enable-expert-bias moe-router-bias-update-rate
    moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor
    moe-router-pre-softmax moe-per-layer-logging moe-layer-freq
    kv-lora-rank q-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim multi-latent-attention
    moe-shared-expert-intermediate-size reset-.* eod-mask-loss squared-relu
    attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 loss-scale initial-loss-scale
    min-loss-scale loss-scale-window hysteresis lr-warmup-init override-opt_param-scheduler
    override-opt-param-scheduler use-checkpoint-.* enable-experimental
    check-for-nan-in-loss-and-grad
    no-check-for-nan-in-loss-and-grad ddp-average-in-collective train-data-path valid-data-path
    job-name output partition account time error exclusive mem mail-.* comment container-.*
    label network kill-on-bad-exit export ntasks cpus-per-task gpus-per-task
"""
_TRANSFORMERS = """
    output_dir overwrite_output_dir logging_.* log_level.* save_.* eval_.* evaluation_strategy
    do_train do_eval do_predict report_to run_name push_to_hub hub_.* seed data_seed
    dataloader_.* dataset.* data_path train_file validation_file preprocessing_.*
    overwrite_cache resume_from_checkpoint load_best_model_at_end metric_for_best_model
    greater_is_better ddp_timeout ddp_find_unused_parameters disable_tqdm remove_unused_columns
    num_train_epochs template trust_remote_code tokenizer_name cache_dir token use_auth_token
    chat_template.* prediction_loss_only include_.* per_device_eval_batch_size stage
    local_rank use_fast_tokenizer model_revision config_name
"""
_TORCHTITAN = """
    job\\..* metrics\\..* checkpoint\\..* profiling\\..* comm\\..* validation\\..* experimental\\..*
    debug\\..* dump_folder description model\\.tokenizer_path model\\.hf_assets_path
    model\\.print_after_conversion training\\.dataset training\\.dataset_path
    training\\.deterministic training\\.seed training\\.steps metrics checkpoint profiling comm
    validation job hf_assets_path dataloader\\..* dataloader lr_scheduler\\..*
    optimizer\\.eps profiler
"""
_DEEPSPEED = """
    steps_per_print wall_clock_breakdown dump_state wandb tensorboard csv_monitor comms_logger
    flops_profiler checkpoint data_types\\.grad_accum_dtype memory_breakdown
    zero_allow_untested_optimizer (bf16|fp16)\\..*(loss_scale|hysteresis|initial).*
    prescale_gradients
    zero_optimization\\.(round_robin_gradients|elastic_checkpoint)
    zero_optimization\\.stage3_gather_16bit_weights_on_model_save
    gradient_predivide_factor
"""
_ACCELERATE = """
    debug downcast_bf16 enable_cpu_affinity gpu_ids use_cpu fsdp_config\\.fsdp_activation_cpu_.*
    deepspeed_config\\.deepspeed_(hostfile|exclusion_filter|inclusion_filter) .*_logging.*
    fsdp_config\\.fsdp_(forward_prefetch|backward_prefetch_policy|min_num_params)
"""
_NANOTRON = """
    checkpoints\\..* checkpoints general\\..* general logging\\..* logging data_stages.*
    profiler tokenizer\\..* tokenizer lighteval s3_upload metrics_logging
    tokens\\.(limit_.*|val_check_interval|train_steps)
    model\\.(init_method|make_vocab_size_.*|ddp_bucket_cap_mb).*
    parallelism\\.recompute_layer_name
    model\\.model_config\\.(bos|eos|pad|initializer|rope|rms).*
    model\\.model_config\\.(use_cache|pretraining|hidden_act|is_).*
"""
_OF_LAUNCH = """
    nproc-per-node nnodes node-rank master-addr master-port rdzv-.* num-machines machine-rank
    main-process-.* standalone max-restarts tee redirects log-dir role run-path
"""
TABLES: dict[str, str] = {
    "megatron": _MEGATRON + _OF_LAUNCH,
    "megatron-bridge": _MEGATRON + "checkpoint logger profiling rng tokenizer dist validation",
    "torchtitan": _TORCHTITAN,
    "torchtitan@0.2": _TORCHTITAN,
    "deepspeed": _DEEPSPEED,
    "accelerate": _ACCELERATE + _DEEPSPEED,
    "transformers": _TRANSFORMERS + _DEEPSPEED + _OF_LAUNCH,
    "nanotron": _NANOTRON,
    "fsdp": "",
    "slurm": _MEGATRON + _TRANSFORMERS + _TORCHTITAN + _OF_LAUNCH,
}
"""Patterns of whole words, by reader."""
_WEIGHT = (
    r"offload|fsdp|zero|shard",
    r"recompute|checkpointing|activation",
    r"parallel|pipeline|expert|moe|stage",
    r"fp8|fp4|fp16|bf16|precision|dtype|quant|bit",
    r"optim|adam|lora|peft|freeze|train_on",
    r"attention|attn|flash|sdpa|kernel|liger|fus|compile|graph",
    r"overlap|comm|bucket|prefetch|batch|length|seq|pack",
    r"another script|\$",
)
"""What a word is about, the most decisive first."""
WIDER = 1.25
"""How much farther the ends of a range lie for the first word, and less for each other one."""
LEAST_ODDS, MOST_ODDS = 0.15, 0.85


def not_understood(unknown: Sequence[str], reader: str) -> tuple[str, ...]:
    """Return the words that may change seconds or bytes, the most decisive first."""
    table = [re.compile(pattern) for pattern in TABLES.get(reader, "").split()]

    def is_harmless(word: str) -> bool:
        plain = word.removeprefix("--")
        forms = {plain, plain.replace("-", "_"), plain.replace("_", "-")}
        return any(pattern.fullmatch(form) for pattern in table for form in forms)

    return tuple(sorted((word for word in unknown if not is_harmless(word)), key=_rank))


def _rank(word: str) -> int:
    lower = word.lower()
    matching = (at for at, pattern in enumerate(_WEIGHT) if re.search(pattern, lower))
    return next(matching, len(_WEIGHT))


def bounded(prediction: Prediction, words: Sequence[str]) -> Prediction:
    """Return a prediction of what was understood: its range is wider, nothing in it is certain."""
    if not words:
        return prediction
    wider = WIDER * (1 + 0.05 * min(len(words) - 1, 5))
    odds = prediction.fit_probability
    odds = (1.0 if prediction.fits else 0.0) if odds is None else odds
    named = ", ".join(word[:60] for word in words[:3])
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    peak = prediction.peak_memory_range_bytes
    update = {
        "step_time_low_s": prediction.step_time_low_s / wider,
        "step_time_high_s": prediction.step_time_high_s * wider,
        "fit_probability": min(max(odds, LEAST_ODDS), MOST_ODDS),
        "peak_memory_range_bytes": None if peak is None else (peak[0] / wider, peak[1] * wider),
    }
    bounded = prediction.model_copy(update=update)
    return bounded.with_notes(f"not understood: {named}{more}; time and memory may differ")
