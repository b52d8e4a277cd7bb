"""What the search compiles: blocks on GPUs where that can be run, as a choice with a price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.catalog import stacks
from planner.catalog.expressions import resolve_cluster, resolve_model
from planner.costs.predict import predict
from planner.documents.plan import Job, Plan
from planner.requests.pins import Pins, read_pins
from planner.requests.request import Request
from planner.schedules import schedule_of
from planner.search.search import search
from planner.search.space import layouts

MODEL = resolve_model("gpt2")
JOB = Job(seq_len=1024, global_batch=16)


def asked(cluster: str, **pins: object) -> Request:
    return Request(MODEL, resolve_cluster(cluster), JOB, pins=Pins(**pins))  # type: ignore[arg-type]


@pytest.mark.matrix
def test_the_answer_is_the_better_of_both_choices() -> None:
    free, none, block = (
        search(asked("4xa100-sxm-40gb", pipeline=1, **pins))
        for pins in ({}, {"compile": "none"}, {"compile": "block"})
    )

    every = [one.closed_form.objective_s for one in (none, block)]
    assert free.closed_form.objective_s == pytest.approx(min(every), rel=1e-9)
    assert (free.plan.compile, none.plan.compile) == ("block", "none")


def test_on_gpus_what_can_be_compiled_is_and_on_cpus_nothing() -> None:
    found = set(layouts(asked("4xa100-sxm-40gb")))
    for layout in found:
        if layout.pipeline > 1 and schedule_of(layout.schedule).stale:
            assert layout.compile == "none", layout.text()
        elif layout.compile == "none":  # where the device may wait for its host
            assert layout.micro_batch <= 8 * layout.context * layout.tensor, layout.text()
            assert replace(layout, compile="block") in found
    assert max(layout.micro_batch for layout in found) == 16
    assert {layout.compile for layout in layouts(asked("local:2"))} == {"none"}


def test_other_stacks_have_no_such_choice() -> None:
    request = replace(asked("4xa100-sxm-40gb"), stack=stacks()["megatron"])

    assert {layout.compile for layout in layouts(request)} == {"none"}


def test_a_compiled_plan_is_faster_holds_less_and_says_how_long_it_compiles() -> None:
    request = asked("4xa100-sxm-40gb", pipeline=1, tensor=1, recompute="none")
    plan: Plan = search(request).plan

    both = [
        predict(plan.model_copy(update={"compile": choice}), MODEL, request.cluster)
        for choice in ("none", "block")
    ]

    eager, compiled = both
    assert compiled.step_time_s < eager.step_time_s
    assert compiled.stages[0].peak_memory_bytes < eager.stages[0].peak_memory_bytes
    assert eager.compile_s == 0.0
    # Blocks are of one kind and recompute alike: one graph.
    assert compiled.compile_s == request.stack.host.graph_s > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize(("samples", "chosen"), [(8, "none"), (64, "block")])
@pytest.mark.matrix
def test_where_the_device_waits_for_its_host_the_price_decides(samples: int, chosen: str) -> None:
    model, cluster = resolve_model("gpt2"), resolve_cluster("8xh100-sxm-80gb")
    job = Job(seq_len=1024, global_batch=samples)

    free, none, block = (
        search(Request(model, cluster, job, pins=Pins(**pins))).top[0]
        for pins in ({}, {"compile": "none"}, {"compile": "block"})
    )

    assert free.plan.compile == chosen
    assert free.objective_s == min(none.objective_s, block.objective_s)
    assert none.objective_s != block.objective_s


def test_compile_is_pinned_by_its_name() -> None:
    assert read_pins(["compile=block"]).compile == "block"
