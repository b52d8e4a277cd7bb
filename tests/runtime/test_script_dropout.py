"""Dropout at p > 0 is that of one process under any plan of equal micro-batches, and resumed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.tracing.stage import step_seed, unit_seed
from tests.runtime.own_modules import WORDS, Bert
from tests.runtime.ranks import on_ranks

SAMPLES, SIZE, STEPS = 8, 2, 3
LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch": SIZE},
    {"micro_batch": SIZE, "zero": 3, "recompute": "full"},
    {"micro_batch": SIZE, "pipeline": 2},
    {"micro_batch": SIZE, "pipeline": 2, "recompute": "selective", "schedule": "gpipe"},
]


def build() -> nn.Module:
    return Bert(dropout=0.3)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, WORDS, (SAMPLES, 7), generator=generator), torch.ones(SAMPLES, 7)


def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    flat = functional.cross_entropy(outputs.flatten(0, 1), batch[0].flatten(), reduction="sum")
    return flat, batch[0].numel()


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def new_engine(layout: dict[str, Any]) -> Engine:
    return Engine(
        build, layout, loss=loss, optimizer=sgd, batch=batch_of(0), inputs=lambda batch: batch
    )


def trained(layout: dict[str, Any], *, folder: str = "", stops_at: int = STEPS) -> Any:
    engine = new_engine(layout)
    if folder:
        engine.resume(folder)
    for step in range(engine.steps, stops_at):
        engine.step(engine.slice(batch_of(step)))
    if folder and stops_at < STEPS:
        engine.save(folder)
    return engine.state_dict()


def whole_and_resumed(layout: dict[str, Any], folder: str) -> list[dict[str, Tensor]]:
    made = trained(layout)
    trained(LAYOUTS[0], folder=folder, stops_at=2)
    dist.barrier()
    return [made, trained(LAYOUTS[2], folder=folder)]


def plainly() -> dict[str, Tensor]:
    """Train in a plain loop, with torch's generator seeded before each part that draws."""
    torch.manual_seed(0)
    model = build()
    optimizer = sgd(model.parameters())
    current = [0]

    def seeding(name: str) -> Any:
        return lambda *_: torch.manual_seed(unit_seed(current[0], name)) and None

    for name in ("drop", "blocks.0", "blocks.1", "blocks.2"):
        model.get_submodule(name).register_forward_pre_hook(seeding(name))
    for step in range(STEPS):
        ids, mask = batch_of(step)
        for first in range(0, SAMPLES, SIZE):
            current[0] = step_seed(0, step, first)
            own = ids[first : first + SIZE], mask[first : first + SIZE]
            (loss(model(*own), own)[0] / ids.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.ranks
@pytest.mark.spread(1)
@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[1]], ids=["stages", "zero 3"])
def test_masks_depend_neither_on_ranks_nor_stages_nor_a_restart(layout: dict[str, Any]) -> None:
    wanted = plainly()
    with tempfile.TemporaryDirectory() as folder:
        for found in on_ranks(2, whole_and_resumed, layout, str(Path(folder, "checkpoints"))):
            for run, state in zip(["whole", "resumed"], found, strict=True):
                for name, value in wanted.items():
                    torch.testing.assert_close(
                        state[name], value, rtol=1e-5, atol=1e-6, msg=f"{layout}, {run}: {name}"
                    )
