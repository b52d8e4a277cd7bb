"""Parameters that read as their local parts: plain tensors where DTensors are stored.

A part is hidden behind its parameter's name in the module's `__dict__` while a forward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright.runtime.core.torch_internals import DTensorSpec, TensorMeta


@overload
def to_local(parameter: Tensor) -> Tensor: ...


@overload
def to_local(parameter: Tensor | None) -> Tensor | None: ...


def to_local(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter's part on this rank; a plain tensor is its own."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def divided(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, shaped: Tensor
) -> DTensor:
    """Return a rank's part of a tensor of this shape, in the same memory.

    Made by hand, since `from_local` would move what lies on the host to the device.
    """
    meta = TensorMeta(shaped.shape, shaped.stride(), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def divided_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a part on this rank as the same kind of tensor as another, in the same memory."""
    if not isinstance(tensor, DTensor):
        return local
    return divided(local, tensor.device_mesh, tensor.placements, shaped=tensor)


def on_local_parts(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward during which the module's parameters read as their local parts."""

    def on_local_parts(*args: Any, **kwargs: Any) -> Any:
        hidden = _hide(module)
        try:
            return forward(*args, **kwargs)
        finally:
            _show(module, hidden)

    return on_local_parts


@contextlib.contextmanager
def local_parts(layer: nn.Module) -> Iterator[None]:
    """Let all parameters of a layer read as their local parts, before a graph asks for them.

    A graph takes plain tensors, and saves none but tensors.
    """
    hidden = [(module, _hide(module)) for module in layer.modules() if module._parameters]
    try:
        yield
    finally:
        for module, names in hidden:
            _show(module, names)


def _hide(module: nn.Module) -> tuple[str, ...]:
    """Hide parameters behind their local parts, in the instance's __dict__; return their names.

    Those that are hidden already stay so.
    """
    local = {
        name: to_local(parameter)
        for name, parameter in module._parameters.items()
        if name not in module.__dict__
    }
    if local:  # a graph may not change what lies outside of what it recomputes
        module.__dict__.update(local)
    return tuple(local)


def _show(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        del module.__dict__[name]


def local_part(module: nn.Module, name: str) -> Tensor | None:
    """Return this rank's part of a parameter."""
    if name in module.__dict__:
        hidden: Tensor | None = module.__dict__[name]
        return hidden
    return to_local(module._parameters.get(name))
