"""PipeDream-2BW trains as its rule says: one process that keeps old weights is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.schedules import schedule
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.factory_module import graph_of_factory
from meshwright.runtime.engine.pipedream_2bw import WeightVersions
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases, networks
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, Run, errors, train

CPU = torch.device("cpu")
STEPS = 6


def weights_of(engine: Engine) -> dict[str, np.ndarray]:
    state = engine.state().items()
    return {name: value.numpy().copy() for name, value in state if name.startswith("model.")}


def simulated(graph: ModelGraph, steps: int = STEPS) -> Run:
    """W(k+1) = W(k) + AdamW's move by the gradient of step k at W(max(0, k-1)), in one process."""
    engine = token_engine(cases.plan(graph), graph, device=CPU)
    parameters = [p for layer in engine.units.values() for p in layer.parameters()]
    history = [[p.detach().clone() for p in parameters]]
    losses, norms = [], [0.0]
    for step in range(steps):
        tokens = cases.global_tokens(step)
        put(parameters, history[max(0, step - 1)])
        engine.forward_backward(tokens)
        put(parameters, history[-1])
        result = engine.optimizer_step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        history.append([p.detach().clone() for p in parameters])
    return Run(losses, norms[:steps], weights_of(engine))


@torch.no_grad()
def put(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"pipeline": 2}),
    ({}, {"pipeline": 2, "micro_batches": 2, "recompute": "full"}),
    ({}, {"pipeline": 2, "recompute": "selective", "activations": "offload", "micro_batches": 2}),
    ({}, {"pipeline": 2, "offload": "optimizer"}),
    ({"tied_embeddings": True}, {"pipeline": 2}),
]
DEEP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"pipeline": 4}),
    ({}, {"pipeline": 4, "micro_batches": 8, "recompute": "full"}),
    ({}, {"pipeline": 2, "data_replicate": 2, "micro_batches": 2}),
]


def stale(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Run]:
    runs = []
    for model, layout in rows:
        graph = cases.transformer(**model)
        plan = cases.plan(graph, schedule="pipedream-2bw", **layout)
        runs.append(train(plan, graph, STEPS))
    return runs


