"""Bits that flip in one of some replicas: how many that change the loss are found, and named.

    python -m benchmarks.bit_flips [--flips N] [--replicas R]      # N = 100: a minute of processor

Replicas of a small model train on parts of a batch, as data-parallel ranks do: each has gradients
of its own, all take their mean, each moves its own weights by AdamW.  In a random step one random
bit flips in one replica: in a weight, in a moment of the optimizer, in the mean of gradients as
that replica has it, or in its gradient before the mean is made.  Replicas are compared as `launch`
does it, by the digests of `runtime.agreement` and as often.  A flip matters if the loss of some
step within the next 64 differs by more than 1e-3 from that of a run without it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from runtime import agreement

Where = Literal["weight", "moment", "mean of gradients", "gradient before the mean"]
WARM_STEPS, WATCHED_STEPS = 16, 64
MATTERS = 1e-3
ROWS, WIDTH, HIDDEN = 8, 16, 32
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One bit of one number of one replica, behind a step or within it."""

    where: Where
    step: int
    replica: int
    at: float
    """Which number, as a share of all of its kind."""
    bit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a run with or without a flip was."""

    losses: tuple[float, ...]
    found: bool = False
    named: int | None = None

    def differs(self, other: Life) -> bool:
        """Whether some loss differs so much that it matters."""
        pairs = zip(self.losses, other.losses, strict=True)
        return any(not math.isfinite(a) or abs(a - b) > MATTERS for a, b in pairs)


def lived(flip: Flip | None, *, replicas: int) -> Life:
    """Train to the end, and say when replicas were first found to differ."""
    torch.manual_seed(0)
    models = [_model() for _ in range(replicas)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    truth = torch.randn(WIDTH, 1)
    losses: list[float] = []
    found, named = False, None
    for step in range(1, WARM_STEPS + WATCHED_STEPS + 1):
        hit = flip if flip is not None and flip.step == step else None
        if step % agreement.COMPARED_EVERY == 0 and not found:
            digests = {rank: _digest(model) for rank, model in enumerate(models)}
            if len(set(digests.values())) > 1:
                found, named = True, agreement._odd(digests)
        inputs = torch.randn(replicas, ROWS, WIDTH)
        errors = [
            (model(part) - torch.sin(part @ truth)).square().mean()
            for model, part in zip(models, inputs, strict=True)
        ]
        losses.append(sum(error.item() for error in errors) / replicas)
        for error in errors:
            error.backward()
        _flipped(hit, "gradient before the mean", [_gradients(model) for model in models])
        every = zip(*(_gradients(model) for model in models), strict=True)
        means = [torch.stack(each).mean(0) for each in every]
        for model in models:
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean.clone()
        _flipped(hit, "mean of gradients", [_gradients(model) for model in models])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _flipped(hit, "weight", [[one.data for one in model.parameters()] for model in models])
        moments = [
            [state[name] for state in one.state.values() for name in ("exp_avg", "exp_avg_sq")]
            for one in optimizers
        ]
        _flipped(hit, "moment", moments)
    return Life(losses=tuple(losses), found=found, named=named)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def _digest(model: nn.Module) -> int:
    return int(agreement._digest([(n, p.data) for n, p in model.named_parameters()], CPU))


def _gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def _flipped(flip: Flip | None, where: Where, of_replicas: Sequence[Sequence[Tensor]]) -> None:
    """Flip the bit, if it is one of these."""
    if flip is None or flip.where != where:
        return
    tensors = of_replicas[flip.replica]
    at = int(flip.at * sum(one.numel() for one in tensors))
    for one in tensors:
        if at < one.numel():
            words = one.view(-1).view(torch.int32)
            mask = torch.tensor(1 << flip.bit, dtype=torch.int64).to(torch.int32)
            words[at] ^= mask
            return
        at -= one.numel()


@dataclass(slots=True, kw_only=True)
class Count:
    """Flips of one kind."""

    flips: int = 0
    matter: int = 0
    found: int = 0
    """Of those that matter."""
    named: int = 0
    """Of those found, the right replica."""


def counted(flips: int, *, replicas: int, seed: int = 0) -> dict[Where, Count]:
    """Flip so many bits of each kind, one run each."""
    rng = random.Random(seed)
    clean = lived(None, replicas=replicas)
    counts: dict[Where, Count] = {}
    for where in get_args(Where):
        count = counts[where] = Count(flips=flips)
        for _ in range(flips):
            flip = Flip(
                where=where,
                step=rng.randrange(1, WARM_STEPS),
                replica=rng.randrange(replicas),
                at=rng.random(),
                bit=rng.randrange(32),
            )
            life = lived(flip, replicas=replicas)
            if life.differs(clean):
                count.matter += 1
                count.found += life.found
                count.named += life.found and life.named == flip.replica
    return counts


def main() -> int:
    """Print a row for each place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100, help="of each kind")
    parser.add_argument("--replicas", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| flipped in | flips | change the loss | of these found | right replica named |")
    print("|---|---|---|---|---|")
    for where, count in counted(args.flips, replicas=args.replicas).items():
        print(f"| {where} | {count.flips} | {count.matter} | {count.found} | {count.named} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
