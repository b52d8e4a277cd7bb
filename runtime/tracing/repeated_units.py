"""Units that do what one before them did: their results follow without running them.

A model has tens of like blocks, and a recording needs of each what it gives, not how.  Blocks are
alike where classes, modes, shapes and all attributes are, where they get tensors of the same shapes
and types, and where the first of them changed nothing, drew nothing of Python's own and returned
tensors of its own.  The number of a block among its like (`layer_idx`), an attribute or an
argument, may differ: whoever reads it in the first block makes all of them run.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from meshwright.runtime.core.side_effects import Changes

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)
"""Types whose values are compared; other objects are alike where they are the same one."""
_NUMBER = re.compile(r"_idx$|^(layer|block)_(id|index|num|number)$")
"""Names of attributes that number a block among blocks of its kind."""


def is_block_number(name: str, value: object) -> bool:
    """Return whether an attribute numbers a block among its like.

    >>> [is_block_number(name, 3) for name in ("layer_idx", "layer_id", "num_layers", "block_size")]
    [True, True, False, False]
    """
    return type(value) is int and _NUMBER.search(name) is not None


def block_numbers(module: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """Return the numbers of blocks that parts of a module have as attributes: path, name, value."""
    return tuple(
        (path, name, value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if is_block_number(name, value)
    )


def replace_block_numbers(
    part: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    other: Callable[[int], Any] = lambda _: "number of a block",
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a unit's call with something else for those that number a block."""

    def without_number(name: str, value: Any) -> Any:
        return other(value) if is_block_number(name, value) else value

    names = _positional_names(part) if any(type(value) is int for value in args) else ()
    named = itertools.zip_longest(names[: len(args)], args, fillvalue="")
    return (
        tuple(without_number(name, value) for name, value in named),
        {name: without_number(name, value) for name, value in kwargs.items()},
    )


def _positional_names(part: nn.Module) -> tuple[str, ...]:
    """Return the names of a forward's arguments in order; none where it does not tell them."""
    try:
        parameters = inspect.signature(part.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    )


@dataclass(frozen=True, slots=True)
class UnitRun:
    """Result of a recorded unit, and the effects that its forward had."""

    result: Any
    operators: int
    """A hash of the operators that ran, and the shapes of all that they were given."""
    drew: bool
    """Random numbers were drawn, by torch or by Python."""
    drew_python: bool = False
    changes: bool = False
    """The unit changed its arguments, or sizes of its result depend on values."""
    reads_number: bool = True
    """The unit may have read the number of its block."""


@dataclass(frozen=True, slots=True)
class _RepeatableRun:
    """A run whose results are given again: tensors by their shapes."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    ran: UnitRun

    def made_again(self) -> UnitRun:
        """Return the same run with tensors of its own, without data."""
        leaves = [
            leaf.materialize() if isinstance(leaf, _EmptyTensor) else leaf for leaf in self.leaves
        ]
        return replace(self.ran, result=tree_unflatten(leaves, self.spec))


@dataclass(frozen=True, slots=True)
class _EmptyTensor:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool

    @classmethod
    def like(cls, tensor: Tensor) -> _EmptyTensor:
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def materialize(self) -> Tensor:
        tensor = torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=self.device
        ).requires_grad_(self.needs_grad)
        # What an operator made may be changed in place, unlike a leaf.
        return tensor.clone() if self.needs_grad else tensor


class RepeatedUnits:
    """Runs of units, by what they are and what they were given."""

    def __init__(self, module: nn.Module) -> None:
        """`module` has no data, and is the caller's own copy."""
        self._module = module
        self._repeats: dict[Hashable, _RepeatableRun | None] = {}

    def run(
        self,
        unit: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[[Sequence[Any], Mapping[str, Any]], UnitRun],
    ) -> UnitRun:
        """Return what `run` gives with these arguments, of a like unit that ran before if any."""
        part = self._module.get_submodule(unit)
        leaves, spec = tree_flatten(replace_block_numbers(part, args, kwargs))
        if not all(isinstance(leaf, (FakeTensor, *PLAIN)) for leaf in leaves):
            return run(args, kwargs)
        numbers: dict[Any, int] = {}
        given = tuple(_of_leaf(leaf, numbers) for leaf in leaves)
        key = given, str(spec), torch.is_grad_enabled(), _of_module(part, numbers)
        if key in self._repeats:
            repeat = self._repeats[key]
            return run(args, kwargs) if repeat is None else repeat.made_again()
        before, watched = Changes((part,)), _BlockNumbers(part)
        try:
            with watched.hidden():
                ran = run(*replace_block_numbers(part, args, kwargs, watched.watch))
            watched.note_results(ran.result)
        except Exception:
            watched.were_read = True
            ran = run(args, kwargs)
        ran = replace(ran, reads_number=watched.were_read)
        self._repeats[key] = None
        if not (watched.were_read or before.changes()):
            tensors = (*part.parameters(), *part.buffers(), *leaves)
            self._repeats[key] = _repeat_of(ran, tensors)
        return ran


