"""Architecture: the configuration of a Hugging Face model read as figures.

`architecture_of` knows which keys each `model_type` has, what their defaults are, and which of our
figures they mean.  A configuration that the figures cannot express is refused, by its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from planner.document import first_error, nearest
from planner.errors import DocumentError
from planner.layers.parameters import block_kinds, graph_of
from planner.model import Architecture, Experts, LatentAttention, Patches

__all__ = ["SUPPORTED", "architecture_of", "block_kinds", "graph_of"]

Config = Mapping[str, Any]


def architecture_of(config: Config, *, name: str) -> Architecture:
    """Return the figures of a Hugging Face `config.json`, read as a dict.

    >>> architecture_of(
    ...     {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    ...      "n_positions": 1024, "vocab_size": 50257}, name="gpt2").ffn_size
    3072
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise DocumentError(
            "model_type", f"is missing in {name}; it says which architecture the figures are for"
        )
    if kind not in _READERS:
        raise DocumentError(
            "model_type",
            f"is '{kind[:60]}', which is not supported; {nearest(kind, sorted(_READERS))} "
            f"Supported: {', '.join(sorted(_READERS))}. "
            "Any other model can be given as file.py:factory.",
        )
    try:
        return _READERS[kind](config)
    except ValidationError as error:
        raise first_error(error) from error


def _llama(config: Config) -> Architecture:
    bias = _flag(config, "attention_bias", False)
    return Architecture(
        **_decoder(config, "llama"),
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=_flag(config, "mlp_bias", False),
    )


def _mistral(config: Config) -> Architecture:
    return Architecture(
        **_decoder(config, "mistral", kv_heads=8),
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        sliding_window=_optional(config, "sliding_window", 4096) or 0,
    )


def _qwen2(config: Config) -> Architecture:
    return Architecture(
        **_decoder(config, "qwen2", kv_heads=32),
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        qkv_bias=True,
        **_qwen_window(config),
    )


def _qwen3(config: Config) -> Architecture:
    bias = _flag(config, "attention_bias", False)
    return Architecture(
        **_decoder(config, "qwen3", kv_heads=32, head_dim=128),
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        **_qwen_window(config),
    )


def _qwen_window(config: Config) -> dict[str, int]:
    """Qwen slides only above `max_window_layers`, and only if told to; mixed depths are refused."""
    window = _optional(config, "sliding_window", 4096)
    if not _flag(config, "use_sliding_window", False) or not window:
        return {}
    first = _optional(config, "max_window_layers", 28) or 0
    if first >= _positive(config, "num_hidden_layers"):
        return {}
    if first > 0:
        raise DocumentError(
            "max_window_layers",
            f"is {first}: the first layers attend to all tokens and the others to a window, "
            "which has no figures here; set use_sliding_window to false",
        )
    return {"sliding_window": window}


def _gemma2(config: Config) -> Architecture:
    bias = _flag(config, "attention_bias", False)
    return Architecture(
        **_decoder(config, "gemma2", kv_heads=4, head_dim=256),
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        sliding_window=_optional(config, "sliding_window", 4096) or 0,
        sliding_every=2,
    )


