"""Text of others as data, within limits: how much of it, how deep, with how many digits.

Every reader of configurations gets its data here.  Nothing is executed, and no input of a few
bytes takes minutes or gigabytes: what goes beyond a limit is refused in words.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

from meshwright.planner.documents import document
from meshwright.planner.errors import DocumentError
from meshwright.planner.errors.shown import one_line

MOST_CHARACTERS = 250_000
"""Largest number of characters of a configuration; published ones have less than 50,000."""
MOST_STEPS = 2_000_000
"""Largest total number of characters of a script while its variables are expanded."""
MOST_DEPTH = 60
"""Largest depth of nested expressions, sections and lists."""
MOST_DIGITS = 18
"""Largest number of digits of a whole number: counts of bytes and parameters have fewer."""
MOST_SHOWN = 80
"""Largest number of characters of a quoted expression."""


_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w-]){_PART}(?:\.[ \t]*+{_PART}){{{MOST_DEPTH}}}")
"""Names with more dots than a section is deep."""


class ReadingLimit:
    """Steps that reading one configuration may take; DocumentError where they are spent."""

    def __init__(self, of: str, steps: int = MOST_STEPS) -> None:
        self._of, self._steps, self._left = of, steps, steps

    def spend(self, steps: int) -> None:
        """Take a number of steps."""
        self._left -= steps
        if self._left < 0:
            raise DocumentError(
                self._of,
                f"has more than {self._steps:,} characters once it is written out; shorten it to "
                "what is needed",
            )


def check_size(text: str, of: str) -> str:
    """Return a configuration's text if it is no longer than one may be."""
    if len(text) > MOST_CHARACTERS:
        raise DocumentError(of, f"has {len(text):,} characters; give at most {MOST_CHARACTERS:,}")
    return text


def settings(text: str, of: str) -> dict[str, Any]:
    """Return the settings of a YAML or JSON document."""
    return _mapping(document.plain(check_size(text, of)), of)


def json_settings(text: str, of: str) -> dict[str, Any]:
    """Return the settings of a JSON object."""
    try:
        data = json.loads(check_size(text, of))
    except (ValueError, RecursionError) as error:
        raise DocumentError(of, f"is no JSON: {error}") from error
    return _mapping(data, of)


def toml_or_module(text: str, of: str) -> dict[str, Any] | ast.Module:
    """Return the settings of a TOML document, or the tree of a Python module that is not run."""
    if _LONG_KEY.search(check_size(text, of)):  # of which tomllib keeps every beginning
        raise DocumentError(of, f"is nested more than {MOST_DEPTH} deep; write it flatter")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as toml:
        try:
            return module(text, of)
        except DocumentError as error:
            if isinstance(error.__cause__, Exception):
                raise DocumentError(
                    of,
                    f"is neither TOML ({toml}) nor Python; give the file that the framework reads",
                ) from toml
            raise
    except (ValueError, RecursionError) as error:  # of numbers, dates and nesting
        raise DocumentError(of, f"is TOML that cannot be read: {error}") from error
    return _mapping(data, of)


def is_toml_or_module(text: str) -> bool:
    """Tell whether a text is a TOML document or a Python module, which is not run."""
    try:
        toml_or_module(text, "")
    except DocumentError:
        return False
    return True


def module(text: str, of: str) -> ast.Module:
    """Return the tree of a Python module, which is not run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its author's escapes and comparisons
            tree = ast.parse(check_size(text, of))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DocumentError(of, f"is no Python module: {error or 'nested too deeply'}") from error
    _refuse_deep(tree, of)
    return tree


def expression(text: str) -> ast.expr | None:
    """Return the tree of a short expression; None if it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text[: 4 * MOST_SHOWN].strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def literal(node: ast.expr) -> Any:
    """Return the plain value that an expression is; ValueError if it is none."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("is computed") from error
    _refuse_numbers(value, one_line(source(node)))
    return value


def source(node: ast.AST) -> str:
    """Return the start of an expression as text, however long it is."""
    small = sum(1 for _ in islice(ast.walk(node), MOST_SHOWN)) < MOST_SHOWN
    try:
        return ast.unparse(node)[:MOST_SHOWN] if small else f"a long {type(node).__name__}"
    except ValueError:  # a number with more digits than Python writes
        return f"a long {type(node).__name__}"


def dotted_names(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`, and only those after a call or subscript."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return names[::-1]


def _mapping(data: object, of: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise DocumentError(
            of, "is no document of settings; give the file that the framework reads"
        )
    _refuse_numbers(data, of)
    return data


def _refuse_deep(tree: ast.AST, of: str) -> None:
    """Refuse what later walks of a tree, which call themselves, would not end with."""
    level: list[ast.AST] = [tree]
    for _ in range(MOST_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise DocumentError(of, f"is nested more than {MOST_DEPTH} deep; write it flatter")


def _refuse_numbers(data: object, place: str) -> None:
    """Refuse nesting, and whole numbers that no figure has and Python may not write as text."""
    level: list[object] = [data]
    for _ in range(MOST_DEPTH):
        for value in level:
            if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
                raise DocumentError(
                    place,
                    f"has a whole number of more than {MOST_DIGITS} digits; write a smaller one",
                )
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise DocumentError(place, f"is nested more than {MOST_DEPTH} deep; write it flatter")


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
