"""What a node is made of: texts of the system read by hand, and this machine looked at."""

from __future__ import annotations

import doctest
from pathlib import Path

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.profile import CollectiveCurve, LinkPoint, NodePair
from meshwright.profiler import machine

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0
GPU1\tNV18\t X \tSYS\tPXB\t0-31\t0
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\t X

Legend:
"""


def test_links_of_devices_are_read_from_the_matrix() -> None:
    found = [(link.first, link.second, link.kind) for link in machine.device_links(TOPOLOGY)]

    assert found == [(0, 1, "NV18"), (0, 2, "SYS"), (1, 2, "SYS")]


def test_this_machine_has_cores_memory_and_a_disk(tmp_path: Path) -> None:
    node = machine.node_here()
    write, read = machine.disk_bytes_per_s(tmp_path)

    assert node.cores >= 1
    assert node.memory_bytes > 2**28
    assert sum(numa.cores for numa in node.numa) == 0 or node.numa[0].memory_bytes > 0
    assert write is not None
    assert read is not None
    assert min(write, read) > 1e5
    assert not list(tmp_path.iterdir())


def nodes(count: int, ranks: int) -> ClusterSpec:
    return machine.joint_cluster([resolve_cluster(f"local:{ranks}")] * count)


def test_like_nodes_are_one_group_behind_one_network() -> None:
    whole = nodes(3, 2)

    assert [(g.nodes, g.devices_per_node) for g in whole.groups] == [(3, 2)]
    assert [(t.name, t.devices) for t in whole.tiers] == [("memory", 2), ("network", 6)]


def test_unlike_nodes_are_groups_of_their_own() -> None:
    whole = machine.joint_cluster([resolve_cluster("local:2"), resolve_cluster("local:1")])

    assert [(g.nodes, g.devices_per_node) for g in whole.groups] == [(1, 2), (1, 1)]
    assert whole.tiers[-1].devices == 3


def test_the_slowest_pair_is_the_rate_of_the_network() -> None:
    pairs = [
        NodePair(source=s, target=1 - s, bytes_per_s=rate, latency_s=1e-3, spread=0.0)
        for s, rate in ((0, 1e6), (1, 5e5))
    ]
    curve = CollectiveCurve(
        tier="memory",
        operation="send_recv",
        ranks=2,
        points=(
            LinkPoint(size_bytes=1000, seconds=1e-5, spread=0.0),
            LinkPoint(size_bytes=10**7, seconds=1e-2, spread=0.0),
        ),
    )

    memory, network = machine.with_measured_links(nodes(2, 2), [curve], pairs).tiers

    assert (memory.latency_s, memory.bytes_per_s) == (1e-5, 1e9)
    assert (network.latency_s, network.bytes_per_s) == (1e-3, 5e5)
    assert network.provenance == "measured"


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(machine).failed == 0
