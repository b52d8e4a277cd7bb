"""Weights and gradients of a trial, in memory that does not grow with a unit's parameters.

A large weight is a window that slides over few random numbers, and copies of a unit share it.  The
numbers repeat with a period: so do its rows and columns, and a product with it is one with a square
of that size.  Of its gradient, sums with random signs are kept along each dim that may be divided:
they are linear in it, so that parts of it are compared, and added up, as the gradient itself would
be.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from meshwright.runtime.core.side_effects import deepcopy_module

LARGE = 1 << 20
"""Numbers of a matrix or table from which on it slides over fewer."""
STRIDE = 17
"""From a row of a large weight to the next: coprime to the sizes of heads."""
STACK_STRIDE = 5
"""From a matrix of a large stack to the next: coprime to STRIDE."""
PERIOD = 1021
"""Numbers after which those of a large weight repeat: a prime, so that no head or matrix has the
rows of another."""
SUMS = 4
"""Number of sums of each row or column of a large gradient."""
MOST_SIGNS = 1 << 20
"""Length of a row from which on there is one sum instead of SUMS."""
ROWS_LOOKED_AT = 16
"""Rows of a gradient among which the largest number is looked for."""

PLAIN_ATTRIBUTES = frozenset(
    ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad", "shape")
)
"""Attributes of a weight that do not depend on its numbers."""
GROUPED_PRODUCTS = getattr(torch, "_grouped_mm", None)
"""torch's product of groups of rows with a stack of matrices, one each."""


