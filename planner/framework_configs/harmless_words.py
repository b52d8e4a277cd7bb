"""Words of configurations that change neither seconds nor bytes of a step, a table each reader.

A word that a reader does not use and that is not listed here may change either: the answer names
it, its range is wider, and its probability to fit is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MEGATRON = """
    log-.* timing-log-.* eval-.* test-mode save save-.* load load-.* data-path split
    .*-data-path data-cache-path data-args-path tokenizer-.* vocab-file merge-file vocab-extra-ids
    tensorboard-.* wandb-.* distributed-backend distributed-timeout-minutes init-method-std
    num-workers no-load-.* no-save-.* exit-.* ckpt-.* async-save dist-ckpt-.* use-dist-ckpt
    auto-detect-ckpt-format finetune dataloader-type no-data-sharding mock-data
    no-create-attention-mask-in-dataloader no-mmap-bin-files use-persistent-ckpt-worker
    rotary-.* use-rotary-position-embeddings use-rope-scaling rope-.* mscale.*
    max-position-embeddings norm-epsilon layernorm-epsilon
    make-vocab-size-divisible-by use-mcore-models moe-router-load-balancing-type
    moe-aux-loss-coeff moe-z-loss-coeff moe-router-dtype
    moe-router-score-function moe-router-enable-expert-bias moe-router-bias-update-rate
    moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor
    moe-router-pre-softmax moe-per-layer-logging eod-mask-loss
    attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 loss-scale initial-loss-scale
    min-loss-scale loss-scale-window hysteresis lr-warmup-init override-opt_param-scheduler
    override-opt-param-scheduler use-checkpoint-opt.param-scheduler enable-experimental
    calculate-per-token-loss manual-gc(-interval)? logging-level decoupled-(min-)?lr
    check-weight-hash-across-dp-replicas-interval no-ckpt-fully-parallel-save async-strategy
    verify-integrity te-rng-tracker mtp-loss-scaling-factor tiktoken-.* max-epochs
    check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad
    ddp-average-in-collective fp8-amax-.* fp8-margin fp8-interval
    mock-data no-one-logger attention-dropout hidden-dropout
    train-iters train-samples lr-decay-.* lr-warmup-.* min-lr lr-wsd-decay-.*
    job-name output partition account time error exclusive mem mail-.* comment container-.*
    label network kill-on-bad-exit wait export ntasks cpus-per-task gpus-per-task
"""
_TRANSFORMERS = """
    output_dir overwrite_output_dir logging_.* log_level.* save_.* eval_.* evaluation_strategy
    do_train do_eval do_predict report_to run_name push_to_hub hub_.* seed data_seed
    dataloader_.* dataset.* data_path train_file validation_file preprocessing_.*
    overwrite_cache resume_from_checkpoint load_best_model_at_end metric_for_best_model
    greater_is_better ddp_timeout ddp_find_unused_parameters disable_tqdm remove_unused_columns
    num_train_epochs template trust_remote_code tokenizer_name cache_dir token use_auth_token
    chat_template.* prediction_loss_only include_.* per_device_eval_batch_size stage
    local_rank use_fast_tokenizer model_revision config_name max_train_samples max_eval_samples
    fsdp_transformer_layer_cls_to_wrap fsdp_config\\.(fsdp_)?transformer_layer_cls_to_wrap
    fsdp_config\\.(fsdp_)?((final_)?state_dict_type|sync_module_states|use_orig_params)
    fsdp_config\\.(fsdp_)?cpu_ram_efficient_loading warmup_.* lr_scheduler_.* max_steps
    learning_rate weight_decay lora_dropout adam_.* max_grad_norm model_name_or_path trackio.*
    project eos_token pad_token
    bnb_4bit_compute_dtype use_bnb_nested_quant completion_only_loss assistant_only_loss
    lora_task_type max_prompt_length model_init_kwargs low_cpu_mem_usage streaming
    config gradient_checkpointing_kwargs\\.preserve_rng_state ddp_backend
    beta center_rewards_coefficient reward_funcs reward_weights num_generations temperature
    top_p top_k use_rslora group_by_length length_column_name
