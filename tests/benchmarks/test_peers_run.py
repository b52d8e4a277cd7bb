"""The command that compares with peers, on a folder with one tiny invented problem."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import run
from benchmarks.peers.comparison import Comparison, table

FILE = "galvatron_llama2_7b_1x8.json"


@pytest.fixture
def problem() -> dict[str, Any]:
    """Two layers with a fast strategy of 3 MB and a slow one of 1 MB, in 4 MB."""
    return {
        "call": 1,
        "layers": 2,
        "mem_cap_mb": 5,
        "layer_mem_mb": [[3, 1]] * 2,
        "layer_time_s": [[1.0, 2.0]] * 2,
        "transition_time_s_first": [[0.0, 0.25], [0.0, 0.0]],
        "other_mem_mb": {"1": 1.0},
        "other_time_s": {"1": 0.5},
        "embed_option": "1",
        "galvatron": {
            "cost_s": 3.75,
            "choice": [0, 1],
            "mem_mb": 5.0,
            "dp_core_wall_s_under_load": 0.1,
        },
    }


def write(folder: Path, problem: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps({"dp_core_subproblems": [problem]}))


def test_our_plan_stands_beside_the_peers(
    tmp_path: Path, problem: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, problem)

    assert run.main([str(tmp_path), "--json"]) == 0

    out, err = capsys.readouterr()
    [row] = json.loads(out)["galvatron"]
    assert row["peer_value"] == 3.75
    assert row["value"] == 3.5  # the slow strategy first: back to the fast one costs nothing
    assert row["ratio"] == pytest.approx(3.5 / 3.75)
    assert (row["verdict"], row["proven"]) == ("better", "all assignments")
    assert "piper_bert32a100.json: is not there; left out" in err


def test_a_stored_score_that_does_not_come_out_stops_the_comparison(
    tmp_path: Path, problem: dict[str, Any]
) -> None:
    problem["galvatron"]["cost_s"] = 3.5
    write(tmp_path, problem)

    with pytest.raises(ValueError, match=r"stored score is 3.5, the restated formulas give 3.75"):
        run.main([str(tmp_path), "--only", "galvatron"])


def test_nothing_to_compare_is_a_failure(tmp_path: Path) -> None:
    assert run.main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        (1.0, 1.0 + 1e-13, "equal"),
        (1.0, 1.1, "worse"),
        (1.0, 0.9, "better"),
        (None, 0.9, "only ours"),
        (1.0, None, "only theirs"),
        (None, None, "both none"),
    ],
)
def test_a_row_says_who_found_the_better_plan(
    theirs: float | None, ours: float | None, verdict: str
) -> None:
    row = Comparison(
        case="c", peer="p", unit="s", peer_value=theirs, value=ours, proven="", cpu_s=math.pi
    )

    assert row.verdict == verdict
    assert f"| {verdict} |" in table([row])
