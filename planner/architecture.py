"""Architecture: a Hugging Face configuration read as figures, and figures as a graph of layers.

`architecture_of` knows which keys each `model_type` has, what their defaults are, and which of our
figures they mean.  `graph_of` counts the parameters of every layer exactly, as `transformers` would
build them.  Nothing here knows what a layer costs in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from planner.document import first_error, nearest
from planner.errors import DocumentError
from planner.model import Architecture, Experts, LatentAttention, Layer, ModelGraph, Patches

Config = Mapping[str, Any]
OPT_POSITION_OFFSET = 2
"""OPT's table of positions has two rows more than `max_position_embeddings`."""


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


def graph_of(architecture: Architecture, *, name: str, source: str | None = None) -> ModelGraph:
    """Return the model as a chain: embedding, one `block` per layer, head.

    The head holds the norm before it; a tied output projection counts in the embedding.

    >>> figures = Architecture(family="llama", hidden_size=64, layers=3, heads=4, kv_heads=2,
    ...     head_dim=16, ffn_size=128, vocab_size=320, gated_mlp=True)
    >>> [name for name, _ in graph_of(figures, name="toy").chain]
    ['embedding', 'block.0', 'block.1', 'block.2', 'head']
    """
    layers = [Layer(name="embedding", kind="embedding", parameters=_embedding(architecture))]
    costs = {kind: _block(architecture, kind) for kind in set(block_kinds(architecture))}
    for kind in block_kinds(architecture):
        last = layers[-1]
        if last.kind == kind:
            layers[-1] = last.model_copy(update={"repeat": last.repeat + 1})
        else:
            layers.append(Layer(name="block", kind=kind, parameters=costs[kind]))
    if len(layers) == 2 and layers[1].repeat == 1:
        layers[1] = layers[1].model_copy(update={"name": "block.0"})
    layers.append(Layer(name="head", kind="head", parameters=_head(architecture)))
    return ModelGraph(name=name, source=source, architecture=architecture, layers=tuple(layers))


def block_kinds(architecture: Architecture) -> tuple[str, ...]:
    """Return the kind of every block in order.

    `block`, `local_block` (attends to a sliding window), `moe_block`, and `dense_block` (a leading
    block with a plain MLP in a mixture-of-experts model).
    """
    experts = architecture.experts
    if experts is not None:
        dense = min(experts.dense_layers, architecture.layers)
        return ("dense_block",) * dense + ("moe_block",) * (architecture.layers - dense)
    if not architecture.sliding_window:
        return ("block",) * architecture.layers
    every = architecture.sliding_every
    return tuple(
        "block" if every > 1 and (index + 1) % every == 0 else "local_block"
        for index in range(architecture.layers)
    )


def _embedding(a: Architecture) -> int:
    """Parameters in front of the first block: tokens or patches, positions, projections, norm."""
    if a.patches is not None:
        patches = (a.patches.image_size // a.patches.patch_size) ** 2
        pixels = a.patches.channels * a.patches.patch_size**2
        class_token = a.hidden_size
        return (pixels + 1) * a.hidden_size + class_token + (patches + 1) * a.hidden_size
    width = a.embedding_size or a.hidden_size
    count = a.vocab_size * width + a.token_types * a.hidden_size
    if a.positions == "learned":
        offset = OPT_POSITION_OFFSET if a.family == "opt" else 0
        count += (a.max_positions + offset) * a.hidden_size
    if width != a.hidden_size:
        count += width * a.hidden_size
    if a.token_types:
        count += _norm(a)
    return count


def _head(a: Architecture) -> int:
    """Parameters behind the last block: norm, transform, projections that are not tied."""
    count = _norm(a) if a.pre_norm else 0
    if a.classes:
        return count + a.hidden_size * a.classes + a.classes
    width = a.embedding_size or a.hidden_size
    if width != a.hidden_size:
        count += a.hidden_size * width
    if a.head_transform:
        count += a.hidden_size * a.hidden_size + a.hidden_size + _norm(a) + a.vocab_size
    if not a.tied_embeddings:
        count += a.vocab_size * width
    return count


def _block(a: Architecture, kind: str) -> int:
    """Parameters of one block: attention, MLP or experts, norms."""
    attention = _attention(a) if a.latent is None else _latent_attention(a, a.latent)
    norms = (4 if a.post_norms else 2) * _norm(a)
    if kind != "moe_block" or a.experts is None:
        return attention + _mlp(a, a.ffn_size) + norms
    experts = a.experts
    router = a.hidden_size * experts.count
    shared = experts.shared_ffn_size or experts.shared * experts.ffn_size
    routed = experts.count * _mlp(a, experts.ffn_size)
    return attention + router + routed + (_mlp(a, shared) if shared else 0) + norms


def _attention(a: Architecture) -> int:
    queries = a.heads * a.head_dim
    keys_and_values = 2 * a.kv_heads * a.head_dim
    count = a.hidden_size * (queries + keys_and_values) + queries * a.hidden_size
    if a.qkv_bias:
        count += queries + keys_and_values
    if a.output_bias:
        count += a.hidden_size
    if a.qk_norm:
        count += 2 * a.head_dim
    return count


def _latent_attention(a: Architecture, latent: LatentAttention) -> int:
    """Low-rank queries and keys-values with a norm on each latent (DeepSeek-V2, section 2.1)."""
    query_dim = a.heads * (latent.nope_head_dim + latent.rope_head_dim)
    if latent.q_rank:
        queries = (a.hidden_size + 1 + query_dim) * latent.q_rank
    else:
        queries = a.hidden_size * query_dim
    down = a.hidden_size * (latent.kv_rank + latent.rope_head_dim) + latent.kv_rank
    up = latent.kv_rank * a.heads * (latent.nope_head_dim + latent.value_head_dim)
    return queries + down + up + a.heads * latent.value_head_dim * a.hidden_size


def _mlp(a: Architecture, ffn_size: int) -> int:
    matrices = 3 if a.gated_mlp else 2
    biases = (matrices - 1) * ffn_size + a.hidden_size if a.mlp_bias else 0
    return matrices * a.hidden_size * ffn_size + biases


def _norm(a: Architecture) -> int:
    return a.hidden_size * (2 if a.norm == "layer" else 1)


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
