"""Slow links and devices are found where they were put, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from meshwright.planner.documents.profile import (
    Birth,
    LayerMeasurement,
    MeasuredDevice,
    MeasuredNode,
    NodePair,
    Profile,
)
from meshwright.profiler.diagnostics import (
    below_quote,
    disturbances,
    interpolation,
    slow_devices,
    slow_links,
)

GBIT = 1.25e8


def pairs(nodes: int, rate: Callable[[int, int], float]) -> list[NodePair]:
    return [
        NodePair(source=s, target=t, bytes_per_s=rate(s, t), latency_s=1e-4, spread=0.0)
        for s, t in itertools.permutations(range(nodes), 2)
    ]


def names(nodes: int) -> list[str]:
    return [f"node{i}" for i in range(nodes)]


def test_a_node_with_a_bad_cable_is_named_and_its_peers_are_not() -> None:
    measured = pairs(4, lambda s, t: 0.41 * GBIT if 3 in (s, t) else GBIT)

    found = list(slow_links(measured, names(4)))

    assert [f.text for f in found] == [
        "node3 sends at 41% of its peers: 410 Mbit/s and 1 Gbit/s",
        "node3 receives at 41% of its peers: 410 Mbit/s and 1 Gbit/s",
    ]
    assert found[0].share == pytest.approx(0.41)


def test_a_bad_path_between_two_good_nodes_is_named_as_a_pair() -> None:
    measured = pairs(4, lambda s, t: 0.5 * GBIT if (s, t) == (1, 2) else GBIT)

    (found,) = slow_links(measured, names(4))

    assert found.subject == "node1 -> node2"


def test_two_nodes_compare_their_directions() -> None:
    measured = pairs(2, lambda s, t: 0.5 * GBIT if s == 0 else GBIT)

    (found,) = slow_links(measured, names(2))

    assert found.text.startswith("node0 sends at 50% of its peers")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_links_that_differ_a_little_are_not_told(count: int) -> None:
    assert not list(slow_links(pairs(count, lambda s, t: GBIT * (1 - 0.02 * s)), names(count)))


def test_links_below_what_the_document_says_are_told() -> None:
    found = list(below_quote(pairs(2, lambda s, t: GBIT), names(2), quoted_bytes_per_s=2 * GBIT))

    assert [f.share for f in found] == [0.5, 0.5]


def measured(micro_batch: int, seconds: float) -> LayerMeasurement:
    return LayerMeasurement(
        kind="block",
        tensor=1,
        sequence_parallel=False,
        micro_batch=micro_batch,
        seq_len=8,
        precision="fp32",
        recompute="none",
        forward_s=seconds / 3,
        backward_s=2 * seconds / 3,
        stored_bytes=1,
        forward_transient_bytes=0,
        backward_transient_bytes=0,
        spread=0.0,
        samples=1,
    )


def test_the_error_of_interpolation_is_that_of_leaving_one_out() -> None:
    birth = Birth(
        command="c", date="d", host="h", device="cpu", ranks=1, threads_per_rank=1, software={}
    )
    rows = tuple(measured(size, seconds) for size, seconds in ((1, 1.0), (2, 2.5), (4, 4.0)))

    (found,) = interpolation(Profile(model="m", model_digest="x", birth=birth, layers=rows))

    assert found.share == pytest.approx(abs(2.0 / 2.5 - 1))
    assert "micro-batch 2" in found.text


def test_a_busy_neighbour_and_a_hot_device_are_told() -> None:
    noise = [{"rank": 0, "waited": 0.01, "drift": 0.3}, {"rank": 1, "waited": 0.4, "drift": 0.0}]

    busy, hot = disturbances(noise)

    assert (busy.what, busy.share) == ("noise", 0.4)
    assert (hot.what, hot.subject) == ("clock", "rank 0")


def test_a_throttled_device_is_told() -> None:
    nodes = [
        MeasuredNode(
            name=f"node{n}",
            processor="cpu",
            cores=2,
            memory_bytes=1,
            devices=tuple(
                MeasuredDevice(name="a", rank=2 * n + i, flops=1e9 if n or i else 3e8)
                for i in range(2)
            ),
        )
        for n in range(2)
    ]

    (found,) = slow_devices(nodes)

    assert found.text == "rank 0 on node0 computes at 30% of its peers: 0.3 GFLOP/s"
