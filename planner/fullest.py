"""When a rank of a pipeline holds most: what its stages hold at the fullest moments of its order.

A rank's order is walked action by action.  A micro-batch is alive on a stage from F to the end of B
or I, and waits from the end of I to W.  A moment is an action with what is alive and waits beside
it; of an action's moments only those matter that no other one exceeds on every stage.

From 2 P micro-batches on these are the same, however many there are, if a schedule repeats itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from planner.schedule import Kind, orders, rank_of_stage
from planner.schedules import schedule_of


class Moment(NamedTuple):
    """An action, and how many micro-batches each of the rank's stages has beside it."""

    place: int
    """Of the stage that acts, among the rank's stages in the order of the model."""
    kind: Kind
    alive: tuple[int, ...]
    waiting: tuple[int, ...]

    @property
    def holding(self) -> tuple[int, ...]:
        """[stage] Micro-batches alive, the one that acts included; a W has none alive."""
        acting = self.kind != "W"
        return tuple(count + (acting and at == self.place) for at, count in enumerate(self.alive))


def fullest(
    name: str, *, ranks: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[tuple[Moment, ...], ...]:
    """[rank] The fullest moments under a schedule.

    >>> moments = fullest("interleaved", ranks=2, micro_batches=4, virtual_stages=2)[0]
    >>> sorted({moment.holding for moment in moments})
    [(3, 2), (4, 1)]
    """
    if schedule_of(name).repeats:
        micro_batches = min(micro_batches, 2 * ranks)
    return _fullest(name, ranks, micro_batches, virtual_stages)


@lru_cache(maxsize=1 << 10)
def _fullest(
    name: str, ranks: int, micro_batches: int, virtual_stages: int
) -> tuple[tuple[Moment, ...], ...]:
    stages = ranks * virtual_stages
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual_stages)
    every = orders(name, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)
    result = []
    for rank, order in enumerate(every):
        place = {s: at for at, s in enumerate(s for s, r in enumerate(home) if r == rank)}
        alive, waiting = [0] * virtual_stages, [0] * virtual_stages
        seen: dict[tuple[int, Kind], set[tuple[int, ...]]] = {}
        for stage, kind, _ in order:
            at = place[stage]
            alive[at] -= kind in "BI"
            seen.setdefault((at, kind), set()).add((*alive, *waiting))
            alive[at] += kind == "F"
            waiting[at] += (kind == "I") - (kind == "W")
        result.append(
            tuple(
                Moment(at, kind, one[:virtual_stages], one[virtual_stages:])
                for (at, kind), some in sorted(seen.items())
                for one in sorted(_unexceeded(some))
            )
        )
    return tuple(result)


def _unexceeded(counts: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the counts that no other ones exceed everywhere."""
    return [
        one
        for one in counts
        if not any(
            other != one and all(a >= b for a, b in zip(other, one, strict=True))
            for other in counts
        )
    ]
