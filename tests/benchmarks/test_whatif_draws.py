"""Probabilities of a study against futures drawn by a program that shares no code with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.whatif_draws import (
    CLOSE,
    as_a_year,
    as_runs,
    differences,
    plain_study,
    same_verdict,
)
from meshwright.planner.whatif.run_study import result_json, run
from meshwright.planner.whatif.study import Study
from tests.planner.whatif.test_study import PRICE

STUDIES = Path(__file__).parent.parent.parent / "plans" / "studies"
QUOTE = {"date": "2026-11", "source": "a quote"}


def found(**changes: Any) -> dict[str, Any]:
    study = {
        "format": 1,
        "name": "small",
        "models": ["gpt2"],
        "work": {"seq_len": 1024, "global_batch": 64, "framework": "native"},
        "goal": {"tokens": 2.2e11, "deadline_days": 130.0, "budget_usd": 5_000.0},
        "offers": OFFERS,
        **changes,
    }
    answer = result_json(run(Study.of(study), processes=1))
    return dict(json.loads(json.dumps(answer)))


OFFERS = [
    {"name": "rented", "cluster": "4xa10g", "rent": PRICE},
    {"name": "bought", "cluster": "4xa10g", "buy": {"usd_per_device": 9e3, **QUOTE}},
    {
        "name": "a month",
        "cluster": "4xa10g",
        "rent": {"usd_per_device_hour": 1.4, "commitment": "reserved", "term_months": 1.0, **QUOTE},
    },
]


@pytest.mark.parametrize("assumptions", [{}, {"utilisation": 0.6}], ids=["alone", "shared"])
def test_no_probability_is_off(assumptions: dict[str, float]) -> None:
    pairs = differences(found(assumptions=assumptions))

    assert len(pairs) >= 10
    assert max(abs(there - here) for _, there, here in pairs) < CLOSE


def test_a_run_and_a_year_of_it_are_one_question() -> None:
    rent = {"usd_per_device_hour": 1.4, "commitment": "reserved", "term_months": 12.0, **QUOTE}
    offers = [*OFFERS[:2], {"name": "a year", "cluster": "4xa10g", "rent": rent}]
    work = {"seq_len": 1024, "global_batch": 64, "framework": "native"}
    study = {"models": ["gpt2"], "goal": {"tokens": 2e10}, "offers": offers, "work": work}
    year = as_a_year(study)
    assert year is not None

    run_answer, year_answer = found(**study), found(**year)

    assert same_verdict(run_answer, year_answer) == "the same"
    dearer = {**year_answer, "outcomes": [_dearer(row) for row in year_answer["outcomes"]]}
    assert "as a year" in same_verdict(run_answer, dearer)


def test_shipped_studies_have_both_forms() -> None:
    both = []
    for path in sorted(STUDIES.glob("*.yaml")):
        runs = as_runs(plain_study(path))
        years = [year for year in map(as_a_year, runs) if year is not None]
        for form in (*runs, *years):
            Study.of(form)
        both += [path.stem] if years else []

    assert len(both) >= 12


def _dearer(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "usd": {name: 1.06 * usd for name, usd in row["usd"].items()}}
