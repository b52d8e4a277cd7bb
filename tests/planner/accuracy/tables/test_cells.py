"""Cells are read as people write them; what nobody writes is not known, never an error."""

from __future__ import annotations

import pytest

from planner.accuracy.tables import cells
from planner.catalog import stack_name


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("bf16-mixed", ("bf16", False)),
        ("16-mixed", ("fp16", False)),
        ("FP8", ("fp8", False)),
        ("MXFP8", ("mxfp8", False)),
        ("mxfp4", ("nvfp4", False)),
        ("nf4", ("bf16", True)),
        ("bf16+nf4", ("bf16", True)),
        ("float32", ("fp32", False)),
        ("posit", None),
    ],
)
def test_precisions(text: str, known: tuple[str, bool] | None) -> None:
    assert cells.precision(text) == known


@pytest.mark.parametrize(
    ("text", "kind"),
    [("selective_op", "selective"), ("uniform", "full"), ("block", "partial"), ("0", "none")],
)
def test_kinds_of_recomputation(text: str, kind: str) -> None:
    assert cells.recomputed(text) == kind


def test_tasks_and_frameworks_have_several_names() -> None:
    assert [cells.task(text) for text in ("SFT", "LoRA", "pretraining", "dpo")] == [
        "full_finetune",
        "lora",
        "pretrain",
        None,
    ]
    assert stack_name("Megatron-LM") == "megatron"
    assert stack_name("FSDP2") == "fsdp"


def test_a_number_may_have_separators_and_an_empty_cell_many_looks() -> None:
    assert cells.number({"n_params": "7,000"}, "n_params") == 7000
    assert cells.number({"n_params": "NaN"}, "n_params") is None
    with pytest.raises(ValueError, match="n_params is -1"):
        cells.number({"n_params": "-1"}, "n_params")


def test_what_lies_on_the_host() -> None:
    assert cells.offloaded("Optimizer, parameters") == {"optimizer", "params"}
    assert cells.offloaded("0") == cells.offloaded("") == frozenset()
