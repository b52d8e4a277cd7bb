"""Whole-number arithmetic of bash: `$((...))`, `((...))`, the operands of `-eq`."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(\d+|[A-Za-z_]\w*|\*\*|<=|>=|==|!=|&&|\|\||<<|>>|[-+*/%<>!~?:()&|^])", re.A
)
_WIDEST = 2**63
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


class NoNumberError(ValueError):
    """An expression that has no value here."""


def value_of(text: str, variable: Callable[[str], str]) -> int:
    """Return the value of an expression; NoNumberError where it is none that is followed.

    >>> value_of("2 * (N + 1)", {"N": "3"}.__getitem__)
    8
    """
    if len(text) > _MOST_CHARACTERS:
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
    reader = _Reader(tokens, variable)
    value = reader.choice()
    if reader.at < len(tokens):
        raise NoNumberError(text)
    return value


class _Reader:
    def __init__(self, tokens: list[str], variable: Callable[[str], str]) -> None:
        self._tokens, self._variable, self.at, self._depth = tokens, variable, 0, 0

    def _next(self) -> str:
        return self._tokens[self.at] if self.at < len(self._tokens) else ""

    def choice(self) -> int:
        """Return the value of `a ? b : c`, or of what binds closer."""
        condition = self._binary(0)
        if self._next() != "?":
            return condition
        self.at += 1
        first = self.choice()
        if self._next() != ":":
            raise NoNumberError("?")
        self.at += 1
        second = self.choice()
        return first if condition else second

    def _binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self._power()
        left = self._binary(level + 1)
        while self._next() in _BINARY[level]:
            sign = self._next()
            self.at += 1
            left = _result(sign, left, self._binary(level + 1))
        return left

    def _power(self) -> int:
        base = self._single()
        if self._next() != "**":
            return base
        self.at += 1
        exponent = self._power()
        if not 0 <= exponent < 64:
            raise NoNumberError("**")
        return _check_range(base**exponent)

    def _single(self) -> int:  # noqa: PLR0912 - a case for each sign
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NoNumberError("nested")
        token = self._next()
        self.at += 1
        match token:
            case "":
                raise NoNumberError("nothing")
            case "-":
                result = -self._single()
            case "+":
                result = self._single()
            case "!":
                result = int(not self._single())
            case "~":
                result = ~self._single()
            case "(":
                result = self.choice()
                if self._next() != ")":
                    raise NoNumberError("(")
                self.at += 1
            case _ if token[0].isdigit():
                if token[0] == "0" and len(token) > 1:
                    raise NoNumberError("octal")
                result = _check_range(int(token[:20]))
            case _ if token[0].isalpha() or token[0] == "_":
                text = self._variable(token).strip()
                if not re.fullmatch(r"-?(0|[1-9]\d{0,18})?", text):
                    raise NoNumberError(token)
                result = int(text or 0)
            case _:
                raise NoNumberError(token)
        self._depth -= 1
        return result


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
