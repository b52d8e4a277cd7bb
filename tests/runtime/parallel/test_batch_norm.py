"""BatchNorm trains under any plan as in one process: weights, and running statistics."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.runtime.engine.engine import Engine
from tests.parts import some_and_others
from tests.runtime.own_modules import Basic, ResNet
from tests.runtime.ranks import on_ranks

SAMPLES, STEPS = 8, 3


class Twice(nn.Module):
    """A critic with a BatchNorm, called on what is made and on what is real."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = Basic(3, 3)
        self.critics = nn.ModuleList([Basic(3, 3), nn.BatchNorm2d(3, momentum=None)])

    def forward(self, x: Tensor) -> Tensor:
        made = [x, self.maker(x)]
        for critic in self.critics:
            made = [critic(one) for one in made]
        return (made[0] - made[1]).mean((2, 3))


MODULES: dict[str, type[nn.Module]] = {"resnet": ResNet, "twice": Twice}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    scales = torch.arange(1.0, SAMPLES + 1)[:, None, None, None]
    pictures = torch.randn(SAMPLES, 3, 8, 8, generator=generator) * scales
    return pictures, torch.randint(0, 3, (SAMPLES,), generator=generator)


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def trained(kind: str, layout: dict[str, Any], batch_norm: Any) -> dict[str, Tensor]:
    engine = Engine(
        MODULES[kind],
        layout,
        loss=loss,
        optimizer=sgd,
        batch=batch_of(0),
        batch_norm=batch_norm,
    )
    for step in range(STEPS):
        engine.step(engine.slice(batch_of(step)))
    return engine.state_dict()


@functools.cache
def plainly(kind: str, size: int) -> dict[str, Tensor]:
    """Train in one process, with micro-batches of so many samples one after another."""
    torch.manual_seed(0)
    model = MODULES[kind]()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for x, y in zip(*(part.split(size) for part in batch_of(step)), strict=True):
            (loss(model(x), (x, y))[0] / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


ROWS: list[tuple[str, dict[str, Any], str, int]] = [
    ("resnet", {"micro_batches": 2}, "per_micro_batch", 2),
    ("resnet", {"zero": 3, "micro_batches": 2, "recompute": "full"}, "per_micro_batch", 2),
    ("resnet", {"pipeline": 2, "micro_batch": 2, "recompute": "full"}, "per_micro_batch", 2),
    ("resnet", {"zero": 3, "recompute": "full"}, "synchronised", 8),
    ("resnet", {"pipeline": 2, "micro_batch": 4}, "synchronised", 4),
    ("twice", {"micro_batches": 2}, "per_micro_batch", 2),
    ("twice", {}, "synchronised", 8),
]


def every(rows: list[Any]) -> list[dict[str, Tensor]]:
    return [trained(kind, layout, batch_norm) for kind, layout, batch_norm, _ in rows]


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, [ROWS[2], ROWS[3]]))
def test_two_ranks_have_weights_and_statistics_of_one_process(rows: list[Any]) -> None:
    for found in on_ranks(2, every, rows):
        for (kind, layout, batch_norm, size), state in zip(rows, found, strict=True):
            wanted = plainly(kind, size)
            assert state.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(
                    state[name], value, rtol=2e-5, atol=2e-5, msg=f"{layout} {batch_norm} {name}"
                )
