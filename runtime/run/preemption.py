"""A notice that a machine will be taken away: the step under way is the last one, and is saved.

A scheduler says so by a signal, some time before it kills: Slurm before a time limit or a
preemption, Kubernetes before it evicts a pod, a cloud before it takes back a spot instance.  The
launcher gets the signal and leaves a file; each rank looks for the file after its last backward,
and what any rank saw reaches all of them with the sums of the step, so that all end after the same
step.  Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.planner.errors import DocumentError
from meshwright.planner.system.safe_files import open_below, replace_file
from meshwright.runtime.run.environment import place_of, room_beside

NOTICE = "MESHWRIGHT_NOTICE"
"""Names, to each rank, the file that a notice leaves."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that give notice to a launcher."""
OF_SCRIPTS = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that a script's ranks leave to it: what a script starts itself is ended by SIGTERM."""
GRACE_S = 120
"""Seconds before the end at which our jobs ask schedulers for a notice."""


def notice_file(output: Path) -> Path:
    """Return the file by which a launcher tells the ranks of its node."""
    return output / "notice"


def environment(output: Path) -> dict[str, str]:
    """Return what tells ranks where a notice would be, once none is left there of a run before."""
    notice_file(output).unlink(missing_ok=True)
    return {NOTICE: str(notice_file(output.absolute()))}


def leave_notice(output: Path, number: int) -> str:
    """Tell this node's ranks; return what there is to say of it."""
    name = name_of(number)
    file = notice_file(output)
    try:
        output.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        with open_below(file, within=output) as written, contextlib.suppress(OSError):
            written.write(f"{name}\n".encode())  # that it is there is enough: the disk may be full
    except (DocumentError, OSError):
        beside = room_beside(file)
        if beside is None:
            raise
        replace_file(f"{name}\n", beside)
    return (
        f"{name}: the step under way is the last one, and is saved; a second signal ends all at "
        "once, and the last checkpoint stays"
    )


def name_of(number: int) -> str:
    """Return what a signal is called.

    >>> name_of(15)
    'SIGTERM'
    """
    return signal.Signals(number).name


def take_notice() -> Callable[[], bool]:
    """Return what says whether this rank's launcher has left a notice.

    >>> take_notice()()
    False
    """
    named = os.environ.get(NOTICE)
    if named is None:
        return lambda: False
    file = Path(named)
    return lambda: place_of(file).exists()


def wait_for_launcher(numbers: Sequence[signal.Signals] = SIGNALS) -> None:
    """Leave signals of notices to the launcher: a scheduler may send them to every process."""
    if NOTICE in os.environ:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
