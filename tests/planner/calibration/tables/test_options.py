"""Words of what a run had: each says one thing, and none is lost."""

from __future__ import annotations

import pytest

from meshwright.planner.calibration.tables.options import (
    IN_LAYOUTS,
    OF_FRAMEWORKS,
    PRECISIONS,
    RECOMPUTED,
    RESTATED,
    SCALES,
    options_of_row,
)
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


EXPERTS = {
    "n_experts": "64",
    "experts_per_token": "8",
    "expert_ffn_size": "1408",
    "ep": "8",
    "n_devices": "16",
}
FINE_TUNING = {
    "framework": "hf-sft-trainer",
    "task": "lora",
    "zero_stage": "3",
    "micro_batch_size": "4",
    "n_devices": "8",
}
WORDS: dict[str, tuple[str, dict[str, str]]] = {
    "recomputation": (
        "recompute-full recompute-every-2 recompute-3-layers recompute-norm recompute-act "
        "recompute-mlp offload-5-layers",
        {"recompute": ""},
    ),
    "a share that is not said": ("recompute-some-layers", {"recompute": "partial"}),
    "recomputation of experts": (
        "recompute-moe-act recompute-moe",
        EXPERTS | {"recompute": "partial"},
    ),
    "recomputation of latents": ("recompute-mla-up", {"attention": "mla", "recompute": "partial"}),
    "recomputation by operator": (
        "recompute-per-op recompute-core-attn",
        {"framework": "torchtitan", "recompute": "partial", "flash_attention": "0"},
    ),
    "states": (
        "muon precision-aware-optimizer grads-bf16 bf16-states offload-optimizer "
        "offload-layer-inputs",
        {"zero_stage": "1"},
    ),
    "wide states": ("grads-fp32 fp32-states", {"framework": "hf-sft-trainer"}),
    "sharding": ("hybrid-shard torch-fsdp2 fsdp1", {"zero_stage": "3"}),
    "sharding of the library": ("fsdp2", FINE_TUNING),
    "tensor parallelism": ("tp-overlap", {"tp": "4"}),
    "no overlap": ("no-tp-overlap", {"tp": "4", "release": "mlperf-5.0"}),
    "experts": (
        "ep-overlap alltoall allgather deepep hybridep balanced-routing token-drop "
        "fused-grouped-mlp",
        EXPERTS,
    ),
    "graphs": (
        "cuda-graphs-full cuda-graphs-layer cuda-graphs-part",
        EXPERTS | {"options": "alltoall"},
    ),
    "kernels": ("flash-attention-2 flex-attention", {}),
    "losses": ("fused-cross-entropy", {"framework": "hf-sft-trainer"}),
    "kernels that are written out": (
        "flash-attention flash-attention-3 fused-kernels liger",
        {"framework": "fsdp", "flash_attention": "0"},
    ),
    "8 bits": (
        "fp8-current fp8-rowwise fp8-blockwise mxfp8 nvfp4 fp8-attention",
        {"precision": "fp8", "accelerator": "b200"},
    ),
    "8 bits that are kept": (
        "fp8-activations fp8-delayed",
        {"precision": "fp8", "framework": "torchtitan", "zero_stage": "3"},
    ),
    "8 bits that are gathered": (
        "fp8-param-gather",
        {"precision": "fp8", "framework": "accelerate", "zero_stage": "3"},
    ),
    "adapters": ("lora-rank-64 lora-attention", FINE_TUNING),
    "adapters on one device": ("gptq", FINE_TUNING | {"task": "qlora", "zero_stage": "0"}),
    "adapters of attention": ("lora-all", {"task": "lora"}),
    "nobody knows": ("triton-lora weights-int8 mtp warp-drive", {}),
}
"""Words with a run in which each of them says something that is not so without it."""


@pytest.mark.parametrize(
    ("each", "cells"),
    [(each, cells) for words, cells in WORDS.values() for each in words.split()],
)
def test_a_word_changes_the_prediction_or_is_named(each: str, cells: dict[str, str]) -> None:
    others = cells.get("options", "te")

    without = setup(**{**cells, "options": others})
    having = setup(**{**cells, "options": f"{others}+{each}"})

    assert having.assumed != without.assumed or figures_of(having) != figures_of(without)


def figures_of(run: Setup) -> tuple[float, float]:
    prediction = predict_run(run)
    return prediction.step_time_s, prediction.memory_bytes("allocated", "max")


def test_every_word_is_tried_or_says_what_is_so_anyway() -> None:
    tried = {each for words, _ in WORDS.values() for each in words.split()}

    known = {*OF_FRAMEWORKS, *SCALES, *RECOMPUTED, *PRECISIONS, *IN_LAYOUTS} - {"recompute-none"}
    assert known <= tried
    assert tried.isdisjoint(RESTATED)


