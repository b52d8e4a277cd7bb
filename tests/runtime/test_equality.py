"""Any plan trains to the same losses and weights as the same model in one process."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from planner.model import Experts, ModelGraph
from planner.plan import Plan
from runtime.engine import Engine
from runtime.factory import graph_of_factory
from tests.runtime import cases, chains
from tests.runtime.ranks import on_ranks

STEPS = 5
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Run:
    """What a training run left: losses and norms [step], weights by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]


def train(plan: Plan, model: ModelGraph, steps: int = STEPS) -> Run:
    """Train this rank's part and return the weights it holds, whole."""
    engine = Engine(plan, model, device=torch.device("cpu"))
    losses, norms = [], []
    for step in range(steps):
        batch = cases.global_tokens(step).chunk(engine.data_degree)[engine.data_rank]
        result = engine.step(batch)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    weights = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).numpy().copy()
        for name, value in engine.state().items()
        if name.startswith("model.")
    }
    return Run(losses, norms, weights)


@dataclass(frozen=True)
class Case:
    """One row: a model and how it is laid out."""

    name: str
    layout: dict[str, Any]
    family: str = "reference"
    model: dict[str, Any] = field(default_factory=dict)

    def graph(self) -> ModelGraph:
        if self.family == "factory":
            return graph_of_factory(f"{chains.__file__}:factory", seq_len=cases.SEQ_LEN)
        return cases.transformer(self.family, **self.model)

    def plan(self) -> Plan:
        return cases.plan(self.graph(), **self.layout)

    @property
    def axis(self) -> str:
        return next(
            (axis for axis in ("context", "tensor", "pipeline") if axis in self.layout), "data"
        )


def case(
    name: str, family: str = "reference", model: dict[str, Any] | None = None, **layout: Any
) -> Case:
    return Case(name, layout, family, model or {})


TIED = {"tied_embeddings": True}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
DENSE_FIRST = Experts(count=4, per_token=2, ffn_size=24, dense_layers=1)
HALVES = {"pipeline": 2, "data_shard": 2}
HALF_CONTEXT = {"context": 2, "pipeline": 2, "recompute": "full"}
HYBRID = {"data_replicate": 2, "data_shard": 2}
# The axes in another order: pipeline on the fastest links, tensor on the slowest.
OUTSIDE_IN = ("pipeline", "data_replicate", "data_shard", "context", "tensor")

TWO = (
    case("data", data_replicate=2),
    case("data, four micro-batches", data_replicate=2, micro_batches=4),
    case("zero 1", data_shard=2, zero=1),
    case("zero 2", data_shard=2, zero=2),
    case("zero 3", data_shard=2, zero=3),
    case("zero 3, recompute full", data_shard=2, zero=3, recompute="full"),
    case("zero 3, recompute selective", data_shard=2, zero=3, recompute="selective"),
    case("zero 3, tied", model=TIED, data_shard=2, zero=3),
    case("tensor", tensor=2),
    case("tensor, four micro-batches", tensor=2, micro_batches=4),
    case("tensor, recompute full", tensor=2, recompute="full"),
    case("tensor, recompute selective", tensor=2, recompute="selective"),
    case("tensor, tied", model=TIED, tensor=2),
    case("pipeline gpipe", pipeline=2, schedule="gpipe"),
    case("pipeline 1f1b", pipeline=2),
    case("pipeline 1f1b, uneven", pipeline=2, cuts=[1, 4]),
    case("pipeline 1f1b, recompute full", pipeline=2, recompute="full"),
    case("pipeline 1f1b, recompute selective", pipeline=2, recompute="selective"),
    case("pipeline 1f1b, tied", model=TIED, pipeline=2),
    case("pipeline 1f1b, one micro-batch", pipeline=2, micro_batches=1),
    *(
        case(name, family, **layout)
        for family in ("llama", "mistral", "qwen2", "qwen3", "gpt2")
        for name, layout in (
            ("zero 3", {"data_shard": 2, "zero": 3}),
            ("pipeline", {"pipeline": 2}),
            ("tensor", {"tensor": 2, "recompute": "selective"}),
        )
        if (family, name) != ("gpt2", "tensor")
    ),
    case("tensor, window of 5", "mistral", model={"sliding_window": 5}, tensor=2),
    case("tensor, tied", "qwen2", model=TIED, tensor=2),
    case("tensor, biases", "llama", model=BIASES, tensor=2),
    case("tensor, biases", model=BIASES, tensor=2),
    case("pipeline, recompute full", "mixtral", pipeline=2, recompute="full"),
    case("zero 3", "qwen3_moe", data_shard=2, zero=3),
    case("tensor, recompute selective", "mixtral", tensor=2, recompute="selective"),
    case("tensor, one dense block", "qwen3_moe", model={"experts": DENSE_FIRST}, tensor=2),
    case("data", "factory", data_replicate=2),
    case("zero 3, recompute full", "factory", data_shard=2, zero=3, recompute="full"),
    case("pipeline, recompute selective", "factory", pipeline=2, recompute="selective"),
)

