"""Ranks are given tensors as they are, in whatever order their elements lie, under any name."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.optim import gradients
from tests.runtime.ranks import on_ranks

WIDTH = 6


class Transposed(nn.Module):
    """Parameters, a frozen one and buffers are transposed views, and so is what is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(WIDTH, 2 * WIDTH).t())
        self.down = nn.Parameter((0.3 * torch.randn(WIDTH, 2 * WIDTH)).t().contiguous().t())
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH).t(), requires_grad=False)
        self.register_buffer("mixed", torch.randn(WIDTH, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down @ (self.up @ (self.mixed @ (self.frozen @ x.t())))).t()


class Image(nn.Module):
    """A convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.convolution = convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.dim() == 4 else x.view(-1, 1, 2, 3).expand(-1, 4, -1, -1)
        return torch.tanh(self.convolution(x.to(memory_format=torch.channels_last)))


class Orthogonal(nn.Module):
    """An orthogonal weight, whose base torch keeps in a buffer with columns first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Its modules have names that the engine's own stage has too."""

    def __init__(self, unit: Callable[[], nn.Module], last: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(unit() for _ in range(2))
        self.layers = nn.ModuleList(unit() for _ in range(2))
        for name in ("recompute", "micro_batches", "order"):
            self.add_module(name, nn.Linear(last, last))
        self.loss = nn.Linear(last, 3)

    def forward(self, x: Tensor) -> Tensor:
        for unit in (*self.units, *self.layers):
            x = unit(x)
        x = x.flatten(1)
        for name in ("recompute", "micro_batches", "order"):
            x = self.get_submodule(name)(x)
        return self.loss(x)


NETS = {
    "transposed": lambda: Net(Transposed, WIDTH),
    "channels_last": lambda: Net(Image, 4 * WIDTH),
    "columns first": lambda: Net(Orthogonal, WIDTH),
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zb-h1"},
    {"zero": 3},
)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def loss(out: Tensor, given: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(out, given[1], reduction="sum"), len(out)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def divided() -> dict[tuple[str, int], dict[str, Tensor]]:
    """Return the weights that every layout leaves, as each rank is given them whole."""
    found = {}
    for name, build in NETS.items():
        for at, layout in enumerate(LAYOUTS):
            engine = Engine(
                build, {"micro_batch": 2, **layout}, loss=loss, optimizer=sgd, batch=batch()
            )
            for _ in range(2):
                engine.step(engine.slice(batch()))
            found[name, at] = engine.state_dict()
    return found


def plainly(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = build()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        value, count = loss(model(batch()[0]), batch())
        (value / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.ranks
@pytest.mark.matrix
def test_every_rank_is_given_what_one_process_has() -> None:
    expected = {name: plainly(build) for name, build in NETS.items()}

    for found in on_ranks(2, divided):
        for (name, at), state in found.items():
            for key, value in expected[name].items():
                torch.testing.assert_close(
                    state[key], value, rtol=1e-5, atol=1e-6, msg=f"{name}, {LAYOUTS[at]}: {key}"
                )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: setattr(table, "sparse", True), r"0: Embedding\(sparse=True\) makes sparse"),
        (
            lambda table: table.weight.register_hook(lambda g: 2 * g),
            "0.weight: has a gradient hook",
        ),
        (
            lambda table: table.weight.register_post_accumulate_grad_hook(lambda p: None),
            "0.weight: has a gradient hook",
        ),
    ],
)
def test_gradients_that_would_not_be_summed_as_they_are_made_are_refused(
    change: Callable[[nn.Embedding], object], message: str
) -> None:
    def build() -> nn.Module:
        table = nn.Embedding(9, WIDTH)
        change(table)
        return nn.Sequential(table, nn.Flatten(), nn.Linear(2 * WIDTH, 3))

    tokens = torch.arange(8).view(4, 2), torch.arange(4) % 3

    with pytest.raises(LaunchError, match=message):
        Engine(build, {"precision": "bf16"}, loss=loss, optimizer=sgd, batch=tokens)


@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_train_on_one_process_as_in_a_plain_loop(
    factory: Callable[..., torch.optim.Optimizer],
) -> None:
    def build() -> nn.EmbeddingBag:
        return nn.EmbeddingBag(9, 3, mode="sum", sparse=True)

    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return factory(groups, lr=0.1)

    tokens = torch.arange(8).view(4, 2) // 2, torch.arange(4) % 3
    torch.manual_seed(0)
    module = build()
    plain = optimizer(list(module.parameters()))
    for _ in range(3):
        nn.functional.cross_entropy(module(tokens[0]), tokens[1]).backward()
        grad = module.weight.grad
        assert grad is not None and grad.is_sparse
        module.weight.grad = grad * (0.01 / grad.coalesce().values().norm()).clamp(max=1)
        plain.step()
        plain.zero_grad()

    engine = Engine(
        build,
        {"micro_batches": 2},
        loss=lambda out, batch: nn.functional.cross_entropy(out, batch[1]),
        optimizer=optimizer,
        batch=tokens,
        clip_norm=0.01,
    )
    for _ in range(3):
        engine.step(tokens)

    value = engine.state_dict()["weight"]
    torch.testing.assert_close(value, module.state_dict()["weight"], rtol=0, atol=1e-6)


def hook_in_the_loop(layout: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, WIDTH), nn.Flatten(), nn.Linear(2 * WIDTH, 3))

    tokens = torch.arange(8).view(4, 2), torch.arange(4) % 3
    engine = Engine(build, layout, loss=loss, optimizer=sgd, batch=tokens)
    engine.step(engine.slice(tokens))
    hook = engine.units["2"].get_parameter("weight").register_hook(lambda grad: 2 * grad)

    with pytest.raises(LaunchError, match=r"2\.weight: has a gradient hook"):
        engine.step(engine.slice(tokens))
    hook.remove()
    engine.step(engine.slice(tokens))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", [{"data_replicate": 2}, {"zero": 3}, {"zero": 3, "offload": "parameters"}]
)
def test_a_hook_that_the_loop_hangs_on_a_parameter_is_refused_by_the_next_step(
    layout: dict[str, Any],
) -> None:
    on_ranks(2, hook_in_the_loop, layout)


