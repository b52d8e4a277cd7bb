"""Pages and texts of the program use the words of the field; the list of others only grows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_writes import PACKAGES, ROOT

INSTEAD = {
    r"thriftier": "cheaper",
    r"put(s|ting)? ahead": "rank first",
    r"who trains\b": "the framework",
    r"compacted\b": "defragmented by the allocator",
    r"no arithmetic here": "is not planned",
    r"(be|is|are) done without": "removed",
    r"no words for": "does not support",
    r"shared or sent\b": "communicated",
    r"the first one's": "the first candidate's",
    r"keep(s|ing)? (the|a|each|every|these) (deadline|goal|budget)": "meet",
    r"something that is not searched": "a choice that is not searched",
    r"lean(er|est)? (choice|option|bytes)": "minimum-memory choice",
    r"ways out\b": "remedies",
    r"gathers again": "reshards after forward",
    r"a hair\b": "a thin line, or epsilon",
    r"side by side (block|attention)": "parallel residual",
    r"(?<!soft-)capped (logits|scores)": "soft-capped",
    r"birth of": "provenance",
    r"wishes\b": "measurement requests",
    r"by e\+0\d %|\de\+0\d %": "a share above 100 % as a factor",
    r"(?<!`)told\b(?!\.py|`)": "shown, known, distinguished, gets",
    r"[Ss]o many\b": "a number of, or the name of the argument",
    r"held (against|back|to|by|now)\b": "compared with, not reusable, in flight, of a rank",
    r"(sent|gathered) and held\b": "resident",
    r"nobody said\b": "is not known",
    r"behind (the|a|each|that|its|every) (same )?(newest )?(step|micro-batch|save|trial)": "after",
    r"(?<!`)kept\b(?!`| ?[=,:.(\[])": "saved for backward, cached, stored, met (a goal)",
    r"(?<!`)holds\b(?!`)": "has, contains, is valid, wraps; resident (bytes)",
}
"""By pattern, what the field says; CHANGELOG.md says what was, and is not read."""
NAMES = {"told", "held", "own", "each", "low", "least"}
"""What no variable, parameter or field of the search and the solver is called."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield each line of a page, and each text of the program that has several words."""
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if file.name != "CHANGELOG.md" and file.parent.name != "decisions":
            for number, line in enumerate(file.read_text().splitlines(), 1):
                yield f"{file.relative_to(ROOT)}:{number}", line
    for file in [*(ROOT / "planner").rglob("*.yaml"), *(ROOT / "planner").rglob("*.mjs")]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            yield f"{file.relative_to(ROOT)}:{number}", line
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(file.read_text())
            for node in ast.walk(tree):
                said = node.value if isinstance(node, ast.Constant) else None
                if isinstance(said, str) and " " in said:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", said


def found(lines: Iterator[tuple[str, str]]) -> list[str]:
    patterns = list(INSTEAD)
    each = "|".join(f"(?P<p{at}>{pattern})" for at, pattern in enumerate(patterns))
    wanted = re.compile(rf"\b(?:{each})")
    said = []
    for place, text in lines:
        for match in wanted.finditer(" ".join(text.split())):
            pattern = patterns[int(str(match.lastgroup)[1:])]
            said.append(f"{place}: '{match[0]}'; write: {INSTEAD[pattern]}")
    return said


def test_texts_use_the_words_of_the_field() -> None:
    assert found(texts()) == []


@pytest.mark.parametrize(
    "text",
    [
        "15 % against the first and for another would put ahead",
        "who trains, best plan",
        "types that have no\n    arithmetic here yet",
        "compiles for 44.0 s (3.7e+02 % of 1,000 steps)",
        "what it takes where nothing is shared or sent",
        "Return what ranks are told, beside what nobody changed",
        "At most so many, unless all of it is asked for",
        "ranks first if the first one's were 15 % more",
        "deadline kept with probability 0.90",
        "a view of what a parcel holds",
        "What is kept until the backward",
        "all ranks copy their state behind the same step",
        "predictions held against tables of real runs",
    ],
)
def test_a_sentence_of_before_is_found(text: str) -> None:
    assert len(found(iter([("page", text)]))) == 1


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names of variables, parameters and fields, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def test_names_of_the_search_say_what_they_are() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for part in ("search", "solver")
        for file in sorted((ROOT / "planner" / part).rglob("*.py"))
        for line, name in bound_names(ast.parse(file.read_text()))
        if name in NAMES
    ]

    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "held = 1",
        "for own in x: pass",
        "def f(each): pass",
        "self.least = 1",
        "class A:\n low: int",
    ],
)
def test_a_name_that_says_nothing_is_found(text: str) -> None:
    assert any(name in NAMES for _, name in bound_names(ast.parse(text)))
