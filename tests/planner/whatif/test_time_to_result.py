"""Times that are compared are times to the result: delivery is part of them, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.whatif.candidates import candidates_of
from meshwright.planner.whatif.evaluate import misses
from meshwright.planner.whatif.findings import answers
from meshwright.planner.whatif.study import Goal
from meshwright.planner.whatif.uncertain_value import exact
from tests.planner.whatif.test_conclusions import outcome, result
from tests.planner.whatif.test_study import PRICE
from tests.planner.whatif.test_study import study as study_of


def test_a_sentence_compares_what_the_table_shows() -> None:
    """30 days on rent are the result; 10 days after 50 of delivery are 60: twice as long."""
    asked = study_of(
        offers=[
            {"name": "rented", "cluster": "4xa10g", "rent": PRICE},
            {"name": "bought", "cluster": "8xa10g", "buy": {"usd_per_device": 1e3, **QUOTE}},
        ]
    )
    rented, bought = candidates_of(asked)
    slow = outcome(rented, "gpt2", 720.0, 100.0, tokens_per_s=exact(1.0))
    fast = outcome(bought, "gpt2", 240.0, 200.0, tokens_per_s=exact(3.0))
    fast = replace(fast, lead_days=exact(50.0))

    [text] = [t for t in answers(result(asked, [slow, fast])) if t.startswith("rented takes")]

    assert text.startswith("rented takes 50 % less time to the result and 50 % less cost")


QUOTE = {"date": "2026-11", "source": "a quote"}


@pytest.mark.parametrize(
    ("days", "limit", "expected"),
    [
        (120.2, 120.0, "deadline: 120.2 of 120.0 days"),
        (130.0, 120.0, "deadline: 130 of 120 days"),
        (99.96, 99.0, "deadline: 100.0 of 99.0 days"),
        (2880.4, 30.0, "deadline: 2,880.4 of 30.0 days"),
    ],
)
def test_what_is_missed_is_seen_in_the_numbers(days: float, limit: float, expected: str) -> None:
    [candidate, *_] = candidates_of(study_of())
    missing = outcome(candidate, "gpt2", 24 * days, 100.0)

    [text] = misses(Goal(tokens=1e9, deadline_days=limit), missing)

    assert text == expected