TWO_CONTEXT = (
    case("context", context=2),
    case("context, four micro-batches", context=2, micro_batches=4),
    case("context, zero 1", context=2, zero=1),
    case("context, zero 2", context=2, zero=2),
    case("context, zero 3", context=2, zero=3),
    case("context, zero 3, recompute full", context=2, zero=3, recompute="full"),
    case("context, zero 3, recompute selective", context=2, zero=3, recompute="selective"),
    case("context, tied", model=TIED, context=2),
    *(
        case("context, recompute selective", family, context=2, recompute="selective")
        for family in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe")
    ),
    case("context, window of 5", "mistral", model={"sliding_window": 5}, context=2),
)

FOUR_CONTEXT = (
    case("context", context=4),
    case("context, zero 3, recompute full", context=4, zero=3, recompute="full"),
    case("context x data", context=2, data_replicate=2),
    case("context x data, axes outside in", context=2, data_replicate=2, order=OUTSIDE_IN),
    case("context x zero 1, hybrid", context=2, data_replicate=2, zero=1),
    case("context x zero 3, hybrid", context=2, data_replicate=2, zero=3, order=OUTSIDE_IN),
    case("context x zero 2", context=2, data_shard=2, zero=2),
    case("context x zero 3", context=2, data_shard=2, zero=3, recompute="full"),
    case("context x zero 3, outside in", context=2, data_shard=2, zero=3, order=OUTSIDE_IN),
    case("context x tensor", context=2, tensor=2),
    case("context x tensor x zero 3", context=2, tensor=2, zero=3, recompute="selective"),
    case("context x tensor, outside in", context=2, tensor=2, zero=3, order=OUTSIDE_IN),
    case("context x pipeline", context=2, pipeline=2),
    case("context x pipeline x zero 3", context=2, pipeline=2, zero=3, recompute="selective"),
    case("context x pipeline, tied", model=TIED, context=2, pipeline=2),
    case("context x zbv", context=2, pipeline=2, schedule="zbv", virtual_stages=2),
    case("context", "llama", context=4),
    case("context x tensor x zero 1", "qwen3", context=2, tensor=2, zero=1),
    case("context x tensor, selective", "mixtral", context=2, tensor=2, recompute="selective"),
    case("context x pipeline x zero 3, full", "qwen3_moe", **HALF_CONTEXT, zero=3),
    case("context x pipeline", "gpt2", context=2, pipeline=2),
)

