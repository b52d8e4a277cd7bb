"""Trials: what runs before training leaves the user's objects and random numbers as they were.

    with untouched(module, loss):            # state outside of a module: classes, globals, closures
        copied(module)(x)                    # the module itself is copied

A copy does not reach what its functions share with the original: attributes of classes, globals
that methods name, variables of closures, caches.  These are put back after a trial, and so are
the random numbers of Python, numpy and torch.  What can be neither copied nor put back is refused.
Not seen: state inside extensions and libraries, open files.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dis
import functools
import itertools
import operator
import random
import sys
import types
import warnings
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from meshwright.planner.errors import RecordError

MOST_OBJECTS = 200_000
"""Objects that are looked at, those nearest to the module first."""
MOST_SURROUNDING = 2_000
"""The same limit where objects are looked at in each step."""
GLOBAL_NAMES = frozenset(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"))
"""Instructions that name a global (`LOAD_NAME` in a class inside a function)."""
MOST_COPIED_BYTES = 1 << 20
"""Largest tensor or array in bytes that is restored; a larger tensor is refused if it changed."""
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "functorch", "meshwright"))
"""Packages whose functions and classes keep nothing of a user's; installed ones are others."""
MOST_CHECKED = 200_000_000
"""Parameters of a module whose forward on the host costs seconds at most."""
ITERATORS = (itertools.count, itertools.cycle, itertools.chain, itertools.islice, enumerate, zip)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList)
"""Classes of Python whose objects have attributes of the user's."""
TABLES = ("_parameters", "_buffers")
"""Attributes of a module whose dicts are copied with the module."""


def deepcopy_module(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module; its tensors may have no data.

    Raises RecordError where something in it cannot be copied.
    """
    memo = {} if memo is None else memo
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, FakeTensor) and id(tensor) not in memo:
            memo[id(tensor)] = _fake_copy(tensor)
    for part in module.modules():  # what a hook makes anew before each forward (weight_norm)
        for value in tree_leaves(list(vars(part).values())):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    for generator in _ReachableObjects((module,)).generators:
        memo[id(generator)] = generator.clone_state()
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise RecordError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and a "
            "copy is tried before it trains; keep what cannot be copied outside the module"
        ) from error
    for part in twin.modules():  # hooks are in dicts of the module
        tables = [vars(part), *(each for each in vars(part).values() if isinstance(each, dict))]
        for table in tables:
            functions = [key for key, value in table.items() if type(value) is types.FunctionType]
            table.update({key: _rebound(table[key], memo) for key in functions})
    return twin


def _fake_copy(tensor: FakeTensor) -> Tensor:
    """Return another tensor or parameter without data.

    It is made by hand where no mode is active: a clone of a fake tensor takes a millisecond.
    """
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    by_hand = type(meta) is Tensor and tensor.layout == torch.strided
    twin: Any = (
        FakeTensor(tensor.fake_mode, meta, tensor.device) if by_hand else tensor.detach().clone()
    )
    if isinstance(tensor, nn.Parameter):
        twin.requires_grad_(tensor.requires_grad)
        twin._is_param = True  # as nn.Parameter does, which would detach it once more
    return twin


def _rebound(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """Return a function whose variables are copies where they were copied: a hook with `self`."""
    cells = []
    for cell in function.__closure__ or ():
        inner = cell.cell_contents if _has_contents(cell) else None
        if type(inner) is types.FunctionType and id(inner) not in memo:
            memo[id(inner)] = inner  # it may name itself
            memo[id(inner)] = _rebound(inner, memo)
        twin = memo.get(id(inner), inner)
        cells.append(cell if twin is inner else types.CellType(twin))
    if all(map(operator.is_, cells, function.__closure__ or ())):
        return function
    twin = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


@contextlib.contextmanager
def restore_side_effects(*roots: Any) -> Iterator[None]:
    """Put random numbers, and what objects and functions refer to, back as they were.

    Parameters and buffers of the first, if it is a module, are left alone: its copy is run.
    Raises RecordError where a tensor too large to be put back was changed in place.
    """
    numbers, seen = RandomNumbers(), _ReachableObjects(roots)
    seen.refuse_generators()
    try:
        yield
    finally:
        numbers.put_back()
        changed = seen.put_back()
    if changed:
        raise RecordError(
            f"{changed}: is changed in place by a trial before training and is too large to be put "
            "back; keep it inside the module, which is copied"
        )


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    torch.manual_seed(seed)
    seed_python(seed)


def seed_python(seed: int) -> None:
    """Seed the random numbers of Python and numpy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


class PythonNumbers:
    """The states of the random numbers of Python and numpy in this process."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def put_back(self) -> None:
        """Draw from here on what would have been drawn."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)

    def drew_as(self, other: PythonNumbers) -> bool:
        """Tell whether Python and numpy stand where they stood in another state."""
        return self.python == other.python and _words(self.numpy) == _words(other.numpy)


class RandomNumbers(PythonNumbers):
    """The states of the random numbers of Python, numpy and torch in this process."""

    def __init__(self) -> None:
        super().__init__()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def put_back(self) -> None:
        """Draw from here on what would have been drawn."""
        super().put_back()
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)

    def drew_torch(self) -> bool:
        """Tell whether random numbers of torch were drawn on the host since."""
        return not torch.equal(self._torch, torch.get_rng_state())


