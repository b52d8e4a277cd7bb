"""shares.fastest_shares is checked against every way to share, where they can be listed."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.planner.solver.heterogeneous.micro_batch_shares import Replica, fastest_shares


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
