"""Modules that tensor parallelism can divide, written as people write them, and some it cannot.

`MODULES` has one function per kind, with an example of its batch; `STYLES` what of them is divided
over two ranks, read off their code by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime import own_modules
from tests.runtime.own_modules import WORDS, Language

WIDTH, HEADS = 16, 4


class Fused(nn.Module):
    """nanoGPT's attention: one Linear for q, k and v; -1 stands for the number of heads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, 16, 16)))

    def split(self, x: Tensor) -> Any:
        B, T, C = x.size()  # noqa: N806 - as in nanoGPT
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        return (a.view(B, T, -1, C // HEADS).transpose(1, 2) for a in (q, k, v))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        T = x.shape[1]  # noqa: N806 - as in nanoGPT
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class SizedFused(Fused):
    """The same, split by the width: a part has another."""

    def split(self, x: Tensor) -> Any:
        B, T, C = x.size()  # noqa: N806 - as in nanoGPT
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        return (a.view(B, T, HEADS, C // HEADS).transpose(1, 2) for a in (q, k, v))


class Reshaped(nn.Module):
    """timm's attention: one Linear, reshaped to [3, heads, width of a head]; norms of each head."""

    heads = -1

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH // HEADS)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806 - as in timm
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(self.drop(x.transpose(1, 2).flatten(2)))


class SizedReshaped(Reshaped):
    """The same, with the number of heads."""

    heads = HEADS


class Grouped(nn.Module):
    """Fewer keys and values than queries, those in one Linear."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * 8)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def split(self, x: Tensor) -> Any:
        return self.q(x), *self.kv(x).chunk(2, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (a.unflatten(-1, (-1, 4)).transpose(1, 2) for a in self.split(x))
        k, v = (a.repeat_interleave(2, 1) for a in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SizedGrouped(Grouped):
    """All in one Linear, cut by slices of the whole."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside, self.q, self.kv = nn.Linear(WIDTH, WIDTH + 2 * 8, bias=False), None, None

    def split(self, x: Tensor) -> Any:
        return self.inside(x).split([WIDTH, 8, 8], dim=-1)


class Gated(nn.Module):
    """SwiGLU with gate and up in one Linear."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(self.drop(functional.silu(gate) * up))


class Block(nn.Module):
    """Norm, attention, norm, MLP."""

    def __init__(self, attention: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention(dropout), Gated(dropout)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(Language):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block, words=WORDS, width=WIDTH, padding=3)


class Residual(nn.Module):
    """Two convolutions with nothing but an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(functional.relu(self.one(x)))


class Images(nn.Module):
    """Blocks of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def encoder_layer(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=True)


def _ids() -> Tensor:
    return torch.randint(0, WORDS, (8, 7))


def _images() -> Tensor:
    return torch.randn(8, 3, 8, 8)


def _bert() -> Any:
    return _ids(), (torch.arange(7) < torch.randint(2, 8, (8, 1))).long()


P = 0.2
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "fused": (lambda: Model(lambda: Block(Fused, P)), _ids),
    "reshaped": (lambda: Model(lambda: Block(Reshaped, P)), _ids),
    "grouped": (lambda: Model(lambda: Block(Grouped, P)), _ids),
    "torch": (lambda: Model(lambda: encoder_layer(P)), _ids),
    "vit": (own_modules.ViT, _images),
    "bert": (own_modules.Bert, _bert),
    "t5": (own_modules.T5, lambda: (_ids(), _ids())),
    "tied": (lambda: own_modules.GPT(P, tied="module"), _ids),
    "convolutions": (Images, _images),
}
SIZED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "fused": (lambda: Model(lambda: Block(SizedFused, P)), _ids),
    "reshaped": (lambda: Model(lambda: Block(SizedReshaped, P)), _ids),
    "grouped": (lambda: Model(lambda: Block(SizedGrouped, P)), _ids),
}
"""The same modules, their attention written with sizes that only the whole has."""
_ATTENTION = {
    **dict.fromkeys(("q", "k", "v"), "ColwiseParallel()"),
    "o": "RowwiseParallel()",
}
_MLP = {"up": "ColwiseParallel()", "down": "RowwiseParallel()"}
_OWN = {"mlp.both": "ColwiseParallel() of 2 matrices", "mlp.down": "RowwiseParallel()"}


def _of(prefix: str, styles: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{path}": style for path, style in styles.items()}


_TABLE = "RowwiseParallel()"
STYLES: dict[str, dict[str, str]] = {
    "fused": {
        "words": _TABLE,
        "blocks.*.attn.c_attn": "ColwiseParallel() of 3 matrices",
        "blocks.*.attn.c_proj": "RowwiseParallel()",
        **_of("blocks.*", _OWN),
    },
    "reshaped": {
        "words": _TABLE,
        "blocks.*.attn.qkv": "ColwiseParallel() of 3 matrices",
        "blocks.*.attn.proj": "RowwiseParallel()",
        **_of("blocks.*", _OWN),
    },
    "grouped": {
        "words": _TABLE,
        "blocks.*.attn.q": "ColwiseParallel()",
        "blocks.*.attn.kv": "ColwiseParallel() of 2 matrices",
        "blocks.*.attn.out": "RowwiseParallel()",
        **_of("blocks.*", _OWN),
    },
    "torch": {
        "words": _TABLE,
        "blocks.*.self_attn": "heads of nn.MultiheadAttention",
        "blocks.*.linear1": "ColwiseParallel()",
        "blocks.*.linear2": "RowwiseParallel()",
    },
    "vit": {**_of("blocks.*.attention", _ATTENTION), **_of("blocks.*", _MLP)},
    "bert": {
        "words": _TABLE,
        "places": _TABLE,
        **_of("blocks.*.attention", _ATTENTION),
        **_of("blocks.*", _MLP),
    },
    "t5": {
        "bias": _TABLE,
        **_of("encoder.*", _MLP),
        **_of("decoder.*.attention", _ATTENTION),
        **_of("decoder.*.cross", _ATTENTION),
        **_of("decoder.*", _MLP),
    },
    "tied": _of("blocks.*", _MLP),
    "convolutions": {"blocks.*.one": "ColwiseParallel()", "blocks.*.two": "RowwiseParallel()"},
}
