"""Small networks of plain modules that branch, as `networks.py:unet` and others name them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, SIDE = 64, 4
"""A sample of 16 tokens is read as a picture of 4 x 4 pixels."""


class Pixels(nn.Module):
    """Token numbers as a picture of so many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, channels)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).transpose(1, 2).unflatten(2, (SIDE, SIDE))


class Conv(nn.Module):
    """Norm, activation and a convolution; what it reads besides is added to its result."""

    def __init__(self, inside: int, outside: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, inside)
        self.conv = nn.Conv2d(inside, outside, size, stride=stride, padding=size // 2)

    def forward(self, x: Tensor, *added: Tensor) -> Tensor:
        return sum(added, self.conv(functional.silu(self.norm(x))))


class Up(nn.Module):
    """Twice as many pixels, beside those of the same level on the way down."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        larger = functional.interpolate(x, size=skipped.shape[-2:])
        return functional.silu(self.conv(torch.cat((larger, skipped), dim=1)))


class PixelHead(nn.Module):
    """A number for each token of the vocabulary at every pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out = nn.Linear(channels, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(2).transpose(1, 2))


class PooledHead(nn.Module):
    """The same numbers at every position, out of the mean of all pixels or positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(2).mean(-1) if x.dim() == 4 else x.mean(1)
        return self.out(mean).unsqueeze(1).expand(-1, SIDE * SIDE, -1).contiguous()


def unet() -> dict[str, object]:
    return {
        "pixels": (Pixels(8), "tokens"),
        "down1": (Conv(8, 12, stride=2), "pixels"),
        "down2": (Conv(12, 16, stride=2), "down1"),
        "middle": (Conv(16, 16), "down2"),
        "up2": (Up(16 + 12, 12), "middle", "down1"),
        "up1": (Up(12 + 8, 8), "up2", "pixels"),
        "head": (PixelHead(8), "up1"),
    }


def resnet() -> dict[str, object]:
    """Bottlenecks as ResNet-50 has them, their convolutions layers of their own."""
    made: dict[str, object] = {"stem": (Pixels(8), "tokens")}
    x, width = "stem", 8
    for stage, (inner, blocks) in enumerate([(4, 2), (6, 2)]):
        for block in range(blocks):
            name, stride = f"s{stage}b{block}", 2 if stage and not block else 1
            skip = x
            if block == 0:
                made[f"{name}_skip"] = (Conv(width, 4 * inner, 1, stride), x)
                skip = f"{name}_skip"
            made[f"{name}_in"] = (Conv(width, inner, 1), x)
            made[f"{name}_mid"] = (Conv(inner, inner, 3, stride), f"{name}_in")
            made[f"{name}_out"] = (Conv(inner, 4 * inner, 1), f"{name}_mid", skip)
            x, width = f"{name}_out", 4 * inner
    made["head"] = (PooledHead(width), x)
    return made


class Embed(nn.Module):
    """Token numbers, or patches of two of them, as vectors."""

    def __init__(self, width: int, patch: int = 1) -> None:
        super().__init__()
        self.patch = patch
        self.table = nn.Embedding(VOCABULARY, width // patch)
        self.place = nn.Embedding(SIDE * SIDE // patch, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).unflatten(1, (-1, self.patch)).flatten(2)
        return x + self.place.weight


class Block(nn.Module):
    """Attention to itself, or to another sequence, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.pair = nn.Linear(width, 2 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        own = self.norm(x)
        key, value = self.pair(own if memory is None else memory).chunk(2, dim=-1)
        x = x + functional.scaled_dot_product_attention(self.query(own), key, value)
        return x + self.mlp(x)


class Logits(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def vit() -> dict[str, object]:
    made: dict[str, object] = {"patches": (Embed(12, patch=2), "tokens")}
    before = "patches"
    for block in range(4):
        made[f"block{block}"] = (Block(12), before)
        before = f"block{block}"
    return {**made, "head": (PooledHead(12), before)}


def encoder_decoder() -> dict[str, object]:
    """The decoder reads the tokens too, and every block of it the encoder's last output."""
    return {
        "encoded": (Embed(12), "tokens"),
        "encoder0": (Block(12), "encoded"),
        "encoder1": (Block(12), "encoder0"),
        "decoded": (Embed(12), "tokens"),
        "own0": (Block(12), "decoded"),
        "cross0": (Block(12), "own0", "encoder1"),
        "own1": (Block(12), "cross0"),
        "cross1": (Block(12), "own1", "encoder1"),
        "logits": (Logits(12), "cross1"),
    }


class Both(nn.Module):
    """Two towers' vectors side by side at every position."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self.out = nn.Linear(one + other, VOCABULARY)

    def forward(self, text: Tensor, picture: Tensor) -> Tensor:
        wide = picture.flatten(2).mean(-1).unsqueeze(1).expand(-1, text.shape[1], -1)
        return self.out(torch.cat((text, wide), dim=-1))


def two_towers() -> dict[str, object]:
    return {
        "words": (Embed(12), "tokens"),
        "text0": (Block(12), "words"),
        "text1": (Block(12), "text0"),
        "pixels": (Pixels(8), "tokens"),
        "picture0": (Conv(8, 8), "pixels"),
        "picture1": (Conv(8, 8), "picture0", "pixels"),
        "both": (Both(12, 8), "text1", "picture1"),
    }


def two_ends() -> dict[str, object]:
    return {"a": (Pixels(8), "tokens"), "b": (PixelHead(8), "a"), "c": (PixelHead(8), "a")}


def backwards() -> dict[str, object]:
    return {"b": (PixelHead(8), "a"), "a": (Pixels(8), "tokens")}


def nameless() -> dict[str, object]:
    return {"a": Pixels(8)}


def reserved() -> dict[str, object]:
    return {"forward": (Pixels(8), "tokens")}


class Pair(nn.Module):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, tokens


def pair() -> dict[str, object]:
    return {"a": (Pair(), "tokens")}


def strided() -> list[nn.Module]:
    """A chain whose weights lie in memory by columns, channels last, and as a slice of others."""
    pixels, convolution, head = Pixels(8), Conv(8, 8), PixelHead(8)
    pixels.table.weight = nn.Parameter(torch.randn(VOCABULARY, 16)[:, :8])
    channels_last = torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last)
    convolution.conv.weight = nn.Parameter(channels_last)
    head.out.weight = nn.Parameter(torch.randn(8, VOCABULARY).t())
    return [pixels, convolution, head]


def one_memory() -> list[nn.Module]:
    """The head's matrix is another parameter than the table's, in the same memory."""
    pixels, head = Pixels(8), PixelHead(8)
    head.out.weight = nn.Parameter(pixels.table.weight.data)
    return [pixels, head]


def one_number() -> list[nn.Module]:
    """All numbers of a parameter are the same one in memory."""
    head = PixelHead(8)
    head.out.bias = nn.Parameter(torch.zeros(1).expand(VOCABULARY))
    return [Pixels(8), head]