def _words(state: Any) -> Any:
    """Return a state of numpy's random numbers as what can be compared."""
    return state and tuple(
        entry.tobytes() if hasattr(entry, "tobytes") else entry for entry in state
    )


class _ReachableObjects:
    """Objects that some others refer to, with their contents."""

    most = MOST_OBJECTS

    def __init__(self, roots: Iterable[Any]) -> None:
        self.generators: list[torch.Generator] = []
        self._suspended: list[tuple[str, str]] = []
        self._entries: list[tuple[str, Callable[[], Any], Any, Callable[[Any], None]]] = []
        """(name, its contents now, contents then, how to put them back)."""
        self._known: set[int] = set()
        self._kept: list[Any] = []  # ids of objects come again
        roots = list(roots)
        copied_one = roots[0] if roots and isinstance(roots[0], nn.Module) else nn.Module()
        self._copied = {id(part) for part in copied_one.modules()}
        """Modules whose parameters and buffers are those of a copy while a trial runs."""
        waiting = deque((root, "") for root in roots)
        while waiting and len(self._kept) < self.most:
            thing, name = waiting.popleft()
            if id(thing) in self._known or isinstance(thing, _PLAIN):
                continue
            self._known.add(id(thing))
            self._kept.append(thing)
            waiting += self._look(thing, name)

    def refuse_generators(self) -> None:
        """Refuse a suspended function: nobody can bring it back to where it stood."""
        for name, what in self._suspended:
            raise RecordError(
                f"{name}: is a {what}, which a trial before training would advance, and it can be "
                "neither copied nor put back; use a class with __next__, or a list"
            )

    def put_back(self) -> str | None:
        """Put contents back; return the name of what changed and cannot be put back, if any."""
        lost = None
        for name, now, then, put in self._entries:
            changes = now()
            if not _is_same(changes, then):
                if put is _lost:
                    lost = lost or name
                else:
                    put(then)
        return lost

    def changes(self) -> frozenset[str]:
        """Return the names of what has other values now."""
        names = set()
        for name, now, then, _ in self._entries:
            here = now()
            if not _is_same(here, then):
                names |= set(_differing(name, then, here))
        return frozenset(names)

    def _note(
        self, name: str, now: Callable[[], Any], put: Callable[[Any], None], then: Any = None
    ) -> None:
        self._entries.append((name, now, now() if then is None else then, put))

    def _look(  # noqa: PLR0912 - a case for each kind of object
        self, thing: Any, name: str
    ) -> Iterator[tuple[Any, str]]:
        """Note what an object has, and yield what it refers to."""
        match thing:
            case Tensor():
                self._tensor(thing, name)
            case dict():
                self._note(name, lambda: dict(thing), functools.partial(_fill_dict, thing))
                for key, value in list(dict.items(thing)):
                    yield value, f"{name}[{key!r}]" if not name.isidentifier() else f"{name}.{key}"
            case list() | deque():
                self._note(name, lambda: list(thing), functools.partial(_fill_list, thing))
                yield from ((value, f"{name}[{at}]") for at, value in enumerate(list(thing)))
            case set():
                self._note(name, lambda: set(thing), functools.partial(_fill_set, thing))
            case bytearray():
                self._note(
                    name, lambda: bytes(thing), functools.partial(thing.__setitem__, slice(None))
                )
            case tuple() | frozenset():
                yield from ((value, f"{name}[{at}]") for at, value in enumerate(thing))
            case random.Random():
                self._note(name, thing.getstate, thing.setstate)
            case torch.Generator():
                self.generators.append(thing)
                self._note(name, thing.get_state, lambda then: _set_state(thing, then))
            case types.GeneratorType():
                self._suspended.append((name, "generator"))
            case types.FunctionType():
                yield from self._function(thing, name)
            case types.MethodType():
                yield thing.__func__, name
                yield thing.__self__, name
            case functools.partial():
                yield from ((value, name) for value in (thing.func, thing.args, thing.keywords))
            case functools._lru_cache_wrapper():
                self._note(name, thing.cache_info, lambda _: thing.cache_clear())
                yield thing.__wrapped__, name
            case classmethod() | staticmethod():
                yield thing.__func__, name
            case property():
                yield from ((value, name) for value in (thing.fget, thing.fset))
            case type():
                yield from self._class(thing, name)
            case types.ModuleType():
                pass
            case _:
                yield from self._object(thing, name)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        if tensor.numel() * tensor.element_size() > MOST_COPIED_BYTES:
            self._note(name, lambda: tensor._version, _lost)
            return
        self._note(name, lambda: tensor.detach().clone(), lambda then: _copy_into(tensor, then))

    def _function(self, function: types.FunctionType, name: str) -> Iterator[tuple[Any, str]]:
        if _is_library(function.__module__):
            return
        yield function.__dict__, function.__name__
        yield from (
            (value, f"{function.__name__}'s default") for value in function.__defaults__ or ()
        )
        yield function.__kwdefaults__ or {}, f"{function.__name__}'s default"
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if _has_contents(cell):
                yield from self._place(
                    key, functools.partial(getattr, cell, "cell_contents", None), _cell(cell)
                )
        for key in _globals_of(function.__code__):
            if key in function.__globals__:
                yield from self._global(function.__globals__, key, function.__code__)

    def _global(
        self, table: dict[str, Any], key: str, code: types.CodeType
    ) -> Iterator[tuple[Any, str]]:
        value = table[key]
        if isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                for name in _names(code):
                    if name in vars(value) and not isinstance(vars(value)[name], types.ModuleType):
                        yield from self._place(
                            f"{key}.{name}",
                            functools.partial(vars(value).get, name),
                            functools.partial(vars(value).__setitem__, name),
                        )
            return
        yield from self._place(
            key, functools.partial(table.get, key), functools.partial(table.__setitem__, key)
        )

    def _place(
        self, name: str, now: Callable[[], Any], put: Callable[[Any], None]
    ) -> Iterator[tuple[Any, str]]:
        """Note a variable, and yield what it refers to."""
        value = now()
        if isinstance(value, ITERATORS):
            self._iterator(name, value, put)
            return
        self._note(name, lambda: [now()], lambda then: put(then[0]))
        yield value, name

    def _iterator(self, name: str, value: Any, put: Callable[[Any], None]) -> None:
        """Put a copy in an iterator's place: nothing tells whether it went on."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twin = copy.deepcopy(value)
        except Exception:
            self._suspended.append((name, type(value).__name__))
            return
        self._entries.append((name, object, twin, put))

    def _class(self, cls: type, name: str) -> Iterator[tuple[Any, str]]:
        if _is_library(cls.__module__):
            return

        def own_attributes() -> dict[str, Any]:
            return {
                key: value
                for key, value in vars(cls).items()
                if not (key.startswith("__") and key.endswith("__")) and key != "_abc_impl"
            }

        self._note(
            cls.__name__, own_attributes, functools.partial(_fill_class, cls, own_attributes)
        )
        for key, value in own_attributes().items():
            if isinstance(value, ITERATORS):
                self._iterator(f"{cls.__name__}.{key}", value, functools.partial(setattr, cls, key))
            else:
                yield value, f"{cls.__name__}.{key}"
        for key in ("__init__", "__call__", "__getitem__", "__next__", "__iter__"):
            if key in vars(cls):
                yield vars(cls)[key], f"{cls.__name__}.{key}"
        yield from ((base, base.__name__) for base in cls.__bases__)

    def _object(self, thing: Any, name: str) -> Iterator[tuple[Any, str]]:
        if _is_library(type(thing).__module__) and self._numbers(thing, name):
            return
        yield type(thing), type(thing).__name__
        if _is_library(type(thing).__module__) and not isinstance(thing, (nn.Module, *NAMESPACES)):
            return
        attributes = getattr(thing, "__dict__", None)
        if isinstance(attributes, dict):
            self._note(name, lambda: dict(attributes), functools.partial(_fill_dict, attributes))
            yield from self._attributes(thing, attributes, name)
        for key in _slots(type(thing)):
            if hasattr(thing, key):
                yield from self._place(
                    f"{name}.{key}",
                    functools.partial(getattr, thing, key, None),
                    functools.partial(_set_slot, thing, key),
                )

    def _numbers(self, array: Any, name: str) -> bool:
        """Note an array or a generator of numpy; return whether it is one."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        array = array.bit_generator if isinstance(array, numpy.random.Generator) else array
        if isinstance(array, numpy.random.BitGenerator):
            self._note(name, lambda: array.state, functools.partial(setattr, array, "state"))
        elif isinstance(array, numpy.random.RandomState):
            self._note(name, array.get_state, array.set_state)
        elif isinstance(array, numpy.ndarray) and array.nbytes <= MOST_COPIED_BYTES:
            self._note(name, array.copy, functools.partial(_copy_array, array))
        return isinstance(
            array, numpy.ndarray | numpy.random.BitGenerator | numpy.random.RandomState
        )

    def _attributes(
        self, thing: Any, attributes: dict[str, Any], name: str
    ) -> Iterator[tuple[Any, str]]:
        is_module, before = isinstance(thing, nn.Module), f"{name}." if name else ""
        for key, value in list(attributes.items()):
            if is_module and key == "_modules":
                for child, part in value.items():
                    yield part, f"{before}{child}"
            elif isinstance(value, ITERATORS) and not is_module:
                self._iterator(
                    f"{before}{key}", value, functools.partial(attributes.__setitem__, key)
                )
            elif not (id(thing) in self._copied and key in TABLES):
                yield value, f"{before}{key}"


