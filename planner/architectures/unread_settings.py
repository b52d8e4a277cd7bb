"""Settings of a configuration that no reader uses: harmless ones, and those that are named.

A key that is neither read nor listed here may change layers, bytes or seconds: the answer names it,
its range is wider, and its probability to fit is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HARMLESS = """
    _name_or_path name_or_path architectures auto_map transformers_version torch_dtype dtype
    model_type model_name model_version library_name license _attn_implementation.* unsloth_.*
    custom_pipelines transformers\\.js_config _commit_hash tokenizer_.* verbose init_device
    init_config keys_to_ignore_at_inference task_specific_params finetuning_task problem_type
    output_.* return_dict.* use_cache cache_.* max_length min_length do_sample num_beams
    temperature top_k top_p repetition_penalty length_penalty no_repeat_ngram_size
    early_stopping num_return_sequences bad_words_ids suppress_tokens forced_.* prefix
    (\\w+_)?token_ids? id2label label2id language(s)? for_llm_compressor max_model_len
    initializer_.* init_std embedding_init.* (\\w+_)?norm_eps(ilon)? layernorm_epsilon norm_epsilon
    rms_norm rope_.* rotary_emb_base rotary original_max_position_embeddings initial_context_length
    partial_rotary_factor no_rope_layers no_rope_layer_interval n_ctx
    attn_scale attn_temperature_tuning floor_scale query_pre_attn_scalar logit_scale
    logits_scaling embedding_multiplier residual_multiplier attention_multiplier
    (attn|final)_logit_softcapping swiglu_(alpha|limit) scale_attn_weights
    scale_attention_softmax_in_fp32 attention_softmax_in_fp32 masked_softmax_fusion
    bias_dropout_fusion skip_bias_add.* offset_alibi slow_but_exact pretraining_tp
    hidden_act hidden_activation activation activation_function pooler_act mlp_type
    (\\w+_)?(dropout|pdrop)(_prob)?
    router_.* routed_scaling_factor norm_topk_prob scoring_func topk_method seq_aux
    (aux|z)_loss_(alpha|coeff?) n_group topk_group moe_router_.*
    summary_.* encoder_stride pooler_output_size
    num_nextn_predict_layers
"""
"""Numerics, dropout, tokens, generation and the routing's loss.  Layers that predict further tokens
are trained where a framework's own switch adds them."""
_HARMLESS_OF = {
    "deepseek_v2": "qk_head_dim head_dim ep_size rope_interleave moe_layer_freq",
    "deepseek_v3": "qk_head_dim head_dim ep_size rope_interleave moe_layer_freq",
    "falcon": "num_kv_heads parallel_attn multi_query",
    "gemma3_text": "_?sliding_window_pattern",
    "gpt_bigcode": "num_key_value_heads inference_runner validate_runner_input max_(batch|seq).* "
    "pre_allocate_kv_cache",
    "gpt_oss": "experts_per_token",
    "llama4_text": "intermediate_size_mlp use_qk_norm moe_layers",
    "minimax_m2": "use_qk_norm qk_norm_type use_routing_bias use_mtp num_mtp_modules "
    "mtp_transformer_layers",
    "mpt": "learned_pos_emb embedding_fraction no_bias norm_type",
    "qwen2": "max_window_layers sliding_window",
    "qwen2_moe": "max_window_layers sliding_window",
    "qwen3": "max_window_layers sliding_window",
    "qwen3_moe": "max_window_layers sliding_window intermediate_size",
    "smollm3": "max_window_layers sliding_window",
}
"""The same by type: repetitions of other keys, and switches of what the type always does."""
_STORED = ("fp8", "mxfp4")
"""Types of stored weights that are converted before they train; others stay packed in a run of
transformers, which the command asks for as `--lora weights=`."""
_FULL = {"layer_types": "full_attention", "attn_type_list": "1"}
"""Lists with an entry for each layer, and the entry that says nothing of a layer."""


def unread_settings(config: Mapping[str, Any], read: set[str], kind: str) -> tuple[str, ...]:
    """Return the settings that were neither read nor are harmless, each with its value.

    >>> unread_settings({"hidden_act": "silu", "engram_size": 4, "mtp": 0}, set(), "llama")
    ('engram_size=4',)
    """
    patterns = "|".join((_HARMLESS + _HARMLESS_OF.get(kind, "")).split())
    return tuple(
        f"{key}={value!r:.40}"
        for key, value in config.items()
        if key not in read and not re.fullmatch(patterns, key) and not _is_off(key, value)
    )


def _is_off(key: str, value: object) -> bool:
    """Return whether a setting switches nothing on."""
    if key == "quantization_config" and isinstance(value, Mapping):
        return value.get("quant_method") in _STORED
    if isinstance(value, list) and key in _FULL:
        return {str(entry) for entry in value} <= {_FULL[key]}
    return value in (None, 0, "", [], {})  # False is 0
