"""An image classifier with augmentation, BatchNorm and SGD, under any plan.

    python examples/image_classifier.py                                # plain torch, one process
    torchrun --nproc-per-node=2 examples/image_classifier.py           # data parallelism
    torchrun --nproc-per-node=2 examples/image_classifier.py zero=3
    torchrun --nproc-per-node=2 examples/image_classifier.py pipeline=2

BatchNorm normalises each micro-batch, so plans with equal micro-batches train alike.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

import meshwright

STEPS, SAMPLES, MICRO_BATCH, CLASSES = 4, 16, 4, 5
Batch = tuple[Tensor, Tensor]
Trained = tuple[list[float], dict[str, Tensor]]


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the same size."""
        y = functional.relu(self.norm1(self.first(x)))
        return functional.relu(self.norm2(self.second(y)) + self.shortcut(x))


class Classifier(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(8, 8), Residual(8, 16)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [sample, class]."""
        x = self.stem(images)
        for block in self.blocks:
            x = functional.max_pool2d(block(x), 2)
        return self.head(x.mean((2, 3)))


def batch_of(step: int) -> Batch:
    """Return the global batch of a step, mirrored and shifted at random; the same on all ranks."""
    torch.manual_seed(step)
    labels = torch.randint(CLASSES, (SAMPLES,))
    images = torch.randn(SAMPLES, 3, 8, 8) + labels.view(-1, 1, 1, 1) / CLASSES
    mirrored = torch.rand(SAMPLES) < 0.5
    images[mirrored] = images[mirrored].flip(-1)
    return images.roll(int(torch.randint(3, ())), dims=-1), labels


def loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the sum of the losses, how many samples it is over, and how many are right."""
    total = functional.cross_entropy(logits, batch[1], reduction="sum")
    return total, len(logits), {"accuracy": (logits.argmax(1) == batch[1]).sum()}


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-4)


def plain() -> Trained:
    """Train in one process with nothing but torch."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = sgd(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        images, labels = batch_of(step)
        whole = 0.0
        pairs = zip(images.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True)
        for part in pairs:
            total, _, _ = loss(model(part[0]), part)
            (total / SAMPLES).backward()
            whole += total.item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(whole / SAMPLES)
    return losses, model.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    plan = {"micro_batch": MICRO_BATCH, **(plan or {})}
    engine = meshwright.Engine(Classifier, plan, loss=loss, optimizer=sgd, batch=batch_of(0))
    scheduler = CosineAnnealingLR(engine.optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(batch_of(step)))
        scheduler.step()
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f} accuracy {result.metrics['accuracy']:.2f}")
    return losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
