"""Finds parameters that something other than their own module reads.

One forward runs without data.  A parameter is its owner's alone where each function that gets it
is called inside of the owner's forward; another module, or a function between modules, may take
a table as a product's weight, or a weight's norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshwright.runtime.tracing.tracer import Recorder, arguments

_FACTS: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_meta")
)
"""Properties that a packed parameter has too."""


def read_by_others(recorder: Recorder) -> set[str]:
    """Return the names of parameters that are read outside of their owners' forwards."""
    with recorder.without_data(recorder.example) as (module, given):
        reads = _Reads(module)
        args, kwargs = arguments(recorder.inputs(given))
        with reads:
            module(*args, **kwargs)
    return reads.by_others


class _Reads(TorchFunctionMode):
    """Notes each function that is called with a parameter while its owner does not run."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.by_others: set[str] = set()
        self._running: list[nn.Module] = []
        self._owners: dict[int, tuple[str, nn.Module]] = {}
        for path, owner in module.named_modules():
            own = {name: p for name, p in owner._parameters.items() if p is not None}
            for name, parameter in own.items():
                self._owners[id(parameter)] = (f"{path}.{name}" if path else name, owner)
            if own:
                owner.register_forward_pre_hook(self._push_part)
                owner.register_forward_hook(self._pop_part)

    def _push_part(self, part: nn.Module, _: object) -> None:
        self._running.append(part)

    def _pop_part(self, *_: object) -> None:
        self._running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and note which parameters it gets."""
        if func not in _FACTS:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, nn.Parameter):
                    name, owner = self._owners.get(id(leaf), ("", None))
                    if owner is not None and owner not in self._running[-1:]:
                        self.by_others.add(name)
        return func(*args, **(kwargs or {}))
