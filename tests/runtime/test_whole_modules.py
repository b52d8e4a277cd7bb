"""Modules as one writes them are cut where their blocks are, and train like one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases, chains, placed, whole_networks
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, train

NETWORKS = ("resnet50", "unet", "vit", "encoder_decoder", "two_towers")


@functools.cache
def graph(name: str) -> ModelGraph:
    return graph_of_factory(f"{whole_networks.__file__}:{name}", seq_len=cases.SEQ_LEN)


@pytest.mark.matrix
def test_a_u_net_hands_on_its_skips() -> None:
    layers = graph("unet").layers
    sizes = {layer.name: layer.trace.output_bytes for layer in layers if layer.trace}

    # Channels of 16, 4, 1, 1, 4 and 16 pixels; a way up reads what the way down left.
    table, first, middle, last = 8 * 16, 12 * 4, 16, 8 * 16
    assert sizes["downs.0"] == 4 * (table + first)
    assert sizes["middle"] == 4 * (table + first + middle)
    assert sizes["ups.0"] == 4 * (table + first)
    assert sizes["ups.1"] == 4 * last


@pytest.mark.matrix
def test_blocks_that_are_alike_are_one_kind() -> None:
    kinds = [layer.kind for layer in graph("resnet50").layers if "bottleneck" in layer.kind]

    assert len(kinds) == 16
    # The first of each stage, the others of each, and the last one with what runs behind it.
    assert len(set(kinds)) == 2 * 4 + 1


def test_a_forward_that_looks_at_values_is_refused_by_its_line() -> None:
    with pytest.raises(DocumentError, match=r"whole_networks\.py:\d+: Undecided cannot be run"):
        graph("undecided")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [name if name == "unet" else pytest.param(name, marks=pytest.mark.matrix) for name in NETWORKS],
)
def test_two_stages_train_like_one_process(name: str) -> None:
    model = graph(name)
    (one,) = on_ranks(1, train, cases.plan(model), model)

    runs = on_ranks(2, train, cases.plan(model, pipeline=2), model)

    weights = {parameter: value for run in runs for parameter, value in run.weights.items()}
    assert weights.keys() == one.weights.keys()
    for parameter, value in one.weights.items():
        np.testing.assert_allclose(weights[parameter], value, rtol=TOLERANCE, atol=TOLERANCE)
    assert runs[0].losses == pytest.approx(one.losses, rel=TOLERANCE)


@functools.cache
def chain_graph() -> ModelGraph:
    return graph_of_factory(f"{chains.__file__}:factory", seq_len=cases.SEQ_LEN)


@functools.cache
def placed_graph(name: str) -> ModelGraph:
    return graph_of_factory(f"{placed.__file__}:{name}", seq_len=cases.SEQ_LEN)


@pytest.mark.parametrize("name", ["branches", "Whole"])
@pytest.mark.long("branches")
def test_what_ranks_can_share_of_a_module_is_found(name: str) -> None:
    model = placed_graph(name)
    layers = {layer.name: layer for layer in model.layers}
    experts = layers["second"].experts

    assert model.positions == cases.SEQ_LEN
    assert experts is not None
    assert (experts.count, experts.hidden) == (4, 16)
    # Of each token two copies of 16 features go to experts, in fp32.
    assert experts.exchanged_bytes == cases.SEQ_LEN * 2 * 16 * 4
    assert layers["first"].experts is None
    keys = [layers[name].keys_bytes for name in ("first", "second", "head")]
    assert keys == [cases.SEQ_LEN * 2 * 16 * 4] * 2 + [None]
    logits = layers["head"].logits
    assert logits is not None
    assert (logits.rows, logits.width, logits.outputs) == (cases.SEQ_LEN, 16, 64)
    assert chain_graph().positions is None


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("Whole", {"context": 2}),
        pytest.param("branches", {"context": 2, "expert": 2, "zero": 1}, marks=pytest.mark.matrix),
        pytest.param(
            "branches", {"data_shard": 2, "expert": 2, "zero": 2}, marks=pytest.mark.matrix
        ),
    ],
)
def test_positions_and_experts_of_a_file_are_divided(name: str, mesh: dict[str, int]) -> None:
    model = placed_graph(name)
    (one,) = on_ranks(1, train, cases.plan(model), model)

    runs = on_ranks(2, train, cases.plan(model, **mesh), model)

    weights = {name: value for run in runs for name, value in run.weights.items()}
    assert weights.keys() == one.weights.keys()
    for parameter, value in one.weights.items():
        np.testing.assert_allclose(weights[parameter], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_file_without_positions_is_not_divided_over_them() -> None:
    model = chain_graph()

    with pytest.raises(LaunchError, match="gets no positions with its tokens"):
        token_engine(cases.plan(model, context=2), model, device=torch.device("cpu"))
    with pytest.raises(LaunchError, match="no module of ModuleGraph has gate_up_proj"):
        token_engine(
            cases.plan(model, expert=2, data_shard=2, zero=1), model, device=torch.device("cpu")
        )
