"""Rows of data files: lines of JSON, and parquet tables through the library datasets.

What a row holds, its keys say: a conversation (`messages`), a `prompt` with its `completion`, or a
`text`.  Rows are read one after another, so that no file must fit in memory.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from planner.errors import DocumentError, LaunchError

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
ENDINGS = JSON_LINES + PARQUET

Row = Mapping[str, Any]
Kind = Literal["text", "conversations"]
"""Text is one stream of tokens that all count; conversations are documents of which some do."""


def rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, each with the place that errors name: a line, or a row's number."""
    if path.suffix.lower() in PARQUET:
        yield from _table(path)
        return
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _parsed(line, number, path)
    except UnicodeDecodeError as error:
        raise DocumentError("", "is not UTF-8 text", file=str(path)) from error


def _parsed(line: str, number: int, path: Path) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DocumentError(f"line {number}", f"is not JSON: {error}", file=str(path)) from None
    if not isinstance(row, dict):
        raise DocumentError(
            f"line {number}", f"holds {line.strip()[:40]!r}, no object of keys", file=str(path)
        )
    return row


def _table(path: Path) -> Iterator[tuple[str, Row]]:
    if importlib.util.find_spec("datasets") is None:
        raise LaunchError(
            f"{path}: reading parquet needs the library datasets; install it with: "
            "pip install 'meshwright[datasets]', or write the rows as lines of JSON (.jsonl)"
        )
    import datasets  # noqa: PLC0415 - optional, and takes seconds to import

    try:
        table = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
        for number, row in enumerate(table):
            yield f"row {number}", row
    except (OSError, ValueError, TypeError) as error:
        raise DocumentError("", f"is no parquet table: {error}", file=str(path)) from error


def kind_of(row: Row, place: str, path: Path) -> Kind:
    """Return what a row is, by its keys."""
    if "messages" in row or ("prompt" in row and "completion" in row):
        return "conversations"
    if "text" in row:
        return "text"
    raise DocumentError(
        place,
        f"has the keys {', '.join(map(str, row))[:80] or 'of nothing'}; rows hold 'messages' "
        "(a list of role and content), 'prompt' with 'completion', or 'text'",
        file=str(path),
    )
