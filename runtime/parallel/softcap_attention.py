"""Attention with soft-capped scores (Gemma-2) or with sinks (GPT-OSS).

    s = cap tanh(scale q k / cap), or scale q k without a cap: no score leaves (-cap, cap)
    p = softmax(s) over the keys that a query sees, and over the head's sink if it has one

A sink is a score of its own, one parameter per head, that takes part in the softmax and has no
value.  Fused kernels have neither.  What they can compute of sinks is theirs (`sink_attention`).
Else queries are taken in blocks: nothing of all queries times all keys is ever written out.
Forward keeps outputs and log-sums; backward makes each block's scores again.  A query sees the keys
up to its own position, in a layer with a window only the last ones.
Queries may be this rank's part of a sequence (runtime.parallel.context_parallel); keys are always
all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.core.mesh import Context
from meshwright.runtime.parallel import sink_attention
from meshwright.runtime.parallel.context_parallel import gather_keys

BLOCK = 512
"""Queries whose scores exist at once."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Context,
    *,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Return attention of this rank's positions, [sample, head, position, head_dim].

    There may be fewer heads of keys and values than of queries.  `window` counts the keys that a
    query sees, its own among them; 0 means all.  A `cap` of 0 is none.  `sinks` are [head].
    `starts` [sample, position] is the first key that each query sees; without it, the sequence's.
    """
    if context.degree > 1:
        key, value = gather_keys(key, value, context)
    elif (
        sinks is not None
        and not cap
        and starts is None
        and sink_attention.applies(query, value, window)
    ):
        return sink_attention.attention(query, key, value, sinks, scale=scale, window=window)
    return _CappedAttention.apply(query, key, value, sinks, starts, context, scale, cap, window)


@torch.library.custom_op("meshwright::capped_attention", mutates_args=())
def _over_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    rank: int,
    degree: int,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums.

    An operator of its own, so that selective recompute keeps these and not each block's.
    """
    out = torch.empty_like(query)
    log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for rows, seen, hidden in _blocks(query, starts, rank, degree, window):
        scores = _scores(query[:, :, rows], keys[:, :, seen], hidden, scale, cap)
        log_sum = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            log_sum = torch.logaddexp(log_sum, _of_heads(sinks, keys.shape[1]))
        weights = scores.sub_(log_sum).exp_().to(query.dtype)
        out[:, :, rows] = _join_heads(weights @ values[:, :, None, seen])
        log_sums[:, :, rows] = _join_heads(log_sum).squeeze(-1)
    return out, log_sums


@_over_blocks.register_fake
def _shapes(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        starts: Tensor | None,
        context: Context,
        scale: float,
        cap: float,
        window: int,
    ) -> Tensor:
        figures = (context.rank, context.degree, scale, cap, window)
        out, log_sums = _over_blocks(query, keys, values, sinks, starts, *figures)
        ctx.save_for_backward(query, keys, values, out, log_sums, starts, sinks)
        ctx.figures = figures
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        grads = _grads_over_blocks(grad, *saved, *ctx.figures)
        d_sinks = None
        if sinks is not None:
            # A sink's value is nothing: ds = p (0 - Σ grad out), summed over samples and queries.
            _, _, _, out, log_sums, _ = saved
            share = torch.exp(sinks.float()[:, None] - log_sums)
            d_sinks = -(share * (grad.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return (*grads, d_sinks, *(None for _ in range(5)))


@torch.library.custom_op("meshwright::capped_attention_backward", mutates_args=())
def _grads_over_blocks(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: Tensor | None,
    rank: int,
    degree: int,
    scale: float,
    cap: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values.

    Of s = cap t: ds/d(scale q k) = 1 - t², without a cap 1; ds = p (dp - Σ grad out).
    """
    d_query = torch.empty_like(query)
    d_keys, d_values = (torch.zeros_like(t, dtype=torch.float32) for t in (keys, values))
    heads = keys.shape[1]
    # In place where it can be: a block's scores are what this needs most memory for.
    for rows, seen, hidden in _blocks(query, starts, rank, degree, window):
        q, g, o = (_group_heads(t[:, :, rows], heads) for t in (query, grad, out))
        k, v = keys[:, :, None, seen], values[:, :, None, seen]
        scores = _scores(query[:, :, rows], keys[:, :, seen], hidden, scale, cap)
        weights = scores - _group_heads(log_sums[:, :, rows].unsqueeze(-1), heads)
        weights.exp_()
        d_values[:, :, seen] += (weights.to(g.dtype).transpose(-2, -1) @ g).float().sum(2)
        if cap:
            # A hidden score is -inf, and its weight 0.
            slope = scores.div_(-cap).clamp_(max=1.0).square_().neg_().add_(1)
            weights *= slope
            del slope
        d_scores = (g @ v.transpose(-2, -1)).float()
        d_scores -= (g.float() * o.float()).sum(-1, keepdim=True)
        d_scores = d_scores.mul_(weights).mul_(scale).to(q.dtype)
        del weights, scores
        d_query[:, :, rows] = _join_heads(d_scores @ k)
        d_keys[:, :, seen] += (d_scores.transpose(-2, -1) @ q).float().sum(2)
    return d_query, d_keys.to(keys.dtype), d_values.to(values.dtype)


@_grads_over_blocks.register_fake
def _shapes_of_grads(
    grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values)


def _scores(query: Tensor, keys: Tensor, hidden: Tensor, scale: float, cap: float) -> Tensor:
    """Return scores in fp32, [sample, key head, query heads of it, query, key]."""
    scores = (_group_heads(query, keys.shape[1]) @ keys.unsqueeze(2).transpose(-2, -1)).float()
    scores = scores.mul_(scale / cap).tanh_().mul_(cap) if cap else scores.mul_(scale)
    return scores.masked_fill_(hidden, -torch.inf)


def _blocks(
    query: Tensor, starts: Tensor | None, rank: int, degree: int, window: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield a block of queries, the keys that any of them sees, and which each does not see."""
    chunks = 1 if degree == 1 else 2
    length = query.shape[2] // chunks
    for index, chunk in enumerate((0,) if degree == 1 else (rank, 2 * degree - 1 - rank)):
        for start in range(0, length, BLOCK):
            count = min(BLOCK, length - start)
            first = chunk * length + start  # its position in the sequence
            begin = max(0, first - window + 1) if window else 0
            positions = torch.arange(first, first + count, device=query.device)[:, None]
            others = torch.arange(begin, first + count, device=query.device)
            hidden = others > positions
            if window:
                hidden |= others <= positions - window
            row = index * length + start
            if starts is not None:
                firsts = starts[:, row : row + count, None]
                hidden = (hidden | (others < firsts))[:, None, None]
            yield slice(row, row + count), slice(begin, first + count), hidden


def _of_heads(sinks: Tensor, groups: int) -> Tensor:
    """Lay sinks [head] beside scores."""
    return sinks.float().unflatten(0, (groups, -1))[None, :, :, None, None]


def _group_heads(heads: Tensor, groups: int) -> Tensor:
    """Put the query heads that share a key head beside each other."""
    return heads.unflatten(1, (groups, -1))


def _join_heads(heads: Tensor) -> Tensor:
    return heads.flatten(1, 2)
