"""Tokens sent once to each node: what moves by hand, where the search has it, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.planner.architectures.parameters import graph_of
from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.costs.collectives import fastest_relay
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.cluster import LinkTier
from meshwright.planner.documents.plan import Job, Layout
from meshwright.planner.frameworks.native_limits import obstacle
from meshwright.planner.operators.expert_routing import Routing, routing_of
from meshwright.planner.operators.kernels import MODULES
from meshwright.planner.operators.layer_operators import table
from meshwright.planner.operators.operator_table import ManySettings, Setting
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search

MIXTRAL = resolve_model("mixtral-8x7b")
BLOCK = next(layer for layer in MIXTRAL.layers if layer.repeat > 1)
SENT = Setting(micro_batch=1, seq_len=4096, expert=8, kernels=replace(MODULES, expert_spread=0.0))
RELAYED = replace(SENT, hierarchical_all_to_all=4)
JOB = Job(seq_len=2048, global_batch=64)


def test_experts_multiply_and_keep_the_same_rows() -> None:
    sent, relayed = (table(MIXTRAL, BLOCK, one) for one in (SENT, RELAYED))

    assert relayed.forward_flops == pytest.approx(sent.forward_flops, rel=1e-12)
    assert relayed.stored_bytes("none") == pytest.approx(sent.stored_bytes("none"), rel=1e-12)


def test_many_settings_are_each_alone() -> None:
    places = [
        replace(RELAYED, expert=ranks, hierarchical_all_to_all=near)
        for ranks, near in ((8, 4), (8, 2), (4, 2))
    ]

    together = table(MIXTRAL, BLOCK, ManySettings.framework(places))
    for at, one in enumerate(places):
        alone = table(MIXTRAL, BLOCK, one)
        for each, operator in zip(together.operators, alone.operators, strict=True):
            if operator.axis.startswith("experts_"):
                assert each.moved_bytes[at] == pytest.approx(operator.moved_bytes)  # type: ignore[index]


@pytest.mark.parametrize(
    ("pins", "hierarchical_all_to_all"),
    [({}, 4), ({"dispatch": "alltoall"}, None), ({"hierarchical_all_to_all": 2}, 2)],
)
@pytest.mark.long("pins2-2")
def test_experts_of_several_nodes_are_sent_to_once_unless_it_is_pinned(
    pins: dict[str, object], hierarchical_all_to_all: int | None
) -> None:
    cluster = resolve_cluster("2x4xh100-sxm-80gb")
    fixed = Pins(expert=8, tensor=1, context=1, pipeline=1, zero=3, **pins)  # type: ignore[arg-type]

    a = resolve_model("qwen3-30b-a3b").architecture
    assert a is not None
    model = graph_of(a.model_copy(update={"layers": 2}), name="two-blocks")
    plan = search(Request(model, cluster, JOB, pins=fixed)).plan

    assert plan.hierarchical_all_to_all == hierarchical_all_to_all
    assert (f"hierarchical_all_to_all={hierarchical_all_to_all}" in plan.layout.text()) == (
        hierarchical_all_to_all is not None
    )
    if not pins:
        plain = plan.model_copy(update={"hierarchical_all_to_all": None})
        each, once = (predict(one, model, cluster).step_time_s for one in (plain, plan))
        assert once < each


def test_tokens_are_not_handed_on_inside_a_node_or_where_links_are_alike() -> None:
    assert MIXTRAL.architecture is not None and MIXTRAL.architecture.experts is not None
    routing = routing_of(MIXTRAL.architecture.experts)
    near = LinkTier(name="near", devices=4, latency_s=1e-6, bytes_per_s=400e9)
    far = LinkTier(name="far", devices=16, latency_s=1e-6, bytes_per_s=50e9)
    alike = near.model_copy(update={"bytes_per_s": 50e9})
    sizes = {"copy_bytes": 3e7, "devices": 16}

    assert fastest_relay((near, far), routing, ranks=8, **sizes) == 4  # type: ignore[arg-type]
    assert fastest_relay((near, far), routing, ranks=4, **sizes) is None  # type: ignore[arg-type]
    assert fastest_relay((alike, far), routing, ranks=8, **sizes) is None  # type: ignore[arg-type]
    # Of many experts a token has several on each node.
    assert fastest_relay((alike, far), Routing(256, 8, 8, 4), ranks=8, **sizes) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"expert": 1}, "hierarchical_all_to_all: is 2, and experts have no ranks of their own"),
        (
            {"dispatch": "allgather"},
            "hierarchical_all_to_all: is 2, and allgather brings all tokens to all ranks",
        ),
        (
            {"hierarchical_all_to_all": 8},
            "hierarchical_all_to_all: is 8; it divides the 8 ranks of experts",
        ),
        (
            {"hierarchical_all_to_all": 3},
            "hierarchical_all_to_all: is 3; it divides the 8 ranks of experts",
        ),
        (
            {"hierarchical_all_to_all": 1},
            "hierarchical_all_to_all: is 1; it divides the 8 ranks of experts",
        ),
    ],
)
def test_what_no_ranks_can_do_is_refused(changes: dict[str, object], why: str) -> None:
    layout = Layout(data_shard=8, zero=1, expert=8, hierarchical_all_to_all=2)

    assert obstacle(MIXTRAL, JOB, layout) is None
    assert str(obstacle(MIXTRAL, JOB, replace(layout, **changes))).startswith(why)  # type: ignore[arg-type]
