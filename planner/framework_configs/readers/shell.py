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
from itertools import pairwise

from meshwright.planner.framework_configs.readers.input_limits import ReadingLimit, expression

_ASSIGNED = re.compile(
    r"^\s*(?:export\s+|local\s+|declare\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL
)
_USED = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?:(?::?[-=])([^{}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ARRAY = re.compile(r"\s*+[\w ]*+\+?=\(")
_DIRECTIVE = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:[=\s]+(\S+))?", re.MULTILINE)
_GAP = re.compile(r"(?:\s+|#[^\n]*)*")
_WORD = re.compile(r"""(?:\\.|'[^']*'|"[^"\\]*(?:\\.[^"\\]*)*"|[^\s'"\\])+""", re.DOTALL)
_PIECE = re.compile(r"""\\(.)|'([^']*)'|"([^"\\]*(?:\\.[^"\\]*)*)\"""", re.DOTALL)
_WIDEST = 2**63
"""Of the numbers that a shell computes with."""


def statements(text: str) -> list[str]:
    """Return the statements of a script: lines with their continuations, arrays and strings."""
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r'"(\$\{[A-Za-z_]\w*\[[@*]\]\})"', r"\1", text)  # each element is a word
    words: list[str] = []
    held: list[str] = []
    scan = _Scan(array=False)
    for line in text.splitlines():
        if not held:
            if line.lstrip().startswith("#"):
                continue
            scan = _Scan(array=_ARRAY.match(line) is not None)
        held.append(line)
        scan.read(line)
        if not scan.open:
            words.append("\n".join(held))
            held = []
    return [*words, "\n".join(held)] if held else words


class _Scan:
    """Whether a quote or an array of a statement is not closed yet, line by line."""

    def __init__(self, *, array: bool) -> None:
        self._quote, self._depth, self._array = "", 0, array

    @property
    def open(self) -> bool:
        """Whether the statement goes on in the next line."""
        return bool(self._quote) or (self._array and self._depth > 0)

    def read(self, line: str) -> None:
        """Read one more line."""
        escaped = False
        for last, char in pairwise(f"\n{line}"):
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif self._quote:
                self._quote = "" if char == self._quote else self._quote
            elif char in "'\"":
                self._quote = char
            elif char == "#" and last.isspace():
                return
            elif self._array:
                self._depth += {"(": 1, ")": -1}.get(char, 0)


def words(text: str) -> list[str]:
    """Return the words of all commands of a script, with its variables put in.

    DocumentError where that is much more than the script itself.
    """
    budget = ReadingLimit("script")
    variables: dict[str, str] = {}
    words: list[str] = []
    for statement in statements(text):
        match = _ASSIGNED.match(statement)
        if match and not _runs(match[3]):
            value = _put_in(match[3].strip(), variables, budget)
            if value.startswith("("):
                value = value[1:].rpartition(")")[0]
                plain = " ".join(map(shlex.quote, _split(value)))
            else:
                plain = " ".join(_split(value)) if value[:1] in "'\"" else value.partition(" #")[0]
            if match[2]:
                before = variables.get(match[1], "")
                budget.spend(len(before))
                plain = f"{before} {plain}".strip()
            variables[match[1]] = plain
        else:
            words += _split(_put_in(statement, variables, budget))
    return words


def _runs(value: str) -> bool:
    """Whether an assignment stands before a command (`OMP_NUM_THREADS=1 torchrun ...`)."""
    parts = value.split(maxsplit=1)
    return value[:1] not in "'\"($" and len(parts) > 1 and not parts[1].startswith("#")


def _split(text: str) -> list[str]:
    """Return words as a shell has them, in one pass; split at spaces where a quote stays open."""
    words: list[str] = []
    at = _GAP.match(text).end()  # type: ignore[union-attr]  # it matches nothing too
    while at < len(text):
        word = _WORD.match(text, at)
        if word is None:
            return text.split()
        words.append(_PIECE.sub(_unquote, word[0]))
        at = _GAP.match(text, word.end()).end()  # type: ignore[union-attr]
    return words


def _unquote(piece: re.Match[str]) -> str:
    if piece[3] is not None:
        return re.sub(r'\\(["\\])', r"\1", piece[3])
    return piece[1] if piece[1] is not None else piece[2]


def _put_in(text: str, variables: dict[str, str], budget: ReadingLimit) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        value = variables.get(name, default if default is not None else match[0])
        budget.spend(len(value))
        return value

    for _ in range(4):
        before = text
        budget.spend(len(text))
        text = _SUM.sub(lambda match: _sum(_USED.sub(value, match[1]), variables, match[0]), text)
        text = _USED.sub(value, text)
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


def _sum(text: str, variables: dict[str, str], otherwise: str) -> str:
    """Return a whole number that is computed in a script, or the text as it stands."""

    def evaluate(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return int(variables[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                result = _OPERATIONS[type(op)](evaluate(left), evaluate(right))
                if abs(result) < _WIDEST:
                    return result
        raise ValueError(text)

    try:
        node = expression(text)
        return otherwise if node is None else str(evaluate(node))
    except (ValueError, KeyError, ZeroDivisionError, RecursionError):
        return otherwise


def flags(words: list[str]) -> dict[str, str | bool | list[str]]:
    """Return flags by name with `-` for `_`: True without a value, a list of several."""
    values: dict[str, list[str]] = {}
    name = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, sign, value = word[2:].partition("=")
            name = name.replace("_", "-")
            values[name] = [value] if sign else []
        elif word in ("&&", "||", ";", "|", "\\") or word.startswith((">", "<", "2>")):
            name = None
        elif name is not None:
            values[name].append(word)
    return {
        name: True if not several else several[0] if len(several) == 1 else several
        for name, several in values.items()
    }


def directives(text: str) -> dict[str, str]:
    """Return what a Slurm script asks of its scheduler, by long names."""
    short = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}
    return {
        short.get(match[1], match[1]).removeprefix("--"): match[2] or ""
        for match in _DIRECTIVE.finditer(text)
    }


def device_count(text: str | None) -> int | None:
    """Return a count of `8`, `gpu:8` or `gpu:h100:8`; None for anything else.

    >>> device_count("gpu:h100:8"), device_count("2-4")
    (8, None)
    """
    last = (text or "").rpartition(":")[2]
    return int(last) if last.isdecimal() and len(last) < 8 else None
