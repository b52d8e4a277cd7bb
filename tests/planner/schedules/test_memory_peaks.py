"""The fullest moments of ranks, against a walk through their whole orders."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.documents.plan import ScheduleName
from meshwright.planner.schedules import schedule_of
from meshwright.planner.schedules.memory_peaks import KINDS, fullest, moments
from meshwright.planner.schedules.schedule import obstacle, orders, rank_of_stage
from meshwright.planner.schedules.schedule_record import LEAN, Shape

SHAPES: list[tuple[ScheduleName, int]] = [
    ("1f1b", 1),
    ("zb-h1", 1),
    *(("interleaved", virtual) for virtual in range(2, 9)),
    *(("interleaved-zb", virtual) for virtual in range(2, 9)),
    ("zbv", 2),
    ("dualpipe-v", 2),
]


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 10), (3, 9), (4, 16), (4, 7)])
def test_moments_peak_as_the_whole_order_does(
    name: ScheduleName, virtual: int, ranks: int, micro_batches: int
) -> None:
    stages = ranks * virtual
    shape = {"micro_batches": micro_batches, "virtual_stages": virtual}
    if obstacle(name, stages=stages, **shape):
        pytest.skip("the schedule does not run so")
    rng = random.Random(f"{name} {virtual} {ranks} {micro_batches}")
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual)
    for rank, order in enumerate(orders(name, stages=stages, **shape)):
        own = [stage for stage in range(stages) if home[stage] == rank]
        found = moments(name, rank, ranks=ranks, **shape)
        for _ in range(5):
            stored = {stage: rng.uniform(0, 3) for stage in own}
            kept = {stage: rng.uniform(0, 3) for stage in own}
            acting = {(stage, kind): rng.uniform(0, 9) for stage in own for kind in KINDS}
            alive, most = dict.fromkeys(own, 0), 0.0
            waiting = dict.fromkeys(own, 0)
            for stage, kind, _ in order:
                alive[stage] -= kind in "BI"
                here = sum(alive[s] * stored[s] + waiting[s] * kept[s] for s in own)
                most = max(most, here + acting[stage, kind])
                alive[stage] += kind == "F"
                waiting[stage] += (kind == "I") - (kind == "W")

            beside = found.beside @ [stored[s] for s in own] + found.waiting @ [
                kept[s] for s in own
            ]
            here = [
                acting[own[place], KINDS[kind]] + size
                for place, kind, size in zip(found.place, found.kind, beside, strict=True)
            ]

            assert max(here) == pytest.approx(most, rel=1e-12)


@pytest.mark.spread(60)
@pytest.mark.parametrize(("name", "virtual"), SHAPES[1:])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_moment_that_counts_is_a_backward_with_most_alive(
    name: ScheduleName, virtual: int, ranks: int, turns: int
) -> None:
    shape = {"micro_batches": turns * ranks, "virtual_stages": virtual}
    if obstacle(name, stages=ranks * virtual, **shape):
        pytest.skip("the schedule does not run so")
    most = fullest(name, ranks=ranks, **shape)
    for rank in range(ranks):
        found = moments(name, rank, ranks=ranks, **shape)
        backward = np.isin(found.kind, (1, 2)) & (found.place == most.place[rank])
        same = (found.holding == most.holding[:, rank]).all(axis=1)
        same &= (found.waiting >= most.waiting[:, rank]).all(axis=1)
        assert (backward & same).any()
        assert most.holding[:, rank].sum() == found.holding.sum(axis=1).max()


@pytest.mark.spread(60)
@pytest.mark.parametrize(("name", "virtual"), SHAPES[1:])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_where_layers_store_little_most_waits_at_the_moment_that_counts(
    name: ScheduleName, virtual: int, ranks: int, turns: int
) -> None:
    shape = {"micro_batches": turns * ranks, "virtual_stages": virtual}
    if obstacle(name, stages=ranks * virtual, **shape):
        pytest.skip("the schedule does not run so")
    most = fullest(name, ranks=ranks, **shape, deferred=LEAN)
    for rank in range(ranks):
        found = moments(name, rank, ranks=ranks, **shape)
        backward = np.isin(found.kind, (1, 2))
        held = most.holding[:, rank], most.waiting[:, rank]
        same = (found.holding >= held[0]).all(axis=1) & (found.waiting >= held[1]).all(axis=1)
        assert (same & backward & (found.place == most.place[rank])).any()
        if turns > 1:
            weights = found.holding.sum(axis=1) + LEAN * found.waiting.sum(axis=1)
            assert held[0].sum() + LEAN * held[1].sum() >= 0.9 * weights[backward].max()


@pytest.mark.parametrize(("name", "virtual"), SHAPES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 6), (4, 8)])
def test_a_rank_has_as_many_micro_batches_as_its_order_leaves(
    name: ScheduleName, virtual: int, ranks: int, micro_batches: int
) -> None:
    shape = Shape(ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
    schedule = schedule_of(name)
    walked = replace(schedule, in_flight=None)  # counted as one that is made up
    for rank in range(ranks):
        order = schedule.order(rank, shape)
        fullest_stage = max(
            sum(one.kind == "F" for one in order[: end + 1] if one.stage == here.stage)
            - sum(one.kind in "BI" for one in order[:end] if one.stage == here.stage)
            for end, here in enumerate(order)
        )

        assert walked.counts(rank, shape).alive == virtual * fullest_stage
