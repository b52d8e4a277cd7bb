"""Weight gradients put off: a backward in two parts, where a schedule wants them apart.

A Linear whose store is `deferring` makes only the gradient of its input in backward, and leaves
its own weight's for later: the store keeps the input and the gradient of the output.  Unlike
splitting the autograd graph, this runs each backward once, so it is exact and costs nothing more
under recompute, sharding and tensor parallelism.  Gradients of all other parameters (norms, biases,
embeddings) are made with the input's; they are small or cannot wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


class WeightGradients:
    """Weight gradients of one stage that wait for their turn."""

    def __init__(self) -> None:
        self.deferring = False
        self._waiting: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def add(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> None:
        """Keep what the gradient of `weight` will be made of."""
        self._waiting.append((weight, x, grad))

    def taken(self) -> Callable[[], None]:
        """Return a function that makes all gradients kept so far, and keep them no longer."""
        waiting, self._waiting = self._waiting, []

        # Inputs remember how they were made; with gradients on, so would every product of them.
        @torch.no_grad()
        def make() -> None:
            while waiting:
                weight, x, grad = waiting.pop()
                _accumulate(weight, _product(x, grad))

        return make


class DeferredLinear(nn.Linear):
    """A Linear whose weight gradient may wait in a store."""

    store: WeightGradients

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with these parameters, the module's own or its local parts."""
        return _Linear.apply(x, weight, bias, self._parameters["weight"], self.store)


def defer(layer: nn.Module, store: WeightGradients) -> None:
    """Let the weight gradients of a layer's Linears wait in `store`."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = DeferredLinear
            module.store = store


def linear(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return x times a module's weight, of which `weight` is the local part, without its bias."""
    if isinstance(module, DeferredLinear):
        return module.product(x, weight, None)
    return functional.linear(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: nn.Parameter,
        store: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.store = parameter, store
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        own = None
        if wants_weight and ctx.store.deferring:
            ctx.store.add(ctx.parameter, x, grad)
        elif wants_weight:
            own = _product(x, grad)
        return (
            grad @ weight if wants_x else None,
            own,
            grad.flatten(0, -2).sum(0) if wants_bias else None,
            None,
            None,
        )


def _product(x: Tensor, grad: Tensor) -> Tensor:
    """Return a weight's gradient [output feature, input feature]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _accumulate(weight: nn.Parameter, grad: Tensor) -> None:
    """Add to a parameter's gradient as autograd would, whatever kind of tensor it is."""
    if isinstance(weight, DTensor):
        if weight.grad is not None:
            weight.grad.to_local().add_(grad)
            return
        grad = DTensor.from_local(
            grad,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)
