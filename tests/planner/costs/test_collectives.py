"""Collective seconds against hand calculations, and groups against the tiers that they span."""

import math
import random

import numpy as np
import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.collectives import (
    Level,
    collective_s,
    curves_by_name,
    dispatch_s,
    group_levels,
    interpolated_s,
    levels,
    nearest_ranks,
    reached_fraction,
)
from meshwright.planner.documents.cluster import LinkTier, NarrowGroup
from meshwright.planner.documents.plan import Layout
from meshwright.planner.documents.profile import CollectiveCurve, LinkPoint
from meshwright.planner.operators.expert_routing import Routing

NVLINK = LinkTier(
    name="nvlink",
    devices=8,
    latency_s=2e-6,
    bytes_per_s=400e9,
    fractions={"all_reduce": 1.0, "all_gather": 0.5, "all_to_all": 0.5, "send_recv": 1.0},
)
FABRIC = LinkTier(
    name="fabric",
    devices=64,
    latency_s=10e-6,
    bytes_per_s=50e9,
    fractions={"all_reduce": 0.8, "all_gather": 0.8, "all_to_all": 0.8, "send_recv": 0.8},
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")


def members(found: tuple[Level, ...]) -> list[tuple[str, int]]:
    return [(level.tier.name, level.members) for level in found]


def test_a_ring_gather_in_a_node_is_latency_plus_bytes() -> None:
    seconds = collective_s("all_gather", 8e9, (Level(NVLINK, 8),))

    assert seconds == pytest.approx(7 * 2e-6 + 7 / 8 * 8e9 / (0.5 * 400e9))


def test_a_gather_over_nodes_is_bound_by_the_network_with_one_eighth_of_the_buffer() -> None:
    seconds = collective_s("all_gather", 8e9, (Level(NVLINK, 8), Level(FABRIC, 4)))

    network_s = 3 * 10e-6 + 3 / 4 * (8e9 / 8) / (0.8 * 50e9)
    inside_s = 7 / 8 * 8e9 / (0.5 * 400e9)
    assert inside_s > network_s
    assert seconds == pytest.approx(inside_s + 28 * 2e-6 + 3 * 10e-6)


def test_a_ring_of_many_nodes_passes_every_link_once_for_each_of_its_other_ranks() -> None:
    """NCCL 2.20, src/graph/tuning.cc: n - 1 rounds, nodes - 1 of them between nodes."""
    fabric = FABRIC.model_copy(update={"least_round_s": 3e-6})
    pod, spine = (LinkTier(name=n, devices=1, latency_s=1e-5, bytes_per_s=1e15) for n in "ps")
    two = (Level(NVLINK, 8), Level(FABRIC, 4))
    over_net = (Level(NVLINK, 8), Level(fabric, 4))
    three = (Level(NVLINK, 8), Level(pod, 16), Level(spine, 4))

    for operation in ("all_gather", "reduce_scatter"):
        rounds = [collective_s(operation, 1e-9, group) for group in (two, over_net, three)]

        assert rounds[0] == pytest.approx((32 - 4) * 2e-6 + 3 * 10e-6)
        assert rounds[1] == pytest.approx((32 - 4) * 3e-6 + 3 * 10e-6)
        assert rounds[2] == pytest.approx((512 - 64) * 2e-6 + 63 * 1e-5)


def test_an_exchange_sends_each_byte_over_the_narrowest_tier_it_must_cross() -> None:
    seconds = collective_s("all_to_all", 1e9, (Level(NVLINK, 8), Level(FABRIC, 8)))

    crossing_s = 56 / 64 * 1e9 / (0.8 * 50e9)
    assert seconds == pytest.approx(crossing_s + 10e-6 + 2e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_waits_for_nobody(operation: str) -> None:
    assert collective_s(operation, 1e9, ()) == 0.0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(operation: str) -> None:
    faster = FABRIC.model_copy(update={"bytes_per_s": 100e9})
    for size in (1e3, 1e6, 1e9):
        slow = collective_s(operation, size, (Level(NVLINK, 4), Level(FABRIC, 4)))
        fast = collective_s(operation, size, (Level(NVLINK, 4), Level(faster, 4)))
        more = collective_s(operation, 2 * size, (Level(NVLINK, 4), Level(FABRIC, 4)))
        assert fast <= slow <= more


def test_the_innermost_axis_stays_on_the_fastest_tier() -> None:
    layout = Layout(tensor=8, data_shard=4, pipeline=2)
    tiers = (NVLINK, FABRIC)

    assert members(group_levels(tiers, layout, ("tensor",))) == [("nvlink", 8)]
    assert members(group_levels(tiers, layout, ("data_shard",))) == [("fabric", 4)]
    assert members(group_levels(tiers, layout, ("pipeline",))) == [("fabric", 2)]


def test_an_axis_between_the_tiers_has_members_on_both() -> None:
    layout = Layout(tensor=2, data_shard=16, pipeline=2)

    found = group_levels((NVLINK, FABRIC), layout, ("data_shard",))

    assert members(found) == [("nvlink", 4), ("fabric", 4)]


def test_the_order_of_the_mesh_decides_which_axis_is_near() -> None:
    outside = ("pipeline", "tensor", "context", "data_shard", "data_replicate")
    layout = Layout(tensor=8, pipeline=8, order=outside)

    assert members(group_levels((NVLINK, FABRIC), layout, ("pipeline",))) == [("nvlink", 8)]
    assert members(group_levels((NVLINK, FABRIC), layout, ("tensor",))) == [("fabric", 8)]


def test_groups_that_straddle_a_node_do_not_count_as_inside() -> None:
    # Ranks 6, 7, 8 form a group of three, and 7 | 8 is the border of a node.
    assert members(levels((NVLINK, FABRIC), [(3, 1)], devices=24)) == [("fabric", 3)]


def test_a_job_smaller_than_a_node_stays_inside_whatever_its_degrees() -> None:
    assert members(levels((NVLINK, FABRIC), [(3, 1)], devices=6)) == [("nvlink", 3)]


def curve(
    ranks: int,
    *points: tuple[int, float],
    operation: str = "all_reduce",
    tier: str = "nvlink",
) -> CollectiveCurve:
    return CollectiveCurve(
        tier=tier,
        operation=operation,
        ranks=ranks,
        points=tuple(LinkPoint(size_bytes=s, seconds=t, spread=0.0) for s, t in points),
    )


def test_measured_seconds_come_back_at_measured_sizes_and_between_them_geometrically() -> None:
    measured = curve(2, (1000, 1e-4), (100_000, 1e-2))

    assert interpolated_s(measured, 1000) == 1e-4
    assert interpolated_s(measured, 100_000) == 1e-2
    assert interpolated_s(measured, 10_000) == pytest.approx(1e-3)
    assert interpolated_s(measured, 1) == 1e-4
    assert interpolated_s(measured, 1_000_000) == pytest.approx(1e-1)


def test_a_measured_operation_is_not_derived_from_another() -> None:
    curves = curves_by_name([curve(2, (1000, 1.0)), curve(2, (1000, 5.0), operation="all_gather")])

    assert collective_s("all_reduce", 1000, (Level(NVLINK, 2),), curves) == pytest.approx(1.0)
    assert collective_s("all_gather", 1000, (Level(NVLINK, 2),), curves) == pytest.approx(5.0)
    unmeasured = collective_s("reduce_scatter", 1000, (Level(NVLINK, 2),), curves)
    assert unmeasured < 1e-4


def test_the_nearest_number_of_ranks_is_nearest_in_ratio() -> None:
    curves = (curve(2, (1, 1.0)), curve(8, (1, 1.0)))

    assert nearest_ranks(curves, 3).ranks == 2
    assert nearest_ranks(curves, 5).ranks == 8


def test_many_ranks_reduce_by_trees_so_that_latency_grows_with_the_logarithm() -> None:
    wide = LinkTier(name="wide", devices=4096, latency_s=1e-5, bytes_per_s=1e12)

    seconds = collective_s("all_reduce", 1.0, (Level(wide, 1024),))

    assert seconds == pytest.approx(4 * math.log2(1024) * 1e-5, rel=1e-6)


def test_a_mesh_without_switch_gives_two_members_one_link() -> None:
    mesh = LinkTier(
        name="xgmi", devices=8, latency_s=0.0, bytes_per_s=448e9, peer_bytes_per_s=64e9,
        fractions={"all_reduce": 0.75},
    )  # fmt: skip

    for members, busbw in ((2, 48e9), (8, 336e9)):
        seconds = collective_s("all_reduce", 1e9, (Level(mesh, members),))

        assert 2 * (members - 1) / members * 1e9 / seconds == pytest.approx(busbw)


@pytest.mark.parametrize("seed", range(60))
def test_many_sizes_at_once_take_what_each_takes(seed: int) -> None:
    rng = random.Random(seed)
    tiers = [
        LinkTier(
            name=f"tier {at}",
            devices=8 ** (at + 1),
            latency_s=rng.choice((0.0, 10 ** rng.uniform(-6, -4))),
            start_s=rng.choice((0.0, 10 ** rng.uniform(-6, -4))),
            bytes_per_s=10 ** rng.uniform(9, 12),
            oversubscription=rng.uniform(1, 4),
        )
        for at in range(3)
    ]
    group = tuple(Level(tier, rng.choice((2, 3, 4, 8))) for tier in tiers[: rng.randint(0, 3)])
    operation = rng.choice(OPERATIONS)
    points = ((1000, 1e-4), (100_000, 1e-2))
    measured = [
        curve(2, *points, tier=f"tier {at}", operation=operation)
        for at in range(3)
        if rng.random() < 0.3
    ]
    curves = curves_by_name(measured)
    sizes = [0.0, *(10 ** rng.uniform(0, 10) for _ in range(20))]

    together = collective_s(operation, np.array(sizes), group, curves)

    each = [collective_s(operation, size, group, curves) for size in sizes]
    assert together.tolist() == pytest.approx(each, rel=1e-12, abs=0)


def test_few_members_of_a_switch_reach_less_of_it_and_a_start_comes_once() -> None:
    narrow = NarrowGroup(members=2, fractions={"all_reduce": 0.5})
    switch = LinkTier(
        name="nvlink",
        devices=8,
        latency_s=0.0,
        bytes_per_s=100e9,
        start_s=10e-6,
        fractions={"all_reduce": 1.0},
        narrow=(narrow,),
    )

    two, eight = (collective_s("all_reduce", 1e9, (Level(switch, n),)) for n in (2, 8))

    assert two == pytest.approx(10e-6 + 1e9 / 50e9)
    assert eight == pytest.approx(10e-6 + 1.75e9 / 100e9)


def test_an_oversubscribed_fabric_is_as_many_times_slower_per_byte() -> None:
    fabric = LinkTier(name="fabric", devices=64, latency_s=1e-6, bytes_per_s=50e9)
    shared = fabric.model_copy(update={"oversubscription": 4.0})

    whole, quarter = (
        collective_s("all_gather", 1e9, (Level(tier, 64),)) - 63e-6 for tier in (fabric, shared)
    )

    assert quarter == pytest.approx(4 * whole)


def test_cards_that_reach_each_other_through_the_host_share_its_memory() -> None:
    (tier,) = resolve_cluster("8xrtx-4090").tiers
    seconds = [collective_s("all_reduce", 1e9, (Level(tier, n),)) for n in (2, 4, 8)]
    per_byte = [s / (2 * (n - 1) / n) for s, n in zip(seconds, (2, 4, 8), strict=True)]

    assert per_byte[2] > 1.3 * per_byte[1]
    assert per_byte[1] > 0.99 * per_byte[0]


def test_whole_nodes_sum_in_the_switch_and_parts_of_them_do_not() -> None:
    (tier,) = resolve_cluster("8xh100-sxm-80gb").tiers

    assert reached_fraction("all_reduce", tier, 8) > 1.2 * reached_fraction("all_reduce", tier, 4)
    assert reached_fraction("all_gather", tier, 8) < 1.2 * reached_fraction("all_gather", tier, 4)


def sent_once(routing: Routing, tokens: int, nodes: int, each: int) -> tuple[float, float]:
    """Copies that a rank sends over the network, and over the links of its node, for each token.

    Every rank routes tokens of its own; a copy for another node goes to the rank of the same place
    there, which forwards it to the ranks of its node that have experts of the token.
    """
    rng = np.random.default_rng(3)
    network = links = 0
    ranks = nodes * each
    for rank in range(ranks):
        for _ in range(tokens):
            kept = rng.choice(routing.groups, routing.groups_per_token, replace=False)
            size = routing.experts // routing.groups
            among = [group * size + at for group in kept.tolist() for at in range(size)]
            chosen = rng.choice(among, routing.per_token, replace=False)
            holders = {int(expert) * ranks // routing.experts for expert in chosen}
            network += len({holder // each for holder in holders} - {rank // each})
            links += sum(holder % each != rank % each for holder in holders)
    return network / ranks / tokens, links / ranks / tokens


def test_tokens_sent_once_are_those_of_a_brute_force() -> None:
    """DeepSeek-V3's routing on 8 nodes of 8: bytes over each level, the slower of which counts."""
    nvlink = LinkTier(name="nvlink", devices=8, latency_s=0.0, bytes_per_s=160e9)
    fabric = LinkTier(name="fabric", devices=64, latency_s=0.0, bytes_per_s=50e9)
    whole = {"all_to_all": 1.0}
    nvlink, fabric = (tier.model_copy(update={"fractions": whole}) for tier in (nvlink, fabric))
    routing = Routing(256, 8, 8, 4)
    network, links = sent_once(routing, 60, 8, 8)
    copy = 4096 * 7168
    group = (Level(nvlink, 8), Level(fabric, 8))
    assert dispatch_s(copy, group, routing) == pytest.approx(copy * network / 50e9, rel=0.02)
    quick = (Level(nvlink, 8), Level(fabric.model_copy(update={"bytes_per_s": 1e15}), 8))
    assert dispatch_s(copy, quick, routing) == pytest.approx(copy * links / 160e9, rel=0.02)
    # The library's all-to-all sends a token to each of its experts: 8 copies, 7 of 8 elsewhere.
    plain = collective_s("all_to_all", 8.0 * copy, group)
    assert plain == pytest.approx(copy * 7 / 50e9)
    assert plain > 2.1 * dispatch_s(copy, group, routing)


def test_tokens_sent_once_among_one_rank_or_of_many_sizes() -> None:
    """No group waits; an array of sizes takes what each takes."""
    routing = Routing(64, 6)
    assert dispatch_s(1e6, (), routing) == 0.0
    group = (Level(NVLINK, 8), Level(FABRIC, 4))
    sizes = np.array([0.0, 1e6, 3e8])
    found = dispatch_s(sizes, group, routing)
    assert found.tolist() == [dispatch_s(size, group, routing) for size in sizes.tolist()]
    assert found[0] == 0.0


def test_what_was_measured_on_other_ranks_counts_by_what_a_ring_sends() -> None:
    curves = curves_by_name([curve(2, (1_000, 1e-3), (100_000, 1e-1))])

    seconds = collective_s("all_reduce", 10_000, (Level(NVLINK, 8),), curves)

    # Each of 2 ranks sends 2 x 1/2 of the bytes, each of 8 ranks 2 x 7/8.
    assert seconds == pytest.approx(1.75e-2)
