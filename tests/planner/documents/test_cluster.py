"""ClusterSpec: groups are counted, and tiers must join all of their devices."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.errors import DocumentError

CURVE = {
    "launch_s": 3e-6,
    "matmul": 0.7,
    "attention_forward": 0.4,
    "attention_backward": 0.3,
    "memory": 0.8,
    "spread": 0.1,
    "provenance": "quoted",
    "source": "a test",
}
DEVICE = {
    "name": "device",
    "memory_bytes": 80 * 10**9,
    "peak_flops": {"bf16": 1e15},
    "memory_bytes_per_s": 3e12,
    "curve": CURVE,
}


def group(name: str, nodes: int, devices_per_node: int) -> dict[str, Any]:
    return {
        "name": name,
        "accelerator": DEVICE,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
    }


def tier(name: str, devices: int) -> dict[str, Any]:
    return {"name": name, "devices": devices, "latency_s": 1e-6, "bytes_per_s": 1e11}


def cluster(**changes: Any) -> ClusterSpec:
    data = {
        "name": "c",
        "groups": [group("a", 2, 8), group("b", 1, 4)],
        "tiers": [tier("nvlink", 8), tier("network", 20)],
    }
    return ClusterSpec.of(data | changes)


def test_devices_are_those_of_all_groups() -> None:
    assert cluster().devices == 2 * 8 + 1 * 4


def older(**rates: float) -> dict[str, Any]:
    return group("old", 1, 4) | {"accelerator": DEVICE | {"name": "old", "peak_flops": rates}}


def test_a_precision_is_one_that_all_devices_have_units_for() -> None:
    mixed = cluster(groups=[group("a", 2, 8), older(fp32=1e13, fp16=1e14)])

    assert cluster().precision_for(None) == "bf16"
    assert mixed.precision_for(None) == "fp16"
    assert mixed.precision_for("fp32") == "fp32"
    with pytest.raises(DocumentError, match="old has no units for; use fp16"):
        mixed.precision_for("bf16")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"groups": []}, "at least one device group"),
        ({"tiers": []}, "reach 0 devices, the groups have 20"),
        ({"tiers": [tier("nvlink", 8)]}, "reach 8 devices, the groups have 20"),
        ({"tiers": [tier("network", 20), tier("nvlink", 8)]}, "order them fastest first"),
        ({"groups": [group("a", 0, 8)]}, r"groups\[0\]\.nodes: is 0"),
        ({"tiers": [tier("n", 20) | {"bytes_per_s": 0.0}]}, r"tiers\[0\]\.bytes_per_s: is 0"),
        ({"tiers": [tier("n", 20) | {"bytes_per_s": float("inf")}]}, r"tiers\[0\]\.bytes_per_s"),
        ({"tiers": [tier("n", 20) | {"fractions": {"all_smash": 1.0}}]}, "all_smash"),
        ({"price": {"usd_per_device_hour": -1.0}}, r"price\.usd_per_device_hour"),
    ],
)
def test_a_machine_that_makes_no_sense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        cluster(**changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peak_flops": {}}, "peak_flops is empty"),
        ({"peak_flops": {"int8": 1e15}}, "int8"),
        ({"memory_bytes": 0}, "memory_bytes: is 0"),
        ({"curve": CURVE | {"matmul": 1.2}}, r"curve\.matmul: is 1\.2"),
        ({"curve": CURVE | {"provenance": "dreamt"}}, r"curve\.provenance"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        cluster(groups=[group("a", 2, 8) | {"accelerator": DEVICE | change}])
