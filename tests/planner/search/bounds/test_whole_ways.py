"""Ways of whole columns, against every choice of a column for each rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.planner.search.bounds.simulated_cuts import Placed
from meshwright.planner.search.bounds.whole_ways import WayLabels

PLACES, NUMBERS = 6, (2, 1)
RANKS = sum(NUMBERS)


def random_columns(numbers: np.random.Generator) -> Placed:
    """Columns of three ranks on two types of devices, each between two of six places."""
    every = [
        (rank, first, end, number)
        for rank in range(RANKS)
        for first, end in itertools.combinations(range(PLACES), 2)
        for number in range(len(NUMBERS))
        if (first == 0) == (rank == 0) and (end == PLACES - 1) == (rank == RANKS - 1)
    ]
    rank, first, end, number = np.array(
        [every[at] for at in numbers.choice(len(every), 9 * len(every) // 10, replace=False)]
    ).T
    none = np.zeros(len(rank))
    return Placed(
        rank=rank,
        first=first,
        end=end,
        seconds=np.zeros((len(rank), 4, RANKS)),
        sync_s=none,
        update_s=none,
        number=number,
        hop_s=none,
        numbers=NUMBERS,
        more_s=none,
        more_in=np.zeros((len(rank), 3, RANKS), dtype=bool),
    )


def every_way(placed: Placed) -> list[tuple[int, ...]]:
    """Every choice of columns that follow one another and give each type its ranks."""
    of_ranks = [np.flatnonzero(placed.rank == rank).tolist() for rank in range(RANKS)]
    types = sorted(number for number, count in enumerate(NUMBERS) for _ in range(count))
    return [
        way
        for way in itertools.product(*of_ranks)
        if placed.first[way[0]] == 0
        and placed.end[way[-1]] == PLACES - 1
        and all(placed.end[a] == placed.first[b] for a, b in itertools.pairwise(way))
        and sorted(placed.number[list(way)].tolist()) == types
    ]


@pytest.mark.parametrize("seed", range(6))
def test_ways_within_limits_are_those_of_all_ways(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    placed = random_columns(numbers)
    each_s = numbers.uniform(0.0, 1.0, (3, len(placed.rank)))
    ways = every_way(placed)
    sums_s = np.array([each_s[:, way].sum(axis=1) for way in ways])
    limits_s = np.quantile(sums_s, 0.8, axis=0) * (1 + 1e-9)

    labels = WayLabels(placed, RANKS, each_s)
    listed = labels.within(limits_s)

    assert labels.least_s() == pytest.approx(sums_s.min(axis=0))
    assert listed is not None
    within = [way for way, seconds in zip(ways, sums_s, strict=True) if (seconds <= limits_s).all()]
    assert within
    found, seconds = listed
    assert sorted(map(tuple, found.tolist())) == sorted(within)
    assert pytest.approx(np.array([each_s[:, way].sum(axis=1) for way in found])) == seconds.T


def test_no_ways_are_listed_where_they_are_too_many_and_none_within_too_little() -> None:
    numbers = np.random.default_rng(1)
    placed = random_columns(numbers)
    labels = WayLabels(placed, RANKS, numbers.uniform(0.5, 1.0, (1, len(placed.rank))))

    assert labels.within(np.array([np.inf]), most=10) is None
    nothing = labels.within(labels.least_s() * 0.99)
    assert nothing is not None and len(nothing[0]) == 0
