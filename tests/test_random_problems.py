"""A few of the random problems of benchmarks/random_problems.py, and that it sees a mismatch."""

from __future__ import annotations

import pytest

from benchmarks.random_problems import FIRST, KINDS, Kind, mismatches


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_way_leads_to_one_optimum(kind: Kind) -> None:
    fitting, found = mismatches(kind, iter(range(FIRST, FIRST + 10_000)), 16)

    assert found == []
    assert fitting > 0


def test_a_mismatch_is_named() -> None:
    wrong = KINDS[0]._replace(least_s=lambda problem: 0.5 * KINDS[0].least_s(problem))

    _, found = mismatches(wrong, iter(range(FIRST, FIRST + 100)), 8)

    assert found
    assert "chain, seed" in found[0]
