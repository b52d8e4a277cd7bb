"""Modules of any shape are traced, measured, planned from that, and train like one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.profile import Birth, Profile
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.profiler import layer_bytes, layers
from meshwright.profiler.chain import Case, Chain
from meshwright.runtime.engine.factory_module import graph_of_factory
from tests.runtime import cases, chains, whole_networks
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, train

NETWORKS = ("resnet50", "unet", "vit", "encoder_decoder", "two_towers")
CPU = torch.device("cpu")


@functools.cache
def graph(name: str) -> ModelGraph:
    return graph_of_factory(f"{whole_networks.__file__}:{name}", seq_len=cases.SEQ_LEN)


def chain(name: str) -> Chain:
    return Chain(graph(name), seq_len=cases.SEQ_LEN, precision="fp32", tensor=1, device=CPU)


def measured(name: str) -> Profile:
    model = graph(name)
    settings = [
        Case(tensor=1, micro_batch=size, recompute=recompute)
        for size in (1, 2)
        for recompute in ("none", "full")
    ]
    rows = layers.measurements([chain(name)], settings, budget_s=0.0)
    birth = Birth(
        command="c", date="d", host="h", device="cpu", ranks=1, threads_per_rank=1, software={}
    )
    return Profile(model=model.name, model_digest=model.digest, birth=birth, layers=tuple(rows))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [name if name == "unet" else pytest.param(name, marks=pytest.mark.matrix) for name in NETWORKS],
)
def test_a_network_is_measured_cut_planned_and_trains_like_one_process(name: str) -> None:
    model = graph(name)
    plain = cases.plan(model)

    profile = measured(name)
    answer = search(
        Request(
            model, resolve_cluster("local:2"), plain.job, pins=Pins(pipeline=2), profile=profile
        )
    )
    plan = Plan(**{**dict(answer.plan), "training": plain.training})

    assert {m.kind for m in profile.layers} == {layer.kind for layer in model.layers}
    assert all(m.forward_s > 0 and m.backward_s > 0 for m in profile.layers)
    assert len(plan.stages) == 2
    (one,) = on_ranks(1, train, plain, model)
    runs = on_ranks(2, train, plan, model)
    weights = {parameter: value for run in runs for parameter, value in run.weights.items()}
    assert weights.keys() == one.weights.keys()
    for parameter, value in one.weights.items():
        np.testing.assert_allclose(weights[parameter], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.long("resnet50", "unet", "vit", "encoder_decoder")
@pytest.mark.parametrize("name", NETWORKS)
def test_stored_bytes_are_those_that_autograd_saves(name: str) -> None:
    network = chain(name)
    held = layer_bytes.layer_bytes(network, Case(tensor=1, micro_batch=2, recompute="none"))

    tokens, _ = network.batch(2)
    values: tuple[Tensor, ...] = (tokens,)
    for layer, module in network.parts.items():
        inputs = [value.clone() for value in values]
        fresh = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        saved: dict[int, int] = {}
        outside = {p.untyped_storage()._cdata for p in module.parameters()}
        outside.add(tokens.untyped_storage()._cdata)

        def pack(
            tensor: Tensor, saved: dict[int, int] = saved, outside: set[int] = outside
        ) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in outside:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            values = tuple(value.detach() for value in network.run(module, fresh))
        if layer in held and layer != list(network.kinds)[-1]:  # that one has the loss too
            assert held[layer].stored == sum(saved.values()), layer


@pytest.mark.matrix
def test_of_layers_that_are_alike_two_are_run() -> None:
    model = graph_of_factory(f"{chains.__file__}:factory", seq_len=cases.SEQ_LEN)
    network = Chain(model, seq_len=cases.SEQ_LEN, precision="fp32", tensor=1, device=CPU)

    assert list(network.every) == ["0", "1", "2", "3", "4", "5"]
    assert list(network.parts) == ["0", "1", "2", "4", "5"]
    stage = Chain(model, seq_len=16, precision="fp32", device=CPU, layers=["0", "1", "2", "3"])
    assert list(stage.parts) == ["0", "1", "2", "3"]
    assert not stage.whole
