"""Participation: units that FSDP wraps, of which a step may leave parameters out.

A branch that the data choose, experts without tokens, a head that this batch does not count: ranks
then use different parameters.  FSDP would reduce what each rank has, in the order in which its own
backward comes by, and mix gradients of different parameters.  Here

- every parameter has a gradient when its unit is reduced, zeros where it took no part;
- units are gathered and reduced in one order on all ranks, backwards through the forward, also
  where no gradient comes to a unit: a chain of empty nodes goes through all of them.

Where all parameters take part this costs two empty nodes of autograd a unit and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.core.torch_internals import (
    before_reduction,
    begin_backward,
    end_backward,
    in_backward,
    pass_by,
)


class Participation:
    """The parameters of FSDP's units that took part in the backwards of a step."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._took_part: set[int] = set()
        self.changed: dict[int, nn.Parameter] = {}
        """Whole copies that a forward changed in place, by id of their parameters."""

    def watch(self, unit: FSDPModule) -> None:
        """Complete the gradients of a unit whenever it is reduced."""
        before_reduction(unit, self._complete)

    def absent(self) -> set[int]:
        """Return the ids of parameters that took no part since the last time this was asked."""
        absent = self._watched - self._took_part
        self._took_part = set()
        return absent

    def note_change(self, parameter: nn.Parameter) -> None:
        """Remember that a forward has changed a whole copy of a parameter in place."""
        self.changed[id(parameter)] = parameter

    @torch.no_grad()
    def _complete(self, records: Sequence[Any]) -> None:
        """Put zeros in place of gradients that a unit lacks."""
        trained = [
            record
            for record in records
            # A unit that no forward has called yet was never gathered.
            if record.sharded_param.requires_grad and hasattr(record, "_unsharded_param")
        ]
        fresh = [record for record in trained if record.unsharded_accumulated_grad is None]
        for record in trained:
            identity = id(record.sharded_param)
            self._watched.add(identity)
            if record._unsharded_param._version:
                self.note_change(record.sharded_param)
            accumulated = record.unsharded_accumulated_grad is not None
            if accumulated or record._unsharded_param.grad is not None:
                self._took_part.add(identity)
            else:
                record._unsharded_param.grad = torch.zeros_like(record._unsharded_param)
        if len(fresh) < len(trained):  # all in the type in which earlier micro-batches were added
            for record in fresh:
                record.to_accumulated_grad_if_needed()


class BackwardOrder:
    """The order in which backward gathers and reduces the units of one stage.

    `begin` before the first unit of a forward, `close_backward` around what its backward starts
    from.
    Micro-batches may overlap: each forward has a chain of its own.
    """

    def __init__(self, root: FSDPModule, units: Sequence[FSDPModule]) -> None:
        self._root, self._units = root, tuple(units)
        self._chain: Tensor | None = None
        self._done: Counter[tuple[FSDPModule, Callable[[FSDPModule], None]]] = Counter()
        """Number of times that each unit's call began and ended in a forward."""
        for unit in units:
            assert isinstance(unit, nn.Module)
            # Before FSDP's own hook, whose node ends the unit's backward where gradients come by.
            unit.register_forward_pre_hook(self._linking(end_backward, unit), prepend=True)
            unit.register_forward_hook(self._linking(begin_backward, unit))

    def begin(self, device: torch.device) -> None:
        """Begin the chain of a forward."""
        self._done.clear()
        grows = torch.is_grad_enabled() and not in_backward()
        self._chain = torch.zeros((), device=device, requires_grad=True) if grows else None

    def skip_rest(self) -> None:
        """Pass by the units that a failed forward has not been through: others gather them too."""
        for unit in self._units:
            begun, ended = self._done[unit, end_backward], self._done[unit, begin_backward]
            if begun == ended > 0:
                continue
            if not begun:
                self._link(end_backward, unit)
            pass_by(unit, begun=begun > 0)
            self._link(begin_backward, unit)

    def close_backward(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose backward goes through the whole chain, the stage's own first."""
        self._link(begin_backward, self._root)
        chain, self._chain = self._chain, None
        if chain is None or not tensor.requires_grad:
            return tensor
        closed: Tensor = _Close.apply(tensor, chain)
        return closed

    def _linking(self, act: Callable[[FSDPModule], None], unit: FSDPModule):  # type: ignore[no-untyped-def]
        def hook(*_: Any) -> None:
            self._done[unit, act] += 1
            self._link(act, unit)

        return hook

    def _link(self, act: Callable[[FSDPModule], None], unit: FSDPModule) -> None:
        if self._chain is not None and torch.is_grad_enabled() and not in_backward():
            self._chain = _Link.apply(self._chain, act, unit)


class _Link(torch.autograd.Function):
    """Does in backward what FSDP does there."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, act: Callable[[FSDPModule], None], unit: Any) -> Tensor:
        ctx.act, ctx.unit = act, unit
        ctx.set_materialize_grads(False)
        return chain.view_as(chain)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.act(ctx.unit)
        return None, None, None


class _Close(torch.autograd.Function):
    """A tensor, and the end of a chain."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, chain: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
