"""Layers of a model as tables of operators, with counts of parameters and FLOPs.

Symbols: b micro-batch, s sequence, h hidden, a heads, k key-value heads, d head dim, f FFN,
V vocabulary, E experts, t tensor degree, c context degree, e bytes per element.

A framework determines the kernels and the tensors that they keep (`planner.operators.kernels`).
Its defaults are eager PyTorch modules as `transformers` writes them, with tensor and sequence
parallelism as in `runtime.parallel.tensor_parallel`: a linear layer keeps its gathered input, an
RMS norm works in fp32 out of separate kernels, softmax and loss are in fp32.  With them, a GPT
block (LayerNorm, GELU, f = 4h, t = 1, bf16) keeps the 34 s b h bytes of Korthikanti et al., 2022,
https://arxiv.org/abs/2205.05198, less the two dropout masks that training without dropout lacks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.planner.architectures.parameters import (
    OPT_POSITION_OFFSET,
    norm_parameters,
    norms_of_block,
    routes,
)
from meshwright.planner.documents.cluster import EIGHT_BITS
from meshwright.planner.operators.attention import attention, attention_width, window
from meshwright.planner.operators.embedding_and_head import (
    chunked_loss,
    chunked_product,
    embedding,
    embedding_width,
    head,
)
from meshwright.planner.operators.expert_routing import Routing
from meshwright.planner.operators.feed_forward import experts, mlp
from meshwright.planner.operators.kernels import MODULES, compiled_kernels
from meshwright.planner.operators.operator_table import (
    FP32,
    GroupAxis,
    Operator,
    OperatorKind,
    OperatorTable,
    Setting,
    either,
    larger,
    smaller,
)
from meshwright.planner.operators.operators import matmul, norm

if TYPE_CHECKING:
    from meshwright.planner.documents.model import (
        Architecture,
        DividedLayer,
        Layer,
        LayerTrace,
        ModelGraph,
        TracedExperts,
        TracedLogits,
    )
    from meshwright.planner.documents.profile import ChunkedLoss


def table(model: ModelGraph, layer: Layer, setting: Setting) -> OperatorTable:
    """Return the operators of a layer; a traced layer becomes one operator."""
    architecture = model.architecture
    if architecture is None or layer.trace is not None:
        return traced_layer(layer, setting)
    if layer.kind == "embedding":
        return embedding(architecture, setting)
    if layer.kind == "head":
        return head(architecture, setting)
    if setting.compiled:
        setting = replace(setting, kernels=compiled_kernels(setting.kernels))
    kernels = setting.kernels
    block = _block(architecture, layer.kind, setting)
    if kernels is MODULES:
        return block
    if kernels.compiled and setting.precision in EIGHT_BITS and not kernels.narrow:
        block = replace(block, operators=_kept_narrow(block, setting.element_bytes))
    return replace(
        block,
        selective=kernels.selective,
        modules=kernels.modules,
        early_stop=kernels.early_stop,
        keeps_needed=kernels.compiled and architecture.family not in NORMS_BEHIND,
    )


def step_flops(
    model: ModelGraph,
    *,
    seq_len: int,
    global_batch: int,
    document_len: int | None = None,
    frozen: bool = False,
) -> float:
    """FLOPs of one step that model FLOPs utilisation counts.

        6 N + 12 L a d k      per token

    N are the parameters that multiply a token (all but the input embedding and the experts that it
    is not sent to), k the keys that a query attends to, on average: half of the sequence, or of the
    token's document, under a causal mask.  Pairs that a mask leaves out do not count, nor does
    recomputation.  Traced layers count three times their forward FLOPs.  Under adapters, `frozen`
    weights have no gradient: 4 N, twice the forward FLOPs of traced ones.
    """
    attended_len = seq_len if document_len is None else min(document_len, seq_len)

    def keys(a: Architecture, kind: str) -> float:
        span = window(a, kind, attended_len)
        return span - span**2 / (2.0 * attended_len) if a.causal else float(span)

    return _flops(model, float(seq_len * global_batch), keys, samples=global_batch, frozen=frozen)


def unmasked_step_flops(
    model: ModelGraph, *, seq_len: int, global_batch: int, frozen: bool = False
) -> float:
    """FLOPs of one step by the convention of published utilisations: 6 N + 12 L a d s per token.

    Attention counts without discount for the causal mask or for documents; a sliding window
    replaces s.  Source: Chowdhery et al., 2022 (PaLM), appendix B; torchtitan's logs do the same.
    """

    def keys(a: Architecture, kind: str) -> float:
        return float(window(a, kind, seq_len))

    return _flops(model, float(seq_len * global_batch), keys, samples=global_batch, frozen=frozen)


def _flops(
    model: ModelGraph,
    tokens: float,
    keys: Callable[[Architecture, str], float],
    *,
    samples: int,
    frozen: bool,
) -> float:
    """FLOPs of a step whose queries attend to so many keys, by layer kind."""
    architecture = model.architecture
    each = 4.0 if frozen else 6.0
    if architecture is None:
        forward = sum(
            layer.repeat * (layer.trace.forward_flops if layer.trace else 0.0)
            for layer in model.layers
        )
        return each / 2.0 * forward * samples
    flops = 0.0
    for layer in model.layers:
        if layer.kind == "embedding":
            continue
        flops += layer.repeat * each * _active_parameters(architecture, layer) * tokens
        if layer.kind == "head":
            if architecture.tied_embeddings and architecture.vocab_size:
                flops += each * architecture.vocab_size * embedding_width(architecture) * tokens
            continue
        attended = keys(architecture, layer.kind)
        flops += layer.repeat * 12.0 * attention_width(architecture) * attended * tokens
    return flops


def local_parameters(
    model: ModelGraph,
    layer: Layer,
    *,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
    shared_whole: bool = True,
) -> tuple[float, float]:
    """Return a layer's parameters on a rank: those of every rank's kind, and routed experts'.

    Matrices divide by the tensor degree; norms, routers and biases of row-wise matrices stay whole.
    Routed experts divide by the expert degree, and each by a tensor degree of its own, or by that
    of the others where the expert degree is 1.  Beside experts that are on ranks of their own,
    those that all tokens share are whole on every rank, if `shared_whole`.
    """
    architecture = model.architecture
    if architecture is None or layer.trace is not None:
        routed = layer.experts.parameters if layer.experts is not None and expert > 1 else 0
        return _traced_parameters(layer, tensor) - routed, routed / expert
    routed = _routed_parameters(architecture) if routes(layer.kind) else 0
    whole = _undivided_parameters(architecture, layer.kind)
    if shared_whole and expert > 1 and routes(layer.kind):
        whole += _shared_parameters(architecture)
    dense = (layer.parameters - routed - whole) / tensor + whole
    return dense, routed / (expert * expert_tensor if expert > 1 else tensor)


def largest_matrix(model: ModelGraph, layer: Layer, *, tensor: int = 1) -> float:
    """Return the parameters of a layer's largest matrix on a rank."""
    a = model.architecture
    if a is None or layer.trace is not None:
        divided = layer.divided_among(tensor)
        largest = divided.largest if divided else layer.largest
        return _traced_parameters(layer, tensor) if largest is None else float(largest)
    if layer.kind in ("embedding", "head"):
        return a.vocab_size * embedding_width(a) / tensor
    widest = max(a.ffn_size, a.heads * a.head_dim)
    if routes(layer.kind) and a.experts is not None:
        # The matrices of all experts are one parameter.
        widest = max(a.heads * a.head_dim, a.experts.count * a.experts.ffn_size)
    return float(a.hidden_size * widest) / tensor


