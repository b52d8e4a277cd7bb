"""What a user writes for MODEL and CLUSTER either means one thing or gives one clear message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.catalog import model_config, models, nodes
from meshwright.planner.catalog.expressions import cluster_of, resolve_cluster, resolve_model
from meshwright.planner.documents.document import write
from meshwright.planner.documents.model import ModelGraph, is_factory
from meshwright.planner.errors import DocumentError


@pytest.mark.parametrize(
    ("text", "devices", "tiers"),
    [
        ("h100", 1, []),
        ("1xrtx-4090", 1, []),
        ("4xa100-sxm-80gb", 4, [("nvlink", 4)]),
        ("8xh100-sxm-80gb", 8, [("nvlink", 8)]),
        ("8xH100", 8, [("nvlink", 8)]),
        ("16x8xh100-sxm-80gb", 128, [("nvlink", 8), ("network", 128)]),
        ("128xh100-sxm-80gb", 128, [("nvlink", 8), ("network", 128)]),
        ("2x4xh200-nvl", 8, [("nvlink", 4), ("network", 8)]),
        ("8xh200-nvl", 8, [("nvlink", 4), ("pcie", 8)]),
        ("2xh100-nvl", 2, [("nvlink", 2)]),
        ("72xgb200", 72, [("nvlink", 72)]),
        ("2x1xgh200", 2, [("network", 2)]),
        ("p5.48xlarge", 8, [("nvlink", 8)]),
        ("4xp5.48xlarge", 32, [("nvlink", 8), ("network", 32)]),
        ("2048x8xh100-sxm-80gb", 16384, [("nvlink", 8), ("network", 16384)]),
    ],
)
def test_an_expression_is_the_cluster_that_it_reads_as(
    text: str, devices: int, tiers: list[tuple[str, int]]
) -> None:
    cluster = resolve_cluster(text)

    assert cluster.devices == devices
    assert [(tier.name, tier.devices) for tier in cluster.tiers] == tiers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no cluster"),
        ("x", "there is no accelerator"),
        ("-1x", "names no cluster"),
        ("8x", "names no cluster"),
        ("0xh100", "0 devices"),
        ("8x0xh100", "0 devices"),
        ("1e9x8xh100", "names no cluster"),
        ("99999999999999999999x8xh100", "devices; a cluster has 1 to 1,000,000"),
        ("2x2x2xh100", "names no cluster"),
        ("8 x h100", "names no cluster"),
        ("12xh100", "a node has 8"),
        ("2x16xh100", "a node has 8"),
        ("8xh10", "'h100-"),
        ("8xh100-sxm-80g", "'h100-sxm-80gb'"),
        ("p5.48xlarg", "'p5.48xlarge'"),
        ("local:0", "local:N"),
        ("local:many", "local:N"),
        ("nowhere.yaml", "is not there; name a file"),
        ("~nobody-of-that-name/x.yaml", "cannot be read"),
        ("h" * 5000, "there is no accelerator"),
        ("a\0b", "names no cluster"),
    ],
)
def test_nonsense_for_cluster_gives_one_message_that_says_what_is_right(
    text: str, says: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        resolve_cluster(text)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=20)
    | st.from_regex(r"(-?[0-9]{1,30}x){0,3}(h100|p5.48xlarge|rtx-4090)?", fullmatch=True)
)
def test_no_text_for_cluster_ends_in_a_traceback(text: str) -> None:
    if text.startswith("local"):
        return
    try:
        cluster = resolve_cluster(text)
    except DocumentError:
        return
    assert cluster.devices >= 1


@pytest.mark.parametrize("name", sorted(nodes()))
def test_every_node_type_makes_a_cluster(name: str) -> None:
    cluster = resolve_cluster(f"3x{name}")

    assert cluster.devices == 3 * nodes()[name].devices_per_node
    assert cluster.groups[0].accelerator.name == nodes()[name].accelerator


def test_cluster_of_puts_a_given_network_and_bridge_in_place() -> None:
    plain = cluster_of("rtx-3090", devices_per_node=2)
    bridged = cluster_of("rtx-3090", devices_per_node=2, intra_link="nvlink")
    networked = cluster_of("a100-sxm-80gb", nodes=4, network_bytes_per_s=6.25e9)

    assert [tier.name for tier in plain.tiers] == ["pcie"]
    assert [tier.name for tier in bridged.tiers] == ["nvlink"]
    assert networked.tiers[-1].bytes_per_s == 6.25e9
    assert networked.devices == 32


def test_a_cluster_document_is_read_from_its_path(tmp_path: Path) -> None:
    cluster = resolve_cluster("2xp5.48xlarge")
    write(cluster, tmp_path / "cluster.yaml")

    assert resolve_cluster(str(tmp_path / "cluster.yaml")) == cluster


@pytest.mark.parametrize("name", sorted(models()))
def test_every_model_of_the_catalogue_resolves_and_round_trips(name: str) -> None:
    model = resolve_model(name)

    assert model.name == model.source == name
    assert ModelGraph.parse(model.dump()) == model


def test_a_configuration_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config("qwen3-0.6b")))
    (folder / "small.json").write_text(json.dumps(model_config("qwen3-0.6b")))

    by_folder = resolve_model(str(folder))
    by_file = resolve_model(str(folder / "config.json"))

    assert by_folder.name == by_file.name == "mine"
    assert resolve_model(str(folder / "small.json")).name == "small"
    assert by_folder.layers == by_file.layers == resolve_model("qwen3-0.6b").layers
    assert by_folder.source == str(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no model"),
        ("llama-3.1-8", "'llama-3.1-8b'"),
        ("lama-2-7b", "'llama-2-7b'"),
        ("nowhere/config.json", "is not there"),
        ("mine.py:build", "needs torch"),
        ("m" * 5000, "there is no model"),
    ],
)
def test_nonsense_for_model_gives_one_message(text: str, says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        resolve_model(text)


def test_a_file_that_is_no_configuration_is_told_apart(tmp_path: Path) -> None:
    listed = tmp_path / "config.json"
    listed.write_text("[1, 2]")
    with pytest.raises(DocumentError, match="is no mapping"):
        resolve_model(str(listed))
    listed.write_text("{")
    with pytest.raises(DocumentError, match="is not YAML"):
        resolve_model(str(listed))
    with pytest.raises(DocumentError, match=r"has no config\.json"):
        resolve_model(str(tmp_path / ".."))


def test_a_factory_is_a_function_in_a_python_file() -> None:
    assert is_factory("a/b.py:build")
    assert not is_factory("b.py")
    assert not is_factory("b.py:")
    assert not is_factory("b.py:2x")
    assert not is_factory("llama-2-7b")


def test_kinds_of_nodes_are_joined_by_the_slowest_of_their_networks() -> None:
    joined = resolve_cluster("2x8xh100-sxm-80gb+p4d.24xlarge+4xa100-sxm-40gb")

    assert [(group.name, group.devices) for group in joined.groups] == [
        ("h100-sxm-80gb", 16),
        ("a100-sxm-40gb", 8),
        ("a100-sxm-40gb-2", 4),
    ]
    alone = resolve_cluster("2x8xh100-sxm-80gb")
    assert joined.groups[0].tiers == alone.tiers
    (network,) = joined.tiers
    assert network.devices == 28
    assert network.bytes_per_s <= alone.tiers[-1].bytes_per_s
    part = joined.part(joined.groups[:1])
    assert [(tier.name, tier.devices) for tier in part.tiers] == [
        ("nvlink", 8),
        ("network", 16),
        ("network", 28),
    ]
    assert joined.is_mixed
    assert not part.is_mixed


@pytest.mark.parametrize("text", ["local+4xa100-sxm-40gb", "4xa100-sxm-40gb+~/mine"])
def test_only_kinds_of_nodes_are_joined(text: str) -> None:
    with pytest.raises(DocumentError, match="which is no kind of node"):
        resolve_cluster(text)
