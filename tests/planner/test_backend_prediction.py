"""Layouts of catalogue models priced by other frameworks' rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.backends.prediction import backend_prediction
from planner.catalog import stacks
from planner.errors import DocumentError
from planner.expressions import resolve_cluster, resolve_model
from planner.plan import Job, Layout
from planner.request import Request

LLAMA = resolve_model("llama-3.1-8b")
NODE = resolve_cluster("8xh100-sxm-80gb")
JOB = Job(seq_len=4096, global_batch=64)
MEGATRON = Request(LLAMA, NODE, JOB, stack=stacks()["megatron"])
LAYOUT = Layout(tensor=2, pipeline=2, data_shard=2, zero=1, micro_batches=32)


@pytest.mark.parametrize("backend", ["megatron", "nanotron", "torchtitan"])
def test_parts_and_stages_add_up(backend: str) -> None:
    result = backend_prediction(Request(LLAMA, NODE, JOB, stack=stacks()[backend]), LAYOUT)

    assert sum(result.step_parts.values()) == pytest.approx(result.step_time_s)
    assert 0.1 < result.mfu < 0.8
    for stage in result.stages:
        assert sum(stage.memory_parts.values()) == pytest.approx(stage.peak_memory_bytes)
    slowest_s = max(stage.forward_s + stage.backward_s for stage in result.stages)
    assert 32 * slowest_s < result.step_time_s < 48 * slowest_s


def test_what_a_backend_has_no_rules_for_is_told() -> None:
    with pytest.raises(DocumentError, match="did you mean"):
        Request.of(LLAMA, NODE, stack="megatrn")
    with pytest.raises(DocumentError, match="language models"):
        backend_prediction(replace(MEGATRON, model=resolve_model("vit-l-16")), LAYOUT)
    with pytest.raises(DocumentError, match="takes 16 devices"):
        too_large = Layout(tensor=8, pipeline=2)
        backend_prediction(MEGATRON, too_large)
