"""Evaluation under any plan gives the loss of one process, and leaves training as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.planner.documents.model import ModelGraph
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases, networks
from tests.runtime.ranks import on_ranks

MODEL = cases.transformer()
LAYOUTS = {
    "zero 3": {"data_shard": 2, "zero": 3},
    "zero 1": {"data_shard": 2, "zero": 1},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2},
    "zbv, zero 2": {
        "pipeline": 2,
        "data_shard": 2,
        "zero": 2,
        "schedule": "zbv",
        "virtual_stages": 2,
        "cuts": [1, 2, 1, 1],
    },
    "interleaved": {
        "pipeline": 2,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "cuts": [1, 2, 1, 1],
    },
}


def train_and_evaluate(
    layout: dict[str, Any], model: ModelGraph = MODEL
) -> tuple[list[float], list[float]]:
    engine = token_engine(cases.plan(model, **layout), model, device=torch.device("cpu"))
    trained, evaluated = [], []
    for step in range(3):
        own = [cases.global_tokens(s).chunk(engine.slices)[engine.slice_rank] for s in (step, 9)]
        evaluated.append(engine.evaluate(own[1]).loss)
        trained.append(engine.step(own[0]).loss)
        evaluated.append(engine.evaluate(own[1]).loss)
    return trained, evaluated


def test_the_loss_of_the_next_step_is_known_before() -> None:
    engine = token_engine(cases.plan(MODEL), MODEL, device=torch.device("cpu"))
    batch = cases.global_tokens(0)

    before = engine.evaluate(batch).loss

    assert engine.step(batch).loss == pytest.approx(before, rel=1e-6)
    assert engine.evaluate(batch).loss < before


@pytest.mark.spread(1)
@pytest.mark.long("zbv, zero 2", "zero 1")
@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_plan_evaluates_like_one_process(name: str) -> None:
    layout = LAYOUTS[name]
    alone = train_and_evaluate({})

    ranks = on_ranks(cases.plan(MODEL, **layout).mesh.devices, train_and_evaluate, layout)

    for found in ranks:
        assert found[0] == pytest.approx(alone[0], rel=1e-5)
        assert found[1] == pytest.approx(alone[1], rel=1e-5)


@pytest.mark.ranks
@pytest.mark.matrix
def test_graphs_are_evaluated_through_a_pipeline_too() -> None:
    model = graph_of_factory(f"{networks.__file__}:encoder_decoder", seq_len=cases.SEQ_LEN)
    alone = train_and_evaluate({}, model)

    ranks = on_ranks(2, train_and_evaluate, {"pipeline": 2}, model)

    for found in ranks:
        assert found[1] == pytest.approx(alone[1], rel=1e-5)
