"""Beacons: where each rank of a node is, in memory that its launcher reads too.

A rank writes 64 bytes when it begins a part of a step, and no message; the launcher looks at them a
few times a second.  A beacon that does not move is how a rank that hangs is found, long before a
collective gives up.  Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from meshwright.planner.system.safe_files import open_below

BEACONS = "MESHWRIGHT_BEACONS"
"""Names, to each rank, the file that they are in."""
BEACON_BYTES = 64
ASK = signal.SIGUSR2
"""Asks a rank for its stack."""
_BEACON = struct.Struct("=QQQQ")
"""Process, step, phase, nanoseconds of the monotonic clock."""
_PACE = struct.Struct("=QQQQ")
"""Behind it: steps done, and nanoseconds of them all for data, for own work and in whole."""
_SPENT = Path("/proc/thread-self/schedstat")
Part = Literal["start", "batch", "step", "evaluate", "save", "end"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The step and part that a rank is in, and since when by time.monotonic()."""

    process: int
    """0 before the rank has begun."""
    step: int
    part: Part
    since_s: float

    @property
    def steps_done(self) -> int:
        """The last step that it has done, 0 before the first.

        >>> at = RankPlace(process=1, step=7, part="step", since_s=0.0)
        >>> [at.steps_done, RankPlace(process=1, step=7, part="save", since_s=0.0).steps_done]
        [6, 7]
        """
        return self.step if self.part in ("evaluate", "save", "end") else max(0, self.step - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """Total seconds of a rank's steps so far, by kind."""

    steps: int
    data_s: float
    work_s: float
    """Seconds of its own work, without waiting for others; 0 where that is not known."""
    whole_s: float


class Beacon:
    """A rank's own place, which it tells; without a launcher that looks nothing is written."""

    def __init__(self, local_rank: int) -> None:
        file = os.environ.get(BEACONS)
        self._memory = None if file is None else _map_file(Path(file))
        self._offset = local_rank * BEACON_BYTES
        self._pace = [0, 0, 0, 0]
        self.begin_part(0, "start")

    @property
    def is_seen(self) -> bool:
        """True if a launcher reads the beacon."""
        return self._memory is not None

    def count_step(self, *, data_s: float, work_s: float, whole_s: float) -> None:
        """Add a step that was done."""
        if self._memory is not None:
            seconds = data_s, work_s, whole_s
            for at, more in enumerate((1, *(round(1e9 * duration_s) for duration_s in seconds))):
                self._pace[at] += more
            _PACE.pack_into(self._memory, self._offset + _BEACON.size, *self._pace)

    def begin_part(self, step: int, part: Part) -> None:
        """Say that a part of a step begins."""
        if self._memory is not None:
            fields = (os.getpid(), step, PARTS.index(part), time.monotonic_ns())
            _BEACON.pack_into(self._memory, self._offset, *fields)


class Beacons:
    """The beacons of all ranks of a node, as their launcher sees them."""

    def __init__(self, file: Path, ranks: int) -> None:
        self.file = file
        self._memory, self._ranks = _map_file(file), ranks

    def places(self) -> list[RankPlace]:
        """Return where each rank is, by local rank."""
        places = []
        for rank in range(self._ranks):
            process, step, part, since = _BEACON.unpack_from(self._memory, rank * BEACON_BYTES)
            places.append(
                RankPlace(
                    process=process,
                    step=step,
                    # A rank's memory is its own: what a broken one writes is no place.
                    part=PARTS[part] if part < len(PARTS) else "start",
                    since_s=since / 1e9,
                )
            )
        return places

    def paces(self) -> list[RankPace]:
        """Return what each rank's steps took so far, by local rank."""
        paces = []
        for rank in range(self._ranks):
            at = rank * BEACON_BYTES + _BEACON.size
            steps, *spent_ns = _PACE.unpack_from(self._memory, at)
            data_s, work_s, whole_s = (nanoseconds / 1e9 for nanoseconds in spent_ns)
            pace = RankPace(steps=steps, data_s=data_s, work_s=work_s, whole_s=whole_s)
            paces.append(pace)
        return paces


def own_seconds() -> float:
    """Seconds in which this thread ran or wanted to run, and not those in which it waited.

    What other programs take from it counts as its own.  0 where the system does not tell.
    """
    try:
        ran_ns, wanted_ns, _ = _SPENT.read_bytes().split()
    except (OSError, ValueError):
        return 0.0
    return (int(ran_ns) + int(wanted_ns)) / 1e9


def answer_with_stack(output: Path, rank: int) -> None:
    """Let this rank write its stack when its launcher asks for it, wherever it waits."""
    # Open for as long as the rank lives: it writes where no Python code can run.
    file = open_below(stack_file(output, rank), within=output)
    faulthandler.register(ASK, file=file, all_threads=False, chain=False)


def stack_file(output: Path, rank: int) -> Path:
    """Return where a rank writes its stack."""
    return output / "flight" / f"rank-{rank:05}.stack"


@contextlib.contextmanager
def beacons(ranks: int) -> Iterator[Beacons]:
    """Beacons of a node's ranks, in memory without a name: gone with this process, however it ends.

    Ranks open it as a file of this process.
    """
    descriptor = os.memfd_create("meshwright-beacons")
    try:
        os.truncate(descriptor, ranks * BEACON_BYTES)
        yield Beacons(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), ranks)
    finally:
        os.close(descriptor)


def _map_file(file: Path) -> mmap.mmap:
    with file.open("r+b") as memory:
        return mmap.mmap(memory.fileno(), 0)