HERE, COPIED = "made here, its elements in their order", "copied into their order before"
SENT = {
    ("replica_check.py", "all_reduce"): HERE,
    ("batch_norm.py", "all_gather"): COPIED,
    ("object_collectives.py", "all_gather"): HERE,
    ("object_collectives.py", "broadcast"): HERE,
    ("gradient_compression.py", "all_reduce"): HERE,
    ("gradients.py", "all_reduce"): COPIED,
    ("language_model.py", "all_reduce"): HERE,
    ("lora.py", "all_reduce"): HERE,
    ("object_collectives.py", "all_reduce"): HERE,
    ("peer_restore.py", "send"): HERE,
    ("peer_restore.py", "recv"): HERE,
    ("training_loop.py", "broadcast"): HERE,
    ("script_keeper.py", "broadcast"): HERE,
    ("script_keeper.py", "all_reduce"): HERE,
    ("packed_weights.py", "all_reduce"): HERE,
    ("loader.py", "all_reduce"): HERE,
    ("float8.py", "all_reduce"): HERE,
    ("pipeline.py", "isend"): COPIED,
    ("pipeline.py", "irecv"): HERE,
    ("replicas.py", "all_reduce"): HERE,
    ("writer.py", "broadcast"): HERE,
    ("step_passes.py", "all_reduce"): HERE,
    ("engine_state.py", "broadcast"): COPIED,
    ("pipedream_2bw.py", "all_reduce"): HERE,
    ("batch_norm.py", "all_reduce"): HERE,
    ("sharded_optimizer.py", "broadcast"): COPIED,
    ("global_batch_loss.py", "all_gather"): COPIED,
    ("stage_tensors.py", "broadcast"): COPIED,
}
"""Where tensors are sent as they lie in memory; between ranks they may lie in different orders."""
SENDS = {"broadcast", "send", "recv", "isend", "irecv", "all_gather", "all_reduce", "all_to_all",
         "reduce", "gather", "scatter", "all_gather_into_tensor", "reduce_scatter_tensor",
         "all_to_all_single"}  # fmt: skip


def test_every_place_that_sends_says_why_elements_are_in_their_order() -> None:
    folder = Path(gradients.__file__).parents[1]

    found = {
        (file.name, node.func.attr)
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SENDS
        and ast.unparse(node.func.value) == "dist"
    }

    assert found == set(SENT)
