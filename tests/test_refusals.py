"""Every refusal says what to do, or what would be right: none ends after what is wrong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from meshwright.cli.console import VERBS
from tests.test_writes import PACKAGES, ROOT

ERRORS = ("MeshwrightError", "DocumentError", "NoPlanFits", "LaunchError", "PlanError")
ERRORS += ("RecordError", "BatchError", "OptimizerError", "ValueError")
RIGHT = re.compile(
    rf"[;:,.] (?:or )?(?:{'|'.join(VERBS)})\b|; |[.] [A-Z]|\bmust\b|\bneeds? all of\b|\bknown\b",
    re.IGNORECASE,
)
"""A remedy, or after what is wrong what would be right."""
DOCUMENTS = ("planner/documents/", "planner/whatif/study.py")
"""Where a ValueError is a refusal: pydantic makes a DocumentError of it."""
ADDED_LATER = {
    "is damaged: its checksum is not that of what was written": "checkpoint.refusal",
    "interrupted before the first step": "the user did that",
    "no plan takes less than {} s": "a search below a bound, whose caller goes on",
    "no plan fits": "a search below a bound, whose caller goes on",
}
"""By text, where the rest of it comes from."""
REASONS = "planner/calibration/tables/"
"""Whose errors say why a row of a table is skipped: they are counted, and nobody acts on one."""


def refusals() -> Iterator[tuple[str, str]]:
    """Yield place and text of each refusal that is written where it is raised."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            place = str(file.relative_to(ROOT))
            source = file.read_text()
            if not place.startswith(REASONS) and ("Error(" in source or "Fits(" in source):
                for line, text in raised(source, documents=place.startswith(DOCUMENTS)):
                    yield f"{place}:{line}", text


def raised(source: str, *, documents: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            name = node.func.id
            if name in ERRORS and (documents or name != "ValueError"):
                yield node.lineno, _text(node.args[-1])


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(_text(value) for value in node.values)
        case _:
            return "{}"


def says_nothing_to_do(text: str) -> bool:
    words = re.sub(r"\{\}", " ", text).split()
    relayed = text.endswith("{}") or len(words) < 2
    return not relayed and text not in ADDED_LATER and RIGHT.search(text) is None


def test_every_refusal_says_what_to_do() -> None:
    silent = [f"{place}: {text}" for place, text in refusals() if says_nothing_to_do(text)]

    assert silent == []


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ('f"layers are {count}: more than a model has"', True),
        ('"has no text to train on"', True),
        ('"has no text to train on; " "save it as UTF-8"', False),
        ('f"is {value}; a sample has 1 token or more"', False),
        ('f"{file}: {reason}"', False),
    ],
)
def test_a_rule_alone_is_found(text: str, silent: bool) -> None:
    source = f"raise DocumentError('layers', {text}, file=file)"
    ((_, said),) = raised(source, documents=False)

    assert says_nothing_to_do(said) is silent
