"""Every optimizer of torch is equal to one process under ZeRO, or refused with its name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.planner.errors import OptimizerError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.optim.sharded_optimizer import is_elementwise
from tests.parts import some_and_others
from tests.runtime.exact_muon import muon_without_rounding
from tests.runtime.ranks import on_ranks

STEPS, SAMPLES = 3, 8
ELEMENTWISE: dict[str, Any] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True, "eps": 1e-4},
    "AdamW": {"lr": 0.01, "eps": 1e-4, "fused": True},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01, "eps": 1e-4},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "eps": 1e-3},
    "Adagrad": {"lr": 0.01},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1},
    "Rprop": {"lr": 0.01},
}
WHOLE: dict[str, Any] = {"Muon": {"lr": 0.02}, "Adafactor": {"lr": 0.01}}


class Net(nn.Module):
    """Shards are uneven over two ranks, and one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.down = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.down(x * self.scale)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, generator=generator), torch.randn(
        SAMPLES, 3, generator=generator
    )


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), output.numel()


def settings_of(which: str, name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the group of a parameter: what takes only matrices leaves the rest to SGD."""
    if which in WHOLE:
        if parameter.ndim == 2 and name.startswith("blocks"):
            return dict(WHOLE[which])
        return {"optimizer": torch.optim.SGD, "lr": 0.05}
    return {**ELEMENTWISE[which], **({"lr": 0.005} if parameter.ndim == 1 else {})}


def new_engine(which: str, plan: dict[str, Any]) -> Engine:
    return Engine(
        Net,
        plan,
        loss=loss,
        optimizer=getattr(torch.optim, which),
        groups=functools.partial(settings_of, which),
        batch=batch_of(0),
    )


def plainly(which: str, steps: int = STEPS) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    made: dict[Any, list[dict[str, Any]]] = {}
    for name, parameter in model.named_parameters():
        settings = settings_of(which, name, parameter)
        factory = settings.pop("optimizer", getattr(torch.optim, which))
        made.setdefault(factory, []).append({"params": [parameter], **settings})
    optimizers = [factory(groups) for factory, groups in made.items()]
    for step in range(steps):
        total, count = loss(model(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


def train(engine: Engine, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last):
        engine.step(engine.slice(batch_of(step)))
    return engine.state_dict()


def in_zero_3(folder: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """Train with each, and save behind the last step but one."""
    found = {}
    for which in names:
        engine = new_engine(which, {"zero": 3})
        train(engine, 0, STEPS - 1)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizers[0], 1, gamma=1.0)
        engine.save(Path(folder) / which, extra={"scheduler": scheduler, "epoch": Number(7)})
        found[which] = train(engine, STEPS - 1, STEPS)
        again = new_engine(which, {"zero": 1, "seed": 5})
        again.load(Path(folder) / which)
        assert again.steps == STEPS - 1
        found[f"{which} again"] = train(again, STEPS - 1, STEPS)
    return found


class Number:
    """A user's state."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.ranks
@pytest.mark.parametrize("names", some_and_others((*ELEMENTWISE, *WHOLE), ["AdamW", "Muon"]))
def test_every_optimizer_of_torch_is_that_of_one_process_and_goes_on_anywhere(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    muon_without_rounding(monkeypatch)
    expected = {which: plainly(which) for which in names}

    ranks = on_ranks(2, in_zero_3, str(tmp_path), names)

    for found in ranks:
        for name, weights in found.items():
            for key, value in expected[name.removesuffix(" again")].items():
                torch.testing.assert_close(
                    weights[key], value, rtol=1e-5, atol=2e-6, msg=f"{name}: {key}"
                )
    for which, weights in expected.items():
        alone, epoch = new_engine(which, {"seed": 9}), Number(0)
        alone.load(tmp_path / which, extra={"epoch": epoch})
        assert epoch.value == 7
        for key, value in train(alone, STEPS - 1, STEPS).items():
            torch.testing.assert_close(value, weights[key], rtol=1e-5, atol=2e-6, msg=which)


def test_which_updates_are_element_wise_is_found_by_trying() -> None:
    for which, settings in ELEMENTWISE.items():
        assert is_elementwise(getattr(torch.optim, which), settings), which
    for which, settings in WHOLE.items():
        assert not is_elementwise(getattr(torch.optim, which), settings), which


def test_what_no_plan_takes_is_refused_by_name() -> None:
    def engine(optimizer: Any, **more: Any) -> Engine:
        return Engine(Net, loss=loss, optimizer=optimizer, batch=batch_of(0), **more)

    with pytest.raises(OptimizerError, match="LBFGS calls the loss again and again"):
        engine(torch.optim.LBFGS)
    with pytest.raises(OptimizerError, match="cannot be made: ValueError: Invalid learning rate"):
        engine(lambda groups: torch.optim.SGD(groups, lr=-1.0))
    with pytest.raises(OptimizerError, match="returned int; it must return a torch"):
        engine(lambda groups: 3)
    with pytest.raises(OptimizerError, match="was given 7 parameters and has 6"):
        engine(lambda groups: torch.optim.SGD(groups[0]["params"][1:], lr=0.1))
