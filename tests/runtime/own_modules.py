"""Small modules of the kinds that people train, each with an example of its batch.

`MODULES` has one function per kind; it returns the module, a batch and what the module gets of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS = 8, 20


class Basic(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    """Convolutions with BatchNorm, activations in place, blocks in Sequentials."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Basic(width, width), Basic(width, width))
        self.layer2 = nn.Sequential(Basic(width, 2 * width, 2), Basic(2 * width, 2 * width))
        self.fc = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Skips over all levels; the timestep, if there is one, is a keyword."""

    def __init__(self, timestep: bool = False) -> None:
        super().__init__()
        self.time = nn.Embedding(10, WIDTH) if timestep else None
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.downs = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, 2, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x: Tensor, *, timestep: Tensor | None = None) -> Tensor:
        x = self.stem(x)
        if self.time is not None and timestep is not None:
            x = x + self.time(timestep)[:, :, None, None]
        skips = []
        for down, norm in zip(self.downs, self.norms, strict=True):
            skips.append(x)
            x = functional.silu(norm(down(x)))
        for up in self.ups:
            x = functional.interpolate(x, scale_factor=2.0)
            x = up(torch.cat((x, skips.pop()), dim=1))
        return self.out(x)


class Attention(nn.Module):
    """Self-attention, or attention to `memory`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2)
            for part in (self.q(x), self.k(source), self.v(source))
        )
        made = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias if mask is None else mask,
            is_causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.o(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block; with `cross` it also reads another sequence."""

    def __init__(self, dropout: float = 0.0, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.cross = Attention(dropout) if cross else None
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None, **kwargs: Any) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), **kwargs))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    """Patches, a token of their class, positions, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Bert(nn.Module):
    """A padding mask, made of the batch, for every block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.norm(self.words(ids) + self.places(places)))
        seen = (mask[:, None, None, :] > 0).expand(-1, 1, ids.shape[1], -1)
        for block in self.blocks:
            x = block(x, mask=seen)
        return self.head(x)


class GPT(nn.Module):
    """Causal; the output projection is the embedding, or a module that holds the same weight."""

    def __init__(self, dropout: float = 0.0, tied: str = "function", blocks: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        if tied == "module":
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else functional.linear(x, self.words.weight)


class TwoTowers(nn.Module):
    """Images and texts, one number per pair."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = ResNet(), Bert()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(WORDS, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        left = functional.normalize(self.left(self.image(image)), dim=-1)
        right = functional.normalize(self.right(self.text(ids, mask).mean(1)), dim=-1)
        return self.scale.exp() * left, right


class Recurrent(nn.Module):
    """LSTM layers: each returns a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x, last = self.words(ids), None
        for layer in self.layers:
            x, (last, _) = layer(x)
        return self.head(torch.cat((x, last.transpose(0, 1).expand_as(x)), dim=-1))


class T5(nn.Module):
    """Encoder and decoder read one embedding; a bias of positions goes to every block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, 2)
        self.encoder = nn.ModuleList(Block(dropout) for _ in range(2))
        self.decoder = nn.ModuleList(Block(dropout, cross=True) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        bias = self.bias((at[:, None] - at).abs()).permute(2, 0, 1)[None]
        x = self.words(ids)
        for block in self.encoder:
            x = block(x, bias=bias)
        y = self.words(labels)
        for block in self.decoder:
            y = block(y, x, causal=True)
        return y @ self.words.weight.T


class Experts(nn.Module):
    """Tokens go to the expert that the router likes best, in a loop of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            (rows,) = torch.nonzero(chosen == at, as_tuple=True)
            result = result.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + result.view_as(x)


class Language(nn.Module):
    """Words, blocks, a head."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        *,
        blocks: int = 2,
        words: int = WORDS,
        width: int = WIDTH,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=padding)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixture(Language):
    """Blocks of experts, whose sizes depend on values inside the unit."""

    def __init__(self) -> None:
        super().__init__(Experts)


class Dicts(nn.Module):
    """A dict in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, given: dict[str, Tensor]) -> dict[str, Any]:
        x = given["x"]
        made = []
        for part in self.parts:
            x = part(x).relu() * given["weight"][:, None]
            made.append(x)
        return {"last": x, "all": made, "count": len(made)}


class Pair(nn.Module):
    """Generator and discriminator in one module; the discriminator is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return self.discriminator(self.generator(noise)), self.discriminator(real)


class Changing(nn.Module):
    """Writes into what a unit made, and into a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 1)
        mask[::2] = 1.0
        self.calls += 1
        first = self.parts[0](x)
        view = first[:, :2]
        second = self.parts[1](x)
        view += second[:, :2]
        with torch.no_grad():
            fixed = (first * 2).tanh()
        return self.parts[2](first.relu_()) * mask + fixed


class Undecided(nn.Module):
    """What it does depends on a value, between units."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        if x.mean() > 0:
            x = -x
        return self.parts[1](x)


def _images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def _ids() -> Tensor:
    return torch.randint(1, WORDS, (4, 7))


def _mask() -> Tensor:
    return (torch.arange(7) < torch.randint(2, 8, (4, 1))).long()


def _first(batch: Any) -> Any:
    return batch


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any], Any]]] = {
    "resnet": (ResNet, _images, _first),
    "unet": (UNet, _images, _first),
    "vit": (ViT, _images, _first),
    "bert": (Bert, lambda: (_ids(), _mask()), _first),
    "two_towers": (TwoTowers, lambda: (_images(), _ids(), _mask()), _first),
    "gpt": (lambda: GPT(tied="none"), lambda: {"ids": _ids()}, _first),
    "gpt_tied": (lambda: GPT(tied="module"), _ids, _first),
    "lstm": (Recurrent, _ids, _first),
    "diffusion": (
        lambda: UNet(timestep=True),
        lambda: {"image": _images(), "t": torch.randint(0, 10, (4,))},
        lambda batch: {"x": batch["image"] * 2 - 1, "timestep": batch["t"]},
    ),
    "t5": (T5, lambda: (_ids(), _ids()), _first),
    "experts": (Mixture, _ids, _first),
    "dicts": (
        Dicts,
        lambda: {"x": torch.randn(4, WIDTH), "weight": torch.rand(4), "name": "a"},
        lambda batch: (batch,),
    ),
    "gan": (Pair, lambda: (torch.randn(4, 4), torch.randn(4, WIDTH)), _first),
    "changing": (Changing, lambda: torch.randn(4, WIDTH), _first),
}
"""By kind: the module, a batch of four samples, and what the module gets of it."""
