"""Captured graphs: planned where a step waits for its host, refused where a pass is not alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.planner.catalog import framework, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.frameworks.executable import rules_of
from meshwright.planner.requests.pins import Pins, read_pins, without_effect
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

GPT2 = resolve_model("gpt2")
ONE, NODE = resolve_cluster("1xh100-sxm-80gb"), resolve_cluster("8xh100-sxm-80gb")
HOST = resolve_cluster("1xh100-sxm-80gb")
HOST = HOST.model_copy(
    update={
        "groups": (
            HOST.groups[0].model_copy(
                update={
                    "accelerator": HOST.groups[0].accelerator.model_copy(
                        update={"kind": "cpu", "name": "cpu"}
                    )
                }
            ),
        )
    }
)
ALLOWED = Pins(allowed=frozenset({"graphs"}))
SHORT, LONG = Job(seq_len=256, global_batch=8), Job(seq_len=1024, global_batch=64)
CAPTURED = Layout(micro_batch=8, micro_batches=1, compile="block", graphs="micro_batch")


def priced(layout: Layout, job: Job = SHORT, cluster: str = "1xh100-sxm-80gb") -> Prediction:
    return layout_prediction(Request(GPT2, resolve_cluster(cluster), job), layout)


def test_a_step_that_waits_for_its_host_is_captured_where_that_is_allowed() -> None:
    answer = search(Request(GPT2, ONE, SHORT, pins=ALLOWED))

    assert answer.plan.graphs == "micro_batch"
    assert "graphs: micro_batch" in answer.plan.dump()
    plain = search(Request(GPT2, ONE, SHORT))
    assert "graphs" not in plain.plan.dump()
    assert answer.prediction.step_time_s < 0.9 * plain.prediction.step_time_s


def test_a_step_that_does_not_wait_is_not() -> None:
    large = Request(resolve_model("llama-3.2-1b"), ONE, LONG, pins=ALLOWED)
    assert search(large).plan.graphs == "none"
    assert search(Request(GPT2, HOST, SHORT, pins=ALLOWED)).plan.graphs == "none"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"pipeline": 2}, "graphs: is micro_batch, and a pipeline's stages"),
        ({"zero": 1, "data_shard": 2}, "ZeRO-1"),
        ({"tensor": 2}, "tensor parallelism"),
        ({"context": 2}, "context parallelism"),
        ({"offload": "parameters"}, "parameters come from the host"),
    ],
)
def test_a_pass_that_sends_is_not_captured(change: dict[str, object], place: str) -> None:
    job = Job(seq_len=256, global_batch=16)
    layout = replace(CAPTURED, **change)  # type: ignore[arg-type]

    assert place in (rules_of(native())(resolve_model("llama-3.2-1b"), NODE, job, layout) or "")
    eager = replace(CAPTURED, compile="none")
    assert "graphs of each" in (rules_of(framework("megatron"))(GPT2, ONE, SHORT, eager) or "")
    assert rules_of(native())(GPT2, ONE, SHORT, CAPTURED) is None


def test_gradients_of_graphs_stay_and_the_range_reaches_to_a_pass_that_runs_as_it_is() -> None:
    graph, plain = priced(CAPTURED), priced(replace(CAPTURED, graphs="none"))

    assert graph.step_time_s < plain.step_time_s
    assert graph.step_time_high_s == plain.step_time_high_s
    assert any("not captured" in a.what for a in graph.assumptions)
    more = graph.stages[0].peak_memory_bytes - plain.stages[0].peak_memory_bytes
    # In one pass gradients arise as activations go; here they are there from the start.
    gradients = graph.stages[0].memory_parts["gradients"]
    assert gradients == pytest.approx(4 * GPT2.parameters, rel=1e-3)
    assert 0 < more <= 1.1 * gradients


def test_the_sum_over_replicas_waits_for_graphs_to_end() -> None:
    alone = priced(CAPTURED, LONG, "1xh100-sxm-80gb").step_parts
    layout = replace(CAPTURED, data_replicate=8)

    graph, plain = (
        priced(replace(layout, graphs=graphs), LONG, "8xh100-sxm-80gb").step_parts
        for graphs in ("micro_batch", "none")
    )

    assert math.isclose(graph["forward"], alone["forward"], rel_tol=0.02)
    assert graph["data communication"] > 2 * plain["data communication"]


def test_a_device_without_graphs_is_named() -> None:
    pins = read_pins(["graphs=micro_batch"])

    assert list(without_effect(pins, CAPTURED, HOST)) == [
        "graphs=micro_batch has no effect: cpu has no graphs"
    ]
    assert list(without_effect(pins, CAPTURED, ONE)) == []
