"""Ways of reading values of tensors in a forward, of which every batch has others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.runtime.forward_ways.way import (
    ON_RANKS,
    WIDTH,
    Net,
    Way,
    per_sample,
    returned,
)

COUNTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "shape": lambda picked, mask: picked.shape[0],
    "size": lambda picked, mask: picked.size(0),
    "len": lambda picked, mask: len(picked),
    "numel": lambda picked, mask: picked.numel() // WIDTH,
    "nonzero": lambda picked, mask: mask.nonzero().shape[0],
    "where": lambda picked, mask: len(torch.where(mask)[0]),
    "masked_select": lambda picked, mask: mask.masked_select(mask).numel(),
    "item": lambda picked, mask: int(mask.sum().item()),
    "int": lambda picked, mask: int(mask.sum()),
    "tolist": lambda picked, mask: sum(mask.flatten().tolist()),
    "format": lambda picked, mask: float(f"{mask.sum().float():.0f}"),
    "unique": lambda picked, mask: len(torch.unique(torch.arange(mask.numel())[mask.flatten()])),
    "bincount": lambda picked, mask: (
        mask.numel() - int(torch.bincount(mask.flatten().long(), minlength=2)[0])
    ),
    "repeat_interleave": lambda picked, mask: len(
        torch.arange(mask.numel()).repeat_interleave(mask.flatten().long())
    ),
    "iteration": lambda picked, mask: sum(1 for _ in picked),
    "argwhere": lambda picked, mask: len(torch.argwhere(mask)),
    "numpy": lambda picked, mask: int(mask.numpy().sum()),
    "asarray": lambda picked, mask: int(np.asarray(mask).sum()),
    "text": lambda picked, mask: int(str(mask.sum())[len("tensor(") : -1]),
    "index": lambda picked, mask: picked.new_zeros(99)[: mask.sum()].shape[0],
    "unbind": lambda picked, mask: len(picked.unbind()),
    "split": lambda picked, mask: sum(len(part) for part in picked.split(1)),
    "sparse": lambda picked, mask: mask.float().to_sparse().values().shape[0],
    "rows": lambda picked, mask: sum(1 for row in mask.flatten() if row),
}


class Counting(Net):
    def __init__(self, count: str) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        mask = x[..., 0] > 0
        picked = self.features(x)[mask]
        return picked.square().sum(), COUNTS[self.count](picked, mask)


class Dispatching(Net):
    """Experts without tokens are skipped; in the first batch one expert has none."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        chosen = (x.detach()[..., 0] * 0 + self.signs).long()
        result = torch.zeros_like(x)
        for number, expert in enumerate([self.blocks[1], self.blocks[2]]):
            tokens = x[chosen == number]
            if tokens.numel() == 0:
                continue
            result[chosen == number] = expert(tokens)
        return result

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def signs(self) -> Tensor:
        return self.sign

    sign: Tensor


class Routed(Dispatching):
    def forward(self, x: Tensor) -> Tensor:
        self.sign = (x[..., 1] < 0).float()
        return super().forward(x)


class Picking(Net):
    """Some positions go through a block by themselves; nothing reads how many."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        x = self.blocks[0](x)
        result = torch.zeros_like(x)
        result[mask] = self.blocks[1](x[mask])
        return self.blocks[2](x + result)


class Chosen(nn.Module):
    """A unit that returns as many positions as the batch has above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[x[..., 0] > 0]


class ChosenInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Chosen())

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        return out * 2 if float(x.min()) < -1e9 else out


class Cropped(Net):
    """Positions behind the longest sample of the batch are left out."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[..., 0] > 0).sum(1)
        x = self.features(x[:, : int(lengths.max())])
        return x * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]


class Packed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.features(x), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return padded


class SplitByLengths(Net):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        lengths = (x[..., 0] > 0).sum(1)
        chunks = rows[: int(lengths.sum())].split(lengths.tolist())
        own = torch.stack([row * len(chunk) for row, chunk in zip(x, chunks, strict=True)])
        return self.features(own)


class Halting(Net):
    """Samples go through a block again and again until each is large enough."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().amax((1, 2), keepdim=True)
        while bool((size < 3).any()):
            x = torch.where(size < 3, x + self.blocks[0](x).tanh(), x)
            size = size + 0.6
        return self.blocks[2](self.blocks[1](x).tanh())


