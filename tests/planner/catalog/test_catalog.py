"""The catalogue's figures obey what is known of all hardware, and each says where it is from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshwright.planner import catalog
from meshwright.planner.catalog import (
    accelerator_name,
    accelerators,
    expressions,
    model_config,
    model_name,
    models,
    node_name,
    nodes,
    nodes_of,
    rents,
    source_text,
    sources,
)
from meshwright.planner.catalog.entries import aliases_of, entry_texts
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

NAMED_BY_THE_DESIGN = (
    "v100-sxm-16gb v100-sxm-32gb a10g a100-sxm-40gb a100-sxm-80gb a100-pcie-80gb a800-sxm-80gb l4 "
    "l40s rtx-3090 rtx-4090 rtx-5090 rtx-a5000 rtx-a6000 rtx-6000-ada rtx-pro-6000 h100-sxm-80gb "
    "h100-pcie-80gb h100-nvl h100-hbm2e-96gb h800-sxm-80gb h200-sxm h200-nvl gh200 b200 b300 gb200 "
    "gb300 mi250x mi300x mi325x mi350x mi355x gaudi2 gaudi3"
)
MODELS_NAMED = (
    "gpt2 gpt2-medium gpt2-large gpt2-xl gpt3-175b opt-350m opt-30b llama-2-7b llama-2-13b "
    "llama-2-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b qwen2.5-7b qwen2.5-72b "
    "qwen3-0.6b qwen3-32b gemma-2-9b mistral-7b mixtral-8x7b mixtral-8x22b qwen3-30b-a3b "
    "qwen3-235b-a22b deepseek-v3 bert-large vit-h-14 vit-h demo-4m local-25m"
)
ENTRIES = sorted(accelerators())


def test_what_the_manual_names_is_there() -> None:
    assert [name for name in NAMED_BY_THE_DESIGN.split() if accelerator_name(name) != name] == []
    assert {model_name(name) for name in MODELS_NAMED.split()} <= set(models())
    assert len(accelerators()) >= 20
    assert len(nodes()) >= 15
    assert len(models()) >= 25


@pytest.mark.parametrize("name", ENTRIES)
def test_peaks_are_dense(name: str) -> None:
    """No format more than doubles the next wider one; a sparse figure would quadruple it."""
    peak = accelerators()[name].peak_flops

    for narrow, wide in (("fp8", "bf16"), ("bf16", "tf32"), ("fp16", "tf32")):
        if narrow in peak and wide in peak and accelerators()[name].kind != "gaudi":
            assert peak[narrow] <= 2.05 * peak[wide]  # type: ignore[index]


@pytest.mark.parametrize("name", ENTRIES)
def test_half_precision_is_faster_than_single(name: str) -> None:
    peak = accelerators()[name].peak_flops

    half = peak.get("bf16", peak.get("fp16"))
    assert half is not None
    assert peak.get("fp32", 0.0) < half


def test_geforce_peaks_are_with_fp32_accumulation() -> None:
    assert accelerators()["rtx-4090"].peak_flops["bf16"] == 165.2e12
    assert accelerators()["rtx-5090"].peak_flops["bf16"] == 209.5e12


@pytest.mark.parametrize("name", ENTRIES)
def test_memory_is_near_the_label_in_the_name_and_never_above_it(name: str) -> None:
    label = re.search(r"-(\d+)gb", name)
    if label is None:
        return
    gib = accelerators()[name].memory_bytes / 2**30

    assert 0.90 * int(label[1]) <= gib <= int(label[1])


@pytest.mark.parametrize("name", ENTRIES)
def test_a_curve_is_plausible_and_says_how_sure_it_is(name: str) -> None:
    curve = accelerators()[name].curve

    assert 0.3 <= curve.matmul <= 0.95
    assert 0.2 <= curve.attention_forward <= curve.matmul
    assert curve.attention_backward == pytest.approx(
        curve.attention_forward * 0.63 / 0.73, abs=2e-3
    )
    assert 0.7 <= curve.memory <= 0.95
    assert 1e-6 <= curve.launch_s <= 1e-5
    assert curve.spread >= (0.05 if curve.provenance == "fitted" else 0.1)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_figure_has_a_source(name: str) -> None:
    entry = accelerators()[name]

    needed = {"memory_bytes", "peak_flops", "memory_bytes_per_s", "tdp_w"}
    if entry.host_link_bytes_per_s:
        needed.add("host_link_bytes_per_s")
    if entry.network_bytes_per_s:
        needed.add("network_bytes_per_s")
    assert needed == set(entry.sources)
    assert all(tier.source for tier in entry.tiers)


@pytest.mark.parametrize("name", sorted(nodes()))
def test_a_node_type_is_of_a_known_accelerator_and_says_its_sources(name: str) -> None:
    node = nodes()[name]

    assert accelerator_name(node.accelerator) == node.accelerator
    assert ("host_memory_bytes" in node.sources) == (node.host_memory_bytes is not None)
    assert node.network is None or node.network.source


@pytest.mark.parametrize("name", ENTRIES)
def test_links_do_not_beat_the_memory_and_fractions_do_not_beat_the_link(name: str) -> None:
    entry = accelerators()[name]

    for tier in (*entry.tiers, *([entry.bridge] if entry.bridge else [])):
        assert tier.bytes_per_s < entry.memory_bytes_per_s
        assert all(0 < fraction <= 1 for fraction in tier.fractions.values())
        assert (
            tier.peer_bytes_per_s is None
            or tier.peer_bytes_per_s * (tier.devices - 1) <= tier.bytes_per_s * 1.001
        )


def test_a_mesh_without_switch_carries_its_rate_to_one_peer() -> None:
    tier = accelerators()["mi300x"].tiers[0]

    assert tier.bytes_per_s == 448e9
    assert tier.peer_bytes_per_s == 64e9
    assert accelerators()["h100-sxm-80gb"].tiers[0].peer_bytes_per_s is None


def test_names_and_aliases_mean_one_thing() -> None:
    for entries in (accelerators(), nodes(), models()):
        words = [*entries, *(alias for entry in entries.values() for alias in entry.aliases)]
        assert len({word.lower() for word in words}) == len(words)
    devices = {*accelerators(), *(a for e in accelerators().values() for a in e.aliases)}
    servers = {*nodes(), *(a for e in nodes().values() for a in e.aliases)}
    assert not devices & servers


@pytest.mark.parametrize("kind", ["accelerators", "nodes", "models"])
def test_entries_read_one_by_one_are_those_of_the_whole_file(kind: str) -> None:
    text = Path(catalog.__file__).with_name(f"{kind}.yaml").read_text()
    whole = yaml.safe_load(text)[kind]

    texts = entry_texts(text)

    assert list(texts) == list(whole)
    assert {name: yaml.safe_load(entry) for name, entry in texts.items()} == whole
    aliases = {alias: name for name, entry in whole.items() for alias in entry.get("aliases", ())}
    assert aliases_of(getattr(catalog, kind)()) == aliases


def test_aliases_of_frameworks_are_found_in_their_files() -> None:
    found = catalog.frameworks()

    assert aliases_of(found) == {alias: name for name in found for alias in found[name].aliases}


@pytest.mark.parametrize("name", ENTRIES)
def test_nodes_of_an_accelerator_are_all_that_name_it(name: str) -> None:
    assert list(nodes_of(name)) == [n for n in nodes().values() if n.accelerator == name]


def test_a_request_reads_no_entry_but_its_own() -> None:
    code = (
        "from meshwright.planner import catalog\n"
        "from meshwright.planner.catalog.expressions import resolve_cluster\n"
        "resolve_cluster('8xh100-sxm-80gb')\n"
        "print(*catalog.accelerators()._known)\n"
        "print({node.accelerator for node in catalog.nodes()._known.values()})"
    )

    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert shown.stdout.splitlines() == ["h100-sxm-80gb", "{'h100-sxm-80gb'}"]


def test_sources_are_written_out() -> None:
    """A capital word that stands for a source never reaches a reader."""
    texts = [text for e in accelerators().values() for text in e.sources.values()]
    texts += [e.curve.source for e in accelerators().values()]
    texts += [tier.source or "" for e in accelerators().values() for tier in e.tiers]
    texts += [text for node in nodes().values() for text in node.sources.values()]
    texts += [node.network.source or "" for node in nodes().values() if node.network]

    left = {word for text in texts for word in re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", text)}

    assert left & set(sources()) == set()
    assert {word for word in left if "_" in word} == set()


def test_every_listed_source_is_used() -> None:
    folder = Path(catalog.__file__).parent
    used = "".join(file.read_text() for file in folder.glob("*.yaml") if "sources" not in file.name)
    used += "".join(sources().values())
    used += (folder.parent / "whatif" / "study.py").read_text()  # assumptions of studies
    used += (folder.parent / "costs" / "compute.py").read_text()  # rates under power limits

    assert {word for word in sources() if word not in used} == set()


def test_a_source_without_capital_words_stays_as_it_is() -> None:
    assert source_text("as h100-sxm-80gb") == "as h100-sxm-80gb"


@pytest.mark.parametrize("rent", rents(), ids=lambda rent: f"{rent.provider}-{rent.instance}")
def test_a_rent_is_of_a_known_device_and_dated(rent: catalog.Rent) -> None:
    assert accelerator_name(rent.accelerator) == rent.accelerator
    assert rent.date
    prices = (
        rent.on_demand_usd_per_device_hour,
        rent.spot_usd_per_device_hour,
        rent.reserved_usd_per_device_hour,
    )
    assert all(0.1 < price < 30 for price in prices if price is not None)
    assert any(price is not None for price in prices)


def test_a_rent_without_its_host_prices_no_node() -> None:
    parts = [rent for rent in rents() if not rent.whole_node]

    assert {rent.provider for rent in parts} == {"gcp"}
    assert resolve_cluster("a3-highgpu-8g").price is None


def test_energy_of_a_node_is_what_was_measured_at_the_wall() -> None:
    """Eight H100 drew 6.85 to 7.03 kW in MLPerf training runs."""
    node_w = 8 * 700 * catalog.facility().node_power_over_tdp.value

    assert 6_800 < node_w < 7_100
    assert catalog.facility().carbon_g_per_kwh.by_country["FRA"] == 56.0


def test_a_spot_price_above_on_demand_is_refused() -> None:
    first = next(r for r in rents() if r.spot_usd_per_device_hour)

    with pytest.raises(DocumentError, match="a column has slipped"):
        catalog._RentsFile.of(
            {"rents": [first.model_dump() | {"spot_usd_per_device_hour": 1000.0}]}
        )


def test_a_configuration_can_be_changed_without_harm() -> None:
    model_config("gpt2")["n_layer"] = 1

    assert model_config("gpt2")["n_layer"] == 12


@pytest.mark.parametrize("find", [accelerator_name, node_name, model_name])
def test_an_unknown_name_is_one_message(find: object) -> None:
    with pytest.raises(DocumentError, match="there is no"):
        find("nothing-like-it")  # type: ignore[operator]


def test_an_accelerator_is_added_by_adding_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = catalog.accelerators()["h100-sxm-80gb"]
    twice = {name: 2 * rate for name, rate in entry.peak_flops.items()}
    made_up = entry.model_copy(
        update={"aliases": (), "driver_names": (), "peak_flops": twice, "architecture": "new"}
    )
    found = {**catalog.accelerators(), "x1000": made_up}
    for module in (catalog, expressions):
        monkeypatch.setattr(module, "accelerators", lambda: found)
    model, job = resolve_model("llama-3.1-8b"), Job(seq_len=2048, global_batch=64)

    new, old = (
        search(Request(model, resolve_cluster(name), job)).prediction
        for name in ("8xx1000", "8xh100")
    )

    assert new.step_time_s < old.step_time_s


def test_every_accelerator_of_the_catalogue_has_rates_of_its_own_generation() -> None:
    assert all(entry.architecture for entry in catalog.accelerators().values())


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h100-hbm2e-96gb", 95.0),
        ("a100-sxm-80gb", 79.15),
        ("h100-sxm-80gb", 79.11),
        ("rtx-4090", 23.64),
        ("l40", 44.40),
        ("v100-sxm-32gb", 31.74),
    ],
)
def test_capacity_is_what_cuda_reports_as_total_in_published_logs(name: str, gib: float) -> None:
    assert accelerators()[name].memory_bytes / 2**30 == pytest.approx(gib, abs=0.01)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_capacity_without_a_log_has_a_range_around_it(name: str) -> None:
    entry = accelerators()[name]
    is_derived = "CUDA reports" in entry.sources["memory_bytes"]
    assert (entry.memory_range_bytes is not None) == is_derived
    low, high = entry.memory_range_bytes or (entry.memory_bytes - 1, entry.memory_bytes + 1)
    assert low < entry.memory_bytes < high < 1.02 * low
