"""Figures that searches have in common are those that each works out on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.planner.catalog import framework
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.cost_cache import FigureBasis, FigureStore, KindFigures
from meshwright.planner.costs.layer_costs import LayerFigures
from meshwright.planner.costs.layout_costs import CostTables
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

MODEL = resolve_model("llama-3.1-8b")
JOB = Job(seq_len=4096, global_batch=64)


def request(cluster: ClusterSpec, name: str = "megatron") -> Request:
    """Return what is asked of one cluster."""
    return Request(MODEL, cluster, JOB, framework=framework(name))


def some_layouts(devices: int) -> list[Layout]:
    """Return layouts that use all devices and differ in what layers depend on."""
    return [
        Layout(tensor=tensor, data_shard=devices // tensor, zero=1, micro_batch=size)
        for tensor in (1, 2, 4, 8)
        for size in (1, 2)
    ]


def same(one: KindFigures, other: KindFigures) -> bool:
    """Whether two tables of figures have the same numbers."""
    return one.keys() == other.keys() and all(
        np.array_equal(np.broadcast_to(getattr(a, name), 8), np.broadcast_to(getattr(b, name), 8))
        for kind in one
        for a, b in zip(one[kind], other[kind], strict=True)
        for name in a.__dataclass_fields__
    )


def test_figures_of_a_store_are_those_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FigureStore()
    clusters = [resolve_cluster(f"{nodes}x8xh100-sxm-80gb") for nodes in (5, 6, 8)]
    for cluster in clusters[:2]:
        CostTables(request(cluster), store=store).figures_together(some_layouts(cluster.devices))
    alone = CostTables(request(clusters[2])).figures_together(some_layouts(64))
    monkeypatch.setattr(LayerFigures, "_computed_figures", None)  # nothing is left to work out

    shared = CostTables(request(clusters[2]), store=store).figures_together(some_layouts(64))

    assert same(shared, alone)


def test_what_is_new_is_worked_out_beside_what_is_known() -> None:
    store, cluster = FigureStore(), resolve_cluster("4x8xh100-sxm-80gb")
    layouts = some_layouts(32)
    CostTables(request(cluster), store=store).figures_together(layouts[5:2:-1])

    shared = CostTables(request(cluster), store=store).figures_together(layouts)

    assert same(shared, CostTables(request(cluster)).figures_together(layouts))


def test_clusters_of_other_devices_links_frameworks_and_of_twice_the_size_share_nothing() -> None:
    store, plain = FigureStore(), resolve_cluster("4x8xh100-sxm-80gb")
    faster = tuple(tier.model_copy(update={"latency_s": 0.0}) for tier in plain.tiers)
    tables = [
        CostTables(request(cluster, name))
        for cluster, name in (
            (plain, "megatron"),
            (plain, "deepspeed"),
            (plain.model_copy(update={"tiers": faster}), "megatron"),
            (resolve_cluster("4x8xh200-sxm"), "megatron"),
            (resolve_cluster("8x8xh100-sxm-80gb"), "megatron"),
        )
    ]

    rows = [
        store.rows(
            FigureBasis.of_cluster(MODEL, one.cluster, one.rates, ("none", "selective", "full"))
        )
        for one in tables
    ]

    assert len({id(one) for one in rows}) == 5


@pytest.mark.matrix
def test_a_search_with_a_store_finds_what_it_finds_without() -> None:
    store = FigureStore()
    found = {}
    for nodes in (2, 3):
        asked = request(resolve_cluster(f"{nodes}x8xh100-sxm-80gb"), "torchtitan")
        asked = replace(asked, job=replace(JOB, global_batch=96))
        found[nodes] = search(asked, store=store), search(asked)

    for shared, alone in found.values():
        assert shared.plan == alone.plan
        assert shared.prediction == alone.prediction
        assert shared.certificate == alone.certificate
