"""Hangs: a rank whose beacon stands still, and what each rank does at that moment.

A rank hangs when it has been in one part of a step for three times the longest that the last steps
took, and ten seconds at least.  Before anything is killed every rank is asked for its stack, which
names the collective that it waits in and where the training calls it; a rank that does not answer,
or waits in none, is the one that the others wait for.  Before two steps are done nobody knows how
long they take, and a rank whose process was stopped for ten seconds hangs.  Nothing here imports
torch.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.system.safe_files import folder_within
from meshwright.runtime.checkpoint import object_store
from meshwright.runtime.resilience.heartbeat import ASK, Beacons, RankPlace, stack_file
from meshwright.runtime.run.environment import STORE_VARIABLE
from meshwright.runtime.run.run_folder import log_text

LEAST_S = 10.0
TIMES = 3.0
"""Multiple of the longest of the last steps after which a rank counts as hung."""
RECENT = 200
LOOK_S = 0.2
ANSWER_S = 3.0
"""Seconds that ranks have to write their stacks."""
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class HungRank:
    """The state of a rank while ranks hang."""

    rank: int
    step: int
    part: str
    collective: str | None
    """Collective that the rank waits in, and where training calls it; None if it waits in none."""
    answered: bool

    @property
    def text(self) -> str:
        """The sentence of a report about the rank."""
        if not self.answered:
            return f"rank {self.rank} does not answer ({self.part} of step {self.step})"
        doing = f"waits for others: {self.collective}" if self.collective else "waits for nobody"
        return f"rank {self.rank} {doing} ({self.part} of step {self.step})"


class HangWatch:
    """Looks at the beacons of a node's ranks."""

    def __init__(
        self,
        beacons: Beacons,
        ranks: Mapping[int, int],
        output: Path,
        *,
        start_s: float,
        alone: bool = True,
        own_code: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks` are the node's ranks with their local ranks.

        Until a rank has done two steps a part of one may take `start_s`: it compiles, connects,
        takes memory.  A node that is not `alone`, all of whose ranks wait for others, lets the node
        that has the others speak first.  Where ranks run `own_code` of a user between steps they
        may do so for `start_s`, while others wait for them.
        """
        self._own_code = own_code
        # A store that does not answer for a while is waited for; that is no hang.
        self._sends_s = 0.0 if os.environ.get(STORE_VARIABLE) is None else object_store.PATIENCE_S
        self._beacons, self._ranks, self._output = beacons, dict(ranks), output
        self._start_s, self._now_s, self._alone = start_s, now_s, alone
        self._speaks_s = 0.0
        self._before: dict[int, RankPlace] = {}
        self._took_s: dict[str, deque[float]] = {}
        self._next_s = 0.0
        self._first_step: int | None = None
        self._stopped_s: dict[int, float] = {}
        """Processes that are stopped, and since when."""

    def allowed_s(self, step: int, part: str) -> float:
        """Return how long a rank may be in a part of a step."""
        if self._sends_s and part == "save":
            return self._sends_s + self._start_s
        if self._own_code and part != "step":
            return self._start_s
        took_s = self._took_s.get(part)
        if self._first_step is None or step < self._first_step + 2 or not took_s:
            return self._start_s
        return max(LEAST_S, TIMES * max(took_s))

    def look(self) -> list[HungRank]:
        """Return what each rank does if one of them hangs, else nothing."""
        now_s = self._now_s()
        if now_s < self._next_s:
            return []
        self._next_s = now_s + LOOK_S
        places = self._beacons.places()
        for local, place in enumerate(places):
            before = self._before.get(local)
            if before is not None and place.since_s > before.since_s and before.part != "start":
                took_s = self._took_s.setdefault(before.part, deque(maxlen=RECENT))
                took_s.append(place.since_s - before.since_s)
            if place.step and self._first_step is None:
                self._first_step = place.step
            self._before[local] = place
        begun = [place for place in places if place.process]
        is_waited_for = self._own_code and any(place.part in ("batch", "save") for place in begun)
        least_s = self._start_s if is_waited_for else 0.0
        if self._sends_s and any(place.part == "save" for place in begun):
            least_s = self._sends_s + self._start_s
        if not any(
            now_s - place.since_s > max(least_s, self.allowed_s(place.step, place.part))
            for place in begun
            if place.part not in ("start", "end")
        ) and not self._was_stopped(begun, now_s):
            return []
        if now_s < self._speaks_s:
            return []
        hung = self._ask_ranks(places)
        if not self._alone and hung[0].collective is not None and not self._speaks_s:
            self._speaks_s = now_s + ANSWER_S + 2 * LOOK_S
            return []
        return hung

    def _was_stopped(self, begun: Sequence[RankPlace], now_s: float) -> bool:
        """Return whether a process was stopped at each look for long enough, in its first steps."""
        if self._first_step is not None and not self._own_code:
            begun = [place for place in begun if place.step < self._first_step + 2]
        stopped = {
            place.process for place in begun if place.part != "end" and is_stopped(place.process)
        }
        self._stopped_s = {process: self._stopped_s.get(process, now_s) for process in stopped}
        return any(now_s - since_s > LEAST_S for since_s in self._stopped_s.values())

    def _ask_ranks(self, places: list[RankPlace]) -> list[HungRank]:
        """Ask every rank what it does; the one that the others wait for comes first."""
        folder_within(self._output, "flight")
        for place in places:
            if place.process:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(place.process, ASK)
        deadline = time.monotonic() + ANSWER_S
        texts: dict[int, str] = {}
        while len(texts) < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in self._ranks:
                if text := log_text(stack_file(self._output, rank)):
                    texts[rank] = text
        ranks = [
            HungRank(
                rank=rank,
                step=places[local].step,
                part=places[local].part,
                collective=collective_of(texts.get(rank, "")),
                answered=rank in texts,
            )
            for rank, local in self._ranks.items()
        ]
        return sorted(ranks, key=lambda one: (one.answered, one.collective is not None, one.step))


def is_stopped(process: int) -> bool:
    """Return whether a process was stopped by a signal.

    >>> is_stopped(os.getpid()), is_stopped(0)
    (False, False)
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def collective_of(stack: str) -> str | None:
    """Return the collective that a stack waits in, and where training calls it.

    >>> print(collective_of('''Current thread 0x1 (most recent call first):
    ...   File "/lib/torch/distributed/distributed_c10d.py", line 9 in all_reduce
    ...   File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
    ...   File "/home/me/runtime/gradients.py", line 280 in measured
    ... '''))
    all_reduce at gradients.py:280 in measured
    """
    name = None
    for frame in _FRAME.finditer(stack):
        file = Path(frame["file"])
        if file.name == "distributed_c10d.py" and not frame["function"].startswith("_"):
            name = frame["function"]
        elif "torch" in file.parts:
            continue
        else:
            # A collective that was begun before is waited for where Python has no frame of its own.
            line = linecache.getline(frame["file"], int(frame["line"]))
            name = name or ("wait" if file.suffix == ".py" and ".wait(" in line else None)
            where = f"{file.name}:{frame['line']} in {frame['function']}"
            return f"{name} at {where}" if name else None
    return name
