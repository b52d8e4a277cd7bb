"""A step is the user's own forward: what depends on values, modes and buffers is that of the step.

Each way of writing a forward trains as a plain loop of torch does, that shares no code with ours,
or is refused before the first update.  Batches differ in what they count, and the first one, which
is the example, takes a branch that others do not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import MeshwrightError, RecordError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.tracing.replayed_stage import MicroBatch, RecordedStage
from meshwright.runtime.tracing.tracer import Recorder
from tests.runtime.ranks import on_ranks

WIDTH, POSITIONS, SAMPLES, STEPS = 6, 5, 8, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "zero 3": {"zero": 3},
    "stages": {"pipeline": 2, "micro_batches": 2},
}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return samples of positions, with other numbers above 0 in each; all are in the first."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=generator)
    if step == 0:
        x[..., :2] = x[..., :2].abs() + 0.1
    targets = torch.randint(0, WIDTH, (SAMPLES, POSITIONS), generator=generator)
    if step:
        for sample in range(SAMPLES):
            targets[sample, : (sample * step) % POSITIONS] = -100
    return x, targets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.features(x)


def squares(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), out.numel()


def returned(out: Any, batch: Any) -> Any:
    return out


def pieces(out: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of cross-entropies."""
    return functional.cross_entropy(
        out.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


# --- W1: what depends on values -----------------------------------------------------------------

COUNTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "shape": lambda picked, mask: picked.shape[0],
    "size": lambda picked, mask: picked.size(0),
    "len": lambda picked, mask: len(picked),
    "numel": lambda picked, mask: picked.numel() // WIDTH,
    "nonzero": lambda picked, mask: mask.nonzero().shape[0],
    "where": lambda picked, mask: len(torch.where(mask)[0]),
    "masked_select": lambda picked, mask: mask.masked_select(mask).numel(),
    "item": lambda picked, mask: int(mask.sum().item()),
    "int": lambda picked, mask: int(mask.sum()),
    "tolist": lambda picked, mask: sum(mask.flatten().tolist()),
    "format": lambda picked, mask: float(f"{mask.sum().float():.0f}"),
    "unique": lambda picked, mask: len(torch.unique(torch.arange(mask.numel())[mask.flatten()])),
    "bincount": lambda picked, mask: (
        mask.numel() - int(torch.bincount(mask.flatten().long(), minlength=2)[0])
    ),
    "repeat_interleave": lambda picked, mask: len(
        torch.arange(mask.numel()).repeat_interleave(mask.flatten().long())
    ),
    "iteration": lambda picked, mask: sum(1 for _ in picked),
}


class Counting(Net):
    def __init__(self, count: str) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        mask = x[..., 0] > 0
        picked = self.features(x)[mask]
        return picked.square().sum(), COUNTS[self.count](picked, mask)


class Dispatching(Net):
    """Experts without tokens are skipped; in the first batch one expert has none."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        chosen = (x.detach()[..., 0] * 0 + self.signs).long()
        result = torch.zeros_like(x)
        for number, expert in enumerate([self.blocks[1], self.blocks[2]]):
            tokens = x[chosen == number]
            if tokens.numel() == 0:
                continue
            result[chosen == number] = expert(tokens)
        return result

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def signs(self) -> Tensor:
        return self.sign

    sign: Tensor


class Routed(Dispatching):
    def forward(self, x: Tensor) -> Tensor:
        self.sign = (x[..., 1] < 0).float()
        return super().forward(x)


class Picking(Net):
    """Some positions go through a block by themselves; nothing reads how many."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        x = self.blocks[0](x)
        result = torch.zeros_like(x)
        result[mask] = self.blocks[1](x[mask])
        return self.blocks[2](x + result)


class Chosen(nn.Module):
    """A unit that returns as many positions as the batch has above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[x[..., 0] > 0]


class ChosenInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Chosen())

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def per_sample(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.square().sum(), len(batch[0])


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        return out * 2 if float(x.min()) < -1e9 else out


# --- W2: modes ----------------------------------------------------------------------------------


class Normed(Net):
    """BatchNorms that its own `train` keeps in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(POSITIONS)
        self.norm.running_mean += 0.5

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.norm(x))

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.norm.eval()
        return self


class NormedInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = Normed()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.first(x))


class Taught(Net):
    """A teacher that never trains, frozen by `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().features(x) - self.teacher(x)

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval().requires_grad_(False)
        return self


class Auxiliary(Net):
    """A head that counts in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        return out + 0.4 * self.head(x) if self.training else out


class AuxiliaryTuple(Auxiliary):
    def forward(self, x: Tensor) -> Any:
        out = self.features(x)
        return (out, self.head(x)) if self.training else out


class TrainsInEvaluation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Auxiliary()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.scale(x))

    def train(self, mode: bool = True) -> TrainsInEvaluation:
        super().train(mode)
        self.scale.train()
        return self


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class UnitTrainsInEvaluation(TrainsInEvaluation):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Doubling()


class BuiltResting(Net):
    """A part in eval mode, which no `train` of its own keeps there."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5).eval()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.drop(x))


def tuples(out: Any, batch: Any) -> Any:
    parts = out if isinstance(out, tuple) else (out,)
    return sum(part.square().sum() for part in parts), parts[0].numel()


# --- W3: buffers --------------------------------------------------------------------------------


class Centred(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        center = self.center
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * out.mean((0, 1))
        return out - center


class CentredInPlace(Centred):
    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        result = out - self.center.clone()
        with torch.no_grad():
            self.center.lerp_(out.mean((0, 1)), 0.1)
        return result


class CentredInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Centred())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.parts[0](x) - self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean((0, 1))
        return out


class CentredInContainer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.holder(x))


class Counted(Net):
    """A count of forwards: the same on all ranks, however samples are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.features(x) / self.steps


