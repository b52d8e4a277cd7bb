"""Which layers of a recording do the same, so that what one of them costs, all of them cost.

Told by their modules, by what is handed to and from them, and by the operators that their recorded
forward ran, with the shapes of all tensors.  Values of tensors play no part.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor, nn

from meshwright.runtime.tracing.trace import (
    Leaf,
    ModuleTensor,
    Node,
    RecordedLayer,
    Recording,
    StageDevice,
    Value,
    values_of,
    word_of,
)


def plain_attributes(part: nn.Module) -> tuple[tuple[str, int | float | str], ...]:
    """Return the numbers and words that a module has as attributes, by name.

    >>> dict(plain_attributes(nn.LayerNorm(8)))["eps"]
    1e-05
    """
    return tuple(
        sorted(
            (key, value)
            for key, value in vars(part).items()
            if isinstance(value, int | float | str)
            # The number of a block among its like tells nothing of what it does.
            and not key.endswith("_idx")
        )
    )


def identities(module: nn.Module, recording: Recording) -> list[Hashable]:
    """[layer] Return what is equal of layers that do the same, the whole module's outputs apart.

    >>> from meshwright.runtime.tracing.tracer import Recorder
    >>> import torch
    >>> module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    >>> first, second, third, last = identities(module, Recorder(module, torch.ones(2, 4)).first)
    >>> first == second, second == third, third == last
    (False, True, False)
    """
    return [_LayerIdentity(module, recording).of(layer) for layer in recording.layers]


class _LayerIdentity:
    """What is equal of one layer and of others; tensors and units by their order in it."""

    def __init__(self, module: nn.Module, recording: Recording) -> None:
        self._module, self._recording = module, recording
        self._numbers: dict[Any, int] = {}

    def of(self, layer: RecordedLayer) -> Hashable:
        recording = self._recording
        own = [at for at in range(layer.first, layer.last) if at not in recording.derived]
        is_last = layer.last == len(recording.nodes)
        read = {value for at in own for value in values_of(recording.nodes[at].leaves)}
        if is_last:
            read |= values_of(recording.result)
        received = self._values(recording.live(layer.first))
        called = [recording.nodes[at] for at in (*recording.needed(read), *own)]
        calls = tuple(self._call(node) for node in called)
        result = recording.result if is_last else ()
        return received, calls, self._values(recording.live(layer.last)), self._leaves(result)

    def _values(self, values: Iterable[int]) -> Hashable:
        return tuple((self._number(Value(at)), self._recording.values[at]) for at in values)

    def _call(self, node: Node) -> Hashable:
        called = word_of(node.call) if node.unit is None else self._unit(node.unit)
        taken = self._leaves(node.leaves)
        return (
            called,
            taken,
            node.spec,
            tuple((place, self._values((at,))) for place, at in node.made),
            (node.grad, node.draws, node.changes_held),
            frozenset(self._number(Value(at)) for at in node.changed),
            node.operators,
        )

    def _unit(self, path: str) -> Hashable:
        parts = tuple(
            (
                below,
                type(part),
                part.training,
                self._tensors(part._parameters),
                self._tensors(part._buffers),
                plain_attributes(part),
            )
            for below, part in self._module.get_submodule(path).named_modules()
        )
        return self._number(path), parts

    def _tensors(self, held: dict[str, Any]) -> Hashable:
        return tuple((name, self._tensor(one)) for name, one in held.items())

    def _tensor(self, held: Any) -> Hashable:
        if not isinstance(held, Tensor):
            return word_of(held)
        return self._number(id(held)), tuple(held.shape), held.dtype, held.requires_grad

    def _leaves(self, leaves: Iterable[Any]) -> Hashable:
        return tuple(self._leaf(leaf) for leaf in leaves)

    def _leaf(self, leaf: Any) -> Hashable:
        match leaf:
            case Value(at):
                return self._values((at,))
            case ModuleTensor(name):
                path, _, attribute = name.rpartition(".")
                return self._tensor(getattr(self._module.get_submodule(path), attribute))
            case Leaf() | StageDevice():
                return leaf
            case _:
                return type(leaf), word_of(leaf)

    def _number(self, one: Any) -> int:
        return self._numbers.setdefault(one, len(self._numbers))
