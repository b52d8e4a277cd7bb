"""Collectives along the positions of a sequence, with gradients: all-gather and reduce-scatter.

Tensor parallelism divides the positions between its modules, and a chunked loss gathers them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POSITIONS = 1  # activations are [sample, position, feature]


class _GatherPositions(torch.autograd.Function):
    """All-gather along the positions; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, pieces: bool) -> Tensor:
        ctx.group, ctx.pieces = group, pieces
        return _all_gather(x, group, pieces=pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.group, pieces=ctx.pieces), None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter along the positions; backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, pieces: bool) -> Tensor:
        ctx.group, ctx.pieces = group, pieces
        return _reduce_scatter(x, group, pieces=pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, pieces=ctx.pieces), None, None


def gather(x: Tensor, group: dist.ProcessGroup, *, pieces: bool = False) -> Tensor:
    """Collect x [sample, position / ranks, feature] along the positions.

    With `pieces` it is written as torch's compiler looks for it, to run it piece by piece beside
    the products of what it brings.
    """
    return _GatherPositions.apply(x, group, pieces)


def scatter(x: Tensor, group: dist.ProcessGroup, *, pieces: bool = False) -> Tensor:
    """Sum x [sample, position, feature] over ranks and keep this rank's positions.

    With `pieces` as `gather`, beside the product that makes x.
    """
    return _Scatter.apply(x, group, pieces)


# The functional collectives, since selective recompute must see them as operators with results.
# They work along the first dim, which with one sample are the positions: nothing is copied then.
# What torch's pass (_inductor/fx_passes/micro_pipeline_tp.py) looks for is chunks and `cat`.
def _all_gather(x: Tensor, group: dist.ProcessGroup, *, pieces: bool) -> Tensor:
    ops, ranks = torch.ops._c10d_functional, group.size()
    parts = ops.all_gather_into_tensor(x.contiguous(), ranks, group.group_name)
    parts = ops.wait_tensor(parts)
    if x.shape[0] == 1 and not pieces:
        return parts.view(1, -1, *x.shape[POSITIONS + 1 :])
    return torch.cat(parts.chunk(ranks), dim=POSITIONS)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, *, pieces: bool) -> Tensor:
    ops, ranks = torch.ops._c10d_functional, group.size()
    if x.shape[0] == 1 and not pieces:
        whole = x.contiguous().view(ranks, -1, *x.shape[POSITIONS + 1 :])
    else:
        whole = torch.cat(x.chunk(ranks, dim=POSITIONS))
    part = ops.reduce_scatter_tensor(whole, "sum", ranks, group.group_name)
    return ops.wait_tensor(part)
