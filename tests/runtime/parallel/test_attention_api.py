"""Positions and experts of a script's own module, divided over ranks, train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import meshwright
from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.engine.losses.named_loss import head_of
from meshwright.runtime.parallel.context_check import check_positions
from meshwright.runtime.techniques.split_backward import WeightGradients, defer
from meshwright.runtime.tracing.tracer import Recorder
from tests.runtime.ranks import on_ranks

WIDTH, HEADS, SAMPLES, LENGTH, STEPS = 16, 2, 4, 8, 2
CONFIG = MixtralConfig(
    hidden_size=WIDTH, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
)
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, *, mixed: bool, counts: str = "") -> None:
        super().__init__()
        self.counts = counts
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = MixtralSparseMoeBlock(CONFIG) if mixed else nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        attend = meshwright.attention
        if self.counts == "torch":
            attend = functional.scaled_dot_product_attention
        x = x + self.out(attend(*heads).transpose(1, 2).flatten(2))
        if self.counts == "mean":
            x = x - x.mean(1, keepdim=True)
        made = self.mlp(x)
        return x + (made[0] if isinstance(made, tuple) else made)


class Net(nn.Module):
    def __init__(self, *, mixed: bool = False, counts: str = "") -> None:
        super().__init__()
        self.counts = counts
        self.words = nn.Embedding(32, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mixed=mixed, counts=counts) for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.counts == "arange":
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixture() -> Net:
    return Net(mixed=True)


def batch_of(step: int) -> Batch:
    row = torch.randint(32, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(LENGTH).expand(SAMPLES, -1)
    return {"tokens": row[:, :-1], "positions": positions, "targets": row[:, 1:]}


loss = meshwright.token_loss(lambda batch: batch["targets"])


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


Run = tuple[list[tuple[float, float]], dict[str, Tensor], Tensor, int]


def trained(
    build: Any, every: list[dict[str, Any]], new: Callable[..., Engine] = Engine
) -> list[Run]:
    runs = []
    for fields in every:
        engine = new(build, fields, loss=loss, optimizer=adamw, batch=batch_of(0))
        results = [engine.step(engine.slice(batch_of(step))) for step in range(STEPS)]
        held = engine.slice(batch_of(9))
        assert engine.evaluate(held).loss > 0
        made = engine.outputs(held)
        assert len(made) == SAMPLES // engine.slices
        first = engine.plan.samples_of(engine.slice_rank).start
        runs.append(([(r.loss, r.grad_norm) for r in results], engine.state_dict(), made, first))
    return runs


DIVIDED: list[tuple[Any, dict[str, Any]]] = [
    (Net, {"context": 2, "micro_batches": 2, "recompute": "full"}),
    (Net, {"context": 2, "zero": 3, "loss": {"rows": 3, "gradients": "recomputed"}}),
    (Net, {"pipeline": 2, "loss": {"rows": 5, "gradients": "precomputed"}}),
    (mixture, {"expert": 2, "zero": 3}),
    (mixture, {"expert": 2, "context": 2, "dispatch": "allgather"}),
]


OVER_FOUR: list[tuple[Any, dict[str, Any]]] = [
    (Net, {"context": 2, "pipeline": 2, "schedule": "zb-h1"}),
    (Net, {"context": 2, "tensor": 2, "recompute": "selective"}),
    (Net, {"context": 2, "zero": 3, "offload": "parameters", "activations": "offload"}),
    (Net, {"context": 4, "zero": 1}),
    (Net, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}),
    (Net, {"tensor": 2, "pipeline": 2, "schedule": "zbv", "virtual_stages": 2}),
    (mixture, {"expert": 4, "zero": 2, "micro_batches": 1}),
    (mixture, {"expert": 2, "pipeline": 2, "zero": 1}),
    (mixture, {"expert": 2, "zero": 3, "context": 2, "recompute": "full"}),
    (mixture, {"expert": 4, "hierarchical_all_to_all": 2, "context": 2, "zero": 1}),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("build", "ranks"),
    [
        (Net, 2),
        (mixture, 2),
        *(pytest.param(build, 4, marks=pytest.mark.matrix) for build in (Net, mixture)),
    ],
)
@pytest.mark.long("mixture-2")
def test_positions_and_experts_over_ranks_train_as_one_process(build: Any, ranks: int) -> None:
    rows = DIVIDED if ranks == 2 else OVER_FOUR
    layouts = [fields for of, fields in rows if of is build]
    ((expected, weights, made, _),) = trained(build, [{}])

    for runs in on_ranks(ranks, trained, build, layouts):
        for layout, (found, ours, outputs, first) in zip(layouts, runs, strict=True):
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-5), layout
            for name, value in weights.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
            own = made[first : first + len(outputs)]
            torch.testing.assert_close(outputs, own, rtol=1e-4, atol=1e-5)


def adafactor_step(fields: dict[str, Any]) -> dict[str, Tensor]:
    settings: dict[str, Any] = {"optimizer": torch.optim.Adafactor, "batch": batch_of(0)}
    engine = Engine(mixture, fields, loss=loss, **settings)
    engine.step(engine.slice(batch_of(0)))
    return engine.state_dict()


@pytest.mark.ranks
@pytest.mark.matrix
def test_experts_divided_twice_are_gathered_for_an_optimizer_of_whole_matrices() -> None:
    weights = adafactor_step({})
    # Not the keys' bias, whose gradient is nothing but rounding, which Adafactor makes large.
    matrices = {name: value for name, value in weights.items() if "experts" in name}
    assert len(matrices) == 4

    for found in on_ranks(4, adafactor_step, {"expert": 2, "zero": 3}):
        for name, value in matrices.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


COMPILED: list[tuple[Any, dict[str, Any]]] = [
    (Net, {"context": 2}),
    (mixture, {"expert": 2, "context": 2, "zero": 3, "recompute": "full"}),
    (mixture, {"expert": 2, "zero": 1}),
]


def not_compiled(build: Any, every: list[dict[str, Any]]) -> tuple[list[Run], list[dict[str, str]]]:
    engines: list[Engine] = []

    def kept(*args: Any, **settings: Any) -> Engine:
        engines.append(Engine(*args, **settings))
        return engines[-1]

    runs = trained(build, [{**fields, "compile": "block"} for fields in every], new=kept)
    return runs, [dict(engine.not_compiled) for engine in engines]


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("build", [Net, mixture])
def test_divided_blocks_are_graphs_that_train_as_one_process(build: Any) -> None:
    ((expected, _, _, _),) = trained(build, [{}])
    layouts = [fields for of, fields in COMPILED if of is build]

    for runs, eager in on_ranks(2, not_compiled, build, layouts):
        for layout, (found, *_), reasons in zip(layouts, runs, eager, strict=True):
            assert reasons == {}, layout
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-5), layout


def test_a_loss_that_is_not_made_of_one_product_is_not_made_in_chunks() -> None:
    class Scaled(Net):
        def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
            return super().forward(tokens, positions) * 0.5

    plan = {"loss": {"rows": 3, "gradients": "recomputed"}}
    for build, own, said in (
        (Scaled, loss, "does not return what one nn.Linear makes"),
        (Net, lambda made, batch: made.mean(), "give meshwright.token_loss"),
    ):
        with pytest.raises(LaunchError, match=said):
            Engine(build, plan, loss=own, optimizer=adamw, batch=batch_of(0))


def test_the_product_that_makes_logits_may_put_its_weight_gradient_off() -> None:
    module, batch = Net(), batch_of(0)
    recording = Recorder(module, batch).first
    head = head_of(recording, module)

    defer(module, WeightGradients())

    assert head_of(recording, module) == head


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ("torch", "calls no meshwright.attention"),
        ("mean", "mixes positions elsewhere"),
        ("arange", "counts positions by itself"),
    ],
)
def test_a_module_whose_positions_cannot_be_divided_is_refused(counts: str, said: str) -> None:
    module, batch = Net(counts=counts), batch_of(0)

    with pytest.raises(LaunchError, match=said):
        check_positions(module, Recorder(module, batch), batch, loss, "mesh.context: is 2")
