"""Streams of commands: results on stdout, progress bars and messages on stderr."""

from __future__ import annotations

import re
import sys
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshwright.planner.errors.shown import lines, sentence
from meshwright.planner.report.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.planner.search.answer import Progress as Report


VERBS = (
    *("add", "allow", "ask", "build", "call", "change", "choose", "compare", "compute", "convert"),
    *("delete", "describe", "divide", "end", "export", "free", "give", "hand", "hold", "import"),
    *("install", "keep", "launch", "leave", "let", "list", "load", "lower", "make", "mark", "name"),
    *("order", "pad", "plan", "profile", "put", "remove", "rename", "rent", "restore", "resume"),
    *("return", "save", "say", "see", "seed", "set", "shorten", "start", "submit", "train"),
    *("uninstall", "use", "wait", "write", "it would fit"),
)
"""Verbs with which a remedy begins."""
BACK = r"(?:it|them|either|both|each|so|one out|one of them)\b"
"""Words that refer to the words before them, which a line break must not separate."""
REMEDY = re.compile(
    rf"(?P<why>.+?)(?:;|[.]) (?P<do>(?:{'|'.join(VERBS)})\b(?! {BACK}).+)", re.IGNORECASE
)
out = Terminal()
talk = Terminal(stderr=True)


@contextmanager
def bar(what: str, *, quiet: bool) -> Iterator[Report | None]:
    """Show a progress bar on stderr while a search runs, if a person is looking."""
    if quiet or not talk.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(what, markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %", markup=False),
    )
    with Progress(*columns, TimeElapsedColumn(), console=talk, transient=True) as shown:
        task = shown.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total)

        yield report


def remedy_first(message: str) -> tuple[str, str]:
    """Return a refusal's remedy and reason; the message and nothing where it has no remedy.

    >>> remedy_first("layout: tp=3 leaves 2 of 8 devices idle; add idle=2, or name other degrees")
    ('add idle=2, or name other degrees', 'layout: tp=3 leaves 2 of 8 devices idle')
    >>> remedy_first("no plan of x fits. It would fit on 64 such devices.")
    ('it would fit on 64 such devices', 'no plan of x fits')
    >>> remedy_first("order: is given twice; leave one out")
    ('order: is given twice; leave one out', '')
    >>> remedy_first("seq_len: is 0; a sample has 1 token or more")
    ('seq_len: is 0; a sample has 1 token or more', '')
    """
    parted = REMEDY.fullmatch(message)
    if parted is None or parted["do"].count("(") != parted["do"].count(")"):
        return message, ""
    remedy = parted["do"].removesuffix(".")
    return remedy[:1].lower() + remedy[1:], parted["why"]


def refuse(message: str) -> None:
    """Print why a command ends; where it takes several lines, the first one is the action."""
    message = sentence(message)
    short = len(f"meshwright: {message}") <= talk.width
    if short or not talk.is_terminal or "\n" in message:  # the end of a log, say
        print_message(message)
        return
    remedy, reason = remedy_first(lines(message))
    for indent, text in (("", f"meshwright: {remedy}"), ("  ", reason)):
        wide = textwrap.fill(
            text,
            talk.width,
            initial_indent=indent,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        talk.print(wide, soft_wrap=True, end="\n" if wide else "")


def print_message(message: str) -> None:
    """Print one message to stderr."""
    if talk.is_terminal:
        talk.print(f"meshwright: {message}")
        return
    print(f"meshwright: {lines(message)}", file=sys.stderr)
