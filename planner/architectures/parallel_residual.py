"""Configurations of decoders that run attention and MLP side by side, or bias scores by distance.

GPT-J, GPT-NeoX, Falcon and Command-R add both to one residual; Bloom and MPT have no positions but
a penalty on scores that grows with distance (ALiBi).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.planner.architectures.config_keys import (
    Config,
    divided_head_dim,
    flag,
    optional,
    positive,
    rotated_features,
    settings,
    without_figures,
)
from meshwright.planner.documents.model import Architecture
from meshwright.planner.errors import DocumentError


def _gpt_neox(config: Config) -> Architecture:
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    head_dim = divided_head_dim(
        config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
    )
    bias = flag(config, "attention_bias", True)
    return Architecture(
        **_plain("gpt_neox", hidden, heads, head_dim),
        layers=positive(config, "num_hidden_layers"),
        kv_heads=heads,
        ffn_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_positions=optional(config, "max_position_embeddings", None) or 2048,
        rotary_dim=rotated_features(config, head_dim, key="rotary_pct", default=0.25),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        written_gelu=config.get("hidden_act") == "gelu_fast",
        parallel=flag(config, "use_parallel_residual", True),
    )


def _phi(config: Config) -> Architecture:
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    head_dim = divided_head_dim(
        config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
    )
    if flag(config, "qk_layernorm", False):
        raise without_figures("qk_layernorm", "is true")
    return Architecture(
        **_plain("phi", hidden, heads, head_dim),
        layers=positive(config, "num_hidden_layers"),
        kv_heads=optional(config, "num_key_value_heads", None) or heads,
        ffn_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_positions=optional(config, "max_position_embeddings", None) or 2048,
        rotary_dim=rotated_features(config, head_dim, key="partial_rotary_factor", default=0.5),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        shared_norm=True,
    )


def _gptj(config: Config) -> Architecture:
    hidden, heads = positive(config, "n_embd"), positive(config, "n_head")
    return Architecture(
        **_plain(
            "gptj",
            hidden,
            heads,
            divided_head_dim(config, hidden=("n_embd", hidden), heads=("n_head", heads)),
        ),
        layers=positive(config, "n_layer"),
        kv_heads=heads,
        ffn_size=optional(config, "n_inner", None) or 4 * hidden,
        vocab_size=positive(config, "vocab_size"),
        max_positions=positive(config, "n_positions"),
        rotary_dim=optional(config, "rotary_dim", 64) or 0,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        shared_norm=True,
    )


def _falcon(config: Config) -> Architecture:
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    grouped = flag(config, "new_decoder_architecture", False)
    if flag(config, "alibi", False):
        raise without_figures("alibi", "is true")
    if not grouped and not flag(config, "parallel_attn", True):
        raise without_figures("parallel_attn", "is false")
    if grouped:
        kv_heads = optional(config, "num_kv_heads", None) or heads
    else:
        kv_heads = 1 if flag(config, "multi_query", True) else heads
    bias = flag(config, "bias", False)
    norms = optional(config, "num_ln_in_parallel_attn", None) or (2 if grouped else 1)
    return Architecture(
        **_plain(
            "falcon",
            hidden,
            heads,
            divided_head_dim(
                config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
            ),
        ),
        layers=positive(config, "num_hidden_layers"),
        kv_heads=kv_heads,
        ffn_size=optional(config, "ffn_hidden_size", None) or 4 * hidden,
        vocab_size=positive(config, "vocab_size"),
        max_positions=optional(config, "max_position_embeddings", None) or 2048,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel=True,
        shared_norm=norms == 1 or not grouped,
    )


def _cohere(config: Config) -> Architecture:
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if flag(config, "use_qk_norm", False):
        raise without_figures("use_qk_norm", "is true")
    bias = flag(config, "attention_bias", False)
    figures = _plain(
        "cohere",
        hidden,
        heads,
        optional(config, "head_dim", None)
        or divided_head_dim(
            config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
        ),
    )
    return Architecture(
        **{**figures, "gated_mlp": True},
        layers=positive(config, "num_hidden_layers"),
        kv_heads=optional(config, "num_key_value_heads", None) or heads,
        ffn_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        max_positions=optional(config, "max_position_embeddings", None) or 8192,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        norm_bias=False,
        parallel=True,
        shared_norm=True,
    )


def _bloom(config: Config) -> Architecture:
    width = "hidden_size" if config.get("hidden_size") is not None else "n_embed"
    hidden, heads = positive(config, width), positive(config, "n_head")
    if flag(config, "apply_residual_connection_post_layernorm", False):
        raise without_figures("apply_residual_connection_post_layernorm", "is true")
    figures = _plain(
        "bloom",
        hidden,
        heads,
        divided_head_dim(config, hidden=(width, hidden), heads=("n_head", heads)),
    )
    return Architecture(
        **{**figures, "positions": "alibi"},
        layers=positive(config, "n_layer"),
        kv_heads=heads,
        ffn_size=4 * hidden,
        vocab_size=positive(config, "vocab_size"),
        max_positions=optional(config, "seq_length", None) or 2048,
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_norm=True,
    )


def _mpt(config: Config) -> Architecture:
    hidden, heads = positive(config, "d_model"), positive(config, "n_heads")
    scores = settings(config, "attn_config")
    if not scores.get("alibi", True):
        raise without_figures("attn_config.alibi", "is false")
    if scores.get("clip_qkv"):
        raise without_figures("attn_config.clip_qkv", "is set")
    if (ratio := optional(config, "expansion_ratio", 4)) != 4:
        raise DocumentError("expansion_ratio", f"is {ratio}; give 4, as transformers has it")
    figures = _plain(
        "mpt",
        hidden,
        heads,
        divided_head_dim(config, hidden=("d_model", hidden), heads=("n_heads", heads)),
    )
    return Architecture(
        **{**figures, "positions": "alibi"},
        layers=positive(config, "n_layers"),
        kv_heads=heads,
        ffn_size=4 * hidden,
        vocab_size=positive(config, "vocab_size"),
        max_positions=positive(config, "max_seq_len"),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        norm_bias=False,
    )


def _plain(family: str, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Figures that these decoders share: layer norms, rotary positions and an ungated MLP."""
    return {
        "family": family,
        "hidden_size": hidden,
        "heads": heads,
        "head_dim": head_dim,
        "gated_mlp": False,
        "norm": "layer",
        "positions": "rotary",
    }


READERS: dict[str, Callable[[Config], Architecture]] = {
    "bloom": _bloom,
    "cohere": _cohere,
    "falcon": _falcon,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "mpt": _mpt,
    "phi": _phi,
}
