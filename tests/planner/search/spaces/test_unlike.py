"""Layers of which few are alike: one stage a rank, searched, predicted and simulated."""

from __future__ import annotations

import random

import pytest

from meshwright.planner.catalog.expressions import resolve_cluster
from meshwright.planner.costs.predict import predict
from meshwright.planner.documents.model import Layer, ModelGraph
from meshwright.planner.documents.plan import Job
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import Pins
from meshwright.planner.requests.request import Request
from meshwright.planner.schedules import SCHEDULES
from meshwright.planner.search.partition.stage_counts import run_of
from meshwright.planner.search.search import search
from tests.planner.search.spaces.test_graph import layer, unet

JOB = Job(seq_len=64, global_batch=16, precision="fp32")
FOUR = resolve_cluster("4xa100-sxm-40gb")


def unlike_chain(count: int, seed: int = 0) -> ModelGraph:
    """Layers of three kinds in no order."""
    rng = random.Random(seed)
    kinds = {"a": 0.6, "b": 1.0, "c": 1.7}
    layers = []
    for at in range(count):
        kind = rng.choice(list(kinds))
        made: Layer = layer(f"l{at}", kind=kind, scale=kinds[kind], output=20)
        layers.append(made)
    return ModelGraph(name="unlike", layers=tuple(layers))


MODELS = pytest.mark.parametrize("model", [unlike_chain(16), unet(3)], ids=lambda model: model.name)


@MODELS
def test_a_pipeline_of_unlike_layers_has_one_stage_a_rank(model: ModelGraph) -> None:
    assert model.edges or run_of(model) is None

    answer = search(Request(model, FOUR, JOB, Pins(pipeline=4)))

    assert answer.plan.virtual_stages == 1
    assert len(answer.plan.stages) == 4
    answer.plan.check_model(model)
    assert answer.closed_form_bound_s == pytest.approx(answer.closed_form.objective_s, rel=1e-9)
    assert predict(answer.plan, model, FOUR) == answer.prediction


SEVERAL = [
    *({"schedule": name} for name, one in SCHEDULES.items() if one.several_stages),
    {"virtual_stages": 2},
    {"virtual_stages": 4},
]


@pytest.mark.spread(2)
@MODELS
@pytest.mark.parametrize("pins", SEVERAL, ids=str)
def test_several_stages_a_rank_of_unlike_layers_are_refused_with_a_way_out(
    model: ModelGraph, pins: dict[str, object]
) -> None:
    request = Request(model, FOUR, JOB, Pins(pipeline=2, **pins))  # type: ignore[arg-type]

    with pytest.raises(DocumentError, match=r"one stage a rank.*Leave it out.*1f1b") as found:
        search(request)

    asked = pins.get("schedule") or pins["virtual_stages"]
    assert f"={asked}: {model.name}" in str(found.value)
    single = {name for name, one in SCHEDULES.items() if not one.several_stages}
    named = str(found.value).split("ask for one of ")[1].split(", ")
    assert set(named) == single
