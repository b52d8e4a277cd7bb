"""Words of what a run had: each says one thing, and none is lost."""

from __future__ import annotations

import pytest

from meshwright.planner.calibration.tables.options import OF_FRAMEWORKS, options_of_row
from meshwright.planner.calibration.tables.predictions import placements, predict_run
from meshwright.planner.calibration.tables.rows import setup_of
from meshwright.planner.catalog import frameworks
from meshwright.planner.documents.framework import OPTIONS
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
    "seq_len": "4096",
    "accelerator": "h100-sxm-80gb",
    "devices_per_node": "8",
    "n_devices": "16",
    "micro_batch_size": "1",
    "global_batch_size": "64",
    "framework": "megatron",
    "precision": "bf16",
    "recompute": "none",
}


def setup(**cells: str) -> Setup:
    found = setup_of(ROW | cells)
    assert isinstance(found, Setup)
    return found


def blocks(setup: Setup) -> list[list[tuple[str, str]]]:
    """[stage][block] What is recomputed, and what becomes of activations."""
    kinds = {kind for kind in setup.request.model.chain_kinds if kind.startswith("block")}
    return [
        [(recompute, kept) for kind, recompute, kept in stage if kind in kinds]
        for stage in placements(setup, setup.layout)
    ]


def test_every_word_of_a_framework_is_one_of_its_options() -> None:
    assert OPTIONS.keys() >= {option for each in OF_FRAMEWORKS.values() for option in each}


def test_a_word_that_nobody_knows_is_said_and_changes_nothing() -> None:
    found = setup(options="tp-overlap+warp-drive")

    assert "option 'warp-drive' taken as not known" in found.assumed
    assert found.request.framework == setup(options="tp-overlap").request.framework


def test_an_empty_cell_leaves_the_framework_as_it_is() -> None:
    assert setup(options="").request.framework == frameworks()["megatron"]
    assert options_of_row({"options": "", "loss": ""}).unread == ()


def test_what_a_run_had_and_a_row_does_not_say_makes_its_range_wider() -> None:
    told, silent = setup(options="no-cuda-graphs"), setup(options="")

    assert silent.assumed == ("options as usual of its framework and release",)
    widths = [
        found.step_time_high_s / found.step_time_low_s for found in map(predict_run, (told, silent))
    ]
    assert widths[0] < widths[1]


def test_scales_are_those_of_products_in_8_bits_alone() -> None:
    assert setup(precision="fp8", options="fp8-blockwise").layout.scales == "blockwise"
    assert setup(precision="fp8").layout.scales == "delayed"
    assert setup(precision="bf16", options="fp8-blockwise").layout.scales == "tensorwise"


def test_the_first_blocks_of_each_stage_recompute_or_leave_the_device() -> None:
    few = blocks(setup(pp="2", vpp="1", recompute="partial", options="recompute-3-layers"))
    away = blocks(setup(pp="2", vpp="1", options="offload-5-layers"))

    for stage in few:
        assert [recompute for recompute, _ in stage] == ["full"] * 3 + ["none"] * 13
    for stage in away:
        assert [kept for _, kept in stage] == ["offload"] * 5 + ["keep"] * 11


def test_modules_that_are_cheap_to_make_again_are_selective_where_attention_is_fused() -> None:
    found = setup(recompute="partial", options="recompute-norm+recompute-act")

    assert {recompute for recompute, _ in blocks(found)[0]} == {"selective"}


@pytest.mark.parametrize("cells", [{"loss": "fused"}, {"loss": "chunked"}, {"options": "liger"}])
def test_a_loss_in_pieces_never_has_all_logits(cells: dict[str, str]) -> None:
    long = {
        "framework": "hf-sft-trainer",
        "task": "lora",
        "recompute": "full",
        "micro_batch_size": "4",
    }

    whole, pieces = predict_run(setup(**long)), predict_run(setup(**long, **cells))

    # 16,384 tokens x 128,256 logits x 12 bytes are 25 GB, of which a thousand rows stay.
    saved = whole.memory_bytes("allocated", "max") - pieces.memory_bytes("allocated", "max")
    assert saved > 15e9


def test_adapters_have_the_rank_and_the_matrices_that_a_row_says() -> None:
    lora = setup(task="lora", options="lora-rank-64+lora-attention").request.job.lora

    assert lora is not None
    assert (lora.rank, lora.targets) == (64, ("q_proj", "k_proj", "v_proj", "o_proj"))