UNREAD = {
    "task": "dora",
    "attention": "nsa mha",
    "precision": "bf16+fp8",
    "offload": "disk params+nvme",
    "recompute": "selective+mlp recompute-5-layers",
    "intra_link": "pcie5 ualink none",
    "sequence_parallel": "ulysses 2",
    "compiled": "reduce-overhead",
    "flash_attention": "3 xformers",
    "gated_mlp": "relu2",
    "tp": "0 1.5",
    "dp": "3",
    "seq_len": "4096.5",
    "inter_gb_per_s_per_device": "0",
    "n_shared_experts": "5",
    "framework": "hf-sft-trainer+warp-drive",
    "release": "banana 2024 torch-2.9/warp-9",
    "basis": "options=guess hello",
    "memory_kind": "peak",
    "memory_rank": "3",
    "options": (
        "recompute-99-layers lora-rank-8 alltoall+deepep fp8-current+fp8-blockwise "
        "tp-overlap+no-tp-overlap fsdp1+fsdp2"
    ),
}
"""Cells of which a part says nothing to a prediction, or contradicts others."""


@pytest.mark.parametrize(
    ("column", "value"), [(name, each) for name, cells in UNREAD.items() for each in cells.split()]
)
def test_what_a_cell_says_beyond_what_is_read_is_named_once(column: str, value: str) -> None:
    base = ROW | {"framework": "hf-sft-trainer", "zero_stage": "3", "basis": "", "options": ""}

    having, without = setup_of({**base, column: value}), setup_of(base)

    assert isinstance(without, Setup)
    if isinstance(having, Setup):
        named = set(having.assumed) - set(without.assumed)
        assert named
        assert len(having.assumed) == len(set(having.assumed))


GPT_OSS = {
    "layers": "24",
    "hidden_size": "2880",
    "ffn_size": "2880",
    "n_heads": "64",
    "head_dim": "64",
    "vocab_size": "201088",
    "n_experts": "32",
    "experts_per_token": "4",
    "expert_ffn_size": "2880",
}
CELLS: list[tuple[str, str, dict[str, str]]] = [
    ("layers", "16", {}),
    ("hidden_size", "2048", {}),
    ("ffn_size", "8192", {}),
    ("n_heads", "64", {}),
    ("n_kv_heads", "32", {}),
    ("head_dim", "64", {}),
    ("vocab_size", "32000", {}),
    ("tied_embeddings", "1", {}),
    ("gated_mlp", "0", {}),
    ("attention", "mla", {}),
    ("n_experts", "128", EXPERTS),
    ("experts_per_token", "2", EXPERTS),
    ("expert_ffn_size", "704", EXPERTS),
    ("n_shared_experts", "1", EXPERTS),
    ("n_dense_layers", "1", EXPERTS),
    ("n_params", "30e9", {}),
    ("seq_len", "8192", {}),
    ("accelerator", "a100-sxm-80gb", {}),
    ("accelerator_memory_gb", "16", {}),
    ("devices_per_node", "4", {"tp": "8"}),
    ("n_devices", "32", {}),
    ("intra_link", "pcie", {"tp": "4"}),
    ("inter_gb_per_s_per_device", "3", {"tp": "16"}),
    ("tp", "2", {}),
    ("pp", "2", {}),
    ("vpp", "4", {"pp": "4"}),
    ("cp", "2", {}),
    ("ep", "4", EXPERTS),
    ("etp", "2", EXPERTS | {"ep": "4", "tp": "2"}),
    ("dp", "8", {"n_devices": "", "dp": "4"}),
    ("zero_stage", "3", {}),
    ("sequence_parallel", "0", {"tp": "4"}),
    ("micro_batch_size", "2", {}),
    ("global_batch_size", "128", {}),
    ("recompute", "full", {}),
    ("offload", "optimizer", {}),
    ("offload", "activations:0.30", {"offload": "activations:0.10"}),
    ("offload", "activations:1.0", {"offload": "activations:0.30"}),
    ("precision", "fp8", {}),
    ("flash_attention", "0", {}),
    ("compiled", "1", {"framework": "torchtitan"}),
    ("compiled", "", {"framework": "torchtitan", "compiled": "0"}),
    ("framework", "deepspeed", {}),
    ("task", "lora", {}),
    ("release", "mlperf-5.0", {"tp": "4"}),
    ("release", "nemo-99.01", {}),
    ("options", "tp-overlap", {"tp": "4"}),
    ("loss", "fused", {}),
    ("loss", "logits", {"framework": "fsdp", "options": "liger"}),
    ("loss", "sampled", {}),
    ("basis", "options=inferred", {"options": "te"}),
    ("model", "gpt-oss-20b", GPT_OSS),
]
"""A column, a value, and a run in which that is not so."""


@pytest.mark.parametrize(("column", "value", "cells"), CELLS)
def test_a_cell_changes_the_prediction_or_is_named(
    column: str, value: str, cells: dict[str, str]
) -> None:
    having = setup_of({**ROW, "basis": "", "compiled": "0", **cells, column: value})
    without = setup_of({**ROW, "basis": "", "compiled": "0", **cells})

    assert isinstance(without, Setup)
    if isinstance(having, Setup):
        assert having.assumed != without.assumed or figures_of(having) != figures_of(without)
