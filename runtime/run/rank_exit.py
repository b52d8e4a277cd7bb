"""The end of a rank's process: with its launcher, with a reason, and without waiting for peers.

Nothing here imports torch or pydantic before it is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from meshwright.runtime.run.run_clock import unix_now_s

if TYPE_CHECKING:
    from meshwright.runtime.run import run_folder as run

PR_SET_PDEATHSIG = 1


def carried_out(work: Callable[[], None], *, rank: int, output: Path) -> int:
    """Do a rank's work; return 1 where it fails, after the launcher has the reason."""
    try:
        work()
    except BaseException as error:
        with contextlib.suppress(OSError):  # of a log without room
            traceback.print_exc()
        report_failure(
            type(error).__name__,
            str(error),
            rank=rank,
            output=output,
            held=getattr(error, "held", None),
            needed_bytes=getattr(error, "needed_bytes", None),
            suspect=getattr(error, "suspect", None),
        )
        return 1
    return 0


def report_failure(
    kind: str,
    message: str,
    *,
    rank: int,
    output: Path,
    held: dict[str, int] | None = None,
    needed_bytes: int | None = None,
    suspect: int | None = None,
) -> run.Failure:
    """Tell the launcher why this rank stopped: see Failure."""
    from meshwright.runtime.run import run_folder as run  # noqa: PLC0415 - what imports pydantic comes behind a script

    failure = run.Failure(
        rank=rank,
        kind=kind,
        message=message,
        at_unix_s=unix_now_s(),
        held=held or {},
        needed_bytes=needed_bytes,
        suspect=suspect,
    )
    file = run.failure_file(output, rank)
    with run.never_fatal(file):
        run.write_message(failure, file)
    return failure


def leave(status: int) -> NoReturn:
    """End this process: threads of communication libraries may wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def die_with_launcher() -> None:
    """Ask the kernel to kill this process when the launcher dies, however it dies."""
    launcher = os.environ.get("MESHWRIGHT_LAUNCHER")
    if launcher is None or not sys.platform.startswith("linux"):
        return
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(launcher):
        os._exit(1)


def end_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends; Linux alone does."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
