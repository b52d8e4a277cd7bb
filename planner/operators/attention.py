"""Operators of self-attention: projections, positions, the fused core, the output projection.

Operators of attention that writes its scores to memory: GPT-J, and Bloom's and MPT's with ALiBi.

`transformers` has no fused kernel for these families' scores: every query meets every key, the
softmax is in fp32, and both its output and its copy in the working type are saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from meshwright.planner.architectures.parameters import SINKS, WIDE_QK_NORM, slides
from meshwright.planner.operators.operator_table import FP32, Operator, Setting, larger, smaller
from meshwright.planner.operators.operators import (
    elementwise,
    gather_sequence,
    linear,
    matmul,
    norm,
    projections,
    row_wise,
)

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Architecture, LatentAttention
    from meshwright.planner.operators.kernels import KernelSettings
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.planner.documents.model import Architecture

NARROWED = 1.5
"""Traffic of casting a 16-bit tensor to 8 bits, or back, over its bytes."""
ONE_PROJECTION = ("falcon", "gpt_neox", "phi3")
"""Families whose values are a part of one product's output, which stays alive as long as they
do."""

WRITTEN_SCORE = 2
"""Bytes of a score where attention is written out."""
CAPPED_BLOCK = 512
"""Queries whose soft-capped scores exist at once (runtime/parallel/softcap_attention.py)."""
CAPPED_KERNELS = 12
"""Number of kernels of each block of soft-capped scores."""
CAPPED_PASSES, CAPPED_PASSES_FP32 = (76.0, 162.0), (68.0, 148.0)
"""Bytes that one score moves, forward and backward, counted over the lines of
runtime/parallel/softcap_attention.py: 4 read and 4 written by each that works in place, and copies
to 16 bits and back."""
CAP_PASSES = (16.0, 68.0)
"""Part of these bytes that only a cap needs: tanh and a second factor in both passes, and its
slope."""
IN_BLOCKS = ("gemma2", "gpt_oss")
"""Families whose scores are capped or share their softmax with a sink (softcap_attention.py)."""
SINK_KERNELS = 5
"""Kernels of fused attention with sinks: its own, and those of log-sums and of the factor."""
SINK_PASSES = (8.0, 24.0)
"""Bytes that each element of its output moves beside them, forward and backward: multiplied in
place and brought into the order of positions; with its gradient in fp32 for that of the sinks, and
the gradient of queries in that order (sink_attention.py)."""


def attention(a: Architecture, kind: str, setting: Setting, source: str) -> list[Operator]:
    """Projections, rotary positions, fused attention, output projection.

    Where there are fewer heads of keys than tensor-parallel ranks, a rank attends to one of them
    whole, as others do; the projection's weights are divided all the same, and its outputs are
    gathered from all ranks (`_own_heads`).  Source: Megatron Core, transformer/attention.py
    (num_query_groups < world_size).
    """
    if a.latent is not None:
        return _latent_attention(a, a.latent, setting, source)
    kernels = setting.kernels
    if kernels.scores == "module" and writes_scores(a):
        return eager_attention(a, setting, source)
    e, t, tokens = setting.element_bytes, setting.tensor, setting.tokens
    full = tokens * a.hidden_size * e
    query_width = a.heads * a.head_dim / t
    kv_heads = larger(1.0, a.kv_heads / t)
    key_width = kv_heads * a.head_dim
    query, key = tokens * query_width * e, tokens * key_width * e
    width = query_width + 2 * a.kv_heads * a.head_dim / t
    operators, whole = gather_sequence(setting, source, "attention_gather", full)
    apart = a.family not in ONE_PROJECTION and not kernels.fused_projections
    outputs = {"q_linear": query, "k_linear": key, "v": key} if apart else {"qkv": query + 2 * key}
    q, k, v = ("q_linear", "k_linear", "v") if apart else ("qkv", "qkv", "qkv")
    if setting.gathers_heads:
        outputs = {"qkv": tokens * width * e}
        q = k = v = "qkv_own"
    operators += projections(a, setting, source, whole, outputs, width=width)
    if setting.gathers_heads:
        operators += _own_heads(setting, t * tokens * width * e, query + 2 * key)
    if a.family == "falcon" and 1 < a.kv_heads < a.heads and kernels.scores == "module":
        operators.append(_spread(query, key))
        q, k, v, key = "q_apart", "k_apart", "v_apart", query
    if a.qk_norm:
        wide = a.family in WIDE_QK_NORM
        for head, heads in (("q", a.heads / t), ("k", kv_heads)):
            operators.append(
                norm(
                    a,
                    setting,
                    q if head == "q" else k,
                    f"{head}_norm",
                    width=a.head_dim * (heads if wide else 1),
                    rows=tokens * (1 if wide else heads),
                )
            )
        q, k = "q_norm", "k_norm"
    if a.positions == "rotary" and (kernels.compiled or not kernels.fused_rotary):
        cost = Turning(2.0, 1) if kernels.compiled else _turned_eagerly(a, query)
        operators.append(_rotary(setting, (q, k), query, key, cost))
        q, k = "q", "k"
    elif kernels.fused_projections:
        operators.append(_in_place(setting, q, k, query, key))
    operators += _core(
        a,
        kind,
        setting,
        (q, k, v),
        query=query,
        key=key,
        value=key,
        out=query,
        width=query_width,
    )
    merged = "core"
    # Partly rotated tensors are stored head by head, and so is the core; Phi-3 and GPT-OSS join
    # tensors that they rotated whole.
    by_heads = bool(a.rotary_dim) or a.family in ("phi3", "gpt_oss")
    by_heads = by_heads and not _fuses_sinks(a, setting)
    if by_heads and kernels.scores == "module" and not kernels.compiled:
        merged = "core_merged"
        operators.append(elementwise(kernels, merged, ("core",), query))
    return [*operators, *row_wise(a, setting, merged, "attention_out", width=query_width)]


def _latent_attention(
    a: Architecture, latent: LatentAttention, setting: Setting, source: str
) -> list[Operator]:
    """Low-rank projections down (whole on every rank) and up (divided by heads)."""
    e, t, tokens = setting.element_bytes, setting.tensor, setting.tokens
    full = tokens * a.hidden_size * e
    heads = a.heads / t
    query_width = heads * _query_dim(latent)
    value_width = heads * latent.value_head_dim
    query, value = tokens * query_width * e, tokens * value_width * e
    up_width = heads * (latent.nope_head_dim + latent.value_head_dim)
    down_width = latent.kv_rank + latent.rope_head_dim
    operators, whole = gather_sequence(setting, source, "attention_gather", full)

    def product(name: str, tensor: str, rows: float, columns: float) -> list[Operator]:
        scores = matmul(
            name,
            (tensor,),
            {name: tokens * columns * e},
            flops=2 * tokens * rows * columns,
            moved_bytes=(tokens * (rows + columns) + rows * columns) * e,
            weights=rows * columns,
        )
        before = source if tensor == whole else None
        return linear(setting, scores, source=before, size=tokens * rows * e)

    query_source, query_rows = whole, float(a.hidden_size)
    if latent.q_rank:
        operators += product("q_down", whole, a.hidden_size, latent.q_rank)
        operators.append(norm(a, setting, "q_down", "q_latent", width=latent.q_rank, rows=tokens))
        query_source, query_rows = "q_latent", float(latent.q_rank)
    operators += product("q_linear", query_source, query_rows, query_width)
    operators += product("kv_down", whole, a.hidden_size, down_width)
    operators.append(norm(a, setting, "kv_down", "kv_latent", width=latent.kv_rank, rows=tokens))
    operators += product("kv_up", "kv_latent", latent.kv_rank, up_width)
    fused = setting.kernels.fused_rotary
    cost = Turning(2.0, 1) if fused else Turning(4.0, 14)
    operators.append(_rotary(setting, ("q_linear", "kv_up"), query, query, cost))
    operators += _core(
        a,
        "block",
        setting,
        ("q", "k", "kv_up"),
        query=query,
        key=query,
        value=value,
        out=value,
        width=query_width if setting.kernels.pads_values else (query_width + value_width) / 2,
    )
    return [*operators, *row_wise(a, setting, "core", "attention_out", width=value_width)]


def _own_heads(setting: Setting, gathered: float, local: float) -> list[Operator]:
    """Queries, keys and values of all ranks, `gathered` bytes; a rank cuts its `local` from them.

    They are gathered along features, so that what each rank sent is copied into its columns, and
    nothing hides it.  Source: Megatron Core, tensor_parallel/mappings.py (_gather_along_last_dim).
    """
    return [
        Operator(
            name="heads_gather",
            kind="all_gather",
            inputs=("qkv",),
            outputs={"qkv_gathered": gathered},
            moved_bytes=gathered,
            copied_bytes=2 * gathered,
            workspace_bytes=gathered,
            wide=True,
            waits=True,
        ),
        Operator(
            name="own_heads",
            kind="memory",
            inputs=("qkv_gathered",),
            outputs={"qkv_own": local},
            moved_bytes=2 * local,
            backward_moved_bytes=setting.kernels.back(2 * local, gathered + local),
        ),
    ]


def _spread(query: float, key: float) -> Operator:
    """Falcon's keys and values of a group copied to each of its heads, and its queries apart."""
    size = 3 * query
    return Operator(
        name="spread",
        kind="memory",
        inputs=("qkv",),
        outputs={"q_apart": query, "k_apart": query, "v_apart": query},
        moved_bytes=size + query + 2 * key,
        backward_moved_bytes=size + query + 2 * key,
        kernels=3,
    )


