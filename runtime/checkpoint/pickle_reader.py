"""Pickles read as data: what a pickle describes, with nothing imported, made or called.

A pickle is a program that builds objects.  `described` follows the instructions that torch's index
of a checkpoint consists of (protocol 4), takes every class for a name that must be expected, and
every object for that name with its arguments and state.  Any other instruction is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """What a pickle would import."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Object:
    """What a pickle would make by calling something that it names."""

    of: Name
    arguments: tuple[object, ...]
    state: Any = field(default=None)


def described(data: bytes, *, names: Collection[tuple[str, str]]) -> object:
    """Return what a pickle describes; ValueError, IndexError or TypeError if it is another one."""
    steps = _Steps(names)
    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        if name in _LITERALS:
            steps.stack.append(argument)
        elif name in _CONSTANTS:
            steps.stack.append(_CONSTANTS[name])
        elif name in _STEPS:
            _STEPS[name](steps, argument)
        elif name not in _WITHOUT_EFFECT:
            raise ValueError(f"has the pickle instruction {name}, which no index needs")
    (result,) = steps.stack
    return result


class _Steps:
    """The stack of a pickle under way, and what each instruction does to it."""

    def __init__(self, names: Collection[tuple[str, str]]) -> None:
        self.stack: list[Any] = []
        self._memo: list[Any] = []
        self._names = names

    def mark(self, _: object) -> None:
        self.stack.append(_MARK)

    def memoize(self, _: object) -> None:
        self._memo.append(self.stack[-1])

    def get(self, number: Any) -> None:
        self.stack.append(self._memo[number])

    def empty_dict(self, _: object) -> None:
        self.stack.append({})

    def empty_list(self, _: object) -> None:
        self.stack.append([])

    def tuple_of(self, size: int) -> None:
        first = len(self.stack) - size
        if first < 0:
            raise ValueError("takes a tuple from too few values")
        self.stack[first:] = [tuple(self.stack[first:])]

    def tuple_above_mark(self, _: object) -> None:
        self.stack.append(tuple(self._above_mark()))

    def append(self, _: object) -> None:
        value = self.stack.pop()
        self._last(list).append(value)

    def appends(self, _: object) -> None:
        values = self._above_mark()
        self._last(list).extend(values)

    def set_item(self, _: object) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._last(dict)[_key(key)] = value

    def set_items(self, _: object) -> None:
        values = self._above_mark()
        self._last(dict).update(zip(map(_key, values[::2]), values[1::2], strict=True))

    def name(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or (module, name) not in self._names:
            raise ValueError(f"names {module!s:.80}.{name!s:.80}, which no index needs")
        self.stack.append(Name(module, name))

    def call(self, _: object) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise ValueError("makes an object of what is no class")
        self.stack.append(Object(called, arguments))

    def build(self, _: object) -> None:
        state = self.stack.pop()
        self._last(Object).state = state

    def _last(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"fills what is no {kind.__name__.lower()}")
        return self.stack[-1]

    def _above_mark(self) -> list[Any]:
        place = max(i for i, value in enumerate(self.stack) if value is _MARK)
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values


def _key(value: object) -> object:
    """Refuse tuples among others: the hash of one that is nested deeply ends the process."""
    if not isinstance(value, str | Object):
        raise ValueError(f"has a {type(value).__name__} as a key")
    return value


_MARK = object()
_WITHOUT_EFFECT = ("PROTO", "FRAME", "STOP")
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_STEPS: dict[str, Callable[[_Steps, Any], None]] = {
    "MARK": _Steps.mark,
    "MEMOIZE": _Steps.memoize,
    "BINGET": _Steps.get,
    "LONG_BINGET": _Steps.get,
    "EMPTY_DICT": _Steps.empty_dict,
    "EMPTY_LIST": _Steps.empty_list,
    "EMPTY_TUPLE": lambda steps, _: steps.tuple_of(0),
    "TUPLE1": lambda steps, _: steps.tuple_of(1),
    "TUPLE2": lambda steps, _: steps.tuple_of(2),
    "TUPLE3": lambda steps, _: steps.tuple_of(3),
    "TUPLE": _Steps.tuple_above_mark,
    "APPEND": _Steps.append,
    "APPENDS": _Steps.appends,
    "SETITEM": _Steps.set_item,
    "SETITEMS": _Steps.set_items,
    "STACK_GLOBAL": _Steps.name,
    "REDUCE": _Steps.call,
    "NEWOBJ": _Steps.call,
    "BUILD": _Steps.build,
}
