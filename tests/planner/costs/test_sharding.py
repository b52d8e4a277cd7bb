"""Sharding traffic of a unit against the counts that were measured on FSDP2."""

import pytest

from planner.catalog import native
from planner.costs.collectives import Level
from planner.costs.memory import Sharing, state_types
from planner.costs.rates import Rates, rates
from planner.costs.sharding import Links, Traffic, traffic
from planner.expressions import resolve_cluster
from planner.plan import Job

N = 1e9
BF16, FP32 = (state_types(native(), precision) for precision in ("bf16", "fp32"))
NODE = resolve_cluster("8xh100-sxm-80gb")
EIGHT = (Level(NODE.tiers[0], 8),)
SHARDED = Links(shard=EIGHT, replicate=(), neighbours=())
REPLICATED = Links(shard=(), replicate=EIGHT, neighbours=())


@pytest.fixture(scope="module")
def quoted() -> Rates:
    return rates(NODE, Job(seq_len=1, global_batch=8), None)


def sharing(zero: int, *, pipelined: bool = False, data: int = 8) -> Sharing:
    return Sharing(
        types=BF16,
        zero=zero,
        shard=data if zero else 1,
        data=data,
        pipelined=pipelined,
        accumulated=True,
    )


def of(zero: int, quoted: Rates, *, pipelined: bool = False) -> Traffic:
    links = SHARDED if zero else REPLICATED
    return traffic(N, sharing(zero, pipelined=pipelined), links, quoted)


def step_s(moving: Traffic, micro_batches: int) -> float:
    each = moving.forward_gather_s + moving.backward_s
    return micro_batches * each + moving.gather_per_step_s + moving.reduce_per_step_s


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
    hybrid = Sharing(types=BF16, zero=1, shard=4, data=8, pipelined=False, accumulated=True)

    moving = traffic(N, hybrid, Links(shard=four, replicate=two, neighbours=()), quoted)

    expected = quoted.link_s("reduce_scatter", 4 * N, four)
    expected += quoted.link_s("all_reduce", 4 * N / 4, two)
    assert moving.reduce_per_step_s == pytest.approx(expected)


def test_one_rank_in_fp32_moves_nothing(quoted: Rates) -> None:
    alone = Sharing(types=FP32, zero=0, shard=1, data=1, pipelined=False, accumulated=True)

    assert traffic(N, alone, Links(shard=(), replicate=(), neighbours=()), quoted) == Traffic()


def test_one_rank_in_bf16_copies_parameters_and_gradients_once(quoted: Rates) -> None:
    links = Links(shard=(), replicate=(), neighbours=())

    moving = traffic(N, sharing(0, data=1), links, quoted)

    assert step_s(moving, 4) == 0
    assert moving.copies_per_step_s == pytest.approx(quoted.memory_s((4 + 6) * N))
