"""Scores of a small invented table: what is judged, averaged, skipped and written."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.planner.calibration.scores.validate import (
    Validation,
    rows_csv,
    validate,
    validation_json,
)
from meshwright.planner.report.validation_report import validation_page, validation_text

MODEL = {
    "model": "made-up-1b",
    "layers": "16",
    "hidden_size": "2048",
    "ffn_size": "8192",
    "n_heads": "16",
    "vocab_size": "32000",
    "gated_mlp": "1",
    "seq_len": "2048",
    "accelerator": "a100-sxm-80gb",
    "devices_per_node": "8",
    "n_devices": "8",
    "framework": "megatron",
    "precision": "bf16",
    "recompute": "none",
    "micro_batch_size": "1",
    "global_batch_size": "64",
}


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    whole = [{"id": str(number), "source": "one"} | MODEL | row for number, row in enumerate(rows)]
    names = list(dict.fromkeys(name for row in whole for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(whole)
    return path


@pytest.fixture
def validation(tmp_path: Path) -> Validation:
    """Return two sources, one of them with a sweep, and rows that are left out or apart."""
    rows = [
        {"tp": "1", "step_time_s": "1.0", "sweep": "s", "peak_memory_gib": "20"},
        {"tp": "2", "step_time_s": "1.2", "sweep": "s", "out_of_memory": "0"},
        {"tp": "8", "step_time_s": "2.0", "sweep": "s"},
        {"source": "two", "step_time_s": "0.5", "judge_time": "0"},
        {
            "source": "two",
            "step_time_s": "0.9",
            "micro_batch_size": "512",
            "global_batch_size": "4096",
            "out_of_memory": "1",
        },
        {"source": "two", "step_time_s": "0.8", "inputs_tier": "B"},
        {"source": "two", "layers": "", "step_time_s": "1.0"},
        {"source": "two", "step_time_s": "1.0", "framework": "my-own"},
    ]
    return validate(written(tmp_path / "table.csv", rows))


def test_each_source_is_scored_alone_and_the_average_weighs_them_alike(
    validation: Validation,
) -> None:
    result = validation_json(validation)

    one, two = result["sources"]["one"], result["sources"]["two"]
    assert (one["step_time"]["n"], two["step_time"]["n"]) == (3, 1)
    middle = (one["step_time"]["mean_abs_error"] + two["step_time"]["mean_abs_error"]) / 2
    assert result["macro"]["step_time"]["mean_abs_error"] == pytest.approx(middle)


def test_rows_with_gaps_are_scored_apart(validation: Validation) -> None:
    result = validation_json(validation)

    assert list(result["tier_b"]["sources"]) == ["two"]
    assert result["tier_b"]["sources"]["two"]["step_time"]["n"] == 1


def test_what_cannot_be_predicted_is_counted_by_reason(validation: Validation) -> None:
    result = validation_json(validation)

    assert result["skipped"] == {"layers is not known": 1}
    assert (result["rows"], result["predicted"]) == (8, 7)
    assert result["unknown_frameworks"] == {"my-own": 1}


def test_a_sweep_is_ranked_by_predicted_time(validation: Validation) -> None:
    predicted = [row.step_time_s for row in validation.rows[:3]]

    ranking = validation.sources["one"].ranking
    assert ranking is not None
    assert predicted == sorted(predicted, key=lambda s: s or 0.0)
    assert (ranking.kendall_tau, ranking.regret, ranking.n) == (1.0, 0.0, 1)


def test_out_of_memory_calls_count_only_where_the_outcome_is_known(
    validation: Validation,
) -> None:
    one, two = validation.sources["one"].out_of_memory, validation.sources["two"].out_of_memory

    assert one is not None
    assert two is not None
    assert (one.n, one.accuracy, two.n, two.accuracy) == (1, 1.0, 1, 1.0)


def test_every_row_has_its_line(validation: Validation) -> None:
    lines = list(csv.DictReader(io.StringIO(rows_csv(validation))))

    assert [line["id"] for line in lines] == [str(number) for number in range(8)]
    assert lines[6]["reason"] == "layers is not known"
    assert lines[6]["step_time_s"] == ""
    assert lines[4]["fits"] == "0"
    first = lines[0]
    assert float(first["step_time_low_s"]) < float(first["step_time_s"])
    assert float(first["step_time_s"]) < float(first["step_time_high_s"])


def test_words_that_nobody_understands_stand_in_the_short_answer(tmp_path: Path) -> None:
    rows = [{"step_time_s": "1.0", "options": f"tp-overlap+{word}"} for word in ("warp", "warp")]

    shown = validation_text(validate(written(tmp_path / "t.csv", rows)), explain=False)

    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    assert "not understood, with their rows: option 'warp' (2)" in out.getvalue()


def test_a_run_that_its_framework_refuses_is_a_class_beside_those_that_do_not_fit(
    tmp_path: Path,
) -> None:
    layout = {"framework": "nanotron", "pp": "8", "micro_batch_size": "16"}
    rows = [
        layout | {"out_of_memory": "1"},
        layout | {"micro_batch_size": "8"},
        {"micro_batch_size": "512", "global_batch_size": "4096", "out_of_memory": "1"},
    ]

    found = validate(written(tmp_path / "table.csv", rows))
    few, enough, large = csv.DictReader(io.StringIO(rows_csv(found)))

    assert (few["outcome"], few["fits"]) == ("refused", "1")
    assert few["reason"].startswith("nanotron refuses it: its 1F1B asserts")
    assert float(few["step_time_s"]) > 0
    assert (enough["outcome"], enough["fits"], enough["reason"]) == ("ran", "1", "")
    assert (large["outcome"], large["fits"]) == ("out_of_memory", "0")
    assert found.outcomes == {"ran": (1, 0), "out_of_memory": (0, 1), "refused": (0, 1)}


def test_a_row_is_predicted_without_what_rests_on_its_own_source(tmp_path: Path) -> None:
    """Its runs alone tell that transfers are polled, and what was measured."""
    alike = {"framework": "nanotron", "accelerator": "h100-sxm-80gb", "global_batch_size": "1024"}
    over_nodes = alike | {"pp": "8", "n_devices": "512", "step_time_s": "1.0"}
    table = written(
        tmp_path / "table.csv",
        [over_nodes | {"source": "nanotron_usp"}, over_nodes | {"source": "other"}],
    )

    known = [row.prediction for row in validate(table).rows]
    own, others = (row.prediction for row in validate(table, left_out=True).rows)

    assert known[0] == known[1] == others
    assert own is not None
    assert others is not None
    assert own.step_time_s < others.step_time_s
    assert own.assumptions[0] != others.assumptions[0]


def test_json_holds_fractions_that_json_can_carry(validation: Validation) -> None:
    text = json.dumps(validation_json(validation), allow_nan=False)

    assert set(json.loads(text)["macro"]) == {
        "step_time", "peak_memory", "out_of_memory", "ranking", "coverage",
    }  # fmt: skip


def test_the_page_opens_without_a_network(validation: Validation) -> None:
    html = validation_page(validation)

    assert html.count("<svg") == 3, "two sources have times, one of them has peaks"
    assert "<script" not in html
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", html), "nothing is fetched"
    assert "one: step time" in html


def test_an_empty_table_has_no_scores(tmp_path: Path) -> None:
    path = written(tmp_path / "table.csv", [{}])
    path.write_text(path.read_text().splitlines()[0] + "\n")

    result = validation_json(validate(path))

    assert result["sources"] == {}
    assert result["macro"]["step_time"]["sources"] == 0


def test_a_precision_that_the_accelerator_lacks_is_a_reason(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "id,source,layers,hidden_size,seq_len,accelerator,n_devices,precision,surprise\n"
        "a,s,4,512,512,tpu-v5e,8,tf32,?\n"
        "b,s,4,512,512,NVIDIA L40,8,FP8,?,one,more\n"
    )

    found = validate(table)

    assert [row.prediction is not None for row in found.rows] == [False, True]
    assert list(found.skipped) == ["precision: is tf32, which tpu-v5e has no peak for; it has bf16"]


def test_a_peak_of_no_kind_is_what_the_framework_reports(tmp_path: Path) -> None:
    kinds = ("unknown", "allocated", "reserved")
    rows = [
        {"framework": framework, "peak_memory_gib": "20", "memory_kind": kind}
        for framework in ("megatron", "nanotron")
        for kind in kinds
    ]

    peaks = [row.peak_memory_gib for row in validate(written(tmp_path / "t.csv", rows)).rows]

    # Megatron-LM logs torch's max_memory_allocated; nanotron's log has both.
    assert peaks[0] == peaks[1] != peaks[2]
    assert peaks[3] == peaks[5] != peaks[4]
