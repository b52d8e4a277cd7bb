"""Clusters as people write them: settings behind a name, names inside a file, racks, quads."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.planner.catalog import accelerators, nodes
from meshwright.planner.catalog.cluster_file import cluster_text
from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.document import DocumentError


def tiers(text: str) -> list[tuple[str, int, float, float]]:
    return [
        (tier.name, tier.devices, tier.bytes_per_s / 1e9, tier.oversubscription)
        for tier in resolve_cluster(text).tiers
    ]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        (
            "4x8xh100-sxm-80gb,network=25GB/s,oversubscription=2",
            [("nvlink", 8, 450, 1), ("network", 32, 25, 2)],
        ),
        ("2x4xrtx-3090,network=10Gb/s", [("pcie", 4, 31, 1), ("network", 8, 1.25, 1)]),
        ("4xrtx-a6000,pcie=3x8", [("pcie", 4, 8, 1)]),
        ("64x4xgh200", [("nvlink", 4, 450, 1), ("network", 256, 25, 1)]),
        ("2xjupiter", [("nvlink", 4, 450, 1), ("network", 8, 25, 1)]),
        ("1024x4xgb200", [("nvlink", 64, 900, 1), ("network", 4096, 50, 1)]),
        ("36x4xgb200", [("nvlink", 72, 900, 1), ("network", 144, 50, 1)]),
        ("2xdgx-b300", [("nvlink", 8, 900, 1), ("network", 16, 100, 1)]),
        ("4x8xh100,network=25GB/s:2x4", [("nvlink", 4, 450, 1), ("network", 8, 25, 1)]),
    ],
)
def test_what_is_written_behind_a_name_counts(
    text: str, links: list[tuple[str, int, float, float]]
) -> None:
    assert tiers(text) == links


def test_settings_of_a_host_replace_the_catalogues() -> None:
    group = resolve_cluster("4xrtx-a6000,pcie=4x16,host_memory=512GiB").groups[0]

    assert group.host_memory_bytes == 512 * 2**30
    assert group.host_memory_range_bytes is None
    assert group.host_link_bytes_per_s == pytest.approx(31e9, rel=0.01)


def test_of_several_kinds_each_has_its_own_network_and_the_slowest_joins_them() -> None:
    joined = resolve_cluster("4xa100-sxm-80gb,network=1GB/s+8xv100-sxm-32gb")

    assert joined.tiers[-1].bytes_per_s == 1e9
    assert joined.devices == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xh100-sxm-80gb,network=25GB/s", "links between nodes.*has none"),
        ("4x8xh100,netwrk=3", "did you mean 'network'"),
        ("4x8xh100,network=25", "25GB/s or 200Gb/s"),
        ("4x8xh100,network=0GB/s", "25GB/s"),
        ("4x8xh100,network=25GB/s,network=50GB/s", "give network once"),
        ("4x8xh100,oversubscription=0.5", "at least 1"),
        ("4x8xh100,host_memory=lots", "512GiB"),
        ("4x8xh100,pcie=9x8", "3x8"),
        ("4x8xh100,", "no setting ''"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(text: str, says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        resolve_cluster(text)


def test_a_cluster_of_the_catalogue_is_read_back_from_its_commented_file(tmp_path: Path) -> None:
    names = [*(f"2x{name}" for name in list(nodes())[::3]), *list(accelerators())[::5]]
    for name in names:
        cluster = resolve_cluster(name)
        text = cluster_text(cluster)
        assert "# Rates count one device and one direction" in text
        assert f"accelerator: {cluster.groups[0].accelerator.name}\n" in text
        (tmp_path / "c.yaml").write_text(text)
        assert resolve_cluster(str(tmp_path / "c.yaml")) == cluster


def test_the_command_writes_a_file_that_the_planner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["catalog", "cluster", "4x8xh100-sxm-80gb", "-o", "cluster.yaml"]) == 0

    assert resolve_cluster("cluster.yaml") == resolve_cluster("4x8xh100-sxm-80gb")
    assert main(["catalog", "cluster"]) == 1
    assert "catalog cluster 4x8xh100-sxm-80gb" in capsys.readouterr().err


def test_a_name_inside_of_a_file_stands_for_the_catalogues_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    group = "{name: box, accelerator: rtx-3090, nodes: 2, devices_per_node: 4}"
    Path("box.yaml").write_text(f"format: 1\nname: box\ngroups: [{group}]\n")

    box = resolve_cluster("box.yaml")

    assert box.groups[0].accelerator == accelerators()["rtx-3090"].accelerator("rtx-3090")
    assert box.tiers == resolve_cluster("2x4xrtx-3090").tiers
    Path("box.yaml").write_text(f"format: 1\nname: box\ngroups: [{group[:30]}0, nodes: 1}}]\n")
    with pytest.raises(DocumentError, match=r"groups\[0\].accelerator: there is no accelerator"):
        resolve_cluster("box.yaml")


@pytest.mark.parametrize("link", ["pcie3-x8", "pcie"])
def test_a_link_of_a_file_reaches_what_links_of_its_kind_reach(tmp_path: Path, link: str) -> None:
    group = "{name: box, accelerator: rtx-3090, nodes: 1, devices_per_node: 4}"
    tier = f"{{name: {link}, devices: 4, latency_s: 2.9e-6, bytes_per_s: 8.0e+9}}"
    file = tmp_path / "cluster.yaml"
    file.write_text(f"format: 1\nname: box\ngroups: [{group}]\ntiers: [{tier}]\n")
    (written,) = resolve_cluster(str(file)).tiers
    (named,) = resolve_cluster("4xrtx-3090,pcie=3x8").tiers
    assert written.fractions == named.fractions
    assert written.narrow == named.narrow
    file.write_text(file.read_text().replace("8.0e+9}", "8.0e+9, fractions: {all_reduce: 0.5}}"))
    assert resolve_cluster(str(file)).tiers[0].fractions == {"all_reduce": 0.5}


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("groups: [{name: b, accelerator: rtx-3090, count: 4}]", "'nodes' and 'devices_per_node'"),
        ("links: []", "links are 'tiers'"),
    ],
)
def test_a_usual_name_of_a_key_leads_to_ours(tmp_path: Path, key: str, way_out: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"format: 1\nname: box\n{key}\n")
    with pytest.raises(DocumentError, match=f"unknown key; .*{way_out}"):
        resolve_cluster(str(file))
