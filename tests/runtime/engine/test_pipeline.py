"""A pipeline's ranks act in exactly the order that its schedule wrote, and hold no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.closed_forms import in_flight
from meshwright.planner.schedules.schedule import orders, rank_of_stage
from meshwright.runtime.engine.pipeline import GRADIENTS_ON_THE_WAY, Pipeline, StagePart
from meshwright.runtime.techniques.split_backward import WeightGradients, defer
from tests.runtime.ranks import on_ranks

MICRO_BATCHES, WIDTH = 8, 8


class RecordingStore(WeightGradients):
    """Writes down when the weight gradients of which micro-batch are made."""

    def __init__(self, stage: int, seen: list[str]) -> None:
        super().__init__()
        self.stage, self.seen = stage, seen
        self.micro_batch = 0

    def take_deferred(self) -> Callable[[], None]:
        make, word = super().take_deferred(), f"{self.stage}W{self.micro_batch}"

        def recorded() -> None:
            make()
            self.seen.append(word)

        return recorded if self.deferring else make


class Recorder(nn.Module):
    """A linear stage that writes down what it is asked to do."""

    def __init__(self, stage: int, seen: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stage, self.seen = stage, seen
        self.store = RecordingStore(stage, seen)
        defer(self, self.store)

    def forward(self, x: Tensor) -> Tensor:
        micro_batch = sum(action.startswith(f"{self.stage}F") for action in self.seen)
        self.seen.append(f"{self.stage}F{micro_batch}")
        y = self.linear(x)

        def backward(grad: Tensor) -> None:
            self.store.micro_batch = micro_batch
            kind = "I" if self.store.deferring else "B"
            self.seen.append(f"{self.stage}{kind}{micro_batch}")

        y.register_hook(backward)
        return y


@dataclass
class Seen:
    """What a rank did in the second of two steps."""

    actions: str
    received: int
    sent: int
    """The most that it held of what came and of what went."""
    messages: dict[str, int]
    """Sends of both steps, by what the group carries."""


def run(name: str, virtual_stages: int, wrong_shape: bool = False) -> Seen:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks * virtual_stages
    seen: list[str] = []
    home = rank_of_stage(name, stages=stages, virtual_stages=virtual_stages)
    modules = [Recorder(stage, seen) for stage in range(stages) if home[stage] == rank]
    hidden = torch.empty(2, WIDTH, device="meta", requires_grad=True)
    declared = hidden[:1].detach().requires_grad_() if wrong_shape else hidden
    groups = (dist.group.WORLD, dist.new_group())
    pipeline = Pipeline(
        [
            StagePart(
                stage=module.stage,
                module=module,
                inputs=declared,
                outputs=declared,
                store=module.store,
            )
            for module in modules
        ],
        orders(name, stages=stages, micro_batches=MICRO_BATCHES, virtual_stages=virtual_stages),
        groups=groups,
        device=torch.device("cpu"),
        loss=lambda output, _: (output - 1).square().mean() / MICRO_BATCHES,
    )
    received, sent = [0], [0]

    def count(*_: object) -> None:
        received.append(pipeline.received())
        sent.append(pipeline.sent())

    messages: Counter[str] = Counter()
    sends = dist.isend

    def counted(tensor: Tensor, group: dist.ProcessGroup, group_dst: int) -> dist.Work | None:
        messages["gradients" if group is groups[1] else "activations"] += 1
        return sends(tensor, group=group, group_dst=group_dst)

    for module in modules:
        module.register_forward_hook(count)
    inputs = torch.ones(2 * MICRO_BATCHES, WIDTH).chunk(MICRO_BATCHES)
    with mock.patch("torch.distributed.isend", counted):
        for _ in range(2):
            seen.clear()
            pipeline.run(inputs)
    assert (pipeline.received(), pipeline.sent()) == (0, 0)
    return Seen(" ".join(seen), max(received), max(sent), messages)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "1f1b ahead=1-2"])
@pytest.mark.long("1f1b", "gpipe")
def test_ranks_act_as_written(name: str) -> None:
    written = orders(name, stages=3, micro_batches=MICRO_BATCHES)

    for stage, seen in enumerate(on_ranks(3, run, name, 1)):
        alive, first, last = in_flight(written[stage]), stage == 0, stage == 2
        assert seen.actions == " ".join(map(str, written[stage]))
        # Activations in flight and one ahead, a gradient in use and one ahead; two on the way.
        assert seen.received <= (0 if first else alive + 1) + (0 if last else 2)
        assert seen.sent <= (0 if last else alive) + (0 if first else GRADIENTS_ON_THE_WAY)
        assert seen.messages["activations"] == (0 if last else 2 * MICRO_BATCHES)
        assert seen.messages["gradients"] == (0 if first else 2 * MICRO_BATCHES)


@pytest.mark.spread(2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "virtual_stages", "ranks"),
    [
        ("interleaved", 2, 2),
        ("interleaved", 3, 4),
        ("interleaved-zb", 2, 4),
        ("zbv", 2, 3),
        ("dualpipe-v", 2, 3),
    ],
)
def test_ranks_of_several_stages_act_as_written(name: str, virtual_stages: int, ranks: int) -> None:
    written = orders(
        name,
        stages=ranks * virtual_stages,
        micro_batches=MICRO_BATCHES,
        virtual_stages=virtual_stages,
    )

    for rank, seen in enumerate(on_ranks(ranks, run, name, virtual_stages)):
        assert seen.actions == " ".join(map(str, written[rank]))
        alive = in_flight(written[rank])
        assert seen.received <= alive + 3 * virtual_stages
        assert seen.sent <= alive + GRADIENTS_ON_THE_WAY * virtual_stages


@pytest.mark.ranks
def test_a_stage_that_makes_another_shape_than_declared_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"stage 0 made .*\[2, 8\].* and declared .*\[1, 8\]"):
        on_ranks(2, run, "1f1b", 1, True)
