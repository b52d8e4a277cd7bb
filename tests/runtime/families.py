"""Small configurations of the library's families, one of each that the runtime launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCABULARY = 272
"""Bytes, the end of a text, and what makes it a multiple of 16."""
_ENDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_SIZES: dict[str, Any] = {
    **_ENDS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_hidden_layers": 3,
}
_HEAD: dict[str, Any] = {**_SIZES, "head_dim": 8}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_GPT2: dict[str, Any] = {
    **_ENDS,
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
}
_TURNS = ["sliding_attention", "sliding_attention", "full_attention"]


def _new(name: str, **figures: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**figures)


FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek_v2": lambda: _new(
        "DeepseekV2Config",
        **_LATENT,
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    ),
    "deepseek_v3": lambda: _new(
        "DeepseekV3Config", **_LATENT, q_lora_rank=12, n_group=2, topk_group=1, rope_interleave=True
    ),
    "gemma": lambda: _new("GemmaConfig", **_HEAD),
    "gemma2": lambda: _new("Gemma2Config", **_HEAD, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3_text": lambda: _new(
        "Gemma3TextConfig", **_HEAD, sliding_window=6, query_pre_attn_scalar=8, layer_types=_TURNS
    ),
    "glm4_moe": lambda: _new(
        "Glm4MoeConfig",
        **_HEAD,
        moe_intermediate_size=24,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "gpt2": lambda: _new("GPT2Config", **_GPT2),
    "gpt_bigcode": lambda: _new("GPTBigCodeConfig", **_GPT2),
    "gpt_oss": lambda: _new(
        "GptOssConfig", **_HEAD, sliding_window=6, num_local_experts=4, num_experts_per_tok=2
    ),
    "granite": lambda: _new(
        "GraniteConfig",
        **_SIZES,
        embedding_multiplier=1.5,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
        logits_scaling=1.7,
    ),
    "llama": lambda: _new("LlamaConfig", **_HEAD),
    "mistral": lambda: _new("MistralConfig", **_HEAD, sliding_window=6),
    "mixtral": lambda: _new("MixtralConfig", **_HEAD, num_local_experts=4, num_experts_per_tok=2),
    "nemotron": lambda: _new("NemotronConfig", **_HEAD),
    "olmo2": lambda: _new("Olmo2Config", **_SIZES),
    "olmo3": lambda: _new("Olmo3Config", **_SIZES, sliding_window=6, layer_types=_TURNS),
    "phi": lambda: _new("PhiConfig", **_SIZES),
    "phi3": lambda: _new("Phi3Config", **_SIZES, sliding_window=6),
    "qwen2": lambda: _new("Qwen2Config", **_SIZES),
    "qwen2_moe": lambda: _new(
        "Qwen2MoeConfig",
        **_SIZES,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3": lambda: _new("Qwen3Config", **_HEAD),
    "qwen3_moe": lambda: _new(
        "Qwen3MoeConfig",
        **_HEAD,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "seed_oss": lambda: _new("SeedOssConfig", **_HEAD, attention_bias=True),
    "smollm3": lambda: _new("SmolLM3Config", **_SIZES, no_rope_layers=[1, 0, 1]),
    "starcoder2": lambda: _new("Starcoder2Config", **_SIZES, sliding_window=6),
}
