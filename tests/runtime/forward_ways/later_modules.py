"""Modules of published code that keep something beside their weights; none of it is copied.

MLP-Mixer (Tolstikhin), Mean Teacher (Tarvainen), supervised contrast (Khosla), center loss (Wen),
LoRA that merges in eval mode (Hu), MoCo (He), sparse autoencoders with dead latents (Gao), TabNet's
ghost batches (Arik), Medusa's heads (Cai), Matryoshka (Kusupati), YOLO's grids (Jocher),
checkpoints of the user's own (Chen), capacity that a forward counts (Burgess), TCN (Bai), dropped
weights (Wan), deep SVDD (Ruff), a clamped scale (Radford), states that go on (Werbos).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.runtime.forward_ways.published import (
    Block,
    D,
    T,
    V,
    first_of,
    generator_of,
    images,
    of_words,
    only,
    returned_mean,
    tokens,
    views,
    whole,
)
from tests.runtime.forward_ways.published_modules import mlp, transitions
from tests.runtime.forward_ways.way import ALONE, ON_RANKS, SAMPLES, Way, squares


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.tokens, self.channels = mlp(T, 2 * T, T), mlp(D, 2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MixerBlock() for _ in range(2)))
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean(1))


class MeanTeacher(nn.Module):
    """A teacher that follows inside of the forward; the share of consistency grows by step."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(D, D, V)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.share = 0.0

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    p.mul_(0.9).add_(q, alpha=0.1)
        wanted = self.teacher(other).softmax(-1)
        out = self.student(x)
        return out.square().mean() + self.share * functional.mse_loss(out.softmax(-1), wanted)


def grow(module: Any, step: int) -> None:
    module.share = 0.5 * step


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(D, D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.head(self.body(x).relu()), dim=-1)


def supervised_contrast(out: Tensor, batch: Any) -> Tensor:
    """Return the mean over anchors of samples of one class beside each other."""
    labels = batch[2]
    alike = (labels[:, None] == labels[None]).float() - torch.eye(len(labels))
    scores = out @ out.T / 0.5 - 1e9 * torch.eye(len(labels))
    logs = scores.log_softmax(-1)
    return -((alike.clamp(min=0) * logs).sum(1) / alike.clamp(min=0).sum(1).clamp(min=1)).mean()


class Centers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(D, D, D), nn.Linear(D, V)
        self.centers = nn.Parameter(torch.randn(V, D))

    def forward(self, x: Tensor, other: Tensor, label: Tensor) -> Tensor:
        h = self.body(x)
        apart = (h - self.centers[label]).square().sum(-1)
        return functional.cross_entropy(self.head(h), label) + 0.1 * apart.mean()


class Merged(nn.Linear):
    """Adds its low rank to the weight in eval mode, and takes it away in train mode."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, D) / D)
        self.up = nn.Parameter(torch.randn(D, 2) / D)
        self.merged = False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = functional.linear(x, self.weight, self.bias)
        return out if self.merged else out + x @ self.down.T @ self.up.T


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Merged() for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


class MoCo(nn.Module):
    """A key encoder follows, and a queue takes its keys, inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = mlp(D, D, D)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(16, D), dim=-1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q = functional.normalize(self.query(x), dim=-1)
        with torch.no_grad():
            if self.training:
                for p, r in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    p.data = 0.9 * p.data + 0.1 * r.data
            k = functional.normalize(self.key(other), dim=-1)
        scores = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1)
        if self.training:
            with torch.no_grad():
                rows = (self.at + torch.arange(len(k))) % 16
                self.queue[rows] = k
                self.at.add_(len(k)).remainder_(16)
        return functional.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))


class Sparse(nn.Module):
    """An autoencoder of the largest latents, with an auxiliary loss by those that are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.register_buffer("idle", torch.zeros(4 * D))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).relu()
        top = z.topk(4, -1)
        kept = torch.zeros_like(z).scatter(-1, top.indices, top.values)
        dead = self.idle > 2 * len(x)
        if self.training:
            fired = (kept > 0).any(0)
            self.idle = torch.where(fired, 0.0, self.idle + len(x))
        again = self.decoder(z * dead)
        out = self.decoder(kept)
        return (out - x).square().mean() + 0.1 * (again - (x - out).detach()).square().mean()


class Ghost(nn.Module):
    """Normalises parts of two samples each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.norm(part) for part in self.body(x).split(2)]
        return self.head(torch.cat(parts).relu())


class Medusa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(V, D), Block()
        self.heads = nn.ModuleList(nn.Linear(D, V) for _ in range(3))

    def forward(self, idx: Tensor) -> list[Tensor]:
        x = self.block(self.words(idx))
        return [head(x) for head in self.heads]


def of_later_words(out: Any, batch: Any) -> Tensor:
    """Return the mean losses of heads that predict one to three positions on."""
    total = torch.zeros(())
    for ahead, logits in enumerate(out):
        kept = logits[:, : T - ahead]
        targets = batch["targets"][:, ahead:]
        mean = functional.cross_entropy(kept.flatten(0, 1), targets.flatten(), ignore_index=-100)
        total = total + 0.8**ahead * mean
    return total


