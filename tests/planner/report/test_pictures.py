"""Pictures of a plan: a timeline with its phases, memory over a step, a trace that others read."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import plan_timelines
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.units import GIB, seconds_text
from meshwright.planner.report.html import distinct_choices, memory_of_ranks, page, resident_gib
from meshwright.planner.report.mesh_picture import axes_of, coordinates, mesh_picture
from meshwright.planner.report.text import layers_text, plan_table
from meshwright.planner.report.timeline_picture import (
    left_out,
    phases,
    timeline_key,
    timeline_picture,
    trace_json,
)
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules.schedule import orders
from meshwright.planner.schedules.simulate import Timeline, timeline
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.plan_preference import with_preference
from meshwright.planner.search.search import search


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

    picture = ElementTree.fromstring(timeline_picture(step))

    paths = picture.findall("path")
    assert sum(path.attrib["d"].count("z") for path in paths) == 2 * 64 * 16 * virtual_stages
    assert left_out(step) == 0
    assert len(paths) == len(timeline_key(step)) == 2 * virtual_stages
    assert len({path.attrib["fill"] for path in paths}) == virtual_stages
    told = [text.text for text in picture.findall("text")]
    assert {"fills", "steady", "drains", *(f"rank {rank}" for rank in range(16))} <= {*told}
    assert len(timeline_picture(step)) < 250_000


def test_each_action_of_few_has_a_title_and_its_place_is_its_time() -> None:
    """By hand: two micro-batches on one rank, forwards of 1 s and backwards of 2 in 6 s."""
    order = orders("1f1b", stages=1, micro_batches=2, virtual_stages=1)
    step = timeline(order, forward_s=[1.0], backward_s=[2.0])

    picture = ElementTree.fromstring(timeline_picture(step))

    titles = [group.findtext("title") for group in picture.findall("g")]
    assert sorted(str(title) for title in titles) == [
        "backward, stage 0, micro-batch 0: 2 s",
        "backward, stage 0, micro-batch 1: 2 s",
        "forward, stage 0, micro-batch 0: 1 s",
        "forward, stage 0, micro-batch 1: 1 s",
    ]
    widths = sorted(
        int(str(path.attrib["d"]).partition("h")[2].partition("v")[0])
        for path in picture.iter("path")
    )
    assert widths == pytest.approx([6640 / 6] * 2 + [6640 / 3] * 2, abs=2)


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
    [step] = plan_timelines(found.plan, request.model, request.cluster)

    moments = resident_gib(step, memory_of_ranks(found.plan, found.prediction))

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
    [step] = plan_timelines(found.plan, request.model, request.cluster)

    text = page(
        found.plan,
        found.prediction,
        cluster=request.cluster,
        timelines=[step],
        choices=found.choices,
    )

    places = [text.index(head) for head in ("<p>Why: ", "Alternatives", "Mesh on", "Stages</h2>")]
    assert places == sorted(places)
    assert text.index("Memory over a step") > text.index("Pipeline timeline")


def test_the_page_has_the_bounds_and_the_simulated_plans_of_the_proof(
    answer: tuple[Request, Answer],
) -> None:
    request, found = answer
    [loser], [finalist] = found.certificate.runners_up, found.certificate.finalists
    loser = loser.model_copy(update={"lower_bound_s": 0.9 * finalist.step_time_s})
    certificate = found.certificate.model_copy(update={"runners_up": (loser,)})

    text = page(found.plan, found.prediction, cluster=request.cluster, certificate=certificate)

    bound, step = (
        f'<td class="n">{seconds_text(of)}</td>'
        for of in (loser.lower_bound_s, finalist.step_time_s)
    )
    assert bound != step
    assert f"<td>{loser.layout}</td>{bound}<td>{loser.reason}</td>" in text
    assert f"<td>{finalist.layout}</td>{step}" in text


def test_a_rank_of_several_stages_has_one_memory_and_the_names_of_its_stages() -> None:
    request = Request(
        resolve_model("llama-3.2-1b"),
        resolve_cluster("4xa100-sxm-40gb"),
        Job(seq_len=1024, global_batch=16),
        pins=Pins(pipeline=2, virtual_stages=2, schedule="interleaved", tensor=2),
    )
    found = search(request)
    [step] = plan_timelines(found.plan, request.model, request.cluster)

    ranks = memory_of_ranks(found.plan, found.prediction)

    assert [name for name, _ in ranks] == ["rank 0: stages 0, 2", "rank 1: stages 1, 3"]
    moments = resident_gib(step, ranks)
    for rank, (_, stage) in enumerate(ranks):
        assert stage.memory_parts == found.prediction.stages[rank + 2].memory_parts
        most = max(size for _, size in moments[rank])
        assert most == pytest.approx(stage.peak_memory_bytes / GIB)


def test_ranks_are_drawn_where_they_are_on_the_machine() -> None:
    """numpy counts coordinates, the last axis the fastest."""
    layout = Layout(tensor=2, data_shard=4, pipeline=2)
    cluster = resolve_cluster("2x8xh100-sxm-80gb")

    picture = ElementTree.fromstring(mesh_picture(layout, cluster))

    told = [group[0].text for group in picture.iter("g")]
    assert len(told) == 16
    for rank, text in enumerate(told):
        pipeline, data, tensor = np.unravel_index(rank, (2, 4, 2))
        assert coordinates(layout, rank) == {
            "tensor": tensor,
            "data_shard": data,
            "pipeline": pipeline,
        }
        assert text == (
            f"rank {rank} on node {rank // 8}: tensor {tensor}, data_shard {data}, "
            f"pipeline {pipeline}"
        )
    links = {axis.name: axis.link for axis in axes_of(layout, cluster)}
    inside, between = cluster.tiers
    assert links["tensor"] == links["data_shard"] != links["pipeline"]
    assert links["data_shard"].startswith(f"{inside.name}, ")
    assert links["pipeline"] == f"{between.name}, {between.bytes_per_s / 1e9:.3g} GB/s"


@pytest.mark.parametrize(
    ("cluster", "layout", "drawn", "hidden"),
    [
        ("4xv100-sxm-32gb", Layout(data_shard=3), 3, None),
        ("64x8xh100-sxm-80gb", Layout(data_shard=512), 9 * 8, "55 more nodes"),
        ("10x8xh100-sxm-80gb", Layout(data_shard=80), 9 * 8, "1 more node"),
        ("4xgb200-nvl72", Layout(data_shard=288), 2 * 72, "2 more nodes"),
    ],
)
def test_of_many_nodes_the_first_and_the_last_are_drawn(
    cluster: str, layout: Layout, drawn: int, hidden: str | None
) -> None:
    text = mesh_picture(layout, resolve_cluster(cluster))

    assert text.count("<g>") == drawn
    assert text.count(">idle<") == (1 if cluster.startswith("4xv100") else 0)
    assert (hidden or "<svg") in text


def test_a_trace_names_ranks_and_stages_apart() -> None:
    step = deep("interleaved", 2)

    events = json.loads(trace_json([step]))["traceEvents"]

    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names[3, None] == "rank 3" and names[3, 3] == "stage 3" and names[3, 19] == "stage 19"
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == sum(map(len, step.orders))
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(1e6 * step.makespan_s)
    assert {event["cat"] for event in drawn} == {"forward", "backward"}


def test_a_trace_keeps_the_rules_of_its_format() -> None:
    """Trace Event Format: what each phase needs, and slices of one thread that nest.

    Perfetto's JSON importer drops slices of a thread that overlap without one holding the other,
    and reads times as microseconds.  Sources: "Trace Event Format" (Google, 2016), and
    perfetto.dev/docs/getting-started/other-formats, read in 2026-11.
    """
    whole = json.loads(trace_json([deep("interleaved", 2)]))

    assert whole["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in whole["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            assert event["name"] == "process_name" or isinstance(event["tid"], int)
            continue
        assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for slices in threads.values():
        slices.sort()
        for (start, length), (after, _) in itertools.pairwise(slices):
            assert start + length <= after + 1e-3, "slices of one thread overlap"


@pytest.mark.matrix
def test_of_many_stages_neighbours_share_a_row_that_names_them_all() -> None:
    request = Request(
        resolve_model("gpt2-xl"),
        resolve_cluster("4x8xv100-sxm-32gb"),
        Job(seq_len=1024, global_batch=64),
        pins=Pins(pipeline=32, data=1, schedule="1f1b", recompute="full"),
    )
    found = search(request)

    table = plan_table(found.plan, found.prediction)

    first, layers = (list(column.cells) for column in table.columns[:2])
    assert len(first) < 32
    spans = [tuple(map(int, str(cell).split("-"))) for cell in first]
    assert spans[0][0] == 0 and spans[-1][-1] == 31
    assert all(b[0] == a[-1] + 1 for a, b in itertools.pairwise(spans))
    for span, cell in zip(spans, layers, strict=True):
        stages = found.plan.stages[span[0] : span[-1] + 1]
        names, _, each = str(cell).partition("; ")
        assert names == layers_text([item for stage in stages for item in stage.layers])
        assert not each or {len(stage.layers) for stage in stages} == {int(each.split()[0])}


def test_one_plan_is_one_row_of_alternatives(answer: tuple[Request, Answer]) -> None:
    _, found = answer
    twice = [*found.choices, *(replace(choice, what="again") for choice in found.choices)]
    rows = distinct_choices(twice)

    layouts = [row.prediction.layout for row in rows if row.prediction is not None]
    assert len(layouts) == len(set(layouts))
    assert any(row.what.endswith(", again") for row in rows)