"""
_TORCHTITAN = """
    job\\..* metrics\\..* checkpoint\\..* profiling\\..* comm\\..* validation\\..*
    experimental\\..*
    debug\\..* dump_folder description model\\.tokenizer_path model\\.hf_assets_path
    model\\.print_after_conversion training\\.dataset training\\.dataset_path
    training\\.deterministic training\\.seed training\\.steps metrics checkpoint profiling comm
    validation job hf_assets_path dataloader\\..* dataloader lr_scheduler\\..*
    pattern optimizer\\.(eps|lr|betas|beta1|beta2|weight_decay) profiler validator tokenizer
    activation_checkpoint\\.(preserve_rng_state|determinism_check|debug)
"""
_DEEPSPEED = """
    steps_per_print wall_clock_breakdown dump_state wandb tensorboard csv_monitor comms_logger
    flops_profiler checkpoint data_types\\.grad_accum_dtype memory_breakdown
    zero_allow_untested_optimizer (bf16|fp16)\\.(auto_cast|consecutive_hysteresis)
    (bf16|fp16)\\..*(loss_scale|hysteresis|initial).*
    prescale_gradients zero_force_ds_cpu_optimizer
    zero_optimization\\.(round_robin_gradients|elastic_checkpoint|ignore_unused_parameters)
    zero_optimization\\.stage3_gather_16bit_weights_on_model_save
    zero_optimization\\.gather_16bit_weights_on_model_save
    gradient_predivide_factor
    scheduler\\.params\\.(warmup_min_lr|warmup_type|last_batch_iteration)
    optimizer\\.params\\.(adam_w_mode|bias_correction) scheduler\\..*
"""
_ACCELERATE = """
    debug downcast_bf16 enable_cpu_affinity gpu_ids use_cpu fsdp_config\\.fsdp_activation_cpu_.*
    compute_environment num_machines machine_rank main_training_function main_process_.*
    rdzv_backend rdzv_conf num_cpu_threads_per_process max_restarts monitor_interval
    same_network tpu_.*
    deepspeed_config\\.deepspeed_(hostfile|exclusion_filter|inclusion_filter) .*_logging.*
    deepspeed_config\\.(zero3_save_16bit_model|zero3_init_flag|deepspeed_multinode_launcher)
    fsdp_config\\.fsdp_(state_dict_type|cpu_ram_efficient_loading|sync_module_states)
    fsdp_config\\.fsdp_(transformer_layer_cls_to_wrap|use_orig_params)
"""
_NANOTRON = """
    checkpoints\\..* checkpoints general\\..* general logging\\..* logging data_stages.*
    profiler tokenizer\\..* tokenizer lighteval s3_upload metrics_logging
    tokens\\.(limit_.*|val_check_interval|train_steps)
    model\\.(init_method|make_vocab_size_.*).*
    parallelism\\.recompute_layer_name optimizer\\.weight_decay_exclude_named_params
    optimizer\\.learning_rate_scheduler\\..*
    model\\.model_config\\.(bos|eos|pad|initializer|rope|rms).*
    model\\.model_config\\.(use_cache|pretraining|hidden_act|is_|_attn_impl|max_position).*
"""
_LLAMA_FACTORY = """
    plot_loss max_samples tokenized_path val_size dataset_dir media_dir eval_dataset resize_vocab
    mask_history train_on_prompt mix_strategy interleave_probs buffer_size tool_format
    default_system enable_thinking ray_.* add_tokens add_special_tokens new_special_tokens.*
    split_special_tokens use_swanlab swanlab_.* hf_hub_token ms_hub_token om_hub_token
    print_param_status data_shared_file_system create_new_adapter adapter_name_or_path
    adapter_folder image_max_pixels image_min_pixels video_.* double_quantization
    early_stopping_steps ignore_pad_token_for_loss compute_accuracy export_.* infer_.*
    rope_scaling image_resolution pref_beta model_class train_dataset
    sample_backend max_new_tokens batching_workers dist_timeout full_determinism
    dist_config\\.dcp_path peft_config\\.lora_dropout save_ckpt_as_hf extra_config
    freeze_vision_tower freeze_multi_modal_projector