def matrix_sides(model: ModelGraph, layer: Layer, *, tensor: int = 1) -> float:
    """Return rows plus columns of all matrices of a layer on a rank, added up.

    Matrices are as `transformers` has them; of a layer that was traced one square is assumed, and
    of experts each has its own.  One side of each is divided by the tensor degree.
    """
    a = model.architecture
    if a is None or layer.trace is not None:
        return 2.0 * math.sqrt(_traced_parameters(layer, tensor))
    if layer.kind in ("embedding", "head"):
        return a.vocab_size / tensor + embedding_width(a)
    matrices = [*_attention_matrices(a)]
    widths = [a.ffn_size]
    if routes(layer.kind) and a.experts is not None:
        shared = a.experts.shared_ffn_size or a.experts.shared * a.experts.ffn_size
        widths = [a.experts.ffn_size] * a.experts.count + [shared] * (shared > 0)
        matrices.append((a.hidden_size, a.experts.count))
    matrices += [(a.hidden_size, width) for width in widths for _ in range(3 if a.gated_mlp else 2)]
    return float(sum(whole + divided / tensor for whole, divided in matrices))


def _attention_matrices(a: Architecture) -> Iterator[tuple[int, int]]:
    """Yield both sides of each projection, the one that tensor parallelism divides last."""
    latent = a.latent
    if latent is None:
        for heads in (a.heads, a.kv_heads, a.kv_heads, a.heads):
            yield a.hidden_size, heads * a.head_dim
        return
    query = a.heads * (latent.nope_head_dim + latent.rope_head_dim)
    if latent.q_rank:
        yield a.hidden_size, latent.q_rank
    yield latent.q_rank or a.hidden_size, query
    yield a.hidden_size, latent.kv_rank + latent.rope_head_dim
    yield latent.kv_rank, a.heads * (latent.nope_head_dim + latent.value_head_dim)
    yield a.hidden_size, a.heads * latent.value_head_dim


