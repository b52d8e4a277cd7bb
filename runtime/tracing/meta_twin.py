"""A module on torch's meta device, on which operators without data take a quarter of the time.

A fake tensor looks up each operator in Python; on the meta device torch's own kernels do.  But some
operators choose a kernel by device, as attention does, and keep other tensors for it.  So figures
of the twin are believed of layers alone whose operators were traced both ways, and were the same
with the same figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from meshwright.runtime.core.side_effects import deepcopy_module
from meshwright.runtime.tracing.trace import RecordedLayer, Recording, Value
from meshwright.runtime.tracing.tracer import even_routing

Result = TypeVar("Result")


class MetaTwin:
    """A copy of a module without data, and of its batch, on the meta device."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        """`module` has fake tensors, in whose mode the twin is made and used."""
        with _real_mode():
            memo = {
                id(tensor): _on_meta(tensor) for tensor in (*module.parameters(), *module.buffers())
            }
            self.module = deepcopy_module(module, dict(memo))
            self.batch = tree_map(_on_meta, batch)

    def result(
        self,
        trace: Callable[[nn.Module, tuple[Tensor, ...], Any], Result],
        taken: tuple[Tensor, ...],
    ) -> Result | None:
        """Return the trace of this module, with tensors on the meta device like those `taken`.

        None where it does not run there: constants of the user's code are on the CPU.
        """
        try:
            with _real_mode(), even_routing(self.module):
                return trace(self.module, tuple(map(_on_meta, taken)), self.batch)
        except Exception:  # whatever the user's code raises: it is traced otherwise then
            return None


class EqualOperators:
    """Which operators cost on the meta device what they cost without data on the CPU."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._equal: set[Hashable] = set()
        self._unequal: set[Hashable] = set()

    def cover(self, layer: RecordedLayer) -> bool:
        """Return whether all operators of a layer are known to cost the same."""
        operators = self._operators(layer)
        return operators <= self._equal and not operators & self._unequal

    def are_open(self, layer: RecordedLayer) -> bool:
        """Return whether operators of a layer were not compared yet, and none is unequal."""
        return not self.cover(layer) and not self._operators(layer) & self._unequal

    def note(self, layer: RecordedLayer, *, equal: bool) -> None:
        """Note that a layer was traced both ways."""
        (self._equal if equal else self._unequal).update(self._operators(layer))

    def _operators(self, layer: RecordedLayer) -> set[Hashable]:
        values = self._recording.values
        return {
            (
                node.operators,
                *(values[leaf.at].requires_grad for leaf in node.leaves if isinstance(leaf, Value)),
            )
            for node in self._recording.nodes[layer.first : layer.last]
        }


@contextlib.contextmanager
def _real_mode() -> Iterator[None]:
    """Leave the mode in which tensors are fake while this is open."""
    with unset_fake_temporarily():
        yield


def empty_twin(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor of the same layout without data on another device."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
    ).requires_grad_(tensor.requires_grad)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    twin = empty_twin(leaf, "meta")
    return nn.Parameter(twin, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else twin
