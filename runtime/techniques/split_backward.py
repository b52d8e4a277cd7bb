"""Weight gradients put off: a backward in two parts, where a schedule wants them apart.

A Linear whose store is `deferring` makes only the gradient of its input in backward, and leaves
its own weight's for later: the store keeps the input and the gradient of the output.  Unlike
splitting the autograd graph, this runs each backward once, so it is exact and costs nothing more
under recompute, sharding and tensor parallelism.  Gradients of all other parameters (norms, biases,
embeddings) are made with the input's; they are small or cannot wait.

A compiled block is one graph, which knows neither stores nor the parameters of the layer that it
runs for.  In its backward the operator `meshwright::put_off` stands for the store, and names a
Linear by its place among those of its layer; `acting_for` says which layer that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.runtime.core.torch_internals import is_traced
from meshwright.runtime.techniques.packed_weights import PackedLinear


class Products(Protocol):
    """The three products of a Linear."""

    def output(
        self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return x W^T + b; with a `scale` the weight comes in 8 bits, to be multiplied with it."""

    def of_input(self, grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Return the gradient of x."""

    def of_weight(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of W [output feature, input feature]."""


class Plain:
    """Products in the type of the operands."""

    @staticmethod
    def output(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        return functional.linear(x, weight, bias)

    @staticmethod
    def of_input(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        """Return grad W."""
        return grad @ weight

    @staticmethod
    def of_weight(x: Tensor, grad: Tensor) -> Tensor:
        """Return grad^T x."""
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)


PLAIN = Plain()


class WeightGradients:
    """Weight gradients of one stage that wait for their turn."""

    def __init__(self) -> None:
        self.deferring = False
        self._waiting: list[tuple[nn.Parameter, Tensor, Tensor, Products]] = []

    def add(self, weight: nn.Parameter, x: Tensor, grad: Tensor, products: Products) -> None:
        """Keep what the gradient of `weight` will be made of, and how."""
        self._waiting.append((weight, x, grad, products))

    def take_deferred(self) -> Callable[[], None]:
        """Return a function that makes all deferred gradients, and forget them."""
        waiting, self._waiting = self._waiting, []

        # Inputs remember how they were made; with gradients on, so would every product of them.
        @torch.no_grad()
        def make_gradients() -> None:
            while waiting:
                weight, x, grad, products = waiting.pop()
                _accumulate(weight, products.of_weight(x, grad))

        return make_gradients


class DeferredLinear(nn.Linear):
    """A Linear whose weight gradient may wait in a store, and whose products may be other ones."""

    store: WeightGradients | None
    products: Products
    place: int
    """Among the Linears of its layer."""
    scale: Tensor | None
    """Scale of a weight that comes in 8 bits (runtime/techniques/float8.py)."""
    stand_in: Tensor | None
    """The weight's stand-in in autograd: as large, without memory, of the type of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with these parameters, the module's own or its local parts."""
        weight_or_place: nn.Parameter | int | None = None
        store = None if torch.compiler.is_compiling() else self.store
        if store is not None:  # the parameter itself waits there
            weight_or_place = self._parameters["weight"]
        elif self.store is not None:  # a graph takes no tensor twice
            weight_or_place = self.place
        if self.stand_in is None:
            return _LinearProducts.apply(
                x, weight, None, None, bias, weight_or_place, store, self.products
            )
        eight, as_wide = weight.detach(), self.stand_in
        return _LinearProducts.apply(
            x, eight, as_wide, self.scale, bias, weight_or_place, store, self.products
        )

    def put_off(self, x: Tensor, grad: Tensor) -> None:
        """Keep what the weight's gradient is made of, or make it at once if nothing waits."""
        assert self.store is not None
        weight = self._parameters["weight"]
        assert weight is not None
        if self.store.deferring:
            self.store.add(weight, x, grad, self.products)
        else:
            with torch.no_grad():
                _accumulate(weight, self.products.of_weight(x, grad))


def defer(layer: nn.Module, store: WeightGradients | None, products: Products = PLAIN) -> None:
    """Let the weight gradients of a layer's Linears wait in a store; make their `products`.

    A weight that a hook makes of other parameters (weight_norm) is none of the Linear's own.
    """
    linears = [
        module
        for module in layer.modules()
        if type(module) is nn.Linear and "weight" in module._parameters
    ]
    for place, module in enumerate(linears):
        module.__class__ = DeferredLinear
        deferred = cast(DeferredLinear, module)
        deferred.store = store
        deferred.products = products
        deferred.place = place
        deferred.scale = deferred.stand_in = None


def deferring(layer: nn.Module) -> list[DeferredLinear]:
    """Return the Linears of a layer whose weight gradients may wait, by their place."""
    linears = (module for module in layer.modules() if isinstance(module, DeferredLinear))
    return sorted(
        (deferred for deferred in linears if deferred.store is not None),
        key=lambda deferred: deferred.place,
    )


_acting: list[DeferredLinear] = []
"""The Linears of the layer whose compiled backward runs."""


def act_for(linears: list[DeferredLinear]) -> None:
    """Let the compiled backward that runs next put off the weight gradients of these Linears."""
    _acting[:] = linears


@torch.library.custom_op("meshwright::put_off", mutates_args=())
def _put_off(x: Tensor, grad: Tensor, place: int) -> None:
    """Keep what a weight's gradient is made of: the effect of a graph, which has no output."""
    _acting[place].put_off(x, grad)


@_put_off.register_fake
def _(x: Tensor, grad: Tensor, place: int) -> None:
    if not is_traced():  # it runs, on tensors without data
        _acting[place].put_off(x, grad)


def linear(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return x times a module's weight, of which `weight` is the local part, without its bias."""
    if isinstance(module, DeferredLinear | PackedLinear):
        return module.product(x, weight, None)
    return functional.linear(x, weight)


class _LinearProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stand_in: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        parameter: nn.Parameter | int | None,
        store: WeightGradients | None,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        ctx.parameter, ctx.store, ctx.products = parameter, store, products
        return products.output(x, weight, scale, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wants_x, wants_weight, wants_stand_in, _, wants_bias = ctx.needs_input_grad[:5]
        grad_of_weight = None
        if not (wants_weight or wants_stand_in):
            pass
        elif isinstance(ctx.parameter, int):
            torch.ops.meshwright.put_off(x, grad, ctx.parameter)
        elif ctx.store is not None and ctx.store.deferring:
            ctx.store.add(ctx.parameter, x, grad, ctx.products)
        else:
            grad_of_weight = ctx.products.of_weight(x, grad)
        return (
            ctx.products.of_input(grad, weight, scale) if wants_x else None,
            grad_of_weight if wants_weight else None,
            grad_of_weight if wants_stand_in else None,
            None,
            grad.flatten(0, -2).sum(0) if wants_bias else None,
            None,
            None,
            None,
        )


def _accumulate(weight: nn.Parameter, grad: Tensor) -> None:
    """Add to a parameter's gradient as autograd would, whatever kind of tensor it is."""
    if isinstance(weight, DTensor):
        if isinstance(grad, DTensor):  # where torch's styles run, products are of DTensors
            grad = grad.redistribute(placements=weight.placements).to_local()
        if weight.grad is not None:
            cast(DTensor, weight.grad).to_local().add_(grad)
            return
        grad = divided_like(grad, weight)
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad.add_(grad)


def divided_like(local: Tensor, whole: DTensor) -> DTensor:
    """Return this rank's part of a tensor that is divided as another one is."""
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
