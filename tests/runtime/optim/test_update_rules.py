"""Optimizers of a plan: their updates by their papers' formulas, and under every plan alike."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.training import Optimizer
from meshwright.planner.errors import LaunchError
from meshwright.runtime.optim.sharded_optimizer import TorchOptimizers
from meshwright.runtime.optim.update_rules import Lion, NarrowAdamW
from tests.parts import some_and_others
from tests.runtime import cases
from tests.runtime.ranks import on_ranks
from tests.runtime.runs import train_all


def stepped(optimizer: Any, parameter: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def test_lion_follows_its_paper() -> None:
    """Chen et al. (2023), algorithm 2."""
    first, mean = torch.ones(4, 6), torch.zeros(4, 6)
    expected = first.clone()
    for gradient in gradients(5):
        update = torch.sign(0.9 * mean + (1 - 0.9) * gradient)
        expected -= 0.01 * (update + 0.1 * expected)
        mean = 0.99 * mean + (1 - 0.99) * gradient

    parameter = nn.Parameter(first.clone())
    found = stepped(
        Lion([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), parameter, gradients(5)
    )

    assert torch.allclose(found, expected, atol=1e-6)


def test_moments_in_bf16_are_adamws_but_for_their_rounding() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    exact, narrow = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6))
    optimizer = NarrowAdamW([narrow], **settings)

    wanted = stepped(torch.optim.AdamW([exact], **settings), exact, gradients(5))
    found = stepped(optimizer, narrow, gradients(5))

    assert (found - wanted).abs().max() < 5 * 0.01 * 2**-7
    assert optimizer.state[narrow]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("rule", [Lion, NarrowAdamW])
def test_a_step_whose_gradients_overflowed_moves_nothing(rule: Any) -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    more = {"eps": 1e-8} if rule is NarrowAdamW else {}
    optimizer = rule([parameter], lr=0.01, betas=(0.9, 0.95), **more)
    optimizer.found_inf = torch.ones(())
    parameter.grad = torch.full((4, 6), float("inf"))

    optimizer.step()

    assert torch.equal(parameter.detach(), torch.ones(4, 6))
    assert all(not value.any() for value in optimizer.state[parameter].values())


def plan(optimizer: Optimizer, **layout: Any) -> Plan:
    made = cases.plan(cases.transformer("llama"), **layout)
    changes = {"optimizer": optimizer, "learning_rate": 3e-4}
    return made.model_copy(update={"training": made.training.model_copy(update=changes)})


ROWS: dict[str, tuple[Optimizer, dict[str, Any]]] = {
    "muon, zero 2": ("muon", {"data_shard": 2, "zero": 2}),
    "adafactor, zero 3": ("adafactor", {"data_shard": 2, "zero": 3}),
    "lion, tensor": ("lion", {"tensor": 2}),
    "sgd, pipeline": ("sgd", {"pipeline": 2}),
    "adamw-bf16, zero 1": ("adamw-bf16", {"data_shard": 2, "zero": 1}),
    "adafactor, tensor": ("adafactor", {"tensor": 2}),
    "lion, optimizer on the host": (
        "lion", {"data_shard": 2, "zero": 2, "offload": "optimizer"}
    ),
}  # fmt: skip
SOME = ["adafactor, zero 3", "lion, tensor", "sgd, pipeline"]


@pytest.mark.ranks
@pytest.mark.parametrize("names", some_and_others(ROWS, SOME))
def test_every_plan_updates_like_one_process(names: list[str]) -> None:
    model = cases.transformer("llama")
    rows = [(name, plan(ROWS[name][0], **ROWS[name][1]), model) for name in names]
    alone = {name: train_all([(name, plan(ROWS[name][0]), model)])[0][0] for name in names}

    for rank in on_ranks(2, train_all, rows):
        for name, (found, _) in zip(names, rank, strict=True):
            # Muon rounds to bf16 before it multiplies; the sign of a sum near 0 may turn.
            loose = 1e-3 if name.startswith(("muon", "lion")) else 1e-5
            assert found.losses == pytest.approx(alone[name].losses, rel=loose), name
            assert alone[name].losses[-1] != alone[name].losses[0]


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is not None, reason="torchao, which it lacks, is there"
)
def test_a_missing_part_is_named_with_how_to_get_it() -> None:
    model = cases.transformer("llama")

    with pytest.raises(LaunchError, match="pip install torchao"):
        train_all([("8 bits", plan("adamw-8bit"), model)])


def test_a_rate_that_is_a_tensor_is_filled() -> None:
    """torchao's compiled updates read that tensor, and refuse a number in its place."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate)
    stepping = SimpleNamespace(
        optimizers=[optimizer], _rate=lambda _: 0.5, steps=torch.zeros((), dtype=torch.int64)
    )

    TorchOptimizers._next_rate(stepping)  # type: ignore[arg-type]

    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
