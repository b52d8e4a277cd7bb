"""Averages of weights are those of torch's own AveragedModel, and leave the weights as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

DECAY = 0.8


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator), torch.arange(4) % 2


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(out, batch[1], reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.5)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def late_averages() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return averages of a pipeline that never drains, and those made of its weights by hand."""
    layout = {"pipeline": 2, "micro_batches": 2, "schedule": "pipedream-2bw"}
    engine = Engine(build, layout, loss=loss, optimizer=sgd, batch=batch_of(0))
    average, expected = engine.averaged(DECAY), dict[str, Tensor]()
    for step in range(4):
        engine.step(batch_of(step))
    with average.applied():
        averages = engine.state_dict()
    other = Engine(build, layout, loss=loss, optimizer=sgd, batch=batch_of(0))
    for step in range(4):
        other.step(batch_of(step))
        for name, value in other.state_dict().items():
            expected[name] = expected.get(name, value).lerp(value, 1 - DECAY)
    return averages, expected


@pytest.mark.ranks
def test_averages_of_late_updates_are_those_of_the_weights_behind_them() -> None:
    for averages, expected in on_ranks(2, late_averages):
        torch.testing.assert_close(averages, expected)


def test_averages_are_those_of_torch() -> None:
    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    average = engine.averaged(DECAY)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        plain = build()
    optimizer = sgd(plain.parameters())
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    for step in range(4):
        engine.step(batch_of(step))
        optimizer.zero_grad()
        total, count = loss(plain(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        optimizer.step()
        expected.update_parameters(plain)

    with average.applied():
        averages = engine.state_dict()
    torch.testing.assert_close(averages, dict(expected.module.state_dict()))
    torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(x))
        return out


def warming(updates: int) -> float:
    return min(DECAY, (1 + updates) / (10 + updates))


def test_an_average_may_begin_with_first_weights_follow_a_schedule_and_have_buffers() -> None:
    engine = Engine(Norms, loss=loss, optimizer=sgd, batch=batch_of(0))
    average = engine.averaged(warming, initial=True, buffers=True)
    beside = engine.averaged(0.5)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    for step in range(3):
        engine.step(batch_of(step))
        for name, value in engine.state_dict().items():
            floats = value.is_floating_point()
            expected[name] = expected[name].lerp(value, 1 - warming(step)) if floats else value
    now = engine.state_dict()
    with average.applied():
        torch.testing.assert_close(engine.state_dict(), expected)
    torch.testing.assert_close(engine.state_dict(), now)
    with beside.applied():
        assert not torch.equal(engine.state_dict()["last.weight"], expected["last.weight"])
