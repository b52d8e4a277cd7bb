"""Losses that a module makes inside its forward: router balancing, z-losses, penalties of weights.

    x = add_loss(x, 1e-3 * logits.logsumexp(-1).square().sum())

The value is handed its gradient where backward passes `x`, so it needs no way out of the module:
it may be made on any pipeline stage, and in a unit that is recomputed.  It is a sum, in the units
of the sum that the loss returns: both are divided by the loss's count over the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from planner.errors import BatchError


@dataclass(frozen=True, slots=True)
class InnerLosses:
    """What the running step of an engine does with the losses inside its module."""

    note: Callable[[Tensor], None]
    """Takes each value once."""
    coefficient: Tensor | None
    """The gradient of a value: that of the loss's sum.  None in evaluation, without backward."""


_running: InnerLosses | None = None
# Not of a thread: backward on a GPU runs in threads of autograd's own.


@contextlib.contextmanager
def running(losses: InnerLosses | None) -> Iterator[None]:
    """Let the losses inside a module be those of a step while this is open."""
    global _running  # noqa: PLW0603
    before, _running = _running, losses
    try:
        yield
    finally:
        _running = before


def add_loss(x: Tensor, value: Tensor) -> Tensor:
    """Return `x`, and add `value` to the loss of the batch.

    `x` is any tensor on the way to the module's outputs, and what is returned must be used in its
    place.  `value` is one number: the sum over this micro-batch, in the units of the sum that the
    loss returns (a mean per token times the tokens).  Each is counted once in the reported loss,
    recomputed or not.  Outside a step of an Engine its gradient is 1, which goes with a loss that
    is a sum too.

    >>> x = torch.ones(2, requires_grad=True)
    >>> add_loss(x, x.square().sum()).sum().backward()
    >>> x.grad
    tensor([3., 3.])

    Raises BatchError where `value` is more than one number.
    """
    if has_torch_function_variadic(x, value):
        made: Tensor = handle_torch_function(add_loss, (x, value), x, value)
        return made
    if value.numel() != 1:
        raise BatchError(
            f"add_loss: the value has shape {tuple(value.shape)}; it is one number: add .sum()"
        )
    if _running is not None and _running.coefficient is None:
        _running.note(value.detach())
    result: Tensor = _AddLoss.apply(x, value)
    return result


class _AddLoss(torch.autograd.Function):
    """The identity of `x`, whose backward is also where the backward of `value` begins.

    Values are noted there: a forward may be made twice, and its backward never is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.value = value.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.ones_like(ctx.value)
        if _running is not None and _running.coefficient is not None:
            _running.note(ctx.value)
            own = _running.coefficient.to(ctx.value).reshape(ctx.value.shape)
        return grad, own
