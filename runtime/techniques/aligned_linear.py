"""Products by a matrix whose number of outputs is off the grid of a device's kernels, in two parts.

Kernels of matrix units read rows that begin at multiples of GRID_BYTES.  A vocabulary of 50,257
tokens has none behind the first: products of its logits in bf16 take 5.5 times as long as those of
50,304 on an H100, and one of 50,258 tokens takes 2.6 times as long (docs/results/gpu.md).  The
outputs up to the last multiple are one product, and the few behind them are another:

    x W^T = [x W0^T, x W1^T],   grad W = grad0 W0 + grad1 W1,   grad^T x = [grad0^T x; grad1^T x]

Graphs do the same for themselves (torch._inductor.fx_passes.pad_mm), and other devices have kernels
for any size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.planner.operators.embedding_and_head import GRID_BYTES
from meshwright.runtime.techniques.split_backward import PLAIN, Products

WORTH = 2**20
"""Elements of a matrix from which two products take less than a slow one."""


def reads_on_grid(device: torch.device) -> bool:
    """Tell whether kernels of a device read rows on a grid; those of AMD's take any size."""
    return device.type == "cuda" and torch.version.hip is None


def parts(like: Tensor, outputs: int, inputs: int) -> list[slice]:
    """Return the outputs of a matrix that are multiplied together: one slice or two.

    `like` has its device and type.
    """
    if (
        not reads_on_grid(like.device)
        or torch.compiler.is_compiling()
        or isinstance(like, DTensor)
        or outputs * inputs < WORTH
    ):
        return [slice(0, outputs)]
    return on_grid(outputs, like.element_size())


def on_grid(outputs: int, element_bytes: int) -> list[slice]:
    """Return the outputs up to the last multiple of the grid, and those behind it.

    >>> on_grid(50257, 2)
    [slice(0, 50256, None), slice(50256, 50257, None)]
    >>> on_grid(50304, 2)
    [slice(0, 50304, None)]
    """
    multiple = max(1, GRID_BYTES // element_bytes)
    whole = outputs - outputs % multiple
    return [slice(0, whole), slice(whole, outputs)] if 0 < whole < outputs else [slice(0, outputs)]


class Parted:
    """Products in the type of the operands, in parts where the matrix asks for it."""

    @staticmethod
    def output(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        columns = parts(weight, *weight.shape)
        if len(columns) == 1:
            return PLAIN.output(x, weight, scale, bias)
        pieces = (
            functional.linear(x, weight[part], None if bias is None else bias[part])
            for part in columns
        )
        return torch.cat(tuple(pieces), -1)

    @staticmethod
    def of_input(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Return grad W."""
        columns = parts(weight, *weight.shape)
        if len(columns) == 1:
            return PLAIN.of_input(grad, weight, scale)
        first, rest = columns
        product = grad[..., first].contiguous() @ weight[first]
        product.flatten(0, -2).addmm_(grad[..., rest].flatten(0, -2), weight[rest])
        return product

    @staticmethod
    def of_weight(x: Tensor, grad: Tensor) -> Tensor:
        """Return grad^T x."""
        columns = parts(x, grad.shape[-1], x.shape[-1])
        if len(columns) == 1:
            return PLAIN.of_weight(x, grad)
        product = x.new_empty(grad.shape[-1], x.shape[-1])
        for part in columns:
            own = grad[..., part].contiguous().flatten(0, -2)
            torch.mm(own.t(), x.flatten(0, -2), out=product[part])
        return product


PARTED = Parted()


def products_for(unit: nn.Module, tensor: int) -> Products:
    """Return how the Linears of a unit multiply, in its parameters' bits, where rows have a grid.

    `tensor` ranks may divide their outputs.  Multiples of GRID_BYTES outputs are on the grid in any
    type; which others are in their own shows when they are multiplied.
    """
    off = (
        child.out_features % (GRID_BYTES * tensor) and child.weight.numel() >= WORTH * tensor
        for child in unit.modules()
        if type(child) is nn.Linear
    )
    return PARTED if any(off) else PLAIN
