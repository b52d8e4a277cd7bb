"""Optimizers that evaluate with other weights than they train, and groups by module.

The schedule-free optimizer is written here after its paper (Defazio et al., 2024, equations 3 to
5), and trains in a plain loop as the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.errors import OptimizerError
from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

WIDTH, SAMPLES, STEPS = 6, 8, 4


class ScheduleFree(torch.optim.Optimizer):
    """Steps of z, gradients at y = (1 - b) z + b x, evaluation at x, the mean of all z."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "is_training": False})

    @torch.no_grad()
    def _move(self, weight: Callable[[float], float], *, training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] == training:
                continue
            group["is_training"] = training
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, training=True)

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"], "train() was not called"
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator)
    return x, y


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (out - batch[1]).square().sum(), out.numel()


def plainly() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = build()
    optimizer = ScheduleFree(module.parameters())
    values = []
    for step in range(STEPS):
        optimizer.train()
        (x, y) = batch_of(step)
        error = (module(x) - y).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        optimizer.eval()
        x, y = batch_of(9)
        values += [float(error.detach()), float((module(x) - y).square().mean().detach())]
    return values, dict(module.state_dict())


def trained(layout: dict[str, Any], folder: str) -> tuple[list[float], dict[str, Tensor]]:
    def engine_of() -> Engine:
        return Engine(build, layout, loss=loss, optimizer=ScheduleFree, batch=batch_of(0))

    engine, values = engine_of(), []
    for step in range(STEPS):
        if step == STEPS // 2:
            engine.save(folder)
            engine = engine_of()
            engine.load(folder)
        values.append(float(engine.step(engine.slice(batch_of(step))).loss))
        values.append(float(engine.evaluate(engine.slice(batch_of(9))).loss))
    return values, engine.eval().state_dict()


def same(found: Any) -> None:
    values, weights = plainly()
    assert found[0] == pytest.approx(values, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def test_evaluation_has_the_weights_of_a_schedule_free_optimizer(tmp_path: Path) -> None:
    same(trained({}, str(tmp_path)))


@pytest.mark.ranks
@pytest.mark.long("replicas", "stages")
@pytest.mark.parametrize(
    "layout",
    [{}, {"zero": 3}, {"pipeline": 2, "micro_batches": 2}],
    ids=["replicas", "zero 3", "stages"],
)
def test_ranks_evaluate_with_them_too(layout: dict[str, Any], tmp_path: Path) -> None:
    for found in on_ranks(2, trained, layout, str(tmp_path)):
        same(found)


def groups_of(groups: Any) -> list[tuple[float, int]]:
    engine = Engine(
        build,
        {},
        loss=loss,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        groups=groups,
        batch=batch_of(0),
    )
    return [
        (group["lr"], sum(p.numel() for p in group["params"]))
        for group in engine.optimizer.param_groups
    ]


def test_groups_are_by_path_and_by_class() -> None:
    matrix, norm = WIDTH * WIDTH + WIDTH, 2 * WIDTH

    found = groups_of({nn.LayerNorm: {"lr": 0.5}, "3": {"lr": 0.01}})

    assert found == [(0.1, matrix), (0.5, norm), (0.01, matrix)]
    assert groups_of({"*.bias": {"lr": 0.0}}) == [(0.1, 2 * WIDTH**2 + WIDTH), (0.0, 3 * WIDTH)]


@pytest.mark.parametrize("key", ["head", nn.Conv2d])
def test_a_group_that_matches_nothing_is_refused(key: Any) -> None:
    with pytest.raises(OptimizerError, match=r"groups: '(head|Conv2d)' matches no parameter"):
        groups_of({key: {"lr": 0.5}})
