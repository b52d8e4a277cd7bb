"""A checkpoint saved under any plan goes on under any other as if it had not been interrupted."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from meshwright.planner.documents.model import Experts, ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.runtime.checkpoint.checkpoint import Progress, load
from meshwright.runtime.checkpoint.writer import Saver
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.launch.training_loop import token_engine
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
FOUR_EXPERTS = {
    "tensor": {"tensor": 2},
    "whole experts": {"data_replicate": 2},
    "experts x zero 3": {"expert": 2, "data_shard": 2, "zero": 3},
    "experts on 2 of 4": {"expert": 2, "data_shard": 4, "zero": 3},
    "experts on 4": {"expert": 4, "tensor": 2, "data_shard": 2, "zero": 1},
    "experts x pipeline": {"expert": 2, "pipeline": 2, "data_shard": 2, "zero": 2},
}
SIX_EXPERTS = {
    "experts x zero 3": {"expert": 2, "data_shard": 2, "zero": 3},
    "hidden dim on 2 of 4": {"expert": 2, "data_shard": 4, "zero": 3},
    "hidden dim on 4": {"data_shard": 4, "zero": 3},
}
OF_MODEL = {"reference": LAYOUTS, "4 experts": FOUR_EXPERTS, "6 experts": SIX_EXPERTS}
SOME_EXPERTS = [("experts x zero 3", "tensor"), ("tensor", "experts x zero 3")]


@functools.cache
def model(name: str) -> ModelGraph:
    if name == "reference":
        return cases.transformer()
    count = int(name.removesuffix(" experts"))
    return cases.transformer("mixtral", experts=Experts(count=count, per_token=2, ffn_size=24))


def plan(of: str, name: str) -> Plan:
    return cases.plan(model(of), **OF_MODEL[of][name])


def steps(engine: Engine, first: int, last: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step from `first` to before `last`."""
    rows = []
    for step in range(first, last):
        batch = cases.global_tokens(step).chunk(engine.slices)[engine.slice_rank]
        result = engine.step(batch)
        rows.append((result.loss, result.grad_norm))
    return rows


def save_under(of: str, name: str, folder: str) -> None:
    engine = token_engine(plan(of, name), model(of), device=torch.device("cpu"))
    steps(engine, 0, SAVED_AFTER)
    planned = plan(of, name)
    saver = Saver(Path(folder), plan=planned, model=model(of), run="r")
    saver.begin(engine.state(), progress(of, planned))
    # Training goes on meanwhile, and what it changes must not reach the file.
    steps(engine, SAVED_AFTER, STEPS)
    saver.finish()


def go_on_under(of: str, name: str, folders: list[str]) -> list[list[tuple[float, float]]]:
    engine = token_engine(plan(of, name), model(of), device=torch.device("cpu"))
    rows = []
    for folder in folders:
        load(Path(folder, f"step-{SAVED_AFTER:06}"), engine.state())
        assert engine.steps == SAVED_AFTER
        rows.append(steps(engine, SAVED_AFTER, STEPS))
    return rows


def progress(of: str, plan: Plan) -> Progress:
    return Progress(
        step=SAVED_AFTER,
        sample=SAVED_AFTER * plan.global_batch,
        epoch=0,
        seq_len=plan.seq_len,
        seed=plan.training.seed,
        model=model(of).name,
        model_digest=model(of).digest,
        plan_digest=plan.digest,
        corpus="none",
        corpus_digest="none",
        loss=0.0,
    )


def uninterrupted(of: str) -> list[tuple[float, float]]:
    engine = token_engine(cases.plan(model(of)), model(of), device=torch.device("cpu"))
    return steps(engine, 0, STEPS)[SAVED_AFTER:]


def check(pairs: list[tuple[str, str]], folder: Path, of: str = "reference") -> None:
    expected = uninterrupted(of)
    for name in dict.fromkeys(saved for saved, _ in pairs):
        on_ranks(plan(of, name).mesh.devices, save_under, of, name, str(folder / name))
    for name in dict.fromkeys(going for _, going in pairs):
        sources = [saved for saved, going in pairs if going == name]
        folders = [str(folder / source) for source in sources]
        ranks = on_ranks(plan(of, name).mesh.devices, go_on_under, of, name, folders)
        for rows in ranks:
            for source, row in zip(sources, rows, strict=True):
                for found, wanted in zip(row, expected, strict=True):
                    assert found == pytest.approx(wanted, rel=1e-5), (source, name)


@pytest.mark.ranks
@pytest.mark.matrix
def test_some_plans_go_on_where_others_ended(tmp_path: Path) -> None:
    check(SOME, tmp_path)


@pytest.mark.ranks
@pytest.mark.matrix
def test_every_plan_goes_on_where_any_other_ended(tmp_path: Path) -> None:
    check(SOME + REST, tmp_path)


@pytest.mark.matrix
@pytest.mark.ranks
def test_experts_go_on_on_other_ranks(tmp_path: Path) -> None:
    check(SOME_EXPERTS, tmp_path, "4 experts")


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("of", ["4 experts", "6 experts"])
def test_experts_go_on_under_every_plan(tmp_path: Path, of: str) -> None:
    check([(a, b) for a in OF_MODEL[of] for b in OF_MODEL[of]], tmp_path, of)
