"""Shares of a step's micro-batches among several unequal replicas.

Replica r needs `fill_s` for its first micro-batch and `steady_s` for each further one, so within T
seconds it takes as many as there are i = 0, 1, ... with fill_s + i · steady_s <= T:

    m_r(T) = floor((T - fill_s) / steady_s) + 1

The step ends with the slowest replica.  The least T at which Σ_r m_r(T) reaches the micro-batches
of the step is one of the candidates fill_s + i · steady_s, and is found among them by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Seconds of one pipeline: of its first micro-batch, and of each one after that."""

    fill_s: float
    steady_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.fill_s < math.inf:
            raise ValueError(f"fill_s is {self.fill_s}; use a finite number >= 0")
        if not 0 < self.steady_s < math.inf:
            raise ValueError(f"steady_s is {self.steady_s}; use a finite number > 0")

    def end_s(self, microbatches: int) -> float:
        """Seconds until this number of micro-batches is done; 0 for none."""
        return self.fill_s + (microbatches - 1) * self.steady_s if microbatches else 0.0

    def completed(self, seconds: float) -> int:
        """Count the micro-batches that end by then, exactly as `end_s` computes their ends."""
        if seconds < self.fill_s:
            return 0
        count = int((seconds - self.fill_s) / self.steady_s) + 1
        while self.end_s(count) > seconds:
            count -= 1
        while self.end_s(count + 1) <= seconds:
            count += 1
        return count


def fastest_shares(replicas: Sequence[Replica], microbatches: int) -> tuple[int, ...]:
    """[replica] Micro-batches with which the slowest replica ends first; they add up.

    Of equally fast shares, those that end last give way to earlier replicas.

    >>> fast, slow = Replica(fill_s=8.0, steady_s=1.0), Replica(fill_s=20.0, steady_s=2.5)
    >>> fastest_shares([fast, slow], 96)
    (72, 24)
    >>> max(fast.end_s(72), slow.end_s(24)), max(fast.end_s(48), slow.end_s(48))
    (79.0, 137.5)
    """
    if not replicas:
        raise ValueError("shares need at least one replica")
    if microbatches < 0:
        raise ValueError(f"microbatches is {microbatches}; it must not be negative")
    if not microbatches:
        return (0,) * len(replicas)

    def enough(seconds: float) -> bool:
        return sum(replica.completed(seconds) for replica in replicas) >= microbatches

    ends_s = []
    for replica in replicas:
        # The least i whose end is enough; the last is, since this replica alone has done all.
        lower, upper = 1, microbatches
        while lower < upper:
            middle = (lower + upper) // 2
            lower, upper = (lower, middle) if enough(replica.end_s(middle)) else (middle + 1, upper)
        ends_s.append(replica.end_s(lower))
    step_s = min(ends_s)

    shares = [replica.completed(step_s) for replica in replicas]
    surplus = sum(shares) - microbatches
    for r in reversed(range(len(replicas))):
        # Only what ends at step_s itself can be too much: before it there was not enough.
        while surplus and shares[r] and replicas[r].end_s(shares[r]) == step_s:
            shares[r] -= 1
            surplus -= 1
    assert not surplus, "less than enough was done before step_s"
    return tuple(shares)
