"""This machine as a cluster: devices by their driver's names, else cores that were measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner import local
from planner.catalog import accelerators
from planner.cluster import ClusterSpec
from planner.errors import DocumentError, LaunchError
from planner.local import Core, LocalDevice, listed, nvidia_devices, of_cores, of_devices, visible

CORE = Core(flops=1e11, bytes_per_s=2e10, link_latency_s=2e-5, link_bytes_per_s=3e9)
H100 = LocalDevice("NVIDIA H100 80GB HBM3", 85520809984)
RTX = LocalDevice("NVIDIA GeForce RTX 4090", 24564 * 2**20)


@pytest.fixture(autouse=True)
def no_devices_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "nvidia_devices", tuple)


def test_this_machine_has_a_rank_for_each_core_up_to_eight() -> None:
    cluster = local.cluster()

    assert cluster.devices == min(8, len(os.sched_getaffinity(0)))
    assert cluster.groups[0].accelerator.kind == "cpu"
    assert cluster.groups[0].accelerator.curve.provenance == "measured"
    assert ClusterSpec.parse(cluster.dump()) == cluster


def test_what_is_measured_is_in_the_range_of_processors() -> None:
    core = local.measured_core()

    assert 1e9 < core.flops < 1e13
    assert 1e8 < core.bytes_per_s < 1e12
    assert 1e-7 < core.link_latency_s < 1e-2
    assert 1e7 < core.link_bytes_per_s < 1e12


def test_ranks_share_the_memory_and_more_ranks_than_cores_share_the_cores() -> None:
    two, four = (of_cores(CORE, cores=2, ranks=n, memory_bytes=8 * 2**30) for n in (2, 4))

    assert two.groups[0].accelerator.memory_bytes == 4 * 2**30
    assert four.groups[0].accelerator.memory_bytes == 2 * 2**30
    assert two.groups[0].accelerator.peak_flops["fp32"] == 1e11
    assert four.groups[0].accelerator.peak_flops["fp32"] == 5e10
    assert [(tier.name, tier.devices) for tier in four.tiers] == [("memory", 4)]


def test_a_single_rank_has_no_link() -> None:
    assert of_cores(CORE, cores=2, ranks=1, memory_bytes=2**30).tiers == ()


def test_a_machine_that_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MEASURE", "raise SystemExit(3)")

    with pytest.raises(LaunchError, match="could not be measured"):
        local.measured_core.__wrapped__()


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert 0 < local.available_bytes() <= total


def test_the_listing_of_nvidia_smi_is_read() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, GPU-a\nNVIDIA H100 80GB HBM3, 81559, GPU-b\n\n"

    found = listed(text + "NVIDIA GB10, [N/A], GPU-c\n")

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
