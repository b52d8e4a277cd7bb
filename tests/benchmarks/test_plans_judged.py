"""Published layouts are whole rows with sources, fit as published, and lie near their figures."""

from __future__ import annotations

import pytest

from benchmarks.plans_judged import STATED, WORST, rows_judged
from benchmarks.whole_trainings import layout_text, outcome

ROWS = {row["name"]: row for row in rows_judged()}


def test_there_are_many_layouts_each_with_a_source_and_degrees_that_fill_its_devices() -> None:
    assert len(ROWS) >= 25
    assert set(STATED) <= ROWS.keys()
    for row in ROWS.values():
        degrees = dict(part.split("=", 1) for part in layout_text(row).split(","))
        devices = int(row["nodes"]) * int(row["devices_per_node"])
        used = 1
        for axis in ("tp", "pp", "cp", "dp"):
            used *= int(degrees.get(axis, "1"))
        assert row["source"], row["name"]
        assert devices % used == 0, row["name"]
        assert "dp" not in degrees or devices == used, row["name"]


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", ROWS)
def test_a_published_layout_fits_and_takes_about_what_was_published(name: str) -> None:
    found = outcome(ROWS[name])

    assert found.fits
    assert abs(found.error) <= WORST