def _in_place(setting: Setting, q: str, k: str, query: float, key: float) -> Operator:
    """Queries and keys rotated in place, or reordered by heads: one kernel."""
    moved = 2 * (query + key)
    return Operator(
        name="heads",
        kind="memory",
        inputs=tuple(dict.fromkeys((q, k))),
        outputs={},
        moved_bytes=moved,
        backward_moved_bytes=setting.kernels.back(moved, moved),
    )


class Turning(NamedTuple):
    """Cost of rotating queries and keys by their positions, in one pass of a step."""

    passes: float
    """Number of times that each of their bytes moves."""
    kernels: int
    workspace_bytes: float = 0.0


def _turned_eagerly(a: Architecture, query: float) -> Turning:
    """x cos + rotate_half(x) sin for queries and keys: five kernels each.

    Where a part of a head is turned the rest is copied beside it.
    """
    turned = a.rotary_dim / a.head_dim if a.rotary_dim else 1.0
    passes = 10 * turned + 2 * bool(a.rotary_dim)
    return Turning(passes, 12 if a.rotary_dim else 10, 2 * query)


def _rotary(
    setting: Setting, inputs: tuple[str, str], query: float, key: float, cost: Turning
) -> Operator:
    """Queries and keys of these bytes, turned; nothing is saved for backward."""
    moved = cost.passes * (query + key)
    return Operator(
        name="rotary",
        kind="memory",
        inputs=tuple(dict.fromkeys(inputs)),
        outputs={"q": query, "k": key},
        moved_bytes=moved,
        backward_moved_bytes=setting.kernels.back(moved, moved),
        kernels=cost.kernels,
        workspace_bytes=cost.workspace_bytes,
    )