FOUR = (
    case("data", data_replicate=4),
    case("zero 2", data_shard=4, zero=2),
    case("zero 3", data_shard=4, zero=3),
    case("zero 1, hybrid", **HYBRID, zero=1),
    case("zero 3, hybrid", **HYBRID, zero=3),
    case("zero 3, hybrid, axes outside in", **HYBRID, zero=3, order=OUTSIDE_IN),
    case("pipeline gpipe", pipeline=4, schedule="gpipe"),
    case("pipeline 1f1b, uneven", pipeline=4, cuts=[1, 1, 1, 2]),
    case("pipeline 1f1b, tied", model=TIED, pipeline=4),
    case("pipeline gpipe x data", pipeline=2, data_replicate=2, schedule="gpipe"),
    case("pipeline 1f1b x data", pipeline=2, data_replicate=2),
    case(
        "pipeline 1f1b x data, axes outside in",
        pipeline=2,
        data_replicate=2,
        order=OUTSIDE_IN,
    ),
    case("pipeline 1f1b x data, tied", model=TIED, pipeline=2, data_replicate=2),
    case("pipeline 1f1b x zero 1", pipeline=2, data_shard=2, zero=1),
    case("pipeline gpipe x zero 1", pipeline=2, data_shard=2, zero=1, schedule="gpipe"),
    case("pipeline 1f1b x zero 2", pipeline=2, data_shard=2, zero=2),
    case("pipeline 1f1b x zero 3", pipeline=2, data_shard=2, zero=3),
    case("pipeline gpipe x zero 3", pipeline=2, data_shard=2, zero=3, schedule="gpipe"),
    case("pipeline x zero 3, full", pipeline=2, data_shard=2, zero=3, recompute="full"),
    case(
        "pipeline x zero 3, selective",
        pipeline=2,
        data_shard=2,
        zero=3,
        recompute="selective",
    ),
    case("pipeline x zero 3, tied", model=TIED, pipeline=2, data_shard=2, zero=3),
    case("pipeline 1f1b x tensor", pipeline=2, tensor=2),
    case("pipeline gpipe x tensor", pipeline=2, tensor=2, schedule="gpipe"),
    case("pipeline x tensor, selective", pipeline=2, tensor=2, recompute="selective"),
    case("pipeline x tensor, tied", model=TIED, pipeline=2, tensor=2),
    case("tensor x data", tensor=2, data_replicate=2),
    case("tensor x zero 1", tensor=2, data_shard=2, zero=1),
    case("tensor x zero 2", tensor=2, data_shard=2, zero=2),
    case("tensor x zero 3", tensor=2, data_shard=2, zero=3),
    case(
        "tensor x zero 3, axes outside in",
        tensor=2,
        data_shard=2,
        zero=3,
        order=OUTSIDE_IN,
    ),
    case("tensor x zero 3, full", tensor=2, data_shard=2, zero=3, recompute="full"),
    case(
        "tensor x zero 3, selective",
        tensor=2,
        data_shard=2,
        zero=3,
        recompute="selective",
    ),
    case("tensor x zero 3, tied", model=TIED, tensor=2, data_shard=2, zero=3),
    case("tensor x zero 3", "qwen3", tensor=2, data_shard=2, zero=3),
    case("pipeline x tensor", "llama", pipeline=2, tensor=2),
    case("pipeline x zero 1, selective", "qwen3_moe", **HALVES, zero=1, recompute="selective"),
    case("tensor x zero 3", "mixtral", tensor=2, data_shard=2, zero=3),
    case("pipeline x zero 1", "factory", pipeline=2, data_shard=2, zero=1),
    case("pipeline x zero 3", "gpt2", pipeline=2, data_shard=2, zero=3),
)


# Several stages per rank and split backwards: (schedule, stages per rank).
SCHEDULES = (
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved-zb", 2),
    ("zbv", 2),
    ("dualpipe-v", 2),
)
DEEP = {"layers": 6}

TWO_SCHEDULED = (
    *(
        case(f"{schedule}{note}", family, schedule=schedule, virtual_stages=v, pipeline=2, **layout)
        for schedule, v in SCHEDULES
        for note, family, layout in (
            ("", "reference", {}),
            (", recompute full", "reference", {"recompute": "full"}),
            (", recompute selective", "reference", {"recompute": "selective"}),
            (", uneven", "reference", {"cuts": [1, 4] if v == 1 else [1, 2, 1, 1]}),
            (", eight micro-batches", "reference", {"micro_batches": 8}),
            (", recompute full", "qwen2", {"recompute": "full"}),
            ("", "gpt2", {"model": {"tied_embeddings": False}}),
            (", recompute selective", "factory", {"recompute": "selective"}),
        )
    ),
    case("zb-h1, tied", model=TIED, schedule="zb-h1", pipeline=2),
    case("interleaved, tied", model=TIED, schedule="interleaved", virtual_stages=2, pipeline=2),
    case("interleaved, three", schedule="interleaved", virtual_stages=3, pipeline=2, model=DEEP),
)

FOUR_SCHEDULED = tuple(
    case(
        f"{schedule}{note}",
        schedule=schedule,
        virtual_stages=v,
        **{"pipeline": 2, **layout},
    )
    for schedule, v in SCHEDULES
    for note, layout in (
        (", four deep", {"pipeline": 4, "model": DEEP, "micro_batches": 8}),
        (" x data", {"data_replicate": 2}),
        (" x zero 1", {"data_shard": 2, "zero": 1}),
        (" x zero 2, full", {"data_shard": 2, "zero": 2, "recompute": "full"}),
        (" x zero 3", {"data_shard": 2, "zero": 3}),
        (" x zero 3, full", {"data_shard": 2, "zero": 3, "recompute": "full"}),
        (" x zero 3, selective", {"data_shard": 2, "zero": 3, "recompute": "selective"}),
        (" x tensor", {"tensor": 2}),
        (" x tensor, full", {"tensor": 2, "recompute": "full"}),
        (" x tensor, selective", {"tensor": 2, "recompute": "selective"}),
    )
)


