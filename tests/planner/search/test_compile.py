"""What the search compiles: blocks on GPUs where that can be run, as a choice with a price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.catalog import frameworks
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.planner.search.space import layouts

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


def test_other_frameworks_have_no_such_choice() -> None:
    request = replace(asked("4xa100-sxm-40gb"), framework=frameworks()["megatron"])

    assert {layout.compile for layout in layouts(request)} == {"none"}


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
