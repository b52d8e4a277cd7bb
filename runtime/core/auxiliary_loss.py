"""Losses that a module makes inside its forward: router balancing, z-losses, penalties of weights.

    x = add_loss(x, 1e-3 * logits.logsumexp(-1).square().sum())

The value is handed its gradient where backward passes `x`, so it needs no way out of the module:
it may be made on any pipeline stage, and in a unit that is recomputed.  It is a sum, in the units
of the sum that the loss returns: both are divided by the loss's count over the global batch.  With
a count of its own it is a mean over the batch.

    load = batch_sum(chosen.sum(0))          # tokens of each expert, of the whole batch

A balancing loss is a product of the batch's load and probabilities, so that a micro-batch's load
would make another loss.  What is summed over the batch is known after a forward of all
micro-batches without gradients, which a step makes first where a module asks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from meshwright.planner.errors import BatchError
from meshwright.runtime.core.torch_internals import refuse_graph


@dataclass(frozen=True, slots=True)
class InnerLosses:
    """Treatment, by the running step of an engine, of the losses inside its module."""

    note: Callable[[Tensor], None]
    """Takes each value once."""
    coefficient: Tensor | None
    """The gradient of a value: that of the loss's sum.  None in evaluation, without backward."""
    sums: BatchSums | None = None
    """The sums over the batch, if the module asks for them."""


class BatchSums:
    """Sums over a batch, by the place in the forward where they are asked for.

    A place is a unit, or a function between units, and how many it asked for before: a
    recomputation asks at the same places again.
    """

    def __init__(self) -> None:
        self.adding = True
        """Micro-batches are still added."""
        self.loss_count: Tensor | None = None
        """Count of the loss over the batch, once it is known."""
        self._found: dict[tuple[str, int], Tensor] = {}
        self._place, self._asked = "", 0

    def begin_call(self, place: str) -> None:
        """Begin a call of a unit or a function."""
        self._place, self._asked = place, 0

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a value over the batch, or add this micro-batch's to it."""
        key = (self._place, self._asked)
        self._asked += 1
        if not self.adding:
            if key not in self._found:
                raise BatchError(
                    f"batch_sum: {self._place or 'the module'} asks for {key[1] + 1} sums, and for "
                    "fewer in the forward without gradients; ask for the same in each"
                )
            return self._found[key]
        if key in self._found:
            self._found[key] = self._found[key] + value.detach()
        else:
            self._found[key] = value.detach().clone()
        return self._found[key]

    @property
    def places(self) -> int:
        """Number of sums that were requested."""
        return len(self._found)

    def differs(self, other: BatchSums) -> str | None:
        """Return a place whose sum is another one in `other`, to rounding; None if none is."""
        if self._found.keys() != other._found.keys():
            return next(iter(self._found.keys() ^ other._found.keys()))[0]
        for key, value in self._found.items():
            mine, two = value.double(), other._found[key].double()
            if mine.shape != two.shape or not torch.allclose(mine, two, rtol=1e-4, atol=1e-6):
                return key[0]
        return None

    def asked_too(self, other: BatchSums) -> None:
        """Add nothing at the places of another forward, so that all ranks sum the same places."""
        for key, value in other._found.items():
            self._found.setdefault(key, torch.zeros_like(value))

    def finish(self, of_all: Callable[[Tensor], Tensor]) -> None:
        """Add what other ranks have, by `of_all`; no more micro-batches are added."""
        self.adding = False
        if self._found:
            flat = of_all(torch.cat([total.double().flatten() for total in self._found.values()]))
            parts = flat.split([total.numel() for total in self._found.values()])
            self._found = {
                key: part.view(total.shape).to(total.dtype)
                for (key, total), part in zip(self._found.items(), parts, strict=True)
            }


