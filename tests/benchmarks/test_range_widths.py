"""Widths of ranges hold the share of runs that they are fitted to hold."""

from __future__ import annotations

import random

import pytest

from benchmarks.range_widths import (
    Miss,
    fitted_law,
    share_inside,
    source_variance,
    standard_error,
    weights,
)
from meshwright.planner.costs.uncertainty import RunTraits


def traits(*, waiting: float = 0.0, doubts: int = 0) -> RunTraits:
    return RunTraits(experts=False, doubts=doubts, waiting=waiting, spanning=False)


def test_a_width_is_the_quantile_of_misses() -> None:
    misses = [k / 100 for k in range(101)]

    law = fitted_law([traits()] * 101, misses, [1.0] * 101, 0.905)

    assert law.least == pytest.approx(0.91) and sum(law[1:]) == 0.0


def test_what_waits_widens_a_range_as_it_widens_misses() -> None:
    rng = random.Random(0)
    runs = [traits(waiting=rng.random()) for _ in range(400)]
    misses = [rng.uniform(-1, 1) * (0.1 + 0.5 * run.waiting) for run in runs]

    law = fitted_law(runs, misses, [1.0] * 400, 0.95)

    inside = sum(miss <= law.width(run) + 1e-9 for miss, run in zip(misses, runs, strict=True))
    assert 380 <= inside <= 383  # as many as terms may lie on the quantile itself
    assert law.least == pytest.approx(0.09, abs=0.03)  # nine of ten of each share are above
    assert law.waiting == pytest.approx(0.45, abs=0.08)


def test_sources_of_ten_runs_count_alike_and_smaller_ones_by_the_run() -> None:
    names = ["large"] * 40 + ["small"] * 2
    found = [Miss(name, traits(), natural=False, below=0.0, above=0.0) for name in names]

    each = weights(found)

    assert sum(each[:40]) == pytest.approx(1.0) and each[40] == pytest.approx(0.1)
    assert share_inside({"a": [True] * 40, "b": [False] * 2}) == pytest.approx(1 / 1.2)


def test_standard_errors_are_those_of_drawn_sources() -> None:
    rng = random.Random(1)

    def draw(sources: int, runs: int) -> dict[str, list[bool]]:
        shares = [min(1.0, max(0.0, rng.gauss(0.8, 0.1))) for _ in range(sources)]
        return {str(at): [rng.random() < p for _ in range(runs)] for at, p in enumerate(shares)}

    drawn = [share_inside(draw(6, 40)) for _ in range(800)]

    # Six sources of 40 runs, whose shares differ by 0.1: (0.01 + 0.8 x 0.2 / 40) / 6.
    error = standard_error(draw(6, 40), 0.01, 0.8)
    assert error == pytest.approx(((0.01 + 0.16 / 40) / 6) ** 0.5)
    within = sum(abs(share - 0.8) <= 1.645 * error for share in drawn) / len(drawn)
    assert within == pytest.approx(0.9, abs=0.04)
    assert source_variance(draw(400, 40)) == pytest.approx(0.01, rel=0.2)


def test_sources_that_are_all_alike_have_no_variance_of_their_own() -> None:
    assert source_variance({str(at): [True] * 8 + [False] * 2 for at in range(5)}) == 0.0
    assert source_variance({"one": [True] * 12}) == 0.0
