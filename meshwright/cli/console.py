"""Where commands speak: results on stdout, progress bars and messages on stderr."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from planner.errors.shown import lines
from planner.report.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.search.answer import Progress as Report


out = Terminal()
talk = Terminal(stderr=True)


@contextmanager
def bar(what: str, *, quiet: bool) -> Iterator[Report | None]:
    """Show a progress bar on stderr while a search runs, if a person is looking."""
    if quiet or not talk.is_terminal:
        yield None
        return
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


def say(message: str) -> None:
    """Print one message to stderr."""
    if talk.is_terminal:
        talk.print(f"meshwright: {message}")
        return
    print(f"meshwright: {lines(message)}", file=sys.stderr)
