"""Forwards ahead of slow links in a search: where they are looked at, and what they bring."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest

from meshwright.planner.catalog import framework
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.plan import Job, Layout, PlacedLayer, Plan, Stage
from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.configuration import configuration
from meshwright.planner.requests.pins import Pins, read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import family_of, name_with_ahead, schedule_of
from meshwright.planner.search.search import search
from meshwright.planner.search.space import every_degrees, families, timetables
from meshwright.planner.search.spaces.forwards_ahead import (
    MOST_FORWARDS,
    ahead_choices,
    may_run_ahead,
)

JOB = Job(seq_len=1024, global_batch=24)
SLOW = "3x1xrtx-4090,network=0.2GB/s"
PIPED = Pins(
    tensor=1, context=1, pipeline=3, zero=0, micro_batch=1, schedule="1f1b", recompute="none"
)


def request(cluster: str, *, model: str = "gpt2", pins: Pins | None = None) -> Request:
    return Request(resolve_model(model), resolve_cluster(cluster), JOB, pins=pins or Pins())


@functools.cache
def plain_plan() -> Plan:
    """Return the plan of a pipeline over slow links without forwards ahead."""
    return search(request(SLOW, pins=replace(PIPED, ahead=()))).plan


def piped(**degrees: int) -> Layout:
    return Layout(schedule="1f1b", **{"pipeline": 2, **degrees})


@pytest.mark.parametrize(
    ("cluster", "layout", "slow"),
    [
        ("8xh100-sxm-80gb", piped(tensor=4), []),
        ("2x8xh100-sxm-80gb,network=1GB/s", piped(tensor=8), [(1,)]),
        ("8x1xrtx-4090,network=1GB/s", piped(pipeline=4, data_replicate=2), [(1, 1, 1)]),
        # Stages on the H100 first, or on the A100, of which there are fewer.
        (
            "8xh100-sxm-80gb+4xa100-sxm-80gb",
            piped(pipeline=3, tensor=4),
            [(0, 1), (1, 0)],
        ),
        ("8xh100-sxm-80gb+8xa100-sxm-80gb", piped(pipeline=4, tensor=4), [(0, 1, 0)]),
    ],
)
def test_only_slow_links_have_forwards_ahead(
    cluster: str, layout: Layout, slow: list[tuple[int, ...]]
) -> None:
    of_cluster = replace(request(cluster), job=replace(JOB, seq_len=1024, global_batch=4096))

    found = ahead_choices(of_cluster, layout)

    assert found[0] == ()
    assert {tuple(map(bool, links)) for links in found[1:]} == {tuple(map(bool, s)) for s in slow}
    assert all(number <= MOST_FORWARDS for links in found for number in links)


def test_a_pipeline_within_nodes_runs_nothing_ahead() -> None:
    of_cluster = request("2x8xh100-sxm-80gb,network=1GB/s")
    across = Layout(pipeline=2, data_replicate=8)
    inside = ("pipeline", "tensor", "context", "data_shard", "data_replicate")

    assert may_run_ahead(of_cluster, across)
    assert not may_run_ahead(of_cluster, replace(across, order=inside))


def test_every_layout_is_in_one_family_and_runs_ahead_of_slow_links_alone() -> None:
    job = replace(JOB, global_batch=32)
    asked = replace(request("2x4xh100-sxm-80gb,network=1GB/s"), job=job)

    every = [family for degrees in every_degrees(asked) for family in families(asked, degrees)]
    listed = Counter(layout for family in every for layout in family.layouts())

    assert set(listed.values()) == {1}
    assert sum(family.size for family in every) == len(listed)
    may = {True: 0, False: 0}
    for layout in listed:
        if not layout.executed_schedule.ahead and layout.schedule == "1f1b":
            has_room = layout.micro_batches > layout.pipeline
            for links in ahead_choices(asked, layout)[1:]:
                ahead = replace(layout, schedule=name_with_ahead("1f1b", links))
                able = has_room and may_run_ahead(asked, layout)
                assert (ahead in listed) == able
                may[able] += 1
    assert all(may.values())
    # Parts by level and timetable have the same layouts again.
    parted = Counter(
        layout
        for family in every
        for timetable in family.timetables
        for layout in family.part(
            sharings=family.sharings_of(timetable), timetables=(timetable,)
        ).layouts()
    )
    assert parted == listed


def test_a_fast_network_gains_too_little_to_be_looked_at() -> None:
    layout = piped(tensor=8)
    fast = request("2x8xh100-sxm-80gb", model="llama-3.1-70b")

    assert ahead_choices(fast, layout) == ((),)
    slow = request("2x8xh100-sxm-80gb,network=1GB/s", model="llama-3.1-70b")
    assert len(ahead_choices(slow, layout)) > 1
    for count, runs_ahead in ((2, False), (3, True)):
        names = {name for name, _ in timetables(slow, layout, count)}
        assert any(schedule_of(name).ahead for name in names) == runs_ahead
    assert ahead_choices(replace(fast, pins=Pins(ahead=(2,))), layout) == ((2,),)
    assert ahead_choices(replace(fast, pins=Pins(ahead=(2, 2))), layout) == ()
    assert ahead_choices(replace(fast, pins=Pins(ahead=())), layout) == ((),)


def test_the_answer_is_the_fastest_of_all_cuts_and_forwards_ahead() -> None:
    """Every cut, with each number of forwards ahead that the space has, is predicted here."""
    asked = request(SLOW, pins=replace(PIPED, compile="none", loss="full"))

    found = search(asked)

    names = [name for name, _ in asked.model.chain]
    choices = ahead_choices(asked, found.plan.layout)
    assert len(choices) == 4
    every = {}
    for ahead, cuts in itertools.product(choices, itertools.combinations(range(1, len(names)), 2)):
        ends = (0, *cuts, len(names))
        stages = tuple(
            Stage(layers=tuple(PlacedLayer(layer=name) for name in names[first:last]))
            for first, last in itertools.pairwise(ends)
        )
        schedule = f"1f1b ahead={'-'.join(map(str, ahead))}" if ahead else "1f1b"
        plan = Plan.model_validate({**dict(found.plan), "schedule": schedule, "stages": stages})
        predicted = predict(plan, asked.model, asked.cluster)
        if predicted.fits:
            every[ahead, cuts] = predicted.step_time_s
    (ahead, _), least_s = min(every.items(), key=lambda entry: entry[1])
    assert found.prediction.step_time_s == pytest.approx(least_s, rel=1e-6)
    assert schedule_of(found.plan.schedule).ahead == ahead != ()
    # Without them each cut is slower.
    plain_s = min(step_s for (numbers, _), step_s in every.items() if not numbers)
    assert least_s < 0.97 * plain_s
    assert found.certificate.lower_bound_s <= least_s * (1 + 1e-9)


def test_no_equal_numbers_of_forwards_ahead_are_faster_than_the_answer() -> None:
    """A deep pipeline fills its first ranks' wait with more forwards than hide a transfer.

    Four to six of them were faster by 1.2 to 1.3 % than the answer, whose space had one and three.
    """
    pins = Pins(
        tensor=1, context=1, pipeline=8, zero=0, micro_batch=1, schedule="1f1b", compile="block"
    )
    asked = Request(
        resolve_model("llama-3.2-3b"),
        resolve_cluster("8x1xrtx-4090,network=1.25GB/s"),
        Job(seq_len=4096, global_batch=96),
        pins,
    )

    step_s = search(asked).prediction.step_time_s

    for number in (2, 4, 5, 6, 7, 8):
        pinned = search(replace(asked, pins=replace(pins, ahead=(number,) * 7)))
        assert step_s <= pinned.prediction.step_time_s * 1.002, number


@pytest.mark.parametrize(
    ("cluster", "pins"),
    [
        (SLOW, Pins(tensor=1, context=1, recompute="none", compile="none", loss="full")),
        ("2x2xh100-sxm-80gb", Pins()),
        pytest.param(SLOW, Pins(), marks=pytest.mark.matrix),
        pytest.param("2x2xa10g,network=0.2GB/s", Pins(), marks=pytest.mark.matrix),
    ],
)
def test_no_answer_is_slower_than_without_them(cluster: str, pins: Pins) -> None:
    free, without = (
        search(request(cluster, pins=asked)) for asked in (pins, replace(pins, ahead=()))
    )

    assert free.prediction.step_time_s <= without.prediction.step_time_s * (1 + 1e-9)
    assert not schedule_of(without.plan.schedule).ahead
    assert free.certificate.configurations >= without.certificate.configurations


def test_the_same_stages_hold_a_micro_batch_more_for_each_forward_ahead() -> None:
    asked, plain = request(SLOW), plain_plan()

    peaks = [
        [
            stage.memory_parts["activations"]
            for stage in predict(
                Plan.model_validate({**dict(plain), "schedule": name}), asked.model, asked.cluster
            ).stages
        ]
        for name in ("1f1b", "1f1b ahead=0-1", "1f1b ahead=0-2", "1f1b ahead=1-0")
    ]

    none, one, two, first = peaks
    for rank in (0, 1):
        assert one[rank] - none[rank] == pytest.approx(two[rank] - one[rank])
        assert one[rank] > none[rank]
    assert none[2] == one[2] == two[2]
    assert (first[0], first[1]) == (one[0], none[1])


def test_a_plan_with_forwards_ahead_is_read_back_and_exported_to_nobody() -> None:
    asked = request(SLOW, pins=replace(PIPED, ahead=(1, 0)))

    plan = search(asked).plan

    assert plan.schedule == "1f1b ahead=1-0"
    assert Plan.parse(plan.dump()) == plan
    assert family_of(plan.layout.schedule) == "1f1b"
    for to in ("torchtitan", "megatron", "nanotron"):
        with pytest.raises(DocumentError, match="schedule 1f1b ahead=1-0"):
            configuration(plan, asked.model, to=to)


def test_other_frameworks_refuse_them_by_name() -> None:
    torchtitan = Request(
        resolve_model("llama-3.1-8b"),
        resolve_cluster("2x8xh100-sxm-80gb,network=1GB/s"),
        replace(JOB, global_batch=64),
        pins=read_pins(["ahead=1,pp=2"]),
        framework=framework("torchtitan"),
    )

    with pytest.raises(DocumentError, match="ahead=1: torchtitan has no forwards ahead"):
        search(torchtitan)


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ("1f1b ahead=1", "has 2 links, and 1 have a number"),
        ("1f1b ahead=0-0", "which is 1f1b"),
        ("gpipe ahead=1-0", "gpipe has no forwards ahead"),
        ("1f2b", "did you mean '1f1b'"),
    ],
)
def test_a_document_names_links_that_there_are(schedule: str, why: str) -> None:
    plan = plain_plan()

    text = plan.dump().replace("schedule: 1f1b\n", f"schedule: {schedule}\n")

    with pytest.raises(DocumentError, match=why):
        Plan.parse(text)
