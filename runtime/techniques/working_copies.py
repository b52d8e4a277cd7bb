"""Mixed precision of parameters that a rank has whole: copies in the type of the computation.

    copies = WorkingCopies(stage, torch.bfloat16)
    with copies.in_use(learns=True):       # modules have copies of the values of now
        loss_of(stage(micro=micro)).backward()
    # Parameters are in fp32 again, with gradients in fp32.

Each pass computes with 16 bits, gradients are added up in fp32, and the optimizer sees fp32
parameters alone.  Between steps the copies have no memory.  No module is wrapped, nor does a unit's
call do anything for it but bring its inputs to the same type, as FSDP's mixed precision does where
ranks divide parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from meshwright.runtime.core.local_parts import divided_like, to_local

Gradients = Literal["once", "added", "collected"]
"""Path of gradients to fp32: `once`, autograd brings each there as it comes; `added`, it adds those
of several passes to zeros in fp32; `collected`, hooks of runtime.parallel.replicas do it."""


@dataclass(frozen=True, slots=True, eq=False)
class _WorkingCopy:
    """One parameter and its copy."""

    master: nn.Parameter
    working: nn.Parameter
    narrow: Tensor
    """This rank's part of the copy."""
    size_bytes: int


class WorkingCopies:
    """The parameters of one stage as its passes compute with them."""

    def __init__(
        self,
        stage: nn.Module,
        dtype: torch.dtype,
        *,
        gradients: Gradients = "once",
        besides: Iterable[nn.Parameter] = (),
        changed: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        """Parameters `besides` stay as they are; `changed` is told of one that a forward changes.

        A forward changes its copy, which is thrown away.
        """
        self._changed, self._adds = changed, gradients == "added"
        copies: dict[nn.Parameter, _WorkingCopy] = {}
        self._places: list[tuple[nn.Module, str, _WorkingCopy]] = []
        left_out = set(besides)
        for module in dict.fromkeys(stage.modules()):
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in left_out or parameter.dtype == dtype:
                    continue
                if parameter.is_floating_point():
                    if parameter not in copies:
                        copies[parameter] = _copy_of(parameter, dtype, gradients)
                    self._places.append((module, name, copies[parameter]))
        self._copies = tuple(copies.values())
        self._by_master = copies
        self._zeros: list[tuple[_WorkingCopy, Tensor, int]] = []
        """Gradient buffers in which gradients are added, with their initial versions."""

        self.stays = False
        """Copies keep their memory between steps, and whoever runs passes gives gradients theirs:
        a graph of a pass reads and writes where it did."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what passes compute with in place of a parameter: where its gradient arises."""
        copy = self._by_master.get(parameter)
        return parameter if copy is None else copy.working

    @contextlib.contextmanager
    def in_use(self, *, learns: bool = False) -> Iterator[None]:
        """Let the stage compute with copies, and hand their gradients to the parameters behind."""
        self.take_up(learns=learns)
        try:
            yield
        finally:
            self.lay_down()

    @torch.no_grad()
    def take_up(self, *, learns: bool = False) -> None:
        """Put copies of the values that parameters have now in their places."""
        self._zeros = []
        for copy in self._copies:
            if not self.stays or not copy.narrow.untyped_storage().nbytes():
                copy.narrow.untyped_storage().resize_(copy.size_bytes)
            grad = copy.master.grad
            adds = self._adds and not self.stays
            if grad is None and learns and adds and copy.master.requires_grad:
                grad = torch.zeros_like(copy.master)
                self._zeros.append((copy, grad, _version(grad)))
            copy.working.grad = grad
        narrow = [copy.narrow for copy in self._copies]
        if narrow:
            torch._foreach_copy_(narrow, [to_local(copy.master.detach()) for copy in self._copies])
        for module, name, copy in self._places:
            _put(module, name, copy.working)
        self._versions = [_version(copy.working) for copy in self._copies]

    def forget_zeros(self) -> None:
        """Leave without a gradient what took no part in a pass."""
        for copy, zeros, version in self._zeros:
            if copy.working.grad is zeros and _version(zeros) == version:
                copy.working.grad = None
        self._zeros = []

    @torch.no_grad()
    def lay_down(self) -> None:
        """Put the parameters back in their places, with the gradients that passes have added."""
        self.forget_zeros()
        for module, name, copy in self._places:
            _put(module, name, copy.master)
        for copy, version in zip(self._copies, self._versions, strict=True):
            master, grad = copy.master, copy.working.grad
            if master.requires_grad and _version(copy.working) != version and self._changed:
                self._changed(master)
            copy.working.grad = None
            if not self.stays:
                copy.narrow.untyped_storage().resize_(0)
            if grad is None or grad is master.grad:
                continue
            if master.grad is None:
                master.grad = grad
            else:  # what the forward has read elsewhere, or another stage of the rank
                master.grad.add_(grad)


def cast_inputs(unit: nn.Module, dtype: torch.dtype) -> None:
    """Bring floating-point inputs of a module to the type that it computes in."""

    def is_wide(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype

    def cast_all(value: Any) -> Any:
        return tree_map_only(Tensor, lambda one: one.to(dtype) if is_wide(one) else one, value)

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not kwargs and all(isinstance(arg, Tensor) and not is_wide(arg) for arg in args):
            return None
        return cast_all(args), cast_all(kwargs)

    unit.register_forward_pre_hook(hook, with_kwargs=True)


def _copy_of(parameter: nn.Parameter, dtype: torch.dtype, gradients: Gradients) -> _WorkingCopy:
    narrow = torch.empty_like(to_local(parameter.detach()), dtype=dtype)
    result = nn.Parameter(divided_like(parameter, narrow), requires_grad=parameter.requires_grad)
    # None lets fp32 be added to, which takes a gradient as it comes.
    result.grad_dtype = parameter.dtype if gradients == "once" else None
    size_bytes = narrow.untyped_storage().nbytes()
    narrow = to_local(result.detach())
    narrow.untyped_storage().resize_(0)
    return _WorkingCopy(parameter, result, narrow, size_bytes)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor's values, or those of its local part, were changed in place."""
    local = tensor._local_tensor._version if isinstance(tensor, DTensor) else 0
    return tensor._version + local


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter as `module.name = parameter` does, where the module's class does more."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, cast(Any, parameter))
