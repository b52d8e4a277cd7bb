"""inner.solve is checked against every split there is, on problems small enough to list."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.solver.frontier import FrontierStore
from planner.solver.inner import solve
from planner.solver.instance import (
    Fathomed,
    Infeasible,
    Instance,
    Option,
    Solution,
    StageLimits,
    fits,
)
from planner.solver.knapsack import Knapsacks
from tests.planner.solver.small_instances import least_objective_s, objective_s, random_instance


def agrees_with_enumeration(instance: Instance) -> bool:
    """Solve, compare with the best of all splits, and say whether any fits."""
    best_s = least_objective_s(instance)
    answer = solve(instance)
    if best_s == math.inf:
        assert isinstance(answer, Infeasible)
        assert answer.reason
        return False
    assert isinstance(answer, Solution)
    assert answer.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
    assert objective_s(instance, answer.cuts, answer.options) == pytest.approx(answer.objective_s)
    assert answer.optimal
    assert fits(instance, answer)
    return True


@pytest.mark.parametrize("start", range(0, 300, 60))
def test_no_split_beats_the_solution(start: int) -> None:
    feasible = [agrees_with_enumeration(random_instance(seed)) for seed in range(start, start + 60)]

    assert 20 < sum(feasible) < 60


@pytest.mark.parametrize("start", range(300, 480, 60))
def test_stages_settled_one_by_one_lead_to_the_same_optimum(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Knapsacks, "alike", lambda _, __: False)

    feasible = [agrees_with_enumeration(random_instance(seed)) for seed in range(start, start + 60)]

    assert 20 < sum(feasible) < 60


@pytest.mark.parametrize("seed", range(480, 520))
def test_a_cutoff_below_the_optimum_fathoms_and_one_above_does_not(seed: int) -> None:
    instance = random_instance(seed)
    best = solve(instance)
    if not isinstance(best, Solution):
        assert not isinstance(solve(instance, cutoff_s=1e9), Solution)
        return
    hair_s = 1e-6 * abs(best.objective_s) + 1e-9

    below = solve(instance, cutoff_s=best.objective_s - hair_s)
    above = solve(instance, cutoff_s=best.objective_s + hair_s)

    assert isinstance(below, Fathomed)
    assert below.lower_bound_s <= best.objective_s
    assert above == best


@pytest.mark.parametrize("start", range(600, 700, 50))
def test_options_may_differ_in_what_they_synchronise(start: int) -> None:
    instances = [random_instance(seed, sync_by_option=True) for seed in range(start, start + 50)]

    feasible = [agrees_with_enumeration(instance) for instance in instances]

    assert 15 < sum(feasible) < 50


@pytest.mark.parametrize("start", range(700, 800, 50))
@pytest.mark.parametrize("sync_by_option", [False, True])
def test_forward_and_backward_may_have_different_slowest_stages(
    start: int, sync_by_option: bool
) -> None:
    instances = [
        random_instance(seed, forward_apart=True, sync_by_option=sync_by_option)
        for seed in range(start, start + 50)
    ]

    feasible = [agrees_with_enumeration(instance) for instance in instances]

    assert 15 < sum(feasible) < 50


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
