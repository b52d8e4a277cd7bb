"""Networks that branch train alike in one process and over pipelines that cut across branches."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.cut_tensors import crossings
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Job, PlacedLayer, Plan, ScheduleName, Stage
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.search.search import search
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases, networks, test_groups
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, Run, train

NETWORKS = ("unet", "resnet", "vit", "encoder_decoder", "two_towers")


@functools.cache
def graph(name: str) -> ModelGraph:
    return graph_of_factory(f"{networks.__file__}:{name}", seq_len=cases.SEQ_LEN)


@functools.cache
def alone(name: str) -> Run:
    return on_ranks(1, train, cases.plan(graph(name)), graph(name))[0]


def equals_one_process(plan: Plan, name: str) -> None:
    one = alone(name)

    runs = on_ranks(plan.mesh.devices, train, plan, graph(name))

    weights = {parameter: value for run in runs for parameter, value in run.weights.items()}
    assert weights.keys() == one.weights.keys()
    for parameter, value in one.weights.items():
        np.testing.assert_allclose(weights[parameter], value, rtol=TOLERANCE, atol=TOLERANCE)
    for run in runs:
        assert run.losses == pytest.approx(one.losses, rel=TOLERANCE)
        assert run.norms == pytest.approx(one.norms, rel=TOLERANCE)


@pytest.mark.spread(1)
@pytest.mark.long("resnet-1f1b", "two_towers-1f1b")
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "1f1b") for name in NETWORKS),
        ("vit", "gpipe"),
        *(
            pytest.param(name, "gpipe", marks=pytest.mark.matrix)
            for name in NETWORKS
            if name != "vit"
        ),
    ],
)
def test_two_stages_train_like_one_process(name: str, schedule: str) -> None:
    equals_one_process(cases.plan(graph(name), pipeline=2, schedule=schedule), name)


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("unet", {"pipeline": 3}, marks=pytest.mark.matrix),
        ("unet", {"pipeline": 2, "recompute": "full"}),
        ("encoder_decoder", {"pipeline": 4}),
        pytest.param(
            "encoder_decoder", {"pipeline": 2, "recompute": "selective"}, marks=pytest.mark.matrix
        ),
        ("two_towers", {"pipeline": 2, "data_shard": 2, "zero": 3}),
        ("resnet", {"pipeline": 2, "data_replicate": 2}),
        ("unet", {"pipeline": 2, "data_shard": 2, "zero": 1, "offload": "optimizer"}),
        ("unet", {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved"}),
        ("two_towers", {"pipeline": 2, "schedule": "zb-h1"}),
        ("encoder_decoder", {"pipeline": 2, "virtual_stages": 2, "schedule": "zbv"}),
        ("unet", {"data_shard": 2, "zero": 3}),
        pytest.param(
            "unet",
            {"pipeline": 2, "schedule": "zb-h1", "activations": "offload"},
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            "two_towers",
            {"pipeline": 2, "recompute": "full", "activations": "offload"},
            marks=pytest.mark.matrix,
        ),
    ],
    ids=str,
)
def test_other_layouts_train_like_one_process(name: str, layout: dict[str, Any]) -> None:
    equals_one_process(cases.plan(graph(name), **layout), name)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [pytest.param("two_towers", marks=pytest.mark.matrix), "unet"])
@pytest.mark.matrix
def test_branches_on_two_kinds_of_devices_train_like_one_process(name: str) -> None:
    plain = cases.plan(graph(name))
    pins = Pins(pipeline=3, data=1, tensor=1, micro_batch=1, schedule="1f1b")
    found = search(Request(graph(name), test_groups.cluster(1, 2), plain.job, pins=pins)).plan
    assert {stage.group for stage in found.stages} == {"fast", "slow"}

    equals_one_process(Plan(**{**dict(found), "training": plain.training}), name)


@pytest.mark.ranks
@pytest.mark.matrix
def test_activations_in_8_bits_stay_near_one_process() -> None:
    plan = cases.plan(graph("unet"), pipeline=2, activations="compress")

    runs = on_ranks(2, train, plan, graph("unet"))

    for run in runs:
        assert run.losses == pytest.approx(alone("unet").losses, rel=1e-3)


@pytest.mark.ranks
@pytest.mark.matrix
def test_layers_may_be_taken_in_any_order_that_runs() -> None:
    model = graph("two_towers")
    order = ["pixels", "picture0", "words", "picture1", "text0", "text1", "both"]
    plain = cases.plan(model, pipeline=2, cuts=[4, 3])
    stages = tuple(
        Stage(layers=tuple(PlacedLayer(layer=name) for name in part))
        for part in (order[:4], order[4:])
    )
    plan = Plan(**{**dict(plain), "stages": stages})

    plan.check_model(model)
    equals_one_process(plan, "two_towers")


def test_a_plan_that_turns_an_edge_round_is_refused() -> None:
    model = graph("unet")
    plain = cases.plan(model, pipeline=2)
    backwards = Plan(**{**dict(plain), "stages": plain.stages[::-1]})

    with pytest.raises(
        DocumentError, match="'up2' is placed before 'down1', whose output it reads"
    ):
        backwards.check_model(model)


def test_one_process_computes_what_the_modules_compute() -> None:
    engine = token_engine(cases.plan(graph("unet")), graph("unet"), device=torch.device("cpu"))
    tokens = cases.global_tokens(0)

    held = {"tokens": tokens[:, :-1]}
    for name, (_, *reads) in networks.unet().items():  # type: ignore[misc]
        held[name] = engine.units[name](*(held[one] for one in reads))
    expected = nn.functional.cross_entropy(held["head"].flatten(0, 1), tokens[:, 1:].flatten())

    assert engine.step(tokens).loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_graph_has_the_users_names_edges_and_traced_costs() -> None:
    model = graph("unet")

    assert [layer.name for layer in model.layers] == list(networks.unet())
    assert ("pixels", "up1") in model.graph.edges
    assert set(model.graph.predecessors("up2")) == {"middle", "down1"}
    up = next(layer for layer in model.layers if layer.name == "up1")
    assert up.parameters == 8 * (20 * 9 + 1)
    assert up.trace is not None
    assert up.trace.forward_flops == 2 * 16 * 8 * 20 * 9
    assert up.trace.output_bytes == 4 * 8 * 16
    # The second block of text is the first one's twin; so is no convolution of another shape.
    kinds = {layer.name: layer.kind for layer in graph("two_towers").layers}
    assert kinds["text0"] == kinds["text1"] != kinds["picture0"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two_ends", "nobody reads b, c; one module alone, the last, gives the loss"),
        ("backwards", "'b' reads 'a', which is not defined before it; before it are tokens"),
        ("nameless", r"'a' is not \(module, name of what it reads, ...\)"),
        ("reserved", "'forward' is taken; choose another name"),
        ("pair", "Pair returns tuple, no tensor"),
    ],
)
def test_what_is_no_graph_is_refused(name: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        graph_of_factory(f"{networks.__file__}:{name}", seq_len=cases.SEQ_LEN)


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("unet", "1f1b"),
        ("encoder_decoder", "1f1b"),
        ("two_towers", "zb-h1"),
    ],
)
def test_what_the_search_plans_trains_like_one_process(name: str, schedule: ScheduleName) -> None:
    plain = cases.plan(graph(name))
    machine = resolve_cluster("local:2")
    found = search(
        Request(graph(name), machine, plain.job, pins=Pins(pipeline=2, schedule=schedule))
    )
    plan = Plan(**{**dict(found.plan), "training": plain.training})

    assert plan.schedule == schedule
    assert found.closed_form_bound_s == pytest.approx(found.closed_form.objective_s, rel=1e-9)
    equals_one_process(plan, name)


@pytest.mark.matrix
def test_the_network_of_the_documents_can_be_planned(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "plan.md").read_text()
    (block,) = re.findall(r"```python\n(# unet\.py\n.*?)```", text, flags=re.DOTALL)
    (tmp_path / "unet.py").write_text(block)
    before = list(sys.path)
    try:
        model = graph_of_factory(f"{tmp_path}/unet.py:factory", seq_len=128)
    finally:
        sys.path[:] = before

    job = Job(seq_len=128, global_batch=16, precision="fp32")
    answer = search(Request(model, resolve_cluster("local:2"), job, pins=Pins(pipeline=2)))

    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    names = [[item.layer for item in stage.layers] for stage in answer.plan.stages]
    crossing, held = set(crossings(model, names)[0]), set(names[0])
    assert crossing
    assert crossing == {a for a, b in model.graph.edges if a in held and b not in held}