def _gpt2(config: Config) -> Architecture:
    hidden, heads = _positive(config, "n_embd"), _positive(config, "n_head")
    return Architecture(
        family="gpt2",
        hidden_size=hidden,
        layers=_positive(config, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=_divided(config, hidden=("n_embd", hidden), heads=("n_head", heads)),
        ffn_size=_optional(config, "n_inner", None) or 4 * hidden,
        vocab_size=_positive(config, "vocab_size"),
        gated_mlp=False,
        norm="layer",
        positions="learned",
        max_positions=_positive(config, "n_positions"),
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _opt(config: Config) -> Architecture:
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    width = _optional(config, "word_embed_proj_dim", None) or hidden
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if not _flag(config, key, True):
            raise DocumentError(key, "is false, which has no figures here; OPT's own models set it")
    if _flag(config, "_remove_final_layer_norm", False):
        raise DocumentError("_remove_final_layer_norm", "is true, which has no figures here")
    return Architecture(
        family="opt",
        hidden_size=hidden,
        layers=_positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=_divided(
            config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
        ),
        ffn_size=_positive(config, "ffn_dim"),
        vocab_size=_positive(config, "vocab_size"),
        gated_mlp=False,
        norm="layer",
        pre_norm=_flag(config, "do_layer_norm_before", True),
        positions="learned",
        max_positions=_positive(config, "max_position_embeddings"),
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_size=0 if width == hidden else width,
    )


def _mixtral(config: Config) -> Architecture:
    ffn = _positive(config, "intermediate_size")
    if _optional(config, "sliding_window", None):
        raise DocumentError(
            "sliding_window",
            f"is {config['sliding_window']}; experts with a sliding window have no figures here: "
            "set it to null",
        )
    return Architecture(
        **_decoder(config, "mixtral", kv_heads=8),
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        experts=Experts(
            count=_experts(config, "num_local_experts"),
            per_token=_positive(config, "num_experts_per_tok"),
            ffn_size=ffn,
        ),
    )


def _qwen3_moe(config: Config) -> Architecture:
    layers = _positive(config, "num_hidden_layers")
    if (step := _optional(config, "decoder_sparse_step", 1)) != 1:
        raise DocumentError(
            "decoder_sparse_step", f"is {step}; only 1, experts in every block, has figures here"
        )
    dense = config.get("mlp_only_layers") or []
    if (
        not isinstance(dense, list)
        or sorted(map(str, dense)) != sorted(map(str, range(len(dense))))
        or len(dense) > layers
    ):
        raise DocumentError(
            "mlp_only_layers",
            f"is {str(dense)[:60]}; only leading layers (0, 1, ...) can be without experts here",
        )
    if _qwen_window(config):
        raise DocumentError(
            "use_sliding_window", "is true; experts with a sliding window have no figures here"
        )
    bias = _flag(config, "attention_bias", False)
    return Architecture(
        **_decoder(config, "qwen3_moe", kv_heads=4),
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=Experts(
            count=_experts(config, "num_experts"),
            per_token=_positive(config, "num_experts_per_tok"),
            ffn_size=_positive(config, "moe_intermediate_size"),
            dense_layers=len(dense),
        ),
    )


def _deepseek_v3(config: Config) -> Architecture:
    latent = LatentAttention(
        q_rank=_optional(config, "q_lora_rank", 1536) or 0,
        kv_rank=_positive(config, "kv_lora_rank"),
        rope_head_dim=_positive(config, "qk_rope_head_dim"),
        nope_head_dim=_positive(config, "qk_nope_head_dim"),
        value_head_dim=_positive(config, "v_head_dim"),
    )
    if _flag(config, "attention_bias", False):
        raise DocumentError("attention_bias", "is true, which has no figures for latent attention")
    heads = _positive(config, "num_attention_heads")
    if (step := _optional(config, "moe_layer_freq", 1)) != 1:
        raise DocumentError(
            "moe_layer_freq", f"is {step}; only 1, experts in every later block, has figures here"
        )
    every_head_has_its_own = {**config, "num_key_value_heads": heads}
    common = _decoder(every_head_has_its_own, "deepseek_v3")
    common["head_dim"] = latent.nope_head_dim + latent.rope_head_dim
    return Architecture(
        **common,
        tied_embeddings=_flag(config, "tie_word_embeddings", False),
        latent=latent,
        experts=Experts(
            count=_positive(config, "n_routed_experts"),
            per_token=_positive(config, "num_experts_per_tok"),
            ffn_size=_positive(config, "moe_intermediate_size"),
            shared=_count(config, "n_shared_experts"),
            dense_layers=_count(config, "first_k_dense_replace"),
        ),
    )


def _bert(config: Config) -> Architecture:
    return Architecture(
        **_encoder(config, "bert"),
        vocab_size=_positive(config, "vocab_size"),
        positions="learned",
        max_positions=_positive(config, "max_position_embeddings"),
        tied_embeddings=_flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        pre_norm=False,
        token_types=_optional(config, "type_vocab_size", 2) or 0,
        head_transform=True,
    )


def _vit(config: Config) -> Architecture:
    patches = Patches(
        image_size=_positive(config, "image_size"),
        patch_size=_positive(config, "patch_size"),
        channels=_optional(config, "num_channels", 3) or 3,
    )
    if patches.image_size % patches.patch_size:
        raise DocumentError(
            "patch_size",
            f"is {patches.patch_size}, which does not divide image_size {patches.image_size}",
        )
    labels = config.get("id2label")
    classes = _optional(config, "num_labels", None) or (
        len(labels) if isinstance(labels, Mapping) and labels else 1000
    )
    return Architecture(
        **_encoder(config, "vit"),
        vocab_size=0,
        positions="learned",
        max_positions=(patches.image_size // patches.patch_size) ** 2 + 1,
        qkv_bias=_flag(config, "qkv_bias", True),
        classes=classes,
        patches=patches,
    )


_READERS: dict[str, Callable[[Config], Architecture]] = {
    "bert": _bert,
    "deepseek_v3": _deepseek_v3,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "vit": _vit,
}
SUPPORTED = tuple(sorted(_READERS))


def _decoder(
    config: Config, family: str, *, kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """Figures that decoders after Llama name alike; defaults are those of `transformers`."""
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    groups = _optional(config, "num_key_value_heads", kv_heads) or heads
    if heads % groups:
        raise DocumentError(
            "num_key_value_heads",
            f"is {groups}, which does not divide num_attention_heads {heads}",
        )
    return {
        "family": family,
        "hidden_size": hidden,
        "layers": _positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": groups,
        "head_dim": _optional(config, "head_dim", head_dim)
        or _divided(config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)),
        "ffn_size": _positive(config, "intermediate_size"),
        "vocab_size": _positive(config, "vocab_size"),
        "gated_mlp": True,
        "norm": "rms",
        "positions": "rotary",
        "max_positions": _optional(config, "max_position_embeddings", None) or 131072,
    }


def _encoder(config: Config, family: str) -> dict[str, Any]:
    """Figures that BERT and ViT name alike."""
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    return {
        "family": family,
        "hidden_size": hidden,
        "layers": _positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _divided(
            config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
        ),
        "ffn_size": _positive(config, "intermediate_size"),
        "gated_mlp": False,
        "norm": "layer",
        "output_bias": True,
        "mlp_bias": True,
        "causal": False,
    }


def _positive(config: Config, key: str) -> int:
    """Return a figure that must be there and be at least 1."""
    if config.get(key) is None:
        raise DocumentError(key, "is missing; the architecture needs it")
    return _whole(config, key, least=1)


def _experts(config: Config, key: str) -> int:
    """Return how many experts there are; `transformers` 5 writes one name for all families."""
    new_key = "num_local_experts"
    return _positive(config, new_key if config.get(key) is None and new_key in config else key)


def _count(config: Config, key: str) -> int:
    """Return a figure that must be there and may be 0."""
    if config.get(key) is None:
        raise DocumentError(key, "is missing; the architecture needs it")
    return _whole(config, key, least=0)


def _optional(config: Config, key: str, default: int | None) -> int | None:
    """Return a figure that may be left out (`default`) or null (None)."""
    if key not in config:
        return default
    return None if config[key] is None else _whole(config, key, least=0)


def _whole(config: Config, key: str, *, least: int) -> int:
    value = config[key]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**40:
        raise DocumentError(key, f"is {value!r:.60}; it must be a whole number of at least {least}")
    return value


def _flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise DocumentError(key, f"is {value!r:.60}; it must be true or false")
    return value


def _divided(config: Config, *, hidden: tuple[str, int], heads: tuple[str, int]) -> int:
    """Return the width of a head where the configuration leaves it to a division."""
    if hidden[1] % heads[1]:
        raise DocumentError(
            heads[0], f"is {heads[1]}, which does not divide {hidden[0]} {hidden[1]}"
        )
    return hidden[1] // heads[1]
