"""Power limits of devices: the least energy over plans and limits, against every limit by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import meshwright
from meshwright.api import power_limits
from meshwright.api.power_limits import (
    LIMITS,
    limited,
    may_be_limited,
    steps_of_exponents,
    with_limit,
)
from meshwright.api.running_costs import running_rate
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import read_pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.answer import Answer
from meshwright.planner.search.cluster_parts import search_parts

MODEL = "gpt2"
ASKED: dict[str, Any] = {
    "seq_len": 512,
    "global_batch": 16,
    "fix": ["tp=1", "recompute=none", "compile=none", "loss=full"],
}
CLUSTERS = ("2xh100-sxm-80gb", "2xl4", "1xh100-sxm-80gb+1xl4")


def watts(cluster: ClusterSpec) -> float:
    """1.23 times the limit's power of a device, 60 W of network, and 1.3 times that in all."""
    return 1.3 * sum(
        group.devices
        * (1.23 * (group.accelerator.tdp_w or 0.0) * (group.accelerator.power_limit or 1.0) + 60.0)
        for group in cluster.groups
    )


def energy(answer: Answer) -> float:
    return answer.prediction.step_time_s * watts(resolve_cluster(answer.plan.cluster))


@cache
def planned(cluster: str) -> Answer:
    return meshwright.search(MODEL, cluster, prefer="energy", **ASKED)


@pytest.mark.long("2xl4")
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_limit_by_hand_takes_less_energy(cluster: str) -> None:
    """Each limit is named behind the cluster, so that the search has no other."""
    found = planned(cluster)

    every = {
        share: energy(
            planned("+".join(f"{term},power_limit={share:g}" for term in cluster.split("+")))
        )
        for share in LIMITS
    }
    gap = found.certificate.gap
    assert energy(found) * (1 - gap) <= min(every.values()) * (1 + 1e-9)
    assert energy(found) <= every[1.0] * (1 + 1e-9)
    assert energy(found) == pytest.approx(min(every.values()), rel=max(1e-6, gap))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("lower", "higher"), [(0.6, 0.7), (0.6, 1.0), (0.8, 0.9)])
def test_a_plan_takes_no_longer_than_its_products_are_slower(
    cluster: str, lower: float, higher: float
) -> None:
    """The two inequalities by which the proof under one limit bounds the others."""
    plan = planned(cluster).plan
    devices = with_limit(resolve_cluster(plan.cluster), None)
    model = resolve_model(MODEL)

    slow_s, fast_s = (
        predict(plan, model, with_limit(devices, share)).step_time_s for share in (lower, higher)
    )

    assert fast_s <= slow_s <= fast_s * (higher / lower) ** 0.75 * (1 + 1e-9)


def test_products_fall_with_the_limit_and_nothing_else_does() -> None:
    full, half = (
        resolve_cluster(f"8xh100-sxm-80gb{words}").groups[0].accelerator
        for words in ("", ",power_limit=0.7")
    )

    assert half.model_copy(update={"power_limit": None}) == full
    rates = power_limits.limited_rate(0.7)
    assert rates == pytest.approx(0.7**0.75)
    plan = planned("2xh100-sxm-80gb").plan
    model = resolve_model(MODEL)
    same = [
        predict(plan, model, with_limit(resolve_cluster(plan.cluster), share)).stages[0]
        for share in (1.0, 0.6)
    ]
    assert same[0].peak_memory_bytes == same[1].peak_memory_bytes


def test_the_answer_says_the_limit_and_what_the_plan_takes_without_it() -> None:
    found = planned("2xh100-sxm-80gb")

    assert "power_limit=0.6" in found.plan.cluster
    [note] = [note for note in found.prediction.notes if "power limit of 420 of 700 W" in note]
    full = predict(
        found.plan,
        resolve_model(MODEL),
        with_limit(resolve_cluster(found.plan.cluster), None),
    )
    assert full.step_time_s < found.prediction.step_time_s
    assert "quoted: " in note
    assert "0.33 to 1" in note
    statement = found.certificate.statement
    assert "Of power limits 60 % was searched" in statement
    assert "Under 100, 90, 80 and 70 % each plan takes as much energy or more" in statement
    assert found.certificate.power_limits == len(LIMITS)
    # The plan is predicted as the answer says it.
    again = predict(found.plan, resolve_model(MODEL), resolve_cluster(found.plan.cluster))
    assert again.step_time_s == pytest.approx(found.prediction.step_time_s)


