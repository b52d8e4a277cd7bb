"""What the comparison of schedules with sleeping stages computes beside the clock."""

import pytest

from benchmarks.schedule_truth import DRAINED, FORWARD_S, RANKS, Row, fitted_action_s, rows


def test_equal_stages_under_1f1b_take_the_closed_form() -> None:
    row = Row("1f1b", 1, 4, unequal=False)

    assert row.predicted_s(0.0) == pytest.approx((8 + 4 - 1) * 3 * FORWARD_S)
    assert row.predicted_s(1e-3) == pytest.approx((8 + 4 - 1) * (3 * FORWARD_S + 2e-3))


def test_the_fitted_constant_gives_the_measured_step_back() -> None:
    row = Row("1f1b", 1, 2, unequal=False)

    assert fitted_action_s(row.predicted_s(7e-4), row) == pytest.approx(7e-4)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_schedule_runs_on_every_number_of_ranks(ranks: int) -> None:
    assert {row.name for row in rows(ranks)} == {name for name, _ in DRAINED}
    assert all(len(row.orders()) == ranks for row in rows(ranks))
