"""Lightning Fabric over an Engine: its loggers and callbacks, under a plan.

    torchrun --nproc-per-node=2 examples/with_fabric.py zero=3

Fabric's loop stays the script's own.  `fabric.setup` would wrap the module for one strategy; the
Engine takes its place, and `engine.step` that of `fabric.backward`, `fabric.clip_gradients` and the
optimizer's step.  Ranks are torchrun's or those of `meshwright run`, so Fabric has one device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional

import meshwright

STEPS, SAMPLES, CLASSES = 4, 8, 3
Trained = tuple[list[float], dict[str, Tensor]]


def build() -> nn.Module:
    """Return a small classifier of images."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return images and their classes."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return images, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loss(out: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the summed loss and the number of images."""
    return functional.cross_entropy(out, batch[1], reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Losses:
    """A callback of Fabric."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, value: float) -> None:
        """Note a step."""
        self.seen.append(value)


def plain() -> Trained:
    """Train in one process with nothing but Fabric."""
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(folder), callbacks=[losses])
        torch.manual_seed(0)
        module = build()
        model, optimizer = fabric.setup(module, sgd(module.parameters()))
        for step in range(STEPS):
            images, classes = batch_of(step)
            value = functional.cross_entropy(model(images), classes)
            fabric.backward(value)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            fabric.log("loss", value.item(), step)
            fabric.call("on_step_end", value.item())
    return losses.seen, module.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    losses = Losses()
    engine = meshwright.Engine(
        build,
        plan,
        loss=loss,
        optimizer=sgd,
        batch=batch_of(0),
        clip_norm=0.5,
    )
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder, flush_logs_every_n_steps=1)
        # Nothing is computed by Fabric, whatever the device of the Engine.
        loggers = logger if engine.leads else None
        fabric = Fabric(accelerator="cpu", devices=1, loggers=loggers, callbacks=[losses])
        for step in range(STEPS):
            result = engine.step(engine.slice(batch_of(step)))
            fabric.log("loss", result.loss, step)
            fabric.call("on_step_end", result.loss)
        if engine.leads:
            assert len(Path(logger.log_dir, "metrics.csv").read_text().splitlines()) == STEPS + 1
    return losses.seen, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
