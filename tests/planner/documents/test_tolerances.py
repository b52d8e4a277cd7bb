"""Tolerances stand in one table, in the order in which each forgives what those before it leave."""

import ast
from pathlib import Path

import planner
from meshwright.planner.documents import tolerances

PLANNER = Path(planner.__file__).parent


def small_numbers(source: str) -> list[float]:
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, float)
        and 0 < node.value <= 1e-7
    ]


def test_no_other_file_has_a_tolerance_of_its_own() -> None:
    found = {
        file.relative_to(PLANNER).as_posix(): small
        for file in PLANNER.rglob("*.py")
        if file.name != "tolerances.py" and (small := small_numbers(file.read_text()))
    }

    # Adam's epsilon, a setting, the smallest figure of a document, and a nanosecond.
    assert found == {
        "documents/training.py": [1e-8],
        "documents/units.py": [1e-30],
        "documents/cluster.py": [1e-9],
    }


def test_each_forgives_at_least_what_those_above_it_do() -> None:
    t = tolerances

    assert 0 < t.TINY < 2**-52 < t.SAME_TERMS < t.SAME_CHOICE < t.ROUNDING
    assert 2 * t.ROUNDING < t.SETTLED < t.SLACK <= t.EQUAL
    assert t.HIGHS_FEASIBILITY < t.HIGHS_MARGIN < t.HIGHS_GAP
