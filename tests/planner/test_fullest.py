"""The fullest moments of ranks, against a walk through their whole orders."""

from __future__ import annotations

import random

import pytest

from planner.fullest import fullest
from planner.plan import ScheduleName
from planner.schedule import obstacle, orders, rank_of_stage

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
def test_no_moment_of_an_order_is_fuller(
    name: ScheduleName, virtual: int, ranks: int, micro_batches: int
) -> None:
    stages = ranks * virtual
    shape = {"micro_batches": micro_batches, "virtual_stages": virtual}
    if obstacle(name, stages=stages, **shape):
        pytest.skip("the schedule does not run so")
    rng = random.Random(f"{name} {virtual} {ranks} {micro_batches}")
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual)
    moments = fullest(name, ranks=ranks, **shape)
    for rank, order in enumerate(orders(name, stages=stages, **shape)):
        own = [stage for stage in range(stages) if home[stage] == rank]
        for _ in range(5):
            stored = {stage: rng.uniform(0, 3) for stage in own}
            kept = {stage: rng.uniform(0, 3) for stage in own}
            acting = {(stage, kind): rng.uniform(0, 9) for stage in own for kind in "FBIW"}
            alive, most = dict.fromkeys(own, 0), 0.0
            waiting = dict.fromkeys(own, 0)
            for stage, kind, _ in order:
                alive[stage] -= kind in "BI"
                here = sum(alive[s] * stored[s] + waiting[s] * kept[s] for s in own)
                most = max(most, here + acting[stage, kind])
                alive[stage] += kind == "F"
                waiting[stage] += (kind == "I") - (kind == "W")

            found = max(
                acting[own[moment.place], moment.kind]
                + sum(n * stored[s] for n, s in zip(moment.alive, own, strict=True))
                + sum(n * kept[s] for n, s in zip(moment.waiting, own, strict=True))
                for moment in moments[rank]
            )

            assert found == pytest.approx(most, rel=1e-12)
