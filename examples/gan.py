"""Two engines in one loop: a generator and a discriminator that learn from each other.

    torchrun --nproc-per-node=2 examples/gan.py zero=3

Each network has an engine and a plan of its own.  The generator's loss needs the discriminator's
judgement, so its module holds a frozen copy that follows the discriminator's weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright

STEPS, SAMPLES, NOISE, WIDTH = 4, 8, 4, 16
Trained = tuple[list[float], dict[str, Tensor]]


class Layers(nn.Module):
    """A small network."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Linear(inside, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, outside)

    def forward(self, x: Tensor) -> Tensor:
        """Return [sample, outside]."""
        x = functional.leaky_relu(self.first(x))
        for layer in self.hidden:
            x = functional.leaky_relu(layer(x))
        return self.last(x)


class Judged(nn.Module):
    """A generator, and a frozen judge of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Layers(NOISE, 2)
        self.judge = Layers(2, 1).requires_grad_(False)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples, and how real the judge finds each."""
        made = self.generator(noise)
        return made, self.judge(made)


def discriminator() -> nn.Module:
    """Return the discriminator."""
    return Layers(2, 1)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return noise and real samples."""
    generator = torch.Generator().manual_seed(step)
    angle = torch.rand(SAMPLES, generator=generator) * 6.28
    real = torch.stack((angle.sin(), angle.cos()), dim=1)
    return torch.randn(SAMPLES, NOISE, generator=generator), real


def judged_right(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the discriminator's loss: `batch` has samples and whether they are real."""
    total = functional.binary_cross_entropy_with_logits(logits, batch[1], reduction="sum")
    return total, len(logits)


def judged_real(made: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    """Return the generator's loss."""
    logits = made[1]
    total = functional.binary_cross_entropy_with_logits(
        logits, torch.ones_like(logits), reduction="sum"
    )
    return total, len(logits)


def adam(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.Adam(groups, lr=1e-2, eps=1e-4)


def mixed(made: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return made and real samples in turn, and which of them are real."""
    samples = torch.stack((made, real), dim=1).flatten(0, 1)
    return samples, torch.tensor([[0.0], [1.0]]).repeat(len(made), 1)


def plain() -> Trained:
    """Train in one process with nothing but torch."""
    torch.manual_seed(0)
    judged = Judged()
    torch.manual_seed(0)
    critic = discriminator()
    both = adam(judged.generator.parameters()), adam(critic.parameters())
    losses = []
    for step in range(STEPS):
        noise, real = batch_of(step)
        samples = mixed(judged.generator(noise).detach(), real)
        total, count = judged_right(critic(samples[0]), samples)
        (total / count).backward()
        losses.append(total.item() / count)
        both[1].step()
        both[1].zero_grad()
        judged.judge.load_state_dict(critic.state_dict())
        total, count = judged_real(judged(noise), None)
        (total / count).backward()
        losses.append(total.item() / count)
        both[0].step()
        both[0].zero_grad()
    return losses, judged.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    noise, real = batch_of(0)
    makes = meshwright.Engine(Judged, plan, loss=judged_real, optimizer=adam, batch=(noise, real))
    judges = meshwright.Engine(
        discriminator, plan, loss=judged_right, optimizer=adam, batch=mixed(real, real)
    )
    losses = []
    for step in range(STEPS):
        noise, real = makes.slice(batch_of(step))
        made, _ = makes.outputs((noise, real), training=True)
        critic = judges.step(mixed(made, real))
        makes.load_state_dict({f"judge.{n}": v for n, v in judges.state_dict().items()})
        result = makes.step((noise, real))
        losses += [critic.loss, result.loss]
        if makes.leads:
            print(f"step {step} discriminator {critic.loss:.4f} generator {result.loss:.4f}")
    return losses, makes.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
