"""What one layer of a transformer takes on one rank: seconds by cause, bytes kept for backward.

Unlike `planner.layers.arithmetic`, whose operators are those of eager PyTorch modules, a layer
here is counted as large training frameworks run it: fused norms, activations and residuals,
attention fused or not, the sequence divided between blocks or not.

Symbols: n tokens of a micro-batch inside tensor-parallel regions, r tokens of the residual stream
on a rank, h hidden, q and k widths of queries and keys, f FFN, t tensor degree, e bytes.

    seconds of a product = launch + 2 n k m / (f_mat P) + e (n k + k m + n m) / (g W)

Sources: Korthikanti et al., 2022 (arXiv:2205.05198) for stored bytes; Dao, 2023
(arXiv:2307.08691) for attention's backward; the additive form is that of `planner.costs.compute`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.backends.runs import Run
from planner.cluster import EIGHT_BITS, Accelerator
from planner.costs.compute import peak_flops
from planner.model import Architecture, Experts
from planner.stack import Stack

LONG_SEQUENCE = 8192
"""Tokens at which the catalogue's attention fractions hold."""
SMALL_HEAD = 0.85
"""Rate of attention with heads of 64 over that with 128 (Dao, 2023, figures 4-6)."""
ATTENTION_BACKWARD = 2.5
"""Fused attention's backward: 5 products for 2 (Dao, 2022, appendix B)."""
GROUPED = 0.8
"""Rate of products of many experts together over one large product: their tokens are uneven, and
the fullest expert of a group ends last."""
SCORE_BYTES = 2
GATHERED_LOGIT_BYTES = 4
"""Per logit of bringing all shares together: the parts in 16 bits and their concatenation."""
EAGER_NORM_BYTES, EAGER_NORM_BACKWARD_BYTES = 38, 60
"""Traffic per element of an RMS norm written out in PyTorch, as in `planner.layers.operators`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches in one precision."""

    matmul_flops: float
    half_flops: float
    """Of products that stay in 16 bits: attention scores."""
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes_per_s: float
    launch_s: float


def rates(run: Run, stack: Stack) -> Rates:
    """Return what a run's accelerator reaches in its precision and with its attention kernels."""
    accelerator = run.cluster.groups[0].accelerator
    precision, curve, kernels = run.precision, accelerator.curve, accelerator.kernels
    base = peak_flops(accelerator, "bf16" if precision in EIGHT_BITS else precision)
    products = curve.matmul * base * kernels.sustained_tuned * stack.kernels.products
    products *= stack.kernels.architecture_products.get(accelerator.architecture or "", 1.0)
    half = kernels.attention_half_tokens
    length = (1 + half / LONG_SEQUENCE) * run.seq_len / (run.seq_len + half)
    older = kernels.attention[stack.kernels.attention]  # type: ignore[index]
    attention = base * length * older * (SMALL_HEAD if run.architecture.head_dim < 96 else 1.0)
    return Rates(
        matmul_flops=products * _gain(precision, accelerator, base),
        half_flops=products,
        attention_forward_flops=curve.attention_forward * attention,
        attention_backward_flops=curve.attention_backward * attention,
        memory_bytes_per_s=curve.memory * accelerator.memory_bytes_per_s,
        launch_s=curve.launch_s,
    )


