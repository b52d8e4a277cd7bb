"""Goodput that is predicted from the first half of a trace is that of the second half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.goodput import compared, drawn, of_counts, read


@pytest.mark.matrix
def test_failures_at_random_are_predicted() -> None:
    trace = drawn("random", 0.01, devices=16, failures=60, seed=3)

    row = compared(trace, most_steps=2000)

    assert row.expected.goodput == pytest.approx(row.measured.goodput, rel=0.05)
    assert row.expected.goodput_low < row.measured.goodput < 1
    assert row.measured.goodput < 0.99
    assert sum(row.measured.parts_s.values()) == pytest.approx(row.measured.wall_s)


def test_traces_are_read_by_a_clock_that_stands_while_nobody_is_there(tmp_path: Path) -> None:
    by_hand = of_counts("trace", [(0, 4), (10, 2), (20, 0), (50, 3), (60, 3), (70, 1)])
    assert by_hand.lost_s == (10, 20, 40)
    assert (by_hand.hours, by_hand.nodes) == (40 / 3600, (40 + 20 + 60) / 40)

    spot = tmp_path / "spot.json"
    spot.write_text(json.dumps({"metadata": {"gap_seconds": 10}, "data": [4, 2, 0, 0, 0, 3, 3, 1]}))
    rows = tmp_path / "rows.json"
    counts = [(0, 4), (10, 2), (20, 0), (50, 3), (60, 3), (70, 1)]
    rows.write_text(json.dumps([{"Time": at, "GPUs": count} for at, count in counts]))
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("0,add,a\n0,add,b\n1000,remove,a\n2000,remove,b\n4000,add,c\n5000,add,a\n")

    assert read(spot).lost_s == read(rows).lost_s == by_hand.lost_s
    assert read(nodes).lost_s == (1, 2)
