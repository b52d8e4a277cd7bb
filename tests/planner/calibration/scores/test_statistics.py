"""Error statistics, Kendall's tau and regret against hand calculations and enumeration."""

from __future__ import annotations

import itertools
import random

import pytest

from meshwright.planner.calibration.scores.statistics import (
    error_score,
    kendall_tau,
    out_of_memory_score,
    rank_score,
    regret,
)


def test_errors_are_relative_to_the_measurement() -> None:
    score = error_score([(2.0, 1.0), (0.5, 1.0), (1.0, 1.0)])

    assert score is not None
    assert score.median_abs_error == pytest.approx(0.5)
    assert score.mean_abs_error == pytest.approx(0.5)
    assert score.bias == pytest.approx(0.5 / 3)
    assert score.n == 3


def test_nothing_measured_has_no_score() -> None:
    assert error_score([]) is None
    assert out_of_memory_score([]) is None
    assert rank_score([[(1.0, 1.0)]]) is None


def test_tau_is_one_in_order_and_minus_one_in_reverse() -> None:
    measured = [3.0, 1.0, 2.0, 5.0]

    assert kendall_tau([(2 * x, x) for x in measured]) == 1.0
    assert kendall_tau([(-x, x) for x in measured]) == -1.0
    assert kendall_tau([(1.0, x) for x in measured]) is None


@pytest.mark.parametrize("seed", range(4))
def test_tau_without_ties_is_the_share_of_ordered_pairs(seed: int) -> None:
    rng = random.Random(seed)
    pairs = [(rng.random(), rng.random()) for _ in range(7)]

    both = list(itertools.combinations(pairs, 2))
    agree = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in both)

    assert kendall_tau(pairs) == pytest.approx(2 * agree / len(both) - 1)


def test_tau_b_discounts_ties() -> None:
    # Pairs: (1,1)-(1,2) tied on x; the other two concordant: 2 / sqrt(3 * 2)... by the definition.
    assert kendall_tau([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / (2 * 3) ** 0.5)


def test_regret_is_what_the_first_choice_costs() -> None:
    assert regret([(1.0, 11.0), (2.0, 10.0), (3.0, 30.0)]) == pytest.approx(0.1)
    assert regret([(2.0, 11.0), (1.0, 10.0)]) == 0.0


def test_false_fits_and_misfits_are_told_apart() -> None:
    calls = [(True, True), (True, False), (False, False), (False, True), (False, True)]

    score = out_of_memory_score(calls)

    assert score is not None
    assert (score.accuracy, score.false_fits, score.false_misfits) == (0.6, 0.2, 0.2)


def test_sweeps_weigh_the_same_whatever_their_size() -> None:
    good = [(float(x), float(x)) for x in range(1, 9)]
    bad = [(2.0, 1.0), (1.0, 2.0)]

    score = rank_score([good, bad, [(1.0, 1.0)]])

    assert score is not None
    assert (score.kendall_tau, score.regret, score.n) == (0.0, 0.5, 2)
