"""Direct preference optimisation: a policy learns which of two answers is preferred.

    torchrun --nproc-per-node=2 examples/dpo.py pipeline=2

The reference model is a frozen part of the module, so one plan places both.  A sample is a pair:
its chosen and its rejected answer have the same row of the batch, and never lie on two ranks.
Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, equation 7.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright

STEPS, SAMPLES, LENGTH, WORDS, WIDTH, BETA = 4, 8, 8, 24, 16, 0.5
Batch = Mapping[str, Tensor]
Trained = tuple[list[float], dict[str, Tensor]]


class Language(nn.Module):
    """A small language model: each position sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [row, position, word]."""
        x = self.words(tokens)
        for block in self.blocks:
            seen = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
            x = x + block(seen).tanh()
        return self.head(x)


class Preference(nn.Module):
    """A policy beside the reference that it began as."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Language()
        self.reference = Language().requires_grad_(False)
        self.reference.load_state_dict(self.policy.state_dict())

    def forward(self, answers: Tensor, mask: Tensor) -> Tensor:
        """Return by how much the policy prefers each answer more than the reference [pair, 2]."""
        tokens = answers.flatten(0, 1)
        policy = _likelihood(self.policy(tokens), tokens, mask.flatten(0, 1))
        reference = _likelihood(self.reference(tokens), tokens, mask.flatten(0, 1))
        return (policy - reference.detach()).unflatten(0, (-1, 2))


def _likelihood(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the log-likelihood of each row's answer, without what is masked out."""
    each = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return -(each * mask[:, 1:]).sum(1)


def batch_of(step: int) -> dict[str, Tensor]:
    """Return pairs of answers [pair, chosen and rejected, position], and where the answers are."""
    generator = torch.Generator().manual_seed(step)
    answers = torch.randint(WORDS, (SAMPLES, 2, LENGTH), generator=generator)
    answers[:, 1, :3] = answers[:, 0, :3]  # the question
    length = torch.randint(4, LENGTH + 1, (SAMPLES, 2, 1), generator=generator)
    places = torch.arange(LENGTH)
    return {"answers": answers, "mask": ((places >= 3) & (places < length)).float()}


def loss(margins: Tensor, batch: Batch) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the summed loss, the number of pairs, and how often the chosen answer leads."""
    ahead = margins[:, 0] - margins[:, 1]
    return -functional.logsigmoid(BETA * ahead).sum(), len(ahead), {"right": (ahead > 0).sum()}


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters."""
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)


def plain() -> Trained:
    """Train in one process with nothing but torch."""
    torch.manual_seed(0)
    model = Preference()
    optimizer = adamw(model.policy.parameters())
    losses = []
    for step in range(STEPS):
        batch = batch_of(step)
        total, count, _ = loss(model(batch["answers"], batch["mask"]), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses, model.state_dict()


def train(plan: Mapping[str, Any] | None = None) -> Trained:
    """Train under a plan, on every rank."""
    engine = meshwright.Engine(Preference, plan, loss=loss, optimizer=adamw, batch=batch_of(0))
    losses = []
    for step in range(STEPS):
        result = engine.step(engine.slice(batch_of(step)))
        losses.append(result.loss)
        if engine.leads:
            print(f"step {step} loss {result.loss:.4f} right {result.metrics['right']:.2f}")
    return losses, engine.state_dict()


if __name__ == "__main__":
    train({name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[1:])})
