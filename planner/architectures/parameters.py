"""Parameters of every layer: the figures of an architecture as a chain of layers.

Counts are exact, as `transformers` builds the modules.  The time and memory of a layer are computed
elsewhere.
"""

from __future__ import annotations

from meshwright.planner.documents.model import Architecture, LatentAttention, Layer, ModelGraph

WIDE_QK_NORM = ("minimax_m2", "olmo2", "olmo3")
"""Families whose query and key norms are over all heads together, not over each."""
SINKS = ("gpt_oss",)
"""Families with one more score per head, a parameter, in each softmax of attention."""
ROUTER_BIAS = ("gpt_oss",)
"""Families whose router has a bias."""
OPT_POSITION_OFFSET = 2
"""OPT's table of positions has two rows more than `max_position_embeddings`."""


def graph_of(architecture: Architecture, *, name: str, source: str | None = None) -> ModelGraph:
    """Return the model as a chain: embedding, one `block` per layer, head.

    The head has the norm before it; a tied output projection counts in the embedding.

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

    `block`, `moe_block`, and `dense_block` (a leading block with a plain MLP in a model with
    experts); the prefix `local_` means that it attends to a sliding window.
    """
    experts, every = architecture.experts, architecture.sliding_every
    everywhere = set(architecture.global_blocks or ())

    def kind(index: int) -> str:
        plain = "block"
        if experts is not None:
            plain = "dense_block" if index < experts.dense_layers else "moe_block"
        seen = index in everywhere or (every > 1 and (index + 1) % every == 0)
        return f"local_{plain}" if architecture.sliding_window and not seen else plain

    return tuple(kind(index) for index in range(architecture.layers))


def routes(kind: str) -> bool:
    """Return True if layers of a kind route tokens to experts."""
    return kind.endswith("moe_block")


def slides(kind: str) -> bool:
    """Return True if attention of layers of a kind is limited to a sliding window."""
    return kind.startswith("local_")


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
    if a.token_types or a.embedding_norm:
        count += norm_parameters(a)
    return count


def _head(a: Architecture) -> int:
    """Parameters behind the last block: norm, transform, projections that are not tied."""
    count = norm_parameters(a) if a.pre_norm else 0
    if a.classes:
        return count + a.hidden_size * a.classes + a.classes
    width = a.embedding_size or a.hidden_size
    if width != a.hidden_size:
        count += a.hidden_size * width
    if a.head_transform:
        count += a.hidden_size * a.hidden_size + a.hidden_size + norm_parameters(a) + a.vocab_size
    if not a.tied_embeddings:
        count += a.vocab_size * width
    if a.head_bias:
        count += a.vocab_size
    return count


def _block(a: Architecture, kind: str) -> int:
    """Parameters of one block: attention, MLP or experts, norms."""
    attention = _attention(a) if a.latent is None else _latent_attention(a, a.latent)
    norms = norms_of_block(a) * norm_parameters(a)
    if not routes(kind) or a.experts is None:
        return attention + _mlp(a, a.ffn_size) + norms
    experts = a.experts
    router = a.hidden_size * (experts.count + experts.shared_gate)
    if a.family in ROUTER_BIAS:
        router += experts.count
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
        wide = a.family in WIDE_QK_NORM
        count += queries + keys_and_values // 2 if wide else 2 * a.head_dim
    if a.family in SINKS:
        count += a.heads
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


def norms_of_block(a: Architecture) -> int:
    """Norms of the residual stream in one block."""
    return 4 if a.post_norms else 1 if a.shared_norm else 2


def norm_parameters(a: Architecture) -> int:
    """Parameters of one norm of the residual stream."""
    return a.hidden_size * (2 if a.norm == "layer" and a.norm_bias else 1)
