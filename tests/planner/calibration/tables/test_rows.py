"""Rows of a table of runs read as what was run, and gaps told as reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.calibration.tables.rows import Skipped, measured_of, read_rows, setup_of
from meshwright.planner.documents.plan import Layout
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.setup import Setup

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


def setup(**cells: str) -> Setup:
    result = setup_of(ROW | cells)
    assert isinstance(result, Setup)
    return result


def layout(**cells: str) -> Layout:
    return setup(**cells).layout


def reason(**cells: str) -> str:
    result = setup_of(ROW | cells)
    assert isinstance(result, Skipped)
    return result.reason


def test_figures_of_a_row_give_the_published_parameters() -> None:
    assert setup().request.model.parameters == 8030261248


def test_a_micro_batch_that_is_not_filled_counts_as_a_whole_one_and_is_said() -> None:
    odd = setup(micro_batch_size="3", global_batch_size="64", recompute="none", precision="bf16")
    small = layout(micro_batch_size="8", global_batch_size="8")

    assert (odd.layout.micro_batch, odd.layout.micro_batches) == (3, 6)
    assert "6 whole micro-batches on each of 4 ranks" in odd.assumed
    assert (small.micro_batch, small.micro_batches) == (2, 1)


def test_empty_cells_are_unknown_and_said_to_be_assumed() -> None:
    without = setup(micro_batch_size="", precision="", framework="fsdp")

    assert without.layout.micro_batch == 1
    assert set(without.assumed) == {"micro_batch 1", "precision bf16"}
    assert setup(recompute="").recompute is None


def test_a_level_of_zero_that_is_not_said_is_the_frameworks_own() -> None:
    assert layout(framework="megatron").zero == 1
    assert layout(framework="fsdp").zero == 3
    assert layout(framework="fsdp", zero_stage="0").zero == 0


@pytest.mark.parametrize(("said", "shard", "replicate"), [("hsdp", 4, 4), ("fsdp", 16, 1)])
def test_hybrid_sharding_divides_states_within_a_node(
    said: str, shard: int, replicate: int
) -> None:
    found = layout(zero_stage=said, tp="1", pp="2", n_devices="32", framework="fsdp")

    assert (found.zero, found.data_shard, found.data_replicate) == (3, shard, replicate)


def test_what_lies_on_the_host_is_the_layouts_and_the_layers() -> None:
    both = setup(offload="params+activations")

    assert (both.layout.offload, both.activations) == ("parameters", "offload")
    assert layout(offload="optimizer").offload == "optimizer"


def test_a_run_without_fused_attention_is_of_releases_before_2022_where_they_have_a_framework() -> (
    None
):
    def framework(**cells: str) -> str:
        return setup(framework="deepspeed", zero_stage="3", **cells).request.framework.name

    assert framework(flash_attention="0") == "deepspeed@0.3"
    assert framework() == framework(flash_attention="1") == "deepspeed"
    left_out = setup_of(
        ROW | {"framework": "deepspeed", "zero_stage": "3", "flash_attention": "0"},
        unknown={"deepspeed@0.3"},
    )
    assert left_out.request.framework.name == "fsdp+eager-attention"


def test_an_unknown_framework_is_priced_as_the_closest_and_says_so() -> None:
    assert setup(framework="mystery").request.framework.name == "unknown"
    assert setup(framework="mystery", zero_stage="3").request.framework.name == "fsdp"
    tuned = setup(framework="mystery", task="lora", tp="1", pp="1")

    assert tuned.request.framework.name == "transformers"
    assert not tuned.known
    assert "framework 'mystery' priced as transformers" in tuned.assumed


def test_runs_have_the_options_that_those_of_their_framework_are_known_to_have_had() -> None:
    plain, both = "nanotron", "nanotron+checked-collectives+polled-transfers"
    large = {"n_devices": "512", "global_batch_size": "256"}

    one_node = setup(framework="nanotron", n_devices="8")
    whole = setup(framework="nanotron", pp="1")
    two, many = setup(framework="nanotron"), setup(framework="nanotron", **large)
    own = ROW | {"framework": "nanotron", "source": "nanotron_usp"}
    left_out = setup_of(own | large, left_out={"nanotron_usp"})

    assert (one_node.request.framework.name, whole.request.framework.name) == (plain, plain)
    assert two.request.framework.name == "nanotron+checked-collectives"
    assert many.request.framework.name == both
    assert isinstance(left_out, Setup)
    assert left_out.request.framework.name == two.request.framework.name
    assert left_out.request.framework.host.checked_s == two.request.framework.host.checked_s > 0


def test_what_no_convention_gives_is_a_reason() -> None:
    assert reason(layers="") == "layers is not known"
    assert "does not divide" in reason(tp="3")
    assert "no accelerator" in reason(accelerator="abacus")
    assert "not valid" in reason(layers="many")
    assert "not valid" in reason(tp="-2")
    assert "not planned" in reason(attention="mamba")
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
    with pytest.raises(DocumentError, match="is not there"):
        read_rows(tmp_path / "none.csv")