def test_full_power_alone_gives_the_answer_of_a_cluster_without_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(power_limits, "LIMITS", (1.0,))
    found = planned.__wrapped__("2xh100-sxm-80gb")
    named = planned("2xh100-sxm-80gb,power_limit=1")

    assert "power_limit" not in found.plan.cluster
    assert found.prediction.step_time_s == named.prediction.step_time_s
    assert found.plan.stages == named.plan.stages
    assert not any("power limit of" in note for note in found.prediction.notes)


def test_where_the_network_takes_most_limits_are_searched_from_both_ends() -> None:
    """An L4 has 72 W beside 60 W of network: a lower limit saves little and takes longer."""
    statement = planned("2xl4").certificate.statement

    assert "100 and 60 % were searched" in statement
    assert "What plans take under 90, 80 and 70 % is bounded by these proofs" in statement


def test_where_no_curve_is_known_limits_are_left_out() -> None:
    h100 = resolve_cluster("2xh100-sxm-80gb")
    asked = Request(resolve_model(MODEL), h100, Job(seq_len=512, global_batch=8))
    group = h100.groups[0]
    tpu = group.accelerator.model_copy(update={"kind": "tpu"})
    tpus = h100.model_copy(update={"groups": (group.model_copy(update={"accelerator": tpu}),)})

    assert may_be_limited(asked) is None
    other = Request(asked.model, tpus, asked.job)
    assert "how the rate of" in str(may_be_limited(other))
    assert may_be_limited(limited(asked, 0.7)) == "the cluster names one"
    assert limited(asked, 1.0) is asked


def test_of_several_answers_the_least_plan_counts_under_another_limit() -> None:
    def searched(micro_batch: int) -> power_limits.Searched:
        request = Request.create(
            resolve_model(MODEL),
            resolve_cluster("2xl4"),
            seq_len=512,
            global_batch=16,
            pins=read_pins([*ASKED["fix"], "dp=2", "zero=0", f"micro_batch={micro_batch}"]),
        )
        return search_parts(request, "fastest"), request

    answers = searched(1), searched(8)

    alone = [power_limits._least_of_plans([one], 0.8, watts) for one in answers]
    assert min(alone) < 0.99 * max(alone)
    for order in (answers, answers[::-1]):
        assert power_limits._least_of_plans(order, 0.8, watts) == min(alone)


def test_the_range_is_that_of_the_exponent() -> None:
    found = planned("2xh100-sxm-80gb")
    asked = Request(
        resolve_model(MODEL),
        resolve_cluster(found.plan.cluster),
        Job(seq_len=512, global_batch=16),
    )

    low, high = steps_of_exponents(asked, found.plan, found.prediction)

    assert low.step_time_s < found.prediction.step_time_s < high.step_time_s
    alone = asked.cluster.groups[0].accelerator
    assert high.step_time_s <= low.step_time_s / (alone.power_limit or 1.0) ** 0.67


@pytest.mark.parametrize("words", ["power_limit=0.5", "power_limit=1.1", "power_limit=70%"])
def test_a_limit_is_a_share_that_is_known(words: str) -> None:
    with pytest.raises(DocumentError, match=r"power_limit is .*; write a share .* 0\.6 to 1"):
        resolve_cluster(f"8xh100-sxm-80gb,{words}")


def test_energy_under_every_limit_counts_its_watts() -> None:
    cluster = resolve_cluster("2x8xh100-sxm-80gb")
    rate = running_rate("energy", cluster)
    assert rate is not None

    for share in LIMITS:
        assert rate(with_limit(cluster, share)) == pytest.approx(watts(with_limit(cluster, share)))
