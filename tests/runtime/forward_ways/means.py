"""Ways of writing a loss that is a mean over what counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.runtime.forward_ways.way import (
    ALONE,
    POSITIONS,
    WIDTH,
    Net,
    Way,
    batch_of,
    returned,
)


def pieces(out: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of cross-entropies."""
    return functional.cross_entropy(
        out.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def ignoring(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def masked(out: Tensor, batch: Any) -> Tensor:
    mask = (batch[1] != -100).float()
    return (out.square().mean(-1) * mask).sum() / mask.sum()


def weighted(out: Tensor, batch: Any) -> Tensor:
    weight = torch.arange(1.0, WIDTH + 1)
    return functional.cross_entropy(out.flatten(0, 1), batch[1].flatten().relu(), weight=weight)


def masked_pixels(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), batch[1].relu().flatten(), ignore_index=3)


def counted(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return pieces(out, batch[1]), (batch[1] != -100).sum()


def miscounted(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return ignoring(out, batch) * len(out), len(out)


class LossInside(Net):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.features(x).flatten(0, 1), targets.flatten(), ignore_index=-100
        )


def lengths_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return each sample's length, which the first batch has alike, and whether positions count."""
    lengths = (batch[1] != -100).sum(1)
    return lengths, torch.arange(POSITIONS) < lengths[:, None]


def with_lengths(step: int) -> tuple[Tensor, Tensor]:
    x, targets = batch_of(step)
    return x, (targets != -100).sum(1)


def with_mask(step: int) -> tuple[Tensor, Tensor]:
    x, targets = batch_of(step)
    return x, (targets != -100).float()


def with_weights(step: int) -> tuple[Tensor, Tensor]:
    x, targets = batch_of(step)
    return x, torch.where(targets == -100, 0.25, 1.0)


def by_lengths(out: Tensor, batch: Any) -> Tensor:
    counts = torch.arange(POSITIONS) < batch[1][:, None]
    return (out.square().mean(-1) * counts).sum() / counts.sum()


def by_mask(out: Tensor, batch: Any) -> Tensor:
    return (out.square().mean(-1) * batch[1]).sum() / batch[1].sum()


def clamped(out: Tensor, batch: Any) -> Tensor:
    mask = (batch[1] != -100).float()
    return (out.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def picked_mean(out: Tensor, batch: Any) -> Tensor:
    return out.square().mean(-1)[batch[0][..., 0] > 0].mean()


def per_sample_mean(out: Tensor, batch: Any) -> Tensor:
    """Return the mean over samples of each one's own mean."""
    mask = (batch[1] != -100).float()
    return ((out.square().mean(-1) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def shifted(out: Tensor, batch: Any) -> Tensor:
    """Return the mean of cross-entropies of the next positions, as causal language models do."""
    return functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class LossInDataclass(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.features(x)
        return Output(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def loss_of(out: Any, batch: Any) -> Any:
    return out.loss


WAYS = {
    "ignored": Way(Net, ignoring),
    "masked": Way(Net, masked),
    "another number": Way(Net, masked_pixels),
    "weighted": Way(Net, weighted, ALONE),
    "inside": Way(LossInside, returned, inputs=lambda batch: batch),
    "miscounted": Way(Net, miscounted, ALONE),
    "counted": Way(Net, counted),
    "clamped": Way(Net, clamped),
    "picked": Way(Net, picked_mean, ALONE),
    "per sample": Way(Net, per_sample_mean),
    "shifted": Way(Net, shifted),
    "in a dataclass": Way(LossInDataclass, loss_of, inputs=lambda batch: batch),
    "lengths": Way(Net, by_lengths, batches=with_lengths),
    "float mask": Way(Net, by_mask, batches=with_mask),
    "weights": Way(Net, by_mask, batches=with_weights),
}
