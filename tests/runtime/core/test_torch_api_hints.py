"""Loops as torch has them train as in torch, or are refused with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import (
    EngineAttributeError,
    LaunchError,
    MeshwrightError,
    OptimizerError,
)
from meshwright.runtime.core.torch_api_hints import INSTEAD
from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

WIDTH = 4
LAYOUTS: dict[str, dict[str, Any]] = {"replicated": {}, "zero 3": {"zero": 3}}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, WIDTH, generator=generator), torch.arange(8) % 3


def loss(out: Tensor, given: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(out, given[1], reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def parameters(engine: Engine) -> list[nn.Parameter]:
    return [one for group in engine.optimizer.param_groups for one in group["params"]]


def scaler_step(engine: Engine) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(engine.optimizer)


HABITS: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: engine.optimizer.step(),
    "step with a closure": lambda engine: engine.optimizer.step(lambda: 0.0),
    "clip by norm": lambda engine: nn.utils.clip_grad_norm_(parameters(engine), 1e-3),
    "clip by value": lambda engine: nn.utils.clip_grad_value_(parameters(engine), 1e-3),
    "read": lambda engine: [p.grad.norm() for p in parameters(engine) if p.grad is not None],
    "change": lambda engine: [p.grad.mul_(2) for p in parameters(engine) if p.grad is not None],
    "scale": scaler_step,
    "backward": lambda engine: engine.evaluate(engine.slice(batch())).loss.backward(),
}


def _refused(layout: dict[str, Any]) -> None:
    engine = Engine(build, layout, loss=loss, optimizer=sgd, batch=batch())
    for habit in HABITS.values():
        engine.forward_backward(engine.slice(batch()))
        with pytest.raises(MeshwrightError, match=r"engine\.optimizer_step"):
            habit(engine)
        engine.zero_grad()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.long("zero 3")
def test_gradients_that_wait_are_used_by_nobody_else(layout: dict[str, Any]) -> None:
    on_ranks(2, _refused, layout)


def test_gradients_are_hidden_in_a_module_that_the_script_kept() -> None:
    torch.manual_seed(0)
    model = build()
    engine = Engine(lambda: model, loss=loss, optimizer=sgd, batch=batch())
    engine.forward_backward(batch())

    with pytest.raises(OptimizerError, match=r"p\.grad"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(OptimizerError, match=r"p\.grad"):
        torch.optim.Adam(model.parameters()).step()


def _kept_by_the_script() -> list[dict[str, Tensor]]:
    """Refuse uses of a kept module's gradients between two backwards; return trained weights."""
    trained = []
    for layout in ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "offload": "optimizer"}):
        torch.manual_seed(0)
        model = build()
        engine = Engine(
            lambda model=model: model,
            {"micro_batch": 2, **layout},
            loss=loss,
            optimizer=sgd,
            batch=batch(),
        )
        for _ in range(2):
            for _ in range(2):
                engine.forward_backward(engine.slice(batch()))
                with pytest.raises(OptimizerError, match=r"p\.grad"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                with pytest.raises(OptimizerError, match=r"p\.grad"):
                    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                with pytest.raises(OptimizerError, match=r"p\.grad"):
                    torch.optim.Adam(model.parameters()).step()
                with pytest.raises(OptimizerError, match=r"p\.grad"):
                    print([p.grad.abs().max() for p in model.parameters() if p.grad is not None])
            engine.optimizer_step()
        trained.append(engine.state_dict())
    return trained


@pytest.mark.matrix
def test_gradients_of_a_kept_module_are_hidden_where_it_is_divided_too() -> None:
    for replicated, *others in on_ranks(2, _kept_by_the_script):
        for divided in others:
            for name, value in replicated.items():
                torch.testing.assert_close(divided[name], value)


def test_hidden_gradients_add_up_and_update_as_a_plain_loop() -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = build()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch(), clip_norm=0.1)
    own = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
    for _ in range(3):
        for _ in range(2):
            (functional.cross_entropy(model(batch()[0]), batch()[1]) / 2).backward()
            result = engine.forward_backward(batch())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert set(engine.gradients()) == {name for name, _ in model.named_parameters()}
        engine.optimizer_step()
        engine.optimizer.step()  # of no gradients, as in torch
        engine.optimizer.zero_grad()
        scheduler.step()
        own.step()

    assert isinstance(result.loss.item(), float)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_zero_grad_of_the_optimizer_forgets_the_gradients() -> None:
    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch())
    before = engine.state_dict()
    engine.forward_backward(batch())
    engine.optimizer.zero_grad()

    result = engine.optimizer_step()

    assert result.count == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


def test_zero_grad_of_one_of_two_optimizers_is_refused() -> None:
    adam = torch.optim.Adam
    engine = Engine(
        build,
        loss=loss,
        optimizer=sgd,
        groups=lambda name, _: {"optimizer": adam} if name.startswith("0") else {},
        batch=batch(),
    )
    engine.forward_backward(batch())

    with pytest.raises(OptimizerError, match=r"engine\.zero_grad"):
        engine.optimizers[0].zero_grad()


@pytest.mark.parametrize("name", [*INSTEAD, "no_such_thing"])
def test_what_wrappers_have_and_an_engine_has_not_says_what_to_write(name: str) -> None:
    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch()) if not _ENGINES else _ENGINES[0]
    _ENGINES[:] = [engine]

    if name == "__call__":
        with pytest.raises(LaunchError, match=r"engine\.outputs"):
            engine(batch()[0])
        return
    with pytest.raises(EngineAttributeError, match=f"engine.{name}: .*(engine|Engine|build)"):
        getattr(engine, name)
    assert not hasattr(engine, name)


_ENGINES: list[Engine] = []
