"""Asynchronous tensor parallelism: planned where it is asked for, refused where it cannot be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog import framework, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Job, Layout, Lora
from meshwright.planner.errors import NoPlanFits
from meshwright.planner.frameworks.native_limits import obstacle, refusal
from meshwright.planner.requests.pins import Pins, read_pins, without_effect
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

LLAMA = resolve_model("llama-3.1-8b")
JOB = Job(seq_len=8192, global_batch=64)
NODE = resolve_cluster("8xh100-sxm-80gb")
ASYNC = Layout(
    tensor=8, data_shard=1, micro_batch=4, micro_batches=16, compile="block", tensor_overlap="async"
)


def test_where_nobody_asks_collectives_run_one_by_one() -> None:
    plan = search(Request(LLAMA, NODE, JOB, pins=Pins(tensor=8))).plan

    assert plan.tensor_overlap == "none"
    assert "tensor_overlap" not in plan.dump()


@pytest.mark.spread(1)
@pytest.mark.long("2xh100-sxm-80gb+2xa100-sxm-80gb-pins6-True", "8xh100-sxm-80gb-pins1-True")
@pytest.mark.parametrize(
    ("cluster", "pins", "faster"),
    [
        ("8xh100-sxm-80gb", Pins(tensor=8), True),
        ("8xh100-sxm-80gb", Pins(tensor=4, pipeline=2), True),
        ("8xh100-sxm-80gb", Pins(), False),
        ("8xmi300x", Pins(tensor=8), False),
        ("2x4xa100-sxm-80gb", Pins(tensor=8), False),
        pytest.param(
            "4xh100-sxm-80gb+4xa100-sxm-80gb",
            Pins(tensor=2, pipeline=4, schedule="1f1b"),
            True,
            marks=pytest.mark.matrix,
        ),
        ("2xh100-sxm-80gb+2xa100-sxm-80gb", Pins(tensor=2, pipeline=1), True),
    ],
)
@pytest.mark.matrix
def test_where_it_is_allowed_the_search_weighs_both(
    cluster: str, pins: Pins, *, faster: bool
) -> None:
    job = Job(seq_len=8192, global_batch=24)
    model = graph_of(LLAMA.architecture.model_copy(update={"layers": 6}), name="six")

    def least_s(**changes: object) -> float:
        asked = Request(model, resolve_cluster(cluster), job, replace(pins, **changes))  # type: ignore[arg-type]
        try:
            return search(asked).closed_form.objective_s
        except NoPlanFits:
            return math.inf

    each = least_s(tensor_overlap="none"), least_s(tensor_overlap="async")

    both_s = least_s(allowed=frozenset({"async-tensor"}))

    assert both_s == pytest.approx(min(each), rel=1e-9)
    assert least_s() == each[0]
    assert (each[1] < each[0]) == faster


def test_without_tensor_ranks_it_has_no_effect_and_the_answer_says_so() -> None:
    pins = read_pins(["tensor_overlap=async"])

    assert list(without_effect(pins, Layout(data_shard=8, zero=3), NODE)) == [
        "tensor_overlap=async has no effect: tp=1, no block is divided"
    ]


@pytest.mark.parametrize(
    ("changes", "job", "why"),
    [
        ({"tensor": 1, "data_shard": 8, "zero": 3}, {}, "is async, and tensor parallelism divides"),
        ({"compile": "none"}, {}, "is async, which torch's compiler makes of a block"),
        ({}, {"precision": "fp8"}, "is async, and products in fp8 round what was gathered first"),
        ({}, {"lora": Lora(rank=8, alpha=16)}, "is async, and adapters are added between"),
        (
            {"tensor": 4, "pipeline": 2, "schedule": "zb-h1"},
            {},
            "is async, and zb-h1 makes weight gradients apart",
        ),
    ],
)
def test_what_the_compiler_cannot_match_is_refused(
    changes: dict[str, object], job: dict[str, object], why: str
) -> None:
    layout = Layout(**{**_fields(ASYNC), **changes})  # type: ignore[arg-type]

    found = obstacle(LLAMA, Job(**{"seq_len": 8192, "global_batch": 64, **job}), layout)  # type: ignore[arg-type]

    assert found is not None and str(found).startswith(f"tensor_overlap: {why}")


@pytest.mark.parametrize(
    ("cluster", "layout", "why"),
    [
        ("8xmi300x", ASYNC, "has no symmetric memory in torch"),
        (
            "2x4xa100-sxm-80gb",
            ASYNC,
            "the 8 tensor ranks span several nodes of 4 devices",
        ),
    ],
)
def test_ranks_read_each_others_memory_within_a_node_alone(
    cluster: str, layout: Layout, why: str
) -> None:
    there: ClusterSpec = resolve_cluster(cluster)

    found = refusal(LLAMA, there, JOB, layout)

    assert found is not None and why in found
    assert refusal(LLAMA, NODE, JOB, layout) is None


@pytest.mark.parametrize(
    ("model", "nodes", "micro_batch", "recompute", "batch", "gain"),
    [
        # torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md: tokens/s with over
        # without, bf16.
        ("llama-3-70b", 32, 16, "full", 512, 652.4 / 597.3),
        ("llama-3.1-8b", 8, 12, "selective", 96, 4809.4 / 4378),
    ],
)
def test_published_gains_are_met(
    model: str, nodes: int, micro_batch: int, recompute: str, batch: int, gain: float
) -> None:
    cluster = resolve_cluster(f"{nodes}x8xh100-hbm2e-96gb")
    job = Job(seq_len=8192, global_batch=batch)
    for ran, bound in ((framework("torchtitan+compiled+compiled-loss"), 0.005), (native(), 0.02)):
        request = Request(
            resolve_model(model),
            cluster,
            job,
            pins=Pins(recompute=recompute),
            framework=ran,  # type: ignore[arg-type]
        )
        step_s = [
            layout_prediction(
                request,
                Layout(
                    tensor=8,
                    data_shard=nodes,
                    zero=3,
                    micro_batch=micro_batch,
                    compile="block",
                    tensor_overlap=overlap,  # type: ignore[arg-type]
                ),
            ).step_time_s
            for overlap in ("none", "async")
        ]
        assert step_s[0] / step_s[1] == pytest.approx(gain, abs=bound)


def _fields(layout: Layout) -> dict[str, object]:
    return {name: getattr(layout, name) for name in layout.__dataclass_fields__}
