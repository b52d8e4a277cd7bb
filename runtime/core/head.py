"""The head of a language model: what every family ends with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """Final norm and output projection: hidden states in, logits out."""

    def __init__(
        self,
        norm: nn.Module,
        output: nn.Linear,
        cap: float | None = None,
        *,
        divisor: float = 1.0,
    ) -> None:
        """Logits are divided by `divisor`; none leaves (-cap, cap), if there is a cap."""
        super().__init__()
        self.norm = norm
        self.output = output
        self.cap = cap
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [sample, position, vocabulary]."""
        logits = self.output(self.norm(x))
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else _Capped.apply(logits, self.cap)


class _Capped(torch.autograd.Function):
    """cap tanh(x / cap), which keeps its output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        capped = x.div(cap).tanh_().mul_(cap)
        ctx.save_for_backward(capped)
        return capped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (capped,) = ctx.saved_tensors
        return capped.div(ctx.cap).square_().neg_().add_(1).mul_(grad), None
