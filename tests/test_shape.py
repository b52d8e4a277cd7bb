"""A stranger finds a room: sizes of folders and pages, names that say what they are."""

from __future__ import annotations

import ast
import functools
import symtable
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("planner", "runtime", "profiler", "meshwright")
GRAMMAR = frozenset(
    [
        "of",
        "at",
        "by",
        "in",
        "on",
        "to",
        "for",
        "with",
        "within",
        "without",
        "beside",
        "behind",
        "above",
        "below",
        "over",
        "under",
        "after",
        "before",
        "near",
        "apart",
        "alone",
        "whole",
        "each",
        "every",
        "all",
        "both",
        "most",
        "least",
        "same",
        "other",
        "others",
        "one",
        "own",
        "known",
        "may",
        "must",
        "wants",
        "tell",
        "tells",
        "told",
        "say",
        "says",
        "said",
        "make",
        "makes",
        "made",
        "find",
        "found",
        "give",
        "gives",
        "given",
        "take",
        "taken",
        "hold",
        "holds",
        "held",
        "keep",
        "keeps",
        "kept",
        "ask",
        "asks",
        "asked",
        "let",
        "lets",
        "left",
        "put",
        "go",
        "goes",
        "gone",
        "come",
        "has",
        "had",
        "have",
        "is",
        "are",
        "was",
        "been",
        "begun",
        "done",
        "seen",
        "shown",
        "sent",
        "set",
    ]
)
"""What no function is called: a noun says what it computes, a verb what it does."""
VARIABLES = frozenset(["one", "found", "made", "told", "said", "own", "known"])
"""What no variable is called: it has the name of the thing."""


@functools.cache
def modules() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def is_grammar(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and (word in GRAMMAR or (word.endswith("ed") and len(word) > 4))


def may_have_such_names(table: symtable.SymbolTable) -> bool:
    """Whether a function or a variable may be badly named; symbols take a fifth of a parse."""
    return (
        is_grammar(table.get_name())
        # A private name in a class has the name of the class before it.
        or any(
            {name.strip("_"), name.rpartition("__")[2].strip("_")} & VARIABLES
            for name in table.get_identifiers()
        )
        or any(may_have_such_names(child) for child in table.get_children())
    )


def bad_names(source: str) -> Iterator[tuple[bool, int, str]]:
    """Yield whether it is a function, line and name."""
    if not may_have_such_names(symtable.symtable(source, "source", "exec")):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if is_grammar(node.name):
                yield True, node.lineno, node.name
            case ast.arg(arg=word) | ast.Name(id=word, ctx=ast.Store()):
                if word.strip("_") in VARIABLES:
                    yield False, node.lineno, word


def test_a_folder_has_at_most_twenty_files() -> None:
    folders = Counter(
        str(file.relative_to(ROOT).parent) for file in modules() if file.name != "__init__.py"
    )

    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_functions_and_variables_are_named_after_things() -> None:
    functions, variables = [], []
    for file in modules():
        for is_function, line, name in bad_names(file.read_text()):
            (functions if is_function else variables).append(
                f"{file.relative_to(ROOT)}:{line} {name}"
            )

    assert len(functions) <= 60, functions
    assert len(variables) <= 110, variables


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("class A:\n    def _found(self): pass", 2),
        ("async def named(): pass", 1),
        ("def area(one): pass", 1),
        ("class A:\n    __said = 1", 2),
        ("x = [0 for _own in y]", 1),
        ("if (made := f()): pass", 1),
    ],
)
def test_bad_names_are_seen(source: str, line: int) -> None:
    assert [at for _, at, _ in bad_names(source)] == [line]


def test_the_map_and_decisions_are_short() -> None:
    decisions = {
        page.name: len(page.read_text().split())
        for page in (ROOT / "docs" / "decisions").glob("*.md")
    }
    numbers = sorted(name[:4] for name in decisions)

    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 120
    assert {name: words for name, words in decisions.items() if words > 600} == {}
    assert numbers == sorted(set(numbers)) == [f"{n:04}" for n in range(1, len(numbers) + 1)]
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= 1_200
