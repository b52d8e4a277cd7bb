"""Whole-number arithmetic of bash: `$((...))`, `((...))`, `let`, the operands of `-eq`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Protocol

_TOKEN = re.compile(
    r"\s*(\d+#[0-9A-Za-z@_]+|0[xX][0-9A-Fa-f]+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|[-+*/%&|^]=|"
    r"\+\+|--|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%<>!~?:()&|^=,\[\]])",
    re.A,
)
_WIDEST = 2**63
_ASSIGNING = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<=", ">=", "<", ">"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_MOST_CHARACTERS = 400
_MOST_DEPTH = 20
_CHANGED = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|"
    r"([A-Za-z_]\w*)\s*(\[[^\]]*\]\s*)?(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))",
    re.A,
)


class NoNumberError(ValueError):
    """An expression that has no value here."""


class Variables(Protocol):
    """Variables that an expression reads and changes."""

    def text_of(self, name: str, index: int | None) -> str:
        """Return the text of a variable or an element; NoNumberError where it is not known."""

    def set_number(self, name: str, index: int | None, value: int) -> None:
        """Change a variable or an element."""


def changed_names(text: str) -> list[tuple[str, bool]]:
    """Return the variables that an expression may change, and whether only an element of them.

    >>> changed_names("A <= 3 ? B++ : (C[1] += 2)")
    [('B', False), ('C', True)]
    """
    return [(match[1] or match[2], bool(match[3])) for match in _CHANGED.finditer(text)]


def value_of(text: str, variables: Variables, depth: int = 0) -> int:
    """Return the value of an expression; NoNumberError where it is none that is followed."""
    if len(text) > _MOST_CHARACTERS or depth > _MOST_DEPTH:
        raise NoNumberError(text[:40])
    tokens: list[str] = []
    at = 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise NoNumberError(text)
        tokens.append(match[1])
        at = match.end()
    if not tokens:
        return 0
    reader = _Reader(tokens, variables, depth)
    value = reader.comma_value()
    if reader.at < len(tokens):
        raise NoNumberError(text)
    return value


class _Reader:
    def __init__(self, tokens: list[str], variables: Variables, depth: int) -> None:
        self._tokens, self._variables, self.at, self._depth = tokens, variables, 0, depth
        self._skips = 0

    def _next(self) -> str:
        return self._tokens[self.at] if self.at < len(self._tokens) else ""

    def _expect(self, sign: str) -> None:
        if self._next() != sign:
            raise NoNumberError(sign)
        self.at += 1

    def comma_value(self) -> int:
        """Return the last value of `a, b`."""
        value = self.assignment()
        while self._next() == ",":
            self.at += 1
            value = self.assignment()
        return value

    def assignment(self) -> int:
        """Return the value of `a = b`, or of what binds closer."""
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NoNumberError("nested")
        begin = self.at
        if _is_name(self._next()):
            name, index = self._place()
            sign = self._next()
            if sign in _ASSIGNING:
                self.at += 1
                value = self.assignment()
                if sign != "=":
                    value = self._result(sign[:-1], self._number_of(name, index), value)
                self._assign_place(name, index, value)
                self._depth -= 1
                return value
            self.at = begin
        value = self.choice()
        self._depth -= 1
        return value

    def _place(self) -> tuple[str, int | None]:
        name = self._next()
        self.at += 1
        if self._next() != "[":
            return name, None
        self.at += 1
        index = self.comma_value()
        self._expect("]")
        return name, index

    def _number_of(self, name: str, index: int | None) -> int:
        if self._skips:
            return 0
        text = self._variables.text_of(name, index).strip()
        if not re.fullmatch(r"-?[0-9]*", text):
            return value_of(text, self._variables, self._depth + 1)
        return _number(text.removeprefix("-")) * (-1 if text[:1] == "-" else 1) if text else 0

    def _assign_place(self, name: str, index: int | None, value: int) -> None:
        if not self._skips:
            self._variables.set_number(name, index, value)

    def _result(self, sign: str, a: int, b: int) -> int:
        return 0 if self._skips else _result(sign, a, b)

    def choice(self) -> int:
        """Return the value of `a ? b : c`, or of what binds closer."""
        condition = self._binary(0)
        if self._next() != "?":
            return condition
        self.at += 1
        first = self._if(bool(condition), self.comma_value)
        self._expect(":")
        second = self._if(not condition, self.choice)
        return first if condition else second

    def _if(self, counts: bool, read: Callable[[], int]) -> int:
        """Return a part that has no effect where it does not count."""
        self._skips += not counts
        value = read()
        self._skips -= not counts
        return value

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        left = self._binary(level + 1)
        while self._next() in _BINARY[level]:
            sign = self._next()
            self.at += 1
            counts = not ((sign == "||" and left) or (sign == "&&" and not left))
            right = self._if(counts, functools.partial(self._binary, level + 1))
            left = self._result(sign, left, right)
        return left

    def _power(self) -> int:
        base = self._single()
        if self._next() != "**":
            return base
        self.at += 1
        exponent = self._power()
        if self._skips:
            return 0
        if not 0 <= exponent < 64:
            raise NoNumberError("**")
        return _check_range(base**exponent)

    def _single(self) -> int:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NoNumberError("nested")
        token = self._next()
        self.at += 1
        match token:
            case "":
                raise NoNumberError("nothing")
            case "-" | "+" | "!" | "~":
                result = _SINGLE[token](self._single())
            case "(":
                result = self.comma_value()
                self._expect(")")
            case "++" | "--":
                if not _is_name(self._next()):
                    raise NoNumberError(token)
                name, index = self._place()
                result = _check_range(self._number_of(name, index) + (1 if token == "++" else -1))
                self._assign_place(name, index, result)
            case _ if token[0].isdigit():
                result = _number(token)
            case _ if _is_name(token):
                self.at -= 1
                name, index = self._place()
                result = self._number_of(name, index)
                if self._next() in ("++", "--"):
                    step = 1 if self._next() == "++" else -1
                    self.at += 1
                    self._assign_place(name, index, _check_range(result + step))
            case _:
                raise NoNumberError(token)
        self._depth -= 1
        return result


_SINGLE: dict[str, Callable[[int], int]] = {
    "-": lambda a: -a,
    "+": lambda a: a,
    "!": lambda a: int(not a),
    "~": lambda a: ~a,
}


def _is_name(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"


def _number(token: str) -> int:
    """Return a number as it is written: `12`, `0x1f`, `017`, `2#101`."""
    try:
        if "#" in token:
            base, _, digits = token.partition("#")
            if not 2 <= int(base[:3]) <= 36:
                raise NoNumberError(token)
            return _check_range(int(digits[:70], int(base)))
        if token[:2].lower() == "0x":
            return _check_range(int(token[2:20], 16))
        if token[0] == "0":
            return _check_range(int(token[:30], 8))
        return _check_range(int(token[:20]))
    except ValueError:
        raise NoNumberError(token) from None


def _check_range(value: int) -> int:
    if not -_WIDEST <= value < _WIDEST:
        raise NoNumberError("wide")
    return value


def _result(sign: str, a: int, b: int) -> int:
    if sign in "/%":
        if b == 0:
            raise NoNumberError(sign)
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if sign == "/" else a - b * quotient
    if sign in ("<<", ">>"):
        if not 0 <= b < 63:
            raise NoNumberError(sign)
        return _check_range(a << b if sign == "<<" else a >> b)
    return _check_range(
        {
            "||": lambda: int(bool(a) or bool(b)),
            "&&": lambda: int(bool(a) and bool(b)),
            "|": lambda: a | b,
            "^": lambda: a ^ b,
            "&": lambda: a & b,
            "==": lambda: int(a == b),
            "!=": lambda: int(a != b),
            "<=": lambda: int(a <= b),
            ">=": lambda: int(a >= b),
            "<": lambda: int(a < b),
            ">": lambda: int(a > b),
            "+": lambda: a + b,
            "-": lambda: a - b,
            "*": lambda: a * b,
        }[sign]()
    )
