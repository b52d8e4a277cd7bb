"""fp16 trains near fp32, skips what overflows on all ranks alike, and takes its scale along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshwright.runtime.core.loss import GROWTH_STEPS, INITIAL, LEAST, LossScale
from meshwright.runtime.launch.training_loop import token_engine
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import errors, train

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)


def test_overflow_halves_and_many_good_steps_double() -> None:
    scale = LossScale(CPU, active=True)

    scale.update(BAD)
    assert scale.scale == INITIAL / 2
    assert scale.taken_off(scale.scale_loss(torch.tensor(3.0))) == 3.0
    for _ in range(GROWTH_STEPS - 1):
        scale.update(GOOD)
    assert scale.scale == INITIAL / 2
    scale.update(GOOD)
    assert scale.scale == INITIAL
    for _ in range(100):
        scale.update(BAD)
    assert scale.scale == LEAST


def test_without_fp16_nothing_is_scaled() -> None:
    scale, loss = LossScale(CPU, active=False), torch.tensor(3.0)

    assert scale.scale_loss(loss) is loss
    assert scale.taken_off(loss) is loss
    assert scale.spoilt(torch.tensor(torch.inf)) is None
    assert not scale.skips(float("inf"))


def test_a_norm_that_is_not_finite_is_spoilt() -> None:
    scale = LossScale(CPU, active=True)

    found = [scale.spoilt(torch.tensor(norm)) for norm in (1.0, torch.inf, torch.nan)]

    assert found == [0.0, 1.0, 1.0]
    assert scale.skips(float("nan"))
    scale.scale.fill_(LEAST)
    assert not scale.skips(float("nan"))  # no smaller scale would help


LAYOUTS: list[dict[str, Any]] = [
    {"data_replicate": 2},
    {"data_shard": 2, "zero": 3, "recompute": "selective"},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zbv", "virtual_stages": 2},
    {"tensor": 2},
]
FP16_LOSS_BOUND = 1e-4
"""Relative, against fp32, after five steps; measured up to 3e-5."""


def in_fp16(layouts: list[dict[str, Any]]) -> list[Any]:
    graph = cases.transformer()
    return [train(cases.plan(graph, precision="fp16", **layout), graph) for layout in layouts]


@pytest.mark.matrix
@pytest.mark.ranks
def test_fp16_trains_near_fp32() -> None:
    graph = cases.transformer()
    exact = train(cases.plan(graph), graph)

    per_rank = on_ranks(2, in_fp16, LAYOUTS)

    for index, layout in enumerate(LAYOUTS):
        found = errors([runs[index] for runs in per_rank], exact)
        assert 0 < found["loss"] < FP16_LOSS_BOUND, (layout, found)


def overflowing(layout: dict[str, Any]) -> list[tuple[bool, bool, float]]:
    """Return of each step whether it was skipped, whether weights moved, and the scale after it."""
    graph = cases.transformer()
    engine = token_engine(cases.plan(graph, precision="fp16", **layout), graph, device=CPU)
    engine.state()["train.loss_scale"].fill_(2.0**30)
    rows = []
    for step in range(16):
        before = [local(value).clone() for value in engine.state().values()]
        batch = cases.global_tokens(step).chunk(engine.slices)[engine.slice_rank]
        skipped = engine.step(batch).skipped
        after = [local(value) for value in engine.state().values()]
        names = list(engine.state())
        moved = any(
            not torch.equal(a, b)
            for name, a, b in zip(names, after, before, strict=True)
            if not name.startswith("train.")
        )
        rows.append((skipped, moved, float(engine.state()["train.loss_scale"])))
    return rows


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, dist.tensor.DTensor) else value


@pytest.mark.long("layout0")
@pytest.mark.ranks
@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]])
def test_overflow_skips_the_step_on_all_ranks_until_the_scale_fits(layout: dict[str, Any]) -> None:
    first, second = on_ranks(2, overflowing, layout)

    assert [(s, scale) for s, _, scale in first] == [(s, scale) for s, _, scale in second]
    skipped = [s for s, _, _ in first]
    assert skipped[0]
    assert not skipped[-1]
    for rank in (first, second):
        for was_skipped, moved, _ in rank:
            assert was_skipped != moved
    assert first[0][2] == 2.0**29


def saved_and_loaded(folder: Path) -> tuple[float, float]:
    graph = cases.transformer()
    engine = token_engine(cases.plan(graph, precision="fp16", pipeline=2), graph, device=CPU)
    engine.state()["train.loss_scale"].fill_(2.0**30)
    engine.step(cases.global_tokens(0))
    dcp.save(engine.state(), checkpoint_id=folder)
    plan = cases.plan(graph, precision="fp16", data_shard=2, zero=3)
    other = token_engine(plan, graph, device=CPU)
    dcp.load(other.state(), checkpoint_id=folder)
    plain = token_engine(cases.plan(graph, data_replicate=2), graph, device=CPU)
    dcp.load(plain.state(), checkpoint_id=folder)
    loss = plain.step(cases.global_tokens(1).chunk(2)[plain.slice_rank]).loss
    return float(other.state()["train.loss_scale"]), loss


@pytest.mark.ranks
@pytest.mark.matrix
def test_the_scale_is_in_the_checkpoint_and_harms_no_other_precision(tmp_path: Path) -> None:
    graph = cases.transformer()
    untrained = token_engine(cases.plan(graph), graph, device=CPU).step(cases.global_tokens(1)).loss

    for scale, loss in on_ranks(2, saved_and_loaded, tmp_path):
        assert scale == 2.0**29
        assert loss == pytest.approx(untrained, rel=1e-6)  # the only step was skipped
