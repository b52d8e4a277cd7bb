"""What a script gives by mistake is refused with what was given and the line to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import MeshwrightError
from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

WIDTH = 4


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, WIDTH, generator=generator), torch.arange(4) % 3


def loss(out: Tensor, given: Any) -> Any:
    return functional.cross_entropy(out, given[1], reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 3))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "a module": ({"build": build()}, r"build: is a Sequential.*build=lambda"),
    "no function": ({"build": "Net"}, r"build: is a str.*build=lambda"),
    "nothing returned": ({"build": lambda: None}, r"build: returned a NoneType.*return module"),
    "complex": ({"build": Complex}, r"weight: is a complex parameter.*view_as_complex"),
    "a loss of torch": ({"loss": nn.MSELoss()}, r'nn.MSELoss\(reduction="sum"\)'),
    "a loss by name": ({"loss": "mse"}, r"loss: is a str.*loss=lambda out, batch"),
    "an optimizer": ({"optimizer": sgd(build().parameters())}, r"optimizer=lambda groups"),
    "settings": ({"optimizer": {"lr": 0.1}}, r"optimizer: is a dict.*optimizer=lambda groups"),
    "more stages than layers": (
        {"build": Wrapped, "plan": {"pipeline": 2, "virtual_stages": 1}},
        r"does not divide|asks for 2 stages",
    ),
}


@pytest.mark.parametrize(("given", "said"), GIVEN.values(), ids=list(GIVEN))
def test_a_mistake_is_answered_with_the_line_to_write(given: dict[str, Any], said: str) -> None:
    all_given = {"build": build, "loss": loss, "optimizer": sgd, "batch": batch(), **given}

    with pytest.raises(MeshwrightError, match=said):
        Engine(all_given.pop("build"), all_given.pop("plan", None), **all_given)


def _double(model: nn.Module) -> nn.Module:
    model[1].double()  # type: ignore[index]
    return model


class Casting(nn.Sequential):
    """Casts to the type of each layer's weight."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Casting(nn.Linear(WIDTH, 5), nn.Linear(5, 3)).bfloat16(),
        lambda: _double(Casting(nn.Linear(WIDTH, 5), nn.Linear(5, 3))),
        lambda: Casting(nn.Linear(WIDTH, 5), nn.Linear(5, 3)).double(),
    ],
)
def test_parameters_of_any_type_are_computed_with_as_they_are(
    make: Callable[[], nn.Module],
) -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = make()
    optimizer = sgd(model.parameters())
    engine = Engine(make, loss=loss, optimizer=sgd, batch=batch())
    for _ in range(2):
        total, count = loss(model(batch()[0]), batch())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

        assert engine.step(batch()).loss == pytest.approx(float(total.detach()) / count, rel=1e-3)


def _with_plans_of_their_own() -> tuple[list[str], str]:
    """Give each rank another plan, then rank 1 none; return what both train by, and the refusal."""
    said = {"loss": loss, "optimizer": sgd, "batch": batch()}
    rank = torch.distributed.get_rank()
    plans = [Engine(build, {"zero": zero}, **said).plan for zero in (1, 3)]
    engine = Engine(build, plans[rank], **said)
    engine.step(engine.slice(batch()))
    assert isinstance(engine.plan, Plan)
    with pytest.raises(MeshwrightError) as refused:
        Engine(build, plans[0] if rank == 0 else {}, **said)
    return [engine.plan.digest, plans[0].digest], str(refused.value)


@pytest.mark.ranks
def test_ranks_that_planned_differently_train_by_the_plan_of_rank_0() -> None:
    for (trained, of_rank_0), refused in on_ranks(2, _with_plans_of_their_own):
        assert trained == of_rank_0
        assert refused == "plan: give it to all ranks, or to none; it is missing on rank 1"
