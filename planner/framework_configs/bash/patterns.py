"""Patterns of bash (`*`, `?`, `[a-z]`) against text, in time that grows with both lengths."""

from __future__ import annotations

import string

Piece = tuple[str, bool]
"""Characters, and whether they are quoted."""
_MOST_CHARACTERS = 2_000


class NoPatternError(ValueError):
    """A pattern that the reader does not follow."""


def matches(pieces: list[Piece], text: str) -> bool:
    """Return True if a pattern matches a whole text."""
    pattern = _tokens(pieces)
    if len(text) > _MOST_CHARACTERS:
        raise NoPatternError(text[:40])
    at = place = 0
    star, marked = -1, 0
    while at < len(text):
        token = pattern[place] if place < len(pattern) else None
        if token == "*":
            star, marked = place, at
            place += 1
        elif token is not None and _takes(token, text[at]):
            at += 1
            place += 1
        elif star >= 0:
            place, marked = star + 1, marked + 1
            at = marked
        else:
            return False
    return all(token == "*" for token in pattern[place:])


def _takes(token: str, char: str) -> bool:
    return token == "?" or (char in token[1:]) == (token[0] == "=")


def trimmed_end(pieces: list[Piece], text: str, *, front: bool, longest: bool) -> str:
    """Return a text without the shortest or longest part of an end that a pattern matches."""
    if len(text) > 400:
        raise NoPatternError(text[:40])
    lengths = range(len(text), -1, -1) if longest else range(len(text) + 1)
    for length in lengths:
        part = text[:length] if front else text[len(text) - length :]
        if matches(pieces, part):
            return text[length:] if front else text[: len(text) - length]
    return text


def text_with_replacement(pieces: list[Piece], text: str, new: str, *, everywhere: bool) -> str:
    """Return a text whose first longest match of a pattern, or each of them, is another text."""
    if len(text) > 200:
        raise NoPatternError(text[:40])
    result, at = "", 0
    while at < len(text):
        lengths = (n for n in range(len(text) - at, 0, -1) if matches(pieces, text[at : at + n]))
        length = next(lengths, 0)
        if length:
            result, at = result + new, at + length
            if not everywhere:
                break
        else:
            result, at = result + text[at], at + 1
    return result + text[at:]


def text_with_new_end(pieces: list[Piece], text: str, new: str, *, front: bool) -> str:
    """Return a text whose longest match of a pattern at an end is another text."""
    if len(text) > 400:
        raise NoPatternError(text[:40])
    for length in range(len(text), -1, -1):
        if matches(pieces, text[:length] if front else text[len(text) - length :]):
            return new + text[length:] if front else text[: len(text) - length] + new
    return text


def _tokens(pieces: list[Piece]) -> list[str]:
    """Return `*`, `?`, and characters that match behind a `=`, those that do not behind a `!`."""
    characters = [(char, quoted) for text, quoted in pieces for char in text]
    tokens: list[str] = []
    at = 0
    while at < len(characters):
        char, quoted = characters[at]
        at += 1
        if quoted or char not in "*?[(\\":
            tokens.append("=" + char)
        elif char in "*?":
            tokens.append(char)
        elif char != "[":
            raise NoPatternError(char)
        else:
            inside, at = _inside_of_brackets(characters, at)
            sign = "=" if inside[0] not in "!^" else "!"
            tokens.append(sign + _set_of(inside if sign == "=" else inside[1:]))
    return tokens


def _inside_of_brackets(characters: list[tuple[str, bool]], at: int) -> tuple[str, int]:
    """Return what stands in `[...]`, and the place behind it."""
    inside = ""
    while at < len(characters):
        char, quoted = characters[at]
        if quoted or char == "\\":
            raise NoPatternError("[")
        opened = inside.count("[:") > inside.count(":]")
        at += 1
        if char == "]" and inside.lstrip("!^") and not opened:
            return inside, at
        inside += char
    raise NoPatternError("[")


_CLASSES = {
    "[:digit:]": string.digits,
    "[:alpha:]": string.ascii_letters,
    "[:alnum:]": string.ascii_letters + string.digits,
    "[:lower:]": string.ascii_lowercase,
    "[:upper:]": string.ascii_uppercase,
    "[:space:]": string.whitespace,
    "[:blank:]": " \t",
    "[:punct:]": string.punctuation,
    "[:xdigit:]": string.hexdigits,
}


def _set_of(text: str) -> str:
    characters, at = "", 0
    while at < len(text):
        name = text[at : text.find(":]", at) + 2] if text.startswith("[:", at) else ""
        if name:
            if name not in _CLASSES:
                raise NoPatternError(text)
            characters += _CLASSES[name]
            at += len(name)
        elif text[at] == "[" and text[at + 1 : at + 2] in (".", "="):
            raise NoPatternError(text)
        elif text[at + 1 : at + 2] == "-" and at + 2 < len(text):
            characters += _range_of(text[at], text[at + 2])
            at += 3
        else:
            characters += text[at]
            at += 1
    return characters


def _range_of(first: str, last: str) -> str:
    for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        if first in kind and last in kind:
            return kind[kind.index(first) : kind.index(last) + 1]
    raise NoPatternError(f"{first}-{last}")
