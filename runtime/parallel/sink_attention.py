"""Attention with sinks (GPT-OSS) by kernels of fused attention, which have none.

    L  = log-sum over the keys of a query,  L' = log(exp L + exp sink)
    o' = o exp(L - L')

A sink takes part in the softmax without a value: all other weights are smaller by one factor for
each query and head.  Backward makes the weights again from the log-sum that it is given, and takes
their mean gradient from the output: with L' and o' it computes the gradients of queries, keys and
values that a sink leaves.  That of the sink is -Σ exp(sink - L') (grad o').

A query sees the keys up to its own position, in a layer with a window only the last ones.  Kernels
of a CPU know no window, and flash attention of a device no 32 bits: `applies` says so, and
`runtime.parallel.softcap_attention` does what is left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST_HEAD = 256
"""Of flash attention's kernels on devices (flash-attention, csrc/flash_attn/flash_api.cpp)."""
HEAD_MULTIPLE = 8


def applies(query: Tensor, value: Tensor, window: int) -> bool:
    """Return True if a kernel computes attention of these tensors within this window.

    In 32 bits there is none on a device, and so a CPU, where all is the same, takes none either.
    """
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if query.device.type == "cpu":
        return not window or window >= query.shape[2]
    width = query.shape[-1]
    return (
        query.device.type == "cuda"
        and width == value.shape[-1]
        and width <= LARGEST_HEAD
        and width % HEAD_MULTIPLE == 0
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, scale: float, window: int = 0
) -> Tensor:
    """Return causal attention, [sample, head, position, head_dim].

    There may be fewer heads of keys and values than of queries.  `sinks` are [head], `window`
    counts the keys that a query sees, its own among them; 0 means all.
    """
    result: Tensor = _SinkAttention.apply(query, key, value, sinks, scale, window)
    return result


@torch.library.custom_op("meshwright::sink_attention", mutates_args=())
def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return outputs and log-sums; an operator of its own, so that selective recompute keeps it."""
    if query.device.type == "cpu":
        out, alone = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
    else:
        flat = (tensor.transpose(1, 2) for tensor in (query, key, value))
        length = query.shape[2]
        out, alone = torch.ops.aten._flash_attention_forward(
            *flat, None, None, length, length, 0.0, True, False, scale=scale, **_window(window)
        )[:2]
        out = out.transpose(1, 2)
    log_sum = torch.logaddexp(alone, sinks.to(alone.dtype).unsqueeze(1)).contiguous()
    out.mul_(torch.exp(alone - log_sum).unsqueeze(-1))
    return _laid_out(out), log_sum


@_with_sinks.register_fake
def _shapes(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _like(query), query.new_empty(query.shape[:-1], dtype=dtype)


@torch.library.custom_op("meshwright::sink_attention_backward", mutates_args=())
def _grads_with_sinks(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    ops = torch.ops.aten
    if query.device.type == "cpu":
        parts = (grad, query, key, value, out, log_sum)
        grads = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, 0.0, True, scale=scale
        )
        d_query, d_key, d_value = (_laid_out(tensor) for tensor in grads)
        return d_query, d_key, d_value
    unused = torch.zeros((), dtype=torch.int64, device=query.device)  # seeds of no dropout
    flat = (tensor.transpose(1, 2) for tensor in (grad, query, key, value, out))
    lengths = (None, None, query.shape[2], query.shape[2])
    grads = ops._flash_attention_backward(
        *flat, log_sum, *lengths, 0.0, True, unused, unused, scale=scale, **_window(window)
    )
    d_query, d_key, d_value = (_laid_out(tensor.transpose(1, 2)) for tensor in grads)
    return d_query, d_key, d_value


@_grads_with_sinks.register_fake
def _shapes_of_grads(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(query), _like(key), _like(value)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        out, log_sum = _with_sinks(query, key, value, sinks, scale, window)
        ctx.save_for_backward(query, key, value, sinks, out, log_sum)
        ctx.figures = (scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, log_sum = ctx.saved_tensors
        grads = _grads_with_sinks(grad, query, key, value, out, log_sum, *ctx.figures)
        share = torch.exp(sinks.to(log_sum.dtype).unsqueeze(1) - log_sum)
        d_sinks = -(share * (grad.to(log_sum.dtype) * out).sum(-1)).sum((0, 2))
        return (*grads, d_sinks.to(sinks.dtype), None, None)


def _window(window: int) -> dict[str, int]:
    """Return a window as flash attention counts it: keys before a query, and behind it."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor [sample, head, position, head_dim] that lies in the order of positions."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _like(tensor: Tensor) -> Tensor:
    """Return an empty one that lies so."""
    flat = tensor.transpose(1, 2)
    return torch.empty_like(flat, memory_format=torch.contiguous_format).transpose(1, 2)
