"""Seconds of the host follow the measured speed of a cluster's hosts, and nothing else does."""

from __future__ import annotations

import math

import pytest

from meshwright.planner.catalog import framework, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.costs.slowdown import host_pace, paced_framework
from meshwright.planner.documents.cluster import ClusterSpec, HostSpeed
from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.planner.documents.prediction import Prediction
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

USUAL = native().host
NODE = resolve_cluster("1xh100-sxm-80gb")
GPT2 = resolve_model("gpt2")


def with_host(cluster: ClusterSpec, call: float, launch: float | None = None) -> ClusterSpec:
    """Return a cluster whose hosts take so many times the usual seconds for calls and launches."""
    speed = HostSpeed(
        call_s=call * USUAL.call_s, launch_s=(call if launch is None else launch) * USUAL.launch_s
    )
    groups = tuple(group.model_copy(update={"host_speed": speed}) for group in cluster.groups)
    return cluster.model_copy(update={"groups": groups})


def step(cluster: ClusterSpec, *, seq_len: int = 64, name: str = "native") -> Prediction:
    """Predict a step of gpt2 with two micro-batches; of short samples it waits for its host."""
    plan = Plan(
        model=PlannedModel.of(GPT2),
        cluster="one",
        framework=name,
        seq_len=seq_len,
        global_batch=2,
        precision="bf16",
        mesh=Mesh(),
        zero=0,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=2,
        stages=(Stage(layers=tuple(PlacedLayer(layer=name) for name, _ in GPT2.chain)),),
    )
    return predict(plan, GPT2, cluster)


def test_a_step_that_waits_grows_by_the_hosts_seconds_for_each_time_that_it_is_slower() -> None:
    """12 blocks, 2 micro-batches, 15 to 60 kernels, which take 9 and 12 us each."""
    steps = [step(with_host(NODE, pace)).step_time_s for pace in (8.0, 9.0, 11.0)]

    once_s = steps[1] - steps[0]
    assert steps[2] - steps[1] == pytest.approx(2 * once_s)
    assert 2 * 12 * 15 * 21e-6 < once_s < 2 * 12 * 60 * 21e-6


def test_a_host_as_that_of_the_framework_and_one_that_is_not_known_take_the_same() -> None:
    plain, usual = step(NODE), step(with_host(NODE, 1.0))

    assert usual.step_time_s == pytest.approx(plain.step_time_s)
    assert usual.step_time_high_s == pytest.approx(plain.step_time_high_s)
    assert step(with_host(NODE, 0.5)).step_time_s < plain.step_time_s
    assert [plain.notes, usual.notes] == [(), ()]


def test_a_step_of_large_kernels_does_not_follow_its_host() -> None:
    def seconds(pace: float) -> float:
        return step(with_host(NODE, pace), seq_len=65536).step_time_s

    assert seconds(2.0) == pytest.approx(seconds(1.0), rel=0.02)


def test_both_figures_count_alike_and_the_slowest_group_is_waited_for() -> None:
    assert host_pace(native(), with_host(NODE, 8.0, 2.0)) == pytest.approx(4.0)
    assert host_pace(native(), NODE) is None

    two = resolve_cluster("1xh100-sxm-80gb+1xa100-sxm-80gb")
    first, second = two.groups
    known = with_host(two, 3.0).groups
    assert host_pace(native(), with_host(two, 3.0)) == pytest.approx(3.0)
    mixed = two.model_copy(update={"groups": (known[0], second)})
    assert host_pace(native(), mixed) is None, "one of them is not known"
    faster = with_host(two.model_copy(update={"groups": (first,)}), 0.5).groups[0]
    mixed = two.model_copy(update={"groups": (faster, known[1])})
    assert host_pace(native(), mixed) == pytest.approx(3.0)


def test_the_range_reaches_to_the_same_slowest_host() -> None:
    """Until this one is slower, which was measured; then nothing is added."""
    high_s = [step(with_host(NODE, pace)).step_time_high_s for pace in (1.0, 2.0)]
    slower = [with_host(NODE, pace) for pace in (1.0, 4.0, 5.0)]
    paces = [paced_framework(native(), with_host(NODE, pace)).host.slowest for pace in (2, 4)]

    assert paces == [pytest.approx(USUAL.slowest / 2), 1.0]
    assert high_s[1] >= high_s[0] * 0.99
    width = [p.step_time_high_s / p.step_time_s for p in map(step, slower)]
    assert width[2] == pytest.approx(width[1], rel=0.01), "that of the class alone"
    assert width[1] < 0.5 * width[0]


def test_other_frameworks_whose_host_is_not_known_stay_as_they_are() -> None:
    megatron = framework("megatron")

    assert paced_framework(megatron, with_host(NODE, 3.0)) is megatron
    assert math.isclose(
        step(NODE, name="megatron").step_time_s,
        step(with_host(NODE, 3.0), name="megatron").step_time_s,
    )


def test_an_answer_says_how_fast_the_host_is() -> None:
    slow, usual = step(with_host(NODE, 2.0)), step(with_host(NODE, 1.1))

    assert slow.notes == (
        "Python and launches take 2.0 times as long on this host as on that of the framework's "
        "figures",
    )
    assert usual.notes == ()
    assert any("a call of Python takes 520 ns of the host" in a.what for a in slow.assumptions)


@pytest.mark.parametrize("seconds", [0.0, 1e-12, 1.0, 1e29, math.nan])
def test_seconds_that_no_host_takes_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="call_s"):
        HostSpeed(call_s=seconds, launch_s=1e-7)


def test_no_plan_lies_below_the_bound_on_a_fast_host() -> None:
    cluster = with_host(resolve_cluster("2xh100-sxm-80gb"), 0.25)
    pins = Pins(pipeline=1, tensor=1)
    request = Request.create(GPT2, cluster, seq_len=64, global_batch=2, pins=pins)
    answer = search(request)

    assert answer.certificate.lower_bound_s <= answer.prediction.step_time_s * (1 + 1e-9)
