"""Context parallelism: the positions of a sequence divided over ranks, attention over all of them.

A sequence is cut into 2 c chunks, c being the degree, and rank r has the chunks r and 2 c - 1 - r
one behind the other: under a causal mask every rank then has the same work.  Everything but
attention works on each position by itself.  For attention, keys and values of all ranks are
gathered; the gradient of the gather sums over ranks and scatters.

A chunk of queries sees all earlier chunks of keys, and its own under the causal mask.  Each of the
two is one call of a fused kernel, and their outputs are merged by their log-sums, so no mask is
ever written out and no hidden key is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.runtime.core.mesh import Context

_LOG_SUM_ROWS = 32  # the memory-efficient kernel pads its log-sums to a multiple


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Context,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return causal attention of this rank's positions, [sample, head, position, head_dim].

    There may be fewer heads of keys and values than of queries.  `mask` says which keys of the
    whole sequence each of this rank's queries sees, [..., query, key]; without one, all up to its
    own position.
    """
    keys, values = gather_keys(key, value, context)
    if mask is None:
        return _ChunkAttention.apply(query, keys, values, context, scale)
    keys, values = for_each_query_head(query, keys, values)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


@torch.no_grad()
def whole_positions(x: Tensor, context: Context) -> Tensor:
    """Return [sample, position, ...] of all ranks' positions, in the order of the sequence."""
    assert context.group is not None
    ops = torch.ops._c10d_functional
    part = x.transpose(0, 1).contiguous()
    whole = ops.all_gather_into_tensor(part, context.degree, context.group.group_name)
    return _in_order(ops.wait_tensor(whole), context.degree).transpose(0, 1)


def gather_keys(key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return keys and values of all positions, in the order of the sequence."""
    assert context.group is not None
    return _GatherKeys.apply(key, value, context)


class _GatherKeys(torch.autograd.Function):
    """All-gather keys and values along the positions, into the order of the sequence.

    Both travel in one buffer [position, sample, head, 2 head_dim].
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        ops, group = torch.ops._c10d_functional, context.group
        assert group is not None
        ctx.context = context
        part = _pack(key, value)
        whole = ops.all_gather_into_tensor(part, context.degree, group.group_name)
        return _unpack(_in_order(ops.wait_tensor(whole), context.degree))

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None]:
        ops, group = torch.ops._c10d_functional, ctx.context.group
        degree = ctx.context.degree
        whole = _by_rank(_pack(key, value), degree)
        part = ops.reduce_scatter_tensor(whole, "sum", degree, group.group_name)
        return (*_unpack(ops.wait_tensor(part)), None)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)), dim=-1).contiguous()


def _unpack(both: Tensor) -> tuple[Tensor, Tensor]:
    key, value = both.permute(1, 2, 0, 3).chunk(2, dim=-1)
    return key, value


def _in_order(whole: Tensor, degree: int) -> Tensor:
    """Put positions that lie rank by rank into the order of the sequence, along dim 0."""
    chunks = whole.chunk(2 * degree)
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])))


def _by_rank(whole: Tensor, degree: int) -> Tensor:
    """Undo `_in_order`."""
    chunks = whole.chunk(2 * degree)
    return torch.cat(
        [chunk for rank in range(degree) for chunk in (chunks[rank], chunks[-1 - rank])]
    )


