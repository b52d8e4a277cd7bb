"""The longest path of a pipeline step: which actions a step waits for.

A step takes as long as its longest path of actions, each after the one before it on its rank or the
one that makes its input.  Orders do not depend on seconds, so the actions of a path that is longest
at some stage times are a lower bound of the step at all stage times: a linear one,

    T >= Σ visits · seconds + Σ hops · transfer + what the rank does where it ends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.schedules.actions import Action, Kind
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.planner.schedules.steady_state import in_order, source_of, split_of

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""In the order of `Path.visits`."""


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A path to the end of a rank."""

    rank: int
    visits: NDArray[np.float64]
    """[kind of `KINDS`, stage]"""
    hops: NDArray[np.float64]
    """[boundary] How often it waits for a transfer, forwards or backwards."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The actions of a step, each behind what it waits for."""

    stages: int
    nodes: tuple[tuple[int, int, int, int], ...]
    """Place among [kind, stage]; of the action before it on its rank, of the one that makes its
    input, -1 where there is none; the boundary between, or that behind the last where none is."""
    ends: tuple[int, ...]
    """[rank] Its last action."""

    def longest(self, seconds: Sequence[float], transfer_s: Sequence[float]) -> list[float]:
        """[node] When it ends; `seconds` [kind, stage] in one row."""
        delays = [*transfer_s, 0.0]
        ends: list[float] = []
        for cost, rank, source, boundary in self.nodes:
            now = ends[rank] if rank >= 0 else 0.0
            if source >= 0:
                now = max(now, ends[source] + delays[boundary])
            ends.append(now + seconds[cost])
        return ends

    def path(self, rank: int, ends_s: Sequence[float], transfer_s: Sequence[float]) -> Path:
        """Return a longest path to the end of a rank, by what `longest` returned."""
        delays = [*transfer_s, 0.0]
        visits, hops = np.zeros(len(KINDS) * self.stages), np.zeros(self.stages)
        at = self.ends[rank]
        while at >= 0:
            cost, owner, source, boundary = self.nodes[at]
            visits[cost] += 1
            before = ends_s[owner] if owner >= 0 else 0.0
            if source >= 0 and ends_s[source] + delays[boundary] > before:
                hops[boundary] += 1
                at = source
            else:
                at = owner
        return Path(rank, visits.reshape(len(KINDS), self.stages), hops[:-1])


@lru_cache(maxsize=32)
def graph_of(schedule: str, *, stages: int, micro_batches: int, virtual_stages: int = 1) -> Graph:
    """Return the graph of a schedule.

    >>> graph = graph_of("1f1b", stages=2, micro_batches=3)
    >>> ends_s = graph.longest([1.0, 1.0, 2.0, 2.0, 0, 0, 0, 0], [0.5])
    >>> ends_s[graph.ends[0]], graph.path(0, ends_s, [0.5]).visits[:2].tolist()
    (14.0, [[2.0, 2.0], [2.0, 2.0]])
    """
    shape = {"stages": stages, "virtual_stages": virtual_stages}
    home = rank_of_stage(schedule, **shape)
    lists = orders(schedule, micro_batches=micro_batches, **shape)
    split = split_of(lists)
    before, place = [-1] * len(lists), dict[Action, int]()
    nodes = []
    for at, (rank, action) in enumerate(in_order(lists, split, home)):
        source, boundary = source_of(action, stages, split), stages - 1
        if source is not None and home[source.stage] != rank:
            boundary = min(source.stage, action.stage)
        nodes.append(
            (
                KINDS.index(action.kind) * stages + action.stage,
                before[rank],
                -1 if source is None else place[source],
                boundary,
            )
        )
        before[rank] = place[action] = at
    return Graph(stages, tuple(nodes), tuple(before))