class Scaled(Net):
    """Each sample is scaled by a number of Python."""

    def __init__(self, number: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.features(torch.stack([row * self.number(row) for row in x]))


class ByName(Net):
    """Each sample has a head by its value."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("0", "1", "2")})

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return torch.stack([self.heads[str(int(row[0, 2] > 0) + 1)](row) for row in x])


class Sorted(Net):
    def forward(self, x: Tensor) -> Tensor:
        order = sorted(range(len(x)), key=lambda at: float(x[at].mean()))
        back = sorted(range(len(x)), key=lambda at: order[at])
        ranks = torch.arange(len(x)).view(-1, 1, 1)
        return self.features((x[order] * (1 + 0 * ranks))[back])


class Grouped(Net):
    def forward(self, x: Tensor) -> Tensor:
        kinds = (x[:, 0, 2] * 2).round().long().clamp(-2, 2)
        out = torch.zeros_like(x)
        for kind in kinds.unique():
            out[kinds == kind] = self.features(x[kinds == kind]) * (1.5 + 0.1 * float(kind))
        return out


class Checked(Net):
    """Values are looked at, and nothing depends on them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        if torch.isnan(x).any():
            raise ValueError("diverged")
        assert bool((x.abs() < 1e6).all())
        return x


class Filled(Net):
    """Picked positions go into memory of just their size, and back."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        picked = x.new_zeros(int(mask.sum()), WIDTH)
        picked[:] = self.blocks[0](x)[mask]
        return self.blocks[1](x).masked_scatter(mask[..., None], self.blocks[2](picked))


class Constant(Net):
    """A mask that numpy makes of values, and torch knows nothing of."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy((x.detach().numpy()[..., :1] > 0).astype("float32"))
        return self.features(x) * mask


class ConstantOfList(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * torch.tensor(x[..., :1].tolist())


def counts_too(batch: Any) -> Any:
    """Return what the module gets, with numbers that are read of each batch."""
    return batch[0], [float(row.mean()) for row in batch[0]]


class Given(Net):
    def forward(self, x: Tensor, numbers: list[float]) -> Tensor:
        return self.features(x) * torch.tensor(numbers).view(-1, 1, 1)


def scaled(number: Callable[[Tensor], float]) -> Way:
    return Way(functools.partial(Scaled, number), trains=ON_RANKS)


WAYS = {
    **{name: Way(functools.partial(Counting, name), returned, ON_RANKS) for name in COUNTS},
    "dispatch": Way(Routed, trains=ON_RANKS),
    "picked": Way(Picking),
    "chosen in a unit": Way(ChosenInside, per_sample),
    "branch": Way(Branching, trains=ON_RANKS),
    "cropped": Way(Cropped, per_sample, ON_RANKS),
    "packed": Way(Packed, per_sample, ON_RANKS),
    "split by lengths": Way(SplitByLengths, trains=ON_RANKS),
    "halting": Way(Halting, trains=ON_RANKS),
    "number": scaled(lambda row: float(row.mean())),
    "formatted": scaled(lambda row: float(f"{row.mean():.2f}")),
    "largest": scaled(lambda row: 1 + int(row.argmax()) / 30),
    "equal": scaled(lambda row: 2.0 if torch.equal(row[:, 0], row[:, 0].abs()) else 1.0),
    "logarithm": scaled(lambda row: math.log(1 + row.square().sum())),
    "contains": scaled(lambda row: 2.0 if 1 in row.sign()[:, 3].cumsum(0) else 1.0),
    "by name": Way(ByName, trains=ON_RANKS),
    "sorted": Way(Sorted, trains=ON_RANKS),
    "grouped": Way(Grouped, trains=ON_RANKS),
    "checked": Way(Checked, trains=ON_RANKS),
    "filled": Way(Filled, trains=ON_RANKS),
    "constant": Way(Constant, trains=ON_RANKS),
    "constant of a list": Way(ConstantOfList, trains=ON_RANKS),
    "given": Way(Given, trains=ON_RANKS, inputs=counts_too),
}
