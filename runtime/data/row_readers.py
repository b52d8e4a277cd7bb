"""Rows of data files: lines of JSON, and parquet tables through the library datasets.

The keys of a row say what it is: a conversation (`messages`), a `prompt` with its `completion`, or
a `text`.  Rows are read one after another, so that no file must fit in memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from meshwright.planner.documents.document import MAX_BYTES, json_data
from meshwright.planner.errors import DocumentError, LaunchError

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
            for number, line in enumerate(_lines(lines, path), start=1):
                if line.strip():
                    yield f"line {number}", _parse_row(line, number, path)
    except UnicodeDecodeError as error:
        raise DocumentError("", "is not UTF-8 text; save it as UTF-8", file=str(path)) from error


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file; refuse one that is longer than a document may be."""
    number = 1
    while line := file.readline(MAX_BYTES):
        if len(line) == MAX_BYTES:
            raise DocumentError(
                f"line {number}",
                f"has {MAX_BYTES:,} characters or more; a row has fewer: divide its text",
                file=str(path),
            )
        yield line
        number += 1


def _parse_row(line: str, number: int, path: Path) -> Row:
    place = f"line {number}"
    try:
        row = json_data(line)
    except DocumentError as error:
        raise DocumentError(place, error.message, file=str(path)) from None
    if not isinstance(row, dict):
        raise DocumentError(
            place,
            f"is {line.strip()[:40]!r}, no object of keys; write one JSON object a line",
            file=str(path),
        )
    if "\\u" in line and any(map(_has_half_pairs, _texts(row))):
        raise DocumentError(
            place, "has half of a surrogate pair; write characters whole", file=str(path)
        )
    return row


def _texts(value: object) -> Iterator[str]:
    """Yield every text of a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(inner)


def _has_half_pairs(text: str) -> bool:
    """Return whether a text has unpaired surrogates, which no encoding can write."""
    return any("\ud800" <= character <= "\udfff" for character in text)


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
