"""A checkpoint saved under any plan goes on under any other as if it had not been interrupted."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from planner.model import ModelGraph
from planner.plan import Plan
from runtime.checkpoint import Progress, load
from runtime.engine import Engine
from runtime.saving import Saver
from tests.runtime import cases
from tests.runtime.ranks import on_ranks

SAVED_AFTER, STEPS = 2, 4
LAYOUTS = {
    "data": {"data_replicate": 2},
    "zero 3": {"data_shard": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "pipeline x data": {"pipeline": 2, "data_replicate": 2},
    "zbv": {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2},
}
SOME = [("zero 3", "tensor"), ("zbv", "zero 3"), ("pipeline x data", "zbv")]
REST = [(a, b) for a in LAYOUTS for b in LAYOUTS if (a, b) not in SOME]


@functools.cache
def model() -> ModelGraph:
    return cases.transformer()


def plan(name: str) -> Plan:
    return cases.plan(model(), **LAYOUTS[name])


def steps(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step from `first` to before `last`."""
    rows = []
    for step in range(first, last):
        batch = cases.global_tokens(step).chunk(engine.data_degree)[engine.data_rank]
        result = engine.step(batch)
        rows.append((result.loss, result.grad_norm))
    return rows


def save_under(name: str, folder: str) -> None:
    engine = Engine(plan(name), model(), device=torch.device("cpu"))
    steps(engine, 0, SAVED_AFTER)
    saver = Saver(Path(folder), plan=plan(name), model=model(), run="r")
    saver.begin(engine.state(), progress(plan(name)))
    # Training goes on meanwhile, and what it changes must not reach the file.
    steps(engine, SAVED_AFTER, STEPS)
    saver.finish()


def go_on_under(name: str, folders: list[str]) -> list[list[tuple[float, float]]]:
    engine = Engine(plan(name), model(), device=torch.device("cpu"))
    rows = []
    for folder in folders:
        load(Path(folder, f"step-{SAVED_AFTER:06}"), engine.state())
        assert engine.steps == SAVED_AFTER
        rows.append(steps(engine, SAVED_AFTER, STEPS))
    return rows


def progress(plan: Plan) -> Progress:
    return Progress(
        step=SAVED_AFTER,
        sample=SAVED_AFTER * plan.global_batch,
        epoch=0,
        seq_len=plan.seq_len,
        seed=plan.training.seed,
        model=model().name,
        model_digest=model().digest,
        plan_digest=plan.digest,
        corpus="none",
        corpus_digest="none",
        loss=0.0,
    )


def uninterrupted() -> list[tuple[float, float]]:
    engine = Engine(cases.plan(model()), model(), device=torch.device("cpu"))
    return steps(engine, 0, STEPS)[SAVED_AFTER:]


def check(pairs: list[tuple[str, str]], folder: Path) -> None:
    expected = uninterrupted()
    for name in dict.fromkeys(saved for saved, _ in pairs):
        on_ranks(plan(name).mesh.devices, save_under, name, str(folder / name))
    for name in dict.fromkeys(going for _, going in pairs):
        sources = [saved for saved, going in pairs if going == name]
        folders = [str(folder / source) for source in sources]
        ranks = on_ranks(plan(name).mesh.devices, go_on_under, name, folders)
        for rows in ranks:
            for source, row in zip(sources, rows, strict=True):
                for found, wanted in zip(row, expected, strict=True):
                    assert found == pytest.approx(wanted, rel=1e-5), (source, name)


@pytest.mark.ranks
def test_some_plans_go_on_where_others_ended(tmp_path: Path) -> None:
    check(SOME, tmp_path)


@pytest.mark.ranks
@pytest.mark.matrix
def test_every_plan_goes_on_where_any_other_ended(tmp_path: Path) -> None:
    check(SOME + REST, tmp_path)
