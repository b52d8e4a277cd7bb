"""File descriptor 1 while libraries print to it, which no object of Python sees.

Stdout belongs to results: with `--json` to one JSON object.  A solver's banner, a communication
library's version or a compiler's note is written to the descriptor by C, past `sys.stdout`.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

STDOUT, STDERR = 1, 2


@contextlib.contextmanager
def stdout_diverted(to: int) -> Iterator[None]:
    """Let descriptor 1 lead where `to` leads, for the whole process; as before at the end.

    Without a descriptor 1 nothing is done.
    """
    try:
        before = os.dup(STDOUT)
    except OSError:
        yield
        return
    try:
        _flush()
        os.dup2(to, STDOUT)
        try:
            yield
            _flush()  # what C holds back still goes where it was meant to go
        finally:
            os.dup2(before, STDOUT)
    finally:
        os.close(before)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what is written to descriptor 1; for the moment of one call, since threads share it."""
    with Path(os.devnull).open("wb") as nowhere, stdout_diverted(nowhere.fileno()):
        yield


@contextlib.contextmanager
def results_apart() -> Iterator[None]:
    """Keep stdout for `sys.stdout`: what else is written to descriptor 1 goes to stderr.

    Where `sys.stdout` is not descriptor 1, as in a notebook, nothing is done.
    """
    shown = sys.stdout
    try:
        if shown is None or shown.fileno() != STDOUT:
            yield
            return
        results = os.dup(STDOUT)
    except (OSError, ValueError, AttributeError):  # closed, or no file
        yield
        return
    with (
        os.fdopen(results, "w", encoding=shown.encoding, errors=shown.errors) as apart,
        stdout_diverted(STDERR),
    ):
        sys.stdout = apart
        try:
            yield
        finally:
            sys.stdout = shown


def _flush() -> None:
    """Write out what Python and C hold back for descriptor 1."""
    for stream in (sys.stdout, sys.__stdout__):
        if isinstance(stream, io.TextIOBase) and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def stdout_is_lost() -> bool:
    """Return True if what was printed cannot be written: a full disk, or no reader.

    The rest of the output is dropped then, or Python would report it at its end.
    """
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
        return True
    return False