def _kept_narrow(block: OperatorTable, element_bytes: int) -> tuple[Operator, ...]:
    """Return a compiled block's operators where its Linears multiply 8-bit copies of their inputs.

    A weight's gradient reads such a copy alone.  What a norm or an activation made is made again
    with its copy, of what they keep; of what attention, a product or a collective gave, the copy is
    kept.  Products whose sides no 8-bit kernel takes keep their input as it is.
    """
    made_by = {name: op for op in block.operators for name in op.outputs}
    others = {n for op in block.operators if not _is_linear(op) for n in op.saved}
    operators: list[Operator] = []
    for op in block.operators:
        copies: dict[str, float] = {}
        saved = []
        for name in op.saved:
            if not _is_linear(op) or name not in made_by:
                saved.append(name)
                continue
            size = block.sizes[name]
            copy = 0.0 if made_by[name].kind == "memory" else size / element_bytes
            copies[f"{name}_copy"] = either(op.aligned, copy, 0.0 if name in others else size)
        operators.append(replace(op, saved=(*saved, *copies)))
        if copies:
            copy_operator = Operator(
                name=f"{op.name}_copy", kind="memory", inputs=(), outputs=copies
            )
            operators.insert(-1, replace(copy_operator, kernels=0))
    return tuple(operators)


def _is_linear(operator: Operator) -> bool:
    """Return True if a product may be in 8 bits."""
    kind, name = operator.kind, operator.name
    return kind == "matmul" and not operator.in_core and not name.startswith(("expert", "router"))


NORMS_BEHIND = ("olmo2", "olmo3")
"""Families whose blocks norm the outputs of attention and MLP, and not their inputs."""


def _block(a: Architecture, kind: str, setting: Setting) -> OperatorTable:
    """Attention, then MLP or experts, each beside the residual stream."""
    stream = setting.stream_tokens * a.hidden_size * setting.element_bytes
    operators: list[Operator] = []
    if a.parallel:
        return _side_by_side(a, kind, setting, stream)
    residual = "x"
    for part in ("attention", "mlp"):
        tensor = residual
        if a.pre_norm and a.family not in NORMS_BEHIND:
            first = norm(a, setting, tensor, f"{part}_norm", width=a.hidden_size)
            if setting.kernels.compiled and a.post_norms and tensor != "x":
                # Both of the sum's parts are there: it is added up again.
                first = replace(first, saved=tuple(n for n in first.saved if n != tensor))
            operators.append(first)
            tensor = f"{part}_norm"
        if part == "attention":
            operators += attention(a, kind, setting, tensor)
        elif routes(kind) and a.experts is not None:
            operators += experts(a, setting, tensor)
        else:
            operators += mlp(a, setting, tensor, f"{part}", ffn_size=a.ffn_size)
        tensor = f"{part}_out"
        if a.post_norms or a.family in NORMS_BEHIND:
            operators.append(norm(a, setting, tensor, f"{part}_post_norm", width=a.hidden_size))
            tensor = f"{part}_post_norm"
        # Dropout is part of the sum's kernel, and keeps a byte for each element.
        mask = {}
        if setting.kernels.dropout and not a.gated_mlp:
            mask = {f"{part}_mask": setting.stream_tokens * a.hidden_size}
        moved = 3 * stream + sum(mask.values())
        operators.append(
            Operator(
                name=f"{part}_residual",
                kind="memory",
                inputs=(residual, tensor),
                outputs={f"{part}_sum": stream, **mask},
                saved=tuple(mask),
                moved_bytes=moved,
                backward_moved_bytes=setting.kernels.back(moved, moved),
                # GPT-2's block in `transformers` has a variable of its own for it.
                holds=("attention_out",) if a.family == "gpt2" else (),
            )
        )
        residual = f"{part}_sum"
        if not a.pre_norm:
            operators.append(norm(a, setting, residual, f"{part}_norm", width=a.hidden_size))
            residual = f"{part}_norm"
    return OperatorTable(kind=kind, operators=tuple(operators), input_bytes=stream, output=residual)


