"""Values that name others, as OmegaConf writes them: `${trainer.devices}`, `${multiply:${a},2}`.

A value that nothing here gives (an environment variable, a resolver that is not known) stays as it
is written, so that its reader says so where it needs it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.planner.framework_configs.bash.interpreter import ScriptEnvironment

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MOST_STEPS = 20
"""Values that one value may name, one behind the other."""
_LONGEST = 400
"""Characters of a value that is resolved."""
Number = int | float


def _whole_quotient(a: Number, b: Number) -> Number:
    return a // b


_RESOLVERS: dict[str, Callable[[Number, Number], Number]] = {
    "multiply": operator.mul,
    "mul": operator.mul,
    "add": operator.add,
    "sum": operator.add,
    "subtract": operator.sub,
    "sub": operator.sub,
    "divide": operator.truediv,
    "div": operator.truediv,
    "int_div": _whole_quotient,
    "floor_div": _whole_quotient,
}


def resolve(
    settings: dict[str, Any], surroundings: ScriptEnvironment | None = None
) -> dict[str, Any]:
    """Return settings whose values are those that they name.

    >>> resolve({"trainer": {"devices": 8}, "batch": "${multiply:${trainer.devices}, 4}"})["batch"]
    32
    >>> resolve({"model": {"a": 1, "b": "${.a}", "c": "${oc.env:C,7}", "d": "${x}"}})["model"]
    {'a': 1, 'b': 1, 'c': 7, 'd': '${x}'}
    """
    values = surroundings.values if surroundings is not None else {}
    result = _resolved_part(settings, (), settings, values)
    assert isinstance(result, dict)
    return result


def _resolved_part(
    part: Any, path: tuple[str, ...], root: Mapping[str, Any], values: Mapping[str, str]
) -> Any:
    if isinstance(part, dict):
        return {
            key: _resolved_part(value, (*path, str(key)), root, values)
            for key, value in part.items()
        }
    if isinstance(part, list):
        return [_resolved_part(value, path, root, values) for value in part]
    if isinstance(part, str) and "${" in part:
        return _resolved_text(part, path, root, values)
    return part


def _resolved_text(
    text: str, path: tuple[str, ...], root: Mapping[str, Any], values: Mapping[str, str]
) -> Any:
    """Return what a text names, or itself."""
    now = text
    for _ in range(_MOST_STEPS):
        match = _INNERMOST.search(now) if len(now) <= _LONGEST else None
        if match is None:
            return now if "${" not in now else text
        value = _value_of(match[1], path, root, values)
        if value is None:
            return text
        if match[0] == now:
            if not (isinstance(value, str) and "${" in value):
                return value
            now = value
        else:
            now = now[: match.start()] + str(value) + now[match.end() :]
    return text


def _value_of(
    name: str, path: tuple[str, ...], root: Mapping[str, Any], values: Mapping[str, str]
) -> Any:
    """Return the value of what stands in the braces; None if nothing gives it."""
    resolver, colon, words = name.partition(":")
    arguments = [word.strip() for word in words.split(",")]
    if resolver == "oc.env":
        given = values.get(arguments[0])
        if given is None and len(arguments) > 1:
            given = arguments[1].strip("'\"")
        return None if given is None else _plain(given)
    if colon:
        return _result(resolver, [_plain(word) for word in arguments])
    dots = len(name) - len(name.lstrip("."))
    keys = [key for key in re.split(r"[.\[\]]+", name.strip(".")) if key]
    value: Any = root
    for key in (*(path[:-dots] if dots else ()), *keys):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value if isinstance(value, str | int | float) and value != "???" else None


def _result(resolver: str, numbers: list[Any]) -> Number | None:
    compute = _RESOLVERS.get(resolver)
    if compute is None or len(numbers) < 2:
        return None
    if not all(type(number) in (int, float) for number in numbers):
        return None
    result: Number = numbers[0]
    for number in numbers[1:]:
        if compute in (operator.truediv, _whole_quotient) and number == 0:
            return None
        result = compute(result, number)
    return int(result) if isinstance(result, float) and result.is_integer() else result


def _plain(text: str) -> Any:
    """Return a number that is written as one, and another text as it is."""
    if re.fullmatch(r"-?\d{1,15}", text):
        return int(text)
    if re.fullmatch(r"-?\d{1,15}\.\d{1,15}", text):
        return float(text)
    return {"true": True, "false": False}.get(text.lower(), text)