def _core(
    a: Architecture, kind: str, setting: Setting, inputs: tuple[str, str, str], **sizes: float
) -> list[Operator]:
    """Attention between its projections, of these bytes of queries, keys, values and results."""
    if setting.kernels.scores == "written":
        return _written(a, setting, inputs, **sizes)
    return _fused_attention(a, kind, setting, inputs, **sizes)


def _fused_attention(
    a: Architecture,
    kind: str,
    setting: Setting,
    inputs: tuple[str, str, str],
    *,
    query: float,
    key: float,
    value: float,
    out: float,
    width: float,
) -> list[Operator]:
    """Fused attention; with context parallelism keys and values are brought first.

    FLOPs: 2 products of 2 b s (keys per query) a d, and a causal mask skips half of the keys.
    """
    q, k, v = inputs
    e = setting.element_bytes
    operators = []
    saved: tuple[str, ...] = ("log_sum",)
    attended, kernels, workspace, scores = _keys_per_query(a, setting.attended_len), 1, 0.0, 0.0
    divided = setting.divides_sequence and setting.kernels.context
    if divided == "ring":
        operators.append(_ring(setting, (k, v), key + value))
    elif divided == "heads":
        # A rank sends all but its part of its heads; of keys that fewer heads have, each needs one.
        fewer = larger(1.0, setting.context / larger(1.0, a.kv_heads / setting.tensor))
        sent = query + (key + value) * fewer
        operators.append(_all_to_all("qkv_exchange", (q, k, v), {"qkv_heads": sent}, sent))
        q = k = v = "qkv_heads"
        key, value = key * fewer, value * fewer
    elif divided:
        if a.family == "gpt2":
            saved = (*saved, k, v)  # as long as its queries, which lie in one tensor with them
        key, value = key * setting.context, value * setting.context
        operators.append(_all_keys(setting, (k, v), key, value))
        k, v = "k_all", "v_all"
        # Two chunks of queries, each over the keys before it and over its own; outputs of the two
        # are merged in fp32, half of the queries at a time.
        kernels = 16
        workspace = out + 1.5 * out * FP32 / setting.element_bytes
    with_sinks = setting.kernels.scores == "module" and _fuses_sinks(a, setting)
    if with_sinks:
        attended, kernels, workspace = _skipping(a, kind, setting), SINK_KERNELS, 2 * FP32 * out / e
    elif a.family in IN_BLOCKS and setting.kernels.scores == "module":
        attended, kernels, workspace = _in_blocks(a, kind, setting)
        scores = setting.tokens * a.heads / setting.tensor * attended
    elif setting.kernels.scores == "module" and _is_masked(a, kind, setting):
        kernels, workspace = 1, 0.0
        # With an explicit mask the fused kernel neither groups heads nor skips keys.
        attended = float(setting.seq_len)
        mask = setting.seq_len**2 / setting.context * setting.element_bytes
        mask = mask * (1 if setting.document_len is None else setting.micro_batch)
        operators.append(
            Operator(
                name="mask",
                kind="memory",
                inputs=(),
                outputs={"mask": mask},
                moved_bytes=2 * mask,
                kernels=2,
            )
        )
        saved = (*saved, "mask")
        if a.heads > a.kv_heads:
            shared = a.heads / a.kv_heads
            key, value = key * shared, value * shared
            operators.append(_repeat_heads((k, v), key, value))
            k, v = "k_heads", "v_heads"
    if setting.kernels.scores == "fused":
        attended = _skipping(a, kind, setting)
    core = "core_heads" if divided == "heads" else "core"
    log_sum = setting.tokens * a.heads / setting.tensor * FP32
    passes = _passes(a, setting)
    moved = _fused_traffic(setting.kernels, query + key + value + out, with_sinks * out / e)
    operators.append(
        Operator(
            name="core",
            kind="attention",
            inputs=tuple(dict.fromkeys((q, k, v))),
            outputs={core: out, "log_sum": log_sum},
            fp32=("log_sum",),
            saved=tuple(dict.fromkeys((q, k, v, core, *saved))),
            flops=4 * setting.tokens * attended * width,
            moved_bytes=moved[0] + passes[0] * scores,
            backward_moved_bytes=moved[1] + passes[1] * scores,
            kernels=kernels,
            workspace_bytes=workspace,
        )
    )
    if divided == "heads":
        operators.append(_all_to_all("out_exchange", (core,), {"core": out}, out))
    return operators


