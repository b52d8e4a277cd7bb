"""Chains of a user's own modules, as `chains.py:factory` names them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 64, 24


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class CausalMix(nn.Module):
    """Each position sees the running mean of those before it."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        mean = self.norm(x).cumsum(1) / count
        return x + self.scale * self.down(functional.gelu(self.up(mean)))


def factory() -> nn.Sequential:
    return nn.Sequential(
        Embed(), *(CausalMix(32) for _ in range(3)), CausalMix(48), nn.Linear(WIDTH, VOCABULARY)
    )


class Tied(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.table.weight)


def tied() -> list[nn.Module]:
    embed = Embed()
    return [embed, CausalMix(32), Tied(embed.table)]


def normalised() -> list[nn.Module]:
    return [Embed(), nn.BatchNorm1d(16), nn.Linear(WIDTH, VOCABULARY)]


def dropping() -> list[nn.Module]:
    return [Embed(), nn.Dropout(0.5), CausalMix(32), nn.Linear(WIDTH, VOCABULARY)]


def broken() -> list[nn.Module]:
    raise ValueError("no luck")


def number() -> int:
    return 3


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(x + y)


def flattened() -> dict[str, object]:
    """Modules that have no parameters of their own stand between others."""
    return {
        "words": (Embed(), "tokens"),
        "squashed": (nn.Tanh(), "words"),
        "other": (Embed(), "tokens"),
        "rectified": (nn.ReLU(), "other"),
        "both": (Sum(), "squashed", "rectified"),
    }
