"""Seconds as ranks take them, and statistics of many: median and spread.

A rank's clock waits for its device first, so that what was queued is counted where it belongs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Moment = Any
"""A point in time of one rank: seconds, or an event in its device's queue."""


class Clock:
    """The time of one rank, after all queued work of its device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now_s(self) -> float:
        """Return seconds since some moment."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def moment(self) -> Moment:
        """Note a point in time without waiting for the device."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def between_s(self, first: Moment, second: Moment) -> float:
        """Return the seconds from one noted moment to another."""
        if self.device.type == "cuda":
            second.synchronize()
            return float(first.elapsed_time(second)) / 1e3
        return float(second - first)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes."""
        begin = self.now_s()
        work()
        return self.now_s() - begin


def median(values: Sequence[float]) -> float:
    """Return the middle value.

    >>> median([3.0, 1.0, 2.0, 10.0])
    2.5
    """
    return float(np.median(values))


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median.

    >>> spread([1.0, 2.0, 4.0, 7.0, 9.0])
    1.25
    """
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / middle) if middle else 0.0


def slowest(values: Sequence[float]) -> list[float]:
    """Return the largest of all ranks' values, item by item; every rank calls it together."""
    result = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1 and len(values):
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.tolist()
