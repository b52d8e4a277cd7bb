"""Steps whose steady part is skipped, against the whole simulation."""

import random
import time

import pytest

from planner.schedules import SCHEDULES, steady_state
from planner.schedules.schedule import obstacle, orders
from planner.schedules.simulate import timeline
from planner.schedules.steady_state import LAYERS, StageTimes, cut_of, rank_times

SECONDS = (
    lambda rng: rng.uniform(0.5, 1.5),
    lambda rng: float(rng.randint(0, 4)),
    lambda rng: rng.expovariate(1.0),
    lambda rng: 1.0 + rng.randint(0, 2) * 1e-6,
    lambda rng: rng.uniform(0.95, 1.05),
    lambda rng: rng.choice((1.0, 1.01, 1.5)),
)
"""Ranks that differ, tie, differ much, nearly tie, are nearly alike, catch up with others."""


def shape_of(name: str, rng: random.Random) -> tuple[int, int, int]:
    """Return ranks, stages per rank and micro-batches that a schedule can run."""
    schedule = SCHEDULES[name]
    ranks, virtual = rng.randint(1, 8), 1
    if schedule.several_stages:
        ranks = max(2, ranks)
        virtual = 2 if schedule.placement == "v" else rng.randint(2, 3)
    count = rng.randint(2 * ranks, 30 * ranks)
    if obstacle(
        name, stages=ranks * virtual, micro_batches=count, virtual_stages=virtual
    ):  # whole groups
        count = count // ranks * ranks
    return ranks, virtual, count


def times_of(name: str, stages: int, rng: random.Random) -> StageTimes:
    drawn = rng.choice(SECONDS)
    weight_s = [drawn(rng) for _ in range(stages)]
    return StageTimes(
        forward_s=[drawn(rng) for _ in range(stages)],
        backward_s=[drawn(rng) + weight for weight in weight_s],
        weight_s=weight_s if SCHEDULES[name].splits_backward else None,
        transfer_s=[rng.choice((0.0, 0.02, 0.3, 1.0)) * drawn(rng) for _ in range(stages - 1)],
        exposed_s=[rng.choice((0.0, 0.0, 0.1)) * drawn(rng) for _ in range(stages - 1)],
    )


def differences(name: str, seed: int) -> tuple[float, bool]:
    """Return how far apart the ends of ranks are, relatively, and whether layers were looked at."""
    rng = random.Random(f"{name} {seed}")
    ranks, virtual, count = shape_of(name, rng)
    times = times_of(name, ranks * virtual, rng)
    run = timeline(
        orders(name, stages=ranks * virtual, micro_batches=count, virtual_stages=virtual),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        weight_s=times.weight_s,
        transfer_s=times.transfer_s,
        exposed_s=times.exposed_s,
    )
    found = rank_times(name, times, micro_batches=count, virtual_stages=virtual)
    most_s = max(run.makespan_s, 1e-9)
    apart = max(
        max(
            abs(found.finish_s[rank] - run.finish_s(rank)),
            abs(found.busy_s[rank] - run.busy_s(rank)),
        )
        / most_s
        for rank in range(ranks)
    )
    if SCHEDULES[name].forwards_first:
        return apart, True
    cut = cut_of(name, ranks, virtual)
    return apart, cut is not None and count >= cut.micro_batches + LAYERS * cut.period


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cases", [30, pytest.param(3000, marks=pytest.mark.matrix)])
def test_ranks_end_as_in_the_whole_simulation(
    name: str, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady_state, "WORTH", 0)

    found = [differences(name, seed) for seed in range(cases)]

    assert max(apart for apart, _ in found) < 1e-11
    assert sum(looked for _, looked in found) > cases / 2


def test_a_hundred_times_the_micro_batches_take_no_longer_to_predict() -> None:
    rng = random.Random(0)
    times = StageTimes(
        forward_s=[rng.uniform(0.9, 1.1) for _ in range(32)],
        backward_s=[rng.uniform(1.9, 2.1) for _ in range(32)],
        weight_s=None,
        transfer_s=[0.02] * 31,
        exposed_s=[0.0] * 31,
    )

    def seconds(count: int) -> float:
        started = time.process_time()
        rank_times("1f1b", times, micro_batches=count)
        return time.process_time() - started

    seconds(1_000)
    assert seconds(60_000) < 5 * seconds(1_000) + 0.1
