"""Models and stages out of the ordinary train like one process too.

tests/runtime/test_matrix.py has the rows that are generated from what plans can say; here are those
whose model or cuts no field of a plan names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshwright.planner.documents.model import Experts, ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.engine.factory_module import graph_of_factory
from tests.runtime import cases, chains
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import TOLERANCE, Run, errors, train, train_all


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


def case(
    name: str, family: str = "reference", model: dict[str, Any] | None = None, **layout: Any
) -> Case:
    return Case(name, layout, family, model or {})


TIED = {"tied_embeddings": True}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
DENSE_FIRST = Experts(count=4, per_token=2, ffn_size=24, dense_layers=1)
DEEP = {"layers": 6}

TWO = (
    case("pipeline, nearly all on the last rank", pipeline=2, cuts=[1, 4]),
    case(
        "interleaved, three stages a rank",
        schedule="interleaved",
        virtual_stages=3,
        pipeline=2,
        model=DEEP,
    ),
    case(
        "interleaved-zb, three stages a rank",
        schedule="interleaved-zb",
        virtual_stages=3,
        pipeline=2,
        model=DEEP,
    ),
    case("zbv, eight micro-batches", schedule="zbv", virtual_stages=2, pipeline=2, micro_batches=8),
    case("tensor, window of 5", "mistral", model={"sliding_window": 5}, tensor=2),
    case("context, window of 5", "mistral", model={"sliding_window": 5}, context=2),
    case("tensor, biases", "llama", model=BIASES, tensor=2),
    case("tensor, biases", model=BIASES, tensor=2),
    case("tensor, one dense block", "qwen3_moe", model={"experts": DENSE_FIRST}, tensor=2),
)

FOUR = (
    case(
        "pipeline, zero 3, window of 5",
        "mistral",
        model={"sliding_window": 5},
        pipeline=2,
        data_shard=2,
        zero=3,
        recompute="full",
    ),
    case(
        "tensor x zero 3, one dense block",
        "qwen3_moe",
        model={"experts": DENSE_FIRST},
        tensor=2,
        data_shard=2,
        zero=3,
    ),
)


@functools.cache
def alone(family: str, model: tuple[tuple[str, Any], ...]) -> Run:
    case = Case("alone", {}, family, dict(model))
    return train(case.plan(), case.graph())


def check(rows: tuple[Case, ...], world: int) -> None:
    per_rank = on_ranks(world, train_all, [(row.name, row.plan(), row.graph()) for row in rows])
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


@pytest.mark.long("2")
@pytest.mark.long("4")
@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "rows"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_what_no_plan_names_trains_like_one_process(ranks: int, rows: tuple[Case, ...]) -> None:
    check(rows, ranks)
