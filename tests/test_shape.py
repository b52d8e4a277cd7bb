"""A stranger finds a room: sizes of folders and pages, names that say what they are."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

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
def modules() -> list[tuple[str, ast.Module]]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [(str(file.relative_to(ROOT)), ast.parse(file.read_text())) for file in files]


def is_grammar(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and (word in GRAMMAR or (word.endswith("ed") and len(word) > 4))


def test_a_folder_has_at_most_twenty_files() -> None:
    folders = Counter(
        str(Path(name).parent) for name, _ in modules() if not name.endswith("__init__.py")
    )

    assert {folder: count for folder, count in folders.items() if count > 20} == {}


def test_functions_and_variables_are_named_after_things() -> None:
    functions, variables = [], []
    for name, tree in modules():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    functions += [f"{name}:{node.lineno} {node.name}"] * is_grammar(node.name)
                case ast.arg(arg=word) | ast.Name(id=word, ctx=ast.Store()):
                    variables += [f"{name}:{node.lineno} {word}"] * (word.strip("_") in VARIABLES)

    assert len(functions) <= 60, functions
    assert len(variables) <= 110, variables


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