class NotSaved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x) * self.seen
        self.seen = self.seen + 0.1
        return out


class CountedByPython(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.features(x) / self.steps


# --- W4: means ----------------------------------------------------------------------------------


def ignoring(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def masked(out: Tensor, batch: Any) -> Tensor:
    mask = (batch[1] != -100).float()
    return (out.square().mean(-1) * mask).sum() / mask.sum()


def weighted(out: Tensor, batch: Any) -> Tensor:
    weight = torch.arange(1.0, WIDTH + 1)
    return functional.cross_entropy(out.flatten(0, 1), batch[1].flatten().relu(), weight=weight)


def masked_pixels(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), batch[1].relu().flatten(), ignore_index=3)


def counted(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return pieces(out, batch[1]), (batch[1] != -100).sum()


def miscounted(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return ignoring(out, batch) * len(out), len(out)


class LossInside(Net):
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            self.features(x).flatten(0, 1), targets.flatten(), ignore_index=-100
        )


@dataclass(frozen=True)
class Way:
    """A module and a loss, and in which layouts they must train rather than be refused."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Any] = squares
    trains: frozenset[str] = field(default_factory=lambda: frozenset(LAYOUTS))
    inputs: Callable[[Any], Any] | None = None


ALONE = frozenset[str]()
ON_RANKS = frozenset(("replicas", "zero 3"))
EVERYWHERE = frozenset(LAYOUTS)
WAYS: dict[str, dict[str, Way]] = {
    "values": {
        **{name: Way(functools.partial(Counting, name), returned, ON_RANKS) for name in COUNTS},
        "dispatch": Way(Routed, trains=ON_RANKS),
        "picked": Way(Picking),
        "chosen in a unit": Way(ChosenInside, per_sample),
        "branch": Way(Branching, trains=ON_RANKS),
    },
    "modes": {
        "norm_eval": Way(Normed),
        "norm_eval inside": Way(NormedInside),
        "teacher": Way(Taught),
        "auxiliary": Way(Auxiliary, trains=ON_RANKS),
        "auxiliary tuple": Way(AuxiliaryTuple, tuples, ON_RANKS),
        "trains in evaluation": Way(TrainsInEvaluation),
        "unit trains in evaluation": Way(UnitTrainsInEvaluation),
        "built resting": Way(BuiltResting),
    },
    "buffers": {
        "bound anew": Way(Centred, trains=ALONE),
        "in place": Way(CentredInPlace, trains=ALONE),
        "in a unit": Way(CentredInside, trains=ALONE),
        "in a container": Way(CentredInContainer, trains=ALONE),
        "of steps": Way(Counted, trains=ON_RANKS),
        "not saved": Way(NotSaved, trains=ON_RANKS),
        "of Python": Way(CountedByPython, trains=ALONE),
    },
    "means": {
        "ignored": Way(Net, ignoring, ALONE),
        "masked": Way(Net, masked, ALONE),
        "another number": Way(Net, masked_pixels, ALONE),
        "weighted": Way(Net, weighted, ALONE),
        "inside": Way(LossInside, returned, ALONE, lambda batch: batch),
        "miscounted": Way(Net, miscounted, ALONE),
        "counted": Way(Net, counted),
    },
}


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@dataclass
class Training:
    """What a training says, or why it was refused before its first update."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    refusal: str = ""


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
        loss = mean_of(way.loss(module(*inputs(batch_of(step))), batch_of(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        module.eval()
        with torch.no_grad():
            evaluated = mean_of(way.loss(module(*inputs(batch_of(9))), batch_of(9)))
        train()
        result.losses += [float(loss.detach()), float(evaluated)]
    result.weights = {name: value.clone() for name, value in module.state_dict().items()}
    return result


def planned(kind: str, name: str, layout: dict[str, Any]) -> Training:
    way, result = WAYS[kind][name], Training()
    try:
        engine = Engine(
            way.build,
            layout,
            loss=way.loss,
            optimizer=sgd,
            batch=batch_of(0),
            inputs=way.inputs,
        )
    except MeshwrightError as error:
        return Training(refusal=str(error))
    for step in range(STEPS):
        try:
            loss = engine.step(engine.slice(batch_of(step))).loss
            evaluated = engine.evaluate(engine.slice(batch_of(9))).loss
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


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, ways in WAYS.items() for name in ways]
)
def test_a_forward_trains_as_in_a_plain_loop(kind: str, name: str) -> None:
    check(planned(kind, name, {}), kind, name, trains=True)


def all_of(kind: str, layout: str) -> dict[str, Training]:
    return {name: planned(kind, name, LAYOUTS[layout]) for name in WAYS[kind]}


@pytest.mark.ranks
@pytest.mark.long(
    *(f"{kind}-{layout}" for kind in WAYS for layout in LAYOUTS if (kind, layout) not in (
        ("values", "zero 3"), ("modes", "replicas"), ("buffers", "zero 3"), ("means", "stages"),
    ))
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", WAYS)
def test_two_ranks_train_as_a_plain_loop_or_refuse(kind: str, layout: str) -> None:
    for results in on_ranks(2, all_of, kind, layout):
        for name, found in results.items():
            check(found, kind, name, trains=layout in WAYS[kind][name].trains)


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
