"""Experts whose code reads what a router chose, run without data: as if all had as many tokens.

    with even_routing(module):
        module(batch)

While this is open, products of grouped experts, lists of tokens per expert, and loops over the
experts that were hit are replaced by what costs as much and keeps as much.  Only tensors without
data are treated so; a value that is read for anything else is refused by torch as before.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function

LOOPING = ("hidden_states", "top_k_index", "top_k_weights")
"""What transformers' experts are called with: tokens, and the experts of each with weights."""


@contextlib.contextmanager
def even_routing(module: nn.Module) -> Iterator[None]:
    """Let a module without data run whose experts read values; it is the caller's own copy."""
    for part in module.modules():
        if _loops(part):
            part.forward = types.MethodType(_even_products, part)
    with _grouped_products(), _listed_by_modes(), _EvenSizes():
        yield


@contextlib.contextmanager
def _grouped_products() -> Iterator[None]:
    """Let products of experts run without data in any type, which torch's own do in bf16 alone."""
    known = functional.grouped_mm

    def grouped_mm(x: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, FakeTensor) and x.dtype != torch.bfloat16 and weights.ndim > x.ndim == 2:
            return x @ weights[0]
        return known(x, weights, *args, **kwargs)

    functional.grouped_mm = grouped_mm  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.grouped_mm = known


@contextlib.contextmanager
def _listed_by_modes() -> Iterator[None]:
    """Let modes see `tolist` of a tensor without data, which torch takes apart before them."""
    known = FakeTensor.tolist
    FakeTensor.tolist = lambda self: handle_torch_function(Tensor.tolist, (self,), self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = known  # type: ignore[method-assign]


class _Sizes:
    """Tokens of each expert, which are not known; only `split` takes them."""

    def __init__(self, tensor: Tensor) -> None:
        self.count = len(tensor)

    def __iter__(self, *_: object) -> Iterator[int]:
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    __len__ = __getitem__ = __iter__


class _EvenSizes(TorchFunctionMode):
    """Cuts rows into equal parts where their numbers are values of a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and isinstance(args[0], FakeTensor) and args[0].ndim == 1:
            return _Sizes(args[0])
        if func in (Tensor.split, torch.split) and len(args) > 1 and isinstance(args[1], _Sizes):
            return torch.tensor_split(args[0], args[1].count, *args[2:], **kwargs)
        return func(*args, **kwargs)


def _loops(part: nn.Module) -> bool:
    """Tell whether a module goes through its experts in a loop that the library replaces nowhere.

    A class that has other products to choose from wraps its forward, and a loop is what it does
    where none is chosen.
    """
    chosen = getattr(getattr(part, "config", None), "_experts_implementation", None)
    if hasattr(type(part).forward, "__wrapped__") and chosen not in (None, "eager"):
        return False
    weights = [getattr(part, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights):
        return False
    return tuple(inspect.signature(part.forward).parameters) == LOOPING


def _even_products(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return [token, hidden], each of a token's experts being the first one."""
    tokens = torch.arange(len(hidden_states), device=hidden_states.device)
    tokens = tokens.repeat_interleave(top_k_index.shape[-1])
    gate, up = functional.linear(hidden_states[tokens], self.gate_up_proj[0]).chunk(2, dim=-1)
    made = functional.linear(self.act_fn(gate) * up, self.down_proj[0])
    made = made * top_k_weights.reshape(-1, 1)
    return torch.zeros_like(hidden_states).index_add(0, tokens, made.to(hidden_states.dtype))
