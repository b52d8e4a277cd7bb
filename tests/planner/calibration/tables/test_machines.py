"""Accelerators by the names that people and drivers give them, and clusters that differ."""

from __future__ import annotations

import pytest

from meshwright.planner.calibration.tables.machines import accelerator_of, cluster_of_row
from meshwright.planner.catalog import accelerators
from meshwright.planner.documents.cluster import ClusterSpec


@pytest.mark.parametrize(
    ("text", "memory_gb", "name"),
    [
        ("AMD Instinct MI300X", None, "mi300x"),
        ("GB200-NVL72", None, "gb200"),
        ("GeForce RTX3090Ti", None, "rtx-3090"),
        ("B200-SXM-180GB", 180, "b200"),
        ("V100", 16, "v100-sxm-16gb"),
        ("h20", 141, "h20-141gb"),
        ("A100-PCIe", 40, "a100-pcie-40gb"),
        ("H100 SXM5", 64, "h100-sxm-80gb"),
    ],
)
def test_names(text: str, memory_gb: float | None, name: str) -> None:
    assert accelerator_of(text, memory_gb) == name


def test_every_entry_is_found_by_all_its_names() -> None:
    for name, entry in accelerators().items():
        for text in (name, *entry.aliases, *entry.driver_names):
            assert accelerator_of(text) == name


def cluster(accelerator: str, *, per_node: int = 8, memory_gb: float | None = None) -> ClusterSpec:
    return cluster_of_row(
        accelerator,
        16,
        per_node,
        memory_gb=memory_gb,
        intra_link="",
        network_bytes_per_s=None,
    )[0]


def test_a_label_that_no_board_has_sets_the_memory() -> None:
    (group,) = cluster("h100-sxm-80gb", memory_gb=64).groups

    assert group.accelerator.memory_bytes == pytest.approx(64 * 2**30, rel=0.02)


@pytest.mark.parametrize(
    ("devices", "per_node", "joined"), [(256, 4, 64), (64, 4, 64), (72, 4, 72), (8, 4, 8)]
)
def test_trays_of_a_rack_are_one_domain_of_links(devices: int, per_node: int, joined: int) -> None:
    """18 trays of 4 reach each other over NVLink; 256 devices are 64 of each of 4 racks."""
    cluster, assumed = cluster_of_row(
        "gb200", devices, per_node, memory_gb=None, intra_link="", network_bytes_per_s=None
    )

    assert cluster.groups[0].devices_per_node == joined == cluster.tiers[0].devices
    assert cluster.devices == devices
    assert f"racks of which {joined} devices are used" in assumed
