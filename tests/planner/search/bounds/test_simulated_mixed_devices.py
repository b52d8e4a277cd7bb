"""Whole layers on ranks of several groups, against every order of groups and every division."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from meshwright.planner.search.bounds.simulated_mixed_devices import LayerPasses, WholeLayers


def drawn(seed: int) -> WholeLayers:
    rng = random.Random(seed)

    def seconds(least: float) -> list[float]:
        return [rng.uniform(least, 3.0) for _ in range(2)]

    numbers = (rng.randint(1, 2), rng.randint(1, 2))
    virtual = rng.randint(1, 3)
    return WholeLayers(
        numbers=numbers,
        room=[float(rng.randint(2, 9)), 12.0],
        passes=(
            LayerPasses(seconds(0.5), seconds(0.0), seconds(0.0)),
            LayerPasses(seconds(0.5), seconds(0.0), seconds(0.0)),
        ),
        virtual_stages=virtual,
        folded=virtual == 2 and rng.random() < 0.5,
        layers=rng.randint(sum(numbers), 6),
    )


def steps_s(ranks: WholeLayers) -> Iterator[float]:
    """What every order of groups and every division of the layers takes, from the definition."""
    groups = [g for g, number in enumerate(ranks.numbers) for _ in range(number)]
    last = 0 if ranks.folded else len(groups) - 1
    for order in set(itertools.permutations(groups)):
        for held in itertools.product(range(ranks.layers + 1), repeat=len(groups)):
            full = all(n <= ranks.room[g] for n, g in zip(held, order, strict=True))
            if sum(held) != ranks.layers or not full:
                continue
            yield max(
                sum(
                    n // ranks.virtual_stages * one.first_s[g]
                    for n, g in zip(held[:rank], order[:rank], strict=True)
                )
                + held[rank] * one.layer_s[order[rank]]
                + one.last_s[order[rank]] * (rank == last)
                for one in ranks.passes
                for rank in range(len(order))
            )


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_ranks_are_enough_for_whatever_some_division_takes(first: int) -> None:
    tight = 0
    for seed in range(first, first + 20):
        ranks = drawn(seed)
        least_s = min(steps_s(ranks), default=None)
        if least_s is None:
            assert not ranks.are_enough(1e9)
            continue
        assert ranks.are_enough(least_s)
        tight += not ranks.are_enough(0.95 * least_s)
    assert tight > 5
