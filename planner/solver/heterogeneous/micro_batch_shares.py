"""Shares of a step's micro-batches among several unequal replicas.

Replica r needs `fill_s` for its first micro-batch and `steady_s` for each further one, so within T
seconds it takes as many as there are i = 0, 1, ... with fill_s + i · steady_s <= T:

    m_r(T) = floor((T - fill_s) / steady_s) + 1

The step ends with the slowest replica.  The least T at which Σ_r m_r(T) reaches the micro-batches
of the step is one of the candidates fill_s + i · steady_s, and is found among them by bisection.

Where seconds are any function of the number of micro-batches that never falls (`MonotonePace`), the
same holds with m_r(T) the most micro-batches that take no more than T (`fastest_counts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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

    def completed_count(self, seconds: float) -> int:
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
        return sum(replica.completed_count(seconds) for replica in replicas) >= microbatches

    ends_s = []
    for replica in replicas:
        # The least i whose end is enough; the last is, since this replica alone has done all.
        lower, upper = 1, microbatches
        while lower < upper:
            middle = (lower + upper) // 2
            lower, upper = (lower, middle) if enough(replica.end_s(middle)) else (middle + 1, upper)
        ends_s.append(replica.end_s(lower))
    step_s = min(ends_s)

    shares = [replica.completed_count(step_s) for replica in replicas]
    surplus = sum(shares) - microbatches
    for r in reversed(range(len(replicas))):
        # Only what ends at step_s itself can be too much: before it there was not enough.
        while surplus and shares[r] and replicas[r].end_s(shares[r]) == step_s:
            shares[r] -= 1
            surplus -= 1
    assert not surplus, "less than enough was done before step_s"
    return tuple(shares)


class PipelinePace(Protocol):
    """Seconds of a pipeline until its micro-batches are done; never fewer for more of them."""

    def end_s(self, microbatches: int, /) -> float:
        """Seconds until this number of micro-batches is done."""

    def completed_count(self, seconds: float, /) -> int:
        """Count the micro-batches that end by then."""


class MonotonePace:
    """A pace by a function of the number of micro-batches, which is asked for each number once.

    >>> pace = MonotonePace(lambda count: 3.0 + 2.0 * count, most=100)
    >>> [pace.completed_count(seconds) for seconds in (4.9, 5.0, 29.0, 1e9)]
    [0, 1, 13, 100]
    """

    def __init__(self, end_s: Callable[[int], float], most: int) -> None:
        """No more than `most` micro-batches are ever asked for."""
        self._end_s, self._most = end_s, most
        self._known_s: dict[int, float] = {}

    def end_s(self, microbatches: int) -> float:
        """Seconds until this number of micro-batches is done."""
        if microbatches not in self._known_s:
            self._known_s[microbatches] = self._end_s(microbatches)
        return self._known_s[microbatches]

    def completed_count(self, seconds: float) -> int:
        """Count the micro-batches that end by then, `most` at most.

        Numbers are tried where a line through the nearest known ones meets the seconds, at times
        in the middle between these.
        """
        if seconds == math.inf:
            return self._most
        low, high, turn = 0, self._most + 1, 0
        for count, end_s in self._known_s.items():
            if end_s <= seconds:
                low = max(low, count)
            else:
                high = min(high, count)
        while high - low > 1:
            turn += 1
            low_s, high_s = self._known_s.get(low, 0.0), self._known_s.get(high, math.inf)
            if high_s == math.inf:
                guess = high - 1
            elif turn % 3 == 0:
                guess = (low + high) // 2
            else:
                guess = low + math.ceil((seconds - low_s) / (high_s - low_s) * (high - low))
            guess = min(max(guess, low + 1), high - 1)
            if self.end_s(guess) <= seconds:
                low = guess
            else:
                high = guess
        return low


class Pipelines(NamedTuple):
    """Pipelines that take the same number of micro-batches."""

    number: int
    micro_batches: int


def fastest_counts(
    groups: Sequence[tuple[int, PipelinePace]], microbatches: int
) -> list[tuple[Pipelines, ...]] | None:
    """[group] Micro-batches of its pipelines with which the slowest ends first, the most first.

    A group has a number of pipelines that are alike, each of which takes a micro-batch at least;
    None where there are too few, or where some end at no time (inf).  Numbers within a group differ
    by 1 at most.

    >>> fast, slow = Replica(fill_s=8.0, steady_s=1.0), Replica(fill_s=20.0, steady_s=2.5)
    >>> for of_group in fastest_counts([(2, fast), (1, slow)], 98):
    ...     print([tuple(pipelines) for pipelines in of_group])
    [(1, 43), (1, 42)]
    [(1, 13)]
    """
    if microbatches < sum(number for number, _ in groups):
        return None

    def counts(seconds: float) -> list[int]:
        return [pace.completed_count(seconds) for _, pace in groups]

    def enough(seconds: float) -> bool:
        each = counts(seconds)
        done = sum(number * count for (number, _), count in zip(groups, each, strict=True))
        return min(each) >= 1 and done >= microbatches

    step_s = math.inf
    for number, pace in groups:
        lower, upper = 1, -(-microbatches // number)
        while lower < upper:
            middle = (lower + upper) // 2
            lower, upper = (lower, middle) if enough(pace.end_s(middle)) else (middle + 1, upper)
        if enough(pace.end_s(lower)):
            step_s = min(step_s, pace.end_s(lower))
    if step_s == math.inf:  # one takes longer for its first than the others for all
        step_s = max(pace.end_s(1) for _, pace in groups)
    if step_s == math.inf or not enough(step_s):
        return None
    return trimmed_counts(groups, counts(step_s), microbatches)


def trimmed_counts(
    groups: Sequence[tuple[int, PipelinePace]], most: Sequence[int], microbatches: int
) -> list[tuple[Pipelines, ...]]:
    """[group] Micro-batches of its pipelines, the most first, no more than `most` [group] of each.

    What is too many together is taken from single pipelines of the group that ends last.
    """
    at_most = list(most)
    reached = [number for number, _ in groups]  # pipelines of each group that take the most
    surplus = sum(n * count for n, count in zip(reached, most, strict=True)) - microbatches
    while surplus:
        at = max(
            (place for place, count in enumerate(at_most) if count > 1),
            key=lambda place: groups[place][1].end_s(at_most[place]),
        )
        fewer = min(surplus, reached[at])
        reached[at] -= fewer
        surplus -= fewer
        if not reached[at]:
            at_most[at] -= 1
            reached[at] = groups[at][0]
    return [
        tuple(
            Pipelines(pipelines, count)
            for pipelines, count in ((r, top), (number - r, top - 1))
            if pipelines
        )
        for (number, _), r, top in zip(groups, reached, at_most, strict=True)
    ]
