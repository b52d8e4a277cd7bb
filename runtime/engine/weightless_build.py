"""A script's module for a plan: large ones are built without the data of their weights.

A plan needs shapes of weights, and values of buffers and of small parameters.  The first
MOST_CHECKED random or empty numbers that a function builds are real, so that a module that is tried
whole is what it always is.  Those behind them are on torch's meta device, if the function builds
with them all but weights: what reads a value there raises, and then the module is built for real.
What data it has is dropped before anything is traced.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.runtime.core.side_effects import (
    MOST_CHECKED,
    MOST_COPIED_BYTES,
    deepcopy_module,
    restore_side_effects,
)
from meshwright.runtime.engine.setup import built
from meshwright.runtime.tracing.meta_twin import empty_twin

Build = Callable[[], nn.Module]
_FACTORIES = (torch.empty, torch.rand, torch.randn)
"""Functions of torch whose numbers nothing depends on but first values of weights."""


def built_for_trace(build: Build) -> tuple[nn.Module, Build | None]:
    """Return a module as plans need it, and a function that builds it with data if it has none.

    A module of at most MOST_CHECKED parameters has all of its data.
    """

    def rebuild() -> nn.Module:
        with restore_side_effects(build):
            return built(build, {})

    factories = _BoundedFactories(MOST_CHECKED)
    try:
        with restore_side_effects(build), factories:
            module = built(build, {})
        is_usable = not (factories.are_exceeded and _has_other_meta_tensors(module))
    except Exception:
        if not factories.are_exceeded:
            raise
        is_usable = False
    if not is_usable:  # values behind the bound are read
        module = rebuild()
    if sum(parameter.numel() for parameter in module.parameters()) <= MOST_CHECKED:
        return module, None
    traced = _without_data(module)
    del module
    gc.collect()  # modules that refer to each other wait for it
    return traced, rebuild


class _BoundedFactories(TorchFunctionMode):
    """Gives tensors without data once large ones have more numbers than a bound."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._left = most
        self.are_exceeded = False
        """A tensor was given without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FACTORIES or kwargs.get("device") is not None or "out" in kwargs:
            return func(*args, **kwargs)
        shape = torch.Size(kwargs["size"] if "size" in kwargs else _shape_of(args))
        if math.prod(shape) * torch.get_default_dtype().itemsize > MOST_COPIED_BYTES:
            self._left -= math.prod(shape)
            if self._left < 0:
                self.are_exceeded = True
                kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


def _shape_of(args: tuple[Any, ...]) -> Iterable[int]:
    """Return the sizes that a function of torch is given, as one argument or as several."""
    return args[0] if args and not isinstance(args[0], int) else args


def _has_other_meta_tensors(module: nn.Module) -> bool:
    """Return whether something else than a large parameter has no data."""
    parameters = {id(parameter) for parameter in module.parameters()}
    return any(
        tensor.is_meta and (id(tensor) not in parameters or not _is_large(tensor))
        for part in module.modules()
        for tensor in _tensors_of(part)
    )


def _tensors_of(part: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a module has itself."""
    for table in (part._parameters, part._buffers, vars(part)):
        yield from (value for value in table.values() if isinstance(value, Tensor))


def _without_data(module: nn.Module) -> nn.Module:
    """Return a copy whose large parameters are on the meta device; other tensors are the same."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        twin: Tensor = parameter
        if _is_large(parameter) and not parameter.is_meta:
            twin = nn.Parameter(empty_twin(parameter, "meta"), parameter.requires_grad)
        memo[id(parameter)] = twin
    return deepcopy_module(module, memo)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > MOST_COPIED_BYTES
