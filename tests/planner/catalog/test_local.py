"""This machine as a cluster: devices by their driver's names, else cores that were measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.planner.catalog import accelerators, local, native
from meshwright.planner.catalog.local import (
    LocalDevice,
    links,
    nvidia_devices,
    of_cores,
    of_devices,
    parse_devices,
    visible,
)
from meshwright.planner.catalog.machine_figures import MachineFigures
from meshwright.planner.costs.slowdown import host_pace
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.errors import DocumentError

CORE = MachineFigures(
    measured="2026-11-23T20:45:00+00:00",
    flops=1e11,
    bytes_per_s=2e10,
    call_s=5.2e-7,
    launch_s=4e-7,
    link_latency_s=2e-5,
    link_bytes_per_s=3e9,
    memory_bytes=8 * 2**30,
)
H100 = LocalDevice("NVIDIA H100 80GB HBM3", 85520809984)
RTX = LocalDevice("NVIDIA GeForce RTX 4090", 24564 * 2**20)
A40 = LocalDevice("NVIDIA A40", 46068 * 2**20)
V100 = LocalDevice("Tesla V100-SXM2-32GB", 32768 * 2**20)


@pytest.fixture(autouse=True)
def no_devices_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "nvidia_devices", tuple)


def test_this_machine_has_a_rank_for_each_core_up_to_eight() -> None:
    cluster = local.cluster()

    assert cluster.devices == min(8, len(os.sched_getaffinity(0)))
    assert cluster.groups[0].accelerator.kind == "cpu"
    assert cluster.groups[0].accelerator.curve.provenance == "measured"
    assert ClusterSpec.parse(cluster.dump()) == cluster


def test_ranks_share_the_memory_and_more_ranks_than_cores_share_the_cores() -> None:
    two, four = (of_cores(CORE, cores=2, ranks=n) for n in (2, 4))

    assert two.groups[0].accelerator.memory_bytes == 4 * 2**30
    assert four.groups[0].accelerator.memory_bytes == 2 * 2**30
    assert two.groups[0].accelerator.peak_flops["fp32"] == 1e11
    assert four.groups[0].accelerator.peak_flops["fp32"] == 5e10
    assert [(tier.name, tier.devices) for tier in four.tiers] == [("memory", 4)]


def test_the_listing_of_nvidia_smi_is_read() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, GPU-a\nNVIDIA H100 80GB HBM3, 81559, GPU-b\n\n"

    found = parse_devices(text + "NVIDIA GB10, [N/A], GPU-c\n")

    assert [device.kind for device in found] == [H100.kind] * 2
    assert [device.identifier for device in found] == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1, 2", [1, 2]),
        ("0,7,1", [0]),
        ("GPU-2,GPU-0", [2, 0]),
        ("GPU-1,GPU-x,GPU-2", [1]),
        ("GPU-", []),  # more than one begins so
        ("MIG-7,1", [3, 1]),
    ],
)
def test_chosen_devices_are_those_that_cuda_would_show(chosen: str | None, left: list[int]) -> None:
    devices = [LocalDevice(str(i), 1, f"GPU-{i}") for i in range(3)]
    parts = [LocalDevice("part", 1, "MIG-7")]

    assert visible(devices, chosen, parts) == tuple([*devices, *parts][i] for i in left)


def test_cores_and_devices_have_the_host_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the document, twice as slow as that of the framework's figures."""
    monkeypatch.setattr(local, "machine_figures", lambda: CORE)
    for cluster in (of_cores(CORE, cores=2, ranks=2), of_devices([H100, RTX])):
        for group in ClusterSpec.parse(cluster.dump()).groups:
            assert group.host_speed is not None
            assert (group.host_speed.call_s, group.host_speed.launch_s) == (5.2e-7, 4e-7)
            assert "measured 2026-11-23 20:45 UTC" in group.host_speed.source
        assert host_pace(native(), cluster) == pytest.approx(2.0)


def test_known_devices_have_the_figures_of_the_catalogue_and_their_own_memory() -> None:
    cluster = of_devices([H100._replace(memory_bytes=85 * 10**9)] * 8)

    accelerator = cluster.groups[0].accelerator
    assert accelerator.name == "h100-sxm-80gb"
    assert accelerator.peak_flops == accelerators()["h100-sxm-80gb"].peak_flops
    assert accelerator.memory_bytes == 85 * 10**9
    assert [(tier.name, tier.devices) for tier in cluster.tiers] == [("nvlink", 8)]


