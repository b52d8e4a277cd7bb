"""The queue of layouts is checked against solving every layout."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from meshwright.planner.documents.plan import Layout
from meshwright.planner.search.goals import ClosedFormGoal, SplitSolution
from meshwright.planner.search.proof_account import BOUNDS, OUT_OF_MEMORY
from meshwright.planner.search.queue import Bound, LayoutBatch, Pruned, Queue, SearchSpace
from meshwright.planner.search.space import complexity

Seconds = dict[Layout, float]


def layouts() -> list[Layout]:
    return [
        Layout(pipeline=pipeline, data_replicate=8 // pipeline, micro_batch=size, micro_batches=8)
        for pipeline in (1, 2, 4, 8)
        for size in (1, 2, 4)
    ]


def random_seconds(seed: int) -> Seconds:
    """Objectives, many of them equal, some inf for what does not fit."""
    rng = random.Random(seed)
    return {
        layout: math.inf if rng.random() < 0.2 else float(rng.randint(5, 12))
        for layout in layouts()
    }


@dataclass
class Split:
    """What a solver would return."""

    text: str
    optimal: bool


class Known(SearchSpace):
    """Layouts with known seconds, some alone and some in bundles."""

    def __init__(self, seconds: Seconds, seed: int, proven: float) -> None:
        """Bounds are random parts of the objectives, the second at least the first."""
        self._seconds, self._proven, self._rng = seconds, proven, random.Random(seed)
        rng = self._rng
        self._shares = {layout: sorted((rng.random(), rng.random())) for layout in seconds}

    @property
    def bounds(self) -> list[tuple[str, Bound]]:
        return [
            (BOUNDS[0], partial(self._bound_s, 0)),
            (BOUNDS[2], partial(self._bound_s, 1)),
        ]

    def _bound_s(self, step: int, layout: Layout) -> float:
        known_s, share = self._seconds[layout], self._shares[layout][step]
        if math.isinf(known_s):
            return math.inf if share > 0.7 else 1.0
        return share * known_s

    def bundles(self, _: Counter[str]) -> Iterator[tuple[float, LayoutBatch]]:
        left = self._rng.sample(list(self._seconds), len(self._seconds))
        while left:
            some = [left.pop() for _ in range(min(len(left), self._rng.randint(1, 3)))]
            least_s = min(self._bound_s(0, one) for one in some)
            yield min(least_s, 1e9), LayoutBatch(tuple(sorted(some, key=complexity)))

    def refusal(self, _: Layout) -> None:
        return None

    def costs_of(self, _: Layout) -> Any:
        raise AssertionError("nobody asks")

    def candidate_of(self, _: SplitSolution[Any]) -> Any:
        raise AssertionError("nobody asks")

    def solve(self, layout: Layout, _: float) -> SplitSolution[Split] | Pruned:
        least_s = self._seconds[layout]
        if math.isinf(least_s):
            return Pruned(OUT_OF_MEMORY, reason="too large")
        split = Split(layout.text(), self._proven == 1.0)
        return SplitSolution(least_s, self._proven * least_s, layout, split)


def searched(
    seconds: Seconds, seed: int, *, top: int = 1, below_s: float = math.inf, proven: float = 1.0
) -> tuple[list[SplitSolution[Split]], Queue]:
    """Return the best of each kind and the queue that found them."""
    goal = ClosedFormGoal(top=top, below_s=below_s)
    queue = Queue(goal)
    queue.run(Known(seconds, seed, proven))
    return goal.ranking(), queue


def counted(queue: Queue) -> int:
    """How many layouts were counted, found, or are left."""
    assert isinstance(queue.goal, ClosedFormGoal)
    left = sum(entry.size for entry in queue.rest())
    return sum(queue.account.counts.values()) + len(queue.goal.found) + left


@pytest.mark.parametrize("seed", range(60))
def test_no_layout_is_faster_and_the_simplest_of_equals_wins(seed: int) -> None:
    seconds = random_seconds(seed)
    fitting = [layout for layout in seconds if math.isfinite(seconds[layout])]
    best = min(fitting, key=lambda layout: (seconds[layout], complexity(layout)))

    found, queue = searched(seconds, seed)

    assert found[0].layout == best
    assert found[0].split.text == best.text()
    assert counted(queue) == len(seconds)


def test_a_layout_that_is_not_proven_bounds_the_whole() -> None:
    seconds = random_seconds(1)

    found, queue = searched(seconds, 1, proven=0.9)

    assert isinstance(queue.goal, ClosedFormGoal)
    assert 0.9 * found[0].objective_s <= queue.goal.bound_s() < found[0].objective_s
    assert len(queue.goal.found) == queue.goal.solved - len(queue.misses)


def test_two_spaces_are_one_search() -> None:
    seconds = random_seconds(2)
    parts: list[Seconds] = [{}, {}]
    for at, (layout, known_s) in enumerate(seconds.items()):
        parts[at % 2][layout] = known_s
    whole, _ = searched(seconds, 2)
    spaces, goal = [Known(part, 2, 1.0) for part in parts], ClosedFormGoal()
    queue = Queue(goal)

    for space in spaces:
        queue.run(space)

    (found,) = goal.ranking()
    assert found.layout == whole[0].layout
    assert goal.home(found) in spaces
    assert counted(queue) == len(seconds)
