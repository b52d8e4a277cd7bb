"""Batches that are each rank's own: of any structure, with counts that the loss returns.

The oracle is a plain loop of torch over the batches of all ranks, sums and counts added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.errors import BatchError
from meshwright.runtime.core.global_batch_loss import whole_batch
from meshwright.runtime.engine.engine import Engine
from tests.runtime.ranks import on_ranks

WIDTH, STEPS = 4, 3


@dataclass
class Graph:
    """Nodes, and edges between them."""

    x: Tensor
    edges: Tensor
    y: Tensor


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, graph: Graph) -> Tensor:
        x, (source, target) = graph.x, graph.edges
        for layer in self.layers:
            x = layer(x + torch.zeros_like(x).index_add(0, target, x[source])).tanh()
        return x


def graph_of(seed: int) -> Graph:
    generator = torch.Generator().manual_seed(seed)
    nodes = 3 + seed % 4
    return Graph(
        torch.randn(nodes, WIDTH, generator=generator),
        torch.randint(nodes, (2, 2 * nodes + seed), generator=generator),
        torch.randint(WIDTH, (nodes,), generator=generator),
    )


def of_nodes(out: Tensor, graph: Graph) -> tuple[Tensor, int]:
    return functional.cross_entropy(out, graph.y, reduction="sum"), len(graph.y)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(20, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.table(ids, offsets))[:, 0]


def bags_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(2 + seed % 3) * 2
    ids = torch.randint(20, (2 * len(offsets) + seed % 2,), generator=generator)
    return (ids, offsets), torch.randn(len(offsets), generator=generator)


def of_bags(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (out - batch[1]).square().sum(), len(batch[1])


class Detector(nn.Module):
    """Takes a list of images of several sizes, and returns losses in train mode as torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)])

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Any:
        pooled = torch.stack([self.trunk(image).relu().mean((1, 2)) for image in images])
        boxes, classes = (head(pooled) for head in self.heads)
        if not self.training:
            return {"boxes": boxes, "classes": classes}
        near = [
            (box - target["boxes"]).abs().mean() for box, target in zip(boxes, targets, strict=True)
        ]
        labels = torch.stack([target["labels"][0] for target in targets])
        return {"box": torch.stack(near).sum(), "class": functional.cross_entropy(
            classes, labels, reduction="sum")}  # fmt: skip


def images_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    count = 1 + seed % 3
    images = [torch.rand(3, 4 + at, 5 + seed % 2, generator=generator) for at in range(count)]
    targets = [
        {
            "boxes": torch.rand(1 + at, 4, generator=generator),
            "labels": torch.randint(2, (1 + at,), generator=generator),
        }
        for at in range(count)
    ]
    return {"images": images, "targets": targets}


def of_detections(out: Any, batch: Any) -> tuple[Tensor, int]:
    return sum(out.values()), len(batch["images"])


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


def series_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = 2 + seed % 3
    x = torch.randn(5 + seed % 2, count, WIDTH, generator=generator)
    return x, torch.randint(2, (count,), generator=generator)


def of_series(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(out, batch[1], reduction="sum"), len(batch[1])


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]] = {
    "graphs": (GraphNet, graph_of, of_nodes),
    "bags": (Bags, bags_of, of_bags),
    "images": (Detector, images_of, of_detections),
    "time first": (TimeFirst, series_of, of_series),
}


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def inputs(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch
    return batch[0] if isinstance(batch, tuple) else batch


def called(module: nn.Module, batch: Any) -> Any:
    given = inputs(batch)
    if isinstance(given, dict):
        return module(**given)
    return module(*given) if isinstance(given, tuple) else module(given)


def plainly(kind: str, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    build, batch_of, loss = KINDS[kind]
    torch.manual_seed(0)
    module = build()
    optimizer = sgd(module.parameters())
    losses = []
    for step in range(STEPS):
        batches = [batch_of(parts * step + at) for at in range(parts)]
        pairs = [loss(called(module, batch), batch) for batch in batches]
        mean = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses, dict(module.state_dict())


def trained(kind: str, layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], float]:
    build, batch_of, loss = KINDS[kind]
    engine = Engine(
        build, layout, loss=loss, optimizer=sgd, batch=batch_of(0), inputs=inputs, local=True
    )
    losses, each = [], engine.plan.micro_batches
    for step in range(STEPS):
        first = (step * engine.slices + engine.slice_rank) * each
        batches = [batch_of(first + at) for at in range(each)]
        losses.append(float(engine.step(batches[0] if each == 1 else batches).loss))
    engine.eval()
    outputs = engine.outputs(batch_of(0) if each == 1 else [batch_of(0)] * each)
    assert type(outputs if each == 1 else outputs[0]) is (dict if kind == "images" else Tensor)
    return losses, engine.state_dict(), engine.train().evaluate(
        batch_of(1) if each == 1 else [batch_of(1)] * each
    ).loss if kind != "images" else 0.0  # fmt: skip


def same(found: Any, kind: str, parts: int) -> None:
    losses, weights = plainly(kind, parts)
    assert found[0] == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [{}, {"micro_batches": 2}], ids=["whole", "two batches"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_trains_on_its_own_batches(kind: str, layout: dict[str, Any]) -> None:
    same(trained(kind, layout), kind, parts=layout.get("micro_batches", 1))


def all_kinds(layout: dict[str, Any]) -> dict[str, Any]:
    return {kind: trained(kind, layout) for kind in KINDS}


@pytest.mark.ranks
@pytest.mark.long("replicas of two batches", "zero 2")
@pytest.mark.parametrize(
    "layout",
    [{}, {"zero": 3}, {"micro_batches": 2}, {"zero": 2}],
    ids=["replicas", "zero 3", "replicas of two batches", "zero 2"],
)
def test_ranks_train_on_their_own_batches(layout: dict[str, Any]) -> None:
    for results in on_ranks(2, all_kinds, layout):
        for kind, found in results.items():
            same(found, kind, parts=2 * layout.get("micro_batches", 1))


def test_a_batch_of_other_size_than_the_plans_is_one_of_its_own() -> None:
    x, y = series_of(0)
    engine = Engine(
        lambda: nn.Linear(WIDTH, 2),
        {},
        loss=of_series,
        optimizer=sgd,
        batch=(x[0], y),
    )
    short = (x[0, :1], y[:1])

    with pytest.raises(BatchError, match="has 1 samples"):
        engine.step(short)

    assert engine.step(short, local=True).count == 1


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda out, batch: of_series(out, batch)[0] / len(batch[1]), r"return \(sum, count\)"),
        (whole_batch(of_series), r"does not go with whole_batch"),
    ],
    ids=["a mean", "the whole batch"],
)
def test_what_needs_to_know_samples_is_refused(loss: Any, what: str) -> None:
    engine = Engine(TimeFirst, {}, loss=loss, optimizer=sgd, batch=series_of(0), local=True)
    with pytest.raises(BatchError, match=what):
        engine.step(series_of(0))