def _in_blocks(a: Architecture, kind: str, setting: Setting) -> tuple[float, int, float]:
    """Return keys per query, kernels and working memory of attention that writes a block's scores
    (runtime/parallel/softcap_attention.py).

    A block computes its last query's keys for all of its queries.
    """
    span, rows = window(a, kind, setting.seq_len), _rows(setting)
    attended = span - span**2 / (2.0 * setting.seq_len)
    attended += rows * (1 - span / (2.0 * setting.seq_len))
    return attended, *_softcap_costs(a, setting, span)


def _fused_traffic(
    kernels: KernelSettings, tensors: float, weighed: float = 0.0
) -> tuple[float, float]:
    """Return the traffic of fused attention whose tensors have these bytes, in both passes.

    In 8 bits they are cast before it, and what it makes is cast back; backward their gradients.
    `weighed` elements of its output are multiplied by what a sink leaves of them.
    """
    tensor_bytes = tensors if kernels.core_traffic else 0.0
    casts = NARROWED * tensors if kernels.narrow_core else 0.0
    sinks = SINK_PASSES[0] * weighed, SINK_PASSES[1] * weighed
    return tensor_bytes + casts + sinks[0], 2 * tensor_bytes + casts + sinks[1]


def _repeat_heads(inputs: tuple[str, str], key: float, value: float) -> Operator:
    """Keys and values of a group, copied to each of its heads."""
    return Operator(
        name="repeat_heads",
        kind="memory",
        inputs=inputs,
        outputs={"k_heads": key, "v_heads": value},
        moved_bytes=2 * (key + value),
        backward_moved_bytes=2 * (key + value),
        kernels=2,
    )