def _side_by_side(a: Architecture, kind: str, setting: Setting, stream: float) -> OperatorTable:
    """Attention and MLP of one residual, both added to it at the end."""
    operators = [norm(a, setting, "x", "attention_norm", width=a.hidden_size)]
    operators += attention(a, kind, setting, "attention_norm")
    source = "attention_norm"
    if not a.shared_norm:
        operators.append(norm(a, setting, "x", "mlp_norm", width=a.hidden_size))
        source = "mlp_norm"
    operators += mlp(a, setting, source, "mlp", ffn_size=a.ffn_size)
    operators.append(
        Operator(
            name="residual",
            kind="memory",
            inputs=("x", "attention_out", "mlp_out"),
            outputs={"sum": stream},
            moved_bytes=6 * stream,
            backward_moved_bytes=setting.kernels.back(6 * stream, 6 * stream),
            kernels=2,
        )
    )
    return OperatorTable(kind=kind, operators=tuple(operators), input_bytes=stream, output="sum")


def _traced_parameters(layer: Layer, tensor: int) -> float:
    divided = layer.divided_among(tensor)
    return float(divided.parameters if divided else layer.parameters)


def traced_layer(layer: Layer, setting: Setting) -> OperatorTable:
    """One operator of a layer that was traced in fp32; times its samples, in the job's type.

    A tensor axis that divides the layer adds its sums: of activations in forward, of gradients in
    backward.  They are summed in place, one by one.  A context axis divides all but keys and
    values, which it gathers; experts on ranks of their own are sent tokens, and send them back.
    """
    if setting.loss is not None and layer.logits is not None:
        return _logits_in_chunks(layer, layer.logits, setting, setting.loss)
    trace = layer.trace
    samples = setting.micro_batch / setting.context
    scale = samples * setting.element_bytes / FP32
    figure = functools.partial(_figure, layer, setting)
    stored = figure(lambda of: of.stored_bytes) * scale
    output = trace.output_bytes * scale if trace else 0.0
    operator = Operator(
        name=layer.name,
        kind="matmul",
        inputs=("x",),
        outputs={"kept": stored, "out": output},
        saved=("kept",),
        flops=figure(lambda of: of.forward_flops) * samples,
        moved_bytes=2 * (stored + output),
        backward_moved_bytes=4 * (stored + output),
        workspace_bytes=figure(lambda of: of.transient_bytes) * scale,
    )
    operators: tuple[Operator, ...] = (operator,)
    outside = 0
    if layer.divided and setting.divides_tensors:
        sums = [
            _sum_over_ranks(layer, setting, name, size * scale)
            for name, size in _sums(layer, setting)
        ]
        operators, outside = (*sums[:-1], operator, sums[-1]), 1
    before, behind = _crossing_ranks(layer, setting, scale)
    operators = (*before, *operators, *behind)
    return OperatorTable(
        kind=layer.kind,
        operators=operators,
        input_bytes=output,
        output="out",
        outside=outside,
        backward_peak=operator.workspace_bytes,
    )


