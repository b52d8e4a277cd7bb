"""Certificates of format 1, which had two objectives, are read by their simulated time."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.documents.prediction import Certificate
from meshwright.planner.errors import DocumentError

LAYOUT = "tp=1 pp=2 dp=4 zero=1 zbv"
OLD: dict[str, Any] = {
    "format": 1,
    "statement": "Closed form: the plan takes 8 s a step.",
    "model": "T = steady max_r t_r",
    "solver": "exact",
    "optimal": True,
    "objective_s": 7.5,
    "lower_bound_s": 7.5,
    "gap": 0.0,
    "configurations": 3,
    "counts": {"chosen": 1, "dominated": 2},
    "runners_up": [
        {"layout": "a", "objective_s": 7.6, "reason": "solved, slower"},
        {"layout": "b", "lower_bound_s": 7.7, "reason": "dominated"},
    ],
    "layout": "tp=1 pp=1 dp=8 zero=2",
    "simulated": {
        "statement": "the fastest of 1 simulated",
        "layout": LAYOUT,
        "step_time_s": 8,
        "lower_bound_s": 7.2,
        "gap": 0.1,
        "bound": "no plan in the space takes less than 7.2 s (gap 10 %)",
        "looked_at": {"layouts within memory": 4},
        "finalists": [{"layout": LAYOUT, "objective_s": 7.9, "step_time_s": 8.0}],
    },
    "plan": {
        "layout": LAYOUT,
        "closed_form_s": 7.9,
        "closed_form_bound_s": 7.5,
        "closed_form_gap": 0.05,
        "simulated_s": 8.0,
        "simulated_bound_s": 7.2,
        "simulated_gap": 0.1,
        "closed_form": "Closed form: ...",
        "simulated": "Simulated: the plan takes 8 s a step.",
    },
}


def test_a_certificate_of_format_1_speaks_of_its_simulated_step() -> None:
    found = Certificate.of(OLD)

    assert (found.objective_s, found.lower_bound_s) == (8.0, 7.2)
    assert found.gap == pytest.approx(0.1) and not found.optimal
    assert found.layout == LAYOUT == found.finalists[0].layout
    assert found.finalists[0].closed_form_s == 7.9
    assert [one.layout for one in found.runners_up] == ["b"]
    assert found.plan is not None and found.plan.lower_bound_s == 7.2
    assert found.counts == OLD["counts"]


@pytest.mark.parametrize(
    "changes",
    [
        {"simulated": 3},
        {"simulated": {"step_time_s": "fast"}},
        {"simulated": {"step_time_s": 1.0, "finalists": 7}, "plan": []},
        {"simulated": None, "objective_s": 10**400},
        {"format": 3},
    ],
    ids=str,
)
def test_what_is_no_certificate_is_refused_in_words_or_read(changes: dict[str, Any]) -> None:
    try:
        found = Certificate.of(OLD | changes)
    except DocumentError as error:
        assert str(error)
    else:
        assert found.format == 2 and found.objective_s in (1.0, 7.5)
