"""A step is the user's own forward: what depends on values, modes and buffers is that of the step.

Each way of writing a forward trains as a plain loop of torch does, that shares no code with ours,
or is refused before the first update.  Batches differ in what they count, and the first one, which
is the example, takes a branch that others do not.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.planner.errors import LaunchError, MeshwrightError, RecordError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.tracing.replayed_stage import RecordedStage
from meshwright.runtime.tracing.stage import MicroBatch
from meshwright.runtime.tracing.tracer import Recorder
from tests.limits import PATIENCE_S
from tests.runtime.forward_ways import (
    buffers,
    later_modules,
    loops,
    means,
    modes,
    published,
    published_modules,
    values,
)
from tests.runtime.forward_ways.way import LAYOUTS, STEPS, WIDTH, Net, Way, batch_of, squares
from tests.runtime.ranks import on_ranks

WAYS: dict[str, dict[str, Way]] = {
    "values": values.WAYS,
    "modes": modes.WAYS,
    "buffers": buffers.WAYS,
    "means": means.WAYS,
    "loops": loops.WAYS,
    "published": published.WAYS,
    "modules": published_modules.WAYS,
    "later": later_modules.WAYS,
}


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@dataclass
class Training:
    """What a training says, or why it was refused before its first update."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    refusal: str = ""


def called(module: nn.Module, given: Any) -> Any:
    return module(**given) if isinstance(given, dict) else module(*given)


def mean_of(returned: Any) -> Any:
    return returned[0] / returned[1] if isinstance(returned, tuple) else returned


@functools.cache
def plainly(kind: str, name: str) -> Training:
    way = WAYS[kind][name]
    inputs = way.inputs or (lambda batch: (batch[0],))
    torch.manual_seed(0)
    module = way.build()
    result = Training()
    resting = [part for part in module.modules() if not part.training]

    def train() -> None:
        module.train()
        for part in resting:
            part.eval()

    train()
    optimizer = sgd([p for p in module.parameters() if p.requires_grad])
    for step in range(STEPS):
        way.before(module, step)
        batch = way.batches(step)
        loss = mean_of(way.loss(called(module, inputs(batch)), batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            evaluated = mean_of(way.loss(called(module, inputs(way.batches(9))), way.batches(9)))
        train()
        result.losses += [float(loss.detach()), float(evaluated)]
    result.weights = {name: value.clone() for name, value in module.state_dict().items()}
    return result


def planned(kind: str, name: str, layout: dict[str, Any]) -> Training:
    way, result = WAYS[kind][name], Training()
    modules = []

    def build() -> nn.Module:
        modules.append(way.build())
        return modules[-1]

    try:
        engine = Engine(
            build,
            layout,
            loss=way.loss,
            optimizer=sgd,
            batch=way.batches(0),
            inputs=way.inputs,
        )
    except MeshwrightError as error:
        return Training(refusal=str(error))
    for step in range(STEPS):
        try:
            way.before(modules[-1], step)
            loss = engine.step(engine.slice(way.batches(step))).loss
            evaluated = engine.evaluate(engine.slice(way.batches(9))).loss
        except MeshwrightError as error:
            if not step:
                return Training(refusal=str(error))
            raise
        result.losses += [float(loss), float(evaluated)]
    result.weights = engine.state_dict()
    return result


def check(found: Training, kind: str, name: str, *, trains: bool) -> None:
    assert (found.refusal == "") == trains, f"{name}: {found.refusal or 'was not refused'}"
    if found.refusal:
        return
    wanted = plainly(kind, name)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5), name
    assert list(found.weights) == list(wanted.weights), name
    for key, value in wanted.weights.items():
        torch.testing.assert_close(found.weights[key], value, rtol=1e-5, atol=1e-5)


@pytest.mark.spread(14)
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, ways in WAYS.items() for name in ways]
)
def test_a_forward_trains_as_in_a_plain_loop(kind: str, name: str) -> None:
    check(planned(kind, name, {}), kind, name, trains=True)


def some_of(kind: str, layout: str, every: int) -> dict[str, Training]:
    names = list(WAYS[kind])[::every]
    return {name: planned(kind, name, LAYOUTS[layout]) for name in names}


def check_two_ranks(kind: str, layout: str, every: int) -> None:
    for results in on_ranks(2, some_of, kind, layout, every, timeout_s=4 * PATIENCE_S):
        for name, found in results.items():
            check(found, kind, name, trains=layout in WAYS[kind][name].trains)


@pytest.mark.ranks
@pytest.mark.long("modes-replicas-6", "means-stages-6")
@pytest.mark.parametrize(
    ("kind", "layout", "every"),
    [
        ("values", "zero 3", 28),
        ("modes", "replicas", 6),
        ("buffers", "stages", 12),
        ("means", "stages", 6),
    ],
)
def test_two_ranks_train_as_a_plain_loop_or_refuse(kind: str, layout: str, every: int) -> None:
    check_two_ranks(kind, layout, every)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", WAYS)