def _crossing_ranks(
    layer: Layer, setting: Setting, scale: float
) -> tuple[list[Operator], list[Operator]]:
    """Return the exchanges of a traced layer with ranks that have other positions or experts.

    `scale` makes bytes of a micro-batch of those of one sample in fp32.
    """
    before: list[Operator] = []
    behind: list[Operator] = []
    if setting.divides_sequence and layer.keys_bytes:
        local = layer.keys_bytes * scale
        whole = local * setting.context
        gathered = Operator(
            name=f"{layer.name}_keys",
            kind="all_gather",
            inputs=(),
            outputs={"keys": whole},
            saved=("keys",),
            moved_bytes=whole,
            copied_bytes=2 * (local + whole),
            workspace_bytes=local + whole,
            axis="context",
        )
        before.append(gathered)
    if setting.spreads_experts and layer.experts is not None:
        there, back = _to_experts(layer.name, layer.experts, setting, scale)
        before += there
        behind += back
    return before, behind


def _to_experts(
    name: str, experts: TracedExperts, setting: Setting, scale: float
) -> tuple[list[Operator], list[Operator]]:
    """Return the exchanges of a traced layer's tokens with experts of other ranks.

    Sent to each of their experts they take c b bytes, b those of a rank's tokens and c the choices
    of each; those that arrive are what experts read, and those that return what weights multiply,
    both of which the trace has stored.  Relayed, a copy goes to every node and from there to every
    rank that has some of them.  Gathered, all ranks' tokens come to each, whose buffers have rows
    for min(c, own experts) of each token: what of those is not filled is held beside the trace.
    """
    sent = experts.exchanged_bytes * scale
    tokens = sent / experts.per_token

    def collective(
        source: str,
        size: float,
        axis: GroupAxis,
        kind: OperatorKind = "all_to_all",
        *,
        stores: bool = True,
    ) -> Operator:
        return Operator(
            name=f"{name}_{source}",
            kind=kind,
            inputs=(),
            outputs={source: size},
            saved=(source,) if stores else (),
            moved_bytes=size,
            backward_moved_bytes=size,
            axis=axis,
        )

    if setting.dispatch == "allgather":
        every = setting.expert * tokens
        rows = every * smaller(float(experts.per_token), experts.count / setting.expert)
        inner = experts.parameters / (3 * experts.count * experts.hidden)
        empty = larger(0.0, rows - sent) * (2 + 3 * inner / experts.hidden)
        held = Operator(
            name=f"{name}_rows",
            kind="memory",
            inputs=(),
            outputs={"rows": empty},
            saved=("rows",),
            moved_bytes=6 * rows + every,
            backward_moved_bytes=6 * rows + every,
        )
        gathered = collective("gathered", every, "expert", "all_gather")
        scattered = replace(
            collective("scattered", every, "expert", "reduce_scatter", stores=False),
            outputs={"scattered": tokens},
        )
        return [gathered, held], [scattered]
    if not setting.relays:
        out, home = (collective(way, sent, "expert", stores=False) for way in ("sent", "returned"))
        return [out], [home]
    routing = Routing(experts.count, experts.per_token)
    nodes, ranks = (
        copies * tokens for copies in routing.hops(setting.expert, setting.hierarchical_all_to_all)
    )
    there = (
        collective("at_nodes", nodes, "experts_across"),
        collective("at_ranks", ranks, "experts_inside"),
    )
    back = (
        collective("of_ranks", ranks, "experts_inside"),
        collective("of_nodes", nodes, "experts_across"),
    )
    return [*there], [*back]


def _logits_in_chunks(
    layer: Layer, logits: TracedLogits, setting: Setting, loss: ChunkedLoss
) -> OperatorTable:
    """Return a traced layer that makes its logits and their loss a few rows at a time."""
    e = setting.element_bytes
    samples = setting.micro_batch / setting.context
    scale = samples * e / FP32
    rows = samples * logits.rows
    hidden, weights = rows * logits.width * e, logits.width * logits.outputs
    whole = rows * logits.outputs
    kept = larger(0.0, logits.trace.stored_bytes * scale - hidden)
    before = Operator(
        name=layer.name,
        kind="matmul",
        inputs=("x",),
        outputs={"kept": kept, "hidden": hidden},
        saved=("kept",),
        flops=larger(0.0, (logits.trace.forward_flops - logits.flops) * samples),
        moved_bytes=2 * (kept + hidden),
        backward_moved_bytes=4 * (kept + hidden),
    )
    product = matmul(
        "logits",
        ("hidden",),
        {"logits": whole * e},
        flops=logits.flops * samples,
        moved_bytes=hidden + (weights + whole) * e,
        weights=weights,
    )
    each = FP32 + (e if e != FP32 else 0)
    at_once = smaller(float(loss.rows), rows)
    product = chunked_product(product, np.ceil(rows / at_once), weight_bytes=weights * e)
    working = each * at_once * logits.outputs
    chunks = chunked_loss(product, loss, whole, working, hidden + weights * e)
    return OperatorTable(
        kind=layer.kind, operators=(before, *chunks), input_bytes=hidden, output="loss"
    )


