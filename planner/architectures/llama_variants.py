"""Configurations of later decoders that are built as Llama, DeepSeek-V3 or Qwen3-MoE are.

Their differences beside their figures (scales of embeddings and residuals, layers without rotation,
thetas of their own) have no counted cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.planner.architectures.config_keys import (
    Config,
    Keys,
    count,
    flag,
    optional,
    rotated_features,
    without_figures,
)
from meshwright.planner.architectures.decoders import (
    decoder,
    deepseek,
    leading_dense,
    llama,
    routed_experts,
    windows,
)
from meshwright.planner.documents.model import Architecture


def _gemma(config: Config) -> Architecture:
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "gemma", kv_heads=16, head_dim=256),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
    )


def _gemma3(config: Keys) -> Architecture:
    bias = flag(config, "attention_bias", False)
    window = optional(config, "sliding_window", 4096) or 0
    config = {"num_attention_heads": 8, "vocab_size": 262208} | config
    return Architecture(
        **decoder(config, "gemma3_text", kv_heads=4, head_dim=256),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        post_norms=True,
        **windows(config, window=window, every=6),
    )


def _olmo2(config: Config, family: str) -> Architecture:
    """Norms follow attention and MLP instead of preceding them, in the same number and size."""
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
    figures = _olmo2(config, "olmo3")
    return figures.model_copy(update=windows(config, window=window, every=4))


def _gpt_oss(config: Config) -> Architecture:
    bias = flag(config, "attention_bias", True)
    window = optional(config, "sliding_window", 128) or 0
    return Architecture(
        **decoder(config, "gpt_oss", kv_heads=8, head_dim=64),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        **windows(config, window=window, every=2),
        experts=routed_experts(config, count_key="num_local_experts", ffn_key="intermediate_size"),
    )


def _nemotron(config: Config) -> Architecture:
    """A Llama of layer norms and a plain MLP of squared ReLUs, whose heads turn in part."""
    bias, plain = flag(config, "attention_bias", False), {"gated_mlp": False, "norm": "layer"}
    figures = decoder(config, "nemotron") | plain
    return Architecture(
        **figures,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        rotary_dim=rotated_features(
            config, figures["head_dim"], key="partial_rotary_factor", default=0.5
        ),
    )


def _seed_oss(config: Config) -> Architecture:
    return Architecture(
        **decoder(config, "seed_oss", kv_heads=8, head_dim=128),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=flag(config, "attention_bias", True),
        output_bias=flag(config, "attention_out_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
    )


def _glm4_moe(config: Config) -> Architecture:
    """Experts and router as DeepSeek-V3 has them, over grouped heads that turn in part."""
    figures, bias = decoder(config, "glm4_moe", kv_heads=8), flag(config, "attention_bias", False)
    return Architecture(
        **figures,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        qk_norm=flag(config, "use_qk_norm", False),
        rotary_dim=rotated_features(
            config, figures["head_dim"], key="partial_rotary_factor", default=0.5
        ),
        experts=routed_experts(
            config,
            count_key="n_routed_experts",
            ffn_key="moe_intermediate_size",
            shared=count(config, "n_shared_experts"),
            dense_layers=count(config, "first_k_dense_replace"),
            groups=optional(config, "n_group", 1) or 1,
            groups_per_token=optional(config, "topk_group", 1) or 1,
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
        raise without_figures("use_sliding_window", "is true")
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
        raise without_figures("use_sliding_window", "is true with experts")
    return Architecture(
        **decoder(config, "qwen2_moe", kv_heads=16),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=flag(config, "qkv_bias", True),
        experts=routed_experts(
            config,
            count_key="num_experts",
            ffn_key="moe_intermediate_size",
            shared=1,
            shared_ffn_size=count(config, "shared_expert_intermediate_size"),
            shared_gate=True,
            dense_layers=dense,
        ),
    )


def _minimax_m2(config: Config) -> Architecture:
    """A mixture as Qwen3-MoE, whose query and key norms are over all heads, turned in part."""
    figures = decoder(config, "minimax_m2", kv_heads=8, head_dim=128)
    turned = optional(config, "rotary_dim", None)
    if turned is None:
        turned = rotated_features(
            config, figures["head_dim"], key="partial_rotary_factor", default=1.0
        )
    return Architecture(
        **figures,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qk_norm=True,
        rotary_dim=turned,
        experts=routed_experts(config, count_key="num_local_experts", ffn_key="intermediate_size"),
    )


def _llama4(config: Keys) -> Architecture:
    """A shared expert beside the routed ones; attention in chunks, but in every fourth block.

    A chunk counts as a window of as many tokens: the same up to its length, and more beyond.
    """
    config = {"interleave_moe_layer_step": 1} | config
    layers = count(config, "num_hidden_layers")
    every = config.get("moe_layers") or list(range(layers))
    if config["interleave_moe_layer_step"] != 1 or every != list(range(layers)):
        raise without_figures(
            "interleave_moe_layer_step",
            f"is {config['interleave_moe_layer_step']!r:.20}: blocks with experts and without take "
            "turns",
        )
    types = config.get("layer_types")
    if isinstance(types, list):
        renamed = {"chunked_attention": "sliding_attention"}
        config = config | {"layer_types": [renamed.get(str(kind), kind) for kind in types]}
    chunk = optional(config, "attention_chunk_size", 8192) or 0
    interval = optional(config, "no_rope_layer_interval", 4) or 4
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "llama4_text", kv_heads=8, head_dim=128),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        **windows(config, window=chunk, every=interval),
        experts=routed_experts(
            config, count_key="num_local_experts", ffn_key="intermediate_size", shared=1
        ),
    )


READERS: dict[str, Callable[[Keys], Architecture]] = {
    "deepseek_v2": lambda config: deepseek(config, "deepseek_v2"),
    "gemma": _gemma,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "granite": lambda config: llama(config, "granite"),
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "nemotron": _nemotron,
    "olmo2": lambda config: _olmo2(config, "olmo2"),
    "olmo3": _olmo3,
    "phi3": _phi3,
    "qwen2_moe": _qwen2_moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