def _gain(precision: str, accelerator: Accelerator, base: float) -> float:
    """Return the rate of products in a precision over that in 16 bits.

    Devices whose sheet has no rate in 8 bits multiply in 16, and those without 4 bits in 8.
    """
    narrow, kernels = accelerator.peak_flops.get("fp8"), accelerator.kernels
    if precision not in EIGHT_BITS or narrow is None:
        return 1.0
    in_four = precision == "nvfp4" and kernels.four_bit is not None
    share = kernels.four_bit if in_four and kernels.four_bit else kernels.eight_bit
    return share * narrow / base


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A micro-batch of a run on one rank."""

    run: Run
    stack: Stack
    rates: Rates
    micro_batch: float

    @property
    def element_bytes(self) -> int:
        """Of an activation."""
        return 4 if self.run.precision in ("fp32", "tf32") else 2

    @property
    def kept_bytes(self) -> int:
        """Of a product's input as kept for backward: what it was multiplied as."""
        narrow = self.run.precision in EIGHT_BITS and self.stack.eight_bit.narrow_states
        return 1 if narrow else self.element_bytes

    @cached_property
    def dropout(self) -> bool:
        """Whether activations are dropped at random, which keeps masks."""
        return self.stack.kernels.dropout and not self.run.architecture.gated_mlp and not self.flash

    @property
    def adapters_only(self) -> bool:
        """Whether the MLP's products are frozen without adapters, and keep no inputs."""
        return self.run.task in ("lora", "qlora") and self.stack.kernels.adapters == "attention"

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream is divided between tensor-parallel ranks."""
        own = self.run.sequence_parallel
        return self.run.tensor > 1 and (self.stack.tensor.sequence_parallel if own is None else own)

    @cached_property
    def flash(self) -> bool:
        """Whether scores never reach memory."""
        own = self.run.flash_attention
        return self.stack.kernels.flash_attention if own is None else own

    @cached_property
    def tokens(self) -> float:
        """Tokens inside tensor-parallel regions."""
        return self.micro_batch * self.run.seq_len / self.run.context

    @cached_property
    def stream(self) -> float:
        """Tokens of the residual stream on a rank."""
        return self.tokens / (self.run.tensor if self.sequence_parallel else 1)

    def product_s(self, rows: float, inner: float, columns: float, count: float = 1.0) -> float:
        """Seconds of `count` matrix products [rows, inner] x [inner, columns]."""
        e = self.element_bytes
        factors = rows * inner + inner * columns
        if self.run.precision in EIGHT_BITS:
            # The kernel before writes the input in 8 bits, as is and transposed, beside 16.
            size = factors + 2 * rows * inner + e * rows * columns
        else:
            size = e * (factors + rows * columns)
        return count * (
            self.rates.launch_s
            + 2 * rows * inner * columns / self.rates.matmul_flops
            + size / self.rates.memory_bytes_per_s
        )

    def moved_s(self, size_bytes: float) -> float:
        """Seconds of streaming bytes through memory."""
        return size_bytes / self.rates.memory_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One layer on one rank, one micro-batch, communication not counted."""

    products_s: float
    """Forward; the backward has two products for each where weights are trained."""
    attention_s: float
    attention_backward_s: float
    memory_s: float
    memory_backward_s: float
    stored_bytes: float
    """Kept for backward without recomputation."""
    attention_bytes: float
    """Part of it that recomputing the attention's core saves."""
    working_bytes: float
    """Largest temporary of forward or backward."""
    input_bytes: float
    operators_bytes: float = 0.0
    """Kept where all is recomputed but attention's output and every second product's."""


def block(shape: Shape, *, moe: bool) -> Work:  # noqa: PLR0915 - a list of what a block does
    """Return one transformer block."""
    run, a = shape.run, shape.run.architecture
    e, t, n, r, h = shape.element_bytes, run.tensor, shape.tokens, shape.stream, a.hidden_size
    q, k, qk_dim = _widths(a)
    products = shape.product_s(n, h, (q + 2 * k) / t) + shape.product_s(n, q / t, h)
    if a.latent is not None:
        products = _latent_products_s(shape)
    forward_s, backward_s, scores = _attention_s(shape, q / t, qk_dim)
    mlp_s, mlp_stored, mlp_moved, mlp_working = _feed_forward(shape, moe=moe)
    products += mlp_s
    stack = shape.stack
    dropout = shape.dropout
    mlp_width = n * a.ffn_size / t
    if moe and a.experts is not None:
        mlp_width = n / t * a.experts.per_token * a.experts.ffn_size
    # Norms, residual sums with dropout, rotary positions; in elements of e bytes.
    stream_moves = 2 * 2 + 2 * (3 + 0.5 * dropout)
    moved = e * (
        r * h * stream_moves
        + n * (q + k) / t * 2 * (1 if fused(shape, "rotary") or a.positions != "rotary" else 5)
    )
    moved += mlp_moved
    moved_back = 1.8 * moved
    if run.task in ("lora", "qlora"):
        added = _adapter_moved_bytes(shape, q + 2 * k)
        moved += added
        moved_back += 2 * added
    eager_norm = not fused(shape, "norm") and a.norm == "rms"
    if eager_norm:
        # Written out in fp32: upcast, square, mean, scale, downcast, weight.
        moved += 2 * (EAGER_NORM_BYTES - 2 * e) * r * h
        moved_back += 2 * (EAGER_NORM_BACKWARD_BYTES - 3.6 * e) * r * h
    kept = shape.kept_bytes
    stored = (
        2 * r * (e * h + (8 if a.norm == "layer" else 4))
    )  # inputs of both norms, and their figures
    inputs = n if stack.tensor.keeps_gathered else r
    stored += kept * inputs * h * (1 if shape.adapters_only else 2)  # outputs, the products' inputs
    if eager_norm:
        stored += 2 * 4 * r * h  # the fp32 copies
    qkv = e * n * (q + 2 * k) / t
    stored += qkv + e * n * q / t  # queries, keys, values; the attention's output
    if not fused(shape, "rotary"):
        stored += e * n * (q + k) / t
    if a.latent is not None:
        stored += (
            2 * e * r * (a.latent.q_rank + a.latent.kv_rank)
        )  # latents, before and behind norms
    stored += 2 * r * h * dropout + mlp_stored
    attention_bytes = 4 * n * a.heads / t
    if not shape.flash:
        # Softmax reads and writes 16 bits; dropout reads and writes them, and a mask of a byte.
        attention_bytes = scores * (5 if dropout else 2)
        moved_scores, moved_scores_back = (9, 11) if dropout else (4, 6)
        if stack.kernels.softmax != "fused":
            # Scale, mask, upcast, softmax in 32 bits, downcast: a kernel each.
            attention_bytes += 4 * scores
            moved_scores, moved_scores_back = moved_scores + 20, moved_scores_back + 14
        forward_s += shape.moved_s(moved_scores * scores)
        backward_s += shape.moved_s(moved_scores_back * scores)
    stored += attention_bytes
    working = max(mlp_working, 3 * qkv + (2 * SCORE_BYTES * scores if not shape.flash else 0.0))
    return Work(
        products_s=products,
        attention_s=forward_s,
        attention_backward_s=backward_s,
        memory_s=shape.moved_s(moved),
        memory_backward_s=shape.moved_s(moved_back),
        stored_bytes=stored,
        attention_bytes=0.0 if shape.flash else attention_bytes,
        working_bytes=working,
        input_bytes=e * r * h,
        # Of q, k, v, o, (gate,) up, down the first, third, ... are kept: q, v, gate or up, down.
        operators_bytes=e * (r * h + n * (2 * q + k) / t + mlp_width + r * h * a.gated_mlp),
    )


