"""Recording: what a module's forward does with a batch, as a list of calls that can be cut.

Units run whole; what happens between units is a list of functions.  Replaying all nodes gives the
module's outputs bit by bit, and any run of them can be a pipeline stage.  Leaves of the batch are
on every rank, so that neither they nor what is made of them alone crosses a cut.

A recording is valid for one set of shapes, one mode (train or eval) and one type of numbers.
meshwright.runtime.tracing.tracer makes them, meshwright.runtime.tracing.replayed_stage runs them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name
from torch.utils._pytree import TreeSpec, tree_leaves
from torch.utils._pytree import tree_unflatten as unflatten

from meshwright.runtime.tracing.repeated_units import replace_block_numbers


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the batch, by its place in the flattened pytree."""

    at: int


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor of the module, by its name: a parameter, a buffer or a plain attribute."""

    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a node made."""

    at: int


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The device on which the stage runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of a unit, or of a function between units."""

    name: str
    """The unit's path, from its second call on with `@2`; or the function, with its place."""
    unit: str | None
    call: Callable[..., Any] | None
    """The function, where there is no unit."""
    leaves: tuple[Any, ...]
    """The flattened (args, kwargs), tensors as references."""
    spec: TreeSpec
    made: tuple[tuple[int, int], ...]
    """(place in the flattened result, value) of each tensor."""
    grad: bool
    """True if autograd was on."""
    draws: bool
    """Random numbers were drawn, torch's or others."""
    changed: frozenset[int]
    """Values that it changes in place, and others in the same memory."""
    changes_held: bool
    """It changes a buffer of the module."""
    where: str
    draws_python: bool = False
    """Python's or numpy's random numbers were drawn."""
    operators: int = 0
    """A hash of the operators that ran, with their arguments and the shapes of tensors; equal in
    one process alone."""
    reads_number: bool = field(default=True, compare=False)
    """Its forward may read the number of the block among its like."""

    def unnumbered_leaves(self, module: nn.Module) -> tuple[Any, ...]:
        """Return the leaves, the same of all blocks that do not read their number."""
        if self.unit is None or self.reads_number or not any(type(at) is int for at in self.leaves):
            return self.leaves
        args, kwargs = self.arguments(lambda leaf: leaf)
        return tuple(
            tree_leaves(replace_block_numbers(module.get_submodule(self.unit), args, kwargs))
        )

    def arguments(self, value: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs, with tensors in place of references."""
        leaves = [value(leaf) if isinstance(leaf, REFERENCES) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs


REFERENCES = (Leaf, ModuleTensor, Value, StageDevice)


@dataclass(frozen=True, slots=True)
class RecordedLayer:
    """The unit of placement of the planner: a unit with parameters, and the functions around it."""

    name: str
    """The unit's path; from its second call on with `@2`."""
    first: int
    last: int
    """Its nodes are first to last, the last one left out."""
    units: tuple[str, ...]
    parameters: tuple[str, ...]
    """Names of all parameters that it reads, also those that other layers read."""
    draws: bool


@dataclass(frozen=True, slots=True)
class Made:
    """Shape, type and need of a gradient of a value."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    size_bytes: int

    def meta(self) -> Tensor:
        """Return it as a tensor without data; contiguous, as it is received."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A forward as nodes in the order in which they ran."""

    nodes: tuple[Node, ...]
    values: Sequence[Made]
    result: tuple[Any, ...]
    result_spec: TreeSpec
    layers: tuple[RecordedLayer, ...]
    derived: frozenset[int]
    """Nodes made of leaves of the batch alone; every stage runs those that it needs."""
    tensors: Mapping[str, str]
    """Shape and type of every parameter and buffer, by name, as text."""
    sized_by_values: frozenset[int] = frozenset()
    """Values whose sizes depend on those of a tensor, and may be others in the next batch."""

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """The node that made each value."""
        return {value: at for at, node in enumerate(self.nodes) for _, value in node.made}

    @functools.cached_property
    def last_read(self) -> dict[int, int]:
        """The last node that reads each value; one behind all nodes if it is returned."""
        last = {v: at for at, node in enumerate(self.nodes) for v in values_of(node.leaves)}
        return last | dict.fromkeys(values_of(self.result), len(self.nodes))

    def live(self, cut: int) -> tuple[int, ...]:
        """Return the values that are made before node `cut` and read by it or behind it.

        Values made of the batch alone are not among them.
        """
        return tuple(
            sorted(
                value
                for value, last in self.last_read.items()
                if self.maker[value] < cut <= last and self.maker[value] not in self.derived
            )
        )

    def crossing_bytes(self, cut: int) -> int:
        """Return the bytes of what crosses a cut."""
        return sum(self.values[value].size_bytes for value in self.live(cut))

    def made_by(self, layer: RecordedLayer) -> set[int]:
        """Return the values that a layer makes."""
        return {value for node in self._own_nodes(layer) for _, value in node.made}

    def read_by(self, layer: RecordedLayer) -> set[int]:
        """Return the values that a layer reads; the last one also what the module returns."""
        read = {value for node in self._own_nodes(layer) for value in values_of(node.leaves)}
        return read | (values_of(self.result) if layer.last == len(self.nodes) else set())

    def output_bytes(self) -> list[int]:
        """[layer] Return the bytes of what each makes for others, or returns."""
        values = []
        for layer in self.layers:
            layer_values = self.made_by(layer)
            handed_on = (
                value for value in layer_values if self.last_read.get(value, -1) >= layer.last
            )
            values.append(sum(self.values[value].size_bytes for value in handed_on))
        return values

    def _own_nodes(self, layer: RecordedLayer) -> list[Node]:
        return [self.nodes[at] for at in range(layer.first, layer.last) if at not in self.derived]

    def sent(self, layer: int) -> tuple[Tensor, ...]:
        """Return meta tensors of what layer number `layer` hands on, if a stage ends with it."""
        return tuple(self.values[at].meta() for at in self.live(self.layers[layer].last))

    def needed_nodes(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return the derived nodes that make these values, in order.

        A derived value that is changed in place has the nodes that change it.
        """
        wanted = {value for value in values if self.maker[value] in self.derived}
        nodes: set[int] = set()
        waiting = list(wanted)
        changers: dict[int, list[int]] = {}
        for at in self.derived:
            for value in self.nodes[at].changed:
                changers.setdefault(value, []).append(at)
        while waiting:
            value = waiting.pop()
            for at in (self.maker[value], *changers.get(value, ())):
                if at not in nodes:
                    nodes.add(at)
                    waiting += values_of(self.nodes[at].leaves)
        return tuple(sorted(nodes))

    @property
    def digest(self) -> str:
        """Digest of the forward's operations and shapes; not of the text of its source."""
        hashed = hashlib.sha256()
        for name, tensor in self.tensors.items():
            hashed.update(f"{name} {tensor}\n".encode())
        for node in self.nodes:
            called = node.unit or called_name(node.call)
            results = [(self.values[v].shape, self.values[v].dtype) for _, v in node.made]
            words = [word_of(leaf) for leaf in node.leaves]
            hashed.update(f"{called} {words} {results} {node.grad}\n".encode())
        hashed.update(f"{[word_of(leaf) for leaf in self.result]} {self.result_spec}".encode())
        return "sha256:" + hashed.hexdigest()


def values_of(leaves: Iterable[Any]) -> set[int]:
    """Return the values that are among some leaves."""
    return {leaf.at for leaf in leaves if isinstance(leaf, Value)}


def called_name(call: Callable[..., Any] | None) -> str:
    """Return the name of a function, the same in every process."""
    named = resolve_name(call) if call is not None else None
    if named is not None:
        return str(named)
    # Not its file, which is another module where it is imported than where it is run.
    return str(getattr(call, "__qualname__", type(call).__name__))


def word_of(leaf: Any) -> str:
    """Return an argument as text without addresses in memory.

    >>> word_of(torch.relu), word_of(torch.ones(2, 3)), word_of(0.5)
    ('torch.relu', 'constant torch.float32 [2, 3]', '0.5')
    """
    if isinstance(leaf, Tensor):
        return f"constant {leaf.dtype} {list(leaf.shape)}"
    if callable(leaf) and not isinstance(leaf, type):
        return called_name(leaf)
    return repr(leaf)