def reads_block_number(part: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a unit's forward reads the number of its block, or fails."""
    watched = _BlockNumbers(part)
    try:
        with watched.hidden(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            watched.note_results(part(*args, **kwargs))
    except Exception:
        return True
    return watched.were_read


def _repeat_of(ran: UnitRun, others: Iterable[Any]) -> _RepeatableRun | None:
    """Return a run as it may be given again, if it has results of its own and changed nothing."""
    leaves, spec = tree_flatten(ran.result)
    storages = [_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    beside = {_storage(tensor) for tensor in others if isinstance(tensor, Tensor)}
    if (
        ran.changes
        or ran.drew_python
        or len(set(storages)) < len(storages)
        or beside.intersection(storages)
        or not all(isinstance(leaf, (FakeTensor, *PLAIN)) for leaf in leaves)
    ):
        return None
    shapes = (_EmptyTensor.like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return _RepeatableRun(tuple(shapes), spec, replace(ran, result=None))


def _of_leaf(leaf: Any, numbers: dict[Any, int]) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    storage = numbers.setdefault(_storage(leaf), len(numbers))
    return storage, type(leaf), _EmptyTensor.like(leaf), leaf.storage_offset()


def _of_module(module: nn.Module, numbers: dict[Any, int]) -> Hashable:
    return tuple(
        (name, type(part), tuple(_of_attributes(part, numbers)))
        for name, part in module.named_modules()
    )


def _of_attributes(part: nn.Module, numbers: dict[Any, int]) -> Iterator[Hashable]:
    for name, value in vars(part).items():
        if name in ("_parameters", "_buffers"):
            for below, tensor in value.items():
                yield below, _of_value(tensor, numbers)
        elif name == "_modules":
            yield tuple(value)
        elif not is_block_number(name, value):
            yield name, _of_value(value, numbers)


def _of_value(value: Any, numbers: dict[Any, int]) -> Hashable:
    like: Hashable = id(value)  # of other objects, the same one alone
    match value:
        case FakeTensor():
            like = _of_leaf(value, numbers)
        case _ if isinstance(value, PLAIN):
            like = repr(value)
        case list() | tuple():
            like = tuple(_of_value(each, numbers) for each in value)
        case set() | frozenset() if all(isinstance(each, str) for each in value):
            like = frozenset(value)
        case dict():
            like = tuple((repr(key), _of_value(each, numbers)) for key, each in value.items())
        case functools.partial():
            like = tuple(
                _of_value(part, numbers) for part in (value.func, value.args, value.keywords)
            )
        case types.MethodType():
            like = value.__func__, isinstance(value.__self__, nn.Module)
    return type(value), like


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _BlockNumbers:
    """The numbers of blocks inside a unit, which tell when they are read."""

    def __init__(self, module: nn.Module) -> None:
        self.were_read = False
        self._places = [
            (vars(module.get_submodule(path)), name, value)
            for path, name, value in block_numbers(module)
        ]

    def watch(self, value: int) -> _WatchedNumber:
        """Return a number that tells of it when it is read."""
        return _WatchedNumber(value, self)

    def note_results(self, result: Any) -> None:
        """Raise TypeError where a unit hands a number on, which others would read later."""
        if any(isinstance(leaf, _WatchedNumber) for leaf in tree_leaves(result)):
            raise TypeError("a unit returns the number of its block")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Put numbers in their places that tell of it when they are read."""
        for attributes, name, value in self._places:
            attributes[name] = self.watch(value)
        try:
            yield
        finally:
            for attributes, name, value in self._places:
                attributes[name] = value


class _WatchedNumber:
    """A whole number that tells when something is made of it."""

    def __init__(self, value: int, numbers: _BlockNumbers) -> None:
        self._value, self._numbers = value, numbers


def _reading(name: str) -> Callable[..., Any]:
    def read(self: _WatchedNumber, *others: Any) -> Any:
        self._numbers.were_read = True
        plain = (each._value if isinstance(each, _WatchedNumber) else each for each in others)
        return getattr(self._value, name)(*plain)

    return read


def _operations() -> Iterable[str]:
    kept = {"__class__", "__new__", "__init__", "__getattribute__", "__init_subclass__", "__dir__"}
    kept |= {"__subclasshook__", "__setattr__", "__delattr__", "__doc__", "__sizeof__"}
    kept |= {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getstate__"}
    return (name for name in dir(int) if name not in kept and callable(getattr(int, name)))


for _name in _operations():
    setattr(_WatchedNumber, _name, _reading(_name))
