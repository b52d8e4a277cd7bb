"""Adapters of low rank as figures: how many parameters they add to a layer on one rank.

An adapter of a matrix with `in` and `out` features has A [rank, in] and B [out, rank].  Tensor
parallelism divides B where it divides the outputs, A where it divides the inputs; the other stays
whole (runtime/techniques/lora.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.planner.architectures.parameters import routes
from meshwright.planner.documents.model import Architecture, LatentAttention, ModelGraph
from meshwright.planner.documents.training import Lora
from meshwright.planner.errors import DocumentError

EVERY_LINEAR = "all-linear"
_REFERENCE = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
"""The names of our own reference transformer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer of a block.  `rows`: tensor parallelism divides its inputs."""

    path: str
    inputs: int
    outputs: int
    rows: bool


def linears(a: Architecture, *, experts: bool) -> Iterator[Linear]:
    """Yield the linear layers of one block as the runtime's modules name them.

    The matrices of experts and their router are none of them.
    """
    h = a.hidden_size
    if a.family in ("gpt2", "gpt_bigcode"):
        projected = h + 2 * a.kv_heads * a.head_dim
        yield Linear(path="attn.c_attn", inputs=h, outputs=projected, rows=False)
        yield Linear(path="attn.c_proj", inputs=h, outputs=h, rows=True)
        yield Linear(path="mlp.c_fc", inputs=h, outputs=a.ffn_size, rows=False)
        yield Linear(path="mlp.c_proj", inputs=a.ffn_size, outputs=h, rows=True)
        return
    shapes = [
        *(_attention(a) if a.latent is None else _latent_attention(a, a.latent)),
        *_mlp(a, experts=experts),
    ]
    built_in = a.family == "reference"
    for part, name, inputs, outputs, rows in shapes:
        path = (
            f"{part.replace('self_attn', 'attention')}.{_REFERENCE[name]}"
            if built_in
            else (f"{part}.{name}")
        )
        yield Linear(path=path, inputs=inputs, outputs=outputs, rows=rows)


_PLAIN = "c_fc", "c_proj"
_PLAIN_MLP = {"nemotron": ("up_proj", "down_proj"), "phi": ("fc1", "fc2")}
"""The two products of an MLP without a gate, by family."""
_Shape = tuple[str, str, int, int, bool]
"""A linear layer: module, name, inputs, outputs, whether its inputs are divided."""


def _attention(a: Architecture) -> Iterator[_Shape]:
    h, heads, keys = a.hidden_size, a.heads * a.head_dim, a.kv_heads * a.head_dim
    if a.family == "phi3":
        yield "self_attn", "qkv_proj", h, heads + 2 * keys, False
    else:
        yield "self_attn", "q_proj", h, heads, False
        yield "self_attn", "k_proj", h, keys, False
        yield "self_attn", "v_proj", h, keys, False
    yield "self_attn", "dense" if a.family == "phi" else "o_proj", heads, h, True


def _latent_attention(a: Architecture, latent: LatentAttention) -> Iterator[_Shape]:
    h, queries = a.hidden_size, a.heads * (latent.nope_head_dim + latent.rope_head_dim)
    if latent.q_rank:
        yield "self_attn", "q_a_proj", h, latent.q_rank, False
        yield "self_attn", "q_b_proj", latent.q_rank, queries, False
    else:
        yield "self_attn", "q_proj", h, queries, False
    yield "self_attn", "kv_a_proj_with_mqa", h, latent.kv_rank + latent.rope_head_dim, False
    wide = a.heads * (latent.nope_head_dim + latent.value_head_dim)
    yield "self_attn", "kv_b_proj", latent.kv_rank, wide, False
    yield "self_attn", "o_proj", a.heads * latent.value_head_dim, h, True


def _mlp(a: Architecture, *, experts: bool) -> Iterator[_Shape]:
    h, ffn, part = a.hidden_size, a.ffn_size, "mlp"
    if experts and a.experts is not None:
        ffn = a.experts.shared_ffn_size or a.experts.shared * a.experts.ffn_size
        part = "mlp.shared_expert" if a.family == "qwen2_moe" else "mlp.shared_experts"
        if a.experts.shared_gate:
            yield "mlp", "shared_expert_gate", h, 1, False
        if a.family == "reference" or not ffn:
            return
    if a.family == "phi3":
        yield part, "gate_up_proj", h, 2 * ffn, False
    elif a.gated_mlp:
        yield part, "gate_proj", h, ffn, False
        yield part, "up_proj", h, ffn, False
    else:
        yield part, _PLAIN_MLP.get(a.family, _PLAIN)[0], h, ffn, False
    yield part, "down_proj" if a.gated_mlp else _PLAIN_MLP.get(a.family, _PLAIN)[1], ffn, h, True


def adapter_parameters(model: ModelGraph, kind: str, lora: Lora, *, tensor: int = 1) -> float:
    """Return the parameters of a layer's adapters on a rank; embedding and head have none.

    >>> from meshwright.planner.catalog.expressions import resolve_model
    >>> llama = resolve_model("llama-3.1-8b")
    >>> adapter_parameters(llama, "block", Lora(rank=16, targets=("q_proj", "v_proj")))
    212992.0
    """
    return sum(_adapters(model, kind, lora, tensor))


def largest_adapter(model: ModelGraph, kind: str, lora: Lora, *, tensor: int = 1) -> float:
    """Return the parameters of the larger matrix of a layer's largest adapter on a rank.

    >>> from meshwright.planner.catalog.expressions import resolve_model
    >>> llama = resolve_model("llama-3.1-8b")
    >>> largest_adapter(llama, "block", Lora(rank=16, targets=("q_proj", "down_proj")))
    229376.0
    """
    return max(_adapters(model, kind, lora, tensor), default=0.0)


def _adapters(model: ModelGraph, kind: str, lora: Lora, tensor: int) -> Iterator[float]:
    """Yield the parameters of A and of B of each of a layer's adapters on a rank."""
    a = model.architecture
    if a is None:
        raise DocumentError(
            "lora", f"{model.name}: adapters are planned for language models; leave lora out"
        )
    if kind in ("embedding", "head"):
        return
    for linear in linears(a, experts=routes(kind)):
        if is_target(linear.path, lora):
            yield lora.rank * linear.inputs / (tensor if linear.rows else 1)
            yield lora.rank * linear.outputs / (1 if linear.rows else tensor)


