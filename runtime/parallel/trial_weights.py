"""Weights and gradients of a trial, in memory that does not grow with a unit's parameters.

A large weight is a window that slides over few random numbers, and copies of a unit share it.  Of
its gradient, sums with random signs are kept along each dim that may be divided: they are linear in
it, so that parts of it are compared, and added up, as the gradient itself would be.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.runtime.core.side_effects import deepcopy_module

LARGE = 1 << 20
"""Numbers of a matrix or table from which on it slides over fewer."""
STRIDE = 17
"""From a row of a large weight to the next: coprime to the sizes of heads."""
SUMS = 4
"""Number of sums of each row or column of a large gradient."""
MOST_SIGNS = 1 << 20
"""Length of a row from which on there is one sum instead of SUMS."""


def random_weight(shape: Sequence[int], *, dense: bool = False) -> Tensor:
    """Return random numbers by which outputs are about as large as inputs.

    Those of a large weight overlap in memory unless `dense`.
    """
    count = math.prod(shape)
    if len(shape) < 2:
        return torch.randn(tuple(shape))
    columns = max(1, count // max(1, shape[0]))
    if dense or count < LARGE or columns <= STRIDE:
        return torch.randn(tuple(shape)) / math.sqrt(columns)
    inner = torch.empty(shape[1:], device="meta").stride()
    numbers = torch.randn((shape[0] - 1) * STRIDE + columns) / math.sqrt(columns)
    return numbers.as_strided(tuple(shape), (STRIDE, *inner))


def is_overlapping(weight: Tensor) -> bool:
    """Return whether rows of a weight share elements in memory."""
    return weight.ndim > 1 and 0 < weight.stride(0) < weight[0].numel()


def shared_numbers(unit: nn.Module) -> list[Tensor]:
    """Return the numbers over which the weights of a unit slide."""
    weights = (p.detach() for p in unit.parameters() if is_overlapping(p))
    return [w.as_strided((w.untyped_storage().nbytes() // w.itemsize,), (1,)) for w in weights]


def deepcopy_unit(unit: nn.Module) -> nn.Module:
    """Return a copy that shares the numbers of large weights."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad)
        for p in unit.parameters()
        if is_overlapping(p)
    }
    return deepcopy_module(unit, memo)


def part_in_place(part: Tensor, _: int) -> Tensor:
    """Return a rank's part of a weight: of an overlapping one as it is, of others a copy."""
    return part if is_overlapping(part) else part.clone()


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The gradient of a parameter, or sums of it with random signs along each of two dims."""

    exact: Tensor | None
    sums: Mapping[int, Tensor]
    largest: float
    """The largest of its numbers."""

    def along(self, dim: int) -> Tensor:
        """Return what is divided as the gradient is along a dim."""
        return self.sums[dim] if self.exact is None else self.exact

    @classmethod
    def of_whole(cls, grad: Tensor) -> WeightGradient:
        """Return a gradient that is kept."""
        return cls(grad, {}, float(grad.abs().max()) if grad.numel() else 0.0)

    @classmethod
    def summed(cls, grad: Tensor) -> WeightGradient:
        """Return sums of a gradient, which may be sparse."""
        if grad.is_sparse:
            rows = grad.coalesce()
            at, values = rows.indices()[0], rows.values()
            along_rows = torch.zeros(grad.shape[0], SUMS)
            along_rows[at] = values @ _signs(grad.shape[1], SUMS)
            along_columns = _signs(grad.shape[0], SUMS)[at].t() @ values
            return cls(None, {0: along_rows, 1: along_columns}, _largest(values))
        sums = {}
        for dim in (0, 1):
            rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
            count = SUMS if rows.shape[1] < MOST_SIGNS else 1
            made = rows @ _signs(rows.shape[1], count)
            sums[dim] = made if dim == 0 else made.t()
        return cls(None, sums, _largest(grad))


def _largest(values: Tensor) -> float:
    return max(map(abs, map(float, torch.aminmax(values)))) if values.numel() else 0.0


def _signs(rows: int, columns: int) -> Tensor:
    """Return random signs, the same for each size, over the root of how many are added."""
    generator = torch.Generator().manual_seed(rows)
    signs = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8)
    return (2.0 * signs - 1) / math.sqrt(max(1, rows))


class _SparseTables(TorchFunctionMode):
    """Lets the gradient of a large table be that of the rows that are read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.embedding:
            names = (
                "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq",
                "sparse",
            )  # fmt: skip
            kwargs = dict(zip(names, args, strict=False)) | kwargs
            weight, args = kwargs["weight"], ()
            if weight.is_leaf and is_overlapping(weight) and not kwargs.get("scale_grad_by_freq"):
                kwargs["sparse"] = True
        return func(*args, **kwargs)


@contextlib.contextmanager
def noted_gradients(
    unit: nn.Module, summed: frozenset[str]
) -> Iterator[dict[str, WeightGradient | None]]:
    """Give the gradients of a unit's parameters by name, once a backward has run.

    Those of `summed` are dropped as soon as their sums are made.
    """
    gradients: dict[str, WeightGradient | None] = {}
    parameters = dict(unit.named_parameters())

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradients[name] = WeightGradient.summed(parameter.grad)
            parameter.grad = None

    hooks = [
        cast(Any, parameter).register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
        for name, parameter in parameters.items()
        if name in summed and parameter.requires_grad
    ]
    try:
        with _SparseTables() if summed else contextlib.nullcontext():
            yield gradients
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in parameters.items():
        if gradients.get(name) is None:
            grad = parameter.grad
            gradients[name] = None if grad is None else WeightGradient.of_whole(grad)
