"""inner.solve is checked against every split there is, on problems small enough to list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.solver.frontier import FrontierStore
from planner.solver.inner import solve
from planner.solver.instance import (
    Infeasible,
    Instance,
    Option,
    Solution,
    StageLimits,
)


def test_the_slowest_forward_and_backward_apart_are_never_faster() -> None:
    instance = decoder()

    assert objective_of(replace(instance, forward_apart=True)) >= objective_of(instance)


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


def test_more_capacity_is_never_slower() -> None:
    instance = decoder()

    times_s = [
        objective_of(
            replace(
                instance,
                stages=tuple(replace(s, capacity_bytes=room * 1e9) for s in instance.stages),
            )
        )
        for room in (26, 30, 34, 38, 50, 80)
    ]

    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]


@pytest.mark.parametrize("faster", range(4))
def test_a_faster_stage_is_never_slower(faster: int) -> None:
    instance = decoder()
    stages = list(instance.stages)
    stages[faster] = replace(stages[faster], time_scale=0.5)

    assert objective_of(replace(instance, stages=tuple(stages))) < objective_of(instance)


@pytest.mark.parametrize("first", [1.0, 5.0])
def test_a_run_may_be_longer_than_an_even_one_if_only_the_sum_counts(first: float) -> None:
    layer = (Option(name="none", forward_s=1, backward_s=2),)
    stages = (
        StageLimits(capacity_bytes=0, time_scale=first),
        StageLimits(capacity_bytes=0, time_scale=6.0 - first),
    )

    answer = solve(Instance(layers=(0,) * 40, kinds=(layer,), stages=stages, steady=0))

    assert isinstance(answer, Solution)
    assert answer.sizes() == ((39, 1) if first == 1.0 else (1, 39))


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


def test_the_first_layers_of_a_stage_recompute() -> None:
    answer = solve(decoder())

    assert isinstance(answer, Solution)
    blocks = answer.options[1 : answer.cuts[1]]
    assert sum(blocks) > 0
    assert list(blocks) == sorted(blocks, reverse=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"stages": (StageLimits(capacity_bytes=200e9),) * 40},
            "40 stages need at least 40 layers",
        ),
        ({"stages": (StageLimits(capacity_bytes=1e9),) * 4}, "layer 0 alone fits on no stage"),
        (
            {"stages": (StageLimits(capacity_bytes=10e9),) * 4},
            "hold only the first 16 of 32 layers",
        ),
        (
            {"stages": (StageLimits(capacity_bytes=5e9), StageLimits(capacity_bytes=1e9))},
            "stage 1 cannot hold layer 1",
        ),
    ],
)
def test_an_infeasible_instance_says_what_binds(
    change: dict[str, tuple[StageLimits, ...]], words: str
) -> None:
    answer = solve(replace(decoder(), **change))

    assert isinstance(answer, Infeasible)
    assert words in answer.reason
