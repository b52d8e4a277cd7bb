"""What runs before training leaves no trace: modules with state of Python train as a plain loop."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright
from meshwright.planner.errors import MeshwrightError, RecordError
from meshwright.runtime.core.side_effects import deepcopy_module, restore_side_effects
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.module_graph import check_replay
from meshwright.runtime.tracing.tracer import Recorder

WIDTH, STEPS = 4, 3
CALLS = [0]
TABLES: dict[int, Tensor] = {}
COUNT = 0
NUMBERS = itertools.count()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(4, WIDTH, generator=generator),
        torch.randint(3, (4,), generator=generator),
    )


def loss(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(out, batch[1], reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


class CountsInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return x * len(self.seen)


class CountsInClass(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * self.calls


class CountsInGlobals(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603 - the case
        COUNT += 1
        CALLS[0] += 1
        return x * COUNT + CALLS[0]


class CountsInDefault(nn.Module):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - the case
        seen.append(1)
        return x + len(seen)


class TakesNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + next(NUMBERS)


class Tabled(nn.Module):
    """Its tables are made as they are needed, and normalised by the first batch."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in TABLES:
            TABLES[len(x)] = x.detach().std(0) + 1
        return x / TABLES[len(x)] + cached(x.shape[1])


@functools.lru_cache
def cached(width: int) -> Tensor:
    return torch.arange(width) / width


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.rng = random.Random(0), np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return x * self.own.random() + self.rng.random() + noise


class Initialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.done = True
            with torch.no_grad():
                self.bias.copy_(x.mean(0))
        return x - self.bias


MODULES = (
    CountsInList,
    CountsInClass,
    CountsInGlobals,
    CountsInDefault,
    TakesNumbers,
    Tabled,
    Draws,
    Initialised,
)


def net(middle: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, 3))


def begin() -> None:
    """Put the state of this file as a new process has it."""
    global COUNT, NUMBERS
    COUNT, CALLS[0], CountsInClass.calls, NUMBERS = 0, 0, 0, itertools.count()
    TABLES.clear()
    cached.cache_clear()
    CountsInDefault.forward.__defaults__[0].clear()  # type: ignore[index]
    random.seed(0)
    np.random.seed(0)


def plain(build: Callable[[], nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    begin()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = build()
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        total, count = loss(model(batch_of(step)[0]), batch_of(step))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    return losses, model.state_dict()


@pytest.mark.parametrize("middle", MODULES)
def test_modules_with_state_of_python_train_as_the_plain_loop(
    middle: Callable[[], nn.Module],
) -> None:
    build = functools.partial(net, middle)
    torch.manual_seed(3)
    losses, weights = plain(build)
    drawn = (random.random(), np.random.rand(), torch.rand(()))
    begin()
    torch.manual_seed(3)

    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    found = [engine.step(batch_of(step)).loss for step in range(STEPS)]

    assert found == pytest.approx(losses, abs=1e-6)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)


@pytest.mark.spread(2)
@pytest.mark.parametrize("middle", [*MODULES, nn.Dropout])
def test_planning_and_styles_leave_no_trace(middle: Callable[[], nn.Module]) -> None:
    begin()
    torch.manual_seed(3)
    build = functools.partial(net, middle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.api.commands.answer_to", _no_search)
        with pytest.raises(_SearchError):
            meshwright.search(build, "local:1", batch=batch_of(0), loss=loss, global_batch=4)
    meshwright.tensor_styles(build, batch=batch_of(0))

    state = (COUNT, CALLS[0], CountsInClass.calls, next(NUMBERS), len(TABLES))
    assert state == (0, 0, 0, 0, 0)
    assert not CountsInDefault.forward.__defaults__[0]  # type: ignore[index]
    assert not any(type(cached(n)) is not Tensor for n in range(WIDTH + 1))
    drawn = random.random(), np.random.rand(), torch.rand(())
    begin()
    torch.manual_seed(3)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))


class _SearchError(Exception):
    pass


def _no_search(*_: Any, **__: Any) -> None:
    raise _SearchError


@pytest.mark.parametrize("middle", [CountsInList, CountsInClass, CountsInGlobals, Initialised])
@pytest.mark.parametrize("layout", [{"micro_batches": 2}, {"recompute": "full"}])
def test_a_module_that_forwards_change_is_refused_where_a_step_has_several(
    middle: Callable[[], nn.Module], layout: dict[str, Any]
) -> None:
    begin()

    with pytest.raises(RecordError, match="is changed by every forward"):
        Engine(functools.partial(net, middle), layout, loss=loss, optimizer=sgd, batch=batch_of(0))


class CountsBetween(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x if self.calls < 9 else x * 2


class DrawsBetween(CountsBetween):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x if random.random() < 1e-9 else block(x)
        return x


class Suspended(nn.Linear):
    numbers = (number for number in range(9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(Suspended.numbers)


class Uncopyable(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.numbers = (number for number in range(9))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (functools.partial(Suspended, WIDTH, 3), "numbers: is a generator"),
        (functools.partial(Uncopyable, WIDTH, 3), "cannot pickle .generator. object"),
    ],
)
def test_state_that_a_trial_cannot_keep_is_refused_by_name(
    build: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(MeshwrightError, match=said):
        Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (CountsBetween, "'calls' changes in one of them only"),
        (DrawsBetween, "Python's own state"),
    ],
)
def test_state_of_python_between_units_is_refused_in_stages_alone(
    build: Callable[[], nn.Module], said: str
) -> None:
    Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0)).step(batch_of(0))
    with pytest.raises(MeshwrightError, match=said):
        check_replay(build(), Recorder(build(), batch_of(0)), batch_of(0))


def test_hooks_and_closures_are_as_they_were() -> None:
    seen: list[Any] = []
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1
        seen.append(count)

    def build() -> nn.Module:
        module = net(nn.Tanh)
        module[0].register_forward_hook(note)  # type: ignore[index]
        return module

    engine = Engine(build, loss=loss, optimizer=sgd, batch=batch_of(0))
    assert (count, seen) == (0, [])

    engine.step(batch_of(0))

    assert (count, seen) == (1, [1])


def test_large_tensors_outside_of_a_module_are_refused_where_they_change() -> None:
    large = torch.zeros(1 << 19)

    with (
        pytest.raises(RecordError, match="large: is changed in place"),
        restore_side_effects(lambda: large),
    ):
        large.add_(1)


def test_a_copy_shares_nothing_that_can_change() -> None:
    module = Draws()

    twin = deepcopy_module(module)
    twin(torch.ones(2, WIDTH))

    assert module.own.random() == random.Random(0).random()
    assert torch.equal(
        torch.rand((), generator=module.generator),
        torch.rand((), generator=torch.Generator().manual_seed(0)),
    )
