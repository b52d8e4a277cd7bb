"""Entries of the catalogue by name, each read when somebody asks for it.

A request names few of them, and to read YAML takes long.  Names and aliases are found in the text,
which is ours: an entry begins with `  name:`, and its aliases stand on one line, in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

ENTRY = re.compile(r"^  ([^\s#]+):\n((?:(?:    .*| *| *#.*)\n)*)", re.MULTILINE)
"""An entry of a file: its name, and its fields as they are written."""
ALIASES = re.compile(r"^ *aliases: \[(.*)\]$", re.MULTILINE)


class Named(Protocol):
    """What has other names."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names."""


V = TypeVar("V")
E = TypeVar("E", bound=Named)


class LazyValues(Mapping[str, V]):
    """Values by name, each made when it is first asked for."""

    def __init__(self, texts: Mapping[str, str], read: Callable[[str, str], V]) -> None:
        """`read` makes a value of its name and text."""
        self.texts, self._read = texts, read
        self._known: dict[str, V] = {}

    def __getitem__(self, name: str) -> V:
        if name not in self._known:
            self._known[name] = self._read(name, self.texts[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self.texts

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)


def with_installed(shipped: LazyValues[E], installed: Mapping[str, E]) -> Mapping[str, E]:
    """Return the entries of the catalogue and of packages, if there are any."""
    return {**shipped, **installed} if installed else shipped


def entry_texts(text: str) -> dict[str, str]:
    r"""Return the text of each entry of a file.

    >>> entry_texts("nodes:\n  box:\n    aliases: [b]\n  # Large ones\n  rack:\n    a: 1\n")
    {'box': '    aliases: [b]\n  # Large ones\n', 'rack': '    a: 1\n'}
    """
    return dict(ENTRY.findall(text))


def aliases_of(entries: Mapping[str, E]) -> dict[str, str]:
    """Return the name that each alias stands for, without reading an entry for it."""
    if not isinstance(entries, LazyValues):
        return {alias: name for name, entry in entries.items() for alias in entry.aliases}
    return {
        alias.strip(" \"'"): name
        for name, text in entries.texts.items()
        for words in ALIASES.findall(text)
        for alias in words.split(",")
    }
