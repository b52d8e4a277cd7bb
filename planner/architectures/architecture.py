"""Architecture: the configuration of a Hugging Face model read as figures.

`architecture_of` knows which keys each `model_type` has, what their defaults are, and which of our
figures they mean.  A configuration that the figures cannot express is refused, by its key.

Model types that cannot be planned, each with the reason in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.planner.architectures import llama_variants as after_llama
from meshwright.planner.architectures import parallel_residual as side_by_side
from meshwright.planner.architectures.config_keys import (
    Config,
    Keys,
    divided_head_dim,
    flag,
    optional,
    positive,
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
from meshwright.planner.architectures.parameters import block_kinds, graph_of
from meshwright.planner.architectures.unread_settings import unread_settings
from meshwright.planner.documents.document import first_error, nearest
from meshwright.planner.documents.model import (
    MOST_SETTINGS,
    Architecture,
    ModelGraph,
    Patches,
)
from meshwright.planner.errors import DocumentError

_STATEFUL = (
    "has layers that carry a state along the sequence (a state-space model or linear attention), "
    "which the planner has no figures of"
)
_TWO_SEQUENCES = "attends to an encoder's sequence, which the planner has no figures of"
_SPARSE = "attends to keys that an indexer chooses, which the planner has no figures of"
_OF_KIND = {
    _STATEFUL: (
        "bamba",
        "bailing_hybrid",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ),
    _TWO_SEQUENCES: (
        "bart",
        "blenderbot",
        "encoder_decoder",
        "led",
        "m2m_100",
        "marian",
        "mbart",
        "moonshine",
        "mt5",
        "nllb_moe",
        "pegasus",
        "prophetnet",
        "speech_to_text",
        "switch_transformers",
        "t5",
        "t5gemma",
        "umt5",
        "whisper",
    ),
    _SPARSE: ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
}
REASONS = {kind: reason for reason, kinds in _OF_KIND.items() for kind in kinds}


def reason(kind: str, config: Any) -> str | None:
    """Return why a model type has no figures, or None if the type is unknown.

    A model that joins towers for images or sound with a language model has a `text_config`.

    >>> reason("gemma3", {"text_config": {"model_type": "gemma3_text"}})
    "joins other inputs with a language model; that alone can be planned: a config.json with what \
stands in its text_config, whose model_type is 'gemma3_text'"
    """
    if kind in REASONS:
        return REASONS[kind]
    text = config.get("text_config")
    if isinstance(text, dict):
        model_type = text.get("model_type")
        inner = model_type if isinstance(model_type, str) else "llama"
        if inner in REASONS:
            return f"joins other inputs with '{inner}', which {REASONS[inner]}"
        return (
            "joins other inputs with a language model; that alone can be planned: a config.json "
            f"with what stands in its text_config, whose model_type is '{inner:.60}'"
        )
    return None


__all__ = ["SUPPORTED", "architecture_of", "block_kinds", "graph_of", "model_of_config"]


def _class_text(config: Config) -> str:
    """Return the class that a configuration names, for a message."""
    match config.get("architectures"):
        case [str(name), *_]:
            return f" ({name[:60]})"
    return ""


def architecture_of(config: Config, *, name: str) -> Architecture:
    """Return the figures of a Hugging Face `config.json`, read as a dict.

    >>> architecture_of(
    ...     {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    ...      "n_positions": 1024, "vocab_size": 50257}, name="gpt2").ffn_size
    3072
    """
    kind = config.get("model_type")
    kind = _SAME_FIGURES.get(str(kind), kind)
    if not isinstance(kind, str):
        raise DocumentError(
            "model_type", f"is missing in {name}; it names the architecture of the figures"
        )
    if kind not in _READERS and (why := reason(kind, config)):
        raise DocumentError(
            "model_type",
            f"is '{kind[:60]}'; it {why}. It can be trained from your own script with "
            "meshwright.Engine (docs/how-to/train-your-script.md), or given as file.py:factory.",
        )
    if kind not in _READERS:
        raise DocumentError(
            "model_type",
            f"is '{kind[:60]}'{_class_text(config)}, which is not supported; "
            f"{nearest(kind, sorted(_READERS))} "
            f"Supported: {', '.join(sorted(_READERS))}. "
            "Any other model can be trained from your own script with meshwright.Engine "
            "(docs/how-to/train-your-script.md), or given as file.py:factory.",
        )
    try:
        return _READERS[kind](config if isinstance(config, Keys) else Keys(config))
    except ValidationError as error:
        raise first_error(error) from error


def model_of_config(config: Config, *, name: str, source: str) -> ModelGraph:
    """Return the layers of a user's `config.json`, and which of its settings were not understood.

    >>> model_of_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    ...     "n_positions": 1024, "vocab_size": 50257, "engrams": 3}, name="mine", source="mine"
    ... ).not_understood
    ('engrams=3',)
    """
    keys = Keys(config)
    graph = graph_of(architecture_of(keys, name=name), name=name, source=source)
    kind = str(config["model_type"])
    unread = unread_settings(config, keys.read, _SAME_FIGURES.get(kind, kind))
    return graph.model_copy(update={"not_understood": unread[:MOST_SETTINGS] or None})


def _mistral(config: Config) -> Architecture:
    return Architecture(
        **decoder(config, "mistral", kv_heads=8),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        sliding_window=optional(config, "sliding_window", 4096) or 0,
    )


def _qwen2(config: Config) -> Architecture:
    return Architecture(
        **decoder(config, "qwen2", kv_heads=32),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=True,
        **_qwen_window(config),
    )


def _qwen3(config: Config) -> Architecture:
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "qwen3", kv_heads=32, head_dim=128),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        **_qwen_window(config),
    )


def _qwen_window(config: Config) -> dict[str, Any]:
    """Qwen slides only from block `max_window_layers` on, if its configuration enables it."""
    window = optional(config, "sliding_window", 4096)
    if not flag(config, "use_sliding_window", False) or not window:
        return {}
    if config.get("layer_types") is not None:
        return windows(config, window=window, every=1)
    first = optional(config, "max_window_layers", 28) or 0
    if first >= positive(config, "num_hidden_layers"):
        return {}
    return {"sliding_window": window, "global_blocks": tuple(range(first))}


def _gemma2(config: Config) -> Architecture:
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "gemma2", kv_heads=4, head_dim=256),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        **windows(config, window=optional(config, "sliding_window", 4096) or 0, every=2),
    )


def _gpt2(config: Config) -> Architecture:
    hidden, heads = positive(config, "n_embd"), positive(config, "n_head")
    return Architecture(
        family="gpt2",
        hidden_size=hidden,
        layers=positive(config, "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=divided_head_dim(config, hidden=("n_embd", hidden), heads=("n_head", heads)),
        ffn_size=optional(config, "n_inner", None) or 4 * hidden,
        vocab_size=positive(config, "vocab_size"),
        gated_mlp=False,
        norm="layer",
        positions="learned",
        max_positions=positive(config, "n_positions"),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _gpt_bigcode(config: Config) -> Architecture:
    """GPT-2 with one head of keys and values (StarCoder)."""
    if flag(config, "add_cross_attention", False):
        raise without_figures("add_cross_attention", "is true")
    figures = _gpt2(config).model_dump() | {"family": "gpt_bigcode"}
    if flag(config, "multi_query", True):
        figures["kv_heads"] = 1
    return Architecture(**figures)


def _opt(config: Config) -> Architecture:
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    width = optional(config, "word_embed_proj_dim", None) or hidden
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if not flag(config, key, True):
            raise without_figures(key, "is false")
    if flag(config, "_remove_final_layer_norm", False):
        raise without_figures("_remove_final_layer_norm", "is true")
    return Architecture(
        family="opt",
        hidden_size=hidden,
        layers=positive(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=divided_head_dim(
            config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
        ),
        ffn_size=positive(config, "ffn_dim"),
        vocab_size=positive(config, "vocab_size"),
        gated_mlp=False,
        norm="layer",
        pre_norm=flag(config, "do_layer_norm_before", True),
        positions="learned",
        max_positions=positive(config, "max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_size=0 if width == hidden else width,
    )


def _mixtral(config: Config) -> Architecture:
    return Architecture(
        **decoder(config, "mixtral", kv_heads=8),
        sliding_window=optional(config, "sliding_window", None) or 0,
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        experts=routed_experts(config, count_key="num_local_experts", ffn_key="intermediate_size"),
    )


def _qwen3_moe(config: Config) -> Architecture:
    dense = leading_dense(config)
    if _qwen_window(config):
        raise without_figures("use_sliding_window", "is true with experts")
    bias = flag(config, "attention_bias", False)
    return Architecture(
        **decoder(config, "qwen3_moe", kv_heads=4),
        tied_embeddings=flag(config, "tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=routed_experts(
            config, count_key="num_experts", ffn_key="moe_intermediate_size", dense_layers=dense
        ),
    )


def _bert(config: Config) -> Architecture:
    return Architecture(
        **_encoder(config, "bert"),
        vocab_size=positive(config, "vocab_size"),
        positions="learned",
        max_positions=positive(config, "max_position_embeddings"),
        tied_embeddings=flag(config, "tie_word_embeddings", True),
        qkv_bias=True,
        pre_norm=False,
        token_types=optional(config, "type_vocab_size", 2) or 0,
        head_transform=True,
    )


def _vit(config: Config) -> Architecture:
    patches = Patches(
        image_size=positive(config, "image_size"),
        patch_size=positive(config, "patch_size"),
        channels=optional(config, "num_channels", 3) or 3,
    )
    if patches.image_size % patches.patch_size:
        raise DocumentError(
            "patch_size",
            f"is {patches.patch_size}, which does not divide image_size {patches.image_size}",
        )
    labels = config.get("id2label")
    classes = optional(config, "num_labels", None) or (
        len(labels) if isinstance(labels, Mapping) and labels else 1000
    )
    return Architecture(
        **_encoder(config, "vit"),
        vocab_size=0,
        positions="learned",
        max_positions=(patches.image_size // patches.patch_size) ** 2 + 1,
        qkv_bias=flag(config, "qkv_bias", True),
        classes=classes,
        patches=patches,
    )


_READERS: dict[str, Callable[[Keys], Architecture]] = {
    **after_llama.READERS,
    **side_by_side.READERS,
    "bert": _bert,
    "deepseek_v3": lambda config: deepseek(config, "deepseek_v3"),
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "llama": lambda config: llama(config, "llama"),
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "vit": _vit,
}
SUPPORTED = tuple(sorted(_READERS))
_SAME_FIGURES = {"kimi_k2": "deepseek_v3"}
"""Types that are built as another one, under a name of their own."""


def language_model(config: Config) -> Config | None:
    """Return the language model's own configuration of a type that joins it with other inputs.

    None where the type has figures itself, or its language model has none.

    >>> language_model({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})
    {'model_type': 'gemma3_text'}
    >>> language_model({"model_type": {}, "text_config": {"model_type": []}}) is None
    True
    """
    text, kind = config.get("text_config"), config.get("model_type")
    if _has_figures(kind) or not isinstance(text, Mapping):
        return None
    return text if _has_figures(text.get("model_type")) else None


def _has_figures(kind: object) -> bool:
    """Return whether this is a model_type that figures are read of."""
    return isinstance(kind, str) and (kind in _READERS or kind in _SAME_FIGURES)


def _encoder(config: Config, family: str) -> dict[str, Any]:
    """Figures that BERT and ViT name alike."""
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    return {
        "family": family,
        "hidden_size": hidden,
        "layers": positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": divided_head_dim(
            config, hidden=("hidden_size", hidden), heads=("num_attention_heads", heads)
        ),
        "ffn_size": positive(config, "intermediate_size"),
        "gated_mlp": False,
        "norm": "layer",
        "output_bias": True,
        "mlp_bias": True,
        "causal": False,
    }
