"""Causal attention within documents that share a sample, without a mask.

A mask takes S^2 elements a sample and lets a kernel multiply what it hides.  Here each document is
a sequence of its own for the kernel: on a CPU one call of the fused kernel for each, on a device
one call for all, which gets their ends (flash attention's variable lengths).  Work is that
of the documents' squared lengths, and what is saved for backward has no S^2 in it.

The device gets as many ends as any micro-batch of the step has at most, a power of two, so that
no tensor's shape depends on the data and the host waits for nothing; ends that there are not are
those of documents without a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_FLAT = (0, 2, 1, 3)


def applies(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether there are kernels; others write a mask."""
    return device.type == "cpu" or (
        device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    )


def ends_of(starts: Tensor, most: int) -> Tensor:
    """Return where documents begin among all tokens of a micro-batch, and the end of the last.

    `starts` [sample, position] says where in its sample the document of each token begins; there
    are `most` documents at most.

    >>> ends_of(torch.tensor([[0, 0, 2], [0, 1, 1]]), 6).tolist()
    [0, 2, 3, 4, 6, 6, 6]
    """
    first = starts == torch.arange(starts.shape[1], device=starts.device)
    places = torch.nonzero_static(first.flatten(), size=most, fill_value=starts.numel())
    return torch.nn.functional.pad(places.flatten(), (0, 1), value=starts.numel()).to(torch.int32)


def most_documents(starts: Tensor, samples: int) -> int:
    """Return how many documents `samples` rows of starts have at most, as a power of two."""
    first = starts == torch.arange(starts.shape[1], device=starts.device)
    most = samples * int(first.sum(1).max())
    return 1 << (most - 1).bit_length()


def lengths(starts: Tensor) -> Tensor:
    """Return at each position how many inputs its document has, [sample, position].

    The last token of a document that ends within the sample predicts nothing and is no input.

    >>> lengths(torch.tensor([[0, 0, 0, 3, 3]])).tolist()
    [[2, 2, 2, 2, 2]]
    """
    ends = torch.searchsorted(starts.contiguous(), starts.contiguous(), right=True)
    return ends - starts - (ends < starts.shape[1]).long()


def attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *, scale: float | None = None
) -> Tensor:
    """Return attention within documents, [sample, head, position, head_dim].

    There may be fewer heads of keys and values than of queries.
    """
    result: Tensor = _DocumentAttention.apply(query, key, value, ends, scale)
    return result


@torch.library.custom_op("meshwright::document_attention", mutates_args=())
def _attention_within(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums; an operator of its own, so that selective recompute keeps it."""
    if query.device.type != "cpu":
        flat = [_flat(tensor) for tensor in (query, key, value)]
        length = query.shape[2]
        out, log_sum = torch.ops.aten._flash_attention_forward(
            *flat, ends, ends, length, length, 0.0, True, False, scale=scale
        )[:2]
        return _as(out, query), log_sum
    out = torch.empty_like(query)
    log_sum = query.new_empty(query.shape[:-1], dtype=torch.float32)
    for row, place in _places(ends, query.shape[2]):
        parts = (tensor[row : row + 1, :, place] for tensor in (query, key, value))
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *parts, 0.0, True, scale=scale
        )
        out[row : row + 1, :, place], log_sum[row : row + 1, :, place] = result
    return out, log_sum


@_attention_within.register_fake
def _within_shapes(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    samples, heads, length, _ = query.shape
    shape = (samples, heads, length) if query.device.type == "cpu" else (heads, samples * length)
    return torch.empty_like(query), query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("meshwright::document_attention_backward", mutates_args=())
def _within_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    ends: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    ops, length = torch.ops.aten, query.shape[2]
    if query.device.type != "cpu":
        unused = torch.zeros((), dtype=torch.int64, device=query.device)  # seeds of no dropout
        flat = [_flat(tensor) for tensor in (grad, query, key, value, out)]
        rest = (log_sum, ends, ends, length, length, 0.0, True, unused, unused)
        grads = ops._flash_attention_backward(*flat, *rest, scale=scale)
        dq, dk, dv = (
            _as(grad_part, like) for grad_part, like in zip(grads, (query, key, value), strict=True)
        )
        return dq, dk, dv
    whole = [torch.empty_like(tensor) for tensor in (query, key, value)]
    for row, place in _places(ends, length):
        parts = [
            tensor[row : row + 1, :, place] for tensor in (grad, query, key, value, out, log_sum)
        ]
        parts[-1] = parts[-1].contiguous()
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, 0.0, True, scale=scale
        )
        for total, part in zip(whole, grads, strict=True):
            total[row : row + 1, :, place] = part
    return whole[0], whole[1], whole[2]


@_within_backward.register_fake
def _backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None
    ) -> Tensor:
        out, log_sum = _attention_within(query, key, value, ends, scale)
        ctx.save_for_backward(query, key, value, out, log_sum, ends)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, ends = ctx.saved_tensors
        grads = _within_backward(grad, query, key, value, out, log_sum, ends, ctx.scale)
        return (*grads, None, None)


def _places(ends: Tensor, length: int) -> Iterator[tuple[int, slice]]:
    """Yield each document's sample and place in it."""
    bounds = ends.tolist()
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            row, first = divmod(begin, length)
            yield row, slice(first, first + end - begin)


def _flat(x: Tensor) -> Tensor:
    """Return [token, head, head_dim] of all samples."""
    return x.permute(_FLAT).flatten(0, 1)


def _as(flat: Tensor, like: Tensor) -> Tensor:
    return flat.unflatten(0, (like.shape[0], like.shape[2])).permute(_FLAT)
