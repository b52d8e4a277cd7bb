"""What a launcher holds while its ranks run: its folder for itself, and the signals that end it."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from planner.errors import LaunchError
from planner.process.guarded_files import opened


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make and hold a folder for this launch; the lock ends with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{folder}: cannot be written: {error.strerror}") from error
    with opened(folder / ".lock", within=folder, append=True) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(f"{folder}: another launch is using it; name another") from None
        yield


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
