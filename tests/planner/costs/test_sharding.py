"""Sharding traffic of a unit against the counts that were measured on FSDP2."""

from dataclasses import replace

import pytest

from meshwright.planner.catalog import frameworks, native
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.collectives import Level
from meshwright.planner.costs.hardware_rates import Rates, rates
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.costs.memory.state_bytes import StateSharding, state_types
from meshwright.planner.costs.sharding import (
    Links,
    ShardingTraffic,
    accumulated_bytes,
    seen_in_passes,
    traffic,
)
from meshwright.planner.documents.framework import with_figures
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.request import Request

N = 1e9
JOB = Job(seq_len=2048, global_batch=16)
BF16, FP32 = (state_types(native(), precision) for precision in ("bf16", "fp32"))
NODE = resolve_cluster("8xh100-sxm-80gb")
EIGHT = (Level(NODE.tiers[0], 8),)
SHARDED = Links(shard=EIGHT, replicate=(), neighbours=())
REPLICATED = Links(shard=(), replicate=EIGHT, neighbours=())


@pytest.fixture(scope="module")
def quoted() -> Rates:
    return rates(NODE, Job(seq_len=1, global_batch=8), None)


def sharing(zero: int, *, pipelined: bool = False, data: int = 8) -> StateSharding:
    return StateSharding(
        types=BF16,
        zero=zero,
        shard=data if zero else 1,
        data=data,
        pipelined=pipelined,
        accumulated=True,
    )


def of(zero: int, quoted: Rates, *, pipelined: bool = False) -> ShardingTraffic:
    links = SHARDED if zero else REPLICATED
    return traffic(N, sharing(zero, pipelined=pipelined), links, quoted)


def step_s(moving: ShardingTraffic, micro_batches: int) -> float:
    each = moving.forward_gather_s + moving.backward_s
    return micro_batches * each + moving.gather_per_step_s + moving.reduce_per_step_s


def test_parameters_that_are_gathered_in_eight_bits_are_half_as_large(quoted: Rates) -> None:
    narrow = traffic(N, sharing(3), SHARDED, quoted, narrow=True)

    assert narrow.forward_gather_s == pytest.approx(quoted.link_s("all_gather", N, EIGHT))
    assert of(3, quoted).backward_s - narrow.backward_s == pytest.approx(
        of(3, quoted).forward_gather_s - narrow.forward_gather_s
    )
    # What is gathered once a step are the parameters that it trains.
    assert traffic(N, sharing(1), SHARDED, quoted, narrow=True) == of(1, quoted)


@pytest.mark.parametrize(
    ("zero", "pipelined", "gathers", "reductions"),
    [
        (1, False, 1, 1),
        (2, False, 1, 4),
        (3, False, 8, 4),
        (1, True, 1, 1),
        (2, True, 1, 1),
        (3, True, 5, 1),
    ],
)
def test_a_step_of_four_micro_batches_gathers_and_reduces_as_often_as_fsdp2(
    quoted: Rates, zero: int, pipelined: bool, gathers: int, reductions: int
) -> None:
    gather_s = quoted.link_s("all_gather", 2 * N, EIGHT)
    reduce_s = quoted.link_s("reduce_scatter", 4 * N, EIGHT)

    found = step_s(of(zero, quoted, pipelined=pipelined), 4)

    assert found == pytest.approx(gathers * gather_s + reductions * reduce_s)


def test_replication_reduces_once(quoted: Rates) -> None:
    moving = of(0, quoted)

    assert step_s(moving, 4) == pytest.approx(quoted.link_s("all_reduce", 4 * N, EIGHT))


def test_hybrid_sharding_reduces_the_shards_over_the_replicas(quoted: Rates) -> None:
    four, two = (Level(NODE.tiers[0], 4),), (Level(NODE.tiers[0], 2),)
    hybrid = StateSharding(types=BF16, zero=1, shard=4, data=8, pipelined=False, accumulated=True)

    moving = traffic(N, hybrid, Links(shard=four, replicate=two, neighbours=()), quoted)

    expected = quoted.link_s("reduce_scatter", 4 * N, four)
    expected += quoted.link_s("all_reduce", 4 * N / 4, two)
    assert moving.reduce_per_step_s == pytest.approx(expected)


def test_one_rank_in_bf16_copies_parameters_and_gradients_once(quoted: Rates) -> None:
    links = Links(shard=(), replicate=(), neighbours=())

    moving = traffic(N, sharing(0, data=1), links, quoted)

    assert step_s(moving, 4) == 0
    assert moving.copies_per_step_s == pytest.approx(quoted.memory_s((4 + 6) * N))


def of_framework(name: str, zero: int) -> tuple[StateSharding, Rates]:
    framework = frameworks()[name]
    used = rates(NODE, Job(seq_len=1, global_batch=8), None, framework)
    types = state_types(framework, "bf16", zero=zero)
    return replace(sharing(zero), types=types), used


def test_buffers_are_gathered_and_reduced_in_a_pipeline_as_without_one() -> None:
    for zero in range(4):
        alone, used = of_framework("megatron", zero)
        links = SHARDED if zero else REPLICATED

        moving = traffic(N, alone, links, used)

        assert traffic(N, replace(alone, pipelined=True), links, used) == moving
        assert moving.copies_per_step_s == 0
        # Nothing but gradients added to their sums.
        assert moving.backward_copies_s == used.memory_s(4 * N)


