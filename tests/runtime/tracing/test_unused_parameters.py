"""Ranks that use different parameters in a step train as a plain loop over the whole batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.engine import Engine, StepResult
from tests.parts import some_and_others
from tests.runtime.ranks import on_ranks

WIDTH, CLASSES, SAMPLES, MICRO, STEPS = 8, 3, 8, 2, 3
Batch = tuple[Tensor, Tensor]


class Chosen(nn.Module):
    """Which of its parameters are used, and whether a gradient goes on, is the samples' to say."""

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)  # weight decay must not move it
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return x + self.down(self.up(x).tanh())
        match self.otherwise:
            case "passes on":
                return x
            case "ends gradients":
                return self.up(x.detach()).tanh()
            case "is a constant":
                return 2 * x.detach()
            case _:
                return x + self.up(x).tanh()


class Branching(nn.Module):
    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chosen(otherwise) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.heads[0](x), self.heads[1](x)


def batch_of(step: int) -> Batch:
    """Samples of a micro-batch lie on one side of zero, and ranks have other sides."""
    random = torch.Generator().manual_seed(step)
    sides = torch.tensor([1.0, -1, 1, 1]).roll(step).repeat_interleave(MICRO)
    x = torch.randn(SAMPLES, WIDTH, generator=random) + 2 * sides[:, None]
    return x, torch.randint(CLASSES, (SAMPLES,), generator=random)


def loss(outputs: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, int]:
    """One of two heads counts for each sample; those of a micro-batch agree."""
    above = batch[0].mean(1) > 0
    total = torch.zeros(())
    for output, rows in zip(outputs, (above, ~above), strict=True):
        if rows.any():
            total = total + functional.cross_entropy(output[rows], batch[1][rows], reduction="sum")
    return total, len(above)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


Run = tuple[list[StepResult], dict[str, Tensor]]


def trained(kind: str, layout: dict[str, Any], **settings: Any) -> Run:
    engine = Engine(
        lambda: Branching(kind),
        {"micro_batch": MICRO, **layout},
        loss=loss,
        optimizer=adamw,
        batch=batch_of(0),
        by_micro_batch=True,
        **settings,
    )
    results = [engine.step(engine.slice(batch_of(step))) for step in range(STEPS)]
    return results, engine.state_dict()


def plainly(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Branching(kind)
    optimizer, losses = adamw(model.parameters()), []
    for step in range(STEPS):
        x, y = batch_of(step)
        pairs = zip(x.split(MICRO), y.split(MICRO), strict=True)
        value = sum((loss(model(a), (a, b))[0] for a, b in pairs), torch.zeros(())) / SAMPLES
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, dict(model.state_dict())


ASKED = {
    "uses one of two": ("replicated", "zero 1", "zero 2", "zero 3"),
    "passes on": ("zero 1", "zero 3, recompute"),
    "ends gradients": ("zero 2", "zero 3"),
    "is a constant": ("zero 1", "zero 3"),
}
ROWS = [(kind, name) for kind, names in ASKED.items() for name in names]
SOME = [
    ("uses one of two", "zero 2"),
    ("passes on", "zero 1"),
    ("is a constant", "zero 3"),
]


def of_two_ranks(rows: list[tuple[str, str]]) -> dict[tuple[str, str], Run]:
    layouts: dict[str, dict[str, Any]] = {
        "replicated": {},
        "zero 1": {"zero": 1},
        "zero 2": {"zero": 2},
        "zero 3": {"zero": 3},
        "zero 3, recompute": {"zero": 3, "recompute": "full"},
    }
    return {
        (kind, name): trained(kind, layouts[name], track_unused=name == "zero 2")
        for kind, name in rows
    }


@pytest.mark.ranks
@pytest.mark.parametrize("rows", some_and_others(ROWS, SOME))
def test_ranks_that_use_different_parameters_train_as_one(rows: list[tuple[str, str]]) -> None:
    expected = {kind: plainly(kind) for kind in dict(rows)}

    for runs in on_ranks(2, of_two_ranks, rows):
        for (kind, name), (results, state) in runs.items():
            losses, weights = expected[kind]
            assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6), (kind, name)
            for key, value in weights.items():
                torch.testing.assert_close(
                    state[key], value, rtol=1e-5, atol=1e-6, msg=f"{kind}, {name}: {key}"
                )
        if ("uses one of two", "zero 2") not in runs:
            continue
        unused = runs["uses one of two", "zero 2"][0][0].unused
        assert unused["blocks.0.never.weight"] == (0, 1)
        assert all(not set(key.split(".")) & {"up"} for key in unused)


def drifting() -> list[str]:
    """Flip one bit on rank 1, in a parameter that both ranks have whole, and in a part of none."""
    said = []
    for layout in ({}, {"pipeline": 2}):
        engine = Engine(
            lambda: Branching("passes on"),
            {"micro_batch": MICRO, **layout},
            loss=loss,
            optimizer=adamw,
            batch=batch_of(0),
            by_micro_batch=True,
        )
        engine.step(engine.slice(batch_of(0)))
        name = "heads.1.bias"
        held = engine.state().get(f"model.{name}")
        if torch.distributed.get_rank() == 1 and held is not None:
            held.view(torch.int32)[0] ^= 1
        try:
            engine.step(engine.slice(batch_of(1)))
            said.append("nothing")
        except LaunchError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_replica_with_a_flipped_bit_is_named() -> None:
    for replicated, alone in on_ranks(2, drifting):
        assert "heads.1.bias: ranks 0 and 1 have different values of this parameter" in replicated
        assert alone == "nothing"  # one rank alone has it