def head(shape: Shape) -> Work:
    """Return the final norm, the output projection and the loss."""
    run, a = shape.run, shape.run.architecture
    t, n, r = run.tensor, shape.tokens, shape.stream
    e, h, vocabulary = shape.element_bytes, a.hidden_size, float(a.vocab_size)
    logits = n * vocabulary / t
    held = logits
    if t > 1 and not shape.stack.loss.divided:
        held = n * vocabulary * (1 + GATHERED_LOGIT_BYTES / shape.stack.loss.peak_bytes)
    size = 2 * (n * h + h * vocabulary / t + logits)
    products = 2 * n * h * vocabulary / t / shape.rates.half_flops + shape.moved_s(size)
    return Work(
        products_s=products + shape.rates.launch_s,
        attention_s=0.0,
        attention_backward_s=0.0,
        memory_s=shape.moved_s(logits * 16 + 4 * e * r * h),
        memory_backward_s=shape.moved_s(logits * 12 + 6 * e * r * h),
        stored_bytes=2 * e * r * h,
        attention_bytes=0.0,
        working_bytes=shape.stack.loss.peak_bytes * held + e * n * h,
        input_bytes=e * r * h,
    )


def embedding(shape: Shape) -> Work:
    """Return the look-up of tokens and positions."""
    run, a = shape.run, shape.run.architecture
    e, size = shape.element_bytes, shape.stream * a.hidden_size
    rows = float(a.vocab_size * a.hidden_size) / run.tensor
    return Work(
        products_s=0.0,
        attention_s=0.0,
        attention_backward_s=0.0,
        memory_s=shape.moved_s(4 * e * size),
        memory_backward_s=shape.moved_s(4 * e * size + 2 * 2 * rows),
        stored_bytes=size * shape.dropout + 8 * shape.tokens,
        attention_bytes=0.0,
        working_bytes=2 * e * size,
        input_bytes=0.0,
    )


def _widths(a: Architecture) -> tuple[float, float, float]:
    """Return widths of queries and of keys, and the mean dim of a head's two products."""
    if a.latent is not None:
        query = a.latent.nope_head_dim + a.latent.rope_head_dim
        return (
            float(a.heads * query),
            float(a.heads * (query + a.latent.value_head_dim) / 2),
            (query + a.latent.value_head_dim) / 2,
        )
    return float(a.heads * a.head_dim), float(a.kv_heads * a.head_dim), float(a.head_dim)


def _latent_products_s(shape: Shape) -> float:
    """Seconds of latent attention's projections down and up."""
    a, t, n = shape.run.architecture, shape.run.tensor, shape.tokens
    latent = a.latent
    assert latent is not None
    query = a.heads * (latent.nope_head_dim + latent.rope_head_dim) / t
    up = a.heads * (latent.nope_head_dim + latent.value_head_dim) / t
    seconds = shape.product_s(n, a.hidden_size, latent.kv_rank + latent.rope_head_dim)
    seconds += shape.product_s(n, latent.kv_rank, up)
    if latent.q_rank:
        seconds += shape.product_s(n, a.hidden_size, latent.q_rank)
        seconds += shape.product_s(n, latent.q_rank, query)
    else:
        seconds += shape.product_s(n, a.hidden_size, query)
    return seconds + shape.product_s(n, a.heads * latent.value_head_dim / t, a.hidden_size)