def test_one_that_reduces_whole_gradients_sends_them_twice() -> None:
    once, used = of_framework("megatron", 1)
    twice, slower = of_framework("megatron-deepspeed", 1)

    scattered = traffic(N, once, SHARDED, used).reduce_per_step_s
    summed = traffic(N, twice, SHARDED, slower).reduce_per_step_s

    assert scattered == pytest.approx(used.link_s("reduce_scatter", 4 * N, EIGHT))
    assert summed == pytest.approx(used.link_s("all_reduce", 4 * N, EIGHT))


def test_each_tensor_of_its_own_costs_one_more_latency() -> None:
    alone, used = of_framework("nanotron", 1)

    found = traffic(N, alone, SHARDED, used)

    latency_s = used.link_s("all_gather", 1e-9, EIGHT)
    whole_s = used.link_s("all_gather", 2 * N, EIGHT)
    assert found.gather_per_step_s == pytest.approx(whole_s + 5 * latency_s)


def test_lists_of_tensors_cost_the_host_something_for_each_rank_and_hide_behind_nothing() -> None:
    shared, used = of_framework("deepspeed@0.3", 3)
    lists = with_figures(used.framework, {"sharding.listed_s": 0.0})
    without = traffic(N, shared, SHARDED, replace(used, framework=lists))

    found = traffic(N, shared, SHARDED, used)

    # Four matrices, a view and a copy of 8 microseconds for each of eight ranks.
    assert found.forward_gather_s - without.forward_gather_s == pytest.approx(4 * 8 * 8e-6)
    assert found.backward_s - without.backward_s == pytest.approx(2 * 4 * 8 * 8e-6)
    forward, backward = seen_in_passes(found, shared, used, forward_s=9.0, backward_s=9.0)
    assert forward.shard_s == pytest.approx(found.forward_gather_s)
    assert backward.shard_s == pytest.approx(found.backward_s + found.backward_copies_s)


def test_modules_that_let_go_of_weights_gather_them_again_for_what_is_recomputed() -> None:
    model, cluster = resolve_model("llama-3.1-8b"), resolve_cluster("2x8xa100-sxm-80gb")
    costs = CostTables(Request(model, cluster, JOB, framework=frameworks()["deepspeed@0.3"]))

    none, _, full = costs.costs_of(Layout(data_shard=16, zero=3)).parts["block"]

    assert full.gather_s == pytest.approx(none.gather_s)
    assert full.backward_shard_s == pytest.approx(none.backward_shard_s + none.gather_s)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    sharded, used = of_framework("fsdp", 3)
    whole, others = of_framework("megatron", 1)

    all_frozen = traffic(N, sharded, SHARDED, used, frozen=N)
    copies = traffic(N, whole, SHARDED, others, frozen=N)

    gather_s = used.link_s("all_gather", 2 * N, EIGHT)
    assert all_frozen.forward_gather_s == all_frozen.backward_s == pytest.approx(gather_s)
    assert step_s(copies, 4) == 0


@pytest.mark.parametrize(
    ("framework", "precision", "bytes_moved"),
    [
        ("native", "bf16", 2 + 4 + 4),
        ("megatron", "bf16", 4),  # 8 in the weight-gradient product, half hidden
        ("megatron-deepspeed", "bf16", 2 + 4 + 4 + 4 + 4),
        ("megatron-deepspeed", "fp16", 2 + 2 + 2),
        ("nanotron", "bf16", 2 + 4 + 4),
        ("internevo", "bf16", 2 + 2 + 2),
        ("aleph-alpha-scaling", "bf16", 2 + 2 + 2),
    ],
)
def test_adding_gradients_up_reads_and_writes_what_the_kind_says(
    framework: str, precision: str, bytes_moved: float
) -> None:
    types = state_types(frameworks()[framework], precision)

    assert accumulated_bytes(types, frameworks()[framework].sharding.accumulation) == bytes_moved


def test_gradients_are_added_up_on_one_rank_too() -> None:
    alone, used = of_framework("megatron", 0)
    alone = replace(alone, shard=1, data=1)
    nothing = Links(shard=(), replicate=(), neighbours=())

    moving = traffic(N, alone, nothing, used, frozen=N / 4)

    assert moving == ShardingTraffic(backward_copies_s=used.memory_s(4 * 3 / 4 * N))


@pytest.mark.parametrize(
    ("zero", "pipelined", "accumulated", "adds"),
    [
        (0, False, True, True),
        (1, False, True, True),
        (1, False, False, False),
        (3, False, True, False),
        (3, True, True, True),
    ],
)
def test_units_add_up_only_what_waits_for_the_last_micro_batch(
    zero: int, pipelined: bool, accumulated: bool, adds: bool
) -> None:
    """FSDP2 reduces a micro-batch's gradients at once where they need not wait."""
    used = rates(NODE, Job(seq_len=1, global_batch=8), None)
    none = with_figures(native(), {"sharding.accumulation": "none"})
    one = replace(sharing(zero, pipelined=pipelined), accumulated=accumulated)
    links = SHARDED if zero else REPLICATED

    more_s = traffic(N, one, links, used).backward_copies_s
    more_s -= traffic(N, one, links, replace(used, framework=none)).backward_copies_s

    assert more_s == pytest.approx(used.memory_s(10 * N) if adds else 0.0)
