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
        sliding_every=_every(config, default=6) if window else 1,
    )


def _every(config: Config, *, default: int) -> int:
    """Return how many blocks there are for each that attends to all tokens."""
    types = config.get("layer_types")
    if types is None:
        return optional(config, "sliding_window_pattern", default) or default
    if not isinstance(types, list) or not {*types} <= {"sliding_attention", "full_attention"}:
        raise DocumentError("layer_types", "must list sliding_attention and full_attention")
    if "full_attention" not in types:
        return 1
    every = types.index("full_attention") + 1
    expected = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if any(kind != expected[index % every] for index, kind in enumerate(types)):
        raise DocumentError(
            "layer_types", "does not repeat; only every n-th block global has figures"
        )
    return every


def _olmo2(config: Config, family: str) -> Architecture:
    """Norms stand behind attention and MLP instead of before them: as many, of the same size."""
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, family),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _olmo3(config: Config) -> Architecture:
    window = optional(config, "sliding_window", 4096) or 0
    every = _every(config, default=4) if window else 1
    figures = _olmo2(config, "olmo3")
    return figures.model_copy(update={"sliding_window": window, "sliding_every": every})


def _gpt_oss(config: Config) -> Architecture:
    """Every block counts as one that attends to all tokens: experts have no local blocks here."""
    bias = flag(config, "attention_bias", True)
    return Architecture(
        **decoder(config, "gpt_oss", kv_heads=8, head_dim=64),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        experts=Experts(
            count=experts_of(config, "num_local_experts"),
            per_token=positive(config, "num_experts_per_tok"),
            ffn_size=positive(config, "intermediate_size"),
        ),
    )


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
    "gpt_oss": _gpt_oss,
    "granite": lambda config: llama(config, "granite"),
    "olmo2": lambda config: _olmo2(config, "olmo2"),
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
