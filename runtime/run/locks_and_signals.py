"""Locks and signals of a launcher while its ranks run: its folder, and the signals that end it."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.planner.errors import LaunchError
from meshwright.planner.system.safe_files import open_below
from meshwright.runtime.run.preemption import SIGNALS


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make and hold a folder for this launch; the lock ends with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{folder}: cannot be written: {error.strerror}") from error
    with open_below(folder / ".lock", within=folder, append=True) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LaunchError(f"{folder}: another launch is using it; name another") from None
        yield


@contextlib.contextmanager
def signals_interrupt(noticed: Callable[[int], None] | None = None) -> Iterator[None]:
    """Let the signals of a notice end the run as Ctrl-C does.

    With `noticed` the first of them is a notice, which it is called with; the second ends the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left = [noticed] if noticed is not None else []

    def on_signal(number: int, frame: object) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()(number)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_kept() -> Iterator[list[int]]:
    """Keep the signals of a notice that come while no ranks run; yields those that have come."""
    kept: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield kept
        return
    before = {
        number: signal.signal(number, lambda number, frame: kept.append(number))
        for number in SIGNALS
    }
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
