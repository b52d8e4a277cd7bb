"""A way of writing a forward or a loss, the batches it trains on, and a plain loop of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, POSITIONS, SAMPLES, STEPS = 6, 5, 8, 4


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return samples of positions, with other numbers above 0 in each; all are in the first."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator)
    if step == 0:
        x[..., :2] = x[..., :2].abs() + 0.1
    targets = torch.randint(0, WIDTH, (SAMPLES, POSITIONS), generator=generator)
    if step:
        for sample in range(SAMPLES):
            targets[sample, : (sample * step) % POSITIONS] = -100
    return x, targets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.features(x)


def squares(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), out.numel()


def returned(out: Any, batch: Any) -> Any:
    return out


def per_sample(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), len(batch[0])


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "zero 3": {"zero": 3},
    "stages": {"pipeline": 2, "micro_batches": 2},
}
ALONE = frozenset[str]()
ON_RANKS = frozenset(("replicas", "zero 3"))
EVERYWHERE = frozenset(LAYOUTS)


def nothing(module: nn.Module, step: int) -> None:
    pass


@dataclass(frozen=True)
class Way:
    """A module and a loss, and in which layouts they must train rather than be refused."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any] = squares
    trains: frozenset[str] = field(default_factory=lambda: EVERYWHERE)
    inputs: Callable[[Any], Any] | None = None
    before: Callable[[Any, int], None] = nothing
    """What the training loop does with its module before each step."""
    batches: Callable[[int], Any] = batch_of
