"""Bits that flip in one of some replicas: how many that change the loss are found, and named.

    python -m benchmarks.bit_flips [--flips N] [--replicas R]      # N = 100: a minute of processor

Replicas of a small model train on parts of a batch, as data-parallel ranks do: each has gradients
of its own, all take their mean, each moves its own weights by AdamW.  In a random step one random
bit flips in one replica: in a weight, in a moment of the optimizer, in the mean of gradients as
that replica has it, or in its gradient before the mean is made.  Replicas are compared as `launch`
does it, by the digests of `runtime.optim.replica_check` and as often.  A step whose gradient norm
is far above the usual is done again from the state before it, as `runtime.resilience.step_replay`
asks, and the only one whose own gradient differs then is named.  A flip matters if the loss of some
step within the next 64 differs by more than 1e-3 from that of a run without it.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from meshwright.planner.documents.plan import Mesh, PlacedLayer, Plan, PlannedModel, Stage
from meshwright.runtime.optim import replica_check as agreement
from meshwright.runtime.resilience.step_replay import Replays

Where = Literal["weight", "moment", "mean of gradients", "gradient before the mean"]
FIRST_STEPS, WARM_STEPS, WATCHED_STEPS = 24, 40, 64
"""Flips come in the last of the warm steps, of which a usual norm is known."""
MATTERS = 1e-3
ROWS, WIDTH, HIDDEN = 8, 16, 32
CPU = torch.device("cpu")
ONE_RANK = Plan(
    model=PlannedModel(name="m", source="m", digest="sha256:0123456789abcdef"),
    cluster="local",
    seq_len=1,
    global_batch=ROWS,
    precision="fp32",
    mesh=Mesh(),
    zero=0,
    schedule="1f1b",
    micro_batch=ROWS,
    micro_batches=1,
    stages=(Stage(layers=(PlacedLayer(layer="a"),)),),
)
"""Of the process in which all replicas are."""


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
    run = Replicated(replicas)
    losses: list[float] = []
    found, named = False, None
    replays = Replays(ONE_RANK, "cpu")
    for step in range(1, WARM_STEPS + WATCHED_STEPS + 1):
        hit = flip if flip is not None and flip.step == step else None
        if step % agreement.COMPARED_EVERY == 0 and not found:
            digests = {rank: _digest(model) for rank, model in enumerate(run.models)}
            if len(set(digests.values())) > 1:
                found, named = True, agreement._odd(digests)
        inputs = torch.randn(replicas, ROWS, WIDTH)
        before = copy.deepcopy(run) if hit is not None else run
        loss, norm = run.step(inputs, hit)
        losses.append(loss)
        replays.took(step, loss=loss, norm=norm, gradient=torch.zeros(2))
        # Behind the step that was hit a copy has what was flipped, and what is done again is alike.
        if replays.doubts(step) and hit is not None and not found:
            found = before.step(inputs, None) != (loss, norm)
            pairs = zip(run.own_squares, before.own_squares, strict=True)
            differ = [at for at, (one, other) in enumerate(pairs) if one != other]
            named = differ[0] if found and len(differ) == 1 else None
    return Life(losses=tuple(losses), found=found, named=named)


class Replicated:
    """Replicas of a model, each with its optimizer."""

    def __init__(self, replicas: int) -> None:
        self.models = [_model() for _ in range(replicas)]
        for model in self.models[1:]:
            model.load_state_dict(self.models[0].state_dict())
        self.optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in self.models]
        self.truth = torch.randn(WIDTH, 1)
        self.own_squares: list[float] = []
        """Of the norm of each replica's gradient in the last step, before the mean."""

    def step(self, inputs: Tensor, hit: Flip | None) -> tuple[float, float]:
        """Train on a part of a batch each, and return the mean loss and the norm of gradients."""
        errors = [
            (model(part) - torch.sin(part @ self.truth)).square().mean()
            for model, part in zip(self.models, inputs, strict=True)
        ]
        loss = sum(error.item() for error in errors) / len(errors)
        for error in errors:
            error.backward()
        _flipped(hit, "gradient before the mean", [_gradients(model) for model in self.models])
        self.own_squares = [
            sum(float(one.square().sum()) for one in _gradients(model)) for model in self.models
        ]
        every = zip(*(_gradients(model) for model in self.models), strict=True)
        means = [torch.stack(each).mean(0) for each in every]
        norm = math.sqrt(sum(float(mean.double().square().sum()) for mean in means))
        for model in self.models:
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean.clone()
        _flipped(hit, "mean of gradients", [_gradients(model) for model in self.models])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        weights = [[one.data for one in model.parameters()] for model in self.models]
        _flipped(hit, "weight", weights)
        moments = [
            [state[name] for state in one.state.values() for name in ("exp_avg", "exp_avg_sq")]
            for one in self.optimizers
        ]
        _flipped(hit, "moment", moments)
        return loss, norm


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
                step=rng.randrange(FIRST_STEPS, WARM_STEPS),
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
