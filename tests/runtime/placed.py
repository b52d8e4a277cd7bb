"""Modules that take positions with their tokens, as `placed.py:branches` names them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.runtime import cases
from tests.runtime.parallel.test_attention_api import WIDTH, Block

VOCABULARY = 64


class Sum(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


def branches() -> dict[str, Any]:
    return {
        "words": (nn.Embedding(VOCABULARY, WIDTH), "tokens"),
        "places": (nn.Embedding(cases.SEQ_LEN, WIDTH), "positions"),
        "both": (Sum(), "words", "places"),
        "first": (Block(mixed=False), "both"),
        "second": (Block(mixed=True), "first"),
        "head": (nn.Linear(WIDTH, VOCABULARY), "second"),
    }


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (module, *_) in branches().items():
            self.add_module(name, module)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        made: Tensor = self.head(self.second(self.first(x)))
        return made
