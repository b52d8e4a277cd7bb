"""Images and texts embedded side by side, each told from all others of the global batch.

    torchrun --nproc-per-node=2 examples/two_towers.py pipeline=2

The loss sees the embeddings of all ranks and micro-batches at once: `meshwright.whole_batch`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright

STEPS, SAMPLES, WORDS, LENGTH, WIDTH = 4, 8, 20, 6, 16
Trained = tuple[list[float], dict[str, Tensor]]


class TwoTowers(nn.Module):
    """Embeddings of both, and how sharply they are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.image = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.text = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.sharpness = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings [sample, width] of length 1, and the sharpness."""
        x = self.patches(images).flatten(2).mean(-1)
        for layer in self.image:
            x = x + layer(x).tanh()
        y = self.words(tokens).mean(1)
        for layer in self.text:
            y = y + layer(y).tanh()
        both = (functional.normalize(one, dim=-1) for one in (x, y))
        return *both, self.sharpness.exp()


def batch_of(step: int) -> dict[str, Tensor]:
    """Return images with their texts."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    return {"images": torch.randn(SAMPLES, 3, 8, 8, generator=generator), "tokens": tokens}


def contrastive(made: tuple[Tensor, Tensor, Tensor], batch: Any) -> tuple[Tensor, int, Any]:
    """Return the summed loss of finding each image's text and each text's image, and a metric."""
    images, texts, sharpness = made
    alike = sharpness * images @ texts.T
    right = torch.arange(len(alike), device=alike.device)
    both = [functional.cross_entropy(one, right, reduction="sum") for one in (alike, alike.T)]
    return (both[0] + both[1]) / 2, len(alike), {"found": (alike.argmax(1) == right).sum()}


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


def plain() -> Trained:
    """Train in one process with nothing but torch."""
    torch.manual_seed(0)
    model = TwoTowers()
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        total, count, _ = contrastive(model(**batch_of(step)), None)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses, model.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank, in micro-batches of two."""
    engine = meshwright.Engine(
        TwoTowers,
        {"micro_batch": 2, **(plan or {})},
        loss=meshwright.whole_batch(contrastive),
        optimizer=adamw,
        batch=batch_of(0),
    )
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(batch_of(step)))
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f} found {result.metrics['found']:.2f}")
    return losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
