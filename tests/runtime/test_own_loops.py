"""Loops of users' own: what they make of gradients and parameters is the same under every plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

WIDTH, SAMPLES = 16, 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"data_replicate": 2},
    "zero 1": {"zero": 1},
    "zero 3": {"zero": 3},
    "stages": {"pipeline": 2},
    "tensor": {"tensor": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)  # before what it comes behind
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=draw)
    return x, y


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), batch[1].numel()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


Named = Mapping[str, Tensor]
Change = Callable[[Named, Named], None]


def clipped_each(gradients: Named, _: Named) -> None:
    for grad in gradients.values():
        grad.mul_((0.01 / grad.norm()).clamp(max=1.0))


def clipped_by_numbers(gradients: Named, parameters: Named) -> None:
    for name, grad in gradients.items():
        most = 0.02 * parameters[name].norm().item() + 1e-3
        if (norm := float(grad.norm())) > most:
            grad.mul_(most / norm)


def centred(gradients: Named, _: Named) -> None:
    for grad in gradients.values():
        if grad.ndim > 1:
            grad.copy_(grad - grad.mean(dim=0, keepdim=True))


def decayed(gradients: Named, parameters: Named) -> None:
    for name, grad in gradients.items():
        grad.add_(parameters[name], alpha=0.1)


def normalised(gradients: Named, parameters: Named) -> None:
    """All together, by tensors and by numbers of Python, as sharpness-aware training does it."""
    norm = torch.stack([grad.norm() for grad in gradients.values()]).norm()
    size = sum(float(parameter.norm()) ** 2 for parameter in parameters.values()) ** 0.5
    for grad in gradients.values():
        grad.mul_(0.01 * size / norm)


CHANGES: list[Change] = [
    clipped_each,
    clipped_by_numbers,
    centred,
    decayed,
    normalised,
]


def plainly(changes: list[Change]) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    module, found = Net(), []
    optimizer = sgd(module.parameters())
    for step, change in enumerate(changes):
        total, count = loss(module(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        parameters = dict(module.named_parameters())
        grads = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        with torch.no_grad():
            change(grads, parameters)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return found


WITH_NUMBERS = [clipped_by_numbers, normalised]
"""Changes that ask every rank for numbers of the whole; the others change tensor by tensor."""


def planned(layout: dict[str, Any], changes: list[Change]) -> list[dict[str, Tensor]]:
    """Return the weights after each step; of each change there is one."""
    engine, found = Engine(Net, layout, loss=loss, optimizer=sgd, batch=batch_of(0)), []
    for step, change in enumerate(changes):
        engine.forward_backward(engine.slice(batch_of(step)))
        with torch.no_grad():
            change(engine.gradients(), engine.weights())
        engine.optimizer_step()
        found.append({name: value.clone() for name, value in engine.state_dict().items()})
    return found


@pytest.mark.ranks
@pytest.mark.long("zero 1", "replicas", "stages", "tensor")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_that_a_loop_changes_are_those_of_a_plain_loop(layout: dict[str, Any]) -> None:
    check(layout, CHANGES)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["stages", "tensor"])
def test_gradients_that_a_loop_changes_by_numbers_are_those_of_a_plain_loop(name: str) -> None:
    check(LAYOUTS[name], WITH_NUMBERS)


def check(layout: dict[str, Any], changes: list[Change]) -> None:
    expected = plainly(changes)
    for found in on_ranks(2, planned, layout, changes):
        for change, mine, theirs in zip(changes, found, expected, strict=True):
            assert list(mine) == list(theirs)
            for name, value in theirs.items():
                torch.testing.assert_close(
                    mine[name], value, rtol=0, atol=1e-6, msg=f"{change.__name__}: {name}"
                )
