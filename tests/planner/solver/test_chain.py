"""inner.solve is checked against every split there is, on problems small enough to list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.solver.chain import solve
from meshwright.planner.solver.frontier import FrontierStore
from meshwright.planner.solver.partition_problem import (
    Instance,
    Option,
    Solution,
    StageLimits,
)


def decoder(blocks: int = 30, depth: int = 4, microbatches: int = 16) -> Instance:
    """An embedding, alike blocks that can recompute, and a heavy head."""

    def option(name: str, backward_s: float, stored: float, transient: float) -> Option:
        return Option(
            name=name,
            forward_s=0.004,
            backward_s=backward_s,
            stored_bytes=stored,
            transient_bytes=transient,
            resident_bytes=2e9,
            sync_s=0.01,
        )

    embedding = (option("none", 0.001, 0.1e9, 0.0),)
    block = (
        option("none", 0.008, 1.0e9, 0.1e9),
        option("selective", 0.009, 0.6e9, 0.4e9),
        option("full", 0.012, 0.1e9, 1.0e9),
    )
    head = (option("none", 0.006, 0.1e9, 2.0e9),)
    return Instance(
        layers=(0, *[1] * blocks, 2),
        kinds=(embedding, block, head),
        stages=tuple(
            StageLimits(capacity_bytes=36e9, in_flight=min(microbatches, depth - s))
            for s in range(depth)
        ),
        steady=microbatches - 1,
    )


def objective_of(instance: Instance) -> float:
    answer = solve(instance)
    assert isinstance(answer, Solution)
    return answer.objective_s


@pytest.mark.parametrize("faster", range(4))
def test_a_faster_stage_is_never_slower(faster: int) -> None:
    instance = decoder()
    stages = list(instance.stages)
    stages[faster] = replace(stages[faster], time_scale=0.5)

    assert objective_of(replace(instance, stages=tuple(stages))) < objective_of(instance)


def test_a_shared_store_changes_no_answer() -> None:
    store = FrontierStore()
    instances = [decoder(depth=depth, microbatches=m) for depth in (2, 4, 8) for m in (4, 16)]

    shared = [solve(instance, frontiers=store) for instance in instances]

    assert shared == [solve(instance) for instance in instances]


def test_with_room_for_everything_nothing_is_recomputed_and_ties_cut_early() -> None:
    layer = (
        Option(name="none", forward_s=1, backward_s=2, stored_bytes=5),
        Option(name="free", forward_s=1, backward_s=2, stored_bytes=1),
    )
    roomy = StageLimits(capacity_bytes=100)

    answer = solve(Instance(layers=(0,) * 5, kinds=(layer,), stages=(roomy,) * 2, steady=7))

    assert isinstance(answer, Solution)
    assert answer.options == (0,) * 5
    assert answer.cuts == (0, 2, 5)
