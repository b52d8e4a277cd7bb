"""Held-out batches of any size are evaluated as one process does, and outputs are in eval mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import BatchError
from meshwright.runtime.core.auxiliary_loss import add_loss, batch_sum
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

WIDTH, GLOBAL = 4, 8
SIZES = (8, 5, 1, 3, 19)
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"micro_batch": 2},
    "zero 3": {"zero": 3, "micro_batch": 2},
    "two stages": {"pipeline": 2, "micro_batch": 2},
    "unequal shares": {"shares": [3, 1]},
}


class Net(nn.Module):
    """Drops, normalises by running statistics, and adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16)
        self.drop, self.second = nn.Dropout(0.5), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.norm(self.first(x)).tanh()))


class Penalised(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        count = batch_sum(torch.tensor(float(len(x))))
        return add_loss(out, out.square().sum() * count)


def loss(out: Tensor, given: Any) -> Any:
    right = (out.argmax(-1) == given[1]).sum()
    total = functional.cross_entropy(out, given[1], reduction="sum")
    return total, (given[1] != -100).sum(), {"right": (right, len(out))}


def contrastive(out: Tensor, given: Any) -> Any:
    return functional.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    y = torch.randint(3, (samples,), generator=generator)
    y[samples // 2] = -100 if samples > 1 else 1
    return torch.randn(samples, WIDTH, generator=generator), y


def _answers(layout: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for build, how in ((Net, loss), (Penalised, loss), (Net, whole_batch(contrastive))):
        if "shares" in layout:  # BatchNorm and whole batches have equal shares
            build, how = nn.Linear, loss  # noqa: PLW2901 - the only case left
        make = (lambda: nn.Linear(WIDTH, 3)) if build is nn.Linear else build
        engine = Engine(make, layout, loss=how, optimizer=sgd, batch=batch(GLOBAL))
        before = engine.state_dict()
        for size in SIZES:
            if size < engine.slices and isinstance(how, whole_batch):
                with pytest.raises(BatchError, match="at least one"):
                    engine.evaluate(engine.slice(batch(size), ragged=True))
                continue
            own = engine.slice(batch(size), ragged=True)
            said = engine.evaluate(own)
            made = engine.outputs(own)
            found.append((size, said.loss, said.count, dict(said.metrics), made, own[0]))
        after = engine.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.step(engine.slice(batch(GLOBAL)))
    return found


def module(build: Any, layout: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        made: nn.Module = nn.Linear(WIDTH, 3) if "shares" in layout else build()
    return made.eval()


@pytest.mark.spread(1)
@pytest.mark.long("two stages", "replicated")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.matrix
def test_evaluation_of_any_size_is_that_of_one_process(layout: dict[str, Any]) -> None:
    for rank in on_ranks(2, _answers, layout):
        with torch.no_grad():
            _compare(rank, layout)


def _compare(rank: list[Any], layout: dict[str, Any]) -> None:
    for build, inner, how in ((Net, 0.0, loss), (Penalised, 1.0, loss), (Net, 0.0, contrastive)):
        own = loss if "shares" in layout else how
        for size in SIZES:
            if own is contrastive and size < (1 if "pipeline" in layout else 2):
                continue
            found, said, count, metrics, made, given = rank.pop(0)
            x, y = batch(size)
            model = module(build, layout)
            out = model(x)
            total, counted, *_ = own(out, (x, y))
            if inner and "shares" not in layout:
                total = total + out.square().sum() * size
            assert found == size
            assert count == int(counted)
            assert said == pytest.approx(float(total) / int(counted), rel=1e-5)
            if metrics:
                assert metrics["right"] == pytest.approx(float((out.argmax(-1) == y).sum()) / size)
            torch.testing.assert_close(made, model(given))


def test_outputs_in_train_mode_are_asked_for() -> None:
    engine = Engine(Net, loss=loss, optimizer=sgd, batch=batch(GLOBAL))
    before = engine.state_dict()

    drawn = engine.outputs(batch(5), training=True)

    assert len(drawn) == 5
    assert not torch.allclose(drawn, engine.outputs(batch(5)))
    assert all(torch.equal(engine.state_dict()[n], value) for n, value in before.items())


def test_a_ragged_batch_is_no_step() -> None:
    engine = Engine(Net, loss=loss, optimizer=sgd, batch=batch(GLOBAL))

    with pytest.raises(BatchError, match="ragged=True"):
        engine.slice(batch(5))
    with pytest.raises(BatchError, match="drop_last"):
        engine.step(engine.slice(batch(5), ragged=True))