def test_all_ways_train_on_two_ranks_or_are_refused(kind: str, layout: str) -> None:
    check_two_ranks(kind, layout, every=1)


class Dropping(Net):
    """Blocks that are dropped by a coin of Python, which no rank has seeded."""

    def __init__(self) -> None:
        super().__init__()
        numpy.random.standard_normal()
        self.order = [int(at) for at in numpy.random.permutation(WIDTH)]

    def forward(self, x: Tensor) -> Any:
        x = x[..., self.order]
        for block in self.blocks:
            if not self.training or random.random() < 0.6:
                x = block(x).tanh()
        return x


def noisy_inputs(batch: Any) -> Tensor:
    return batch[0] + 0.1 * torch.randn_like(batch[0])


def noisy_squares(out: Tensor, batch: Any) -> Any:
    return (out + random.random() * torch.rand_like(out)).square().sum(), out.numel()


class Beginning(Net):
    """Dropout whose rate the loop raises from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.features(x))


def losses_of(
    build: Any, layout: dict[str, Any], rate: float = 0.0, *, noise: bool = False
) -> list[float]:
    modules: list[Any] = []

    def built() -> nn.Module:
        modules.append(build())
        return modules[-1]

    engine = Engine(
        built,
        layout,
        loss=noisy_squares if noise else squares,
        inputs=noisy_inputs if noise else None,
        optimizer=sgd,
        batch=batch_of(0),
    )
    losses = []
    for step in range(STEPS):
        if rate:
            modules[-1].dropout.p = rate * step
        losses.append(float(engine.step(engine.slice(batch_of(step))).loss))
    return losses


class Gate(nn.Module):
    """Its backward does not read its input, which what recomputes it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * self.weight


class ChangedBehind(nn.Module):
    """The input of a unit is changed in place behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = Gate()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        gated = self.gate(x)
        return self.last(gated + x.add_(1.0))


class Inside(nn.Module):
    """A unit that calls another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * self.scale
        return result


