"""Configurations of later decoders that are built as Llama, DeepSeek-V3 or Qwen3-MoE are.

What sets them apart beside their figures (scales of embeddings and residuals, layers without
rotation, thetas of their own) costs nothing that is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.errors import DocumentError
from planner.layers.config_keys import Config, count, experts_of, flag, optional, positive
from planner.layers.decoders import decoder, deepseek, leading_dense, llama
from planner.model import Architecture, Experts


def _gemma(config: Config) -> Architecture:
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "gemma", kv_heads=16, head_dim=256),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
    )


def _gemma3(config: Config) -> Architecture:
    bias = flag(config, "attention_bias", False)
    window = optional(config, "sliding_window", 4096) or 0
    return Architecture(
        **decoder(config, "gemma3_text", kv_heads=4, head_dim=256),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        post_norms=True,
        sliding_window=window,
        sliding_every=_every(config) if window else 1,
    )


def _every(config: Config) -> int:
    """Return how many blocks there are for each that attends to all tokens."""
    types = config.get("layer_types")
    if types is None:
        return optional(config, "sliding_window_pattern", 6) or 6
    if not isinstance(types, list) or "full_attention" not in types:
        raise DocumentError("layer_types", "must be a list with full_attention in it")
    every = types.index("full_attention") + 1
    expected = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if any(kind != expected[index % every] for index, kind in enumerate(types)):
        raise DocumentError(
            "layer_types", "does not repeat; only every n-th block global has figures"
        )
    return every


def _phi3(config: Config) -> Architecture:
    return Architecture(
        **decoder(config, "phi3"),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        sliding_window=optional(config, "sliding_window", None) or 0,
    )


def _smollm3(config: Config) -> Architecture:
    if flag(config, "use_sliding_window", False):
        raise DocumentError("use_sliding_window", "is true, which has no figures here")
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "smollm3", kv_heads=4),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def _starcoder2(config: Config) -> Architecture:
    bias = flag(config, "use_bias", True)
    plain: dict[str, Any] = {"gated_mlp": False, "norm": "layer"}
    return Architecture(
        **{**decoder(config, "starcoder2", kv_heads=2), **plain},
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        sliding_window=optional(config, "sliding_window", None) or 0,
    )


def _qwen2_moe(config: Config) -> Architecture:
    dense = leading_dense(config)
    if flag(config, "use_sliding_window", False):
        raise DocumentError(
            "use_sliding_window", "is true; experts with a sliding window have no figures here"
        )
    return Architecture(
        **decoder(config, "qwen2_moe", kv_heads=16),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=flag(config, "qkv_bias", True),
        experts=Experts(
            count=experts_of(config, "num_experts"),
            per_token=positive(config, "num_experts_per_tok"),
            ffn_size=positive(config, "moe_intermediate_size"),
            shared=1,
            shared_ffn_size=count(config, "shared_expert_intermediate_size"),
            shared_gate=True,
            dense_layers=dense,
        ),
    )


READERS: dict[str, Callable[[Config], Architecture]] = {
    "deepseek_v2": lambda config: deepseek(config, "deepseek_v2"),
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "granite": lambda config: llama(config, "granite"),
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
