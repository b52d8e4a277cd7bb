"""AdamW8bit of torchao over parts of parameters: one process's weights, priced and saved."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.optim.sharded_optimizer import ParameterGroup, is_elementwise, state_bytes
from tests.runtime.ranks import on_ranks

pytest.importorskip("torchao", reason="AdamW8bit is torchao's")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SAMPLES, WIDTH, STEPS = 4, 64, 6


def build() -> nn.Module:
    # Parts of 32 rows hold whole blocks of 256 elements; biases are too small to be quantised.
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, WIDTH))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    given, wanted = torch.randn(2, SAMPLES, WIDTH, generator=generator)
    return given, wanted


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (out - batch[1]).square().sum(), out.numel()


def eight_bits(groups: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(groups, lr=1e-2, eps=1e-4)
    return made


def plainly() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build()
    optimizer = eight_bits(model.parameters())
    for step in range(STEPS):
        total, count = loss(model(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def trained(plan: dict[str, Any], folder: Path | None, steps: int) -> dict[str, Tensor]:
    engine = Engine(build, plan, loss=loss, optimizer=eight_bits, batch=batch_of(0))
    if folder is not None:
        engine.resume(folder)
    while engine.steps < steps:
        engine.step(engine.slice(batch_of(engine.steps)))
    if folder is not None:
        engine.save(folder)
    return engine.state_dict()


def everywhere(folder: Path) -> dict[str, Tensor]:
    """Train to the end under one plan, and half way under another, which saves."""
    with torch.compiler.set_stance("force_eager"):
        trained({"zero": 1}, folder, STEPS // 2)
        return trained({"zero": 3}, None, STEPS)


@pytest.mark.ranks
def test_state_in_eight_bits_is_divided_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        expected = plainly()
        found = on_ranks(2, everywhere, tmp_path)
        resumed = trained({}, tmp_path, STEPS)

    for weights in (*found, resumed):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_eight_bits_are_priced_where_they_are_kept() -> None:
    group = functools.partial(ParameterGroup, eight_bits, {}, ())
    scales = 2 * 4 / 256

    assert is_elementwise(eight_bits, {})
    assert state_bytes(group(), [torch.Size((1 << 20,))]) / (1 << 20) == pytest.approx(
        2 + scales, rel=0.07
    )
    assert state_bytes(group(), [torch.Size((100,))]) == 800
