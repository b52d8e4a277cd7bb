"""Flags of the command that a shell script runs.  The script is read, never run.

Variables, arrays, defaults (`${N:-8}`) and whole-number arithmetic are put in; every line of
branches and loops counts.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable

_ASSIGNED = re.compile(
    r"^\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\[[@*]\])?(?:(?::?[-=])([^{}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:[=\s]+(\S+))?", re.MULTILINE)
MOST_EXPANDED = 200_000
"""Characters of a script with its variables put in."""


def statements(text: str) -> list[str]:
    """Return the statements of a script: lines with their continuations, arrays and strings."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r'"(\$\{[A-Za-z_]\w*\[[@*]\]\})"', r"\1", text)  # each element is a word
    found: list[str] = []
    held = ""
    for line in text.splitlines():
        if not held and line.lstrip().startswith("#"):
            continue
        held = f"{held}\n{line}" if held else line
        if _open(held):
            continue
        found.append(held)
        held = ""
    return [*found, held] if held else found


def _open(text: str) -> bool:
    """Whether a quote or an array of a statement is not closed yet."""
    quote, depth, array, at = "", 0, re.match(r"\s*[\w ]*\+?=\(", text) is not None, 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or text[at - 1].isspace()):
            at = text.find("\n", at)
            if at < 0:
                break
        elif array:
            depth += {"(": 1, ")": -1}.get(char, 0)
        at += 1
    return bool(quote) or (array and depth > 0)


def words(text: str) -> list[str]:
    """Return the words of all commands of a script, with its variables put in."""
    known: dict[str, str] = {}
    found: list[str] = []
    for statement in statements(text):
        match = _ASSIGNED.match(statement)
        if match and not _runs(match[3]):
            value = _put_in(match[3].strip(), known)
            if value.startswith("("):
                value = value[1:].rpartition(")")[0]
                plain = " ".join(map(shlex.quote, _split(value)))
            else:
                plain = " ".join(_split(value)) if value[:1] in "'\"" else value.partition(" #")[0]
            known[match[1]] = f"{known.get(match[1], '')} {plain}".strip() if match[2] else plain
            continue
        found += _split(_put_in(statement, known))
        if sum(map(len, found)) > MOST_EXPANDED:
            break
    return found


def _runs(value: str) -> bool:
    """Whether an assignment stands before a command (`OMP_NUM_THREADS=1 torchrun ...`)."""
    parts = value.split(maxsplit=1)
    return value[:1] not in "'\"($" and len(parts) > 1 and not parts[1].startswith("#")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def _put_in(text: str, known: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return known.get(name, default if default is not None else match[0])[:MOST_EXPANDED]

    for _ in range(4):
        before = text
        text = _SUM.sub(lambda match: _sum(_USED.sub(value, match[1]), known, match[0]), text)
        text = _USED.sub(value, text)[:MOST_EXPANDED]
        if text == before:
            break
    return text


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _sum(text: str, known: dict[str, str], otherwise: str) -> str:
    """Return a whole number that is computed in a script, or the text as it stands."""

    def of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return int(known[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](of(left), of(right))
        raise ValueError(text)

    try:
        return str(of(ast.parse(text.strip(), mode="eval").body))
    except (ValueError, KeyError, SyntaxError, ZeroDivisionError, RecursionError):
        return otherwise


def flags(found: list[str]) -> dict[str, str | bool | list[str]]:
    """Return flags by name with `-` for `_`: True without a value, a list of several."""
    told: dict[str, str | bool | list[str]] = {}
    name = None
    for word in found:
        if re.match(r"--[A-Za-z]", word):
            name, sign, value = word[2:].partition("=")
            name = name.replace("_", "-")
            told[name] = value if sign else True
        elif word in ("&&", "||", ";", "|", "\\") or word.startswith((">", "<", "2>")):
            name = None
        elif name is not None:
            have = told[name]
            if have is True:
                told[name] = word
            else:
                told[name] = [*(have if isinstance(have, list) else [str(have)]), word]
    return told


def directives(text: str) -> dict[str, str]:
    """Return what a Slurm script asks of its scheduler, by long names."""
    short = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
    return {
        short.get(match[1], match[1]).removeprefix("--"): match[2] or ""
        for match in _DIRECTIVE.finditer(text)
    }


def counted(text: str | None) -> int | None:
    """Return a count of `8`, `gpu:8` or `gpu:h100:8`; None for anything else.

    >>> counted("gpu:h100:8"), counted("2-4")
    (8, None)
    """
    last = (text or "").rpartition(":")[2]
    return int(last) if last.isdecimal() and len(last) < 8 else None
