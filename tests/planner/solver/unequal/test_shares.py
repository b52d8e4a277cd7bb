"""shares.fastest_shares is checked against every way to share, where they can be listed."""

from __future__ import annotations

import itertools
import random

import pytest

from planner.solver.unequal.shares import Replica, fastest_shares


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


@pytest.mark.parametrize("seed", range(20))
def test_they_end_with_the_last_of_the_earliest_micro_batches(seed: int) -> None:
    rng = random.Random(seed)
    replicas = random_replicas(rng, most=16)
    count = rng.randint(1, 2000)

    shares = fastest_shares(replicas, count)

    ends_s = sorted(replica.end_s(i) for replica in replicas for i in range(1, count + 1))
    assert sum(shares) == count
    assert step_s(replicas, shares) == ends_s[count - 1]


def test_alike_replicas_share_alike_and_the_first_take_the_rest() -> None:
    alike = [Replica(fill_s=3.0, steady_s=0.1)] * 4

    assert fastest_shares(alike, 512) == (128,) * 4
    assert fastest_shares(alike, 514) == (129, 129, 128, 128)


def test_a_replica_too_slow_to_start_takes_none() -> None:
    assert fastest_shares(
        [Replica(fill_s=1.0, steady_s=1.0), Replica(fill_s=90.0, steady_s=1.0)], 5
    ) == (5, 0)


def test_a_faster_replica_never_makes_the_step_longer() -> None:
    rng = random.Random(1)
    for _ in range(50):
        replicas = random_replicas(rng)
        faster = [
            Replica(fill_s=0.9 * replicas[0].fill_s, steady_s=0.9 * replicas[0].steady_s),
            *replicas[1:],
        ]

        before_s = step_s(replicas, fastest_shares(replicas, 40))
        after_s = step_s(faster, fastest_shares(faster, 40))

        assert after_s <= before_s


@pytest.mark.parametrize("steady_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_replica_must_take_time(steady_s: float) -> None:
    with pytest.raises(ValueError, match="steady_s"):
        Replica(fill_s=1.0, steady_s=steady_s)


def test_no_replicas_cannot_share() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        fastest_shares([], 4)