def packed_matrices(model: ModelGraph, kind: str, lora: Lora, *, tensor: int = 1) -> float:
    """Return the parameters of a block's linear layers on a rank that are stored packed.

    Norms, biases and routers are not.  MXFP4 is of routed experts alone, where a model has any, as
    gpt-oss is published.

    >>> from meshwright.planner.catalog.expressions import resolve_model
    >>> llama = resolve_model("llama-3.1-8b")
    >>> packed_matrices(llama, "block", Lora(rank=16, weights="nf4"))
    218103808.0
    """
    a = model.architecture
    if a is None or not lora.packs_weights or (lora.weights == "mxfp4" and a.experts is not None):
        return 0.0
    each = linears(a, experts=routes(kind))
    return float(sum(linear.inputs * linear.outputs for linear in each)) / tensor


def reach_feed_forward(model: ModelGraph, lora: Lora) -> bool:
    """Return whether adapters stand beside products of the feed-forward, not of attention alone.

    >>> from meshwright.planner.catalog.expressions import resolve_model
    >>> llama = resolve_model("llama-3.1-8b")
    >>> reach_feed_forward(llama, Lora(rank=16, targets=("q_proj", "v_proj")))
    False
    >>> reach_feed_forward(llama, Lora(rank=16, targets=("q_proj", "down_proj")))
    True
    """
    a = model.architecture
    if a is None:
        return True
    of_block = linears(a, experts=False)
    return any("mlp." in linear.path and is_target(linear.path, lora) for linear in of_block)


def unmatched_targets(model: ModelGraph, lora: Lora) -> tuple[str, ...]:
    """Return the targets that no linear layer of a language model's blocks is named by.

    Raises DocumentError where all of them are such: nothing would be trained.

    >>> from meshwright.planner.catalog.expressions import resolve_model
    >>> llama = resolve_model("llama-3.1-8b")
    >>> unmatched_targets(llama, Lora(rank=16, targets=("q_proj", "c_attn")))
    ('c_attn',)
    """
    a = model.architecture
    if a is None or EVERY_LINEAR in lora.targets:
        return ()
    paths = {
        linear.path: None
        for experts in {routes(layer.kind) for layer in model.layers}
        for linear in linears(a, experts=experts)
    }
    unmatched = tuple(
        target
        for target in lora.targets
        if not any(
            is_target(path, lora.model_copy(update={"targets": (target,)})) for path in paths
        )
    )
    if len(unmatched) == len(lora.targets):
        names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
        raise DocumentError(
            "lora.targets",
            f"no linear layer of {model.name}'s blocks is named {' or '.join(unmatched)}; name "
            f"some of {', '.join(names)}, or {EVERY_LINEAR}",
        )
    return unmatched


def is_target(path: str, lora: Lora) -> bool:
    """Tell whether a module is aimed at, by the end of its path.

    >>> is_target("layer.self_attn.q_proj", Lora(rank=4, targets=("q_proj",)))
    True
    >>> is_target("layer.self_attn.q_proj", Lora(rank=4, targets=("proj",)))
    False
    """
    ends = (path == target or path.endswith(f".{target}") for target in lora.targets)
    return EVERY_LINEAR in lora.targets or any(ends)