class BuffersBefore:
    """Buffers of a module as they were before a step, which each of its forwards begins with.

    What they become follows from the batch as a whole, and so is the same behind each forward.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        """`names` are those of the buffers."""
        self._places = [
            (module.get_submodule(path)._buffers, key)
            for path, _, key in (name.rpartition(".") for name in names)
        ]
        self._before: list[tuple[Tensor | None, Tensor | None]] = []

    def note(self) -> None:
        """Let the buffers as they are be those before a step."""
        tensors = [table[key] for table, key in self._places]
        self._before = [(x, None if x is None else x.clone()) for x in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers what they had."""
        for (table, key), (tensor, values) in zip(self._places, self._before, strict=True):
            table[key] = tensor
            if tensor is not None and values is not None:
                tensor.copy_(values)


_running: InnerLosses | None = None
_asked = 0
"""Number of requests for a sum over a batch in this process."""
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


def begin(place: str) -> None:
    """Say which unit, or function between units, is called next."""
    if _running is not None and _running.sums is not None:
        _running.sums.begin_call(place)


def times_asked() -> int:
    """Return how often a sum over a batch was asked for so far."""
    return _asked


def batch_sum(value: Tensor) -> Tensor:
    """Return the sum of `value` over the whole batch: all micro-batches, on all ranks.

    It has no gradient: a load of experts, a count of tokens, statistics of a batch.  Each step then
    makes one more forward, without gradients, before the others.  Outside a step of an Engine the
    batch is what the module was given.

    >>> batch_sum(torch.tensor([2, 3]))
    tensor([2, 3])

    Raises BatchError where the module did not ask for it when it ran on the example.
    """
    global _asked  # noqa: PLW0603
    if has_torch_function_variadic(value):
        result: Tensor = handle_torch_function(batch_sum, (value,), value)
        return result
    refuse_graph()
    _asked += 1
    if _running is None:
        return value.detach()
    if _running.sums is None:
        raise BatchError(
            "batch_sum: was not called when the module ran on the example of Engine(batch=...), so "
            "that nothing was summed; call it in every forward"
        )
    return _running.sums.sum(value)


def add_loss(x: Tensor, value: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """Return `x`, and add `value` to the loss of the batch.

    `x` is any tensor on the way to the module's outputs, and what is returned must be used in its
    place.  `value` is one number: the sum over this micro-batch, in the units of the sum that the
    loss returns (a mean per token times the tokens).  With `count`, how many this micro-batch's
    `value` is a sum of, the mean over the batch is added to the mean loss; it is known by one more
    forward, as of `batch_sum`.

    Each is counted once in the reported loss, recomputed or not.  Outside a step of an Engine its
    gradient is 1, which goes with a loss that is a sum too; with `count` that of the mean is 1.

    >>> x = torch.ones(2, requires_grad=True)
    >>> add_loss(x, x.square().sum()).sum().backward()
    >>> x.grad
    tensor([3., 3.])

    Raises BatchError where `value` is more than one number.
    """
    if has_torch_function_variadic(x, value):
        made: Tensor = handle_torch_function(add_loss, (x, value), x, value, count=count)
        return made
    refuse_graph()
    if value.numel() != 1:
        raise BatchError(
            f"add_loss: the value has shape {tuple(value.shape)}; it is one number: add .sum()"
        )
    if count is not None:
        value = value * _share(torch.as_tensor(count, device=value.device))
    if _running is not None and _running.coefficient is None:
        _running.note(value.detach())
    result: Tensor = _AddLoss.apply(x, value)
    return result


def _share(count: Tensor) -> Tensor:
    """Return what turns a sum with a count of its own into one that is divided by the loss's."""
    whole = batch_sum(count).double()
    loss_count = torch.ones_like(whole)
    sums = None if _running is None else _running.sums
    if sums is not None and not sums.adding:
        if sums.loss_count is None:
            raise BatchError(
                "add_loss: count= goes with a loss that is summed over micro-batches, and this "
                "one is of the batch at once; give the value in units of its sum, without count="
            )
        loss_count = sums.loss_count.to(whole)
    return (loss_count / whole).where(whole != 0, 0.0).float()


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
        coefficient = torch.ones_like(ctx.value)
        if _running is not None and _running.coefficient is not None:
            _running.note(ctx.value)
            coefficient = _running.coefficient.to(ctx.value).reshape(ctx.value.shape)
        return grad, coefficient