@pytest.mark.long("4")
@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "rows"), [(2, ROWS), (4, DEEP)], ids=["2", "4"])
def test_weights_are_those_of_the_stale_rule(
    ranks: int, rows: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    per_rank = on_ranks(ranks, stale, rows)

    for index, (model, layout) in enumerate(rows):
        found = errors([runs[index] for runs in per_rank], simulated(cases.transformer(**model)))
        assert max(found.values()) < TOLERANCE, (layout, found)


@pytest.mark.ranks
@pytest.mark.matrix
def test_stages_between_which_several_tensors_cross_follow_the_rule() -> None:
    graph = graph_of_factory(f"{networks.__file__}:unet", seq_len=cases.SEQ_LEN)
    plan = cases.plan(graph, schedule="pipedream-2bw", pipeline=2)

    runs = on_ranks(2, train, plan, graph, 3)

    found = errors(runs, simulated(graph, 3))
    assert all(error < TOLERANCE for error in found.values()), found


def test_the_rule_differs_from_training_without_staleness() -> None:
    """Else the test above could not tell them apart."""
    graph = cases.transformer()

    found = errors([train(cases.plan(graph), graph, STEPS)], simulated(graph))

    assert found["weights"] > 100 * TOLERANCE


def interrupted(asked_after: list[int]) -> Run:
    """Train, and ask for the state (which drains the pipeline) after some steps."""
    graph = cases.transformer()
    plan = cases.plan(graph, schedule="pipedream-2bw", pipeline=2)
    engine = token_engine(plan, graph, device=CPU)
    losses = []
    for step in range(STEPS):
        losses.append(engine.step(cases.global_tokens(step)).loss)
        if step in asked_after:
            assert engine.steps <= step + 1
            engine.state()
            assert engine.steps == step + 1
            engine.evaluate(cases.global_tokens(99))
    return Run(losses, [0.0] * STEPS, weights_of(engine))


@pytest.mark.spread(1)
@pytest.mark.ranks
@pytest.mark.parametrize("asked_after", [[0], [1, 3], [0, 1, 2, 3, 4]])
@pytest.mark.matrix
def test_draining_changes_no_number(asked_after: list[int]) -> None:
    expected = simulated(cases.transformer())

    runs = on_ranks(2, interrupted, asked_after)

    found = errors(runs, expected)
    assert max(found["loss"], found["weights"]) < TOLERANCE


def taking_turns() -> list[Run]:
    """Train two engines that never drain, and one that does between their steps."""
    graph = cases.transformer()
    engines = [
        token_engine(cases.plan(graph, schedule=schedule, pipeline=2), graph, device=CPU)
        for schedule in ("pipedream-2bw", "1f1b", "pipedream-2bw")
    ]
    losses: list[list[float]] = [[], [], []]
    for step in range(3):
        for engine, found in zip(engines, losses, strict=True):
            found.append(engine.step(cases.global_tokens(step)).loss)
            engine.evaluate(cases.global_tokens(99))
    return [
        Run(found, [0.0] * 3, weights_of(engine))
        for engine, found in zip(engines, losses, strict=True)
    ]


@pytest.mark.ranks
@pytest.mark.matrix
def test_engines_of_one_process_take_turns() -> None:
    """What one has under way between its steps is no message of another."""
    graph = cases.transformer()
    plain = train(cases.plan(graph), graph, 3)

    runs = on_ranks(2, taking_turns)

    for at, expected in enumerate((simulated(graph, 3), plain, simulated(graph, 3))):
        found = errors([of_rank[at] for of_rank in runs], expected)
        assert max(found["loss"], found["weights"]) < TOLERANCE, at


def calls_in_flight() -> list[int]:
    """Return the micro-batches that this rank has in flight behind each call."""
    graph = cases.transformer()
    plan = cases.plan(graph, schedule="pipedream-2bw", pipeline=4, micro_batches=4)
    engine = token_engine(plan, graph, device=CPU)
    found = []
    for step in range(4):
        engine.step(cases.global_tokens(step))
        found.append(len(engine._late._pipeline._flight))
    return found


@pytest.mark.ranks
def test_the_pipeline_stays_full_between_calls() -> None:
    assert on_ranks(4, calls_in_flight) == [[3] * 4, [2] * 4, [1] * 4, [0] * 4]


@pytest.mark.ranks
def test_calls_together_are_the_schedule() -> None:
    def work() -> tuple[list[str], list[str]]:
        graph = cases.transformer()
        plan = cases.plan(graph, schedule="pipedream-2bw", pipeline=2, micro_batches=4)
        engine = token_engine(plan, graph, device=CPU)
        pipeline = engine._late._pipeline
        done: list[str] = []
        forward, backward = pipeline._forward, pipeline._backward

        def forwards(stage: int, number: int, given: Any) -> None:
            done.append(f"{stage}F{number}")
            forward(stage, number, given)

        def backwards(stage: int, number: int, *, whole: bool) -> None:
            done.append(f"{stage}B{number}")
            backward(stage, number, whole=whole)

        pipeline._forward, pipeline._backward = forwards, backwards
        for step in range(3):
            engine.step(cases.global_tokens(step))
        engine.state()
        orders = schedule.orders("pipedream-2bw", stages=2, micro_batches=4, steps=3)
        return done, list(map(str, orders[engine.stage]))

    for done, order in on_ranks(2, work):
        assert done == order


def test_a_version_is_kept_while_another_is_updated() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    versions = WeightVersions([parameter])

    for number in (1, 2, 3):
        versions.next()
        parameter.data += 1
        assert versions.newest == number
        versions.use(number - 1)
        assert parameter.tolist() == [number - 1.0] * 3
        versions.use(number)
        assert parameter.tolist() == [float(number)] * 3


def resumed(folder: str) -> tuple[int, float]:
    graph = cases.transformer()
    plan = cases.plan(graph, schedule="pipedream-2bw", pipeline=2)
    engine = token_engine(plan, graph, device=CPU)
    for step in range(3):
        engine.step(cases.global_tokens(step))
    dcp.save(engine.state(), checkpoint_id=folder)
    other = token_engine(cases.plan(graph, pipeline=2, seed=9), graph, device=CPU)
    dcp.load(other.state(), checkpoint_id=folder)
    again = token_engine(plan, graph, device=CPU)
    dcp.load(again.state(), checkpoint_id=folder)
    losses = [e.step(cases.global_tokens(3)).loss for e in (other, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # both on the newest weights
    return again.steps, losses[0]


@pytest.mark.ranks
@pytest.mark.matrix
def test_another_plan_goes_on_from_its_checkpoint(tmp_path: Any) -> None:
    graph = cases.transformer()
    alone = token_engine(cases.plan(graph), graph, device=CPU)
    state = alone.state()
    for name, value in simulated(graph, 3).weights.items():
        state[name].copy_(torch.from_numpy(value))
    expected = alone.step(cases.global_tokens(3)).loss

    for steps, loss in on_ranks(2, resumed, str(tmp_path)):
        assert steps == 3
        assert loss == pytest.approx(expected, rel=1e-6)
