"""Cells are read as people write them; what nobody writes is not known, never an error."""

from __future__ import annotations

import pytest

from meshwright.planner.calibration.tables import cells
from meshwright.planner.catalog import framework_name


@pytest.mark.parametrize(
    ("text", "kind"),
    [("selective_op", "selective"), ("uniform", "full"), ("block", "partial"), ("0", "none")],
)
def test_kinds_of_recomputation(text: str, kind: str) -> None:
    assert cells.recompute_of_text(text) == kind


def test_tasks_and_frameworks_have_several_names() -> None:
    assert [cells.task(text) for text in ("SFT", "LoRA", "pretraining", "dpo")] == [
        "full_finetune",
        "lora",
        "pretrain",
        None,
    ]
    assert framework_name("Megatron-LM") == "megatron"
    assert framework_name("FSDP2") == "fsdp"


def test_what_lies_on_the_host() -> None:
    assert cells.offloaded_states("Optimizer, parameters") == {"optimizer", "params"}
    assert cells.offloaded_states("0") == cells.offloaded_states("") == frozenset()
