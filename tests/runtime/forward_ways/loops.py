"""Ways in which a training loop, or the backward of a forward, makes a step unlike those before.

Gradient reversal (Ganin), Grad-CAM (Selvaraju), memory banks (Wu), Switch capacity (Fedus), deep
supervision (Lee), gradients clipped where they pass by, alternating and frozen parts, teachers
bound anew, parameters kept in a table, collectives of the user's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.runtime.forward_ways.way import ALONE, ON_RANKS, SAMPLES, WIDTH, Net, Way

REPLICAS = frozenset(("replicas",))


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(300 + step)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x, torch.randint(WIDTH, (SAMPLES,), generator=generator)


def entropy(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out, batch[1])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.share * grad, None


class Adversarial(Net):
    """A part that learns what another one unlearns, by a share that the loop raises."""

    def __init__(self) -> None:
        super().__init__()
        self.domain, self.share = nn.Linear(WIDTH, 2), 0.0

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return h, self.domain(Reversed.apply(h, self.share))


def raise_share(module: Any, step: int) -> None:
    module.share = 0.3 * step


def of_both(out: Any, batch: Any) -> Tensor:
    return entropy(out[0], batch) + functional.cross_entropy(out[1], (batch[1] > 2).long())


class Alternating(Net):
    """Blocks that learn in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.rests = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        return self.head(h.detach() if self.rests else h)


def rest(module: Any, step: int) -> None:
    module.rests = step % 2 == 0


def toggle(module: Any, step: int) -> None:
    for parameter in module.blocks[0].parameters():
        parameter.requires_grad_(step % 2 == 0)


class Clipped(Net):
    """Gradients are cut where they pass by, as in recurrent networks."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x).tanh()
            if x.requires_grad:
                x.register_hook(lambda grad: grad.clamp(-0.005, 0.005))
        return x


class Supervised(Net):
    """A loss behind every block, by weights that the loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = [1.0, 0.5, 0.1]

    def forward(self, x: Tensor) -> Any:
        outputs = []
        for block, share in zip(self.blocks, self.shares, strict=True):
            x = block(x).tanh()
            outputs.append((share, x))
        return outputs


def lower_shares(module: Any, step: int) -> None:
    module.shares = [1.0 - 0.2 * step, 0.5, 0.1 + 0.2 * step]


def of_each(out: Any, batch: Any) -> Any:
    return sum(share * entropy(x, batch) for share, x in out)


class Taught(Net):
    """A frozen teacher whose values are bound anew, not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        h, wanted = self.features(x), x
        with torch.no_grad():
            for block in self.teacher:
                wanted = block(wanted).tanh()
        return h + wanted


def bind_teacher(module: Any, step: int) -> None:
    pairs = zip(module.teacher.parameters(), module.blocks.parameters(), strict=True)
    for teacher, student in pairs:
        teacher.data = 0.7 * teacher.data + 0.3 * student.data


class Bank(Net):
    """Features of samples, remembered by number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(SAMPLES, WIDTH))

    def forward(self, x: Tensor, index: Tensor) -> Any:
        out = self.features(x) + 0.1 * self.bank[index]
        if self.training:
            with torch.no_grad():
                self.bank[index] = 0.5 * (self.bank[index] + out)
        return out


def numbered(step: int) -> tuple[Tensor, Tensor, Tensor]:
    return *rows(step), torch.arange(SAMPLES).roll(step)


class Capacity(Net):
    """Experts that take as many samples as fit, and drop the others."""

    def forward(self, x: Tensor) -> Any:
        share, choice = x[:, :3].softmax(-1).max(-1)
        out = x
        for number, block in enumerate(self.blocks):
            at = (choice == number).nonzero()[: len(x) // 3, 0]
            if at.numel():
                out = out.index_add(0, at, block(x[at]) * share[at, None])
        return out


class Seen(Net):
    """A hook that keeps what a block makes, in a table of the module (Grad-CAM)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.blocks[0].register_forward_hook(lambda _, __, out: self.seen.update(first=out))

    def forward(self, x: Tensor) -> Any:
        return self.features(x), self.seen["first"]


class Tabled(Net):
    """A parameter that is read from a table of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"first": self.blocks[0].weight}

    def forward(self, x: Tensor) -> Any:
        x = functional.linear(x, self.table["first"]).tanh()
        return self.blocks[2](self.blocks[1](x).tanh())


def summed_over_ranks(out: Any, batch: Any) -> Tensor:
    """Return a loss behind a sum over ranks, as loops sum what they print."""
    loss = entropy(out, batch)
    shown = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(shown)
    return loss


def of_seen(out: Any, batch: Any) -> Tensor:
    return entropy(out[0], batch) + 0.1 * out[1].abs().mean()


WAYS = {
    "in a table": Way(Tabled, entropy, trains=REPLICAS, batches=rows),
    "sum over ranks": Way(Net, summed_over_ranks, trains=ON_RANKS, batches=rows),
    "seen by a hook": Way(Seen, of_seen, batches=rows),
    "gradient reversal": Way(Adversarial, of_both, batches=rows, before=raise_share),
    "alternating": Way(Alternating, entropy, trains=ON_RANKS, batches=rows, before=rest),
    "toggled": Way(Net, entropy, batches=rows, before=toggle),
    "clipped on the way": Way(Clipped, entropy, trains=ON_RANKS, batches=rows),
    "deep supervision": Way(Supervised, of_each, batches=rows, before=lower_shares),
    "teacher bound anew": Way(Taught, entropy, trains=REPLICAS, batches=rows, before=bind_teacher),
    "memory bank": Way(
        Bank, entropy, trains=ALONE, inputs=lambda b: (b[0], b[2]), batches=numbered
    ),
    "expert capacity": Way(Capacity, entropy, trains=ALONE, batches=rows),
}
