"""A U-Net that predicts noise, with an exponential moving average of its weights.

    torchrun --nproc-per-node=2 examples/diffusion_unet.py zero=3

The average is kept part by part where the weights are: `AveragedModel` of torch would copy the
module, and takes no divided one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import meshwright

STEPS, SAMPLES, LEVELS, DECAY = 4, 8, 10, 0.9
Trained = tuple[list[float], dict[str, Tensor]]


class Convolved(nn.Module):
    """A convolution that knows how noisy its input is."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, inside)
        self.convolution = nn.Conv2d(inside, outside, 3, padding=1)
        self.level = nn.Linear(8, outside)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Return maps of the same size."""
        made = self.convolution(functional.silu(self.norm(x)))
        return made + self.level(level)[:, :, None, None]


class UNet(nn.Module):
    """Down, and up again with what the way down has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.Embedding(LEVELS, 8)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Convolved(8, 8), Convolved(8, 16)])
        self.up = nn.ModuleList([Convolved(24, 8), Convolved(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, image: Tensor, level: Tensor) -> Tensor:
        """Return the noise in images [sample, 3, height, width]."""
        known = self.levels(level)
        x = self.stem(image)
        seen = []
        for part in self.down:
            seen.append(x)
            x = functional.avg_pool2d(part(x, known), 2)
        for part in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = part(torch.cat((x, seen.pop()), dim=1), known)
        return self.head(x)


def batch_of(step: int) -> dict[str, Tensor]:
    """Return noisy images, how noisy they are, and the noise."""
    generator = torch.Generator().manual_seed(step)
    noise, clean = (torch.randn(SAMPLES, 3, 8, 8, generator=generator) for _ in range(2))
    level = torch.randint(LEVELS, (SAMPLES,), generator=generator)
    share = (level / LEVELS).view(-1, 1, 1, 1)
    return {"image": clean * (1 - share) + noise * share, "level": level, "noise": noise}


def loss(made: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed squared error, and over how many pixels it is."""
    return (made - batch["noise"]).square().sum(), made.numel()


def adam(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.Adam(groups, lr=1e-3, eps=1e-4)


def plain() -> Trained:
    """Train in one process with nothing but torch; the weights are the averages."""
    torch.manual_seed(0)
    model = UNet()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = adam(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        total, count = loss(model(batch["image"], batch["level"]), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        losses.append(total.item() / count)
    return losses, averaged.module.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank; the weights are the averages."""
    engine = meshwright.Engine(UNet, plan, loss=loss, optimizer=adam, batch=batch_of(0))
    average = engine.averaged(DECAY)
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(batch_of(step)))
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f}")
    with average.applied():
        return losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
