"""Pictures of a plan: a timeline with its phases, memory over a step, a trace that others read."""

from __future__ import annotations

import json

import pytest

from planner.expressions import resolve_cluster, resolve_model
from planner.pins import Pins
from planner.plan import Job
from planner.predict import plan_timeline
from planner.report.html import page, phases, resident_gib, timeline_figure
from planner.report.trace import trace_json
from planner.request import Request
from planner.schedule import orders
from planner.search.answer import Answer
from planner.search.best_first import search
from planner.search.preferred import with_preference
from planner.simulate import Timeline, timeline
from planner.units import GIB


def deep(schedule: str = "1f1b", virtual_stages: int = 1) -> Timeline:
    """A step of 16 ranks and 64 micro-batches: a second forward, two backward."""
    stages = 16 * virtual_stages
    order = orders(schedule, stages=stages, micro_batches=64, virtual_stages=virtual_stages)
    return timeline(order, forward_s=[1.0] * stages, backward_s=[2.0] * stages)


def test_a_pipeline_is_full_once_all_ranks_work_and_drains_once_one_is_done() -> None:
    """By hand: the last of 16 ranks begins after 15 forwards and ends 15 backwards early."""
    step = deep()

    assert step.makespan_s == 63 * 3 + 16 * 3
    assert phases(step) == (15.0, step.makespan_s - 15 * 2.0)


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 4)])
def test_every_action_of_64_micro_batches_on_16_ranks_is_drawn(
    schedule: str, virtual_stages: int
) -> None:
    step = deep(schedule, virtual_stages)

    figure = timeline_figure(step)

    drawn = sum(len(bars.x) for bars in figure.data)
    assert drawn == sum(map(len, step.orders)) == 2 * 64 * 16 * virtual_stages
    assert {name for bars in figure.data for name in bars.y} == {f"rank {r}" for r in range(16)}
    assert len({bars.marker.color for bars in figure.data}) == virtual_stages
    assert "stage 0, micro-batch 63" in " ".join(figure.data[0].hovertext)
    assert {note.text for note in figure.layout.annotations} == {"fills", "steady", "drains"}


@pytest.fixture(scope="module")
def answer() -> tuple[Request, Answer]:
    request = Request(
        resolve_model("gpt2"),
        resolve_cluster("4xv100-sxm-32gb"),
        Job(seq_len=1024, global_batch=32),
        pins=Pins(pipeline=4, schedule="1f1b"),
    )
    return request, with_preference(request, search(request))


def test_memory_over_a_step_peaks_at_the_prediction_and_returns_to_what_is_kept(
    answer: tuple[Request, Answer],
) -> None:
    request, found = answer
    step = plan_timeline(found.plan, request.model, request.cluster)

    moments = resident_gib(step, found.prediction)

    for rank, stage in enumerate(found.prediction.stages):
        sizes = [size for _, size in moments[rank]]
        kept = (stage.peak_memory_bytes - stage.memory_parts["activations"]) / GIB
        assert max(sizes) == pytest.approx(stage.peak_memory_bytes / GIB)
        assert sizes[0] == sizes[-1] == pytest.approx(kept)
        assert len(sizes) == 1 + 2 * found.plan.micro_batches


def test_the_page_says_why_and_the_alternatives_before_anything_else(
    answer: tuple[Request, Answer],
) -> None:
    request, found = answer
    step = plan_timeline(found.plan, request.model, request.cluster)

    text = page(found.plan, found.prediction, timeline=step, choices=found.choices)

    places = [text.index(head) for head in ("<p>Why: ", "Alternatives", "Mesh on", "Stages</h2>")]
    assert places == sorted(places)
    assert text.index("Memory over a step") > text.index("Pipeline timeline")


def test_a_trace_names_ranks_and_stages_apart() -> None:
    step = deep("interleaved", 2)

    events = json.loads(trace_json(step))["traceEvents"]

    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[3, None] == "rank 3" and names[3, 3] == "stage 3" and names[3, 19] == "stage 19"
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == sum(map(len, step.orders))
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(1e6 * step.makespan_s)
    assert {event["cat"] for event in drawn} == {"forward", "backward"}