def test_an_unknown_device_says_whose_figures_it_has() -> None:
    accelerator = of_devices([LocalDevice("NVIDIA Quadro X", 24 * 2**30)]).groups[0].accelerator

    assert accelerator.name == "NVIDIA Quadro X"
    assert accelerator.curve.provenance == "quoted"
    assert accelerator.curve.spread == 1.0
    assert "not catalogued" in accelerator.curve.source


def test_unequal_devices_are_groups_joined_by_the_slower_link() -> None:
    cluster = of_devices([H100, H100, RTX])

    assert [group.devices for group in cluster.groups] == [2, 1]
    assert [(tier.name, tier.devices) for tier in cluster.tiers] == [("pcie", 3)]


def listing(*rows: str) -> str:
    """Return rows of `nvidia-smi topo -m`, as the program writes them."""
    names = [f"GPU{number}" for number in range(len(rows))]
    head = "\t" + "\t".join(f"\x1b[4m{name}" for name in (*names, "NIC0", "CPU Affinity"))
    lines = [
        "\t".join((name, *row.split(), "PXB", "0-31"))
        for name, row in zip(names, rows, strict=True)
    ]
    nic = "\t".join(("NIC0", *["PXB"] * len(rows), " X "))
    return "\n".join(
        (f"{head}\x1b[0m", *lines, nic, "", "Legend:", "  X    = Self", "  NV#  = NVLinks")
    )


SWITCHED = listing(*(" ".join("X" if a == b else "NV18" for a in range(8)) for b in range(8)))
MESH = listing("X NV1 NV2 SYS", "NV1 X SYS NV2", "NV2 SYS X NV1", "SYS NV2 NV1 X")
PAIRS = listing("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
CROSSED = listing("X SYS NV4 SYS", "SYS X SYS NV4", "NV4 SYS X SYS", "SYS NV4 SYS X")
HOST = listing("X PHB NODE SYS", "PHB X NODE SYS", "NODE NODE X SYS", "SYS SYS SYS X")


@pytest.mark.parametrize(
    ("text", "device", "numbers", "tiers"),
    [
        (SWITCHED, H100, [0, 1, 2, 3, 4, 5, 6, 7], [("nvlink", 8)]),
        (SWITCHED, H100, [6, 2], [("nvlink", 2)]),
        (MESH, V100, [0, 1, 2, 3], [("nvlink", 4)]),  # 0 and 3 through 1 or 2
        (PAIRS, A40, [0, 1, 2, 3], [("nvlink", 2), ("pcie", 4)]),
        (PAIRS, A40, [0, 2], [("pcie", 2)]),
        (PAIRS, A40, [1, 2, 3], [("pcie", 3)]),  # islands of one and of two
        (CROSSED, A40, [0, 1, 2, 3], [("pcie", 4)]),  # no neighbours in this order,
        (CROSSED, A40, [0, 2, 1, 3], [("nvlink", 2), ("pcie", 4)]),  # but in this one
        (HOST, H100, [0, 1, 2, 3], [("pcie", 4)]),  # without a switch, whatever is usual
        (HOST, RTX, [3, 0], [("pcie", 2)]),
        ("No devices were found", A40, [0, 1], [("pcie", 2)]),  # as the catalogue has it
        ("No devices were found", H100, [0, 1], [("nvlink", 2)]),
    ],
)
def test_devices_are_joined_as_the_driver_says(
    text: str, device: LocalDevice, numbers: list[int], tiers: list[tuple[str, int]]
) -> None:
    devices = [device._replace(number=number) for number in numbers]

    cluster = of_devices(devices, links=links(text))

    assert [(tier.name, tier.devices) for tier in cluster.tiers] == tiers
    assert sorted(cluster.tiers, key=lambda tier: -tier.bytes_per_s) == list(cluster.tiers)


def test_devices_come_before_cores_and_no_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "nvidia_devices", lambda: (RTX, RTX))

    assert local.cluster().groups[0].accelerator.name == "rtx-4090"
    assert local.cluster(1).devices == 1
    with pytest.raises(DocumentError, match="asks for 3 devices; nvidia-smi shows 2"):
        local.cluster(3)


def test_nvidia_smi_is_asked_and_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564, GPU-7'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert [device.kind for device in nvidia_devices({})] == [RTX.kind]
    assert nvidia_devices({"CUDA_VISIBLE_DEVICES": ""}) == ()
    program.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia_devices({}) == ()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert nvidia_devices({}) == ()
