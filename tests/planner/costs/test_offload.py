"""States on the host and gradients on the wire: each term by hand, then what they add up to."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.catalog import native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.collectives import Level
from meshwright.planner.costs.hardware_rates import HOST_LINK_SHARE, HOST_MEMORY_SHARE, Rates, rates
from meshwright.planner.costs.memory.state_bytes import (
    BUCKET_BYTES,
    StateSharding,
    state_types,
    states,
)
from meshwright.planner.costs.predict import layout_prediction
from meshwright.planner.costs.sharding import Links, traffic
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.documents.prediction import Assumption
from meshwright.planner.operators.layer_operators import matrix_sides
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request

JOB = Job(seq_len=4096, global_batch=16)
N = 1e9
BF16, FP32 = (state_types(native(), precision) for precision in ("bf16", "fp32"))


@pytest.fixture(scope="module")
def llama() -> ModelGraph:
    return resolve_model("llama-3.1-8b")


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return resolve_cluster("8xh100-sxm-80gb")


@pytest.fixture(scope="module")
def h100(node: ClusterSpec) -> Rates:
    return rates(node, JOB, None)


def sharing(**other: object) -> StateSharding:
    usual = {
        "types": BF16,
        "zero": 1,
        "shard": 8,
        "data": 8,
        "pipelined": False,
        "accumulated": True,
    }
    return StateSharding(**(usual | other))


def test_moments_on_the_host_leave_the_device_and_come_through_buckets() -> None:
    here, there = (states(N, sharing(offload=o), largest=2e8) for o in ("none", "optimizer"))

    assert here.optimizer_bytes == there.host_bytes == 8 * N / 8
    assert there.optimizer_bytes == 0
    assert there.bucket_bytes == 8 * 2e8 / 8
    assert there.parameters_bytes == here.parameters_bytes
    assert there.gradients_bytes == here.gradients_bytes
    small = states(1e6, sharing(offload="optimizer"), largest=1e6)
    assert small.bucket_bytes == BUCKET_BYTES


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_on_the_host_come_for_every_pass(zero: int) -> None:
    there = states(N, sharing(zero=zero, offload="parameters"))

    assert there.host_bytes == 16 * N / 8
    assert there.optimizer_bytes == 0
    assert there.parameters_bytes == 0
    # Each micro-batch's gradients go to the host, whatever the ZeRO level.
    assert there.gradients_bytes == 0
    # A shard in fp32 and in bf16 on its way beside three copies of bf16.
    assert there.forward_transient_bytes == 6 * N + 6 * N / 8


def test_replicas_add_up_the_gradients_of_parameters_on_the_host_where_they_are_made() -> None:
    twice = sharing(zero=3, shard=8, data=16, offload="parameters")

    assert states(N, replace(twice, zero=1)).gradients_bytes == 4 * N
    assert states(N, twice).gradients_bytes == 0


def test_one_device_alone_is_wrapped_for_its_parameters_on_the_host() -> None:
    alone = sharing(types=FP32, zero=0, shard=1, data=1, offload="parameters")

    there = states(N, alone, largest=N / 4)

    assert there.host_bytes == 16 * N
    assert there.parameters_bytes == 0
    # A copy, into which one parameter after the other comes.
    assert there.forward_transient_bytes == 4 * N + 4 * N / 4


def links(node: ClusterSpec) -> Links:
    return Links(shard=(Level(node.tiers[0], 8),), replicate=(), neighbours=())


def test_every_gather_fetches_a_shard_and_every_reduction_returns_one(
    node: ClusterSpec, h100: Rates
) -> None:
    link = HOST_LINK_SHARE * node.groups[0].host_link_bytes_per_s

    found = traffic(N, sharing(zero=3, offload="parameters"), links(node), h100)
    plain = traffic(N, sharing(zero=3), links(node), h100)

    assert found.host_gather_s == pytest.approx(4 * N / 8 / link)
    # Several micro-batches are added up by the host, whose memory 8 devices share.
    adding_s = 12 * N / 8 / (HOST_MEMORY_SHARE * 4e11 / 8)
    assert found.host_reduce_s == pytest.approx(4 * N / 8 / link + adding_s)
    assert found.forward_gather_s == plain.forward_gather_s
    assert plain.host_gather_s == plain.host_reduce_s == 0


def test_16_bits_halve_what_a_reduction_sends(node: ClusterSpec, h100: Rates) -> None:
    def reduce_s(wire: str) -> float:
        found = traffic(N, sharing(wire=wire), links(node), h100)
        return found.reduce_per_step_s

    latency_s = traffic(1e-9, sharing(), links(node), h100).reduce_per_step_s
    assert reduce_s("bf16") - latency_s == pytest.approx((reduce_s("full") - latency_s) / 2)
    assert reduce_s("fp16") == reduce_s("bf16")
    narrow, wide = (states(N, sharing(wire=w)) for w in ("bf16", "full"))
    assert wide.after_backward_bytes - narrow.after_backward_bytes == 2 * N
    assert narrow.gradients_bytes == wide.gradients_bytes


def test_low_rank_factors_are_reduced_and_the_rest_is_kept(node: ClusterSpec, h100: Rates) -> None:
    replicas = Links(shard=(), replicate=(Level(node.tiers[0], 8),), neighbours=())
    whole = sharing(zero=0, shard=1)
    low = sharing(zero=0, shard=1, wire="powersgd")
    sides = 2 * 31_623.0

    plain, found = (traffic(N, s, replicas, h100, sides=sides) for s in (whole, low))

    factors_s = h100.link_s("all_reduce", 4 * 4 * sides, replicas.replicate)
    assert found.reduce_per_step_s == pytest.approx(factors_s)
    # 36 bytes for each gradient, and 6 N r FLOPs with r = 4.
    memory = h100.device.curve.memory * h100.device.memory_bytes_per_s
    flops = h100.device.curve.matmul * h100.device.sustained * h100.device.peak_flops
    more_s = found.copies_per_step_s - plain.copies_per_step_s
    assert more_s == pytest.approx(36 * N / memory + 24 * N / flops)
    kept = states(N, low, factors=4 * sides).optimizer_bytes - states(N, whole).optimizer_bytes
    assert kept == pytest.approx(4 * N + 4 * 4 * sides)


def test_the_sides_of_a_llama_block_by_hand(llama: ModelGraph) -> None:
    block = next(layer for layer in llama.layers if layer.kind == "block")

    # q and o 4096 x 4096, k and v 4096 x 1024, gate, up and down 4096 x 14336.
    assert matrix_sides(llama, block) == 2 * 8192 + 2 * 5120 + 3 * 18432
    assert matrix_sides(llama, block, tensor=2) == 7 * 4096 + (2 * 4096 + 2 * 1024 + 3 * 14336) / 2


LAYOUTS = [
    Layout(data_shard=8, zero=3, micro_batches=2),
    Layout(data_shard=8, zero=1, micro_batches=2),
    Layout(data_shard=8, zero=2, micro_batch=2),
    Layout(data_replicate=8, micro_batches=2),
    Layout(tensor=2, pipeline=2, data_shard=2, zero=1, micro_batches=8),
    Layout(pipeline=2, data_shard=4, zero=3, micro_batches=4, schedule="gpipe"),
    Layout(pipeline=2, data_replicate=4, micro_batches=4, virtual_stages=2, schedule="zbv"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.text)
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_what_the_device_loses_the_host_has_and_the_link_takes_time(
    llama: ModelGraph, node: ClusterSpec, layout: Layout, offload: str
) -> None:
    plain = layout_prediction(Request(llama, node, JOB), layout)
    found = layout_prediction(Request(llama, node, JOB), replace(layout, offload=offload))

    assert found.step_parts["offload"] > 0
    assert sum(found.step_parts.values()) == pytest.approx(found.step_time_s)
    assert found.step_time_s > plain.step_time_s
    for before, after in zip(plain.stages, found.stages, strict=True):
        assert sum(after.memory_parts.values()) == pytest.approx(after.peak_memory_bytes)
        assert after.peak_memory_bytes < before.peak_memory_bytes
        assert after.memory_parts["optimizer"] == 0
    # Together: layers may be on other stages than without.
    gone = sum(stage.memory_parts["optimizer"] for stage in plain.stages)
    factor = {"optimizer": 1, "parameters": 2}[offload]
    assert sum(stage.host_bytes for stage in found.stages) == pytest.approx(factor * gone)


def test_streamed_moments_cross_the_link_twice(llama: ModelGraph, node: ClusterSpec) -> None:
    layout = Layout(data_shard=8, zero=1, micro_batches=2, offload="optimizer")

    found = layout_prediction(Request(llama, node, JOB), layout)

    link = HOST_LINK_SHARE * node.groups[0].host_link_bytes_per_s
    assert found.step_parts["offload"] == pytest.approx(2 * 8 * llama.parameters / 8 / link)


def test_an_optimizer_on_the_host_moves_40_bytes_per_parameter_in_its_memory(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    layout = Layout(data_shard=8, zero=3, micro_batches=2, offload="parameters")

    found = layout_prediction(Request(llama, node, JOB), layout)

    on_node = 40 * llama.parameters / (HOST_MEMORY_SHARE * 4e11)
    assert found.step_parts["optimizer"] == pytest.approx(on_node)


def test_the_assumptions_name_what_is_used_of_the_host(
    llama: ModelGraph, node: ClusterSpec
) -> None:
    layout = Layout(data_shard=8, zero=3, micro_batches=2)

    def assumed(pins: Pins, **changes: Any) -> list[Assumption]:
        found = layout_prediction(Request(llama, node, JOB, pins), replace(layout, **changes))
        return [one for one in found.assumptions if one.what.startswith("host ")]

    allowed = Pins(allowed=frozenset({"offload"}))
    assert assumed(allowed) == []
    for found in (
        assumed(Pins(activations="offload")),
        assumed(allowed, offload="optimizer"),
        assumed(allowed, offload="parameters")[:1],
    ):
        (link,) = found
        assert "host link" in link.what
        assert link.provenance == "quoted"
        assert link.source
    assert "an optimizer on the host" in assumed(allowed, offload="parameters")[1].what