def _figure(layer: Layer, setting: Setting, of: Callable[[LayerTrace], float]) -> float:
    """Return a figure of a traced layer at the setting's tensor degree; arrays where many."""
    value = float(of(layer.trace)) if layer.trace else 0.0
    if setting.divides_tensors:
        for shard in layer.divided or ():
            value = either(setting.tensor == shard.tensor, float(of(shard.trace)), value)
    return value


def _sums(layer: Layer, setting: Setting) -> Iterator[tuple[str, float]]:
    """Yield name and bytes of each sum over the tensor axis, the last one of forward last.

    Where degrees differ in their sums, those that one has not are of 0 bytes and take no time.
    """

    def size(of: Callable[[DividedLayer], Sequence[int]], at: int) -> float:
        size = 0.0
        for shard in layer.divided or ():
            sizes = of(shard)
            shard_size = float(sizes[at]) if at < len(sizes) else 0.0
            size = either(setting.tensor == shard.tensor, shard_size, size)
        return size

    for at in range(max(len(shard.sums_bytes) for shard in layer.divided or ())):
        yield f"sum_{at}", size(lambda shard: shard.sums_bytes, at)
    for at in range(max(len(shard.copies_bytes) for shard in layer.divided or ())):
        yield f"gradient_{at}", size(lambda shard: shard.copies_bytes, at)
    yield "last_sum", size(lambda shard: (shard.last_sum_bytes,), 0)


def _sum_over_ranks(layer: Layer, setting: Setting, name: str, size: float) -> Operator:
    return Operator(
        name=f"{layer.name}_{name}",
        kind="all_reduce",
        inputs=(),
        outputs={},
        moved_bytes=size,
        only="backward" if name.startswith("gradient") else "forward",
    )


def _active_parameters(a: Architecture, layer: Layer) -> float:
    """Parameters of a layer that one token is multiplied with."""
    if not routes(layer.kind) or a.experts is None:
        return float(layer.parameters)
    routed = _routed_parameters(a)
    return layer.parameters - routed * (1.0 - a.experts.per_token / a.experts.count)


def _routed_parameters(a: Architecture) -> int:
    if a.experts is None:
        return 0
    return a.experts.count * (3 if a.gated_mlp else 2) * a.hidden_size * a.experts.ffn_size


def _shared_parameters(a: Architecture) -> int:
    if a.experts is None:
        return 0
    width = a.experts.shared_ffn_size or a.experts.shared * a.experts.ffn_size
    return (3 if a.gated_mlp else 2) * a.hidden_size * width


def _undivided_parameters(a: Architecture, kind: str) -> int:
    """Parameters that every tensor-parallel rank has whole."""
    norm = norm_parameters(a)
    if kind == "embedding":
        offset = OPT_POSITION_OFFSET if a.family == "opt" else 0
        learned = (a.max_positions + offset) * a.hidden_size if a.positions == "learned" else 0
        learned += a.embedding_size * a.hidden_size
        return learned + (
            a.token_types * a.hidden_size + norm if a.token_types or a.embedding_norm else 0
        )
    if kind == "head":
        whole = norm if a.pre_norm else 0
        if a.classes:
            return whole + (a.hidden_size + 1) * a.classes
        whole += a.embedding_size * a.hidden_size
        return whole + (a.hidden_size**2 + a.hidden_size + norm if a.head_transform else 0)
    count = norms_of_block(a) * norm
    count += a.hidden_size * (a.output_bias + a.mlp_bias)
    count += 2 * a.head_dim if a.qk_norm else 0
    if a.latent is not None:
        count += a.latent.q_rank * (a.hidden_size + 1)
        count += (a.hidden_size + 1) * a.latent.kv_rank + a.hidden_size * a.latent.rope_head_dim
    if routes(kind) and a.experts is not None:
        count += a.hidden_size * (a.experts.count + a.experts.shared_gate)
    return count
