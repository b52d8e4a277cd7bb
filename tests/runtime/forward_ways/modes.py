"""Ways of training and evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.forward_ways.way import (
    ON_RANKS,
    POSITIONS,
    WIDTH,
    Net,
    Way,
)


class Normed(Net):
    """BatchNorms that its own `train` keeps in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)
        self.norm.running_mean += 0.5

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.norm(x))

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.norm.eval()
        return self


class NormedInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = Normed()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.first(x))


class Taught(Net):
    """A teacher that never trains, frozen by `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().features(x) - self.teacher(x)

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval().requires_grad_(False)
        return self


class Auxiliary(Net):
    """A head that counts in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        return out + 0.4 * self.head(x) if self.training else out


class AuxiliaryTuple(Auxiliary):
    def forward(self, x: Tensor) -> Any:
        out = self.features(x)
        return (out, self.head(x)) if self.training else out


class TrainsInEvaluation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Auxiliary()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.scale(x))

    def train(self, mode: bool = True) -> TrainsInEvaluation:
        super().train(mode)
        self.scale.train()
        return self


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class UnitTrainsInEvaluation(TrainsInEvaluation):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Doubling()


class BuiltResting(Net):
    """A part in eval mode, which no `train` of its own keeps there."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5).eval()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.drop(x))


def tuples(out: Any, batch: Any) -> Any:
    parts = out if isinstance(out, tuple) else (out,)
    return sum(part.square().sum() for part in parts), parts[0].numel()


class RestingUntil(Net):
    """A unit that trains from an epoch on, which the loop says."""

    epoch = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Doubling())

    def train(self, mode: bool = True) -> RestingUntil:
        super().train(mode)
        self.blocks[1].train(mode and self.epoch > 1)
        return self


def next_epoch(module: Any, step: int) -> None:
    module.epoch = step


class ReturnsNothing(Taught):
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


class EvalOverridden(Auxiliary):
    """Of which `eval` leaves the head in training mode."""

    def eval(self) -> EvalOverridden:
        super().eval()
        self.training = True
        return self


class RestsInForward(Net):
    """A norm that forward itself puts into eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)
        self.norm.running_mean += 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return self.features(self.norm(x))


class Unregistered(Net):
    """A teacher in a list, of which torch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).eval()]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teachers[0](x)
        return self.features(x) - wanted


class NormedInPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)
        self.norm.running_mean += 0.5

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.norm(x))


def rest_norm(module: Any, step: int) -> None:
    """Put a norm into eval mode before each step, as a training loop does."""
    module.norm.eval()


class ByTask(Net):
    """The loop says before each step what the forward does."""

    task = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return x if self.task else 2 * x


def next_task(module: Any, step: int) -> None:
    module.task = step % 2


WAYS = {
    "norm_eval": Way(Normed),
    "norm_eval inside": Way(NormedInside),
    "teacher": Way(Taught),
    "auxiliary": Way(Auxiliary, trains=ON_RANKS),
    "auxiliary tuple": Way(AuxiliaryTuple, tuples, ON_RANKS),
    "trains in evaluation": Way(TrainsInEvaluation),
    "unit trains in evaluation": Way(UnitTrainsInEvaluation),
    "built resting": Way(BuiltResting),
    "rests until": Way(RestingUntil, before=next_epoch),
    "returns nothing": Way(ReturnsNothing),
    "eval overridden": Way(EvalOverridden),
    "rests in forward": Way(RestsInForward, trains=ON_RANKS),
    "unregistered": Way(Unregistered, trains=ON_RANKS),
    "rested by the loop": Way(NormedInPart, before=rest_norm),
    "by task": Way(ByTask, before=next_task),
}