class CalledInside(nn.Module):
    """A unit is called by its parent and by another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.around = Inside(self.first)

    def forward(self, x: Tensor) -> Any:
        return self.around(self.first(x).tanh())


@pytest.mark.parametrize("build", [ChangedBehind, CalledInside])
def test_a_recomputed_unit_trains_as_one_that_keeps_its_tensors(build: Any) -> None:
    torch.manual_seed(0)
    kept = losses_of(build, {"recompute": "none"})
    torch.manual_seed(0)
    recomputed = losses_of(build, {"recompute": "full"})

    assert recomputed == pytest.approx(kept, rel=1e-6)
    assert len(set(kept)) == STEPS


def on_two_ranks_by_hand() -> tuple[dict[str, Training], list[list[float]], str]:
    """Train what ranks must draw and divide alike, and see refused what they could not."""
    random.seed(dist.get_rank())
    numpy.random.seed(dist.get_rank())
    every = {}
    for name, layout in ONE_OF_EACH:
        every[f"{name}/{layout}"] = planned("loops", name, LAYOUTS[layout])
    dropped = [
        losses_of(Dropping, {"zero": 3}),
        losses_of(Net, {"zero": 3}, noise=True),
        losses_of(Net, LAYOUTS["stages"], noise=True),
    ]
    with pytest.raises(RecordError) as refusal:
        losses_of(Beginning, {"pipeline": 2}, rate=0.2)
    return every, dropped, str(refusal.value)


ONE_OF_EACH = (
    ("clipped on the way", "zero 3"),
    ("teacher bound anew", "zero 3"),
    ("alternating", "stages"),
)


@pytest.mark.ranks
def test_ranks_draw_and_divide_alike() -> None:
    halves = {"micro_batches": 2}
    noisy = losses_of(Net, halves, noise=True)
    wanted = [losses_of(Dropping, halves), noisy, noisy]
    for every, dropped, words in on_ranks(2, on_two_ranks_by_hand):
        for name, layout in ONE_OF_EACH:
            trains = layout in loops.WAYS[name].trains
            check(every[f"{name}/{layout}"], "loops", name, trains=trains)
        assert numpy.allclose(dropped, wanted, rtol=1e-6, atol=0)
        assert "draws random numbers that it did not draw in the first batch" in words


WIDER: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor": 2}),
    "tensor x data": (4, {"tensor": 2, "zero": 3}),
    "stages x data": (4, {"pipeline": 2, "micro_batches": 2, "zero": 2}),
    "stages, one forward": (2, {"pipeline": 2, "micro_batches": 1}),
}


def all_of(kind: str, layout: str) -> dict[str, Training]:
    warnings.filterwarnings("ignore", "mesh.tensor: is 2, and no module can be divided")
    return {name: planned(kind, name, WIDER[layout][1]) for name in WAYS[kind]}


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("layout", WIDER)
@pytest.mark.parametrize("kind", ["buffers", "published", "modules", "later"])
def test_published_modules_train_on_wider_layouts_or_are_refused(kind: str, layout: str) -> None:
    every = on_ranks(WIDER[layout][0], all_of, kind, layout, timeout_s=8 * PATIENCE_S)
    for results in every:
        for name, found in results.items():
            check(found, kind, name, trains=not found.refusal)


def replaced_parameter(layout: dict[str, Any]) -> str:
    modules = [Net()]
    engine = Engine(lambda: modules[0], layout, loss=squares, optimizer=sgd, batch=batch_of(0))
    engine.step(engine.slice(batch_of(0)))
    before = engine.state_dict()
    weight = modules[0].blocks[0].weight
    modules[0].blocks[0].weight = nn.Parameter(torch.ones_like(weight))
    with pytest.raises(LaunchError) as refusal:
        engine.step(engine.slice(batch_of(1)))
    modules[0].blocks[0].weight = weight
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name])
    return str(refusal.value)


def test_a_parameter_that_no_optimizer_has_is_refused_before_an_update() -> None:
    assert replaced_parameter({}).startswith("blocks.0.weight: is another parameter")


@pytest.mark.parametrize("change", ["swaps", "adds", "removes"])
def test_a_module_that_moved_is_refused_before_an_update(change: str) -> None:
    modules = [Net()]
    engine = Engine(lambda: modules[0], {}, loss=squares, optimizer=sgd, batch=batch_of(0))
    blocks = modules[0].blocks
    if change == "swaps":
        blocks[0], blocks[2] = blocks[2], blocks[0]
    elif change == "adds":
        blocks.append(nn.Linear(WIDTH, WIDTH))
    else:
        del blocks[2]

    with pytest.raises(LaunchError, match=r"blocks\.\d: is another module than when"):
        engine.step(batch_of(0))


def copied(layout: dict[str, Any]) -> str:
    modules = [Net()]
    Engine(lambda: modules[0], layout, loss=squares, optimizer=sgd, batch=batch_of(0))
    with pytest.raises(LaunchError) as refusal:
        copy.deepcopy(modules[0])
    return str(refusal.value)


@pytest.mark.ranks
def test_a_copy_of_a_divided_module_is_refused_in_words() -> None:
    for words in on_ranks(2, copied, {"zero": 3}):
        assert re.match(r"Linear: is copied, and ranks divide .* engine\.averaged\(decay\)", words)


class Longest(nn.Module):
    """A unit that returns as many positions as a value says, by a number of Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : 1 + int(x[0, 0, 0] > 0)] * 1


def test_a_replayed_call_that_makes_another_shape_is_refused() -> None:
    module = Net()
    module.blocks.insert(0, Longest())
    recorder = Recorder(module, batch_of(0))
    stage = RecordedStage(module, recorder, 0, len(recorder.first.layers))
    stage.checks_shapes = True
    x = batch_of(0)[0]
    shapes = []
    for sign in (1.0, -1.0):
        with contextlib.suppress(RecordError):
            shapes.append(stage(micro=MicroBatch((sign * x, x))).shape)

    assert len(shapes) == 1, "one of both has another shape than was recorded"
    with pytest.raises(RecordError, match=r"blocks\.0 makes .* its size depends on values"):
        for sign in (1.0, -1.0):
            stage(micro=MicroBatch((sign * x, x)))


class Particular(Net):
    """A forward that takes no sample whose first number is large, between its units."""

    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            x = block(x).tanh()
            if at == 0:
                x = Checked.apply(x)
        return x


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.abs().max() > 0.99:
            raise ValueError("a number is too large")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def words_of_one_rank(layout: dict[str, Any]) -> list[str]:
    engine = Engine(Particular, layout, loss=squares, optimizer=sgd, batch=batch_of(0))
    words = []
    for act in (engine.evaluate, engine.step):
        x, targets = batch_of(0)
        act(engine.slice((x, targets)))
        x[-1] *= 100.0
        with pytest.raises((LaunchError, ValueError)) as error:
            act(engine.slice((x, targets)))
        words.append(str(error.value))
    before = engine.state_dict()["blocks.0.weight"].clone()
    engine.step(engine.slice(batch_of(0)))
    assert not torch.equal(engine.state_dict()["blocks.0.weight"], before)
    return words


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_one_rank_raises_between_units_is_raised_on_all(zero: int) -> None:
    layout = {"pipeline": 2, "micro_batches": 2, "zero": zero}

    every = on_ranks(4, words_of_one_rank, layout, timeout_s=PATIENCE_S)

    for words in every:
        assert all("a number is too large" in text for text in words)