@torch.library.custom_op("meshwright::context_attention", mutates_args=())
def _over_chunks(
    query: Tensor, keys: Tensor, values: Tensor, rank: int, degree: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums of both chunks of queries.

    An operator of its own, so that selective recompute keeps these and not each block's.
    """
    whole, log_sums = torch.empty_like(query), []  # laid out as queries are, as kernels do
    for chunk, blocks in _blocks(query, rank, degree):
        parts = [
            _forward(
                query[:, :, chunk],
                keys[:, :, block],
                values[:, :, block],
                causal=causal,
                scale=scale,
            )
            for block, causal in blocks
        ]
        out, log_sum = parts[0] if len(parts) == 1 else _merge(*parts)
        whole[:, :, chunk] = out
        log_sums.append(log_sum)
    return whole, torch.cat(log_sums, dim=2)


@_over_chunks.register_fake
def _shapes(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


class _ChunkAttention(torch.autograd.Function):
    """Attention of two chunks of queries over whole keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, context: Context, scale: float | None
    ) -> Tensor:
        out, log_sum = _over_chunks(query, keys, values, context.rank, context.degree, scale)
        ctx.save_for_backward(query, keys, values, out, log_sum)
        ctx.context, ctx.scale = context, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Each block's probabilities follow from the log-sum over all blocks."""
        query, keys, values, out, log_sum = ctx.saved_tensors
        whole = tuple(torch.zeros_like(t) for t in (query, keys, values))
        for chunk, blocks in _blocks(query, ctx.context.rank, ctx.context.degree):
            for block, causal in blocks:
                parts = _backward(
                    *(t[:, :, chunk] for t in (grad, query)),
                    *(t[:, :, block] for t in (keys, values)),
                    *(t[:, :, chunk] for t in (out, log_sum)),
                    causal=causal,
                    scale=ctx.scale,
                )
                for total, place, part in zip(whole, (chunk, block, block), parts, strict=True):
                    total[:, :, place] += part
        return (*whole, None, None)


def _blocks(
    query: Tensor, rank: int, degree: int
) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Yield each chunk of this rank's queries, and which keys it sees: all, or causally."""
    length = query.shape[2] // 2
    for index, chunk in enumerate((rank, 2 * degree - 1 - rank)):
        own_chunk = (slice(chunk * length, (chunk + 1) * length), True)
        earlier = (slice(0, chunk * length), False)
        yield (
            slice(index * length, (index + 1) * length),
            [own_chunk, earlier] if chunk else [own_chunk],
        )


def _merge(first: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum of attention over the keys of both."""
    log_sum = torch.logaddexp(first[1], other[1])
    parts = (
        part * torch.exp(part_sum - log_sum).unsqueeze(-1) for part, part_sum in (first, other)
    )
    return cast(Tensor, sum(parts)).to(first[0].dtype), log_sum


# The fused kernels by their own names: torch's front door hands out no log-sum.
def _forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    ops = torch.ops.aten
    if query.device.type == "cpu":
        kernel = ops._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, causal, scale=scale)
    if query.dtype != torch.float32:
        kernel = ops._scaled_dot_product_flash_attention
        return kernel(query, key, value, 0.0, causal, scale=scale)[:2]
    key, value = for_each_query_head(query, key, value)
    kernel = ops._scaled_dot_product_efficient_attention
    out, log_sum = kernel(query, key, value, None, True, 0.0, causal, scale=scale)[:2]
    return out, log_sum[:, :, : query.shape[2]]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    ops = torch.ops.aten
    log_sum = log_sum.contiguous()
    if query.device.type == "cpu":
        kernel = ops._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, query, key, value, out, log_sum, 0.0, causal, scale=scale)
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # seeds of a dropout of zero
    if query.dtype != torch.float32:
        kernel = ops._scaled_dot_product_flash_attention_backward
        lengths = (None, None, query.shape[2], key.shape[2])
        args = (grad, query, key, value, out, log_sum, *lengths, 0.0, causal, unused, unused)
        return kernel(*args, scale=scale)
    shared, heads = query.shape[1] // key.shape[1], key.shape[1]
    key, value = for_each_query_head(query, key, value)
    log_sum = functional.pad(log_sum, (0, -query.shape[2] % _LOG_SUM_ROWS), value=float("inf"))
    kernel = ops._scaled_dot_product_efficient_attention_backward
    inputs = (grad, query, key, value, None, out, log_sum, unused, unused, 0.0)
    dq, dk, dv, _ = kernel(*inputs, [True, True, True, False], causal, scale=scale)
    return dq, *(t.unflatten(1, (heads, shared)).sum(2) for t in (dk, dv))


def for_each_query_head(query: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
    """Return keys or values, [sample, head, position, head_dim], of a head for each of queries."""
    return tuple(t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in shared)