def _attention_s(shape: Shape, width: float, qk_dim: float) -> tuple[float, float, float]:
    """Return forward and backward seconds of the core, and its scores (elements)."""
    run = shape.run
    heads = run.architecture.heads / run.tensor
    scores = shape.tokens * run.seq_len * heads
    if shape.flash:
        flops = 4 * scores * qk_dim / 2
        rates = shape.rates
        return (
            flops / rates.attention_forward_flops + rates.launch_s,
            ATTENTION_BACKWARD * flops / rates.attention_backward_flops + rates.launch_s,
            scores,
        )
    size = shape.element_bytes * (2 * shape.tokens * width) + SCORE_BYTES * scores
    forward_s = 2 * (
        2 * scores * qk_dim / shape.rates.half_flops + shape.moved_s(size) + shape.rates.launch_s
    )
    return forward_s, 2 * forward_s, scores


def _feed_forward(shape: Shape, *, moe: bool) -> tuple[float, float, float, float]:
    """Return seconds of the products, stored bytes, moved bytes, largest temporary."""
    run, a = shape.run, shape.run.architecture
    if moe and a.experts is not None:
        return _experts(shape, a.experts)
    return _mlp(shape, shape.tokens, a.ffn_size / run.tensor)


def _mlp(shape: Shape, tokens: float, width: float) -> tuple[float, float, float, float]:
    a, e = shape.run.architecture, shape.element_bytes
    gates = 2 if a.gated_mlp else 1
    seconds = shape.product_s(tokens, a.hidden_size, gates * width)
    seconds += shape.product_s(tokens, width, a.hidden_size)
    stored = tokens * width * _mlp_kept_bytes(shape)
    moved = e * tokens * width * (gates + 1)
    if gates == 2 and not fused(shape, "gate"):
        moved += 2 * e * tokens * width  # the activation in a kernel of its own
    return seconds, stored, moved, e * tokens * width * (gates + 1)


def _adapter_moved_bytes(shape: Shape, qkv_width: float) -> float:
    """Return a forward's traffic of low-rank adapters: dropout of inputs, sums with outputs."""
    a, t = shape.run.architecture, shape.run.tensor
    widths = 2 * a.hidden_size + (qkv_width + a.heads * a.head_dim) / t
    if shape.stack.kernels.adapters == "all":
        widths += 2 * a.hidden_size + (3 if a.gated_mlp else 2) * a.ffn_size / t
    return 3 * shape.element_bytes * shape.tokens * widths


def _mlp_kept_bytes(shape: Shape) -> float:
    """Return bytes kept per token and unit of width: before the activation, and behind it.

    In 8 bits the activation keeps its input so too, where it is gated.
    """
    e = shape.element_bytes
    gated = shape.run.architecture.gated_mlp
    before = 2 * (shape.kept_bytes if gated else e) if gated else e
    behind = 0 if shape.adapters_only else shape.kept_bytes
    apart = e if gated and not fused(shape, "gate") else 0
    return before + behind + apart


def fused(shape: Shape, part: str) -> bool:
    """Whether a part of a block (norm, gate, rotary) is one kernel: by its author or a compiler."""
    return shape.run.compiled or getattr(shape.stack.kernels, part) == "fused"


def _experts(shape: Shape, experts: Experts) -> tuple[float, float, float, float]:
    """Router, permutation, grouped products of the routed experts, shared experts."""
    run, a = shape.run, shape.run.architecture
    e, h = shape.element_bytes, a.hidden_size
    divided = run.expert_tensor if run.expert > 1 or run.expert_tensor > 1 else run.tensor
    tokens = (shape.stream if shape.sequence_parallel else shape.tokens / run.tensor) * divided
    sent = tokens * experts.per_token
    local = max(1.0, experts.count / run.expert)
    width = experts.ffn_size / divided
    gates = 2 if a.gated_mlp else 1
    rows = sent / local
    seconds = shape.product_s(rows, h, gates * width, local)
    seconds += shape.product_s(rows, width, h, local)
    seconds /= GROUPED
    seconds += shape.product_s(shape.stream, h, experts.count)
    stored = sent * (2 * shape.kept_bytes * h + width * _mlp_kept_bytes(shape))
    moved = e * (sent * width * (gates + 1) + 6 * sent * h)
    working = e * sent * (2 * h + width)
    shared = experts.shared_ffn_size or experts.shared * experts.ffn_size
    if shared:
        more = _mlp(shape, shape.tokens, shared / run.tensor)
        seconds, stored, moved = seconds + more[0], stored + more[1], moved + more[2]
    return seconds, stored, moved, working
