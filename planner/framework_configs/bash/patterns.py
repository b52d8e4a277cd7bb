"""Patterns of bash (`*`, `?`, `[a-z]`) against text, in time that grows with both lengths."""

from __future__ import annotations

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
        elif token is not None and (token == "?" or text[at] in token[1:]):
            at += 1
            place += 1
        elif star >= 0:
            place, marked = star + 1, marked + 1
            at = marked
        else:
            return False
    return all(token == "*" for token in pattern[place:])


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


def _tokens(pieces: list[Piece]) -> list[str]:
    """Return `*`, `?`, and sets of characters behind an `=`."""
    characters = [(char, quoted) for text, quoted in pieces for char in text]
    tokens: list[str] = []
    at = 0
    while at < len(characters):
        char, quoted = characters[at]
        at += 1
        if quoted or char not in "*?[(":
            tokens.append("=" + char)
        elif char in "*?":
            tokens.append(char)
        elif char == "(":
            raise NoPatternError("(")
        else:
            inside = ""
            while at < len(characters) and characters[at][0] != "]":
                inside += characters[at][0]
                at += 1
            at += 1
            if at > len(characters) or not inside or inside[0] in "!^:":
                raise NoPatternError("[")
            tokens.append("=" + _set_of(inside))
    return tokens


def _set_of(text: str) -> str:
    characters, at = "", 0
    while at < len(text):
        if text[at + 1 : at + 2] == "-" and at + 2 < len(text):
            first, last = ord(text[at]), ord(text[at + 2])
            if last - first > 128:
                raise NoPatternError(text)
            characters += "".join(map(chr, range(first, last + 1)))
            at += 3
        else:
            characters += text[at]
            at += 1
    return characters