def random_weight(shape: Sequence[int], *, dense: bool = False) -> Tensor:
    """Return random numbers by which outputs are about as large as inputs.

    Those of a large weight overlap in memory unless `dense`.
    """
    count = math.prod(shape)
    if len(shape) < 2:
        return torch.randn(tuple(shape))
    columns = max(1, count // max(1, shape[0]))
    repeats = any(size % PERIOD == 0 for size in shape)
    if dense or repeats or count < LARGE or columns <= STRIDE:
        return torch.randn(tuple(shape)) / math.sqrt(columns)
    inner = torch.empty(shape[1:], device="meta").stride()
    strides = (STRIDE, *inner)
    if len(shape) > 2 and columns >= LARGE and inner[0] > STRIDE:  # a stack of large matrices
        strides = (STACK_STRIDE, STRIDE, *inner[1:])
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numbers = torch.randn(PERIOD) / math.sqrt(columns)
    return numbers.repeat(last // PERIOD + 1)[: last + 1].as_strided(tuple(shape), strides)


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


class PiecedWeight(nn.Parameter):
    """A rank's rows of several matrices that lie one behind the other, without memory."""

    pieces: tuple[Tensor, ...]

    @classmethod
    def of(cls, pieces: Sequence[Tensor]) -> PiecedWeight:
        """Return the weight of these rows; its own numbers are none."""
        rows = sum(map(len, pieces))
        weight = cls(torch.full((), math.nan).expand(rows, *pieces[0].shape[1:]))
        weight.pieces = tuple(pieces)
        return weight


def part_in_place(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Return a rank's part of a weight: of an overlapping one as it is, of others a copy."""
    if not is_overlapping(pieces[0]):
        return joined(pieces, dim)
    return pieces[0] if len(pieces) == 1 else PiecedWeight.of(pieces)


def joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Return pieces one behind the other along a dim, in memory of their own."""
    return torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0].clone()


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
            signed = rows @ _signs_of_row(rows.shape[1])
            sums[dim] = signed if dim == 0 else signed.t()
        return cls(None, sums, _largest(grad))

    @classmethod
    def of_product(cls, grad: Tensor, x: Tensor) -> WeightGradient:
        """Return sums of the gradient of a product's weight, from those of its outputs and x.

        Both are [row, feature].  The largest number is that of the rows of the gradient whose
        outputs have the largest ones.
        """
        along_rows = grad.t() @ (x @ _signs_of_row(x.shape[1]))
        along_columns = (grad @ _signs_of_row(grad.shape[1])).t() @ x
        strongest = grad.norm(dim=0).topk(min(ROWS_LOOKED_AT, grad.shape[1])).indices
        largest = _largest(grad[:, strongest].t() @ x)
        return cls(None, {0: along_rows, 1: along_columns}, largest)

    def plus(self, other: WeightGradient) -> WeightGradient:
        """Return sums of what both are sums of; its largest number is theirs at most."""
        sums = {dim: values + other.sums[dim] for dim, values in self.sums.items()}
        return WeightGradient(None, sums, self.largest + other.largest)


def _largest(values: Tensor) -> float:
    return max(map(abs, map(float, torch.aminmax(values)))) if values.numel() else 0.0


def _signs_of_row(length: int) -> Tensor:
    return _signs(length, SUMS if length < MOST_SIGNS else 1)


def _signs(rows: int, columns: int) -> Tensor:
    """Return random signs, the same for each size, over the root of how many are added."""
    generator = torch.Generator().manual_seed(rows)
    signs = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8)
    return (2.0 * signs - 1) / math.sqrt(max(1, rows))


class WindowedProducts(TorchFunctionMode):
    """Computes with large weights that slide over few numbers, and never makes one of them whole.

    A product takes a few of its rows at a time, and notes the sums of its weight's gradient in
    place of the gradient.  The gradient of a table is that of the rows that are read.
    """

    def __init__(self, noted: Mapping[int, Callable[[WeightGradient], None]]) -> None:
        """`noted` take the sums of gradients, by the identity of the parameter."""
        super().__init__()
        self._noted = noted

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
        elif func is nn.functional.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            x, weight, bias = given["input"], given["weight"], given.get("bias")
            note = self._noted.get(id(weight))
            if (
                is_overlapping(_pieces_of(weight)[0])
                and weight.dtype == x.dtype == torch.float32
                and (note is not None or not weight.requires_grad)
            ):
                product = _WindowedProduct.apply(x, weight, note)
                return product if bias is None else product + bias
        elif func is GROUPED_PRODUCTS:
            given = dict(zip(("input", "mat2", "offs", "bias"), args, strict=False)) | kwargs
            x, weights, offs = given["input"], given["mat2"], given.get("offs")
            if (
                offs is not None
                and given.get("bias") is None
                and weights.ndim == 3
                and is_overlapping(weights)
                and not weights.requires_grad
            ):
                return _grouped(x, weights, offs.tolist())
        if getattr(getattr(func, "__self__", None), "__name__", "") not in PLAIN_ATTRIBUTES:
            args, kwargs = tree_map(_in_memory, (args, kwargs))
        return func(*args, **kwargs)


def _grouped(x: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """Return each group of rows times its own matrix of a stack; groups end at `ends`."""
    groups = x.tensor_split(list(ends))
    products = [
        _WindowedProduct.apply(group, weight.t(), None)
        for group, weight in zip(groups, weights, strict=False)
        if len(group)
    ]
    return torch.cat([*products, x.new_zeros(len(groups[-1]), weights.shape[2])])


def _in_memory(leaf: Any) -> Any:
    """Return a weight in pieces as one that something else than a product can read."""
    return _Joined.apply(leaf) if isinstance(leaf, PiecedWeight) else leaf


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: PiecedWeight) -> Tensor:
        return joined(weight.pieces, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _WindowedProduct(torch.autograd.Function):
    """x times the pieces of a weight, which has no gradient but the one that is noted.

    Rows and columns of a piece repeat with the period p: it is C[i mod p, j mod p] of its first p
    of both.  So columns of x that are p apart are summed, and the product with C is repeated.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, note: Callable[[WeightGradient], None] | None
    ) -> Tensor:
        ctx.note = note
        pieces = _pieces_of(weight)
        ctx.save_for_backward(x, *pieces)
        folded = _folded(x)
        return torch.cat([_repeated(folded @ _square(p).t(), p.shape[0]) for p in pieces], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, *pieces = ctx.saved_tensors
        grads = grad.split([piece.shape[0] for piece in pieces], -1)
        products = [_folded(g) @ _square(piece) for g, piece in zip(grads, pieces, strict=True)]
        if ctx.note is not None:
            ctx.note(WeightGradient.of_product(grad.flatten(0, -2), x.flatten(0, -2)))
        return _repeated(torch.stack(products).sum(0), x.shape[-1]), None, None


def _pieces_of(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.pieces if isinstance(weight, PiecedWeight) else (weight,)


def _square(weight: Tensor) -> Tensor:
    """Return the rows and columns of a large weight that all others are equal to."""
    return weight[:PERIOD, :PERIOD]


def _folded(x: Tensor) -> Tensor:
    """Return the sums of features that are a period apart."""
    size = x.shape[-1]
    if size <= PERIOD:
        return x
    count = -(-size // PERIOD)
    padded = nn.functional.pad(x, (0, count * PERIOD - size))
    return padded.unflatten(-1, (count, PERIOD)).sum(-2)


def _repeated(x: Tensor, size: int) -> Tensor:
    """Return features again and again until there are `size`."""
    if x.shape[-1] == size:
        return x
    return x.repeat(*[1] * (x.ndim - 1), -(-size // x.shape[-1]))[..., :size]


def windowed_products(unit: nn.Module) -> WindowedProducts:
    """Let a unit's forward compute with large weights in place, where no backward follows."""
    return WindowedProducts({id(p): lambda _: None for p in unit.parameters()})


@contextlib.contextmanager
def noted_gradients(
    unit: nn.Module, summed: frozenset[str]
) -> Iterator[dict[str, WeightGradient | None]]:
    """Give the gradients of a unit's parameters by name, once a backward has run.

    Those of `summed` are dropped as soon as their sums are made.
    """
    gradients: dict[str, WeightGradient | None] = {}
    parameters = dict(unit.named_parameters())

    def add(name: str, gradient: WeightGradient) -> None:
        before = gradients.get(name)
        gradients[name] = gradient if before is None else before.plus(gradient)

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            add(name, WeightGradient.summed(parameter.grad))
            parameter.grad = None

    trained = {name: p for name, p in parameters.items() if name in summed and p.requires_grad}
    hooks = [
        cast(Any, parameter).register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
        for name, parameter in trained.items()
    ]
    noted = {id(p): functools.partial(add, name) for name, p in trained.items()}
    try:
        with WindowedProducts(noted) if summed else contextlib.nullcontext():
            yield gradients
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in parameters.items():
        if gradients.get(name) is None:
            grad = parameter.grad
            gradients[name] = None if grad is None else WeightGradient.of_whole(grad)