class Changes(_ReachableObjects):
    """The objects that some objects refer to; `changes()` tells which have changed since."""


class Surroundings(_ReachableObjects):
    """The same of what a module has beside its units, cheap enough to be looked at in each step."""

    most = MOST_SURROUNDING

    def __init__(self, module: nn.Module, units: Iterable[nn.Module], *others: Any) -> None:
        """Nothing inside `units` is looked at, and no container of more than `most` entries."""
        self._apart = {id(part) for unit in units for part in unit.modules()}
        super().__init__((module, *others))

    def _look(self, thing: Any, name: str) -> Iterator[tuple[Any, str]]:
        if id(thing) in self._apart:
            return
        if isinstance(thing, list | dict | set | deque | bytearray) and len(thing) > self.most:
            return
        yield from super()._look(thing, name)


_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range,
    types.BuiltinFunctionType, types.CodeType,
)  # fmt: skip


def _lost(then: Any) -> None:
    """Stand for a way to put something back where there is none."""


def _copy_into(target: Tensor, then: Tensor) -> None:
    with torch.no_grad():
        target.detach().copy_(then)


def _set_state(generator: torch.Generator, then: Tensor) -> None:
    generator.set_state(then)


def _copy_array(array: Any, then: Any) -> None:
    array[...] = then


