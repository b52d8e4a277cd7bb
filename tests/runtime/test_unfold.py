"""A traced module's layers compute and train what the module does, and cuts lie where they must."""

from __future__ import annotations

import doctest
import functools

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from planner.documents.model import ModelGraph
from planner.errors import DocumentError
from runtime import unfold
from runtime.factory import graph_of_factory
from tests.runtime import cases, whole_networks
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, train

NETWORKS = ("resnet50", "unet", "vit", "encoder_decoder", "two_towers")


@functools.cache
def graph(name: str) -> ModelGraph:
    return graph_of_factory(f"{whole_networks.__file__}:{name}", seq_len=cases.SEQ_LEN)


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = getattr(whole_networks, name)()
    return module


@pytest.mark.parametrize("name", NETWORKS)
def test_the_layers_together_compute_what_the_module_does(name: str) -> None:
    module = made(name)
    tokens = torch.randint(0, 64, (3, cases.SEQ_LEN))
    layers = unfold.layers_of(module)

    held = {"tokens": tokens}
    for layer, (piece, *reads) in layers.items():
        held[layer] = piece(*(held[read] for read in reads))

    torch.testing.assert_close(held[list(layers)[-1]], module(tokens), rtol=0, atol=0)
    assert nx.is_directed_acyclic_graph(unfold.graph_of(layers))
    inside = {id(p) for piece, *_ in layers.values() for p in piece.parameters()}
    assert inside == {id(p) for p in module.parameters()}


def test_a_residual_network_can_be_cut_behind_every_block() -> None:
    layers = unfold.layers_of(made("resnet50"))

    cuts = unfold.cut_points(unfold.graph_of(layers))

    blocks = [name for name in layers if name.startswith("stages_")]
    assert len(blocks) == 3 + 4 + 6 + 3
    assert set(blocks) <= set(cuts)


def test_a_u_net_cannot_be_cut_between_its_skips() -> None:
    layers = unfold.layers_of(made("unet"))

    cuts = unfold.cut_points(unfold.graph_of(layers))

    assert not {"downs_0", "downs_1", "middle", "ups_0"} & set(cuts)
    assert "ups_1" in cuts


def test_blocks_that_are_alike_are_one_kind() -> None:
    kinds = [layer.kind for layer in graph("resnet50").layers if "bottleneck" in layer.kind]

    assert len(kinds) == 16
    assert len(set(kinds)) == 8  # the first of each stage, and the others of each


def test_a_forward_that_looks_at_values_is_refused_with_a_way_out() -> None:
    with pytest.raises(DocumentError, match="return a dict of its layers"):
        unfold.layers_of(made("undecided"))


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("resnet50", "unet") else pytest.param(name, marks=pytest.mark.matrix)
        for name in NETWORKS
    ],
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


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(unfold).failed == 0
