"""What trains on all positions of a sample together, with its positions on several ranks.

Dropout and other draws, BatchNorm, sums over the batch, losses inside the module and losses over
the whole batch train as on one rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright
from meshwright.planner.errors import LaunchError
from meshwright.runtime.engine.engine import Engine
from meshwright.runtime.parallel.context_check import check_parts
from meshwright.runtime.tracing.tracer import Recorder
from tests.runtime.parallel.test_attention_api import (
    LENGTH,
    SAMPLES,
    WIDTH,
    Net,
    adamw,
    batch_of,
    loss,
)
from tests.runtime.ranks import on_ranks

STEPS, CHOICES = 2, 3


class Drawing(Net):
    """Draws in a unit and between units: of positions behind and before heads, flat, of samples."""

    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.own = own
        self.drop = nn.Dropout(0.3)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.drop(self.words(tokens)) + self.places(positions)
        for block in self.blocks:
            x = block(x)
            if self.training:
                heads = functional.dropout(x.unflatten(-1, (2, -1)).transpose(1, 2), 0.2)
                x = heads.transpose(1, 2).flatten(2) * torch.empty_like(x).uniform_(0.9, 1.1)
                x = functional.dropout(x.flatten(0, 1), 0.1).view_as(x)
                x = x + 0.1 * torch.rand_like(x) * (torch.rand(len(x), 1, 1) > 0.3)
                if self.own:
                    x = x + 0.1 * torch.rand(x.shape)
        return self.head(x)


class Normed(Net):
    """BatchNorm of features, over samples and positions; one of them has no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False)]
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class Balanced(Net):
    """A balancing loss: a product of loads and probabilities of the whole batch, and a penalty."""

    def __init__(self, own: str = "") -> None:
        super().__init__()
        self.own = own
        self.router = nn.Linear(WIDTH, CHOICES)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        shares = self.router(x).softmax(-1).flatten(0, 1)
        chosen = functional.one_hot(shares.argmax(-1), CHOICES).float()
        tokens_here = torch.tensor(float(len(x) if self.own == "samples" else len(shares)))
        load = meshwright.batch_sum(chosen.sum(0)) / meshwright.batch_sum(tokens_here)
        x = meshwright.add_loss(x, (load * shares.sum(0)).sum(), count=tokens_here)
        penalty = self.router.weight if self.own == "weights" else x
        return self.head(meshwright.add_loss(x, 1e-2 * penalty.square().sum()))


def of_the_whole(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Every position against the mean of all of them."""
    apart = outputs.flatten(0, 1) - outputs.mean((0, 1))
    return apart.square().sum().sqrt() * len(outputs), len(outputs)


def summed_in_samples(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.mean(1).logsumexp(-1).sum(), len(outputs)


MODULES = {"draws": Drawing, "norms": Normed, "sums": Balanced, "whole": Net}
OVER_TWO: list[dict[str, Any]] = [
    {"context": 2, "micro_batches": 2, "zero": 3, "recompute": "full"},
]
OVER_FOUR: list[dict[str, Any]] = [
    {"context": 2, "micro_batches": 1},
    {"context": 4, "micro_batches": 2, "recompute": "selective"},
    {"context": 2, "pipeline": 2, "micro_batches": 2},
]


def trained(kind: str, layout: dict[str, Any]) -> tuple[list[tuple[float, float]], Any]:
    own = meshwright.whole_batch(of_the_whole) if kind == "whole" else loss
    engine = Engine(MODULES[kind], layout, loss=own, optimizer=adamw, batch=batch_of(0))
    results = [engine.step(engine.slice(batch_of(step))) for step in range(STEPS)]
    engine.evaluate(engine.slice(batch_of(9)))
    return [(r.loss, r.grad_norm) for r in results], engine.state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, 2) for kind in MODULES),
        *(pytest.param(kind, 4, marks=pytest.mark.matrix) for kind in MODULES),
    ],
)
@pytest.mark.long("sums-2", "whole-2")
def test_positions_over_ranks_train_as_on_one_rank(kind: str, ranks: int) -> None:
    for layout in OVER_TWO if ranks == 2 else OVER_FOUR:
        slices = ranks // layout["context"] // layout.get("pipeline", 1)
        expected, weights = trained(kind, {"micro_batches": layout["micro_batches"] * slices})
        for found, ours in on_ranks(ranks, trained, kind, layout):
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-5), layout
            for name, value in weights.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("build", "own", "said"),
    [
        (lambda: Drawing("rand"), loss, "draws numbers of positions by other calls"),
        (lambda: Balanced("samples"), loss, "is no sum over positions"),
        (lambda: Balanced("weights"), loss, "adds losses .* that are no sums over positions"),
        (Net, summed_in_samples, "has a loss that is no sum over positions"),
    ],
)
def test_what_parts_of_positions_do_not_add_up_to_is_refused(
    build: Any, own: Any, said: str
) -> None:
    module, batch = build(), batch_of(0)

    with pytest.raises(LaunchError, match=said):
        check_parts(module, Recorder(module, batch), batch, own, "mesh.context: is 2")


def test_which_dims_have_positions_is_found_of_each_draw() -> None:
    module, batch = Drawing(), batch_of(0)

    dims = check_parts(module, Recorder(module, batch), batch, loss, "mesh.context: is 2")

    # Embedded, then for both blocks: behind heads, in place, flat, alike; one number a sample.
    assert sorted(dims.values()) == [0, 0, 1, 1, 1, 1, 1, 2, 2], (SAMPLES, LENGTH)