def _written(
    a: Architecture,
    setting: Setting,
    inputs: tuple[str, str, str],
    *,
    query: float,
    key: float,
    value: float,
    out: float,
    width: float,
) -> list[Operator]:
    """Two products with scores in 16 bits between them; their mask skips none.

    Softmax reads and writes scores, and keeps what it wrote; so does dropout, with a mask of a
    byte.  Not fused, softmax is in 32 bits, and scale, mask and both casts are kernels of their own
    (20 bytes a score forward, 14 backward).
    """
    q, k, v = inputs
    kernels, operators = setting.kernels, []
    if setting.divides_sequence:  # whatever brings them, keys and values come from all ranks
        operators.append(_ring(setting, (k, v), key + value))
    count = setting.tokens * setting.seq_len * a.heads / setting.tensor
    flops = 2 * count * width / (a.heads / setting.tensor)
    size = WRITTEN_SCORE * count
    chances = {"chances": size}
    moved, back, parts = 4 * count, 6 * count, 1
    if not kernels.fused_softmax:
        chances["chances_fp32"] = FP32 * count
        moved, back, parts = moved + 20 * count, back + 14 * count, 5
    operators += [
        _core_product("scores", (q, k), {"scores": size}, flops=flops, moved=query + out + size),
        Operator(
            name="softmax",
            kind="memory",
            inputs=("scores",),
            outputs=chances,
            saved=tuple(chances),
            fp32=tuple(chances)[1:],
            moved_bytes=moved,
            backward_moved_bytes=back,
            kernels=parts,
            in_core=True,
        ),
    ]
    drawn = "chances"
    if kernels.dropout and not a.gated_mlp:
        drawn = "drawn"
        operators.append(
            Operator(
                name="drawn",
                kind="memory",
                inputs=("chances",),
                outputs={"drawn": size, "drawn_mask": count},
                saved=("drawn_mask",),
                moved_bytes=5 * count,
                backward_moved_bytes=5 * count,
                in_core=True,
            )
        )
    moved = query + out + size
    return [*operators, _core_product("core", (drawn, v), {"core": out}, flops=flops, moved=moved)]


def _ring(setting: Setting, inputs: tuple[str, str], local_bytes: float) -> Operator:
    """Keys and values of all context-parallel ranks, which pass by block by block."""
    return Operator(
        name="kv_ring",
        kind="all_gather",
        inputs=tuple(dict.fromkeys(inputs)),
        outputs={},
        moved_bytes=local_bytes * setting.context,
        axis="context",
        ring=True,
    )


def _all_keys(setting: Setting, inputs: tuple[str, str], key: float, value: float) -> Operator:
    """Keys and values of all context-parallel ranks, of these sizes, brought to each of them."""
    local = (key + value) / setting.context
    return Operator(
        name="kv_gather",
        kind="all_gather",
        inputs=inputs,
        outputs={"k_all": key, "v_all": value},
        moved_bytes=key + value,
        # They travel in one buffer, and rank by rank.
        copied_bytes=2 * (local + key + value),
        workspace_bytes=local + key + value,
        axis="context",
    )


def _skipping(a: Architecture, kind: str, setting: Setting) -> float:
    """Keys that a query of the busiest rank attends to, by a kernel that skips all others.

    With a window the first queries have fewer; where a divided sequence is not balanced, its last
    rank attends to almost all of what comes before.
    """
    span = window(a, kind, setting.attended_len)
    attended = span - span**2 / (2.0 * setting.attended_len) if a.causal else float(span)
    if a.causal and setting.divides_sequence and not setting.kernels.balanced:
        attended = attended * (2 - 1 / setting.context)
    return attended


def _passes(a: Architecture, setting: Setting) -> tuple[float, float]:
    """Bytes of each score of attention in blocks that move, forward and backward."""
    there, back = CAPPED_PASSES_FP32 if setting.element_bytes == FP32 else CAPPED_PASSES
    capped = a.family == "gemma2"
    return (there, back) if capped else (there - CAP_PASSES[0], back - CAP_PASSES[1])