def nested(out: Tensor, batch: Any) -> Tensor:
    """Return losses of the first 2, 4 and 8 features."""
    return sum((out[..., :n].sum(-1) - batch[1].sum(-1)).square().mean() for n in (2, 4, 8))


class Grids(nn.Module):
    """Keeps grids by scale in a list of its own, made when a size comes for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(2, 4, 1) for _ in range(2))
        self.grid = [torch.zeros(1)] * 2

    def forward(self, x: Tensor) -> Tensor:
        totals = []
        for at, convolution in enumerate(self.convolutions):
            y = convolution(x[..., :: at + 1, :: at + 1]).permute(0, 2, 3, 1)
            if self.grid[at].shape[:2] != y.shape[1:3]:
                rows, columns = torch.arange(y.shape[1]), torch.arange(y.shape[2])
                self.grid[at] = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
            xy = y[..., :2].sigmoid() * 2 + self.grid[at]
            totals.append(torch.cat([xy, y[..., 2:].exp()], -1).flatten(1))
        return torch.cat(totals, 1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.words(idx)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


class Capacity(nn.Module):
    """Counts its training forwards, and lets more through with each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(D, D, D), mlp(D, D, D)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        if self.training:
            self.forwards += 1
        apart = (z.square().mean(-1) - 0.1 * self.forwards).abs().mean()
        return (self.decoder(z) - x).square().mean() + apart


class Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(D, D, 2, dilation=2**at)) for at in range(2)
        )
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mT
        for at, layer in enumerate(self.layers):
            y = y + layer(functional.pad(y, (2**at, 0))).relu()
        return self.head(y.mT)


class Dropped(nn.Module):
    """Computes with weights of which a mask of the batch drops some, bound as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(D, D), nn.Linear(D, V)
        raw = self.inner.weight
        del self.inner._parameters["weight"]
        self.inner.register_parameter("weight_raw", nn.Parameter(raw.data))
        self.inner.weight = raw.data

    def forward(self, x: Tensor) -> Tensor:
        mask = (self.inner.weight_raw.detach().abs() > 0.05).float()
        self.inner.weight = self.inner.weight_raw * mask
        return self.head(self.inner(x).tanh())


class Svdd(nn.Module):
    """Pulls samples to a center that the loop sets before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(D, D, D), nn.Linear(D, D, bias=False)
        self.center: Tensor = torch.zeros(D)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.body(x)) - self.center).square().sum(-1)


def set_center(module: Any, step: int) -> None:
    if step == 0:
        module.center = 0.1 * torch.ones(D)
    module.center.clamp_(min=0.05)


class Tempered(nn.Module):
    """A scale of the logits that the forward clamps in place, as CLIP's training does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(D, D, D), nn.Linear(D, V, bias=False)
        self.scale = nn.Parameter(torch.ones(()) * 2.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 2.0)
        h = functional.normalize(self.body(x), dim=-1)
        return self.scale.exp() * self.head(h)


class Frames(nn.Module):
    """A recurrent state that goes on from batch to batch, cut off from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(D, D), nn.Linear(D, V)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), D) if self.state is None else self.state[: len(x)]
        state = self.cell(x, state)
        if self.training:
            self.state = state.detach()
        return self.head(state)


def steps_of(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, T, D, generator=generator_of(step))
    return x, x.flip(1)


REPLICAS = frozenset(("replicas",))
WAYS = {
    "MLP-Mixer": Way(Mixer, squares, batches=first_of),
    "Mean Teacher": Way(
        MeanTeacher, returned_mean, trains=REPLICAS, inputs=whole, batches=views, before=grow
    ),
    "supervised contrast": Way(Embedder, supervised_contrast, trains=ALONE, batches=transitions),
    "center loss": Way(Centers, returned_mean, inputs=whole, batches=transitions),
    "merged LoRA": Way(Adapted, squares, batches=views),
    "MoCo": Way(MoCo, returned_mean, trains=ALONE, inputs=whole, batches=views),
    "dead latents": Way(Sparse, returned_mean, trains=ALONE, batches=views),
    "ghost batches": Way(Ghost, squares, trains=ON_RANKS, batches=views),
    "Medusa": Way(Medusa, of_later_words, trains=ALONE, inputs=only("idx"), batches=tokens),
    "Matryoshka": Way(Embedder, nested, batches=views),
    "grids": Way(Grids, squares, trains=ON_RANKS, batches=images),
    "own checkpoints": Way(Checkpointed, of_words, inputs=only("idx"), batches=tokens),
    "capacity": Way(Capacity, returned_mean, trains=ON_RANKS, batches=views),
    "TCN": Way(Temporal, squares, batches=steps_of),
    "dropped weights": Way(Dropped, squares, trains=ON_RANKS, batches=views),
    "deep SVDD": Way(Svdd, squares, batches=views, before=set_center),
    "clamped scale": Way(Tempered, squares, trains=REPLICAS, batches=views),
    "frames": Way(Frames, squares, trains=ALONE, batches=views),
}
