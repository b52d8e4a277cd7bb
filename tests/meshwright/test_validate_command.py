"""The command line of `validate`: one JSON object, files written whole, messages that say where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main

TABLE = (
    "id,source,layers,hidden_size,ffn_size,n_heads,vocab_size,gated_mlp,seq_len,accelerator,"
    "devices_per_node,n_devices,framework,global_batch_size,micro_batch_size,step_time_s\n"
    "a-1,a,16,2048,8192,16,32000,1,2048,a100-sxm-80gb,8,8,megatron,64,1,1.0\n"
    "a-2,a,,2048,8192,16,32000,1,2048,a100-sxm-80gb,8,8,megatron,64,1,1.0\n"
)


def test_json_is_alone_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    table.write_text(TABLE)

    status = main(["validate", str(table), "--json"])

    answer = json.loads(capsys.readouterr().out)
    assert status == 0
    assert answer["sources"]["a"]["step_time"]["n"] == 1
    assert answer["skipped"] == {"layers is not known": 1}


def test_rows_and_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, rows, page = (tmp_path / name for name in ("table.csv", "rows.csv", "page.html"))
    table.write_text(TABLE)

    status = main(["validate", str(table), "--rows", str(rows), "--html", str(page), "--explain"])

    assert status == 0
    assert "largest errors" in capsys.readouterr().out
    assert rows.read_text().count("\n") == 3
    assert "<circle" in page.read_text()


def test_a_table_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b\n1,2\n")

    assert main(["validate", str(wrong)]) == 1
    assert "lacks id, source" in capsys.readouterr().err
