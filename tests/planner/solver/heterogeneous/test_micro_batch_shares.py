"""shares.fastest_shares is checked against every way to share, where they can be listed."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.planner.solver.heterogeneous.micro_batch_shares import (
    MonotonePace,
    Replica,
    fastest_counts,
    fastest_shares,
)


def step_s(replicas: list[Replica], shares: tuple[int, ...]) -> float:
    return max(replica.end_s(share) for replica, share in zip(replicas, shares, strict=True))


def random_replicas(rng: random.Random, most: int = 4) -> list[Replica]:
    whole = rng.random() < 0.5
    return [
        Replica(fill_s=float(rng.randint(0, 9)), steady_s=float(rng.randint(1, 4)))
        if whole
        else Replica(fill_s=rng.uniform(0, 9), steady_s=rng.uniform(0.1, 4))
        for _ in range(rng.randint(1, most))
    ]


@pytest.mark.parametrize("start", range(0, 300, 60))
def test_no_other_shares_end_earlier(start: int) -> None:
    for seed in range(start, start + 60):
        rng = random.Random(seed)
        replicas = random_replicas(rng)
        count = rng.randint(0, 12)

        shares = fastest_shares(replicas, count)

        every = (
            other
            for other in itertools.product(range(count + 1), repeat=len(replicas))
            if sum(other) == count
        )
        assert sum(shares) == count
        assert step_s(replicas, shares) == min(step_s(replicas, other) for other in every)


@pytest.mark.parametrize("steady_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_replica_must_take_time(steady_s: float) -> None:
    with pytest.raises(ValueError, match="steady_s"):
        Replica(fill_s=1.0, steady_s=steady_s)


def test_no_replicas_cannot_share() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        fastest_shares([], 4)


@pytest.mark.parametrize("seed", range(12))
def test_no_counts_of_pipelines_end_sooner(seed: int) -> None:
    rng = random.Random(seed)
    numbers = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
    total = sum(numbers) + rng.randint(0, 5)
    steps = [
        list(itertools.accumulate(rng.uniform(0.0, 2.0) for _ in range(total))) for _ in numbers
    ]

    counts = fastest_counts(
        [
            (number, MonotonePace(lambda count, ends=ends: ends[count - 1], most=total))
            for number, ends in zip(numbers, steps, strict=True)
        ],
        total,
    )

    assert counts is not None
    assert [sum(each.number for each in of_group) for of_group in counts] == numbers
    assert sum(each.number * each.micro_batches for g in counts for each in g) == total
    every = [ends for number, ends in zip(numbers, steps, strict=True) for _ in range(number)]
    least = min(
        max(ends[count - 1] for ends, count in zip(every, each, strict=True))
        for each in itertools.product(range(1, total + 1), repeat=len(every))
        if sum(each) == total
    )
    chosen = max(
        ends[of_group[0].micro_batches - 1] for ends, of_group in zip(steps, counts, strict=True)
    )
    assert chosen == pytest.approx(least)
