"""What layers cost, traced with fake tensors: no values are computed and no memory is used."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meshwright.planner.documents.model import LayerTrace


def traced_call(
    call: Callable[[], tuple[Tensor, ...]],
    *,
    owned: Sequence[Tensor],
    loss: Callable[..., Tensor] | None = None,
    saving: Callable[[], None] = lambda: None,
) -> tuple[LayerTrace, tuple[Tensor, ...]]:
    """Return what a forward and its backward cost, and its outputs or the loss made of them.

    Call it under a FakeTensorMode.  `owned` are parameters and buffers, which count neither as
    stored nor, their gradients, as transient.

    Stored bytes are what autograd has saved when the forward ends, each storage once.  Transient
    bytes are the larger of two peaks: in forward above what remains after it, in backward above
    what was there before it (the output's gradient included).  `loss` of the outputs belongs to the
    layer, as in measurements; then it is what is returned.  `saving` is called for each tensor
    that autograd saves.
    """
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
    known = {_key(tensor) for tensor in owned}
    flops, forward = FlopCounterMode(display=False), _Allocations()
    with _saved_tensors(saved, saving), flops, forward:
        outputs = call()
        handed_on = {_key(one): one.untyped_storage().nbytes() for one in outputs}
        if loss is not None:
            outputs = (loss(*outputs),)
    # Of those that are there at once, no two storages have one address.
    stored = {_key(one.tensor): one.tensor.untyped_storage().nbytes() for one in saved}
    needing = [one for one in outputs if one.requires_grad]
    backward_transient = _backward_peak(needing, owned) if needing else 0
    figures = LayerTrace(
        forward_flops=float(flops.get_total_flops()),
        stored_bytes=sum(size for key, size in stored.items() if key not in known),
        transient_bytes=max(forward.peak() - forward.remaining(), backward_transient),
        output_bytes=sum(handed_on.values()),
    )
    return figures, outputs


def _backward_peak(outputs: Sequence[Tensor], owned: Sequence[Tensor]) -> int:
    backward = _Allocations()
    with backward:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    peak = backward.peak(without=[tensor.grad for tensor in owned if tensor.grad is not None])
    for tensor in owned:
        tensor.grad = None
    return peak


class _Allocations(TorchDispatchMode):
    """What operators allocated and freed while this mode was on, in order."""

    def __init__(self) -> None:
        super().__init__()
        # Storages by number: addresses come again.
        self._number: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._events: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._on = True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._watch(tensor, fresh=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._watch(tensor, fresh=True)
        return result

    def peak(self, without: Sequence[Tensor] = ()) -> int:
        """Most bytes above the beginning, leaving out the storages of some tensors."""
        left_out = {self._number[tensor.untyped_storage()] for tensor in without}
        sums = itertools.accumulate(n for number, n in self._events if number not in left_out)
        return max((0, *sums))

    def remaining(self) -> int:
        """Bytes at the end above the beginning."""
        return sum(n for _, n in self._events)

    def _watch(self, tensor: Tensor, *, fresh: bool) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._number:
            number = self._number[storage] = next(self._numbers)
            if fresh:
                self._events.append((number, storage.nbytes()))
            weakref.finalize(storage, self._freed, number, storage.nbytes())

    def _freed(self, number: int, size_bytes: int) -> None:
        if self._on:
            self._events.append((number, -size_bytes))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _SavedTensor:
    """A tensor that autograd saves, as long as it does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output has its node, which has this one


@contextmanager
def _saved_tensors(
    saved: weakref.WeakSet[_SavedTensor], saving: Callable[[], None]
) -> Iterator[None]:
    """Note the tensors that autograd saves while this is open."""

    def pack(tensor: Tensor) -> _SavedTensor:
        saving()
        one = _SavedTensor(tensor)
        saved.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        yield
