"""Modules of a script, divided over the tensor axis, train as in one process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.default_plan import script_plan
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.techniques.split_backward import WeightGradients, defer
from meshwright.runtime.tracing.tracer import Recorder
from tests.runtime.ranks import on_ranks

SAMPLES, WIDTH, STEPS, CLIP = 8, 6, 3, 0.5
STYLES = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (-2, {"tensor": 2}),
    "tensor, recompute": (2, {"tensor": 2, "micro_batches": 2, "recompute": "full"}),
    "tensor x data": (4, {"tensor": 2}),
    "tensor x zero 3": (4, {"tensor": 2, "zero": 3, "micro_batches": 2}),
    "tensor x two stages": (4, {"tensor": 2, "pipeline": 2}),
    "gradients apart": (4, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1", "micro_batches": 4}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch_of(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def loss(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (outputs - batch.roll(1, 1)).square().sum(), len(outputs)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-4)


new_engine = functools.partial(
    Engine, Model, loss=loss, optimizer=adamw, batch=batch_of(0), clip_norm=CLIP
)
Run = tuple[list[float], list[float], dict[str, Tensor]]


def plainly() -> Run:
    torch.manual_seed(0)
    model = Model()
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        batch = batch_of(step)
        mean = loss(model(batch), batch)[0] / SAMPLES
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses, norms, dict(model.state_dict())


def trained(layout: dict[str, Any], folder: Path) -> Run:
    engine = new_engine(layout, tensor=STYLES)
    losses, norms = [], []
    for step in range(STEPS):
        if step == STEPS - 1:  # the last one behind a restart
            engine.save(folder)
            engine = new_engine({**layout, "seed": 3}, tensor=STYLES)
            engine.load(folder)
            whole = engine.state_dict()
            engine.load_state_dict({name: value + 1 for name, value in whole.items()})
            engine.load_state_dict(whole)
        result = engine.step(engine.slice(batch_of(step)))
        assert result.count == SAMPLES
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms, engine.state_dict()


def adafactor_step(layout: dict[str, Any]) -> dict[str, Tensor]:
    engine = new_engine(layout, tensor=STYLES, optimizer=torch.optim.Adafactor, clip_norm=0.0)
    engine.step(engine.slice(batch_of(0)))
    return engine.state_dict()


def check_whole_matrices(ranks: int) -> None:
    """An update of whole matrices gathers what one axis divides, or two."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adafactor(model.parameters())
    (loss(model(batch_of(0)), batch_of(0))[0] / SAMPLES).backward()
    optimizer.step()
    for zero in (0,) if ranks == 2 else (1, 3):
        found = adafactor_step({"tensor": 2, "zero": zero})
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=key)


def every_layout(part: int, folder: str) -> dict[str, Run]:
    """Train what a part of `LAYOUTS` says: so many ranks, negative in `make matrix` alone."""
    check_whole_matrices(abs(part))
    return {
        name: trained(layout, Path(folder, name))
        for name, (count, layout) in LAYOUTS.items()
        if count == part
    }


@pytest.mark.ranks
@pytest.mark.parametrize("part", [2, *(pytest.param(p, marks=pytest.mark.matrix) for p in (-2, 4))])
def test_divided_modules_train_as_in_one_process(part: int) -> None:
    losses, norms, weights = plainly()
    with tempfile.TemporaryDirectory() as folder:
        for found in on_ranks(abs(part), every_layout, part, folder):
            for name, (own_losses, own_norms, state) in found.items():
                assert own_losses == pytest.approx(losses, rel=1e-5), name
                assert own_norms == pytest.approx(norms, rel=1e-5), name
                assert state.keys() == weights.keys()
                for key, value in weights.items():
                    torch.testing.assert_close(
                        state[key], value, rtol=1e-5, atol=1e-5, msg=f"{name}: {key}"
                    )


class Sized(nn.Module):
    """Names a size of the whole between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(-1, 2, 4).relu().flatten(1))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up = self.blocks[0].up


@pytest.mark.parametrize(
    ("build", "tensor", "said"),
    [
        (Model, {"blocks.*.middle": ColwiseParallel()}, r"'blocks\.\*\.middle' names no module"),
        (Model, {"*.up": ColwiseParallel()}, r"'\*\.up' names no module"),
        (Model, {**STYLES, "blocks.0.*": ColwiseParallel()}, "which has a style already"),
        (Tied, STYLES, r"blocks\.0\.up\.weight is read elsewhere too"),
    ],
)
def test_styles_that_cannot_be_followed_are_refused(build: Any, tensor: Any, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        engine_over_two(build, tensor)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: nn.Linear(WIDTH, WIDTH),
            r"no module can be divided .* 2 ranks each compute the same; say how with .* tensor 1",
        ),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, 4), Sized(), nn.Linear(WIDTH, WIDTH)),
            r"divided \(1\.up: on a part of it: .*view\(\.\.\., -1, head_size\)[^;]*; plan with",
        ),
    ],
)
def test_a_module_of_which_nothing_is_divided_is_whole_on_each_rank(build: Any, said: str) -> None:
    with (
        pytest.warns(UserWarning, match=said),
        pytest.raises(LaunchError, match="plan is for 2 ranks"),
    ):
        engine_over_two(build, None)


def engine_over_two(build: Any, tensor: Any) -> Engine:
    recorder = Recorder.of_units(build(), batch_of(0))
    plan = script_plan(
        recorder, {"tensor": 2}, name="build", ranks=2, global_batch=SAMPLES, device="cpu"
    )
    return Engine(build, plan, loss=loss, optimizer=adamw, batch=batch_of(0), tensor=tensor)


def made_apart() -> dict[str, Tensor]:
    """Return gradients of a block in torch's styles, those of its Linears' weights made later."""
    torch.manual_seed(0)
    block, store = Block(), WeightGradients()
    defer(block, store)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    store.deferring = True
    for step in range(2):
        block(batch_of(step)).square().sum().backward()
    assert block.up.weight.grad is block.down.weight.grad is None
    store.take_deferred()()
    every = {name: one.grad for name, one in block.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in every.items()}  # type: ignore[misc]


@pytest.mark.ranks
def test_weight_gradients_of_a_map_are_made_apart() -> None:
    torch.manual_seed(0)
    block = Block()
    for step in range(2):
        block(batch_of(step)).square().sum().backward()

    for found in on_ranks(2, made_apart):
        for name, parameter in block.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