@functools.cache
def alone(family: str, model: tuple[tuple[str, Any], ...]) -> Run:
    case = Case("alone", {}, family, dict(model))
    return train(case.plan(), case.graph())


def all_in_sequence(rows: tuple[Case, ...]) -> list[tuple[Run, float]]:
    results = []
    for row in rows:
        start = time.perf_counter()
        try:
            run = train(row.plan(), row.graph())
        except Exception as error:
            error.add_note(f"in the case '{row.name}'")
            raise
        gc.collect()
        results.append((run, time.perf_counter() - start))
    return results


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def errors(runs: list[Run], expected: Run) -> dict[str, float]:
    """Return the largest relative error of losses, norms and weights over all ranks."""
    weights: dict[str, np.ndarray] = {}
    for run in runs:
        weights.update(run.weights)
    assert set(weights) == set(expected.weights)
    return {
        "loss": max(relative(np.array(r.losses), np.array(expected.losses)) for r in runs),
        "norm": max(relative(np.array(r.norms), np.array(expected.norms)) for r in runs),
        "weights": max(
            relative(value, expected.weights[name])
            for run in runs
            for name, value in run.weights.items()
        ),
    }


def check(rows: tuple[Case, ...], world: int) -> None:
    per_rank = on_ranks(world, all_in_sequence, rows)
    bad = []
    for index, row in enumerate(rows):
        found = errors(
            [results[index][0] for results in per_rank],
            alone(row.family, tuple(sorted(row.model.items()))),
        )
        line = f"{world} ranks, {row.family}, {row.name}: " + ", ".join(
            f"{name} {value:.1e}" for name, value in found.items()
        )
        print(line, f"{per_rank[0][index][1]:.2f} s")
        if not max(found.values()) < TOLERANCE:
            bad.append(line)
    assert not bad, "\n".join(bad)


def of(rows: tuple[Case, ...], *families: str) -> tuple[Case, ...]:
    return tuple(row for row in rows if row.family in families)


LIBRARY = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen3_moe")
# All rows of a group train in the same processes, one after another.
GROUPS = {
    "reference on 2 ranks": (2, of(TWO, "reference")),
    "library on 2 ranks": (2, of(TWO, *LIBRARY, "factory")),
    **{
        f"{axis} on 4 ranks": (4, tuple(r for r in of(FOUR, "reference") if r.axis == axis))
        for axis in ("data", "pipeline", "tensor")
    },
    "library on 4 ranks": (4, of(FOUR, *LIBRARY, "factory")),
    "context on 2 ranks": (2, TWO_CONTEXT),
    "context on 4 ranks": (4, FOUR_CONTEXT),
    # Every third row meets every schedule and every layout, 3 dividing neither 8 nor 10.
    "a third of the schedules on 2 ranks": (2, TWO_SCHEDULED[::3]),
    "a third of the schedules on 4 ranks": (4, FOUR_SCHEDULED[::3]),
}
WHOLE = {
    "schedules on 2 ranks": (2, TWO_SCHEDULED),
    "schedules on 4 ranks": (4, FOUR_SCHEDULED),
}


@pytest.mark.ranks
@pytest.mark.parametrize("group", GROUPS)
def test_any_plan_trains_like_one_process(group: str) -> None:
    world, rows = GROUPS[group]

    check(rows, world)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("group", WHOLE)
def test_any_schedule_trains_like_one_process(group: str) -> None:
    world, rows = WHOLE[group]

    check(rows, world)


def test_every_row_is_in_a_group() -> None:
    rows = {id(row) for _, group in (GROUPS | WHOLE).values() for row in group}

    assert rows == {
        id(row)
        for row in (*TWO, *FOUR, *TWO_CONTEXT, *FOUR_CONTEXT, *TWO_SCHEDULED, *FOUR_SCHEDULED)
    }


def test_a_third_of_the_schedules_meets_each_of_them() -> None:
    for rows in (TWO_SCHEDULED, FOUR_SCHEDULED):
        assert {r.layout["schedule"] for r in rows[::3]} == {r.layout["schedule"] for r in rows}
