"""`docs/results/exports.md`, of which each script here writes its own sections."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "results" / "exports.md"


KEPT = ("Default plans", "Three steps on CPUs")
"""Sections that others than `run.py` write."""


def write_page(text: str) -> None:
    """Put a page in the place of this one, with the sections of others behind it."""
    parts = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)
    others = [part for part in parts if part.startswith(tuple(f"## {title}" for title in KEPT))]
    PAGE.write_text("\n".join([text, *(part.strip() + "\n" for part in others)]))


def write_section(title: str, text: str) -> None:
    """Put a section into the page, instead of the one with this title, else behind the others."""
    page = PAGE.read_text()
    new = f"## {title}\n\n{text.strip()}\n"
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    if found:
        rest = page[found.end() :]
        page = page[: found.start()] + new + ("\n" + rest if rest else "")
    else:
        page = page.rstrip() + "\n\n" + new
    PAGE.write_text(page)
