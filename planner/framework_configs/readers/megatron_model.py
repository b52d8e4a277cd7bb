"""A decoder of which Megatron-LM's arguments are the only description.

Defaults are those of Megatron-LM (megatron/training/arguments.py, core v0.15): learned positions,
layer norms, biases, an MLP four times as wide without a gate, and tied embeddings.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.planner.catalog import hub, models
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.documents.model import Architecture
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers.parsed_config import OWN_FAMILY, Settings

OTHER_MODELS = re.compile(
    r"(^|[-_.])(bert|t5|mamba|hybrid|retro|vision|vit|vlm|dino|mimo|encoder|biencoder|ict|image|img"
    r"|multimodal|decoder-seq|ssm|linear-attention|attention-variant|heterogeneous)([-_.]|$)|^spec$"
)
"""Programs and arguments of models that are no plain decoders of equal blocks."""

_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def own_architecture(settings: Settings, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return `architecture`, or `lacks`, the argument without which there is none.

    `figures` are those that the arguments contain, by the names of `Architecture`.
    """
    if not {"layers", "hidden_size", "heads"} <= figures.keys():
        return {}
    vocabulary = figures.get("vocab_size") or _vocabulary(settings)
    if vocabulary is None:
        return {"lacks": "--vocab-size"}
    hidden, heads = figures["hidden_size"], figures["heads"]
    gated = figures.get("gated_mlp", False)
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = figures.get("ffn_size") or usual
    biased = settings.flag("disable-bias-linear") is not True
    is_latent = figures.get("is_latent", False)
    frequency = str(settings.ignore("moe-layer-freq") or 1)
    if figures.get("experts") and frequency != "1" and "dense_layers" not in figures:
        return {}
    parts: dict[str, Any] = {}
    if figures.get("experts"):
        parts["experts"] = {
            "count": figures["experts"],
            "per_token": figures.get("per_token") or 2,
            "ffn_size": figures.get("expert_ffn_size") or ffn,
            "shared": 1 if figures.get("shared_ffn_size") else 0,
            "shared_ffn_size": figures.get("shared_ffn_size") or 0,
            "dense_layers": figures.get("dense_layers") or 0,
        }
    if is_latent:
        parts["latent"] = {
            "q_rank": figures.get("q_rank") or 0,
            "kv_rank": figures.get("kv_rank") or 32,
            "rope_head_dim": figures.get("rope_head_dim") or 64,
            "nope_head_dim": figures.get("nope_head_dim") or 128,
            "value_head_dim": figures.get("value_head_dim") or 128,
        }
    rotary = settings.flag("use-rotary-position-embeddings")
    positions = figures.get("positions") or ("rotary" if rotary else "learned")
    places = settings.ignore("max-position-embeddings") or settings.ignore("seq-length") or 4096
    try:
        architecture = Architecture.model_validate(
            {
                "family": OWN_FAMILY,
                "hidden_size": hidden,
                "layers": figures["layers"],
                "heads": heads,
                "kv_heads": heads if is_latent else figures.get("kv_heads") or heads,
                "head_dim": figures.get("head_dim") or max(1, hidden // heads),
                "ffn_size": ffn,
                "vocab_size": vocabulary,
                "gated_mlp": gated,
                "norm": figures.get("norm", "layer"),
                "positions": positions,
                "max_positions": int(places),
                "tied_embeddings": figures.get("tied_embeddings", True),
                "qkv_bias": biased or figures.get("qkv_bias", False),
                "output_bias": biased,
                "mlp_bias": biased,
                "qk_norm": figures.get("qk_norm", False),
                **parts,
            }
        )
    except (ValidationError, ValueError):
        return {}
    return {"architecture": architecture}


def _vocabulary(settings: Settings) -> int | None:
    """Return the size of a tokenizer's vocabulary; None where it is not known."""
    kind, model = settings.ignore("tokenizer-type"), settings.ignore("tokenizer-model")
    padded = settings.number("padded-vocab-size")
    if padded:
        return padded
    if kind is None and settings.ignore("merge-file") is not None:  # GPT-2's pair of files
        kind = "GPT2BPETokenizer"
    if kind in _VOCABULARIES:
        return _VOCABULARIES[kind]
    name = str(model or "")
    short = name.rpartition("/")[2].lower()
    with contextlib.suppress(DocumentError):
        if short in models() or hub.is_hub_name(name):
            architecture = resolve_model(short if short in models() else name).architecture
            return None if architecture is None else architecture.vocab_size
    return None
