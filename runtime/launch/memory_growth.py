"""Host memory that grows: a rank or launcher that keeps more from step to step is named in time.

Memory is looked at every SAMPLE_S.  A process grows where it had more in each of the last looks,
and no less in the later half of them than in the first: caches that fill end that.  It is named
where its node runs out of memory before the run ends, at the rate of now; so far ahead as
AHEAD times the span of the looks, and no further.  Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.documents.units import bytes_text, seconds_text
from meshwright.runtime.launch.host_memory_limits import available_bytes, now_bytes

SAMPLE_S = 15.0
SPANS = (4, 16, 64, 256)
"""Intervals between looks over which a process must have grown: 1, 4, 16 and 64 minutes."""
AHEAD = 16.0
STEADY = 0.6
"""Least growth of the later half of a span over that of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A process that will have used up its node's memory."""

    rank: int | None
    """None for the launcher."""
    now_bytes: int
    bytes_per_s: float
    left_bytes: int
    """Bytes that the node has yet."""

    @property
    def left_s(self) -> float:
        """Seconds until these are used up."""
        return self.left_bytes / self.bytes_per_s

    @property
    def text(self) -> str:
        """A sentence for the user."""
        who = "this launcher" if self.rank is None else f"rank {self.rank}"
        rate = bytes_text(60 * self.bytes_per_s)
        return (
            f"{who} takes {rate} of host memory more each minute and has "
            f"{bytes_text(self.now_bytes)}; the {bytes_text(self.left_bytes)} that are left here "
            f"are used up in {seconds_text(self.left_s)}, before the run ends. Look for what is "
            "kept from step to step: losses or outputs with their graph, lists, caches of data"
        )


class MemoryGrowth:
    """Looks whether the ranks of a node, or their launcher, use up its memory."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._seen: dict[int, deque[tuple[float, int]]] = {}
        """By process: when, and how much it had."""
        self._named: set[int] = set()

    def look(self, processes: Mapping[int, int], *, left_s: float, now_s: float) -> list[Growth]:
        """Return what grows and was not named before, of ranks with their processes.

        The run takes `left_s` yet.
        """
        if now_s < self._next_s:
            return []
        self._next_s = now_s + SAMPLE_S
        who: dict[int, int | None] = {process: rank for rank, process in processes.items()}
        who[os.getpid()] = None
        self._seen = {process: seen for process, seen in self._seen.items() if process in who}
        growing, available = [], available_bytes()
        for process, rank in who.items():
            seen = self._seen.setdefault(process, deque(maxlen=max(SPANS) + 1))
            seen.append((now_s, now_bytes(process)))
            rate = growth_bytes_per_s(list(seen), left_s=left_s, available=available)
            if rate is not None and process not in self._named:
                self._named.add(process)
                growing.append(
                    Growth(
                        rank=rank,
                        now_bytes=seen[-1][1],
                        bytes_per_s=rate,
                        left_bytes=available,
                    )
                )
        return growing


def growth_bytes_per_s(
    seen: list[tuple[float, int]], *, left_s: float, available: int
) -> float | None:
    """Return the rate at which a process uses up what is available before the run ends, or None.

    >>> leak = [(15.0 * n, 10**9 + 10**7 * n) for n in range(5)]
    >>> growth_bytes_per_s(leak, left_s=1e5, available=5 * 10**8)
    666666.6666666666
    >>> growth_bytes_per_s(leak, left_s=1e5, available=10**10) is None  # too far ahead
    True
    >>> growth_bytes_per_s(leak, left_s=60, available=5 * 10**8) is None  # the run ends before
    True
    """
    for span in SPANS:
        last = seen[-span - 1 :]
        if len(last) <= span:
            return None
        grown = [later[1] - earlier[1] for earlier, later in itertools.pairwise(last)]
        first, rest = sum(grown[: span // 2]), sum(grown[span // 2 :])
        if min(grown) <= 0 or rest < STEADY * first:
            continue
        span_s = last[-1][0] - last[0][0]
        rate = (first + rest) / span_s
        if available / rate < min(left_s, AHEAD * span_s):
            return rate
    return None
