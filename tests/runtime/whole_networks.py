"""Networks as one writes them, each a single module, as `whole_networks.py:resnet50` names them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, SIDE = 64, 4
"""A sample of 16 tokens is read as a picture of 4 x 4 pixels."""


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.norm1 = nn.GroupNorm(1, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(1, width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.norm3 = nn.GroupNorm(1, outside)
        self.skip = (
            nn.Identity()
            if inside == outside and stride == 1
            else nn.Conv2d(inside, outside, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet50(nn.Module):
    """3, 4, 6 and 3 bottlenecks, a sixteenth as wide, with norms over one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 4)
        self.stem = nn.Conv2d(4, 4, 3, padding=1)
        stages, inside = [], 4
        for width, blocks, stride in ((4, 3, 1), (8, 4, 2), (16, 6, 2), (32, 3, 1)):
            made = []
            for block in range(blocks):
                made.append(Bottleneck(inside, width, stride if block == 0 else 1))
                inside = 4 * width
            stages.append(nn.Sequential(*made))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        samples, length = tokens.shape
        picture = self.table(tokens).transpose(1, 2).unflatten(2, (SIDE, SIDE))
        x = self.stages(functional.relu(self.stem(picture)))
        return self.head(x.mean((2, 3))).unsqueeze(1).expand(samples, length, -1).contiguous()


class Convolution(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride=stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.conv(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.downs = nn.ModuleList([Convolution(8, 12, 2), Convolution(12, 16, 2)])
        self.middle = Convolution(16, 16)
        self.ups = nn.ModuleList([Convolution(16 + 12, 12), Convolution(12 + 8, 8)])
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).transpose(1, 2).unflatten(2, (SIDE, SIDE))
        skipped = []
        for down in self.downs:
            skipped.append(x)
            x = down(x)
        x = self.middle(x)
        for up in self.ups:
            skip = skipped.pop()
            x = up(torch.cat((functional.interpolate(x, size=skip.shape[-2:]), skip), dim=1))
        return self.head(x.flatten(2).transpose(1, 2))


class Block(nn.Module):
    """Attention to itself or to a memory, and an MLP."""

    def __init__(self, width: int = 12) -> None:
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


class ViT(nn.Module):
    """Patches of two pixels, a learned place for each, a class for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6)
        self.place = nn.Parameter(torch.zeros(SIDE * SIDE // 2, 12))
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).unflatten(1, (-1, 2)).flatten(2) + self.place
        x = self.head(self.blocks(x).mean(1))
        return x.unsqueeze(1).expand(-1, tokens.shape[1], -1).contiguous()


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 12)
        self.answers = nn.Embedding(VOCABULARY, 12)
        self.encoder = nn.ModuleList([Block() for _ in range(2)])
        self.own = nn.ModuleList([Block() for _ in range(2)])
        self.cross = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.words(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.answers(tokens)
        for own, cross in zip(self.own, self.cross, strict=True):
            x = cross(own(x), memory)
        return self.head(x)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 12)
        self.text = nn.Sequential(Block(), Block())
        self.pixels = nn.Embedding(VOCABULARY, 8)
        self.picture = nn.Sequential(Convolution(8, 8), Convolution(8, 8))
        self.head = nn.Linear(12 + 8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        text = self.text(self.words(tokens))
        picture = self.picture(self.pixels(tokens).transpose(1, 2).unflatten(2, (SIDE, SIDE)))
        wide = picture.flatten(2).mean(-1).unsqueeze(1).expand(-1, text.shape[1], -1)
        return self.head(torch.cat((text, wide), dim=-1))


class Undecided(nn.Module):
    """Looks at its tensors to know what to do."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens if tokens.sum() > 0 else -tokens


resnet50, unet, vit, encoder_decoder, two_towers = ResNet50, UNet, ViT, EncoderDecoder, TwoTowers
undecided = Undecided
