"""Test whether a machine was undisturbed while measured: other users, changing clocks.

Linux counts how long each process was ready to run and did not (`/proc/self/schedstat`): that is
what other programs took.  A product of fixed size, repeated in every round, shows a clock that goes
down as the device heats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.profiler.clock import Clock, median

SIDE = {"cpu": 256, "cuda": 2048}
DRIFT = 0.1
"""Later products slower than the first by more than this: the clock went down."""


class Watch:
    """Notes what disturbs one rank, from its making on."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        side = SIDE[device.type]
        self._product = [torch.ones(side, side, device=device) for _ in range(3)]
        self._begin_s, self._waited_s = time.perf_counter(), waited_s()
        self._products_s: list[float] = []

    def look(self) -> None:
        """Time one product, the best of three: what is left is the clock."""
        left, right, out = self._product
        self._products_s.append(
            min(self._clock.seconds(lambda: torch.matmul(left, right, out=out)) for _ in range(3))
        )

    def waiting_share(self) -> float:
        """Return the share of the time in which others had the processor that we wanted."""
        passed_s = time.perf_counter() - self._begin_s
        return min(1.0, max(0.0, (waited_s() - self._waited_s) / max(passed_s, 1e-9)))

    def drift(self) -> float:
        """Return by how much later products were slower than the first ones."""
        return drift(self._products_s)


def drift(seconds: Sequence[float]) -> float:
    """Return the slowdown of the last third against the first third.

    >>> f"{drift([1.0, 1.0, 1.0, 1.1, 1.2, 1.25]):.3f}"
    '0.225'
    """
    if len(seconds) < 3:
        return 0.0
    part = len(seconds) // 3
    return max(0.0, median(seconds[-part:]) / median(seconds[:part]) - 1.0)


def waited_s() -> float:
    """Seconds that this process was ready and others ran; 0 where the system does not count."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(file.read_text("ascii").split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return total / 1e9
