"""Rows of a table of runs read as what was run, and gaps told as reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.backends.runs import Run, Skipped, measured_of, read_rows, run_of
from planner.errors import DocumentError
from planner.layers.architecture import graph_of

ROW = {
    "id": "made-up-1",
    "source": "made_up",
    "layers": "32",
    "hidden_size": "4096",
    "ffn_size": "14336",
    "n_heads": "32",
    "n_kv_heads": "8",
    "head_dim": "128",
    "vocab_size": "128256",
    "gated_mlp": "1",
    "seq_len": "8192",
    "accelerator": "h100-sxm-80gb",
    "devices_per_node": "8",
    "n_devices": "16",
    "tp": "2",
    "pp": "2",
    "micro_batch_size": "1",
    "global_batch_size": "64",
}


def run(**cells: str) -> Run:
    result = run_of(ROW | cells)
    assert isinstance(result, Run)
    return result


def reason(**cells: str) -> str:
    result = run_of(ROW | cells)
    assert isinstance(result, Skipped)
    return result.reason


def test_figures_of_a_row_give_the_published_parameters() -> None:
    assert graph_of(run().architecture, name="llama").parameters == 8030261248


def test_the_data_degree_is_what_the_other_axes_leave() -> None:
    assert run().data == 4
    assert run(cp="2").data == 2
    assert run(dp="4").micro_batches == 16


def test_a_micro_batch_need_not_divide_the_batch() -> None:
    assert run(micro_batch_size="3", global_batch_size="64").micro_batches == pytest.approx(64 / 12)


def test_empty_cells_are_unknown_and_said_to_be_assumed() -> None:
    without = run(micro_batch_size="", precision="")

    assert without.micro_batch == 1
    assert set(without.assumed) == {"micro_batch 1", "precision bf16"}
    assert run(recompute="").recompute is None


def test_quantised_weights_stand_beside_the_precision_of_the_arithmetic() -> None:
    row = run(precision="bf16+quantised-weights", task="qlora")

    assert (row.precision, row.quantised, row.task) == ("bf16", True, "qlora")


def test_a_network_figure_is_gigabytes_per_second_of_one_device() -> None:
    tiers = run(inter_gb_per_s_per_device="12.5").cluster.tiers

    assert tiers[-1].bytes_per_s == 12.5e9


def test_what_no_convention_gives_is_a_reason() -> None:
    assert reason(layers="") == "layers is not known"
    assert "does not divide" in reason(tp="3")
    assert "no accelerator" in reason(accelerator="abacus")
    assert "not valid" in reason(layers="many")
    assert "not valid" in reason(tp="-2")
    assert "no arithmetic" in reason(attention="mamba")
    assert "not known" in reason(task="rlhf")
    assert "not valid" in reason(seq_len="inf")
    assert "precision 'int2'" in reason(precision="int2")


def test_a_measurement_that_is_none_is_left_out() -> None:
    seen = measured_of(ROW | {"step_time_s": "fast", "peak_memory_gib": "0"})

    assert (seen.step_time_s, seen.peak_memory_gib) == (None, None)


def test_a_failed_run_has_neither_time_nor_memory() -> None:
    seen = measured_of(ROW | {"out_of_memory": "1", "step_time_s": "9", "peak_memory_gib": "80"})

    assert (seen.out_of_memory, seen.step_time_s, seen.peak_memory_gib) == (True, None, None)
    assert measured_of(ROW).out_of_memory is None


def test_a_table_without_the_columns_of_a_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id,source\n1,made_up\n")

    with pytest.raises(DocumentError, match="lacks layers"):
        read_rows(path)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