"""
_AXOLOTL = """
    datasets test_datasets val_set_size dataset_prepared_path dataset_processes
    wandb_.* mlflow_.* comet_.* saves_per_epoch evals_per_epoch num_epochs train_on_inputs
    tokenizer_.* model_type special_tokens tokens base_model_config is_.*_derived_model
    hf_use_auth_token hub_.* early_stopping_patience loss_watchdog_.* local_rank
    chat_template.* default_system_message shuffle_merged_datasets strict save_safetensors
    lora_model_dir lora_fan_in_fan_out eot_tokens auto_resume_from_checkpoints
    revision_of_model eval_.* skip_prepare_dataset use_tensorboard save_first_step
    cosine_min_lr_ratio processor_type warmup_ratio roles_to_train train_on_eos
    remove_unused_columns pad_to_sequence_len load_best_model_at_end resume_from_checkpoint debug
    rl_beta push_dataset_to_hub liger_layer_norm peft_use_rslora random_init
"""
_MS_SWIFT = """
    system val_dataset split_dataset_ratio dataset_num_proc load_from_cache_file model_author
    model_name model_type loss_scale add_version check_model use_hf create_checkpoint_symlink
    custom_.* interleave_prob data_seed strict val_dataset_shuffle lazy_tokenize agent_template
    save_only_model swanlab_.* truncation_strategy external_plugins
    cached_dataset hub_token norm_bbox response_prefix merge_lora no_save_.* finetune
    moe_aux_loss_coeff router_aux_loss_coef freeze[_-](vit|aligner) use_chat_template label_names
    rpo[_-]alpha add[_-]non[_-]thinking[_-]prefix use_vllm vllm_server_.* vllm_mode
    beta center_rewards_coefficient reward_funcs reward_weights num_generations temperature
    top_p top_k
"""
_LITGPT = """
    out_dir data logger_name
    train\\.(save_interval|log_interval|epochs|max_tokens|max_time|min_lr)
    train\\.(lr_warmup_fraction|lr_warmup_steps|max_steps|tie_embeddings) eval log resume
    tokenizer_dir access_token seed generate lora_dropout
"""
_VERL = """
    data\\.(train_files|val_files|prompt_key|tokenizer|shuffle|val_batch_size|return_raw_.*)
    data\\.(filter_overlong_.*|truncation|dataloader_.*|image_key|reward_fn_key|seed|custom_cls)
    data\\.(trust_remote_code|val_max_samples|train_max_samples|apply_chat_template.*)
    trainer\\..* algorithm reward_model custom_reward_function ray_init ray_kwargs critic
    hydra global_profiler transfer_queue actor_rollout_ref\\.(hybrid_engine|nccl_timeout)
    actor_rollout_ref\\.rollout\\.(?!free_cache_engine).*
    actor_rollout_ref\\.model\\.(external_lib|trust_remote_code|tokenizer_path|use_shm)
    actor_rollout_ref\\.model\\.custom_chat_template
    actor_rollout_ref\\.actor\\.(clip_.*|kl_loss_.*|use_kl_loss|entropy_coeff|ppo_epochs|shuffle)
    actor_rollout_ref\\.actor\\.(loss_agg_mode|checkpoint|policy_loss|data_loader_seed|loss_scale.*)
    actor_rollout_ref\\.actor\\.optim\\.(lr_.*|min_lr_ratio|warmup_style|total_training_steps|num_.*)
    actor_rollout_ref\\.actor\\.fsdp_config\\.wrap_policy .*\\._target_
    .*\\.(betas|clip_grad|min_lr)
    actor_rollout_ref\\.(ref|actor\\.profiler|actor\\.router_replay)(\\..*)? profiler.*
    actor_rollout_ref\\.actor\\.(rollout_n|calculate_.*|tau_.*|grad_clip|freeze_vision_tower)
    .*\\.(dist_checkpointing_.*|use_dist_checkpointing|full_determinism|forward_only)
    actor_rollout_ref\\.actor\\.optim\\.(weight_decay_incr_style|use_checkpoint_opt.*|override_.*)
    actor_rollout_ref\\.actor\\.optim\\.(zero_indexed_step|decay_.*|init_lr|end_.*|start_.*)
    actor_rollout_ref\\.model\\.(lora_adapter_path|hf_config_path|tokenizer.*|_target_)
    .*override_transformer_config\\.moe_(router_dtype|aux_loss_coeff|z_loss_coeff)
    data\\.(use_shm|validation_shuffle|image_patch_size)
    actor_rollout_ref\\.actor\\.(megatron\\.(seed|use_mbridge|vanilla_mbridge)|fsdp_config\\.use_orig_params)
    data\\.(tool_config_path|return_.*|filter_.*|video_key|audio_key|sampler|datagen|_target_)
    reward.* critic.*
