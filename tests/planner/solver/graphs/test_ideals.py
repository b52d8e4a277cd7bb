"""ideals are counted by formula for towers and listed one by one for random graphs."""

from __future__ import annotations

import itertools
import random

import networkx
import numpy as np
import pytest

from meshwright.planner.solver.graphs.ideals import Ideals, ideals


def listed(found: Ideals) -> list[frozenset[int]]:
    holds = np.stack([found.contains(layer) for layer in range(found.layers)], axis=1)
    return [frozenset(np.flatnonzero(row).tolist()) for row in holds]


def random_readers(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    return [[b for b in range(a + 1, count) if rng.random() < 0.3] for a in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_they_are_the_sets_that_hold_all_that_they_read(seed: int) -> None:
    readers = random_readers(seed)
    count = len(readers)

    found = ideals(readers, most=1000)

    assert found is not None
    closed = {
        frozenset(subset)
        for size in range(count + 1)
        for subset in itertools.combinations(range(count), size)
        if all(a in subset for a in range(count) for b in readers[a] if b in subset)
    }
    sets = listed(found)
    assert len(sets) == len(closed)
    assert set(sets) == closed
    assert all(not sets[j] < sets[i] for i, j in itertools.combinations(range(len(sets)), 2))


@pytest.mark.parametrize("seed", range(30, 40))
def test_there_are_as_many_as_antichains(seed: int) -> None:
    readers = random_readers(seed)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(readers)))
    graph.add_edges_from((a, b) for a, outside in enumerate(readers) for b in outside)

    found = ideals(readers, most=1000)

    assert found is not None
    assert len(found) == sum(1 for _ in networkx.antichains(graph))


def test_pairs_are_those_that_lie_in_each_other_however_many_are_compared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ideals(random_readers(3), most=1000)
    assert found is not None
    sets = listed(found)
    expected = {(a, b) for a, b in itertools.permutations(range(len(sets)), 2) if sets[a] < sets[b]}

    for at_once in (1, 3 * len(sets), 10**6):
        monkeypatch.setattr("meshwright.planner.solver.graphs.ideals._CHUNK", at_once)
        pairs = found.nested_pairs(10**6)
        assert pairs is not None
        assert set(zip(*(of.tolist() for of in pairs), strict=True)) == expected
