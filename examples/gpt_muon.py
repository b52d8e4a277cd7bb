"""A GPT trained with Muon for the matrices of its blocks and AdamW for the rest, under any plan.

    torchrun --nproc-per-node=2 examples/gpt_muon.py zero=3

Muon makes a whole matrix orthogonal, so under ZeRO each matrix has an owner that gathers its
gradient; AdamW treats each element by itself and steps where the parts are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright

STEPS, SAMPLES, LENGTH, WORDS, WIDTH = 4, 8, 12, 32, 16
Trained = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self._qkv(x)]
        made = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm1(x)).chunk(3, dim=-1)


class GPT(nn.Module):
    """The output projection is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [sample, position, word]."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(step: int) -> Tensor:
    """Return the tokens of a step [sample, position], one more than the model is given."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=generator)


def inputs(tokens: Tensor) -> Tensor:
    """Return what the model is given of a batch."""
    return tokens[:, :-1]


def loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
    """Return the summed loss of the next tokens, and their number."""
    targets = tokens[:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, targets.numel()


def muon(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the blocks' matrices."""
    return torch.optim.Muon(groups, lr=0.02)


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all else."""
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


def group_of(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the settings of a parameter, and which optimizer has it."""
    if name.startswith("blocks.") and parameter.ndim == 2:
        return {"optimizer": muon, "weight_decay": 0.0}
    return {"optimizer": adamw, "weight_decay": 0.1 if parameter.ndim == 2 else 0.0}


def plain() -> Trained:
    """Train in one process with nothing but torch."""
    torch.manual_seed(0)
    model = GPT()
    named = list(model.named_parameters())
    settings = [group_of(name, parameter) for name, parameter in named]
    optimizers = []
    for factory in (muon, adamw):
        groups = [
            {"params": [parameter], "weight_decay": own["weight_decay"]}
            for (_, parameter), own in zip(named, settings, strict=True)
            if own["optimizer"] is factory
        ]
        optimizers.append(factory(groups))
    losses = []
    for step in range(STEPS):
        tokens = batch_of(step)
        total, count = loss(model(inputs(tokens)), tokens)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses, model.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    engine = meshwright.Engine(
        GPT,
        plan,
        loss=loss,
        inputs=inputs,
        optimizer=adamw,
        groups=group_of,
        batch=batch_of(0),
        clip_norm=1.0,
    )
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(batch_of(step)))
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f} gradient norm {result.grad_norm:.3f}")
    return losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
