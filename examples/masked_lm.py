"""A masked language model with Dropout, padding and unequally many masked words, under any plan.

    torchrun --nproc-per-node=2 examples/masked_lm.py zero=3

The loss returns its sum and over how many words it is, so samples with few masked words count as
they should.  Dropout is drawn under a seed of step, micro-batch and layer: the same masks under any
plan with equal micro-batches, recomputed or resumed.  The plain loop here draws them likewise.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright
from meshwright.runtime.tracing.replayed_stage import seed_draws, step_seed

STEPS, SAMPLES, MICRO_BATCH, LENGTH, WORDS, WIDTH, MASK = 4, 8, 2, 10, 32, 16, 0
Batch = Mapping[str, Tensor]
Trained = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """Attention to all that is no padding, an MLP, Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        y = self.norm1(x)
        made, _ = self.attention(y, y, y, key_padding_mask=padding, need_weights=False)
        x = x + self.drop(made)
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class MaskedLM(nn.Module):
    """A small BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """Return logits [sample, position, word]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.words(ids) + self.places(places))
        for block in self.blocks:
            x = block(x, padding)
        return self.head(x)


def batch_of(step: int) -> dict[str, Tensor]:
    """Return texts of unequal length, some words of which are masked; of some texts none."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    length = torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    padding = torch.arange(LENGTH) >= length
    share = torch.linspace(0, 0.6, SAMPLES).unsqueeze(1)
    masked = (torch.rand(SAMPLES, LENGTH, generator=generator) < share) & ~padding
    targets = whole.where(masked, -100)
    return {"ids": whole.where(~masked, MASK), "padding": padding, "targets": targets}


def loss(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the masked words, and how many they are."""
    targets = batch["targets"]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets >= 0).sum()


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def plain() -> Trained:
    """Train in one process with nothing but torch, and Dropout seeded by layer."""
    torch.manual_seed(0)
    model = MaskedLM()
    seed: list[int] = [0]
    for name in ("drop", *(f"blocks.{at}" for at in range(3))):
        part = model.get_submodule(name)
        part.forward = functools.partial(_drawn, seed, name, part.forward)  # type: ignore[method-assign]
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        whole, counts = 0.0, int((batch["targets"] >= 0).sum())
        for first in range(0, SAMPLES, MICRO_BATCH):
            part_of = {name: leaf[first : first + MICRO_BATCH] for name, leaf in batch.items()}
            seed[0] = step_seed(0, step, first)
            total, _ = loss(model(part_of["ids"], part_of["padding"]), part_of)
            (total / counts).backward()
            whole += total.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole / counts)
    return losses, model.state_dict()


def _drawn(seed: list[int], name: str, forward: Any, *args: Any) -> Tensor:
    with seed_draws(seed[0], name, torch.device("cpu")):
        made: Tensor = forward(*args)
        return made


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    engine = meshwright.Engine(
        MaskedLM,
        {"micro_batch": MICRO_BATCH, **(plan or {})},
        loss=loss,
        optimizer=adamw,
        batch=batch_of(0),
    )
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(batch_of(step)))
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f} of {result.count:.0f} words")
    return losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