"""
_NEMO = """
    name restore_from_path exp_manager run hydra trainer\\.(logger|max_.*|log_every_n_steps)
    trainer\\.(val_check_interval|limit_.*|enable_.*|accelerator|use_distributed_sampler)
    trainer\\.(num_sanity_val_steps|check_val_every_n_epoch|replace_sampler_ddp)
    model\\.(data|tokenizer|nsys_profile|activation|init_method_std|layernorm_epsilon|seed)
    model\\.(share_embeddings_and_output_weights|max_position_embeddings|mcore_gpt|resume_.*)
    model\\.(pre_process|post_process|rotary_.*|hidden_dropout|attention_dropout|ffn_dropout)
    model\\.(make_vocab_size_divisible_by|use_scaled_init_method|native_amp_.*|hysteresis)
    model\\.(megatron_amp_O2|bias|persist_layer_norm|apply_query_key_layer_scaling|precision)
    model\\.optim\\.(sched|weight_decay|betas|lr|bucket_cap_mb)
"""
_OF_LAUNCH = """
    nproc-per-node nnodes node-rank master-addr master-port rdzv-.* num-machines machine-rank
    main-process-.* standalone max-restarts tee redirects log-dir role run-path hostfile
"""
_TRAINER = _TRANSFORMERS + _DEEPSPEED + _OF_LAUNCH
TABLES: dict[str, str] = {
    "megatron": _MEGATRON + _OF_LAUNCH + "ENV_VARS TEST_TYPE METRICS LAUNCHER",
    "megatron-bridge": " ".join(
        f"(model|train|dataset|ddp|optimizer|scheduler)\\.{pattern}"
        for pattern in _MEGATRON.split()
    )
    + " checkpoint logger profiling rng tokenizer dist validation",
    "torchtitan": _TORCHTITAN,
    "torchtitan@0.2": _TORCHTITAN,
    "deepspeed": _DEEPSPEED,
    "accelerate": _ACCELERATE + _DEEPSPEED,
    "transformers": _TRAINER,
    "trl": _TRAINER,
    "llama-factory": _TRAINER + _LLAMA_FACTORY,
    "axolotl": _TRAINER + _AXOLOTL,
    "ms-swift": _TRAINER + _MS_SWIFT,
    "litgpt": _LITGPT,
    "verl": _VERL,
    "nemo": _NEMO,
    "nanotron": _NANOTRON,
    "fsdp": "",
    "slurm": "",
}
TABLES["slurm"] = " ".join(TABLES.values()).replace("ENV_VARS", "")
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
"""Patterns of the topics of words, the most decisive first."""


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
