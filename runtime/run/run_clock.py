"""The clock of a run: Unix time as it was when the run began, plus what a steady clock has counted.

Whoever sets the machine's clock while a run lives changes none of its accounts.  Launchers hand the
difference of the two clocks on to their ranks, which are on the same machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_OFFSET = "MESHWRIGHT_CLOCK_OFFSET"
"""Unix seconds minus those of the steady clock, in a launcher's environment and its ranks'."""


def begin() -> None:
    """Begin a run in this process: take Unix time from the machine's clock, once."""
    os.environ[_OFFSET] = repr(time.time() - time.monotonic())


def unix_now_s() -> float:
    """Unix seconds of now, by the clock of this process's run."""
    if _OFFSET not in os.environ:
        begin()
    return float(os.environ[_OFFSET]) + time.monotonic()


def process_start_unix_s() -> float:
    """Unix seconds at which this process was started; of now where /proc does not say.

    >>> 0 <= time.time() - process_start_unix_s() < 86400
    True
    """
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
