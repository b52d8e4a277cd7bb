"""Progress of long work, as events for listeners."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

SILENT_S = 2.0
"""Seconds between two lines, and before the first."""


class ProgressLines:
    """Tells a listener, every SILENT_S, what is at work if it is something else than before."""

    def __init__(self, listener: Callable[[str], None], *, silent_s: float = SILENT_S) -> None:
        self._listener, self._silent_s = listener, silent_s
        self._running: list[str] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def running(self, text: str) -> Iterator[None]:
        """Tell of this while it is the innermost work."""
        self._running.append(text)
        if self._thread is None:  # most work needs none
            self._thread = threading.Thread(target=self._print_waits, daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._running.pop()

    def stop(self) -> None:
        """Tell nothing more."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _print_waits(self) -> None:
        before = ""
        while not self._done.wait(self._silent_s):
            text = "".join(self._running[-1:])
            if text and text != before:
                before = text
                self._listener(text)


_lines: ContextVar[ProgressLines | None] = ContextVar("progress", default=None)


@contextmanager
def progress_lines(
    listener: Callable[[str], None], *, silent_s: float = SILENT_S
) -> Iterator[None]:
    """Give a listener lines about what runs in here.

    >>> import time
    >>> with progress_lines(print, silent_s=0.05):
    ...     with running("short work"):
    ...         pass
    ...     with running("long work"):
    ...         time.sleep(0.2)
    long work
    """
    lines = ProgressLines(listener, silent_s=silent_s)
    token = _lines.set(lines)
    try:
        yield
    finally:
        _lines.reset(token)
        lines.stop()


@contextmanager
def progress_on_stderr(*, silent_s: float = SILENT_S) -> Iterator[None]:
    """Write lines about what runs in here to stderr, unless a listener has them already."""
    if _lines.get() is not None:
        yield
        return

    def write(text: str) -> None:
        print(f"meshwright: {text}", file=sys.stderr)

    with progress_lines(write, silent_s=silent_s):
        yield


def running(text: str) -> AbstractContextManager[None]:
    """Report the activity inside of this context to a listener, if there is one."""
    lines = _lines.get()
    return nullcontext() if lines is None else lines.running(text)
