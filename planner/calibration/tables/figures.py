"""The model of a row: the figures of a decoder as a table gives them, gaps filled by its name.

A table does not contain norms, positions and biases: gated MLPs come with RMS norms, rotary
positions and no biases (Llama), others with layer norms, biases and learned positions (GPT).  Cells
that are empty are those of the catalogue's model where the row's name, layers and width are its.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from meshwright.planner.architectures.architecture import architecture_of
from meshwright.planner.calibration.tables.cells import EMPTY, Row, flag, optional, word
from meshwright.planner.catalog import model_config, models
from meshwright.planner.documents.model import Architecture, Experts, LatentAttention
from meshwright.planner.errors import DocumentError

DEFAULT_HEAD_DIM = 128
DEFAULT_VOCABULARY = 32000
OTHER_ATTENTION = ("linear", "mamba", "ssm", "rwkv", "retnet", "hybrid", "gated-delta")
"""Token mixers other than attention to all tokens."""


def architecture_of_row(row: Row, assumed: list[str]) -> Architecture:
    """Return a row's architecture; ValueError or DocumentError where it cannot be determined."""
    named = _model_by_name(row)
    row = _fill_figures(row, named, assumed)
    hidden = _required_count(row, "hidden_size")
    layers = _required_count(row, "layers")
    heads = optional(row, "n_heads") or None
    head_dim = optional(row, "head_dim") or None
    if heads is None:
        heads = max(1, hidden // (head_dim or DEFAULT_HEAD_DIM))
    head_dim = head_dim or max(1, hidden // heads)
    kv_heads = optional(row, "n_kv_heads") or heads
    if heads % kv_heads:
        assumed.append(f"{heads} heads of keys and values")
        kv_heads = heads
    gated = flag(row, "gated_mlp")
    gated = True if gated is None else gated
    ffn = optional(row, "ffn_size") or None
    if ffn is None:
        ffn = 4 * hidden
        if optional(row, "n_experts") in (None, 0, 1):
            assumed.append("feed-forward of 4 x hidden_size")
    attention = word(row.get("attention", ""))
    if any(attention.startswith(other) for other in OTHER_ATTENTION):
        raise DocumentError("", f"attention '{attention:.40}' is not planned")
    vocabulary = optional(row, "vocab_size") or None
    if vocabulary is None:
        assumed.append(f"vocabulary of {DEFAULT_VOCABULARY}")
    latent = None
    if attention == "mla":
        latent = named.latent if named is not None and named.latent else _latent(hidden)
    stated = _architecture_of(
        gated=gated,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=1 if attention == "mqa" else kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocabulary=vocabulary or DEFAULT_VOCABULARY,
        tied=bool(flag(row, "tied_embeddings")),
        latent=latent,
        experts=(
            optional(row, "n_experts") or 0,
            optional(row, "experts_per_token") or 1,
            optional(row, "expert_ffn_size") or ffn,
            optional(row, "n_shared_experts") or 0,
            min(optional(row, "n_dense_layers") or 0, layers),
        ),
        positions=_required_count(row, "seq_len"),
    )
    return stated if named is None else _with_unstated(stated, named)


def _with_unstated(stated: Architecture, named: Architecture) -> Architecture:
    """Return a row's architecture with the named model's properties that no column contains.

    These are norms, biases, positions and windows of attention, of a model whose matrices agree
    with the row.
    """
    if not named.causal or _matrices(stated) != _matrices(named):
        return stated
    return named.model_copy(
        update={
            "max_positions": stated.max_positions,
            "vocab_size": stated.vocab_size,
            "tied_embeddings": stated.tied_embeddings,
        }
    )


def _matrices(a: Architecture) -> tuple[object, ...]:
    experts = a.experts
    return (
        *(a.layers, a.hidden_size, a.heads, a.kv_heads, a.head_dim, a.gated_mlp, a.latent),
        a.ffn_size if experts is None else None,
        experts and (experts.count, experts.per_token, experts.ffn_size, experts.dense_layers),
    )


def _required_count(row: Row, column: str) -> int:
    value = optional(row, column)
    if value is None:
        raise DocumentError("", f"{column} is not known")
    if value == 0:
        raise ValueError(f"{column} is 0")
    return value


def _model_by_name(row: Row) -> Architecture | None:
    """Return the catalogue's model of the row's name, where the row's figures agree."""
    model = _known_models().get(_plain(row.get("model", "")))
    if model is None:
        return None
    architecture = _catalogue_architecture(model)
    for column, value in (
        ("layers", architecture.layers),
        ("hidden_size", architecture.hidden_size),
    ):
        if optional(row, column) not in (None, value):
            return None
    return architecture


def _fill_figures(row: Row, named: Architecture | None, assumed: list[str]) -> Row:
    if named is None or not named.causal:
        return row
    figures: dict[str, object] = {
        "layers": named.layers,
        "hidden_size": named.hidden_size,
        "n_heads": named.heads,
        "n_kv_heads": named.kv_heads,
        "ffn_size": named.ffn_size,
        "vocab_size": named.vocab_size,
        "tied_embeddings": int(named.tied_embeddings),
        "gated_mlp": int(named.gated_mlp),
        "attention": "mla" if named.latent else "gqa",
    }
    if named.latent is None:
        figures["head_dim"] = named.head_dim
    if named.experts is not None:
        figures |= {
            "n_experts": named.experts.count,
            "experts_per_token": named.experts.per_token,
            "expert_ffn_size": named.experts.ffn_size,
            "n_shared_experts": named.experts.shared,
            "n_dense_layers": named.experts.dense_layers,
        }
    empty = [name for name in figures if row.get(name, "").lower() in EMPTY]
    if "layers" in empty or "hidden_size" in empty:
        assumed.append("figures of the model as the catalogue has them")
    return {**row, **{name: str(figures[name]) for name in empty}}


@cache
def _known_models() -> dict[str, str]:
    names: dict[str, str] = {}
    for name, entry in models().items():
        for alias in (name, *entry.aliases):
            names.setdefault(_plain(alias), name)
    return names


def _plain(name: str) -> str:
    """Return a name without its publisher, marks of fine-tuning and punctuation.

    >>> _plain("meta-llama/Meta-Llama-3-8B"), _plain("Llama_3-8B-Instruct"), _plain("llama2-7b")
    ('llama38b', 'llama38b', 'llama27b')
    """
    plain = word(name).rpartition("/")[2]
    plain = re.sub(r"^meta-|-(hf|instruct|chat|base|it|v0\.\d)(?=-|$)", "", plain)
    return re.sub(r"[^a-z0-9.]", "", plain)


@cache
def _catalogue_architecture(name: str) -> Architecture:
    return architecture_of(model_config(name), name=name)


@lru_cache(maxsize=1024)
def _architecture_of(
    *,
    gated: bool,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocabulary: int,
    tied: bool,
    latent: LatentAttention | None,
    experts: tuple[int, int, int, int, int],
    positions: int,
) -> Architecture:
    count, per_token, expert_ffn, shared, dense_layers = experts
    return Architecture(
        family="llama" if gated else "gpt",
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if latent else kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocabulary,
        gated_mlp=gated,
        norm="rms" if gated else "layer",
        positions="rotary" if gated else "learned",
        max_positions=positions,
        tied_embeddings=tied,
        qkv_bias=not gated,
        output_bias=not gated,
        mlp_bias=not gated,
        experts=Experts(
            count=count,
            per_token=min(per_token, count),
            ffn_size=expert_ffn,
            shared=shared,
            dense_layers=dense_layers,
        )
        if count > 1
        else None,
        latent=latent,
    )


def _latent(hidden: int) -> LatentAttention:
    """Return the ranks of latent attention: DeepSeek's by width, Megatron-LM's defaults if small.

    The table has no columns for them.  Sources: DeepSeek-V2 and V3 configurations; Megatron-LM,
    MLATransformerConfig.
    """
    if hidden < 2048:
        return LatentAttention(
            q_rank=512, kv_rank=512, rope_head_dim=64, nope_head_dim=128, value_head_dim=128
        )
    return LatentAttention(
        q_rank=1536 if hidden >= 5120 else 0,
        kv_rank=512,
        rope_head_dim=64,
        nope_head_dim=128,
        value_head_dim=128,
    )