def _fill_dict(target: dict[Any, Any], then: Mapping[Any, Any]) -> None:
    target.clear()
    target.update(then)


def _fill_list(target: Any, then: Sequence[Any]) -> None:
    target.clear()
    target.extend(then)


def _fill_set(target: set[Any], then: set[Any]) -> None:
    target.clear()
    target.update(then)


def _fill_class(
    cls: type, attributes: Callable[[], dict[str, Any]], then: Mapping[str, Any]
) -> None:
    for key in attributes():
        if key not in then:
            delattr(cls, key)
    for key, value in then.items():
        if vars(cls).get(key, cls) is not value:
            setattr(cls, key, value)


def _set_slot(thing: Any, key: str, value: Any) -> None:
    object.__setattr__(thing, key, value)


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (
            key
            for key in ((slots,) if isinstance(slots, str) else slots)
            if key not in ("__dict__", "__weakref__") and not key.startswith("__")
        )


def _has_contents(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _cell(cell: types.CellType) -> Callable[[Any], None]:
    return functools.partial(setattr, cell, "cell_contents")


def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names that a function, and functions inside it, use, attributes too."""
    inner = (
        _names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals that a function, and functions inside it, use.

    A loop's variable `step` is none of them because a forward reads `self.step`.
    """
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in GLOBAL_NAMES
    }
    inner = (
        _globals_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return frozenset(names).union(*inner)


@functools.cache
def _is_library(module: str | None) -> bool:
    package = (module or "builtins").partition(".")[0]
    if package in LIBRARIES:
        return package != "__main__"
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return any(folder in Path(file).parts for folder in ("site-packages", "dist-packages"))


def _is_same(first: Any, other: Any) -> bool:  # noqa: PLR0911 - a case for each kind of contents
    """Tell whether contents are the same objects, or equal numbers."""
    if first is other:
        return True
    if type(first) is not type(other):
        return False
    match first:
        case FakeTensor():
            return False
        case Tensor():
            alike = first.shape == other.shape and first.dtype == other.dtype
            return alike and torch.allclose(first, other, equal_nan=True)
        case dict():
            same = first.keys() == other.keys()
            return same and all(_is_plainly(value, other[key]) for key, value in first.items())
        case list():
            return len(first) == len(other) and all(map(_is_plainly, first, other))
        case _ if hasattr(first, "tobytes"):
            return bool(first.shape == other.shape and first.tobytes() == other.tobytes())
        case _ if isinstance(first, (*_PLAIN, set)):
            return bool(first == other)
        case _:
            return repr(first) == repr(other)


def _is_plainly(first: Any, other: Any) -> bool:
    """Tell whether two entries are the same object, or equal values that cannot change."""
    return first is other or (
        isinstance(first, _PLAIN) and type(first) is type(other) and bool(first == other)
    )


def _is_alike(first: Any, other: Any) -> bool:
    """Tell whether contents are equal, those of containers too: new tensors of the same numbers."""
    if type(first) is type(other) and isinstance(first, list | tuple | dict):
        if isinstance(first, dict):
            pairs = ((value, other.get(key)) for key, value in first.items())
            return first.keys() == other.keys() and all(_is_alike(*pair) for pair in pairs)
        return len(first) == len(other) and all(map(_is_alike, first, other))
    return _is_same(first, other)


def _differing(name: str, then: Any, here: Any) -> Iterator[str]:
    """Yield the names of the entries whose values differ."""
    if not isinstance(then, dict):
        same = isinstance(then, list) and isinstance(here, list) and len(then) == len(here)
        if not (same and all(map(_is_alike, then, here))):
            yield name
        return
    for key in (*then, *(key for key in here if key not in then)):
        if key not in then or key not in here or not _is_alike(then[key], here[key]):
            yield f"{name}.{key}" if name else str(key)