def _all_to_all(
    name: str, inputs: tuple[str, ...], outputs: dict[str, float], size: float
) -> Operator:
    """All-to-all among context-parallel ranks: parts of the sequence for heads, or back.

    Source: Jacobs et al., 2023 (DeepSpeed-Ulysses, arXiv:2309.14509), section 3.2.
    """
    return Operator(
        name=name,
        kind="all_to_all",
        inputs=tuple(dict.fromkeys(inputs)),
        outputs=outputs,
        moved_bytes=size,
        backward_moved_bytes=size,
        # Both sides are brought into the order of heads, or of positions.
        copied_bytes=4 * size,
        axis="context",
    )


def _core_product(
    name: str, inputs: tuple[str, str], outputs: dict[str, float], *, flops: float, moved: float
) -> Operator:
    """A product of two activations, in 16 bits whatever the precision."""
    return replace(matmul(name, inputs, outputs, flops=flops, moved_bytes=moved), in_core=True)


def _softcap_costs(a: Architecture, setting: Setting, span: int) -> tuple[int, float]:
    """Return kernels and working memory of attention that writes a block's scores.

    Scores exist twice in fp32, and half as much in 16 bits; beside them the products that are added
    to the gradients of keys or values, and in 16 bits those gradients in fp32.
    """
    e, heads, rows = setting.element_bytes, a.heads / setting.tensor, _rows(setting)
    keys = smaller(setting.seq_len, span + rows)
    scores = setting.micro_batch * heads * rows * keys * FP32
    product = setting.micro_batch * keys * heads * a.head_dim
    gradients = 2 * setting.micro_batch * setting.seq_len * a.kv_heads / setting.tensor
    narrow = e != FP32
    workspace = (2.5 if narrow else 2.0) * scores + product * (e + FP32 * narrow)
    workspace += gradients * a.head_dim * FP32 * narrow
    blocks = -(-setting.seq_len // setting.context // rows)
    return cast(int, CAPPED_KERNELS * blocks), workspace


def _rows(setting: Setting) -> float:
    """Queries of a block of capped attention."""
    chunks = 2 * setting.context if setting.divides_sequence else 1
    return smaller(CAPPED_BLOCK, setting.seq_len // chunks)


def window(a: Architecture, kind: str, seq_len: int) -> int:
    """Tokens that a query may attend to."""
    return min(seq_len, a.sliding_window) if slides(kind) else seq_len


def _fuses_sinks(a: Architecture, setting: Setting) -> bool:
    """Return True if a fused kernel computes attention with sinks
    (runtime/parallel/sink_attention.py), which has none in 32 bits, nor of divided sequences or of
    several documents."""
    return (
        a.family in SINKS
        and setting.element_bytes != FP32
        and not setting.divides_sequence
        and setting.document_len is None
    )


def _is_masked(a: Architecture, kind: str, setting: Setting) -> bool:
    """Return True if a mask hides keys: those outside of a window, or of other documents.

    Documents need a mask where no kernel knows where they end
    (runtime/parallel/document_attention.py).
    """
    if window(a, kind, setting.seq_len) < setting.seq_len:
        return True
    apart = setting.divides_sequence or a.latent is not None
    return setting.document_len is not None and apart


def _keys_per_query(a: Architecture, seq_len: int) -> float:
    """Mean number of keys per query: half the sequence under a causal mask."""
    return seq_len / 2.0 if a.causal else float(seq_len)


def attention_width(a: Architecture) -> float:
    """Mean of the query-key width and the value width over all heads: a d without latents."""
    if a.latent is None:
        return float(a.heads * a.head_dim)
    return a.heads * (_query_dim(a.latent) + a.latent.value_head_dim) / 2.0


def _query_dim(latent: LatentAttention) -> int:
    return latent.nope_head_dim + latent.rope_head_dim


FAMILIES = ("bloom", "gptj", "mpt")


def writes_scores(a: Architecture) -> bool:
    """Return True if a family's attention has no fused kernel.

    torch's fused kernels need as many heads of keys as of queries, or the information that heads
    are shared.  Falcon's single head has neither, and its replacement works in fp32.
    """
    return a.family in FAMILIES or (a.family == "falcon" and a.kv_heads == 1 < a.heads)


def eager_attention(a: Architecture, setting: Setting, source: str) -> list[Operator]:
    """Projections, copies by head, scores, bias and mask, softmax, values, output projection."""
    e, t, tokens = setting.element_bytes, setting.tensor, setting.tokens
    full = tokens * a.hidden_size * e
    width, key_width = a.heads * a.head_dim / t, a.kv_heads * a.head_dim / t
    query, key = tokens * width * e, tokens * key_width * e
    apart = a.family == "gptj"
    columns = width + 2 * key_width
    operators, whole = gather_sequence(setting, source, "attention_gather", full)
    projected = {"q_linear": query, "k_linear": key, "v_linear": key}
    outputs = projected if apart else {"qkv": query + 2 * key}
    operators += projections(a, setting, source, whole, outputs, width=columns)
    by_head = _by_head(a, query / e, e, tuple(projected) if apart else ("qkv",))
    operators.append(by_head)
    names, sizes = ("q", "k", "v"), by_head.outputs
    if setting.divides_sequence:
        names = ("q", "k_all", "v_all")
        sizes = {"q": sizes["q"]} | {
            f"{name}_all": sizes[name] * setting.context for name in ("k", "v")
        }
        operators.append(
            Operator(
                name="kv_gather",
                kind="all_gather",
                inputs=("k", "v"),
                outputs={name: sizes[name] for name in names[1:]},
                moved_bytes=sizes["k_all"] + sizes["v_all"],
                axis="context",
            )
        )
    operators += _scores(a, setting, names, sizes)
    return [*operators, *row_wise(a, setting, "core", "attention_out", width=width)]


def _scores(
    a: Architecture, setting: Setting, names: tuple[str, str, str], sizes: Mapping[str, float]
) -> list[Operator]:
    """Two products with the softmax between them."""
    q, k, v = names
    e, keys = setting.element_bytes, setting.seq_len
    scores = setting.tokens * keys * a.heads / setting.tensor
    wide = e if a.family in ("bloom", "mpt") else FP32
    flops = 2 * scores * a.head_dim
    # MPT keeps the mask of a sequence, a byte for each pair.
    mask = {"mask": 1.0 * keys * keys} if a.family == "mpt" else {}
    operators = [
        matmul(
            "scores",
            (q, k),
            {"scores": scores * wide},
            flops=flops,
            moved_bytes=sizes[q] + sizes[k] + scores * wide,
        ),
        Operator(
            name="biased",
            kind="memory",
            inputs=("scores",),
            outputs={"biased": scores * wide} | mask,
            saved=tuple(mask),
            moved_bytes=4 * scores * wide,
            backward_moved_bytes=2 * scores * wide,
            kernels=2,
        ),
        Operator(
            name="softmax",
            kind="memory",
            inputs=("biased",),
            outputs={"chances": scores * FP32},
            saved=("chances",),
            fp32=("chances",),
            moved_bytes=scores * (wide + FP32),
            backward_moved_bytes=scores * (2 * FP32 + wide),
        ),
    ]
    chances, held = "chances", FP32
    if e != FP32 and a.family != "falcon":
        chances, held = "narrow_chances", e
        operators.append(
            Operator(
                name=chances,
                kind="memory",
                inputs=("chances",),
                outputs={chances: scores * e},
                moved_bytes=scores * (FP32 + e),
                backward_moved_bytes=scores * (FP32 + e),
            )
        )
    out = sizes["q"] / wide * e
    values = out / e * held
    return [
        *operators,
        matmul(
            "values",
            (chances, v),
            {"values": values},
            flops=flops,
            moved_bytes=scores * held + sizes[v] + values,
        ),
        Operator(
            name="core",
            kind="memory",
            inputs=("values",),
            outputs={"core": out},
            moved_bytes=values + out,
            backward_moved_bytes=values + out,
        ),
    ]


def _by_head(a: Architecture, elements: float, e: int, inputs: tuple[str, ...]) -> Operator:
    """Copies of queries, keys and values stored head by head, of equally many heads.

    GPT-J's queries and keys are turned, and in fp32; Falcon's are all so.
    """
    wide = FP32 if a.family in ("gptj", "falcon") else e
    values = FP32 if a.family == "falcon" else e
    outputs = {"q": elements * wide, "k": elements * wide, "v": elements * values}
    turned = 20 * elements * e if a.positions == "rotary" else 0.0
    return Operator(
        name="by_head",
        kind="memory",
        inputs=inputs,
        outputs=outputs,
        fp32=("q", "k", "v")[: 3 if a.family == "falcon" else 2] if wide != e else (),
        moved_bytes=2 * sum(outputs.values()) + turned,
        backward_moved_bytes=2 * sum(outputs.values()) + turned,
        kernels=15 if a.positions == "rotary" else 3,
    )
