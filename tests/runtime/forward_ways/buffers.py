"""Ways of keeping state in buffers and attributes, bound anew or in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright import batch_sum
from tests.runtime.forward_ways.way import (
    ALONE,
    ON_RANKS,
    WIDTH,
    Net,
    Way,
)


class Centred(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        center = self.center
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * out.mean((0, 1))
        return out - center


class CentredInPlace(Centred):
    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        result = out - self.center.clone()
        with torch.no_grad():
            self.center.lerp_(out.mean((0, 1)), 0.1)
        return result


class CentredInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Centred())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.parts[0](x) - self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean((0, 1))
        return out


class CentredInContainer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.holder(x))


class Counted(Net):
    """A count of forwards: the same on all ranks, however samples are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.features(x) / self.steps


class SamplesSeen(Net):
    """A count of samples, which a rank has a part of, and of which the next forward makes use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x) / self.seen.clone()
        self.seen += len(x)
        return out


class SamplesSeenByPython(Net):
    """The same in a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x) / self.seen
        self.seen += len(x)
        return out


class Averaged(Net):
    """An average of weights that begins as they are, so that the first forward changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.blocks[0].weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average.lerp(self.blocks[0].weight.detach(), 0.1)
        return self.features(x) + x @ self.average.T


class NotSaved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x) * self.seen
        self.seen = self.seen + 0.1
        return out


class CountedByPython(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.features(x) / self.steps


class BoundAtFirst(Net):
    """A buffer that has nothing until the first forward."""

    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = x.detach().mean((0, 1))
        return self.features(x - self.seen)


class Queue(Net):
    """Samples of earlier batches, behind a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24, WIDTH))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        result = out - self.queue.mean(0)
        at = int(self.pointer)
        with torch.no_grad():
            self.queue[at : at + len(x)] = out[:, 0]
            self.pointer[...] = (at + len(x)) % 24
        return result


class Plain(Net):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        result = out - self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean((0, 1))
        return result


class Listed(Net):
    """A number in a list, of which each forward adds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return self.features(x) / self.counts[0]


class Codebook(nn.Module):
    """A codebook whose entries follow what is nearest to them, over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        nearest = torch.cdist(rows, self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 4).to(x.dtype)
        quantized = self.codes[nearest].view_as(x)
        if self.training:
            with torch.no_grad():
                self.counts.lerp_(batch_sum(chosen.sum(0)), 0.1)
                sums = batch_sum(chosen.T @ rows.detach())
                self.codes.lerp_(sums / self.counts[:, None], 0.1)
        return x + (quantized - x).detach()


class Quantized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Codebook())


class ScaledByBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * self.scale


class ScaledByPlain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * self.scale


class ScaledInUnit(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, ScaledByBuffer())

    @property
    def scale(self) -> Any:
        return self.blocks[1].scale

    @scale.setter
    def scale(self, value: Tensor) -> None:
        self.blocks[1].scale = value


class ScaledByNumber(Net):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * self.scale


def bind_scale(module: Any, step: int) -> None:
    """Bind a tensor anew before each step, as a training loop does."""
    module.__dict__.pop("scale", None)
    module.scale = torch.tensor(1.0 + step)


def fill_scale(module: Any, step: int) -> None:
    module.scale.fill_(1.0 + step)


def set_scale(module: Any, step: int) -> None:
    module.scale = 1.0 + step


def bind_data(module: Any, step: int) -> None:
    """Give a parameter other memory, as weights are clipped or spread anew."""
    weight = module.blocks[0].weight
    weight.data = weight.data.clamp(-0.3, 0.3)


def change_data(module: Any, step: int) -> None:
    module.blocks[0].weight.data.clamp_(-0.3, 0.3)


@torch.no_grad()
def copy_weights(module: Any, step: int) -> None:
    weight = module.blocks[0].weight
    weight.copy_(weight.clamp(-0.3, 0.3))


WAYS = {
    "bound anew": Way(Centred, trains=ALONE),
    "in place": Way(CentredInPlace, trains=ALONE),
    "in a unit": Way(CentredInside, trains=ALONE),
    "in a container": Way(CentredInContainer, trains=ALONE),
    "of steps": Way(Counted, trains=ON_RANKS),
    "samples seen": Way(SamplesSeen, trains=ALONE),
    "samples seen by Python": Way(SamplesSeenByPython, trains=ALONE),
    "average of weights": Way(Averaged, trains=ON_RANKS),
    "not saved": Way(NotSaved, trains=ON_RANKS),
    "of Python": Way(CountedByPython, trains=ON_RANKS),
    "bound at first": Way(BoundAtFirst, trains=ALONE),
    "queue": Way(Queue, trains=ALONE),
    "plain": Way(Plain, trains=ALONE),
    "listed": Way(Listed, trains=ON_RANKS),
    "codebook": Way(Quantized, trains=ON_RANKS),
    "bound by the loop": Way(ScaledByBuffer, before=bind_scale),
    "filled by the loop": Way(ScaledByBuffer, before=fill_scale),
    "plain by the loop": Way(ScaledByPlain, before=bind_scale),
    "plain filled by the loop": Way(ScaledByPlain, before=fill_scale),
    "bound in a unit": Way(ScaledInUnit, before=bind_scale),
    "number by the loop": Way(ScaledByNumber, before=set_scale),
    "data bound": Way(Net, trains=frozenset(("replicas", "stages")), before=bind_data),
    "data changed": Way(Net, before=change_data),
    "weights copied": Way(Net, before=copy_weights),
}
