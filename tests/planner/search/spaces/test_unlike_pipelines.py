"""Pipelines that differ from one group of devices to another: searched, bounded and predicted."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.group_costs import GroupCosts
from meshwright.planner.costs.predict import plan_timelines, predict, unlike_prediction
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import (
    Job,
    Mesh,
    OtherPipelines,
    PlacedLayer,
    Plan,
    PlannedGroup,
    PlannedModel,
    Stage,
)
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.errors import DocumentError
from meshwright.planner.report.html import page
from meshwright.planner.report.text import pipelines_text, plan_table
from meshwright.planner.report.timeline_picture import trace_json
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.goals import SimulatedStepGoal
from meshwright.planner.search.proof_budget import USUAL
from meshwright.planner.search.queue import QueueEntry
from meshwright.planner.search.search import search, spaces_of
from meshwright.planner.search.spaces.simulated import Tried
from meshwright.planner.search.spaces.simulated_unlike import SimulatedUnlike
from meshwright.planner.search.spaces.unlike_pipelines import UnlikeSpace
from tests.planner.search.spaces.test_graph import layer

ALIKE = Pins(pipelines="alike")
CLUSTERS = (
    "2xh100-sxm-80gb+2xa100-sxm-80gb",
    "3xh100-sxm-80gb+2xl40s",
    "2xa100-sxm-80gb+1xh100-sxm-80gb",
)
LARGE = [pytest.param(cluster, marks=pytest.mark.matrix) for cluster in CLUSTERS[:2]]
"""Clusters of four and five devices, which have ten times as many plans as three devices."""


def small_model(seed: int) -> ModelGraph:
    """A chain of four layers of different seconds."""
    rng = random.Random(seed)
    layers = [
        layer(f"l{at}", kind=f"k{at}", scale=rng.uniform(10.0, 30.0), output=20) for at in range(4)
    ]
    return ModelGraph(name="small", layers=tuple(layers))


def small_request(seed: int, cluster: str, pins: Pins = Pins()) -> Request:  # noqa: B008 - frozen
    """A request whose layers recompute nothing."""
    job = Job(seq_len=64, global_batch=6, precision="fp32")
    fixed = replace(pins, recompute="none", compile="none", loss="full")
    return Request(small_model(seed), resolve_cluster(cluster), job, fixed)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def all_stages(request: Request, depth: int, group: str) -> Iterator[tuple[Stage, ...]]:
    names = [name for name, _ in request.model.chain]
    for inner in itertools.combinations(range(1, len(names)), depth - 1):
        cuts = (0, *inner, len(names))
        yield tuple(
            Stage(layers=tuple(PlacedLayer(layer=name) for name in names[a:b]), group=group)
            for a, b in itertools.pairwise(cuts)
        )


def all_kinds(
    request: Request, group: str, devices: int, most: int
) -> Iterator[tuple[OtherPipelines, ...]]:
    """Yield pipelines of one depth and split on all devices of a group, and their micro-batches."""
    for depth in divisors(devices):
        if depth > len(request.model.chain):
            continue
        number = devices // depth
        for stages in all_stages(request, depth, group):
            for count in range(1, most + 1):
                yield (OtherPipelines(data=number, micro_batches=count, stages=stages),)
                for more in range(1, number):
                    yield (
                        OtherPipelines(data=more, micro_batches=count + 1, stages=stages),
                        OtherPipelines(data=number - more, micro_batches=count, stages=stages),
                    )


def every_plan(request: Request) -> Iterator[Plan]:
    """Yield every plan of unlike pipelines, by nothing of the search."""
    first, second = request.cluster.groups
    groups = tuple(
        PlannedGroup(name=group.name, devices=group.devices) for group in (first, second)
    )
    for size in divisors(request.job.global_batch):
        count = request.job.global_batch // size
        for kinds, others in itertools.product(
            all_kinds(request, first.name, first.devices, count),
            all_kinds(request, second.name, second.devices, count),
        ):
            every = (*kinds, *others)
            if sum(kind.data * kind.micro_batches for kind in every) != count:
                continue
            deepest = max(len(kind.stages) for kind in every)
            for schedule in ("1f1b", "gpipe", "zb-h1") if deepest > 1 else ("1f1b",):
                yield Plan(
                    model=PlannedModel.of(request.model),
                    cluster=request.cluster_name,
                    seq_len=request.job.seq_len,
                    global_batch=request.job.global_batch,
                    precision=request.job.precision,
                    mesh=Mesh(data_replicate=every[0].data, pipeline=len(every[0].stages)),
                    zero=0,
                    schedule=schedule,
                    micro_batch=size,
                    micro_batches=every[0].micro_batches,
                    groups=groups,
                    stages=every[0].stages,
                    other_pipelines=every[1:],
                )


@pytest.mark.parametrize("cluster", (CLUSTERS[2], *LARGE))
@pytest.mark.parametrize("seed", range(2))
def test_no_unlike_pipelines_are_faster_than_those_of_the_answer(cluster: str, seed: int) -> None:
    request = small_request(seed, cluster, Pins(pipelines="unlike"))

    answer = search(request)

    costs = GroupCosts(request)
    every = [unlike_prediction(plan, request, costs) for plan in every_plan(request)]
    least_s = min(prediction.step_time_s for prediction in every if prediction.fits)
    assert answer.plan.other_pipelines is not None
    assert answer.certificate.lower_bound_s <= least_s * (1 + 1e-9)
    assert answer.prediction.step_time_s == pytest.approx(least_s, rel=1e-6)


@pytest.mark.spread(1)
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_no_slower_than_that_of_pipelines_that_are_alike(seed: int) -> None:
    cluster = CLUSTERS[seed % len(CLUSTERS)]

    answer, alike = (
        search(small_request(seed, cluster)),
        search(small_request(seed, cluster, ALIKE)),
    )

    assert answer.prediction.step_time_s <= alike.prediction.step_time_s * (1 + 1e-9)
    assert alike.plan.other_pipelines is None


def test_a_plan_is_predicted_as_its_answer_says_and_read_back() -> None:
    request = small_request(0, CLUSTERS[0], Pins(pipelines="unlike"))

    answer = search(request)

    assert predict(answer.plan, request.model, request.cluster) == answer.prediction
    assert Plan.model_validate_json(answer.plan.model_dump_json()) == answer.plan
    assert len(answer.prediction.stages) == sum(len(kind.stages) for kind in answer.plan.kinds)
    assert "other_pipelines" in answer.plan.model_dump()


def test_kinds_that_are_alike_take_what_pipelines_that_are_alike_take() -> None:
    model, cluster = small_model(0), resolve_cluster("4xh100-sxm-80gb")
    pins = Pins(pipeline=2, zero=0, schedule="1f1b", micro_batch=1)
    request = Request(model, cluster, Job(seq_len=64, global_batch=16, precision="fp32"), pins)
    whole = search(request).plan

    parts = whole.model_copy(
        update={
            "mesh": whole.mesh.model_copy(update={"data_replicate": 1}),
            "other_pipelines": (
                OtherPipelines(data=1, micro_batches=whole.micro_batches, stages=whole.stages),
            ),
        }
    )

    alike, unlike = (predict(plan, model, cluster) for plan in (whole, parts))
    assert unlike.step_time_s == pytest.approx(alike.step_time_s, rel=1e-12)
    assert unlike.mfu == pytest.approx(alike.mfu, rel=1e-12)
    assert [stage.memory_parts for stage in unlike.stages] == 2 * [
        stage.memory_parts for stage in alike.stages
    ]


def test_another_micro_batch_of_the_slowest_kind_adds_its_passes_and_of_others_nothing() -> None:
    request = small_request(1, CLUSTERS[0])
    costs = GroupCosts(request)
    plan = next(
        plan
        for plan in every_plan(request)
        if plan.micro_batch == 1 and all(len(kind.stages) == 1 for kind in plan.kinds)
    )

    def prediction_of(first: int, second: int) -> Prediction:
        others = tuple(
            kind.model_copy(update={"micro_batches": second}) for kind in plan.other_pipelines or ()
        )
        update = {"micro_batches": first, "other_pipelines": others}
        return unlike_prediction(plan.model_copy(update=update), request, costs)

    slow, slower, waiting = prediction_of(2, 9), prediction_of(2, 10), prediction_of(3, 10)

    stage = slow.stages[1]
    added_s = slower.step_time_s - slow.step_time_s
    assert added_s == pytest.approx(stage.forward_s + stage.backward_s, rel=1e-9)
    assert slow.step_time_s > 9 * (stage.forward_s + stage.backward_s)
    assert waiting.step_time_s == pytest.approx(slower.step_time_s, rel=1e-12)


@pytest.mark.parametrize("cluster", (CLUSTERS[2], *LARGE))
def test_no_bound_is_above_any_plan_of_its_layout(cluster: str) -> None:
    request = small_request(2, cluster, Pins(pipelines="unlike"))
    costs, least_s = GroupCosts(request), dict[tuple[object, ...], float]()
    for plan in every_plan(request):
        prediction = unlike_prediction(plan, request, costs)
        if prediction.fits:
            depths = {kind.stages[0].group: len(kind.stages) for kind in plan.kinds}
            key = plan.micro_batch, plan.schedule, tuple(depths.values())
            least_s[key] = min(prediction.step_time_s, least_s.get(key, math.inf))
    [closed_form] = spaces_of(request, unlike=True)
    goal = SimulatedStepGoal(search(request).top[0], USUAL)
    assert isinstance(closed_form, UnlikeSpace)
    space = SimulatedUnlike(closed_form, Tried(goal))

    seen = 0
    for bound_s, batch in space.bundles(Counter()):
        entry = QueueEntry(bound_s, (), 0, 0, batch, space)
        [(within_s, level, _)] = space.expand(0, [entry])
        opened = space.expand(level, [entry._replace(bound_s=within_s)])
        for layout_s, _, layout in opened:
            key = layout.micro_batch, layout.schedule, layout.depths
            sent_s = space.least_s(layout)
            if isinstance(sent_s, float) and key in least_s:
                seen += 1
                bounds_s = bound_s, within_s, layout_s, sent_s, space.solved_s(layout)
                assert max(bounds_s) <= least_s[key] * (1 + 1e-9)
            else:
                assert least_s.get(key, math.inf) >= goal.limit_s
    assert seen == len(least_s)


def test_a_table_has_the_stages_of_all_kinds() -> None:
    request = small_request(0, CLUSTERS[0])
    plan = next(plan for plan in every_plan(request) if plan.mesh.pipeline == 2)

    table = plan_table(plan, unlike_prediction(plan, request))

    assert table.row_count == sum(len(kind.stages) for kind in plan.kinds)
    assert pipelines_text(plan).startswith(f"1 of 2 stages on {plan.stages[0].group}")


def test_pins_of_unlike_pipelines_are_refused_where_devices_are_alike() -> None:
    job = Job(seq_len=64, global_batch=8, precision="fp32")
    pins = Pins(pipelines="unlike")

    with pytest.raises(DocumentError, match=r"pipelines=unlike: .* are all alike; leave it out"):
        search(Request(small_model(0), resolve_cluster("4xh100-sxm-80gb"), job, pins))


def test_every_kind_has_its_timeline_on_the_page_and_in_the_trace() -> None:
    request = small_request(0, CLUSTERS[0])
    plan = next(
        plan
        for plan in every_plan(request)
        if [kind.mesh.pipeline for kind in plan.kinds] == [2, 2]
    )
    each = plan_timelines(plan, request.model, request.cluster)

    events = json.loads(trace_json(each))["traceEvents"]
    text = page(plan, unlike_prediction(plan, request), timelines=each)

    ranks = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(ranks) == [0, 1, 2, 3]
    for kind, pids in zip(plan.kinds, ((0, 1), (2, 3)), strict=True):
        drawn = [event for event in events if event["ph"] == "X" and event["pid"] in pids]
        assert len(drawn) == 2 * 2 * kind.micro_batches  # both passes on both ranks
    heads = [f"<h2>Pipeline timeline, pipelines {number}</h2>" for number in range(2)]
    assert all(text.count(head) == 1 for head in heads)
    # What a rank holds is that of its own kind: each name is in its own picture.
    for number in range(2):
        picture = text.split(f"<h2>Memory over a step, pipelines {number}</h2>")[1]
        picture = picture.split("</figure>")[0]
        named = [f"pipelines {kind}, rank 1" in picture for kind in range(2)]
        assert named == [number == kind for kind in range(2)]
