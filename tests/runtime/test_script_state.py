"""What of a module no gradient moves: weights that nothing reads, and buffers that a forward makes.

Both are in `state_dict` and in checkpoints, with the values of one process.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.errors import LaunchError
from runtime.script_engine import Engine
from tests.runtime.ranks import on_ranks

SAMPLES, WIDTH, STEPS = 8, 6, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero 3": {"zero": 3},
    "zero 2 in bf16": {"zero": 2, "precision": "bf16"},
    "two stages": {"pipeline": 2},
}
UNUSED = {"spare.weight", "spare.bias", "blocks.1.scale", "once", "table", "frozen"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x).tanh()


class Spare(nn.Module):
    """Most of what it has is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.spare = nn.Linear(WIDTH, 3)
        self.once = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.blocks[1].register_parameter("scale", nn.Parameter(torch.randn(WIDTH)))
        self.register_buffer("table", torch.randn(5))
        self.register_buffer("passing", torch.randn(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Counting(Spare):
    """A buffer follows the samples that this rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Seen()


class Seen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(x.detach().max())
        return super().forward(x)


def batch_of(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def loss(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (outputs - batch.roll(1, 1)).square().sum(), len(outputs)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, eps=1e-4)


new_engine = functools.partial(Engine, loss=loss, optimizer=adamw, batch=batch_of(0))


def plainly() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Spare()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        batch = batch_of(step)
        (loss(model(batch), batch)[0] / SAMPLES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def trained(layout: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state that was trained, and that of another engine that loads it."""
    engine = new_engine(Spare, layout)
    for step in range(STEPS):
        engine.step(engine.slice(batch_of(step)))
    engine.save(folder)
    other = new_engine(Spare, {**layout, "seed": 7})
    other.load(folder)
    return engine.state_dict(), other.state_dict()


def every_layout(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: trained(layout, Path(folder, name)) for name, layout in LAYOUTS.items()
    }
    engine = new_engine(Counting, {"zero": 3}, compare_every=0)
    engine.step(batch_of(0)[: SAMPLES // 2])  # of both ranks
    engine.save(Path(folder, "equal"))
    engine.step(engine.slice(batch_of(0)))
    with pytest.raises(LaunchError) as refused:
        engine.save(Path(folder, "unequal"))
    return {**found, "refused": str(refused.value)}


def check(pair: tuple[dict[str, Tensor], ...], name: str) -> None:
    wanted = plainly()
    close = {"rtol": 2e-2, "atol": 2e-2} if "bf16" in name else {"rtol": 1e-5, "atol": 1e-6}
    for state in pair:
        assert state.keys() == wanted.keys(), name
        for key, value in wanted.items():
            if key in UNUSED:
                assert torch.equal(state[key], value), (name, key)
            else:
                torch.testing.assert_close(state[key], value, msg=f"{name}: {key}", **close)


def test_one_process_keeps_what_nothing_reads(tmp_path: Path) -> None:
    check(trained({}, tmp_path), "alone")


@pytest.mark.ranks
def test_two_ranks_keep_what_nothing_reads_and_refuse_buffers_that_differ() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for found in on_ranks(2, every_layout, folder):
            said = found.pop("refused")
            for name, pair in found.items():
                check(pair, name)
            assert "blocks.2.largest: ranks 0 and 1 have different values" in said
            assert "persistent=False" in said
