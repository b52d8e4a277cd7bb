"""Two stages a rank on a chain of unlike layers: what there is to choose, and what it costs.

A chain of like layers is told by counts (`planner.search.ranks`); where layers differ it matters
which of them a rank has.  The chain is cut into 2 P stages in the order of the model, and stage s
runs on rank home[s]: s mod P in a looped schedule, s or 2 P - 1 - s in a folded one.  With t_r the
seconds that rank r spends on one micro-batch, both stages together, and v_s those of stage s with
every layer in its fastest option, credits of a split backward taken off,

    T = max_r (m t_r + Σ sync) + (P - 1) max_s v_s

which is what `planner.pipeline_model` says where stages are alike: the bubble waits for the largest
stage.  At every moment rank r holds a micro-batch's stored bytes a_c times for the layers of its
c-th stage, and what waits for the gradients of weights w_c times.  `moments[r]` are those (a_0,
a_1, w_0, w_1) that no other moment of the schedule's order exceeds; for each of them

    fixed_r + max transient + Σ_c (a_c passed_rc + Σ_l (resident + a_c stored + w_c kept))

is within its capacity, unless `used_bytes` says what a rank holds: then those are sums that are no
more.

A cut is charged to both ranks that meet at it, and to neither if they are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np

from planner import fullest
from planner.solver.instance import Option
from planner.tolerances import EQUAL, ROUNDING

Moment = tuple[int, int, int, int]
Spans = tuple[tuple[int, int], tuple[int, int]]
"""First layer and end of both stages of a rank."""
UsedByRank = Callable[[int, Spans, Sequence[int]], float]
"""Bytes of a rank: its number, its layers, and their options, those of the first stage first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsProblem:
    """`layers` [layer] index `kinds`, whose options differ in no resident, kept or sync figure."""

    layers: tuple[int, ...]
    kinds: tuple[tuple[Option, ...], ...]
    home: tuple[int, ...]
    moments: tuple[tuple[Moment, ...], ...]
    capacity_bytes: float
    fixed_bytes: tuple[float, ...]
    passed_bytes: tuple[tuple[float, float], ...] = ()
    """[rank] What a micro-batch alive holds at the ends of each stage; empty means nothing."""
    used_bytes: UsedByRank | None = field(default=None, repr=False, compare=False)
    exposed_s: tuple[float, ...]
    micro_batches: int
    credits_s: tuple[float, ...] = ()
    cut_s: tuple[float, ...] = ()
    """[position] Empty means none; those of the two ends are not read."""

    def __post_init__(self) -> None:
        for table in self.kinds:
            alike = {(o.resident_bytes, o.kept_bytes, o.sync_s) for o in table}
            if len(alike) != 1:
                raise ValueError("options of a kind differ in resident, kept or sync figures")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.home) // 2

    @property
    def folded(self) -> bool:
        """Whether the first and the last stage lie on one rank."""
        return self.home[0] == self.home[-1]

    def passed_by(self, rank: int) -> tuple[float, float]:
        """Return what a micro-batch alive holds at the ends of each stage of a rank."""
        return self.passed_bytes[rank] if self.passed_bytes else (0.0, 0.0)

    def fits(self, rank: int, spans: Spans, options: Sequence[int]) -> bool:
        """Whether a rank has the bytes for layers with these options."""
        used = self.used_bytes or self.sum_bytes
        return used(rank, spans, options) <= self.capacity_bytes * (1 + ROUNDING)

    def sum_bytes(self, rank: int, spans: Spans, options: Sequence[int]) -> float:
        """Return what a rank holds by sums over its layers."""
        layers = [at for span in spans for at in range(*span)]
        own = [self.kinds[self.layers[at]][o] for at, o in zip(layers, options, strict=True)]
        width = spans[0][1] - spans[0][0]
        front, behind = own[:width], own[width:]
        b_0, b_1 = self.passed_by(rank)
        return (
            self.fixed_bytes[rank]
            + sum(o.resident_bytes for o in own)
            + max(o.transient_bytes for o in own)
            + max(
                a_0 * b_0
                + a_1 * b_1
                + sum(a_0 * o.stored_bytes + w_0 * o.kept_bytes for o in front)
                + sum(a_1 * o.stored_bytes + w_1 * o.kept_bytes for o in behind)
                for a_0, a_1, w_0, w_1 in self.moments[rank]
            )
        )

    def stages_of(self, rank: int) -> tuple[int, int]:
        """Return the two stages of a rank in order."""
        first, second = (s for s, r in enumerate(self.home) if r == rank)
        return first, second

    def cut_between(self, stage: int, position: int) -> float:
        """Seconds of the cut behind a stage, if it stands there."""
        if not self.cut_s or stage in (-1, len(self.home) - 1):
            return 0.0
        return 0.0 if self.home[stage] == self.home[stage + 1] else self.cut_s[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSolution:
    """Stage s holds layers cuts[s] .. cuts[s + 1] - 1; no split takes less than the bound."""

    cuts: tuple[int, ...]
    options: tuple[int, ...]
    objective_s: float
    lower_bound_s: float

    @property
    def optimal(self) -> bool:
        """Whether no split takes less."""
        return self.lower_bound_s >= self.objective_s * (1 - EQUAL)


@lru_cache(maxsize=1 << 10)
def moments(schedule: str, ranks: int, micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """[rank] What is alive and what waits, of each of its two stages, at its fullest moments.

    A backward's own micro-batch is alive in it, and does not wait yet.

    >>> moments("interleaved", 2, 4)[0]
    ((3, 2, 0, 0), (4, 1, 0, 0))
    """
    result = []
    for rank in range(ranks):
        found = fullest.moments(
            schedule, rank, ranks=ranks, micro_batches=micro_batches, virtual_stages=2
        )
        rows = np.hstack([found.holding, found.waiting])[found.kind != fullest.KINDS.index("W")]
        seen = {(int(a_0), int(a_1), int(w_0), int(w_1)) for a_0, a_1, w_0, w_1 in rows}
        most = {
            one
            for one in seen
            if not any(
                other != one and all(a >= b for a, b in zip(other, one, strict=True))
                for other in seen
            )
        }
        result.append(tuple(sorted(most)))
    return tuple(result)


def objective_s(problem: RoundsProblem, cuts: Sequence[int], options: Sequence[int]) -> float:
    """Seconds of one split by the formulas of this module; inf if a rank has not the bytes."""
    slowest_s = max(rank_s(problem, rank, cuts, options) for rank in range(problem.ranks))
    return slowest_s + (problem.ranks - 1) * largest_stage_s(problem, cuts)


def rank_s(problem: RoundsProblem, rank: int, cuts: Sequence[int], options: Sequence[int]) -> float:
    """Seconds of a rank, m t + sync, with these options of all layers; inf if it lacks bytes."""
    both = problem.stages_of(rank)
    front, behind = ((cuts[s], cuts[s + 1]) for s in both)
    layers = [*range(*front), *range(*behind)]
    if not problem.fits(rank, (front, behind), [options[at] for at in layers]):
        return math.inf
    own = [problem.kinds[problem.layers[at]][options[at]] for at in layers]
    seconds: float = sum(o.time_s for o in own) + problem.exposed_s[rank]
    seconds += sum(_beside_s(problem, s, cuts) for s in both)
    sync_s: float = sum(o.sync_s for o in own)
    return problem.micro_batches * seconds + sync_s


def largest_stage_s(problem: RoundsProblem, cuts: Sequence[int]) -> float:
    """Seconds of the largest stage, layers at their fastest and credits taken off."""
    return max(
        sum(_least_s(problem, problem.layers[at]) for at in range(first, end))
        + problem.exposed_s[problem.home[s]] / 2
        + _beside_s(problem, s, cuts)
        for s, (first, end) in enumerate(pairwise(cuts))
    )


def _beside_s(problem: RoundsProblem, stage: int, cuts: Sequence[int]) -> float:
    """Seconds of the cuts at both ends of a stage."""
    before = problem.cut_between(stage - 1, cuts[stage])
    return before + problem.cut_between(stage, cuts[stage + 1])


def _least_s(problem: RoundsProblem, kind: int) -> float:
    credit_s = problem.credits_s[kind] if problem.credits_s else 0.0
    return min(o.time_s for o in problem.kinds[kind]) - credit_s
