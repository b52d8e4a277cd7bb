"""Figures that decoders after Llama name alike in their configurations."""

from __future__ import annotations

from typing import Any

from meshwright.planner.architectures.config_keys import (
    AS_RECORDED,
    Config,
    Keys,
    count,
    divided_head_dim,
    experts_of,
    flag,
    optional,
    positive,
    without_figures,
)
from meshwright.planner.documents.model import Architecture, Experts, LatentAttention
from meshwright.planner.errors import DocumentError


def decoder(
    config: Config, family: str, *, kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """Figures that decoders after Llama name alike; defaults are those of `transformers`."""
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    groups = optional(config, "num_key_value_heads", kv_heads) or heads
    if heads % groups:
        raise DocumentError(
            "num_key_value_heads",
            f"is {groups}, which does not divide num_attention_heads {heads}",
        )
    return {
        "family": family,
        "hidden_size": hidden,
        "layers": positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": groups,
        "head_dim": optional(config, "head_dim", head_dim)
        or divided_head_dim(
            config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
        ),
        "ffn_size": positive(config, "intermediate_size"),
        "vocab_size": positive(config, "vocab_size"),
        "gated_mlp": True,
        "norm": "rms",
        "positions": "rotary",
        "max_positions": optional(config, "max_position_embeddings", None) or 131072,
    }


def llama(config: Config, family: str) -> Architecture:
    """Return the figures of a family that has Llama's keys."""
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, family),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def deepseek(config: Keys, family: str) -> Architecture:
    """Return the figures of a family with latent attention and experts."""
    latent = LatentAttention(
        q_rank=optional(config, "q_lora_rank", 1536) or 0,
        kv_rank=positive(config, "kv_lora_rank"),
        rope_head_dim=positive(config, "qk_rope_head_dim"),
        nope_head_dim=positive(config, "qk_nope_head_dim"),
        value_head_dim=positive(config, "v_head_dim"),
    )
    if flag(config, "attention_bias", False):
        raise without_figures("attention_bias", "is true with latent attention")
    heads = positive(config, "num_attention_heads")
    if (step := optional(config, "moe_layer_freq", 1)) != 1:
        raise without_figures("moe_layer_freq", f"is {step} and not 1")
    optional(config, "num_key_value_heads", None)  # every head has its own
    common = decoder(config | {"num_key_value_heads": heads}, family)
    common["head_dim"] = latent.nope_head_dim + latent.rope_head_dim
    return Architecture(
        **common,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        latent=latent,
        experts=Experts(
            count=positive(config, "n_routed_experts"),
            per_token=positive(config, "num_experts_per_tok"),
            ffn_size=positive(config, "moe_intermediate_size"),
            shared=count(config, "n_shared_experts"),
            dense_layers=count(config, "first_k_dense_replace"),
            groups=optional(config, "n_group", None) or None,
            groups_per_token=optional(config, "topk_group", None) or None,
        ),
    )


def leading_dense(config: Config) -> int:
    """Return the number of leading blocks with a plain MLP; other patterns are refused."""
    layers = positive(config, "num_hidden_layers")
    if (step := optional(config, "decoder_sparse_step", 1)) != 1:
        raise without_figures("decoder_sparse_step", f"is {step} and not 1")
    dense = config.get("mlp_only_layers") or []
    if (
        not isinstance(dense, list)
        or sorted(map(str, dense)) != sorted(map(str, range(len(dense))))
        or len(dense) > layers
    ):
        raise without_figures(
            "mlp_only_layers", f"is {str(dense)[:60]} and not leading layers (0, 1, ...)"
        )
    return len(dense)


def windows(config: Config, *, window: int, every: int) -> dict[str, Any]:
    """Return the blocks that attend to a window of tokens, and those that attend to all.

    Without `layer_types` every n-th block is global: as `sliding_window_pattern` says, or `every`.
    """
    if not window:
        return {}
    types = config.get("layer_types")
    if types is None:
        return {
            "sliding_window": window,
            "sliding_every": optional(config, "sliding_window_pattern", every) or every,
        }
    layers = positive(config, "num_hidden_layers")
    if not isinstance(types, list) or not {*map(str, types)} <= _SPANS or len(types) != layers:
        raise DocumentError(
            "layer_types",
            f"must list sliding_attention and full_attention, one for each of {layers} layers; "
            f"{AS_RECORDED}",
        )
    everywhere = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if not everywhere:
        return {"sliding_window": window}
    first = everywhere[0] + 1
    if everywhere == list(range(first - 1, layers, first)) and first > 1:
        return {"sliding_window": window, "sliding_every": first}
    if len(everywhere) == layers:
        return {}
    return {"sliding_window": window, "global_blocks": tuple(everywhere)}


_SPANS = {"sliding_attention", "full_attention"}


def routed_experts(config: Config, *, count_key: str, ffn_key: str, **more: Any) -> Experts:
    """Return the experts that a router of softmax scores chooses among, by their keys."""
    return Experts(
        count=experts_of(config, count_key),
        per_token=positive(config, "num_experts_per_tok"),
        ffn_size=positive(config, ffn_key),
        **more,
    )
