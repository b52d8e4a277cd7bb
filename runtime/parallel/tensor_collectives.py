"""The tensor axis as one rank sees it: what enters a divided region, and what leaves it.

Backward of a copy is a sum, and backward of a sum is a copy (Megatron-LM's f and g).  Ranks draw
alike, so each can make what one process draws and take its own part of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class Across(Protocol):
    """The tensor axis."""

    rank: int
    degree: int

    def copy(self, x: Tensor) -> Tensor:
        """Return x, whose gradient will be the sum of the gradients on all ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; its gradient is that of x."""


class TensorRanks:
    """The real tensor axis."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.degree = group.rank(), group.size()
        self._group = group

    def copy(self, x: Tensor) -> Tensor:
        """Return x; its gradient is summed."""
        return _Copy.apply(x, self._group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return _Sum.apply(x, self._group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The functional collective, since selective recompute must see an operator with a result.
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group.group_name))


class AxisEntry:
    """The entry of activations into a region: a value that several columns read is copied once."""

    def __init__(self, across: Across) -> None:
        self._across = across
        self._known: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Return x inside the region."""
        for given, value in self._known:
            if given is x:
                return value
        self._known.append((x, self._across.copy(x)))
        return self._known[-1][1]

    def forget(self) -> None:
        """Forget what entered."""
        self._known.clear()


def part_of_dropout(like: Tensor, p: float, dim: int, across: Across) -> Tensor:
    """Return this rank's part of what a dropout of the whole tensor multiplies with."""
    size_here = like.shape[dim]
    drawn = functional.dropout(
        empty_of_size(like, dim, size_here * across.degree).fill_(1), p, True
    )
    return drawn.narrow(dim, across.rank * size_here, size_here)


def empty_of_size(like: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor without values, of another size along a dim, laid out as `like` is.

    Draws follow memory, in which dims may lie in another order.
    """
    shape = [size if at == dim else size_here for at, size_here in enumerate(like.shape)]
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    tensor = torch.empty([shape[at] for at in order], dtype=like.dtype, device=like.device)
    return tensor.permute([order.index(at) for at in range(like.ndim)])
